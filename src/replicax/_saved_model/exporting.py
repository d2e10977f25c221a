"""One trace of a function as a file: the program in StableHLO, by `jax.export`, and what it takes and gives."""

from __future__ import annotations

import inspect
import itertools
from typing import NamedTuple, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import export

from replicax._base import jax_internals, jaxprs, tracebacks
from replicax._base.specs import TensorSpec
from replicax._base.types import Tree, VariableAggregation
from replicax._engine.general_trace import GeneralTrace
from replicax._engine.program import Program
from replicax._saved_model import structures
from replicax._saved_model.structures import Place
from replicax._tracing.state import State

Trace: TypeAlias = Program | GeneralTrace

# The platforms that a function is exported for, if its operations are there for all of them.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


class NotExportedError(ValueError):
    """A function cannot be saved."""


class Concrete(NamedTuple):
    """A function for arguments of one kind.

    Attributes:
        name: the function's.
        trace: what is exported.
        args, kwargs: its arguments as its Python function takes them, places for tensors.
        results: what it returns, places for tensors.
    """

    name: str
    trace: Trace
    args: tuple[Tree, ...]
    kwargs: dict[str, Tree]
    results: Tree

    @property
    def read(self) -> list[State]:
        """The variables that the program takes, before the tensors of the arguments."""
        return [self.trace.level.variables[key] for key in self.trace.level.inputs]

    @property
    def written(self) -> list[State]:
        """The variables whose new values the program returns, before the tensors of the results."""
        return list(self.trace.level.written.values())

    @property
    def inputs(self) -> list[Place]:
        """The arguments that are tensors, in the order in which the program takes them."""
        return sorted(structures.places([self.args, self.kwargs]))


def concrete(
    name: str,
    trace: Trace,
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree],
    parameters: inspect.Signature | None = None,
) -> Concrete:
    """Returns what a trace is saved as.

    Args:
        name: the function's.
        trace: its trace.
        args, kwargs: the arguments that it was made for, specs in place of tensors.
        parameters: those of the Python function, by which arguments are brought in order.

    Raises:
        NotExportedError: it takes or returns what cannot be saved.
    """
    level = trace.level
    if level.local or level.meshes or (isinstance(trace, Program) and trace.reads):
        raise NotExportedError(
            f"{name} runs replicas or takes elements of a dataset: save the function of one replica."
        )
    count = itertools.count()

    def place(leaf: Tree) -> Tree:
        return Place(next(count), leaf) if isinstance(leaf, TensorSpec) else leaf

    args, kwargs = jax.tree.map(place, (args, kwargs), is_leaf=lambda leaf: leaf is None)
    if parameters is not None:
        bound = parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args, bound.kwargs
    try:
        results = trace.results.placed(lambda i: Place(i, _spec(trace.jaxpr.out_avals[trace.state_count + i])))
        structures.encoded([args, kwargs, results])
    except TypeError as error:
        raise NotExportedError(f"{name} takes or returns a value that cannot be saved. {error}") from None
    return Concrete(name, trace, args, kwargs, results)


def _spec(kind: jax.core.ShapedArray) -> TensorSpec:
    return TensorSpec(kind.shape, kind.dtype)


def exported(function: Concrete) -> tuple[bytes, tuple[str, ...], int]:
    """Returns a function's program as `jax.export` writes it, its platforms, and how often it can be differentiated.

    Raises:
        NotExportedError: JAX cannot export it.
    """
    trace = function.trace
    slots = [slot for slots in trace.level.inputs.values() for slot in slots]
    jaxpr = _without_callbacks(function)
    rows = [_rows(variable) for variable in (*function.read, *function.written)]
    entering = [row for each in rows[: len(function.read)] for row in each]
    leaving = [row for each in rows[len(function.read) :] for row in each]

    def program(state: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
        supplied = {slot: row.spread(leaf) for slot, row, leaf in zip(slots, entering, state)}
        outputs = trace.level.replay(jaxpr, supplied, *arrays)
        return [row.gathered(leaf) for row, leaf in zip(leaving, outputs)] + outputs[len(leaving) :]

    program.__name__ = "".join(c if c.isalnum() else "_" for c in function.name)
    state = [kind for variable in function.read for kind in variable._storage.leaf_types(True)]
    arguments = [jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in trace.jaxpr.in_avals]
    first: Exception | None = None
    for platforms in (PLATFORMS, (jax.default_backend(),)):
        try:
            made = export.export(jax.jit(program), platforms=platforms)(state, arguments)
        except Exception as error:
            first = first or error
        else:
            return _serialized(function, made, platforms)
    raise _refused(function, first) from first


def _without_callbacks(function: Concrete) -> jex.ClosedJaxpr:
    """Returns a function's jaxpr without what it prints and asserts, which no other process could do."""
    closed = function.trace.jaxpr
    jaxpr = closed.jaxpr
    kept = [eqn for eqn in jaxpr.eqns if jax_internals.callback_of(eqn) is None or eqn.outvars]
    if len(kept) == len(jaxpr.eqns):
        return closed
    tracebacks.warn(
        f"What {function.name} prints, asserts and calls back is not saved: its program runs without Python."
    )
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    part = jax_internals.part_of_jaxpr(jaxpr, kept, inputs, jaxpr.outvars)
    return jex.ClosedJaxpr(part.jaxpr.replace(constvars=jaxpr.constvars, invars=jaxpr.invars), closed.consts)


class _Rows(NamedTuple):
    """How many values of a leaf there are, where each replica may have its own; 0 where they share one."""

    values: int
    sums: bool

    def spread(self, leaf: jax.Array) -> jax.Array:
        """Returns the replicas' values, of which the variable's value is `leaf`."""
        if not self.values:
            return leaf
        share = leaf / self.values if self.sums else leaf
        return jnp.broadcast_to(share.astype(leaf.dtype), (self.values, *leaf.shape))

    def gathered(self, leaf: jax.Array) -> jax.Array:
        """Returns the variable's value for the replicas' values."""
        if not self.values:
            return leaf
        return leaf.sum(axis=0, dtype=leaf.dtype) if self.sums else leaf[0]


def _rows(variable: State) -> list[_Rows]:
    storage = variable._storage
    if storage.runner is not None or any(storage.cut_axis(i) is not None for i in range(len(variable._types))):
        raise NotExportedError(
            f"{variable!r} is divided among replicas or servers, and so is what functions compute with it. Save in a "
            "program without such a strategy, in which a checkpoint restores the variables."
        )
    kinds = zip(storage.leaf_types(False), storage.leaf_types(True))
    sums = getattr(variable, "aggregation", None) is VariableAggregation.SUM
    return [_Rows(whole.shape[0] if whole.shape != own.shape else 0, sums) for whole, own in kinds]


def _refused(function: Concrete, error: Exception | None) -> NotExportedError:
    if any(jax_internals.callback_of(eqn) is not None for eqn in jaxprs.equations(function.trace.jaxpr)):
        return NotExportedError(
            f"{function.name} cannot be saved: it calls back to Python, as tf.py_function does, and tf.print and "
            "assertions in branches and loops. Leave these out of functions that are saved."
        )
    return NotExportedError(f"{function.name} cannot be saved, since JAX cannot export it: {error}")


def _serialized(
    function: Concrete, made: export.Exported, platforms: tuple[str, ...]
) -> tuple[bytes, tuple[str, ...], int]:
    first: Exception | None = None
    for derivatives in (1, 0):  # it may have no gradient
        try:
            return bytes(made.serialize(vjp_order=derivatives)), platforms, derivatives
        except Exception as error:
            first = first or error
    raise _refused(function, first) from first
