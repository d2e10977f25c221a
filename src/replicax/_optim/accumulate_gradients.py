"""Gradients of a large batch, computed piece by piece in the memory that one piece takes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._base import array_conversion
from replicax._base.errors import InvalidArgumentError
from replicax._base.indexed_slices import IndexedSlices
from replicax._base.messages import received
from replicax._base.types import Leaf, ReduceOp, Tree, as_reduce_op
from replicax._collectives import arithmetic
from replicax._control_flow import traced_block
from replicax._tracing import frames
from replicax._values import is_array

# Computes the results of one micro-batch.
_ResultsOf = Callable[[Sequence[jax.Array]], Tree]


def accumulate_gradients(
    value_and_grad_fn: Callable[..., Tree],
    micro_batches: int,
    reduce_op: ReduceOp | str = ReduceOp.SUM,
    batch_argnums: int | Sequence[int] | None = None,
) -> Callable[..., Tree]:
    """Returns a function of the same arguments that computes a batch in micro-batches, one after the other.

    Used in a replica function in place of `value_and_grad_fn`, it needs the memory of one micro-batch, and no
    communication: the replica's results are added up here, and then reduced over the replicas once, by
    `Optimizer.apply_gradients` or `all_reduce`. In compiled code it is a loop (`lax.scan`), eagerly one of Python.

    Args:
        value_and_grad_fn: such as `jax.value_and_grad(loss)`, with `has_aux` or not, or any other function, with a
            `GradientTape` in it too. It returns a pytree of arrays that have the same shapes for each micro-batch;
            `IndexedSlices` in it become whole arrays. Variables that it assigns, such as a layer's statistics, go on
            from one micro-batch to the next.
        micro_batches: how many there are. A batch of n rows, or a replica's part of it, is split as among replicas:
            each micro-batch has ceil(n / micro_batches) rows until none are left. So the last one may have fewer, where
            the function is traced a second time, and of fewer rows than `micro_batches` each is one by itself. A
            part without rows is as many micro-batches without rows.
        reduce_op: what becomes of the results of all micro-batches, of values and auxiliary ones as of gradients. SUM,
            for losses divided by the *global* batch size, or MEAN, for losses that are means over their micro-batch,
            which are weighted by its number of rows; as in `Optimizer`. Either way the results are those of the whole
            batch at once. Sums of bfloat16 and float16 are kept in float32 meanwhile.
        batch_argnums: which positional arguments are split along their first axis, a number or several; by default all
            but the first, which is the parameters. Keyword arguments are not split.

    Returns:
        A function. It raises `InvalidArgumentError` where an array to be split is not there or has no first axis, or
        where the arrays have different numbers of rows that `micro_batches` does not divide, and `TypeError` where the
        results are no arrays. Replicas with different numbers of rows may have different numbers of micro-batches: in
        functions that communicate (`all_reduce`, variables with an aggregation) give all of them the same.

    Raises:
        ValueError: `micro_batches` is less than 1, or `reduce_op` is no `ReduceOp`.
        TypeError: `micro_batches` is no int, `batch_argnums` has others in it, or `value_and_grad_fn` is no function.

    >>> import jax, jax.numpy as jnp, replicax as rx
    >>> def loss(w, x, y):
    ...     return jnp.sum((w * x - y) ** 2) / 8
    >>> x, y = jnp.arange(8.0), jnp.ones(8)
    >>> accumulated = rx.accumulate_gradients(jax.value_and_grad(loss), micro_batches=4)
    >>> [float(number) for number in accumulated(jnp.float32(1), x, y)]
    [11.5, 28.0]
    >>> [float(number) for number in jax.value_and_grad(loss)(jnp.float32(1), x, y)]
    [11.5, 28.0]
    >>> [float(number) for number in accumulated(jnp.float32(1), x[:7], y[:7])]  # of 2, 2, 2 and 1 rows
    [7.0, 17.5]
    """
    op = as_reduce_op(reduce_op)
    if not callable(value_and_grad_fn):
        raise TypeError(
            f"`value_and_grad_fn` is a function, such as jax.grad(loss), got {received(value_and_grad_fn)}."
        )
    if isinstance(micro_batches, bool) or not hasattr(micro_batches, "__index__"):
        raise TypeError(f"`micro_batches` is an int, got {micro_batches!r}.")
    count = operator.index(micro_batches)
    if count < 1:
        raise ValueError(f"`micro_batches` is at least 1, got {count}.")
    named = (batch_argnums,) if isinstance(batch_argnums, SupportsIndex) else batch_argnums
    if named is not None and not all(isinstance(place, SupportsIndex) for place in named):
        raise TypeError(f"`batch_argnums` is the number of a positional argument, or several, got {batch_argnums!r}.")
    named = None if named is None else [operator.index(place) for place in named]

    @functools.wraps(value_and_grad_fn)
    def accumulated(*args: Any, **kwargs: Any) -> Tree:
        absent = [place for place in named or () if not -len(args) <= place < len(args)]
        if absent:
            raise InvalidArgumentError(
                f"`batch_argnums` names the positional arguments {absent}, counted from 0, and there are {len(args)}."
            )
        places = range(1, len(args)) if named is None else [range(len(args))[place] for place in named]
        leaves, tree = jax.tree.flatten([args[place] for place in places])
        if not leaves:
            raise InvalidArgumentError(
                "There is nothing to split into micro-batches: the arguments have no arrays in the places "
                f"{list(places)}. Say which ones to split: accumulate_gradients(..., batch_argnums=0)."
            )
        batches = _MicroBatches(leaves, count)

        def results_of(pieces: Sequence[jax.Array]) -> Tree:
            given = list(args)
            for place, piece in zip(places, jax.tree.unflatten(tree, pieces)):
                given[place] = piece
            # Whole arrays can be added up.
            return jax.tree.map(
                lambda x: x.to_dense() if isinstance(x, IndexedSlices) else x,
                value_and_grad_fn(*given, **kwargs),
                is_leaf=lambda x: isinstance(x, IndexedSlices),
            )

        return _accumulated(results_of, batches, op)

    return accumulated


class _MicroBatches:
    """The micro-batches of arrays: ceil(n / count) rows each until none are left.

    Where the rows are no multiple of `count` the last one has fewer, and there may be fewer than `count` of them.
    """

    def __init__(self, batches: Sequence[Leaf], count: int):
        leaves = [_batch(leaf) for leaf in batches]
        self.rows = leaves[0].shape[0]
        even = all(leaf.shape[0] % count == 0 for leaf in leaves)
        if not even and any(leaf.shape[0] != self.rows for leaf in leaves):
            raise InvalidArgumentError(
                f"A batch is split into {count} micro-batches along its first axis, which must be the same in each "
                f"array, or a multiple of {count}; got the shapes {', '.join(str(leaf.shape) for leaf in leaves)}. "
                "Pass what is not to be split by keyword, or say which arguments to split: "
                "accumulate_gradients(..., batch_argnums=(1, 2))."
            )
        sizes = [-(-leaf.shape[0] // count) for leaf in leaves]
        self.size = sizes[0]
        self.count = count if even else self.rows // self.size  # of micro-batches of that size
        # The pieces of each array as the rows of another one.
        self.full = [
            leaf[: self.count * size].reshape(self.count, size, *leaf.shape[1:]) for leaf, size in zip(leaves, sizes)
        ]
        rest = 0 if even else self.rows - self.count * self.size
        self.rest = [leaf[self.rows - rest :] for leaf in leaves] if rest else None


def _batch(leaf: Leaf) -> jax.Array:
    """Returns an array that has rows; raises an error for anything else."""
    if not is_array(leaf):
        raise TypeError(
            f"Arrays are split into micro-batches, got {received(leaf)}. Pass it by keyword, or say which arguments to "
            "split: accumulate_gradients(..., batch_argnums=(1, 2))."
        )
    if leaf.ndim == 0:
        raise InvalidArgumentError(
            "A batch is split into micro-batches along its first axis, which an array of shape () cannot be. Pass what "
            "is not to be split by keyword, or say which arguments to split: "
            "accumulate_gradients(..., batch_argnums=(1, 2))."
        )
    return array_conversion.as_array(leaf)


class _Sums:
    """Sums of results, with the structure and dtypes of the results."""

    def __init__(self, results: Tree):
        leaves, self.tree = jax.tree.flatten(results)
        self.dtypes = [_dtype(x) for x in leaves]
        self.totals = self.kept(leaves)

    def kept(self, leaves: Sequence[Leaf]) -> list[jax.Array]:
        """Returns the results of a micro-batch in the dtypes in which they are added up."""
        narrow = jnp.bfloat16, jnp.float16
        return [jnp.asarray(x, jnp.float32 if dtype in narrow else dtype) for x, dtype in zip(leaves, self.dtypes)]

    def add(self, results: Tree, before: int = 1, weight: int = 1) -> None:
        """Adds results multiplied by `weight` to the sum multiplied by `before`."""
        tree: jax.tree_util.PyTreeDef
        leaves, tree = jax.tree.flatten(results)
        shapes = [jnp.shape(x) for x in leaves]
        expected = [total.shape for total in self.totals]
        if tree != self.tree or shapes != expected:
            raise InvalidArgumentError(
                "A function whose gradients are accumulated returns arrays of the same shapes for each micro-batch, "
                f"got {shapes} after {expected}. Return sums or means over the rows, not one output for each."
            )
        more = self.kept(leaves)
        self.totals = [_times(total, before) + _times(x, weight) for total, x in zip(self.totals, more)]

    def finished(self, op: ReduceOp, count: int) -> Tree:
        """Returns the results for the whole batch; a mean is divided by `count`."""
        pairs = zip(self.totals, self.dtypes)
        if op is ReduceOp.MEAN:
            means = [
                arithmetic.divided(total, count, total.dtype).astype(arithmetic.mean_dtype(dtype))
                for total, dtype in pairs
            ]
            return jax.tree.unflatten(self.tree, means)
        return jax.tree.unflatten(self.tree, [total.astype(dtype) for total, dtype in pairs])


def _times(total: jax.Array, weight: int) -> jax.Array:
    return total if weight == 1 else total * weight


def _accumulated(results_of: _ResultsOf, batches: _MicroBatches, op: ReduceOp) -> Tree:
    """Returns the results for all micro-batches; in a mean each counts as many times as it has rows."""
    looped = frames.is_tracing() and (batches.count > 1 or batches.rest is None)
    sums = (_looped if looped else _one_by_one)(results_of, batches.full, batches.count)
    if batches.rest is None:
        return sums.finished(op, batches.count)
    weights = (1, 1) if op is ReduceOp.SUM else (batches.size, batches.rows - batches.count * batches.size)
    sums.add(results_of(batches.rest), *weights)
    return sums.finished(op, batches.rows)


def _one_by_one(results_of: _ResultsOf, leaves: list[jax.Array], count: int) -> _Sums:
    sums = _Sums(results_of([leaf[0] for leaf in leaves]))
    for i in range(1, count):
        sums.add(results_of([leaf[i] for leaf in leaves]))
    return sums


def _looped(results_of: _ResultsOf, leaves: list[jax.Array], count: int) -> _Sums:
    traced: list[_Sums] = []

    def kept(*pieces: jax.Array) -> list[list[jax.Array]]:
        traced[:] = [_Sums(results_of(pieces))]
        return [traced[0].totals]

    block = traced_block.TracedBlock(["the results of micro-batches"], kept, [leaf[0] for leaf in leaves])
    state, written = traced_block.state_of(block)

    def add(carry: Tree, pieces: list[jax.Array]) -> tuple[Tree, None]:
        totals, changing = carry
        results, after = block.run(pieces, {**state, **changing}, written)
        return ([total + x for total, x in zip(totals, results)], after), None

    start = [jnp.zeros(kind.shape, kind.dtype) for kind in block.jaxpr.out_avals[: block.count]]
    (totals, after), _ = lax.scan(add, (start, {key: state[key] for key in written}), leaves)
    traced_block.write(written, after)
    (sums,) = traced
    sums.totals = totals
    return sums


def _dtype(result: Leaf) -> np.dtype[Any]:
    if not hasattr(result, "dtype"):
        if not isinstance(result, (bool, int, float, complex)):
            raise TypeError(
                f"A function whose gradients are accumulated returns arrays, got {result!r} of type "
                f"{type(result).__name__}."
            )
        result = jnp.asarray(result)
    dtype: np.dtype[Any] = result.dtype
    arithmetic.check_numeric(dtype)
    return dtype
