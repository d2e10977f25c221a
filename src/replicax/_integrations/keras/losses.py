"""Losses of Keras models in a replica: their means are over the global batch, as on Keras's TensorFlow backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from replicax._tracing import context


def replicas() -> int:
    """Returns how many replicas the current strategy has."""
    return context.get_strategy().num_replicas_in_sync


def scale_loss(value: Any) -> Any:
    """Divides a loss by the number of replicas, so that the sum over them is the mean of the global batch."""
    count = replicas()
    return value if count == 1 else value * jnp.asarray(1.0 / count, value.dtype)


def unscale_loss(value: Any) -> Any:
    """Takes `scale_loss` back, for a loss that is shown."""
    count = replicas()
    return value if count == 1 else value * jnp.asarray(count, value.dtype)


def reduce_values(reduce: Callable[..., Any], values: Any, *args: Any, **kwargs: Any) -> Any:
    """Reduces a loss as Keras does, and scales a mean that Keras leaves unscaled."""
    loss, reduction = reduce(values, *args, **kwargs), inspect.signature(reduce).bind(values, *args, **kwargs)
    reduction.apply_defaults()
    is_mean = reduction.arguments["reduction"] in ("sum_over_batch_size", "mean", "mean_with_sample_weight")
    return scale_loss(loss) if is_mean and values.shape == () else loss  # Keras leaves a scalar as it is
