"""`tf.raw_ops`: operations under the names and arguments of TensorFlow's kernels, which take keywords only."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from replicax.tf import _operations
from replicax.tf._core import InvalidArgumentError
from replicax.tf._host import jnp, lax
from replicax.tf._ops import convert_to_tensor
from replicax.tf._types import TensorLike

_R = TypeVar("_R")


class FusedBatchNorm(NamedTuple):
    """The normalized tensor, the moving mean and variance, and the mean and variance that it was normalized with."""

    y: jax.Array
    batch_mean: jax.Array
    batch_variance: jax.Array
    reserve_space_1: jax.Array
    reserve_space_2: jax.Array


class FusedBatchNormV3(NamedTuple):
    """What `FusedBatchNorm` has, and a value that is always empty."""

    y: jax.Array
    batch_mean: jax.Array
    batch_variance: jax.Array
    reserve_space_1: jax.Array
    reserve_space_2: jax.Array
    reserve_space_3: jax.Array


_CHANNELS = {"NHWC": -1, "NCHW": 1, "NDHWC": -1, "NCDHW": 1}


def _fused_batch_norm(
    x: TensorLike,
    scale: TensorLike,
    offset: TensorLike,
    mean: TensorLike,
    variance: TensorLike,
    epsilon: float = 0.0001,
    exponential_avg_factor: float = 1,
    data_format: str = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> FusedBatchNorm:
    """Normalizes each channel: in training by the mean and the variance of the batch, else by those that are given.

    The variance that it returns is that of the population, n / (n - 1) times the batch's. No gradient flows through
    the mean and the variance that are given or returned.
    """
    tensor = convert_to_tensor(x)
    channels = _CHANNELS[data_format] % tensor.ndim
    axes = tuple(axis for axis in range(tensor.ndim) if axis != channels)
    wide = tensor.astype(np.float32) if tensor.dtype.itemsize < 4 else tensor
    given = []
    for what, value in (("scale", scale), ("offset", offset), ("mean", mean), ("variance", variance)):
        given.append(convert_to_tensor(value))
        if given[-1].ndim != 1:
            raise InvalidArgumentError(f"{what} must be 1-dimensional, got shape {tuple(given[-1].shape)}.")
    count = wide.size // max(1, wide.shape[channels])
    factors, offsets, old_mean, old_variance = given[0], given[1], *map(lax.stop_gradient, given[2:])
    if is_training:
        center = jnp.mean(wide, axes)
        spread = jnp.mean(jnp.square(wide - _along(center, wide, channels)), axes)
        new_mean, new_variance = center, spread * (count / max(1, count - 1))
        if exponential_avg_factor != 1:
            new_mean = old_mean * (1 - exponential_avg_factor) + new_mean * exponential_avg_factor
            new_variance = old_variance * (1 - exponential_avg_factor) + new_variance * exponential_avg_factor
    else:
        center, spread = new_mean, new_variance = old_mean, old_variance
    inner = lax.rsqrt(spread + epsilon) * factors
    y = (wide - _along(center, wide, channels)) * _along(inner, wide, channels) + _along(offsets, wide, channels)
    rest = map(lax.stop_gradient, (new_mean, new_variance, center, spread))
    return FusedBatchNorm(y.astype(tensor.dtype), *rest)


def _along(vector: jax.Array, tensor: jax.Array, axis: int) -> jax.Array:
    return jnp.reshape(vector, [-1 if i == axis else 1 for i in range(tensor.ndim)])


@functools.wraps(_fused_batch_norm)
def _fused_batch_norm_v3(**arguments: Any) -> FusedBatchNormV3:
    return FusedBatchNormV3(*_fused_batch_norm(**arguments), jnp.zeros([0], np.float32))


def _keywords_only(op: Callable[..., _R], name: str) -> Callable[..., _R]:
    called = _operations.operation(op, name)

    @functools.wraps(op)
    def call(*args: object, **kwargs: object) -> _R:
        if args:
            names = list(inspect.signature(op).parameters)
            raise TypeError(f"{name} only takes keyword args (possible keys: {names}).")
        result: _R = called(**kwargs)
        return result

    call.__name__ = call.__qualname__ = name
    return call


_OPS: dict[str, Callable[..., FusedBatchNorm | FusedBatchNormV3]] = {
    "FusedBatchNorm": _fused_batch_norm,
    "FusedBatchNormV2": _fused_batch_norm,
    "FusedBatchNormV3": _fused_batch_norm_v3,
}
RAW_OPS: dict[str, Callable[..., FusedBatchNorm | FusedBatchNormV3]] = {
    name: _keywords_only(op, name) for name, op in _OPS.items()
}
