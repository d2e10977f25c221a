"""Normalization of Flax NNX in replicas: with an axis name, over the rows of all of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from replicax._base.foreign_state import Original
from replicax._base.types import Tree
from replicax._integrations.moments import moments_of_all, pads_rows
from replicax._tracing import context as _context
from replicax._values import AXIS

if TYPE_CHECKING:
    from flax import nnx


def normalized(call: Original, layer: nnx.BatchNorm, x: jax.Array, *args: object, **kwargs: object) -> Tree:
    """Normalize as NNX does, but a layer without an axis name keeps its statistics in a replica without rows.

    By NNX the mean of no rows is NaN, and so are the gradients of scale and bias; of a padded batch it is 0.
    """
    if not pads_rows() or layer.axis_name == AXIS:
        in_replica = _context.has_strategy() and _context.get_replica_context() is not None
        if in_replica and layer.axis_name is None and not x.size:
            return call(layer, x, **{**kwargs, "use_running_average": True})  # `args` has nothing else
        return call(layer, x, *args, **kwargs)
    before = [(variable, variable.get_value()) for variable in (layer.mean, layer.var)]
    result = call(layer, x, *args, **kwargs)
    has_rows = jnp.full((), x.size) > 0
    for variable, value in before:
        if (new := variable.get_value()) is not value:
            variable.set_value(jnp.where(has_rows, new, value))
    return result


def statistics(compute: Original, x: jax.Array, axes: Any, *args: object, **kwargs: object) -> Tree:
    """Returns mean and variance as NNX does, but over all replicas if `axis_name` is theirs.

    NNX itself would take the mean of the replicas' means, and needs a name that JAX knows, as it does in compiled
    replicas alone.
    """
    given = inspect.signature(compute).bind(x, axes, *args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    over_replicas = options["axis_name"] == AXIS and options["axis_index_groups"] is None
    if not over_replicas or not _context.has_strategy() or _context.get_replica_context() is None:
        return compute(x, axes, *args, **kwargs)
    dtype = jnp.result_type(x) if options["dtype"] is None else options["dtype"]
    wide = jnp.asarray(x, jnp.promote_types(dtype, jnp.float32))
    along = [axis % x.ndim for axis in (axes if isinstance(axes, Iterable) else [axes])]
    if options["use_mean"]:
        return moments_of_all(wide, along, options["mask"], squares_at_once=options["use_fast_variance"])
    squares, _ = moments_of_all(jnp.square(jnp.abs(wide)), along, options["mask"], squares_at_once=True)
    return jnp.zeros_like(squares), squares


def update_welford(update: Original, metric: nnx.metrics.Welford, /, *args: object, **kwargs: object) -> Tree:
    """Update the metric; raise `NotImplementedError` in one of several replicas."""
    context = _context.get_replica_context() if _context.has_strategy() else None
    if context is not None and context.num_replicas_in_sync > 1:
        raise NotImplementedError(
            "nnx.metrics.Welford is updated by a replica, but what several replicas find cannot be added up. Return "
            "the values from the replica function, and update it outside of `run`."
        )
    return update(metric, *args, **kwargs)
