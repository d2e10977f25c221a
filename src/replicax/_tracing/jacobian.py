"""Jacobians of a gradient tape: the function from cotangents to gradients, for each row of a basis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

# From the targets' cotangents to the gradients of the sources' arrays, None for those that nothing depends on.
TapePullback: TypeAlias = Callable[[list[jax.Array]], "list[jax.Array | None]"]


def jacobians(pull: TapePullback, y: jax.Array, at_once: bool) -> list[jax.Array | None]:
    """Returns the derivatives of each element of `y`: arrays with the shape of `y` before that of the source."""
    basis = jnp.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape)
    slopes = _of_each(lambda row: pull([row]), basis, at_once)
    return [s if s is None else s.reshape(*y.shape, *s.shape[1:]) for s in slopes]


def batch_jacobian(pull: TapePullback, y: jax.Array, x: jax.Array, at_once: bool) -> list[jax.Array | None]:
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
