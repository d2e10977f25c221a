"""Counts and sums from which means, variances and histograms are made."""

from __future__ import annotations

import jax
import numpy as np

from replicax.tf._core import InvalidArgumentError, as_dtype
from replicax.tf._host import jnp, lax, on_jax
from replicax.tf._op_tables import pair
from replicax.tf._operations import operations
from replicax.tf._ops import as_axis, as_int, convert_to_tensor
from replicax.tf._types import DTypeLike, TensorLike


def sufficient_statistics(
    x: TensorLike, axes: TensorLike, shift: TensorLike = None, keepdims: bool = False, name: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns the count, sum and sum of squares along the axes, of `x - shift` if it is given, and the shift."""
    tensor, along = convert_to_tensor(x), as_axis(axes)
    axes_of = range(tensor.ndim) if along is None else np.atleast_1d(along)
    count = convert_to_tensor(np.prod([tensor.shape[i] for i in axes_of]).astype(tensor.dtype))
    moved = None if shift is None else convert_to_tensor(shift, tensor.dtype)
    values = tensor if moved is None else tensor - moved
    sums = jnp.sum(values, axis=along, keepdims=keepdims)
    return count, sums, jnp.sum(jnp.square(values), axis=along, keepdims=keepdims), moved


def normalize_moments(
    counts: TensorLike, mean_ss: TensorLike, variance_ss: TensorLike, shift: TensorLike, name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance from what `sufficient_statistics` gives."""
    divisor = 1 / convert_to_tensor(counts)
    mean = convert_to_tensor(mean_ss) * divisor
    variance = convert_to_tensor(variance_ss) * divisor - jnp.square(mean)
    return mean if shift is None else mean + convert_to_tensor(shift), variance


def batch_norm_with_global_normalization(
    input: TensorLike,
    mean: TensorLike,
    variance: TensorLike,
    beta: TensorLike,
    gamma: TensorLike,
    variance_epsilon: float,
    scale_after_normalization: bool,
    name: str | None = None,
) -> jax.Array:
    """Returns `(input - mean) / sqrt(variance + epsilon)`, times `gamma` if it is to be scaled, and plus `beta`."""
    factor = lax.rsqrt(convert_to_tensor(variance) + variance_epsilon)
    factor = factor * convert_to_tensor(gamma) if scale_after_normalization else factor
    return (convert_to_tensor(input) - convert_to_tensor(mean)) * factor + convert_to_tensor(beta)


def histogram_fixed_width_bins(
    values: TensorLike,
    value_range: TensorLike,
    nbins: TensorLike = 100,
    dtype: DTypeLike = np.int32,
    name: str | None = None,
) -> jax.Array:
    """Returns in which of `nbins` bins of equal width each value lies; those beyond are in the first or the last."""
    tensor, ends = pair(values, value_range)
    count = as_int(nbins, "nbins")
    if count < 1:
        raise InvalidArgumentError(f"nbins must be a positive number, got {count}.")
    scaled = (tensor - ends[0]) / (ends[1] - ends[0])
    return jnp.clip(jnp.floor(scaled * count), 0, count - 1).astype(as_dtype(dtype))


@on_jax
def histogram_fixed_width(
    values: TensorLike,
    value_range: TensorLike,
    nbins: TensorLike = 100,
    dtype: DTypeLike = np.int32,
    name: str | None = None,
) -> jax.Array:
    """Returns how many values lie in each of `nbins` bins of equal width; those beyond count at the ends."""
    bins = histogram_fixed_width_bins(values, value_range, nbins)
    return jnp.bincount(jnp.reshape(bins, -1), length=as_int(nbins, "nbins")).astype(as_dtype(dtype))


operations(globals())
