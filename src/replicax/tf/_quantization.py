"""`tf.quantization`: numbers rounded to those that a few bits can tell apart."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np

from replicax.tf._core import InvalidArgumentError
from replicax.tf._host import jnp, on_jax
from replicax.tf._operations import operations
from replicax.tf._ops import as_int, convert_to_tensor
from replicax.tf._types import TensorLike


def _nudged(low: jax.Array, high: jax.Array, bits: int, narrow: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the range moved so that 0 is one of its steps, and the size of a step."""
    if not 2 <= bits <= 16:
        raise InvalidArgumentError(f"num_bits must be between 2 and 16, inclusive, got {bits}.")
    first, last = float(narrow), float(2**bits - 1)
    scale = (high - low) / (last - first)
    zero = jnp.clip(jnp.round(first - low / scale), first, last)
    return (first - zero) * scale, (last - zero) * scale, scale


def _quantized(x: jax.Array, low: jax.Array, high: jax.Array, scale: jax.Array) -> jax.Array:
    steps = jnp.floor((jnp.clip(x, low, high) - low) / scale + 0.5)
    return steps * scale + low


def _gradients(
    bits: int, narrow: bool, channels: bool, gradients: jax.Array, x: jax.Array, low: jax.Array, high: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the gradients of the inputs and of the two ends of the range: each input belongs to one of the three."""
    bottom, top, _ = _nudged(low, high, bits, narrow)
    below, above = x < bottom, x > top
    inside = jnp.logical_not(jnp.logical_or(below, above))
    parts = [jnp.where(each, gradients, jnp.zeros_like(gradients)) for each in (inside, below, above)]
    axes = tuple(range(gradients.ndim - channels))
    return parts[0], jnp.sum(parts[1], axis=axes), jnp.sum(parts[2], axis=axes)


@functools.cache
def _program(bits: int, narrow: bool, channels: bool) -> Callable[..., jax.Array]:
    @jax.custom_vjp
    def fake(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
        return _quantized(x, *_nudged(low, high, bits, narrow))

    def forward(x: jax.Array, low: jax.Array, high: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return fake(x, low, high), (x, low, high)

    def backward(saved: tuple[jax.Array, ...], gradients: jax.Array) -> tuple[jax.Array, ...]:
        return _gradients(bits, narrow, channels, gradients, *saved)

    fake.defvjp(forward, backward)
    return fake


@on_jax
def _fake(inputs: TensorLike, low: TensorLike, high: TensorLike, bits: int, narrow: bool, channels: bool) -> jax.Array:
    """Round numbers to the steps of ranges, one for all or one for each of the `channels`."""
    given = [convert_to_tensor(value, np.float32) for value in (inputs, low, high)]
    return _program(as_int(bits, "num_bits"), bool(narrow), channels)(*given)


@on_jax
def _gradients_of(bits: int, narrow: bool, channels: bool, *arrays: TensorLike) -> tuple[jax.Array, ...]:
    given = [convert_to_tensor(value, np.float32) for value in arrays]
    return _gradients(as_int(bits, "num_bits"), bool(narrow), channels, *given)


def fake_quant_with_min_max_args(
    inputs: TensorLike,
    min: float = -6,
    max: float = 6,
    num_bits: int = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Rounds numbers to the steps of a range with `2 ** num_bits` steps; gradients pass where inputs are in it."""
    return _fake(inputs, float(min), float(max), num_bits, narrow_range, False)


def fake_quant_with_min_max_vars(
    inputs: TensorLike,
    min: TensorLike,
    max: TensorLike,
    num_bits: int = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Rounds numbers to the steps of a range whose ends are scalars, which get gradients from inputs beyond them."""
    return _fake(inputs, min, max, num_bits, narrow_range, False)


def fake_quant_with_min_max_vars_per_channel(
    inputs: TensorLike,
    min: TensorLike,
    max: TensorLike,
    num_bits: int = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Rounds numbers to the steps of ranges, of which each channel, along the last axis, has its own."""
    return _fake(inputs, min, max, num_bits, narrow_range, True)


def fake_quant_with_min_max_args_gradient(
    gradients: TensorLike,
    inputs: TensorLike,
    min: float = -6,
    max: float = 6,
    num_bits: int = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns the gradient of the inputs of `fake_quant_with_min_max_args`."""
    return _gradients_of(num_bits, narrow_range, False, gradients, inputs, float(min), float(max))[0]


def fake_quant_with_min_max_vars_gradient(
    gradients: TensorLike,
    inputs: TensorLike,
    min: TensorLike,
    max: TensorLike,
    num_bits: int = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> tuple[jax.Array, ...]:
    """Returns the gradients of the arguments of `fake_quant_with_min_max_vars`."""
    return _gradients_of(num_bits, narrow_range, False, gradients, inputs, min, max)


def fake_quant_with_min_max_vars_per_channel_gradient(
    gradients: TensorLike,
    inputs: TensorLike,
    min: TensorLike,
    max: TensorLike,
    num_bits: int = 8,
    narrow_range: bool = False,
    name: str | None = None,
) -> tuple[jax.Array, ...]:
    """Returns the gradients of the arguments of `fake_quant_with_min_max_vars_per_channel`."""
    return _gradients_of(num_bits, narrow_range, True, gradients, inputs, min, max)


operations(globals())
QUANTIZATION = """fake_quant_with_min_max_args fake_quant_with_min_max_args_gradient fake_quant_with_min_max_vars
fake_quant_with_min_max_vars_gradient fake_quant_with_min_max_vars_per_channel
fake_quant_with_min_max_vars_per_channel_gradient"""
