"""`GradientTape`: reverse-mode differentiation of what happens between two points in time.

While a tape records, JAX binds primitives to the tape's own trace. One that reads a tracked array is run
through `jax.vjp` and its pullback is kept; the others go straight to the trace below. `gradient` walks the
pullbacks backwards. Values stay what they are without a tape (concrete arrays, or the tracers of a surrounding
`jax.jit`), so an array is known by its identity: the tape holds each tracked array, and no other can get its `id`.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.extend.core.primitives import jit_p
from jax.interpreters.ad import Zero

from replicax._base import foreign_state, tracebacks
from replicax._base import nest as _nest
from replicax._base.jax_internals import current_trace, single
from replicax._tracing import trace_caches


class UnconnectedGradients(enum.Enum):
    """What stands for the gradient where the target does not depend on the source: None or zeros.

    Wherever a member is expected, its value (`"none"`, `"zero"`) does as well.

    >>> import replicax as rx
    >>> rx.UnconnectedGradients("zero")
    <UnconnectedGradients.ZERO: 'zero'>
    """

    NONE = "none"
    ZERO = "zero"


class _Record(NamedTuple):
    """One differentiable operation: the ids of its arrays, and its function from cotangents to cotangents.

    `outputs` has None for what is not differentiable, and `zeros` stand for the cotangents of outputs that
    nothing depends on.
    """

    inputs: list[int]
    outputs: list[int | None]
    zeros: list[Zero]
    pullback: Callable[[list[Any]], Sequence[Any]]
    symbolic: bool  # whether the pullback may be given symbolic zeros, from which nothing is computed
    again: Callable[[], Any] | None = None  # what makes the pullback anew, for persistent tapes

    def pull(self, cotangents: list[Any]) -> Sequence[Any]:
        if self.symbolic:
            # `lax.scan` of JAX 0.10 fails on some symbolic zeros; a second try does no harm, as all is pure.
            with contextlib.suppress(ValueError):
                return self.pullback(cotangents)
        return self.pullback([ct.instantiate() if isinstance(ct, Zero) else ct for ct in cotangents])

    def pull_again(self, cotangents: list[Any]) -> Sequence[Any]:
        """The same, where the tape itself is to see how the result depends on what the operation read."""
        assert self.again is not None
        return self._replace(pullback=self.again()).pull(cotangents)


class _TapeTrace(jax.core.Trace):
    """The trace of one tape, on top of the trace that was current when the tape was entered."""

    def __init__(self, tape: GradientTape, parent_trace: jax.core.Trace):
        super().__init__()
        self.tape = tape
        self.parent_trace = parent_trace

    def stage_value(self, value):
        staged = self.parent_trace.stage_value(value)
        if staged is not value and self.tape._recording and id(value) in self.tape._tracked:
            (staged,) = self._record([value], [value], [staged], _identity, True, lambda: _identity)
        return staged

    def process_primitive(self, primitive, args, params, /):
        if self.tape._recording:
            closed_over = [c for c in _constants(params) if id(c) in self.tape._tracked]
            if closed_over and primitive is jit_p:
                # Evaluated here, what the function closes over is an operand like others.
                with jex.set_current_trace(self):
                    return jex.jaxpr_as_fun(params["jaxpr"])(*args)
            if closed_over:
                return self._process_opaque(primitive, args, params, closed_over, NotImplementedError(_CLOSES_OVER))
        return self._process(primitive, args, params, python=False)

    def process_call(self, primitive, fun, args, params, /):  # JAX 0.10 only
        return self._process(primitive, args, {**params, "subfuns": (fun,)})

    def process_custom_jvp_call(self, primitive, fun, jvp, args, /, **params):
        return self._process(primitive, args, {**params, "subfuns": (fun, jvp)})

    def process_custom_vjp_call(self, primitive, fun, fwd, bwd, args, /, **params):
        return self._process(primitive, args, {**params, "subfuns": (fun, fwd, bwd)})

    def process_shard_map(self, primitive, fun, args, /, **params):
        return self._process(primitive, args, {**params, "subfuns": (fun,)})

    def _process(self, primitive, args, params, python=True):
        """Runs a primitive, recorded if it reads what is tracked. `python`: it runs functions of the user's."""
        which = [i for i, arg in enumerate(args) if id(arg) in self.tape._tracked] if self.tape._recording else []
        if not which:
            return self._pass_on(primitive, args, params)
        if primitive.name == "stop_gradient":
            out = self._pass_on(primitive, args, params)
            return self._copy(out) if out is args[0] else out

        structure: Any = None

        def call(*differentiated):
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
        again = (lambda: jax.vjp(call, *inputs)[1]) if self.tape._persistent else None
        outs = self._record(args, inputs, outs, pullback, not python, again)
        if not primitive.multiple_results:
            return outs[0]
        return structure.update(outs) if hasattr(structure, "update") else outs  # shard_map has a class of its own

    def _process_opaque(self, primitive, args, params, inputs, error):
        """Runs a primitive that cannot be differentiated, which matters only to who asks for its gradient."""
        out = self._pass_on(primitive, args, params)
        outs = out if primitive.multiple_results else [out]
        outs = self._record(args, inputs, outs, _raiser(error), True, lambda: _raiser(error))
        return outs if primitive.multiple_results else outs[0]

    def _pass_on(self, primitive, args, params):
        return primitive.bind_with_trace(self.parent_trace, args, [jax.typeof(arg) for arg in args], params)

    def _copy(self, array):
        """The same value under an identity of its own."""
        with jex.set_current_trace(self.parent_trace):
            return jnp.copy(array)

    def _record(self, args, inputs, outs, pullback, symbolic, again):
        """Keeps a pullback and returns `outs`, each tracked one as an array that was not tracked before."""
        tracked = self.tape._tracked
        ids: list[int | None] = []
        outs = list(outs)
        for i, out in enumerate(outs):
            if not _is_inexact(out):
                ids.append(None)
                continue
            if id(out) in tracked:  # an operand or another output, passed through by JAX
                out = outs[i] = self._copy(out)
            elif any(out is arg for arg in args):  # an operand that does not depend on any source
                ids.append(None)
                continue
            tracked[id(out)] = out
            ids.append(id(out))
        if any(ids):
            assert self.tape._records is not None
            zeros = [Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
            self.tape._records.append(_Record([id(x) for x in inputs], ids, zeros, pullback, symbolic, again))
        return outs


_CLOSES_OVER = (
    "GradientTape: a jitted function inside of lax.scan, lax.cond or another such function closes over an array that "
    "the gradient is to go through. Pass the array to the jitted function as an argument."
)

_constants_of: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def _constants(params: dict[str, Any]) -> Iterator[Any]:
    """The arrays that are constants in the jaxprs of a primitive's parameters, at any depth."""
    for value in params.values():
        for jaxpr in value if isinstance(value, tuple) else (value,):
            if not hasattr(jaxpr, "eqns"):
                continue
            found = _constants_of.get(jaxpr)
            if found is None:
                inside = (c for eqn in jaxpr.eqns for c in _constants(eqn.params))
                found = _constants_of[jaxpr] = (*getattr(jaxpr, "consts", ()), *inside)
            yield from found


def _identity(cotangents: list[Any]) -> list[Any]:
    return cotangents


def _raiser(error: Exception) -> Callable[[list[Any]], Sequence[Any]]:
    def pullback(cotangents):
        raise error

    return pullback


class _Tapes(threading.local):
    def __init__(self):
        self.entered: list[GradientTape] = []
        self.outside: Sequence[GradientTape] = ()  # of the eager replica that runs here


_tapes = _Tapes()  # JAX's current trace, too, is one for each thread


class GradientTape:
    """Records operations, and differentiates what they computed.

    Operations are recorded inside of the tape's context if they depend on something *watched*: an array given to
    `watch`, or a trainable variable that was read (unless `watch_accessed_variables=False`). It works at the top
    level, inside of `jax.jit`, `jax.vmap` and `jax.shard_map`, and in a nest of tapes.

    Gradients of complex numbers follow JAX's convention, the conjugate of TensorFlow's. What a function under
    `jax.shard_map`, `jax.custom_vjp` or `jax.custom_jvp` reads without taking it as an argument is not differentiated.

    >>> import jax.numpy as jnp
    >>> import replicax as rx
    >>> x = jnp.asarray(3.0)
    >>> with rx.GradientTape() as tape:
    ...     tape.watch(x)
    ...     y = x * x
    >>> float(y), float(tape.gradient(y, x))
    (9.0, 6.0)

    A tape inside of a tape gives second derivatives:

    >>> with rx.GradientTape() as outer:
    ...     outer.watch(x)
    ...     with rx.GradientTape() as inner:
    ...         inner.watch(x)
    ...         y = x**3
    ...     first = inner.gradient(y, x)
    >>> float(first), float(outer.gradient(first, x))
    (27.0, 18.0)

    Args:
        persistent: whether `gradient`, `jacobian` and `batch_jacobian` can be called more than once. What was
            recorded is then held until the tape goes.
        watch_accessed_variables: whether trainable variables are watched when they are read.
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True):
        self._persistent = persistent
        self._watch_accessed_variables = watch_accessed_variables
        self._recording = False
        self._trace: _TapeTrace | None = None  # while inside of the context
        self._records: list[_Record] | None = None  # None: never entered, or used up
        self._clear()

    def _clear(self) -> None:
        self._tracked: dict[int, jax.Array] = {}  # what depends on something watched
        self._watched: dict[int, Any] = {}  # variables
        self._reads: dict[int, list[set[int]]] = {}  # for each variable and leaf, the arrays it was read as
        self._copies: dict[tuple[int, int, int], tuple[Any, jax.Array]] = {}  # what `on_read` made
        self._read_beside: dict[int, list[jax.Array]] = {}  # what stands for each variable that eager replicas read

    def _start(self) -> None:
        if self._records is None:
            self._records = []
            self._clear()
        self._recording = True
        trace_caches.note_change()

    def __enter__(self) -> GradientTape:
        foreign_state.join()
        if self._trace is not None:
            raise ValueError("Tape is already recording.")
        self._start()
        self._trace = _TapeTrace(self, current_trace())
        _tapes.entered.append(self)
        jex.set_current_trace(self._trace).__enter__()  # and `__exit__` sets the one before
        return self

    def __exit__(self, *_: object) -> None:
        trace, self._trace = self._trace, None
        self._recording = False
        if self in _tapes.entered:
            _tapes.entered.remove(self)
        # A tape that is left before one inside of it stays below that one, passing everything on.
        if trace is not None and current_trace() is trace:
            below = trace.parent_trace
            while isinstance(below, _TapeTrace) and below.tape._trace is not below:
                below = below.parent_trace
            jex.set_current_trace(below).__enter__()

    def watch(self, tensor: Any) -> None:
        """Watches an array, a variable, or every one in a nest of them.

        A variable is followed from its next read on, whether or not it is trainable.

        >>> import jax.numpy as jnp
        >>> import replicax as rx
        >>> parameters = {"w": jnp.asarray(2.0), "b": jnp.asarray(1.0)}
        >>> with rx.GradientTape() as tape:
        ...     tape.watch(parameters)
        ...     y = parameters["w"] * 5.0 + parameters["b"]
        >>> {name: float(gradient) for name, gradient in tape.gradient(y, parameters).items()}
        {'b': 1.0, 'w': 5.0}
        """
        leaves, _ = _flatten(tensor, "What a GradientTape watches")
        if self._records is None:
            raise ValueError("A tape watches inside of its context only: call `watch` within `with tape:`.")
        for leaf in leaves:
            if is_variable(leaf):
                self._watched[id(leaf)] = leaf
                trace_caches.note_change()
            elif _is_inexact(leaf):
                self._tracked[id(leaf)] = leaf
            else:
                message = f"The dtype of the watched tensor must be floating (e.g. float32), got {leaf.dtype}"
                tracebacks.warn(message)

    @contextlib.contextmanager
    def stop_recording(self) -> Iterator[None]:
        """A context inside of the tape's own in which nothing is recorded.

        >>> import jax.numpy as jnp
        >>> import replicax as rx
        >>> x = jnp.asarray(3.0)
        >>> with rx.GradientTape(persistent=True) as tape:
        ...     tape.watch(x)
        ...     y = x * x
        ...     with tape.stop_recording():
        ...         unrecorded = x * x
        >>> float(tape.gradient(y, x)), tape.gradient(unrecorded, x)
        (6.0, None)
        """
        if not self._recording:
            raise ValueError("Attempted to stop recording on a tape which is not recording.")
        self._recording = False
        trace_caches.note_change()
        try:
            yield
        finally:
            if self._trace is not None:
                self._start()

    def reset(self) -> None:
        """Forgets what was recorded and watched, as if the tape had just been entered.

        >>> import jax.numpy as jnp
        >>> import replicax as rx
        >>> x = jnp.asarray(3.0)
        >>> with rx.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = x * x
        ...     tape.reset()
        ...     tape.watch(x)
        ...     z = x + x
        >>> float(tape.gradient(z, x))
        2.0
        """
        if not self._recording:
            raise ValueError("Tape is not recording.")
        self._records = None
        self._start()

    def watched_variables(self) -> tuple[Any, ...]:
        """The variables watched so far, each once, in the order of their first use.

        >>> import replicax as rx
        >>> v = rx.Variable(2.0)
        >>> with rx.GradientTape() as tape:
        ...     y = v * v
        >>> [watched is v for watched in tape.watched_variables()]
        [True]
        """
        return tuple(self._watched.values())

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
    ) -> Any:
        """The gradient of `target`, summed over its elements, with respect to each of `sources`.

        Args:
            target: an array or variable, or a nest of them whose gradients are added up.
            sources: an array or variable, or a nest of them.
            output_gradients: what each element of `target` counts, in the structure of `target`; one by default.
            unconnected_gradients: what to give for sources that `target` does not depend on.

        Returns:
            The gradients, in the structure of `sources`.

        >>> import jax.numpy as jnp
        >>> import replicax as rx
        >>> x, unused = jnp.asarray([1.0, 2.0]), jnp.asarray(0.0)
        >>> with rx.GradientTape() as tape:
        ...     tape.watch([x, unused])
        ...     y = x * x
        >>> tape.gradient(y, [x, unused], output_gradients=jnp.asarray([1.0, 10.0]))
        [Array([ 2., 40.], dtype=float32), None]
        """
        targets, seeds = self._targets(target, output_gradients)
        return self._differentiate(targets, sources, unconnected_gradients, (), lambda pull: pull(seeds), once=True)

    def jacobian(
        self,
        target: Any,
        sources: Any,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Any:
        """The derivative of every element of `target` with respect to every element of each of `sources`.

        Args:
            target: an array.
            sources: an array or variable, or a nest of them.
            unconnected_gradients: what to give for sources that `target` does not depend on.
            parallel_iterations: accepted for compatibility.
            experimental_use_pfor: whether the rows are computed at once under `jax.vmap`, or one after another.

        Returns:
            Arrays of the shape `target.shape + source.shape`, in the structure of `sources`.

        >>> import jax.numpy as jnp
        >>> import replicax as rx
        >>> x = jnp.asarray([1.0, 2.0])
        >>> with rx.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = x * x
        >>> tape.jacobian(y, x)
        Array([[2., 0.],
               [0., 4.]], dtype=float32)
        """
        (y,), (seed,) = self._one_target(target)

        def rows(pull):
            basis = jnp.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape)
            slopes = _for_each(lambda row: pull([row]), basis, experimental_use_pfor)
            return [s if s is None else s.reshape(*y.shape, *s.shape[1:]) for s in slopes]

        return self._differentiate([y] if seed else [], sources, unconnected_gradients, y.shape, rows)

    def batch_jacobian(
        self,
        target: Any,
        source: Any,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Any:
        """The Jacobian of each example: of `target[i]` with respect to `source[i]`, for every `i`.

        Element `i` of `target` should depend on no other element of `source`. The arguments are those of
        `jacobian`; where `target` does not depend on `source`, the result is zeros.

        >>> import jax.numpy as jnp
        >>> import replicax as rx
        >>> x = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
        >>> with rx.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = x * x
        >>> tape.batch_jacobian(y, x)
        Array([[[2., 0.],
                [0., 4.]],
        <BLANKLINE>
               [[6., 0.],
                [0., 8.]]], dtype=float32)
        """
        (y,), (seed,) = self._one_target(target)
        leaves, _ = _flatten(source, "The sources of a GradientTape")
        arrays = [array for leaf in leaves for array in _arrays(leaf)]
        if len(arrays) != 1:
            raise TypeError(f"batch_jacobian takes one source, which is one array, got {len(arrays)}.")
        (x,) = arrays
        if not y.ndim or not x.ndim or y.shape[0] != x.shape[0]:
            raise ValueError(f"Need first dimension of target shape ({y.shape}) and source shape ({x.shape}) to match.")
        batch, elements = y.shape[0], y.size // max(y.shape[0], 1)

        def rows(pull):
            basis = jnp.eye(elements, dtype=y.dtype).reshape(elements, 1, *y.shape[1:])
            (slope,) = _for_each(lambda row: pull([jnp.broadcast_to(row, y.shape)]), basis, experimental_use_pfor)
            if slope is None:
                return [None]
            return [jnp.swapaxes(slope, 0, 1).reshape(batch, *y.shape[1:], *x.shape[1:])]

        shape = (*y.shape, *x.shape[1:])
        slope = self._differentiate([y] if seed else [], leaves[0], "none", (), rows)
        return jnp.zeros(shape, x.dtype) if slope is None else slope

    # What the three have in common.

    def _targets(self, target: Any, output_gradients: Any) -> tuple[list[jax.Array], list[Any]]:
        """The differentiable arrays of a target, and their cotangents."""
        self._check_unused()
        if target is None:
            raise TypeError("The target of a gradient is an array, a variable or a nest of them, got None.")
        leaves: list[jax.Array] = []
        for leaf in _flatten(target, "The target of a GradientTape")[0]:
            if is_variable(leaf):
                values = jax.tree.leaves(leaf.read_value())
                leaves += self._mark(leaf, values) if self._follows(leaf) else values
            else:
                leaves.append(leaf)
        given: list[Any] = [None] * len(leaves)
        if output_gradients is not None:
            given = jax.tree.leaves(output_gradients, is_leaf=lambda x: x is None)
            if len(given) != len(leaves):
                raise ValueError(
                    f"output_gradients has the structure of the target, with {len(leaves)} arrays; got {len(given)}."
                )
        targets, seeds = [], []
        for leaf, weight in zip(leaves, given):
            if not _is_inexact(leaf):
                tracebacks.warn(
                    "The dtype of the target tensor must be floating (e.g. float32) when calling "
                    f"GradientTape.gradient, got {leaf.dtype}",
                )
                continue
            if weight is not None and jnp.shape(weight) != leaf.shape:
                raise ValueError(
                    f"An array of output_gradients has the shape {jnp.shape(weight)}, the target's is {leaf.shape}."
                )
            targets.append(leaf)
            seeds.append(jax.lax.full_like(leaf, 1) if weight is None else jnp.asarray(weight, leaf.dtype))
        return targets, seeds

    def _one_target(self, target: Any) -> tuple[list[jax.Array], list[bool]]:
        """The array of a Jacobian's target, and whether it is differentiable."""
        leaves, _ = _flatten(target, "The target of a GradientTape")
        targets = [array for leaf in leaves for array in _arrays(leaf)]
        if len(targets) != 1:
            raise TypeError(f"The target of a Jacobian is one array, got {len(targets)}.")
        found, _ = self._targets(target, None)
        return (found, [True]) if found else (targets, [False])

    def _check_unused(self) -> None:
        if self._records is None:
            raise RuntimeError(
                "A non-persistent GradientTape can only be used to compute one set of gradients (or jacobians)"
            )

    def _differentiate(
        self,
        targets: list[jax.Array],
        sources: Any,
        unconnected: UnconnectedGradients | str,
        prefix: tuple[int, ...],
        compute: Callable[[Callable[[list[Any]], list[Any]]], list[Any]],
        once: bool = False,
    ) -> Any:
        """What `compute` makes of the function from cotangents to gradients, in the structure of the sources.

        `prefix` is what the shapes of the results have in front of the sources' own. `once`: `compute` calls
        that function once, which may then let go of a record after the other.
        """
        unconnected = UnconnectedGradients(unconnected)
        leaves, rebuilt = _flatten(sources, "The sources of a GradientTape")
        # One set for each array of each source. A variable may have been read as several arrays.
        groups = [self._reads.get(id(leaf), []) if is_variable(leaf) else [{id(leaf)}] for leaf in leaves]
        slots = [{i for i in slot if i in self._tracked} for group in groups for slot in group]
        wanted: set[int] = set().union(*slots)
        starts = [id(y) for y in targets]

        # Only operations on a way from the sources to the targets matter.
        assert self._records is not None
        reached, path = set(wanted), []
        for record in self._records:
            if not reached.isdisjoint(record.inputs):
                reached.update(i for i in record.outputs if i is not None)
                path.append(record)

        if not self._persistent:
            self._recording = False
            self._records = None
            self._tracked, self._reads, self._copies, self._read_beside = {}, {}, {}, {}

        def pull(seeds):
            pull_record = _Record.pull_again if self._recording else _Record.pull
            gradients = _walk(path if once else list(path), reached, zip(starts, seeds), wanted, pull_record)
            return [_sum(gradients[i] for i in sorted(slot) if i in gradients) for slot in slots]

        found = iter(compute(pull))
        results = []
        for leaf, group in zip(leaves, groups):
            parts = [next(found) for _ in group]
            if unconnected is UnconnectedGradients.ZERO:
                arrays = _arrays(leaf)
                parts = parts or [None] * len(arrays)
                parts = [jnp.zeros(prefix + x.shape, x.dtype) if p is None else p for p, x in zip(parts, arrays)]
            if not is_variable(leaf):
                results.append(parts[0])
            elif all(part is None for part in parts):
                results.append(None)
            else:
                results.append(jax.tree.unflatten(leaf._treedef, [_own(part) for part in parts]))
        return rebuilt(results)

    def _add_record(self, inputs: Sequence[Any], outputs: Sequence[Any], pullback: Any) -> None:
        """Keeps that `outputs`, which are not tracked, were made of `inputs`."""
        assert self._records is not None
        self._tracked.update((id(x), x) for x in outputs)
        zeros = [Zero(jax.typeof(x).to_tangent_aval()) for x in outputs]
        made: list[int | None] = [id(x) for x in outputs]
        self._records.append(_Record([id(x) for x in inputs], made, zeros, pullback, True, lambda: pullback))

    # Variables.

    def _follows(self, variable: Any) -> bool:
        return id(variable) in self._watched or (self._watch_accessed_variables and bool(variable.trainable))

    def _mark(self, variable: Any, leaves: list[jax.Array]) -> list[jax.Array]:
        self._watched.setdefault(id(variable), variable)
        reads = self._reads.setdefault(id(variable), [set() for _ in leaves])
        for leaf, ids in zip(leaves, reads):
            if _is_inexact(leaf):
                self._tracked[id(leaf)] = leaf
                ids.add(id(leaf))
        return leaves


def _walk(path: list[_Record], reached: set[int], seeds: Any, wanted: set[int], pull: Any) -> dict[int, Any]:
    """Runs the pullbacks of `path` backwards, emptying it; the cotangents of the arrays that are `wanted`."""
    cotangents: dict[int, Any] = {}

    def add(i: int, cotangent: Any) -> None:
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
        for i in record.outputs:
            if i not in wanted:
                cotangents.pop(i, None)  # type: ignore[arg-type]
        for i, cotangent in zip(record.inputs, pull(record, outs)):
            if i in reached:
                add(i, cotangent)
    return cotangents


def _for_each(fn: Callable[[Any], list[Any]], rows: jax.Array, vectorized: bool) -> list[Any]:
    """`fn` of each row, stacked; None stays None."""
    if vectorized:
        return jax.vmap(fn)(rows)
    results = [fn(row) for row in rows]
    return [None if column[0] is None else jnp.stack(column) for column in zip(*results)]


def _sum(parts: Iterator[Any]) -> Any:
    total = None
    for part in parts:
        total = part if total is None else jax.lax.add(total, part)
    return total


def _own(gradient: Any) -> Any:
    """A gradient that other processes have as well, as an array of this one."""
    if gradient is None or isinstance(gradient, jax.core.Tracer) or gradient.is_fully_addressable:
        return gradient
    return renamed(gradient, single(gradient))


def _is_inexact(value: Any) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.inexact)


def is_variable(value: Any) -> bool:
    """Whether `value` is a variable; duck typing, because variables stand on top of tapes."""
    return bool(getattr(type(value), "_replicax_variable", False))


def _arrays(leaf: Any) -> list[jax.Array]:
    """The arrays of a variable, or the array that `leaf` is."""
    return jax.tree.leaves(leaf.read_value()) if is_variable(leaf) else [leaf]


def _flatten(nest: Any, role: str) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays and variables of a nest, and what puts others in their places; `TypeError` if there is more in it."""

    def is_source(node: Any) -> bool:
        return is_variable(node) or isinstance(node, _nest.Leaf) or foreign_state.holds_variable(node)

    found, tree = jax.tree.flatten(nest, is_leaf=is_source)
    leaves = [foreign_state.variable_of(leaf) for leaf in found]
    for leaf in leaves:
        if not is_variable(leaf) and not isinstance(leaf, jax.Array):
            raise TypeError(
                f"{role} must be JAX arrays, variables or nests of them, got {leaf!r} of type {type(leaf).__name__}."
            )
    return leaves, lambda values: jax.tree.unflatten(tree, map(foreign_state.in_the_form_of, found, values))


def on_read(variable: Any, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Tells the thread's tapes that `variable` was read as these arrays; returns the arrays to hand out.

    Under a tape that follows the variable they are copies (which cost nothing in compiled code). The arrays
    themselves may be in use as something else: by another variable, or as a value that was read, or is about to be
    assigned, for which no gradient is wanted.
    """
    leaves = list(leaves)
    for tape in _tapes.outside:
        if tape._recording and tape._follows(variable) and id(variable) not in tape._read_beside:
            stand_ins = [jnp.zeros((), leaf.dtype) for leaf in leaves]
            tape._mark(variable, stand_ins)
            tape._read_beside[id(variable)] = stand_ins
    tapes = followers(variable)
    if not tapes:
        return leaves
    copies = tapes[0]._copies
    for i, leaf in enumerate(leaves):
        key = id(variable), i, id(leaf)
        if key not in copies:
            copies[key] = leaf, _copy_below(tapes, leaf)
        leaves[i] = copies[key][1]
    for tape in tapes:
        tape._mark(variable, leaves)
    return leaves


def _copy_below(tapes: list[GradientTape], leaf: jax.Array) -> jax.Array:
    """A copy that no tape records, as an array of the trace that the tapes stand on."""
    if isinstance(leaf, jax.core.Tracer):
        trace = _below(current_trace())
        if all(_below(tape._trace) is not trace for tape in tapes):
            return leaf  # Inside of a `lax.scan`, say. Copied there, it would mean nothing to the tapes.
    else:
        trace = _below(tapes[0]._trace)
    with jex.set_current_trace(trace):
        return jnp.copy(leaf)


def _below(trace: Any) -> Any:
    while isinstance(trace, _TapeTrace):
        trace = trace.parent_trace
    return trace


def entered() -> list[GradientTape]:
    """The thread's tapes whose contexts are entered, the outermost first."""
    return list(_tapes.entered)


def followers(variable: Any) -> list[GradientTape]:
    """The thread's tapes that record and follow `variable`, the outermost first."""
    return [tape for tape in _tapes.entered if tape._recording and tape._follows(variable)]


@contextlib.contextmanager
def beside_replicas(tapes: Sequence[GradientTape]) -> Iterator[None]:
    """Where an eager replica of several runs: `tapes`, entered outside of it, learn of reads and of nothing else."""
    before = _tapes.entered, _tapes.outside
    _tapes.entered, _tapes.outside = [], tapes
    try:
        with jex.set_current_trace(_below(current_trace())):
            yield
    finally:
        _tapes.entered, _tapes.outside = before


def renamed(array: Any, alias: Any) -> Any:
    """`alias`, which is the same values as `array` and made where no tape saw it."""
    for tape in _tapes.entered:
        if tape._recording and id(array) in tape._tracked:
            tape._add_record([array], [alias], _identity)
    return alias


def lost(why: str, inputs: Sequence[Any], outputs: Sequence[Any], variables: bool = False) -> None:
    """Has `gradient` say why there is none where `outputs` were made of `inputs` and no tape saw how.

    Otherwise it would be None, as if they did not depend on them. `variables`: those that eager replicas read count
    among the inputs.
    """
    for tape in _tapes.entered:
        if tape._recording:
            reads = [x for leaves in tape._read_beside.values() for x in leaves] if variables else []
            known = [x for x in (*inputs, *reads) if id(x) in tape._tracked]
            unknown = [x for x in outputs if _is_inexact(x) and id(x) not in tape._tracked]
            if known and unknown:
                tape._add_record(known, unknown, _raiser(RuntimeError(why)))


def on_write(variable: Any) -> None:
    """Tells the thread's tapes that `variable` was assigned. They need nothing: values never change in place."""
