"""`GradientTape`: reverse-mode differentiation of what happens between two points in time.

While a tape records, JAX binds primitives to the tape's own trace, which keeps the pullbacks of those that depend on
something watched (see `_tracing.tape_trace`). `gradient` runs the pullbacks backwards.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.typing import ArrayLike

from replicax._base import foreign_state, tracebacks
from replicax._base import nest as _nest
from replicax._base.jax_internals import current_trace, first_copy
from replicax._base.messages import received
from replicax._base.types import Leaf, Tree
from replicax._tracing import active_tapes
from replicax._tracing.protocols import tree_of
from replicax._tracing.tape_trace import Record, Recorder, TapedVariable, TapeTrace, forget_traces, is_inexact, walk

# From the targets' cotangents to the gradients of the sources' arrays, None for those that nothing depends on.
TapePullback: TypeAlias = Callable[[list[jax.Array]], "list[jax.Array | None]"]


class UnconnectedGradients(enum.Enum):
    """What stands for the gradient where the target does not depend on the source: None or zeros.

    Wherever a member is expected, its value (`"none"`, `"zero"`) does as well.

    >>> import replicax as rx
    >>> rx.UnconnectedGradients("zero")
    <UnconnectedGradients.ZERO: 'zero'>
    """

    NONE = "none"
    ZERO = "zero"


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
        self._recorder = Recorder(persistent, watch_accessed_variables)

    def __enter__(self) -> GradientTape:
        foreign_state.join()
        if self._recorder.trace is not None:
            raise ValueError("Tape is already recording.")
        self._recorder.start()
        self._recorder.trace = TapeTrace(self._recorder, current_trace())
        active_tapes.enter(self._recorder)
        jex.set_current_trace(self._recorder.trace).__enter__()  # and `__exit__` sets the one before
        return self

    def __exit__(self, *_: object) -> None:
        trace, self._recorder.trace = self._recorder.trace, None
        self._recorder.on = False
        active_tapes.leave(self._recorder)
        # A tape that is left before one inside of it stays below that one, passing everything on.
        if trace is not None and current_trace() is trace:
            under = trace.parent_trace
            while isinstance(under, TapeTrace) and under.recorder.trace is not under:
                under = under.parent_trace
            jex.set_current_trace(under).__enter__()

    def watch(self, tensor: Tree) -> None:
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
        if self._recorder.records is None:
            raise ValueError("A tape watches inside of its context only: call `watch` within `with tape:`.")
        for leaf in leaves:
            if active_tapes.is_variable(leaf):
                self._recorder.watched[id(leaf)] = leaf
                forget_traces()
            elif is_inexact(leaf):
                self._recorder.track(leaf)
            else:
                message = f"The dtype of the watched tensor must be floating (e.g. float32), got {leaf.dtype}"
                tracebacks.warn(message)

    @contextlib.contextmanager
    def stop_recording(self) -> Iterator[None]:
        """Returns a context inside of the tape's own in which nothing is recorded.

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
        if not self._recorder.on:
            raise ValueError("Attempted to stop recording on a tape which is not recording.")
        self._recorder.on = False
        forget_traces()
        try:
            yield
        finally:
            if self._recorder.trace is not None:
                self._recorder.start()

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
        if not self._recorder.on:
            raise ValueError("Tape is not recording.")
        self._recorder.records = None
        self._recorder.start()

    def watched_variables(self) -> tuple[TapedVariable, ...]:
        """Returns the variables watched so far, each once, in the order of their first use.

        >>> import replicax as rx
        >>> v = rx.Variable(2.0)
        >>> with rx.GradientTape() as tape:
        ...     y = v * v
        >>> [watched is v for watched in tape.watched_variables()]
        [True]
        """
        return tuple(self._recorder.watched.values())

    def gradient(
        self,
        target: Tree,
        sources: Tree,
        output_gradients: Tree = None,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
    ) -> Tree:
        """Returns the gradient of `target`, summed over its elements, with respect to each of `sources`.

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
        target: Tree,
        sources: Tree,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Tree:
        """Returns the derivative of each element of `target` with respect to each element of each of `sources`.

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
        y, differentiable = self._one_target(target)

        targets = [y] if differentiable else []
        compute = functools.partial(_jacobians, y=y, at_once=experimental_use_pfor)
        return self._differentiate(targets, sources, unconnected_gradients, y.shape, compute)

    def batch_jacobian(
        self,
        target: Tree,
        source: Tree,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Tree:
        """Returns the Jacobian of each example: of `target[i]` with respect to `source[i]`, for every `i`.

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
        y, differentiable = self._one_target(target)
        leaves, _ = _flatten(source, "The sources of a GradientTape")
        arrays = [array for leaf in leaves for array in _arrays(leaf)]
        if len(arrays) != 1:
            raise TypeError(f"batch_jacobian takes one source, which is one array, got {len(arrays)}.")
        (x,) = arrays
        if not y.ndim or not x.ndim or y.shape[0] != x.shape[0]:
            raise ValueError(f"Need first dimension of target shape ({y.shape}) and source shape ({x.shape}) to match.")

        compute = functools.partial(_batch_jacobian, y=y, x=x, at_once=experimental_use_pfor)
        slope: jax.Array | None = self._differentiate([y] if differentiable else [], leaves[0], "none", (), compute)
        return jnp.zeros((*y.shape, *x.shape[1:]), x.dtype) if slope is None else slope

    def _targets(self, target: Tree, output_gradients: Tree) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the differentiable arrays of a target, and their cotangents."""
        if self._recorder.records is None:
            raise RuntimeError(
                "A non-persistent GradientTape can only be used to compute one set of gradients (or jacobians)"
            )
        if target is None:
            raise TypeError("The target of a gradient is an array, a variable or a nest of them, got None.")
        leaves: list[jax.Array] = []
        for leaf in _flatten(target, "The target of a GradientTape")[0]:
            if active_tapes.is_variable(leaf):
                values = jax.tree.leaves(leaf.read_value())
                leaves += self._recorder.mark(leaf, values) if self._recorder.follows(leaf) else values
            else:
                leaves.append(leaf)
        given: list[ArrayLike | None] = [None] * len(leaves)
        if output_gradients is not None:
            given = jax.tree.leaves(output_gradients, is_leaf=lambda x: x is None)
            if len(given) != len(leaves):
                raise ValueError(
                    f"output_gradients has the structure of the target, with {len(leaves)} arrays; got {len(given)}."
                )
        targets, seeds = [], []
        for leaf, weight in zip(leaves, given):
            if not is_inexact(leaf):
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

    def _one_target(self, target: Tree) -> tuple[jax.Array, bool]:
        """Returns the array of a Jacobian's target, and whether it is differentiable."""
        leaves, _ = _flatten(target, "The target of a GradientTape")
        arrays = [array for leaf in leaves for array in _arrays(leaf)]
        if len(arrays) != 1:
            raise TypeError(f"The target of a Jacobian is one array, got {len(arrays)}.")
        found, _ = self._targets(target, None)
        return (found[0], True) if found else (arrays[0], False)

    def _differentiate(
        self,
        targets: list[jax.Array],
        sources: Tree,
        unconnected: UnconnectedGradients | str,
        prefix: tuple[int, ...],
        compute: Callable[[TapePullback], list[jax.Array | None]],
        once: bool = False,
    ) -> Tree:
        """Returns what `compute` makes of the function from cotangents to gradients, in the structure of the sources.

        `prefix` is what the shapes of the results have in front of the sources' own. `once`: `compute` calls
        that function once, which may then let go of a record after the other.
        """
        unconnected = UnconnectedGradients(unconnected)
        leaves, rebuilt = _flatten(sources, "The sources of a GradientTape")
        # One set for each array of each source. A variable may have been read as several arrays.
        groups = [
            self._recorder.reads.get(id(leaf), []) if active_tapes.is_variable(leaf) else [{id(leaf)}]
            for leaf in leaves
        ]
        slots = [{i for i in slot if i in self._recorder.tracked} for group in groups for slot in group]
        wanted: set[int] = set().union(*slots)
        starts = [id(y) for y in targets]
        path, reached = self._recorder.path_from(wanted)
        if not self._recorder.persistent:
            self._recorder.use_up()

        def pull(seeds: list[jax.Array]) -> list[jax.Array | None]:
            pull_record = Record.pull_again if self._recorder.on else Record.pull
            gradients = walk(path if once else list(path), reached, zip(starts, seeds), wanted, pull_record)
            parts = [[gradients[i] for i in sorted(slot) if i in gradients] for slot in slots]
            return [functools.reduce(jax.lax.add, each) if each else None for each in parts]

        found = iter(compute(pull))
        results = []
        for leaf, group in zip(leaves, groups):
            parts = [next(found) for _ in group]
            if unconnected is UnconnectedGradients.ZERO:
                arrays = _arrays(leaf)
                parts = parts or [None] * len(arrays)
                parts = [jnp.zeros(prefix + x.shape, x.dtype) if p is None else p for p, x in zip(parts, arrays)]
            results.append(_like_source(leaf, parts))
        return rebuilt(results)


def _like_source(source: Leaf, parts: list[jax.Array | None]) -> Tree:
    """Returns the gradient of a source, of those of its arrays."""
    if not active_tapes.is_variable(source):
        return parts[0]
    return None if all(part is None for part in parts) else jax.tree.unflatten(tree_of(source), map(_own, parts))


def _own(gradient: jax.Array | None) -> jax.Array | None:
    """Returns a gradient that other processes have as well, as an array of this one."""
    if gradient is None or isinstance(gradient, jax.core.Tracer) or gradient.is_fully_addressable:
        return gradient
    return active_tapes.renamed(gradient, first_copy(gradient))


def _arrays(leaf: Leaf) -> list[jax.Array]:
    """Returns the arrays of a variable, or the array that `leaf` is."""
    return jax.tree.leaves(leaf.read_value()) if active_tapes.is_variable(leaf) else [leaf]


def _flatten(nest: Tree, role: str) -> tuple[list[Leaf], Callable[[list[Tree]], Tree]]:
    """Returns the arrays and variables of a nest, and a function that puts others in their places.

    Raises:
        TypeError: there is something else in it.
    """

    def is_source(node: object) -> bool:
        return active_tapes.is_variable(node) or isinstance(node, _nest.LeafBase) or foreign_state.holds_variable(node)

    found, tree = jax.tree.flatten(nest, is_leaf=is_source)
    leaves = [foreign_state.variable_of(leaf) for leaf in found]
    for leaf in leaves:
        if not active_tapes.is_variable(leaf) and not isinstance(leaf, jax.Array):
            raise TypeError(f"{role} must be JAX arrays, variables or nests of them, got {received(leaf)}.")
    return leaves, lambda values: jax.tree.unflatten(tree, map(foreign_state.in_the_form_of, found, values))


def _jacobians(pull: TapePullback, y: jax.Array, at_once: bool) -> list[jax.Array | None]:
    """Returns the derivatives of each element of `y`: arrays with the shape of `y` before that of the source."""
    basis = jnp.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape)
    slopes = _of_each(lambda row: pull([row]), basis, at_once)
    return [s if s is None else s.reshape(*y.shape, *s.shape[1:]) for s in slopes]


def _batch_jacobian(pull: TapePullback, y: jax.Array, x: jax.Array, at_once: bool) -> list[jax.Array | None]:
    """Returns the derivatives of `y[i]` with respect to `x[i]`, for every `i`, in a list of one."""
    batch, elements = y.shape[0], y.size // max(y.shape[0], 1)
    basis = jnp.eye(elements, dtype=y.dtype).reshape(elements, 1, *y.shape[1:])
    (slope,) = _of_each(lambda row: pull([jnp.broadcast_to(row, y.shape)]), basis, at_once)
    return [slope if slope is None else jnp.swapaxes(slope, 0, 1).reshape(batch, *y.shape[1:], *x.shape[1:])]


def _of_each(
    fn: Callable[[jax.Array], list[jax.Array | None]], rows: jax.Array, at_once: bool
) -> Sequence[jax.Array | None]:
    """Returns `fn` of each row, stacked, under `jax.vmap` or row by row; None stays None."""
    if at_once:
        return jax.vmap(fn)(rows)
    return [
        None if column[0] is None else jnp.stack([one for one in column if one is not None])
        for column in zip(*(fn(row) for row in rows))
    ]
