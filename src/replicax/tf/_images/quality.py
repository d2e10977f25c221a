"""Measures of how much alike two images are: `tf.image.psnr`, `ssim` and `ssim_multiscale`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from replicax.tf import _host
from replicax.tf._host import jnp
from replicax.tf._images.checks import at_least_3d, require
from replicax.tf._images.colors import convert_image_dtype
from replicax.tf._operations import operations
from replicax.tf._ops import convert_to_tensor
from replicax.tf._types import TensorLike

_POWERS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
_AXES = (-3, -2, -1)


def _pair(first: TensorLike, second: TensorLike, max_val: TensorLike) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns two images and the largest number that they may have, as float32."""
    one, other = at_least_3d(first), at_least_3d(second)
    require(one.shape[-3:] == other.shape[-3:], f"The images have shapes {tuple(one.shape)} and {tuple(other.shape)}.")
    most = convert_image_dtype(convert_to_tensor(max_val).astype(one.dtype), np.float32)
    return convert_image_dtype(one, np.float32), convert_image_dtype(other, np.float32), most


def psnr(a: TensorLike, b: TensorLike, max_val: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the peak signal-to-noise ratio of two images, or of each pair of two batches, in decibels.

    Args:
        a: images.
        b: images of the same shape.
        max_val: the difference of the largest and the smallest number that images may have.
        name: accepted for compatibility.
    """
    one, other, most = _pair(a, b, max_val)
    error = jnp.mean(jnp.square(one - other), _AXES)
    return np.float32(20 / np.log(10)) * jnp.log(most) - np.float32(10 / np.log(10)) * jnp.log(error)


def _blurred(image: jax.Array, weights: np.ndarray) -> jax.Array:
    """Returns the weighted means of neighbouring pixels, where all neighbours are in the image."""
    height, width = (size - len(weights) + 1 for size in image.shape[-3:-1])
    lines: jax.Array = sum(weight * image[..., i : i + height, :, :] for i, weight in enumerate(weights))
    pixels: jax.Array = sum(weight * lines[..., i : i + width, :] for i, weight in enumerate(weights))
    return pixels


def _compared(
    one: jax.Array, other: jax.Array, most: jax.Array, size: float, sigma: float, k1: float, k2: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the similarity of each pixel, and the part of it that contrast and structure have."""
    for image in (one, other):
        have = tuple(image.shape)
        require(min(have[-3:-1]) >= size, f"Images of shape {have} are smaller than the filter, {size}.")
    places = np.arange(size, dtype=np.float32) - np.float32((size - 1) / 2)
    bell = np.exp(-np.square(places) / np.float32(2 * sigma**2))
    weights = bell / bell.sum()
    c1, c2 = (k1 * most) ** 2, (k2 * most) ** 2
    mean, other_mean = _blurred(one, weights), _blurred(other, weights)
    product, squares = 2 * mean * other_mean, jnp.square(mean) + jnp.square(other_mean)
    luminance = (product + c1) / (squares + c1)
    both = 2 * _blurred(one * other, weights)
    power = _blurred(jnp.square(one) + jnp.square(other), weights)
    contrast = (both - product + c2) / (power - squares + c2)
    return luminance * contrast, contrast


def _similarity(one: jax.Array, other: jax.Array, most: jax.Array, of_map: bool, *filters: float) -> jax.Array:
    return jnp.mean(_compared(one, other, most, *filters)[0], -1 if of_map else _AXES)


def ssim(
    img1: TensorLike,
    img2: TensorLike,
    max_val: TensorLike,
    filter_size: int = 11,
    filter_sigma: float = 1.5,
    k1: float = 0.01,
    k2: float = 0.03,
    return_index_map: bool = False,
) -> jax.Array:
    """Returns the structural similarity of two images, or of each pair of two batches, from -1 to 1.

    Args:
        img1: images.
        img2: images of the same shape.
        max_val: the difference of the largest and the smallest number that images may have.
        filter_size: how many pixels are compared at once, in each direction.
        filter_sigma: the width of the bell of their weights.
        k1: keeps quotients of small numbers stable.
        k2: the same for contrasts.
        return_index_map: whether to return the similarity at each pixel.
    """
    pair = _pair(img1, img2, max_val)
    return _host.on_jax(_similarity)(*pair, return_index_map, filter_size, filter_sigma, k1, k2)


def _halved(image: jax.Array) -> jax.Array:
    """Returns the means of 2 x 2 pixels; the last row and column are repeated where their number is odd."""
    height, width = image.shape[-3:-1]
    widths = [(0, 0)] * (image.ndim - 3) + [(0, height % 2), (0, width % 2), (0, 0)]
    image = jnp.pad(image, widths, "symmetric")
    rows = image[..., 0::2, :, :] + image[..., 1::2, :, :]
    return (rows[..., 0::2, :] + rows[..., 1::2, :]) / 4


def _multiscale(
    one: jax.Array, other: jax.Array, most: jax.Array, powers: Sequence[float], *filters: float
) -> jax.Array:
    parts = []
    for level in range(len(powers)):
        if level:
            one, other = _halved(one), _halved(other)
        whole, contrast = _compared(one, other, most, *filters)
        last = level == len(powers) - 1
        parts.append(jnp.maximum(jnp.mean(whole if last else contrast, (-3, -2)), 0))
    product = jnp.prod(jnp.stack(parts, -1) ** np.asarray(powers, np.float32), -1)
    return jnp.mean(product, -1)


def ssim_multiscale(
    img1: TensorLike,
    img2: TensorLike,
    max_val: TensorLike,
    power_factors: Sequence[float] = _POWERS,
    filter_size: int = 11,
    filter_sigma: float = 1.5,
    k1: float = 0.01,
    k2: float = 0.03,
) -> jax.Array:
    """Returns the structural similarity of two images over several scales, each half as large as the one before.

    Args:
        img1: images.
        img2: images of the same shape.
        max_val: the difference of the largest and the smallest number that images may have.
        power_factors: the weights of the scales, the largest first.
        filter_size: how many pixels are compared at once, in each direction.
        filter_sigma: the width of the bell of their weights.
        k1: keeps quotients of small numbers stable.
        k2: the same for contrasts.
    """
    pair = _pair(img1, img2, max_val)
    return _host.on_jax(_multiscale)(*pair, tuple(power_factors), filter_size, filter_sigma, k1, k2)


QUALITY = "psnr ssim ssim_multiscale"

operations(globals())
