"""Means and variances over the rows of all replicas, for layers that normalize with those of the global batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from replicax._base.types import ReduceOp
from replicax._tracing import context as _context
from replicax._tracing import frames


def moments_of_all(
    x: jax.Array,
    axes: Sequence[int],
    where: jax.Array | None = None,
    squares_at_once: bool = False,
    own: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance along the axes, of the elements of all replicas; of the array alone outside of them.

    Each element counts once, so replicas may have different numbers of rows, or none. Moments of no elements are 0.

    Args:
        x: `[rows, ...]`, of a floating or complex dtype.
        axes: the axes along which to reduce, one of them that of the rows.
        where: the elements that count, of a shape that broadcasts to that of `x`; None for all.
        squares_at_once: compute the variance as E|x|^2 - |E x|^2, in one message instead of two, and rounded less well.
        own: take only the replica's own elements.
    """
    axes = tuple(axes)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    real = jax.eval_shape(jnp.real, wide).dtype
    if where is None:
        of_each = math.prod(x.shape[axis] for axis in axes)
        count = lax.full((), of_each, real)
    else:
        where = jnp.broadcast_to(where, x.shape).astype(bool)
        count = jnp.sum(where, axes, dtype=real)

    def summed(values: jax.Array) -> jax.Array:
        return jnp.sum(values, axes, where=where)

    def over_replicas(values: list[jax.Array]) -> list[jax.Array]:
        return values if own or not are_shared() else _totals(values)

    if squares_at_once:
        total, squares, count = over_replicas([summed(wide), summed(_squared(wide)), count])
        count = jnp.maximum(count, 1)
        mean = total / count
        return mean, jnp.maximum(squares / count - _squared(mean), 0)
    total, count = over_replicas([summed(wide), count])
    count = jnp.maximum(count, 1)
    mean = total / count
    (squares,) = over_replicas([summed(_squared(wide - jnp.expand_dims(mean, axes)))])
    return mean, squares / count


def are_shared() -> bool:
    """Returns whether there are several replicas, one of which the program is in."""
    context = _context.get_replica_context()
    return context is not None and context.num_replicas_in_sync > 1


def pads_rows() -> bool:
    """Returns whether the replica's batch is padded, so that it may turn out to have no rows."""
    frame = frames.frame()
    return isinstance(frame, frames.TraceFrame) and frame.pads_rows


def _totals(values: list[jax.Array]) -> list[jax.Array]:
    context = _context.get_replica_context()
    assert context is not None
    totals: list[jax.Array] = context.all_reduce(ReduceOp.SUM, values)
    return totals


def _squared(x: jax.Array) -> jax.Array:
    return lax.square(lax.real(x)) + lax.square(lax.imag(x)) if jnp.iscomplexobj(x) else lax.square(x)
