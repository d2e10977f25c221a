"""Operations of `tf.image` that change numbers: dtypes, colors, brightness and contrast."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import numpy as np

from replicax.tf._casts import cast, saturate_cast
from replicax.tf._core import as_dtype
from replicax.tf._host import jnp
from replicax.tf._images import host, jpeg
from replicax.tf._images.checks import at_least_3d, check, compiled, require
from replicax.tf._operations import operations
from replicax.tf._ops import as_array, as_int, convert_to_tensor, is_known, known
from replicax.tf._types import DTypeLike, TensorLike


@functools.cache
def _is_integer(dtype: DTypeLike) -> bool:
    return bool(jax.numpy.issubdtype(dtype, np.integer))


@functools.cache
def _largest(dtype: DTypeLike) -> int:
    return int(np.iinfo(dtype).max)


@functools.cache
def _is_float(dtype: DTypeLike) -> bool:
    return bool(jax.numpy.issubdtype(dtype, np.floating))


def convert_image_dtype(
    image: TensorLike, dtype: DTypeLike, saturate: bool = False, name: str | None = None
) -> jax.Array:
    """Converts an image to another dtype: floats are from 0 to 1, integers from 0 to their largest number.

    Args:
        image: the image.
        dtype: the dtype of the result.
        saturate: whether numbers out of range become the nearest that the dtype has.
    """
    tensor, dtype = convert_to_tensor(image), np.dtype(as_dtype(dtype))
    for what, kind in (("dtype", dtype), ("image dtype", tensor.dtype)):
        if not (_is_integer(kind) or _is_float(kind)):
            raise AttributeError(f"{what} must be either floating point or integer, got {kind}.")
    if dtype == tensor.dtype:
        return tensor
    to = saturate_cast if saturate else cast
    if not _is_integer(tensor.dtype):
        scale = _largest(dtype) + 0.5 if _is_integer(dtype) else None  # a half, for numbers below that are rounded
        return cast(tensor, dtype) if scale is None else to(tensor * np.asarray(scale, tensor.dtype), dtype)
    if not _is_integer(dtype):
        return cast(tensor, dtype) * np.asarray(1.0 / _largest(tensor.dtype), dtype)
    have, want = _largest(tensor.dtype), _largest(dtype)
    if have > want:
        return to(tensor // np.asarray((have + 1) // (want + 1), tensor.dtype), dtype)
    return to(tensor, dtype) * np.asarray((want + 1) // (have + 1), dtype)


def _as_floats(image: TensorLike) -> tuple[jax.Array, np.dtype]:
    """Returns an image as floats to compute with, and its own dtype."""
    tensor = convert_to_tensor(image)
    kept = tensor.dtype in (np.float16, np.float32)
    return tensor if kept else convert_image_dtype(tensor, np.float32), tensor.dtype


def _as_before(floats: jax.Array, dtype: DTypeLike) -> jax.Array:
    return convert_image_dtype(floats, dtype, saturate=True)


def _number(value: TensorLike, dtype: DTypeLike) -> jax.Array | np.ndarray:
    """Returns a parameter in the dtype of the image; numbers on the host stay there."""
    if isinstance(value, (int, float, np.generic)):
        return np.asarray(value, dtype)
    return convert_to_tensor(value).astype(dtype)


# Brightness and the like


def adjust_brightness(image: TensorLike, delta: TensorLike) -> jax.Array:
    """Adds `delta` to an image; those of integers are from 0 to 1 meanwhile."""
    floats, dtype = _as_floats(image)
    return _as_before(floats + _number(delta, floats.dtype), dtype)


@compiled
def _contrasted(image: jax.Array, factor: jax.Array | np.ndarray) -> jax.Array:
    mean = jnp.mean(image, (-3, -2), keepdims=True)
    return (image - mean) * factor + mean


def adjust_contrast(images: TensorLike, contrast_factor: TensorLike) -> jax.Array:
    """Multiplies the distance of each channel from its mean by `contrast_factor`."""
    floats, dtype = _as_floats(at_least_3d(images))
    return _as_before(_contrasted(floats, _number(contrast_factor, floats.dtype)), dtype)


def adjust_gamma(image: TensorLike, gamma: TensorLike = 1, gain: TensorLike = 1) -> jax.Array:
    """Returns `gain * image ** gamma`; images of integers are from 0 to 1 meanwhile."""
    floats, dtype = _as_floats(image)
    if is_known(gamma):
        check(known(gamma, "gamma", "") >= 0, f"Gamma should be a non-negative real number, got {gamma!s}.")
    return _as_before(floats ** _number(gamma, floats.dtype) * _number(gain, floats.dtype), dtype)


@compiled
def _standardized(image: jax.Array) -> jax.Array:
    mean = jnp.mean(image, (-3, -2, -1), keepdims=True)
    centered = image - mean
    deviation = jnp.sqrt(jnp.mean(jnp.square(centered), (-3, -2, -1), keepdims=True))
    return centered / jnp.maximum(deviation, np.float32(1 / math.sqrt(math.prod(image.shape[-3:]))))


def per_image_standardization(image: TensorLike) -> jax.Array:
    """Returns each image with mean 0 and variance 1, as floats.

    The standard deviation is at least `1 / sqrt(number of values)`, so that an image of one color becomes zeros.
    """
    tensor = at_least_3d(image)
    if host.has(tensor):
        return host.standardized(tensor)
    return _standardized(cast(tensor, np.float32))


def adjust_jpeg_quality(
    image: TensorLike, jpeg_quality: TensorLike, dct_method: str = "", name: str | None = None
) -> jax.Array:
    """Returns an image as it is after it was written to a JPEG file of this quality, from 0 to 100."""
    tensor = convert_to_tensor(image)
    bytes_ = np.asarray(known(_as_before(tensor, np.uint8), "An image to be encoded", "Use it in Dataset.map."))
    content = jpeg.encoded(np.ascontiguousarray(bytes_), as_int(jpeg_quality, "The quality"))
    return _as_before(as_array(jpeg.decoded(content, bytes_.shape[-1], dct_method=dct_method)), tensor.dtype)


# Hue and saturation


def _hue(image: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the hue, from 0 to 1, and the smallest and largest of red, green and blue, each with one channel."""
    red, green, blue = image[..., 0:1], image[..., 1:2], image[..., 2:3]
    most, least = jnp.maximum(jnp.maximum(red, green), blue), jnp.minimum(jnp.minimum(red, green), blue)
    spread = most - least
    unit = 1 / (6 * jnp.where(spread > 0, spread, jnp.ones_like(spread)))
    of_green = jnp.where(green == most, unit * (blue - red) + 2.0 / 6.0, unit * (red - green) + 4.0 / 6.0)
    hue = jnp.where(red == most, unit * (green - blue), of_green)
    hue = jnp.where(spread > 0, hue, jnp.zeros_like(hue))
    return jnp.where(hue < 0, hue + 1, hue), least, most


def _shares(hue: jax.Array) -> jax.Array:
    """Returns how much of red, green and blue, from 0 to 1, a hue has."""
    turned = hue * 6
    red, green, blue = abs(turned - 3) - 1, 2 - abs(turned - 2), 2 - abs(turned - 4)
    return jnp.clip(jnp.concatenate([red, green, blue], -1), 0, 1)


@compiled
def _hsv_of(image: jax.Array) -> jax.Array:
    hue, least, most = _hue(image)
    saturation = jnp.where(most > 0, (most - least) / jnp.where(most > 0, most, jnp.ones_like(most)), 0 * most)
    return jnp.concatenate([hue, saturation, most], -1)


@compiled
def _rgb_of(image: jax.Array) -> jax.Array:
    hue, saturation, value = image[..., 0:1], image[..., 1:2], image[..., 2:3]
    return ((1 - saturation) + saturation * _shares(hue)) * value


@compiled
def _turned(image: jax.Array, delta: jax.Array | np.ndarray) -> jax.Array:
    hue, least, most = _hue(image)
    hue = hue + delta
    return least + (most - least) * _shares(hue - jnp.floor(hue))


@compiled
def _saturated(image: jax.Array, factor: jax.Array | np.ndarray) -> jax.Array:
    hsv = _hsv_of(image)
    saturation = jnp.clip(hsv[..., 1:2] * factor, 0, 1)
    return _rgb_of(jnp.concatenate([hsv[..., 0:1], saturation, hsv[..., 2:3]], -1))


def _colored(images: TensorLike) -> jax.Array:
    tensor = convert_to_tensor(images)
    found = tensor.shape[-1] if tensor.ndim else 0
    require(found == 3, f"input must have 3 channels but instead has {found} channels.")
    require(jax.numpy.issubdtype(tensor.dtype, np.floating), f"The image must have floats, got {tensor.dtype}.")
    return tensor


def rgb_to_hsv(images: TensorLike, name: str | None = None) -> jax.Array:
    """Converts floats from 0 to 1 of red, green and blue to hue, saturation and value."""
    return _hsv_of(_colored(images))


def hsv_to_rgb(images: TensorLike, name: str | None = None) -> jax.Array:
    """Converts floats from 0 to 1 of hue, saturation and value to red, green and blue."""
    return _rgb_of(_colored(images))


def adjust_hue(image: TensorLike, delta: TensorLike, name: str | None = None) -> jax.Array:
    """Turns the hue of an RGB image by `delta`, from -1 to 1, where 1 is once around."""
    if is_known(delta):
        turn = known(delta, "delta", "")
        check(-1 <= turn <= 1, f"delta must be in the interval [-1, 1], got {turn}.")
    floats, dtype = _as_floats(at_least_3d(image))
    return _as_before(_turned(_colored(floats), _number(delta, floats.dtype)), dtype)


def adjust_saturation(image: TensorLike, saturation_factor: TensorLike, name: str | None = None) -> jax.Array:
    """Multiplies the saturation of an RGB image by a factor."""
    floats, dtype = _as_floats(image)
    return _as_before(_saturated(_colored(floats), _number(saturation_factor, floats.dtype)), dtype)


# Other spaces of colors, by matrices

_YIQ = [[0.299, 0.59590059, 0.2115], [0.587, -0.27455667, -0.52273617], [0.114, -0.32134392, 0.31119955]]
_OF_YIQ = [[1.0, 1.0, 1.0], [0.95598634, -0.27201283, -1.10674021], [0.6208248, -0.64720424, 1.70423049]]
_YUV = [[0.299, -0.14714119, 0.61497538], [0.587, -0.28886916, -0.51496512], [0.114, 0.43601035, -0.10001026]]
_OF_YUV = [[1.0, 1.0, 1.0], [0.0, -0.394642334, 2.03206185], [1.13988303, -0.58062185, 0.0]]
_LUMA = [[0.2989], [0.5870], [0.1140]]


def _mixed(image: jax.Array, weights: Sequence[Sequence[float]]) -> jax.Array:
    """Returns an image whose channels are sums of the old ones."""
    require(
        image.shape[-1] == 3, f"Matrix size-incompatible: an image of shape {tuple(image.shape)} has not 3 channels."
    )
    parts = [image[..., i : i + 1] * np.asarray(row, image.dtype) for i, row in enumerate(weights)]
    return parts[0] + parts[1] + parts[2]


def _mixed_floats(images: TensorLike, weights: Sequence[Sequence[float]]) -> jax.Array:
    tensor = convert_to_tensor(images)
    if not jax.numpy.issubdtype(tensor.dtype, np.floating):
        raise TypeError(f"The image must have floats, got {tensor.dtype}: use tf.image.convert_image_dtype.")
    return _mixed(tensor, weights)


def rgb_to_yiq(images: TensorLike) -> jax.Array:
    """Converts red, green and blue to Y, I and Q."""
    return _mixed_floats(images, _YIQ)


def yiq_to_rgb(images: TensorLike) -> jax.Array:
    """Converts Y, I and Q to red, green and blue."""
    return _mixed_floats(images, _OF_YIQ)


def rgb_to_yuv(images: TensorLike) -> jax.Array:
    """Converts red, green and blue to Y, U and V."""
    return _mixed_floats(images, _YUV)


def yuv_to_rgb(images: TensorLike) -> jax.Array:
    """Converts Y, U and V to red, green and blue."""
    return _mixed_floats(images, _OF_YUV)


def rgb_to_grayscale(images: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the brightness of RGB images, with one channel."""
    tensor = convert_to_tensor(images)
    return convert_image_dtype(_mixed(convert_image_dtype(tensor, np.float32), _LUMA), tensor.dtype)


def grayscale_to_rgb(images: TensorLike, name: str | None = None) -> jax.Array:
    """Returns images of one channel with three equal ones."""
    tensor = convert_to_tensor(images)
    check(tensor.ndim and tensor.shape[-1] == 1, "Last dimension of a grayscale image should be size 1.")
    return jnp.repeat(tensor, 3, -1)


COLORS = """adjust_brightness adjust_contrast adjust_gamma adjust_hue adjust_jpeg_quality adjust_saturation
convert_image_dtype grayscale_to_rgb hsv_to_rgb per_image_standardization rgb_to_grayscale rgb_to_hsv rgb_to_yiq
rgb_to_yuv yiq_to_rgb yuv_to_rgb"""

operations(globals())
