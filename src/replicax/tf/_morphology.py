"""Maxima over windows: `tf.nn.max_pool_with_argmax`, `dilation2d` and `erosion2d`."""

from __future__ import annotations

import jax
import numpy as np

from replicax.tf._core import InvalidArgumentError, as_dtype
from replicax.tf._host import jnp, on_jax
from replicax.tf._operations import operations
from replicax.tf._ops import convert_to_tensor, known
from replicax.tf._types import DTypeLike, TensorLike


def _pair(sizes: TensorLike) -> tuple[int, int]:
    """Returns height and width of a size given as one number, as two, or as those of four axes."""
    numbers = np.atleast_1d(known(sizes, "A size", "Give Python numbers.")).tolist()
    numbers = numbers * 2 if len(numbers) == 1 else numbers
    return tuple(numbers[1:3] if len(numbers) == 4 else numbers)


def _windows(
    images: jax.Array,
    size: tuple[int, int],
    strides: tuple[int, int],
    rates: tuple[int, int],
    padding: str,
    filler: float,
) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    """Returns `[batch, height, width, window, channels]`, and the rows and columns of the windows' elements."""
    places, widths = [], [(0, 0)]
    for extent, window, stride, rate in zip(images.shape[1:3], size, strides, rates):
        reach = (window - 1) * rate + 1
        if padding not in ("SAME", "VALID"):
            raise InvalidArgumentError(f'The padding is "SAME" or "VALID", got {padding!r}.')
        count = -(-extent // stride) if padding == "SAME" else (extent - reach) // stride + 1
        missing = max(0, (count - 1) * stride + reach - extent) if padding == "SAME" else 0
        widths.append((missing // 2, missing - missing // 2))
        places.append(np.arange(count)[:, None] * stride + np.arange(window)[None, :] * rate)
    padded = jnp.pad(images, [*widths, (0, 0)], constant_values=np.array(filler, images.dtype))
    rows, columns = places[0][:, None, :, None], places[1][None, :, None, :]
    found = padded[:, rows, columns]  # [batch, height, width, window's height, window's width, channels]
    joined = jnp.reshape(found, (*found.shape[:3], size[0] * size[1], found.shape[-1]))
    return joined, rows - widths[1][0], columns - widths[2][0]


@on_jax
def max_pool_with_argmax(
    input: TensorLike,
    ksize: TensorLike,
    strides: TensorLike,
    padding: str,
    data_format: str = "NHWC",
    output_dtype: DTypeLike = np.int64,
    include_batch_in_index: bool = False,
    name: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the maxima of windows, and where they are in the flattened images.

    Args:
        input: `[batch, height, width, channels]`.
        ksize: the size of a window.
        strides: how far the windows are apart.
        padding: "SAME" or "VALID".
        data_format: "NHWC".
        output_dtype: the dtype of the places.
        include_batch_in_index: whether places count in the whole batch, or in each image by itself.
        name: accepted for compatibility.
    """
    if data_format != "NHWC":
        raise ValueError(f"Attr 'data_format' of max_pool_with_argmax must be NHWC, got {data_format!r}.")
    images, size = convert_to_tensor(input), _pair(ksize)
    lowest = -np.inf if np.issubdtype(images.dtype, np.floating) else np.iinfo(images.dtype).min
    windows, rows, columns = _windows(images, size, _pair(strides), (1, 1), padding, lowest)
    batch, height, width, channels = images.shape
    chosen = jnp.argmax(windows, axis=3)
    numbers = np.broadcast_to(rows * width + columns, (*windows.shape[1:3], *size)).reshape(1, *windows.shape[1:4], 1)
    pixels = jnp.broadcast_to(numbers, windows.shape)
    pixel = jnp.take_along_axis(pixels, chosen[:, :, :, None], axis=3)[:, :, :, 0]
    places = pixel * channels + np.arange(channels)
    if include_batch_in_index:
        places = places + np.arange(batch).reshape(-1, 1, 1, 1) * (height * width * channels)
    return jnp.max(windows, axis=3), places.astype(as_dtype(output_dtype))


@on_jax
def dilation2d(
    input: TensorLike,
    filters: TensorLike,
    strides: TensorLike,
    padding: str,
    data_format: str,
    dilations: TensorLike,
    name: str | None = None,
) -> jax.Array:
    """Returns the maxima of windows after a filter `[height, width, channels]` is added to them."""
    if data_format != "NHWC":
        raise ValueError(f"Data formats other than 'NHWC' are not supported, got {data_format!r}.")
    images, added = convert_to_tensor(input), convert_to_tensor(filters)
    size = (added.shape[0], added.shape[1])
    windows, _, _ = _windows(images, size, _pair(strides), _pair(dilations), padding, -np.inf)
    return jnp.max(windows + jnp.reshape(added, (-1, added.shape[-1])), axis=3)


def erosion2d(
    value: TensorLike,
    filters: TensorLike,
    strides: TensorLike,
    padding: str,
    data_format: str,
    dilations: TensorLike,
    name: str | None = None,
) -> jax.Array:
    """Returns the minima of windows after a filter `[height, width, channels]` is subtracted from them."""
    turned = jnp.flip(convert_to_tensor(filters), (0, 1))
    return -dilation2d(-convert_to_tensor(value), turned, strides, padding, data_format, dilations)


operations(globals())
