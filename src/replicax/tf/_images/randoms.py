"""Operations of `tf.image` that draw random numbers: from `tf.random`'s counters, or from a seed of two integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import SupportsInt, TypeAlias

import jax
import numpy as np

from replicax.tf import _draws
from replicax.tf._host import jnp
from replicax.tf._images import colors, geometry, host
from replicax.tf._images.checks import check, image_of
from replicax.tf._operations import operations
from replicax.tf._ops import convert_to_tensor
from replicax.tf._types import DTypeLike, ShapeLike, TensorLike

# Draws floats or int32 from a range: called with a shape and the bounds.
_Uniform: TypeAlias = "Callable[..., jax.Array]"


def _apart(drawn: jax.Array) -> jax.Array:
    """Returns drawn numbers that compiled code computes once, and not again for each pixel that depends on them.

    XLA for CPUs fuses what draws them into the loops over pixels, even through `optimization_barrier`; but not a sort.
    """
    if host.has(drawn) or not isinstance(drawn, jax.core.Tracer):
        return drawn
    return jax.lax.stop_gradient(jax.numpy.sort(jax.numpy.stack([drawn, drawn], -1), -1))[..., 0]


def _by_counter(seed: SupportsInt | None) -> _Uniform:
    def draw(shape: tuple[int, ...], low: jax.Array, high: jax.Array, dtype: DTypeLike = np.float32) -> jax.Array:
        return _apart(_draws.uniform(_draws.of_op("uniform", np.dtype(dtype), seed), shape, low, high, dtype))

    return draw


def _by_seed(seed: TensorLike) -> _Uniform:
    if seed is None:
        raise ValueError("seed must have shape [2], got None.")

    def draw(shape: tuple[int, ...], low: jax.Array, high: jax.Array, dtype: DTypeLike = np.float32) -> jax.Array:
        return _apart(_draws.uniform(_draws.of_seed(seed), shape, low, high, dtype))

    return draw


# Flips


def _flipped(draw: _Uniform, image: TensorLike, flip: Callable[[jax.Array], jax.Array]) -> jax.Array:
    tensor = image_of(image)
    drawn = draw(() if tensor.ndim == 3 else (tensor.shape[0],), 0.0, 1.0)
    if tensor.ndim == 3 and (host.has(drawn) or not isinstance(drawn, jax.core.Tracer)):
        return flip(tensor) if float(drawn) < 0.5 else tensor
    chance = drawn < 0.5
    return jnp.where(jnp.reshape(chance, (-1, 1, 1, 1)[4 - tensor.ndim :]), flip(tensor), tensor)


def random_flip_left_right(image: TensorLike, seed: SupportsInt | None = None) -> jax.Array:
    """Exchanges left and right of an image, or of each image of a batch, with a probability of one half."""
    return _flipped(_by_counter(seed), image, geometry.flip_left_right)


def random_flip_up_down(image: TensorLike, seed: SupportsInt | None = None) -> jax.Array:
    """Exchanges top and bottom of an image, or of each image of a batch, with a probability of one half."""
    return _flipped(_by_counter(seed), image, geometry.flip_up_down)


def stateless_random_flip_left_right(image: TensorLike, seed: TensorLike) -> jax.Array:
    """Exchanges left and right with a probability of one half, depending on `seed` (two integers) alone."""
    return _flipped(_by_seed(seed), image, geometry.flip_left_right)


def stateless_random_flip_up_down(image: TensorLike, seed: TensorLike) -> jax.Array:
    """Exchanges top and bottom with a probability of one half, depending on `seed` (two integers) alone."""
    return _flipped(_by_seed(seed), image, geometry.flip_up_down)


# Crops

_MOST = int(np.iinfo(np.int32).max)


def _cropped(draw: _Uniform, value: TensorLike, size: ShapeLike) -> jax.Array:
    return geometry.window_at(value, size, lambda count: draw((count,), 0, _MOST, np.int32))


def random_crop(
    value: TensorLike, size: ShapeLike, seed: SupportsInt | None = None, name: str | None = None
) -> jax.Array:
    """Returns a window of shape `size` of a tensor, from a random place."""
    return _cropped(_by_counter(seed), value, size)


def stateless_random_crop(value: TensorLike, size: ShapeLike, seed: TensorLike, name: str | None = None) -> jax.Array:
    """Returns a window of shape `size` of a tensor, from a place that depends on `seed` (two integers) alone."""
    return _cropped(_by_seed(seed), value, size)


# Colors


def _between(draw: _Uniform, low: float, high: float) -> jax.Array:
    """Draws a factor between bounds that must be in order."""
    check(high > low, f"upper must be > lower, got {low} and {high}.")
    check(low >= 0, f"lower must be non-negative, got {low}.")
    return draw((), low, high)


def _around_zero(draw: _Uniform, most: float, limit: float = np.inf) -> jax.Array:
    check(most >= 0, f"max_delta must be non-negative, got {most}.")
    check(most <= limit, f"max_delta must be <= {limit}, got {most}.")
    return draw((), -most, most)


def random_brightness(image: TensorLike, max_delta: float, seed: SupportsInt | None = None) -> jax.Array:
    """Adds a number between `-max_delta` and `max_delta` to an image."""
    return colors.adjust_brightness(image, _around_zero(_by_counter(seed), max_delta))


def stateless_random_brightness(image: TensorLike, max_delta: float, seed: TensorLike) -> jax.Array:
    """Does what `random_brightness` does, depending on `seed` (two integers) alone."""
    return colors.adjust_brightness(image, _around_zero(_by_seed(seed), max_delta))


def random_contrast(image: TensorLike, lower: float, upper: float, seed: SupportsInt | None = None) -> jax.Array:
    """Multiplies the contrast of an image by a number between `lower` and `upper`."""
    return colors.adjust_contrast(image, _between(_by_counter(seed), lower, upper))


def stateless_random_contrast(image: TensorLike, lower: float, upper: float, seed: TensorLike) -> jax.Array:
    """Does what `random_contrast` does, depending on `seed` (two integers) alone."""
    return colors.adjust_contrast(image, _between(_by_seed(seed), lower, upper))


def random_hue(image: TensorLike, max_delta: float, seed: SupportsInt | None = None) -> jax.Array:
    """Turns the hue of an RGB image by a number between `-max_delta` and `max_delta`, which is at most 0.5."""
    return colors.adjust_hue(image, _around_zero(_by_counter(seed), max_delta, 0.5))


def stateless_random_hue(image: TensorLike, max_delta: float, seed: TensorLike) -> jax.Array:
    """Does what `random_hue` does, depending on `seed` (two integers) alone."""
    return colors.adjust_hue(image, _around_zero(_by_seed(seed), max_delta, 0.5))


def random_saturation(image: TensorLike, lower: float, upper: float, seed: SupportsInt | None = None) -> jax.Array:
    """Multiplies the saturation of an RGB image by a number between `lower` and `upper`."""
    return colors.adjust_saturation(image, _between(_by_counter(seed), lower, upper))


def stateless_random_saturation(image: TensorLike, lower: float, upper: float, seed: TensorLike = None) -> jax.Array:
    """Does what `random_saturation` does, depending on `seed` (two integers) alone."""
    return colors.adjust_saturation(image, _between(_by_seed(seed), lower, upper))


def _quality(draw: _Uniform, low: int, high: int) -> jax.Array:
    check(0 <= low <= 100 and 0 <= high <= 100, f"jpeg encoding range must be between 0 and 100, got {low} and {high}.")
    check(low < high, f"`min_jpeg_quality` must be less than `max_jpeg_quality`, got {low} and {high}.")
    return convert_to_tensor(draw((), low, high, np.int32))


def random_jpeg_quality(
    image: TensorLike, min_jpeg_quality: int, max_jpeg_quality: int, seed: SupportsInt | None = None
) -> jax.Array:
    """Returns an image as it is after it was written to a JPEG file of a random quality."""
    return colors.adjust_jpeg_quality(image, _quality(_by_counter(seed), min_jpeg_quality, max_jpeg_quality))


def stateless_random_jpeg_quality(
    image: TensorLike, min_jpeg_quality: int, max_jpeg_quality: int, seed: TensorLike
) -> jax.Array:
    """Does what `random_jpeg_quality` does, depending on `seed` (two integers) alone."""
    return colors.adjust_jpeg_quality(image, _quality(_by_seed(seed), min_jpeg_quality, max_jpeg_quality))


RANDOMS = """random_brightness random_contrast random_crop random_flip_left_right random_flip_up_down random_hue
random_jpeg_quality random_saturation stateless_random_brightness stateless_random_contrast stateless_random_crop
stateless_random_flip_left_right stateless_random_flip_up_down stateless_random_hue stateless_random_jpeg_quality
stateless_random_saturation"""

operations(globals())
