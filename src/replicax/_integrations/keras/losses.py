"""Losses of Keras models in a replica: their means are over the global batch, as on Keras's TensorFlow backend.

| in Keras | what changes |
|---|---|
| `losses.loss.scale_loss_for_distribution` | a loss's mean is over the global batch, as on the TensorFlow backend |
| `losses.loss.reduce_values` | so is a loss that is a scalar by itself |
"""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp

from replicax._base.foreign_state import Original, wrap
from replicax._tracing import context


def join() -> None:
    """Changes Keras as the table above says."""
    from keras.src.losses import loss

    wrap(loss, "reduce_values", reduce_values)
    loss.scale_loss_for_distribution = scale_loss
    loss.unscale_loss_for_distribution = unscale_loss


def replicas() -> int:
    """Returns the number of replicas of the current strategy."""
    return context.get_strategy().num_replicas_in_sync


def scale_loss(value: jax.Array) -> jax.Array:
    """Divides a loss by the number of replicas, so that the sum over them is the mean of the global batch."""
    count = replicas()
    return value if count == 1 else value * jnp.asarray(1.0 / count, value.dtype)


def unscale_loss(value: jax.Array) -> jax.Array:
    """Takes `scale_loss` back, for a loss that is shown."""
    count = replicas()
    return value if count == 1 else value * jnp.asarray(count, value.dtype)


def reduce_values(reduce: Original, /, values: jax.Array, *args: object, **kwargs: object) -> jax.Array:
    """Reduces a loss as Keras does, and scales a mean that Keras leaves unscaled."""
    loss, reduction = reduce(values, *args, **kwargs), inspect.signature(reduce).bind(values, *args, **kwargs)
    reduction.apply_defaults()
    is_mean = reduction.arguments["reduction"] in ("sum_over_batch_size", "mean", "mean_with_sample_weight")
    return scale_loss(loss) if is_mean and values.shape == () else loss  # Keras leaves a scalar as it is
