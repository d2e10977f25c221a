"""What a gradient tape records: the trace to which JAX binds primitives while it records, and the pullbacks kept.

An operation that reads a tracked array is run through `jax.vjp`, and its pullback is kept; the others go straight to
the trace below. Values stay what they are without a tape (concrete arrays, or the tracers of a surrounding `jax.jit`),
so an array is known by its identity: the recorder holds each tracked array, and no other can get its `id`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.extend.core.primitives import jit_p
from jax.interpreters.ad import Zero
from jax.typing import ArrayLike

from replicax._base.jaxprs import AnyJaxpr, jaxprs_in, opened
from replicax._base.thread_state import current
from replicax._base.types import Tree

Cotangent: TypeAlias = Any  # an array, or a `Zero`, which in JAX's own types is of no type
Pullback: TypeAlias = Callable[[list[Cotangent]], Sequence[Cotangent]]


class Record(NamedTuple):
    """One differentiable operation: the ids of its arrays, and its function from cotangents to cotangents.

    `outputs` has None for what is not differentiable, and `zeros` stand for the cotangents of outputs that
    nothing depends on.
    """

    inputs: list[int]
    outputs: list[int | None]
    zeros: list[Zero]
    pullback: Pullback
    symbolic: bool  # whether the pullback may be given symbolic zeros, from which nothing is computed
    again: Callable[[], Pullback]  # makes the pullback anew, for persistent tapes

    def pull(self, cotangents: list[Cotangent]) -> Sequence[Cotangent]:
        """Returns the cotangents of the operands, of those of the outputs."""
        if self.symbolic:
            # `lax.scan` of JAX 0.10 fails on some symbolic zeros; a second try does no harm, as all is pure.
            with contextlib.suppress(ValueError):
                return self.pullback(cotangents)
        return self.pullback([ct.instantiate() if isinstance(ct, Zero) else ct for ct in cotangents])

    def pull_again(self, cotangents: list[Cotangent]) -> Sequence[Cotangent]:
        """Pulls back with a new pullback, so that the tape itself sees how the result depends on the operands."""
        return self._replace(pullback=self.again()).pull(cotangents)


class TapedVariable(Protocol):
    """What tapes need of a variable; its class has the mark `_replicax_variable`."""

    @property
    def _treedef(self) -> jax.tree_util.PyTreeDef: ...
    @property
    def trainable(self) -> bool: ...

    def read_value(self) -> Tree: ...


def forget_traces() -> None:
    """Have JAX trace functions that read variables again, because tapes follow other variables now."""
    if current.trace_caches:
        current.trace_caches[-1].note_change()


class Recorder:
    """The operations that one tape has recorded, and the reads of variables.

    Attributes:
        on: whether operations are recorded now.
        persistent: whether the records are used more than once.
        trace: the tape's trace, while its context is entered.
        records: None where the tape was never entered, or is used up.
        tracked: by id, the arrays that depend on something watched.
        watched: by id, the variables that are.
        reads: for each variable and each of its leaves, the arrays that it was read as.
        copies: by variable, leaf and array that was read, that array and the copy that was handed out.
        read_beside: the arrays that stand for each variable that eager replicas read.
    """

    def __init__(self, persistent: bool, watch_accessed_variables: bool):
        self.persistent, self._watch_accessed_variables = persistent, watch_accessed_variables
        self.on = False
        self.trace: TapeTrace | None = None
        self.records: list[Record] | None = None
        self.watched: dict[int, TapedVariable] = {}
        self._forget()

    def _forget(self) -> None:
        self.tracked: dict[int, jax.Array] = {}
        self.reads: dict[int, list[set[int]]] = {}
        self.copies: dict[tuple[int, int, int], tuple[jax.Array, jax.Array]] = {}
        self.read_beside: dict[int, list[jax.Array]] = {}

    def start(self) -> None:
        """Records from now on; anew, where all was used up."""
        if self.records is None:
            self.records = []
            self.watched = {}
            self._forget()
        self.on = True
        forget_traces()

    def use_up(self) -> None:
        """Lets go of what was recorded, but for which variables were watched."""
        self.on, self.records = False, None
        self._forget()

    def follows(self, variable: TapedVariable) -> bool:
        """Returns whether reads of a variable are recorded while the tape is on."""
        return id(variable) in self.watched or (self._watch_accessed_variables and bool(variable.trainable))

    def mark(self, variable: TapedVariable, leaves: list[jax.Array]) -> list[jax.Array]:
        """Tracks the arrays that a variable was read as, and returns them."""
        self.watched.setdefault(id(variable), variable)
        reads = self.reads.setdefault(id(variable), [set() for _ in leaves])
        for leaf, ids in zip(leaves, reads):
            if is_inexact(leaf):
                ids.add(self.track(leaf))
        return leaves

    def track(self, array: jax.Array) -> int:
        """Tracks an array, and returns its id."""
        self.tracked[id(array)] = array
        return id(array)

    def tracks(self, array: object) -> bool:
        """Returns whether an operation on this array is to be recorded."""
        return self.on and id(array) in self.tracked

    def add(
        self,
        inputs: Iterable[ArrayLike],
        outputs: Sequence[jax.Array],
        pullback: Pullback,
        symbolic: bool = True,
        again: Callable[[], Pullback] | None = None,
        ids: list[int | None] | None = None,
    ) -> None:
        """Records that `outputs` were made of `inputs`; `ids` has None for outputs without a gradient."""
        assert self.records is not None
        ids = [self.track(x) for x in outputs] if ids is None else ids
        zeros = [Zero(jax.typeof(x).to_tangent_aval()) for x in outputs]
        self.records.append(
            Record([id(x) for x in inputs], ids, zeros, pullback, symbolic, again or (lambda: pullback))
        )

    def path_from(self, sources: set[int]) -> tuple[list[Record], set[int]]:
        """Returns the records that depend on the arrays with these ids, and the ids of all arrays that do."""
        assert self.records is not None
        reached, path = set(sources), []
        for record in self.records:
            if not reached.isdisjoint(record.inputs):
                reached.update(i for i in record.outputs if i is not None)
                path.append(record)
        return path, reached


class TapeTrace(jax.core.Trace):
    """The trace of one tape, on top of the trace that was current when the tape was entered."""

    def __init__(self, recorder: Recorder, parent_trace: jax.core.Trace):
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self.parent_trace = parent_trace

    def stage_value(self, value: ArrayLike) -> ArrayLike:
        """Returns what stands for a value in the trace below, tracked if the value is."""
        staged: jax.Array = self.parent_trace.stage_value(value)
        if staged is not value and self.recorder.tracks(value):
            (staged,) = self._record([value], [value], [staged], identity, True, lambda: identity)
        return staged

    # JAX calls the `process_` methods, each for one kind of primitive. Their arguments are JAX's.

    def process_primitive(
        self, primitive: jex.Primitive, args: Sequence[ArrayLike], params: dict[str, object], /
    ) -> object:
        """Runs a primitive that takes no functions."""
        if self.recorder.on:
            closed_over = [c for c in _constants(params) if self.recorder.tracks(c)]
            if closed_over and primitive is jit_p:
                # Evaluated here, what the function closes over is an operand like others.
                with jex.set_current_trace(self):
                    return jex.jaxpr_as_fun(params["jaxpr"])(*args)
            if closed_over:
                return self._process_opaque(primitive, args, params, closed_over, NotImplementedError(_CLOSES_OVER))
        return self._process(primitive, args, params, python=False)

    def _process_functions(self, primitive: jex.Primitive, /, *rest: Any, **params: object) -> object:
        """Runs a primitive that takes functions, which stand before its operands."""
        *functions, args = rest
        return self._process(primitive, args, {**params, "subfuns": functions})

    process_custom_jvp_call = process_custom_vjp_call = process_shard_map = _process_functions

    def process_call(
        self, primitive: jex.Primitive, fun: object, args: Sequence[ArrayLike], params: dict[str, object], /
    ) -> object:  # JAX 0.10 only
        """Runs a call of a function."""
        return self._process_functions(primitive, fun, args, **params)

    def _process(
        self, primitive: jex.Primitive, args: Sequence[ArrayLike], params: dict[str, object], python: bool = True
    ) -> object:
        """Runs a primitive, recorded if it reads what is tracked. `python`: it runs functions of the user's."""
        which = [i for i, arg in enumerate(args) if self.recorder.tracks(arg)]
        if not which:
            return self._pass_on(primitive, args, params)
        if primitive.name == "stop_gradient":
            out = self._pass_on(primitive, args, params)
            return self._copy(out) if out is args[0] else out

        structure: Any = None

        def call(*differentiated: jax.Array) -> list[jax.Array]:
            nonlocal structure
            operands = list(args)
            for i, value in zip(which, differentiated):
                operands[i] = value
            structure = primitive.bind(*operands, **params)
            return list(structure) if primitive.multiple_results else [structure]

        inputs = [args[i] for i in which]
        try:
            with jex.set_current_trace(self.parent_trace):
                outs, pullback = jax.vjp(call, *inputs)
        except (NotImplementedError, ValueError) as error:
            if python:
                raise
            # There is no gradient (of a callback, say). If the primitive itself is at fault, it raises again.
            return self._process_opaque(primitive, args, params, inputs, error)
        again = (lambda: jax.vjp(call, *inputs)[1]) if self.recorder.persistent else None
        outs = self._record(args, inputs, outs, pullback, not python, again)
        if not primitive.multiple_results:
            return outs[0]
        return structure.update(outs) if hasattr(structure, "update") else outs  # shard_map has a class of its own

    def _process_opaque(
        self,
        primitive: jex.Primitive,
        args: Sequence[ArrayLike],
        params: dict[str, object],
        inputs: Sequence[ArrayLike],
        error: Exception,
    ) -> object:
        """Runs a primitive that cannot be differentiated; asking for its gradient raises the error."""
        out = self._pass_on(primitive, args, params)
        outs = out if primitive.multiple_results else [out]
        outs = self._record(args, inputs, outs, raising(error), True, lambda: raising(error))
        return outs if primitive.multiple_results else outs[0]

    def _pass_on(self, primitive: jex.Primitive, args: Sequence[ArrayLike], params: dict[str, object]) -> Any:
        return primitive.bind_with_trace(self.parent_trace, args, [jax.typeof(arg) for arg in args], params)

    def _copy(self, array: ArrayLike) -> jax.Array:
        """Returns the same value under an identity of its own."""
        with jex.set_current_trace(self.parent_trace):
            return jnp.copy(array)

    def _record(
        self,
        args: Sequence[ArrayLike],
        inputs: Sequence[ArrayLike],
        outs: Iterable[jax.Array],
        pullback: Pullback,
        symbolic: bool,
        again: Callable[[], Pullback] | None,
    ) -> list[jax.Array]:
        """Keeps a pullback and returns `outs`, each tracked one as an array that was not tracked before."""
        tracked = self.recorder.tracked
        ids: list[int | None] = []
        outs = list(outs)
        for i, out in enumerate(outs):
            if not is_inexact(out):
                ids.append(None)
                continue
            if id(out) in tracked:  # an operand or another output, passed through by JAX
                out = outs[i] = self._copy(out)
            elif any(out is arg for arg in args):  # an operand that does not depend on any source
                ids.append(None)
                continue
            ids.append(self.recorder.track(out))
        if any(ids):
            self.recorder.add(inputs, outs, pullback, symbolic, again, ids)
        return outs


_CLOSES_OVER = (
    "GradientTape: a jitted function inside of lax.scan, lax.cond or another such function closes over an array that "
    "the gradient is to go through. Pass the array to the jitted function as an argument."
)

_constants_of: weakref.WeakKeyDictionary[AnyJaxpr, tuple[jax.Array, ...]] = weakref.WeakKeyDictionary()


def _constants(params: dict[str, object]) -> Iterator[jax.Array]:
    """Yields the arrays that are constants in the jaxprs of a primitive's parameters, at any depth."""
    for jaxpr in jaxprs_in([*params.values()]):
        found = _constants_of.get(jaxpr)
        if found is None:
            inner, consts = opened(jaxpr)
            inside = (c for eqn in inner.eqns for c in _constants(eqn.params))
            found = _constants_of[jaxpr] = (*consts, *inside)
        yield from found


def identity(cotangents: list[Cotangent]) -> Sequence[Cotangent]:
    """Returns the cotangents: the pullback of a copy."""
    return cotangents


def raising(error: Exception) -> Pullback:
    """Returns a pullback that raises this error."""

    def pullback(cotangents: list[Cotangent]) -> Sequence[Cotangent]:
        raise error

    return pullback


def is_inexact(value: object) -> TypeGuard[jax.Array]:
    """Returns whether a value is a floating-point or complex array."""
    return isinstance(value, jax.Array) and bool(jnp.issubdtype(value.dtype, jnp.inexact))


def below(trace: jax.core.Trace | None) -> jax.core.Trace | None:
    """Returns the trace below any gradient tapes."""
    while isinstance(trace, TapeTrace):
        trace = trace.parent_trace
    return trace


def walk(
    path: list[Record],
    reached: set[int],
    seeds: Iterable[tuple[int, Cotangent]],
    wanted: set[int],
    pull: Callable[[Record, list[Cotangent]], Sequence[Cotangent]],
) -> dict[int, Cotangent]:
    """Runs the pullbacks of `path` backwards, emptying it.

    Args:
        path: the records.
        reached: ids of the arrays that depend on those that are wanted.
        seeds: the cotangents of the targets, by id.
        wanted: ids of arrays.
        pull: runs the pullback of a record.

    Returns:
        The cotangents of the arrays that are wanted, by id.
    """
    cotangents: dict[int, Cotangent] = {}

    def add(i: int, cotangent: Cotangent) -> None:
        cotangents[i] = jax.lax.add(cotangents[i], cotangent) if i in cotangents else cotangent

    for i, seed in seeds:
        if i in reached:
            add(i, seed)
    while path:
        record = path.pop()
        if not any(i in cotangents for i in record.outputs):
            continue
        # All that reads these outputs has been seen, so their cotangents are complete.
        outs = [cotangents.get(i, zero) for i, zero in zip(record.outputs, record.zeros)]  # type: ignore[arg-type]
        for output in record.outputs:
            if output not in wanted:
                cotangents.pop(output, None)  # type: ignore[arg-type]
        for i, cotangent in zip(record.inputs, pull(record, outs)):
            if i in reached:
                add(i, cotangent)
    return cotangents
