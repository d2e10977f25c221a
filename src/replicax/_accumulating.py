"""Gradients of a large batch, computed piece by piece in the memory that one piece takes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
from jax import lax

from replicax import _blocks, _collectives, _context, _levels
from replicax._errors import InvalidArgumentError
from replicax._indexed_slices import IndexedSlices
from replicax._types import ReduceOp, as_reduce_op
from replicax._values import is_array


def accumulate_gradients(
    value_and_grad_fn: Callable[..., Any],
    micro_batches: int,
    reduce_op: ReduceOp | str = ReduceOp.SUM,
    batch_argnums: int | Sequence[int] | None = None,
) -> Callable[..., Any]:
    """A function of the same arguments that computes a batch in micro-batches, one after the other.

    Used in a replica function in place of `value_and_grad_fn`, it needs the memory of one micro-batch, and no
    communication: the replica's results are added up here, and then reduced over the replicas once, by
    `Optimizer.apply_gradients` or `all_reduce`. In compiled code it is a loop (`lax.scan`), eagerly one of Python.

    Args:
        value_and_grad_fn: such as `jax.value_and_grad(loss)`, with `has_aux` or not, or any other function, with a
            `GradientTape` in it too. It returns a pytree of arrays that have the same shapes for each micro-batch;
            `IndexedSlices` in it become whole arrays. Variables that it assigns, such as a layer's statistics, go on
            from one micro-batch to the next.
        micro_batches: how many there are.
        reduce_op: what becomes of the results of all micro-batches, of values and auxiliary ones as of gradients. SUM,
            for losses divided by the *global* batch size, or MEAN, for losses that are means over their micro-batch;
            as in `Optimizer`. Sums of bfloat16 and float16 are kept in float32 meanwhile.
        batch_argnums: which positional arguments are split along their first axis, a number or several; by default all
            but the first, which is the parameters. Keyword arguments are not split.

    Returns:
        A function. It raises `InvalidArgumentError` where an array to be split is not there, or has no first axis or
        one that `micro_batches` does not divide, and `TypeError` where the results are no arrays.

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
    """
    op = as_reduce_op(reduce_op)
    if not callable(value_and_grad_fn):
        raise TypeError(f"`value_and_grad_fn` is a function, such as jax.grad(loss), got {value_and_grad_fn!r}.")
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
    def accumulated(*args: Any, **kwargs: Any) -> Any:
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
        leaves = [_split(leaf, count) for leaf in leaves]

        def results_of(pieces: Sequence[Any]) -> Any:
            given = list(args)
            for place, piece in zip(places, jax.tree.unflatten(tree, pieces)):
                given[place] = piece
            return jax.tree.map(_dense, value_and_grad_fn(*given, **kwargs), is_leaf=_is_sparse)

        return _looped(results_of, leaves, count, op) if _levels.is_tracing() else _one_by_one(results_of, leaves, op)

    return accumulated


def _is_sparse(value: Any) -> bool:
    return isinstance(value, IndexedSlices)


def _dense(value: Any) -> Any:
    """Of rows at indices the whole array, which can be added up."""
    return value.to_dense() if _is_sparse(value) else value


def _split(leaf: Any, count: int) -> Any:
    """The pieces of an array as the rows of another one."""
    if not is_array(leaf):
        raise TypeError(
            f"What is split into micro-batches is arrays, got {leaf!r} of type {type(leaf).__name__}. Pass it by "
            "keyword, or say which arguments to split: accumulate_gradients(..., batch_argnums=(1, 2))."
        )
    if leaf.ndim == 0 or leaf.shape[0] % count:
        raise InvalidArgumentError(
            f"A batch is split into {count} micro-batches along its first axis, which an array of shape {leaf.shape} "
            "cannot be. Choose a number that divides each replica's part of the batch, and leave out a smaller last "
            "batch (drop_remainder=True); pass what is not to be split by keyword, or say which arguments to split: "
            "accumulate_gradients(..., batch_argnums=(1, 2))."
        )
    return _context.as_array(leaf).reshape(count, leaf.shape[0] // count, *leaf.shape[1:])


def _one_by_one(results_of: Callable[..., Any], leaves: list[Any], op: ReduceOp) -> Any:
    count = leaves[0].shape[0]
    results, tree = jax.tree.flatten(results_of([leaf[0] for leaf in leaves]))
    dtypes = [_dtype(x) for x in results]
    totals = [_kept(x, dtype) for x, dtype in zip(results, dtypes)]
    for i in range(1, count):
        results = jax.tree.leaves(results_of([leaf[i] for leaf in leaves]))
        totals = [total + _kept(x, dtype) for total, x, dtype in zip(totals, results, dtypes)]
    return jax.tree.unflatten(tree, [_finished(x, count, op, dtype) for x, dtype in zip(totals, dtypes)])


def _looped(results_of: Callable[..., Any], leaves: list[Any], count: int, op: ReduceOp) -> Any:
    traced: list[Any] = []  # the tree of the results, and their dtypes

    def kept(*pieces: Any) -> list[list[Any]]:
        results, tree = jax.tree.flatten(results_of(pieces))
        traced[:] = tree, [_dtype(x) for x in results]
        return [[_kept(x, dtype) for x, dtype in zip(results, traced[1])]]

    block = _blocks.Block(["the results of micro-batches"], kept, [leaf[0] for leaf in leaves])
    state, written = _blocks.state_of(block)

    def add(carry: Any, pieces: list[Any]) -> tuple[Any, None]:
        totals, changing = carry
        results, after = block.run(pieces, {**state, **changing})
        return ([total + x for total, x in zip(totals, results)], {key: after[key] for key in written}), None

    start = [jnp.zeros(kind.shape, kind.dtype) for kind in block.jaxpr.out_avals[: block.count]]
    (totals, after), _ = lax.scan(add, (start, {key: state[key] for key in written}), leaves)
    _blocks.write(written, after)
    tree, dtypes = traced
    return jax.tree.unflatten(tree, [_finished(x, count, op, dtype) for x, dtype in zip(totals, dtypes)])


def _dtype(result: Any) -> Any:
    if not hasattr(result, "dtype"):
        result = jnp.asarray(result) if isinstance(result, (bool, int, float, complex)) else result
        if not hasattr(result, "dtype"):
            raise TypeError(
                f"A function whose gradients are accumulated returns arrays, got {result!r} of type "
                f"{type(result).__name__}."
            )
    _collectives.check_numeric(result.dtype)
    return result.dtype


def _kept_dtype(dtype: Any) -> Any:
    return jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype


def _kept(result: Any, dtype: Any) -> Any:
    return jnp.asarray(result, _kept_dtype(dtype))


def _finished(total: Any, count: int, op: ReduceOp, dtype: Any) -> Any:
    return (_collectives.divided(total, count, total.dtype) if op is ReduceOp.MEAN else total).astype(
        _collectives.mean_dtype(dtype) if op is ReduceOp.MEAN else dtype
    )
