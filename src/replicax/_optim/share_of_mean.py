"""The mean over the rows of a batch that is divided among replicas, as a sum of shares."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from replicax._base.messages import received
from replicax._tracing import context


def share_of_mean(values: ArrayLike, where: ArrayLike | None = None) -> jax.Array:
    """Return this replica's share of the mean over the values of all replicas: the shares add up to the mean.

    Use it in a replica function where a program for one device has `jnp.mean`, and reduce with SUM, which is the
    default of `Optimizer`. The gradient of a share is the replica's share of the gradient, so that the sums of
    losses, gradients and metrics equal the results of one device, for parts of any size. The share of a replica
    without rows is 0.

    The share is the sum of the replica's values, divided by the number of values on all replicas. While replicas are
    compiled for parts of one size, this number is a constant of the program. Otherwise one all-reduce of a scalar
    counts the values.

    `accumulate_gradients` computes micro-batches one after the other. Use `jnp.mean` and `reduce_op="MEAN"` there.

    Args:
        values: an array with one value for each example, position or the like, of any shape and numeric dtype.
        where: a mask that broadcasts to the shape of `values`: values with False do not count. The number of values
            that count is summed over the replicas by an all-reduce.

    Returns:
        A scalar, in the dtype of `jnp.mean(values)`. It is NaN if there are no values on any replica.

    Raises:
        TypeError: `values` are no array of numbers, or `where` has no booleans.
        ValueError: `where` does not broadcast to the shape of `values`.
        RuntimeError: in cross-replica context of a strategy with several replicas.

    >>> import jax.numpy as jnp, replicax as rx
    >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    >>> batches = rx.data.Dataset.from_tensor_slices(jnp.array([1.0, 2.0, 6.0])).batch(3)
    >>> for batch in strategy.experimental_distribute_dataset(batches):  # parts of 2 rows and 1 row
    ...     shares = strategy.run(rx.share_of_mean, args=(batch,))
    >>> [float(share) for share in shares.values], float(strategy.reduce("SUM", shares, axis=None))
    ([1.0, 2.0], 3.0)
    """
    values, where = _array_of_numbers(values), _mask(where)
    if where is not None and not _broadcasts(where.shape, values.shape):
        raise ValueError(f"`where` of shape {where.shape} does not broadcast to the values' shape {values.shape}.")
    replica_context = context.get_replica_context()
    if replica_context is None:
        if context.get_strategy().num_replicas_in_sync > 1:
            raise RuntimeError(
                "`share_of_mean` takes the values of one replica: call it in the function that `strategy.run` calls. "
                'Outside, `strategy.reduce("MEAN", values, axis=0)` is the mean over the rows of all replicas.'
            )
        return jnp.mean(values, where=where)
    dtype = values.dtype if jnp.issubdtype(values.dtype, jnp.inexact) else jnp.result_type(float)
    wide = jnp.promote_types(dtype, jnp.float32)  # jnp.mean adds up shorter types in float32, too
    if where is None:
        size = replica_context._total_size(values.size)
        count = float(size) if isinstance(size, int) else size  # JAX makes no array of an int above 2**31 - 1
    else:
        count = jnp.sum(jnp.broadcast_to(where, values.shape), dtype=jnp.float32)
        if replica_context.num_replicas_in_sync > 1:
            count = replica_context.all_reduce("SUM", count)
    return (jnp.sum(values, dtype=wide, where=where) / count).astype(dtype)


def _array_of_numbers(values: ArrayLike) -> jax.Array:
    try:
        return jnp.asarray(values)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`share_of_mean` takes an array of numbers, got {received(values)}. For a nest of arrays: "
            "jax.tree.map(replicax.share_of_mean, values)."
        ) from error


def _mask(where: ArrayLike | None) -> jax.Array | None:
    if where is None:
        return None
    mask = _array_of_numbers(where)
    if mask.dtype != bool:
        raise TypeError(
            f"`where` is a mask of booleans, got dtype {mask.dtype}. Pass `where != 0` if it has ones and zeros; for "
            "weights, divide the sum of the weighted values by the sum of the weights over all replicas."
        )
    return mask


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(size in (1, other) for size, other in zip(reversed(shape), reversed(to)))
