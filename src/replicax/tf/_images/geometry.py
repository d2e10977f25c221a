"""Operations of `tf.image` that move pixels: flips, turns, crops, paddings and patches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import numpy as np

from replicax.tf._core import InvalidArgumentError
from replicax.tf._host import jnp, lax
from replicax.tf._images import host
from replicax.tf._images.checks import check, image_of, require
from replicax.tf._operations import operations
from replicax.tf._ops import as_int, as_shape, convert_to_tensor, is_known, known
from replicax.tf._types import ShapeLike, TensorLike


def flip_left_right(image: TensorLike) -> jax.Array:
    """Returns an image, or a batch of images, with left and right exchanged."""
    tensor = image_of(image)
    return host.mirrored(tensor) if host.has(tensor) else jnp.flip(tensor, -2)


def flip_up_down(image: TensorLike) -> jax.Array:
    """Returns an image, or a batch of images, with top and bottom exchanged."""
    return jnp.flip(image_of(image), -3)


def transpose(image: TensorLike, name: str | None = None) -> jax.Array:
    """Returns an image, or a batch of images, with rows and columns exchanged."""
    return jnp.swapaxes(image_of(image), -3, -2)


def rot90(image: TensorLike, k: TensorLike = 1, name: str | None = None) -> jax.Array:
    """Turns an image, or a batch of images, by `k` times 90 degrees counter-clockwise."""
    tensor = image_of(image)
    if is_known(k):
        return jnp.rot90(tensor, as_int(k, "The number of turns") % 4, (-3, -2))
    turns = [lambda x, n=n: jnp.rot90(x, n, (-3, -2)) for n in range(4)]
    turned: jax.Array = lax.switch(convert_to_tensor(k) % 4, turns, tensor)
    return turned


# Crops and paddings. Offsets may be values that compiled code does not know.

_Offset: TypeAlias = "int | jax.Array"


def _offset(value: TensorLike, name: str) -> _Offset:
    """Returns an offset as an int, or as a tensor where compiled code does not know it."""
    if type(value) is not int and not is_known(value):
        return convert_to_tensor(value)
    offset = as_int(value, name)
    check(offset >= 0, f"{name} must be >= 0, got {offset}.")
    return offset


def _target(value: TensorLike, name: str) -> int:
    size = as_int(value, name)
    check(size > 0, f"{name} must be > 0, got {size}.")
    return size


def crop_to_bounding_box(
    image: TensorLike,
    offset_height: TensorLike,
    offset_width: TensorLike,
    target_height: TensorLike,
    target_width: TensorLike,
) -> jax.Array:
    """Returns the part of an image, or of a batch of images, that begins at the offsets and has the target's size."""
    tensor = image_of(image)
    starts = [_offset(offset_height, "offset_height"), _offset(offset_width, "offset_width")]
    sizes = [_target(target_height, "target_height"), _target(target_width, "target_width")]
    for name, have, start, size in zip(("height", "width"), tensor.shape[-3:-1], starts, sizes):
        least = size + (start if isinstance(start, int) else 0)
        check(have >= least, f"{name} must be >= target + offset. Received: {have} and {least}.")
    return _window(tensor, [*[0] * (tensor.ndim - 3), *starts, 0], [*tensor.shape[:-3], *sizes, tensor.shape[-1]])


def _window(tensor: jax.Array, starts: Sequence[_Offset], sizes: list[int]) -> jax.Array:
    """Returns the window of a tensor that begins at `starts`, which compiled code need not know."""
    if all(isinstance(start, int) for start in starts):
        return tensor[tuple(slice(start, start + size) for start, size in zip(starts, sizes))]
    return lax.dynamic_slice(tensor, [jnp.asarray(start, np.int32) for start in starts], sizes)


def pad_to_bounding_box(
    image: TensorLike,
    offset_height: TensorLike,
    offset_width: TensorLike,
    target_height: TensorLike,
    target_width: TensorLike,
) -> jax.Array:
    """Returns an image, or a batch of images, of the target's size: zeros, with the image at the offsets."""
    tensor = image_of(image)
    starts = [_offset(offset_height, "offset_height"), _offset(offset_width, "offset_width")]
    sizes = [as_int(target_height, "target_height"), as_int(target_width, "target_width")]
    for name, have, start, size in zip(("height", "width"), tensor.shape[-3:-1], starts, sizes):
        most = size - (start if isinstance(start, int) else 0)
        check(have <= most, f"{name} must be <= target - offset. Received: {have} and {most}.")
    if all(isinstance(start, int) for start in starts) and host.has(tensor):
        return host.padded(tensor, *map(int, starts), *sizes)
    if all(isinstance(start, int) for start in starts):
        rows, columns = ((a, b - n - a) for a, b, n in zip(map(int, starts), sizes, tensor.shape[-3:-1]))
        return jnp.pad(tensor, [*[(0, 0)] * (tensor.ndim - 3), rows, columns, (0, 0)])
    canvas = jnp.zeros([*tensor.shape[:-3], *sizes, tensor.shape[-1]], tensor.dtype)
    places = [*[0] * (tensor.ndim - 3), *starts, 0]
    return lax.dynamic_update_slice(canvas, tensor, [jnp.asarray(place, np.int32) for place in places])


def central_crop(image: TensorLike, central_fraction: TensorLike) -> jax.Array:
    """Returns the central part of an image, or of a batch of images; `central_fraction` is that of each side."""
    tensor, fraction = image_of(image), float(known(central_fraction, "The fraction", "Use a Python number."))
    check(0.0 < fraction <= 1.0, f"central_fraction must be within (0, 1], got {fraction}.")
    starts = [int((size - size * fraction) / 2) for size in tensor.shape[-3:-1]]
    rows, columns = (slice(start, size - start) for start, size in zip(starts, tensor.shape[-3:-1]))
    return tensor[..., rows, columns, :]


def resize_with_crop_or_pad(image: TensorLike, target_height: TensorLike, target_width: TensorLike) -> jax.Array:
    """Returns an image, or a batch of images, of the target's size: its center is cut out, or zeros are put around."""
    tensor = image_of(image)
    targets = [_target(target_height, "target_height"), _target(target_width, "target_width")]
    gaps = [target - size for target, size in zip(targets, tensor.shape[-3:-1])]
    kept = [min(target, size) for target, size in zip(targets, tensor.shape[-3:-1])]
    cropped = crop_to_bounding_box(tensor, max(-gaps[0] // 2, 0), max(-gaps[1] // 2, 0), *kept)
    if kept == targets:
        return cropped
    return pad_to_bounding_box(cropped, max(gaps[0] // 2, 0), max(gaps[1] // 2, 0), *targets)


def window_at(value: TensorLike, size: ShapeLike, chance: Callable[[int], jax.Array]) -> jax.Array:
    """Returns a window of a tensor.

    Args:
        value: the tensor.
        size: the window's shape.
        chance: called with a number of dimensions; returns so many large random integers.
    """
    tensor, sizes = convert_to_tensor(value), list(as_shape(size))
    have = tuple(tensor.shape)
    require(len(sizes) == tensor.ndim, f"Incompatible shapes: a size {sizes} for a tensor of shape {have}.")
    limits = [most - size + 1 for most, size in zip(have, sizes)]
    require(min(limits, default=1) > 0, f"Need value.shape >= size, got {have} and {sizes}.")
    drawn = chance(tensor.ndim)
    if host.has(drawn) or not isinstance(drawn, jax.core.Tracer):
        starts = [n % limit for n, limit in zip(np.asarray(drawn).tolist(), limits)]
        return tensor[tuple([slice(start, start + size) for start, size in zip(starts, sizes)])]
    offsets = drawn % np.asarray(limits, np.int32)
    return _window(tensor, [0 if limit == 1 else offset for limit, offset in zip(limits, offsets)], sizes)


def extract_patches(
    images: TensorLike,
    sizes: Sequence[int],
    strides: Sequence[int],
    rates: Sequence[int],
    padding: str,
    name: str | None = None,
) -> jax.Array:
    """Returns patches of images as rows, `[batch, rows, columns, height * width * channels of a patch]`.

    Args:
        images: `[batch, height, width, channels]`.
        sizes: `[1, height, width, 1]` of a patch.
        strides: how far patches are apart.
        rates: how far the pixels of a patch are apart.
        padding: "VALID" or "SAME", where zeros are put around.
    """
    tensor = image_of(images, (4,))
    for what, value in (("sizes", sizes), ("strides", strides), ("rates", rates)):
        check(len(value) == 4 and value[0] == value[3] == 1, f"{what} must be [1, height, width, 1], got {value}.")
    if padding.upper() not in ("VALID", "SAME"):
        raise InvalidArgumentError(f"padding must be 'VALID' or 'SAME', got {padding!r}.")
    places, widths = [], [(0, 0)]
    for axis in (1, 2):
        reach, stride, have = (sizes[axis] - 1) * rates[axis] + 1, strides[axis], tensor.shape[axis]
        count = -(-have // stride) if padding.upper() == "SAME" else max(-(-(have - reach + 1) // stride), 0)
        missing = max((count - 1) * stride + reach - have, 0) if padding.upper() == "SAME" else 0
        widths.append((missing // 2, missing - missing // 2))
        places.append(np.arange(count)[:, None] * stride + np.arange(sizes[axis]) * rates[axis])
    padded = jnp.pad(tensor, [*widths, (0, 0)])
    rows, columns = places
    found = padded[:, rows[:, None, :, None], columns[None, :, None, :]]
    return found.reshape(*found.shape[:3], sizes[1] * sizes[2] * found.shape[-1])


# What changes from pixel to pixel


def image_gradients(image: TensorLike) -> tuple[jax.Array, jax.Array]:
    """Returns how much images `[batch, height, width, channels]` change from row to row, and from column to column."""
    tensor = convert_to_tensor(image)
    check(tensor.ndim == 4, f"image_gradients expects a 4D tensor [batch_size, h, w, d], not {tuple(tensor.shape)}.")
    down, across = tensor[:, 1:] - tensor[:, :-1], tensor[:, :, 1:] - tensor[:, :, :-1]
    return jnp.pad(down, [(0, 0), (0, 1), (0, 0), (0, 0)]), jnp.pad(across, [(0, 0), (0, 0), (0, 1), (0, 0)])


def sobel_edges(image: TensorLike) -> jax.Array:
    """Returns the vertical and the horizontal edges of images, `[batch, height, width, channels, 2]`."""
    tensor = image_of(image, (4,))
    padded = jnp.pad(tensor, [(0, 0), (1, 1), (1, 1), (0, 0)], "reflect")
    height, width = tensor.shape[1:3]

    def shifted(down: int, across: int) -> jax.Array:
        return padded[:, down : down + height, across : across + width]

    vertical = sum(weight * (shifted(2, i) - shifted(0, i)) for i, weight in enumerate((1, 2, 1)))
    horizontal = sum(weight * (shifted(i, 2) - shifted(i, 0)) for i, weight in enumerate((1, 2, 1)))
    return jnp.stack([vertical, horizontal], -1)


def total_variation(images: TensorLike, name: str | None = None) -> jax.Array:
    """Returns how much neighbouring pixels differ: the sum over an image, for each image of a batch."""
    tensor = image_of(images)
    down = tensor[..., 1:, :, :] - tensor[..., :-1, :, :]
    across = tensor[..., 1:, :] - tensor[..., :-1, :]
    axes = (-3, -2, -1)
    return (jnp.sum(jnp.abs(down), axes) + jnp.sum(jnp.abs(across), axes)).astype(tensor.dtype)


GEOMETRY = """central_crop crop_to_bounding_box extract_patches flip_left_right flip_up_down image_gradients
pad_to_bounding_box resize_with_crop_or_pad rot90 sobel_edges total_variation transpose"""

operations(globals())
