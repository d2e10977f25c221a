"""One trace of a function as a file: the program in StableHLO, by `jax.export`, and what it takes and gives."""

from __future__ import annotations

import inspect
import itertools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import export

from replicax._base import jax_internals, jaxprs, tracebacks
from replicax._base.specs import TensorSpec
from replicax._base.types import Tree, VariableAggregation
from replicax._engine.general_trace import GeneralTrace
from replicax._engine.program import Program
from replicax._passes.interpret import Interpreter, Rule
from replicax._passes.primitives import CALLS
from replicax._saved_model import structures
from replicax._saved_model.structures import Place
from replicax._tracing.protocols import State, storage_of, types_of

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
    if any(map(_only_calls_back, jaxprs.equations(trace.jaxpr))):
        tracebacks.warn(f"What {function.name} prints and asserts is not saved, nor what it calls back.")
    rows = [_rows(variable) for variable in (*function.read, *function.written)]
    entering = [row for each in rows[: len(function.read)] for row in each]
    leaving = [row for each in rows[len(function.read) :] for row in each]

    def program(state: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
        supplied = {slot: row.spread(leaf) for slot, row, leaf in zip(slots, entering, state)}
        outputs = trace.level.replay(trace.jaxpr, supplied, *arrays, evaluate=lambda j, *args: _Alone().run(j, args))
        return [row.gathered(leaf) for row, leaf in zip(leaving, outputs)] + outputs[len(leaving) :]

    program.__name__ = "".join(c if c.isalnum() else "_" for c in function.name)
    state = [kind for variable in function.read for kind in storage_of(variable).home.leaf_types(True)]
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


class _Alone(Interpreter[Any]):
    """Computes a function's jaxpr as another process can: on one device, and without what it prints and asserts."""

    def rule(self, eqn: jex.JaxprEqn) -> Rule[Any] | None:
        if eqn.primitive.name in ("sharding_constraint", "device_put"):
            return lambda eqn, operands: operands
        if _only_calls_back(eqn):
            return lambda eqn, operands: []
        inner = jaxprs.equations_in(eqn) if eqn.primitive.name in CALLS else ()
        return self.enter if any(self.rule(other) is not None for other in inner) else None


def _only_calls_back(eqn: jex.JaxprEqn) -> bool:
    return jax_internals.callback_of(eqn) is not None and not eqn.outvars


class _Rows(NamedTuple):
    """How many values of a leaf there are, where each replica may have its own; 0 where they share one."""

    values: int
    sums: bool

    def spread(self, leaf: jax.Array) -> jax.Array:
        """Returns the replicas' values, of which the variable's value is `leaf`."""
        if not self.values:
            return leaf
        values = jnp.broadcast_to(leaf, (self.values, *leaf.shape))
        return values.at[1:].set(0) if self.sums else values  # a share of an integer would be rounded

    def gathered(self, leaf: jax.Array) -> jax.Array:
        """Returns the variable's value for the replicas' values."""
        if not self.values:
            return leaf
        return leaf.sum(axis=0, dtype=leaf.dtype) if self.sums else leaf[0]


def _rows(variable: State) -> list[_Rows]:
    storage = storage_of(variable)
    if storage.runner is not None or any(storage.home.cut_axis(i) is not None for i in range(len(types_of(variable)))):
        raise NotExportedError(
            f"{variable!r} is divided among replicas or servers, and so is what functions compute with it. Save in a "
            "program without such a strategy, in which a checkpoint restores the variables."
        )
    kinds = zip(storage.home.leaf_types(False), storage.home.leaf_types(True))
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
