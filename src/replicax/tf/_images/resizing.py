"""`tf.image.resize` and its kin."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax
import numpy as np

from replicax.tf._host import jnp
from replicax.tf._images import host, kernels
from replicax.tf._images.checks import check, compiled, image_of, require
from replicax.tf._images.geometry import pad_to_bounding_box
from replicax.tf._operations import operations
from replicax.tf._ops import as_int, convert_to_tensor, known
from replicax.tf._types import ShapeLike, TensorLike


class ResizeMethod:
    """The names of the methods of `tf.image.resize`."""

    BILINEAR = "bilinear"
    NEAREST_NEIGHBOR = "nearest"
    BICUBIC = "bicubic"
    AREA = "area"
    LANCZOS3 = "lanczos3"
    LANCZOS5 = "lanczos5"
    GAUSSIAN = "gaussian"
    MITCHELLCUBIC = "mitchellcubic"


# Kernels with more pixels are products of matrices.
_FEW = 4


def resize(
    images: TensorLike,
    size: ShapeLike,
    method: str = ResizeMethod.BILINEAR,
    preserve_aspect_ratio: bool = False,
    antialias: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns an image, or a batch of images, of another size; float32, with "nearest" of the image's dtype.

    Args:
        images: `[height, width, channels]`, or a batch of such.
        size: the new height and width.
        method: one of `tf.image.ResizeMethod`.
        preserve_aspect_ratio: whether the result is as large as fits into `size` with the ratio of height to width.
        antialias: whether all pixels count where the image becomes smaller.
    """
    tensor = image_of(images)
    height, width = _size(size)
    check(method in kernels.METHODS, f"Resize method is not implemented: {method}. Use one of {kernels.METHODS}.")
    rows, columns = tensor.shape[-3:-1]
    sizes = rows, columns, height, width
    require(min(sizes) > 0, f"output dimensions must be positive, got {height, width} for an image {rows, columns}.")
    if preserve_aspect_ratio:
        scale = min(np.float32(height) / np.float32(rows), np.float32(width) / np.float32(columns))
        height, width = (max(int(np.rint(scale * np.float32(n))), 1) for n in (rows, columns))
    if method == ResizeMethod.NEAREST_NEIGHBOR:
        return _taken(tensor, kernels.nearest(rows, height), kernels.nearest(columns, width))
    if (height, width) == (rows, columns) and kernels.keeps_size(method, antialias):
        return tensor.astype(np.float32)
    if host.has(tensor):
        return host.resized(tensor, method, height, width, antialias)
    return _program(method, height, width, antialias)(tensor)


def _size(size: ShapeLike) -> tuple[int, int]:
    match size:
        case [int(height), int(width)]:  # the usual form, without a conversion
            return height, width
    found = known(convert_to_tensor(size), "The size", "Use Python numbers.")
    check(found.shape == (2,), f"'size' must be a 1-D Tensor of 2 elements: new_height, new_width, got {size}.")
    check(np.issubdtype(found.dtype, np.integer), f"'size' must be a 1-D int32 Tensor, got {size}.")
    return int(found[0]), int(found[1])


def _taken(image: jax.Array, rows: np.ndarray, columns: np.ndarray) -> jax.Array:
    """Returns an image with these rows and columns."""
    if len(rows) == image.shape[-3] and len(columns) == image.shape[-2]:
        return image
    return image[..., rows[:, None], columns[None, :], :]


@functools.lru_cache(256)
def _program(method: str, height: int, width: int, antialias: bool) -> Callable[[jax.Array], jax.Array]:
    """Returns the program that resizes arrays of JAX; the shape of its argument decides on the weights."""

    def resized(image: jax.Array) -> jax.Array:
        rows, columns = image.shape[-3:-1]
        image = _along(image.astype(np.float32), -3, kernels.taps(method, rows, height, antialias))
        return _along(image, -2, kernels.taps(method, columns, width, antialias))

    program: Callable[[jax.Array], jax.Array] = jax.jit(resized, inline=True)
    return program


def _along(image: jax.Array, axis: int, taps: kernels.Taps) -> jax.Array:
    """Returns an image whose pixels are made of old ones along one axis."""
    if taps.places.shape[1] > _FEW:
        equation = "oi,...ijc->...ojc" if axis == -3 else "oj,...ijc->...ioc"
        return jax.numpy.einsum(equation, taps.matrix(), image, precision="highest")
    parts = [
        jax.numpy.take(image, places, axis) * weights.reshape(-1, *[1] * (-axis - 1))
        for places, weights in zip(taps.places.T, taps.weights.T)
    ]
    result: jax.Array = functools.reduce(operator.add, parts)
    return result


def resize_with_pad(
    image: TensorLike,
    target_height: TensorLike,
    target_width: TensorLike,
    method: str = ResizeMethod.BILINEAR,
    antialias: bool = False,
) -> jax.Array:
    """Resizes an image, or a batch of images, without changing its proportions, and puts zeros around."""
    tensor = image_of(image)
    targets = [as_int(target_height, "target_height"), as_int(target_width, "target_width")]
    for name, target in zip(("height", "width"), targets):
        check(target > 0, f"target_{name} must be > 0, got {target}.")
    ratio = max(size / target for size, target in zip(tensor.shape[-3:-1], targets))
    exact = [size / ratio for size in tensor.shape[-3:-1]]
    resized = resize(tensor, [int(n) for n in exact], method, antialias=antialias)
    before = [max(0, int((target - n) / 2)) for target, n in zip(targets, exact)]
    return pad_to_bounding_box(resized, *before, *targets)


@compiled
def _at(image: jax.Array, rows: jax.Array, columns: jax.Array, numbers: jax.Array) -> jax.Array:
    """Returns the pixels of images `[batch, height, width, channels]` in these rows and columns of each box."""
    return image[numbers[:, None, None], rows[:, :, None], columns[:, None, :]]


def crop_and_resize(
    image: TensorLike,
    boxes: TensorLike,
    box_indices: TensorLike,
    crop_size: ShapeLike,
    method: str = "bilinear",
    extrapolation_value: float = 0.0,
    name: str | None = None,
) -> jax.Array:
    """Returns parts of images, `[boxes, crop height, crop width, channels]` of float32.

    Args:
        image: `[batch, height, width, channels]`.
        boxes: `[boxes, 4]`, the top, left, bottom and right of each, from 0 to 1.
        box_indices: of which image each box is.
        crop_size: the height and width of the results.
        method: "bilinear" or "nearest".
        extrapolation_value: the pixels outside of an image.
    """
    images, edges = image_of(image, (4,)), convert_to_tensor(boxes)
    numbers = convert_to_tensor(box_indices)
    require(edges.ndim == 2 and edges.shape[1] == 4, f"boxes must have shape [boxes, 4], got {tuple(edges.shape)}.")
    require(method in ("bilinear", "nearest"), f"method must be 'bilinear' or 'nearest', got {method!r}.")
    sizes = _size(crop_size)

    def positions(axis: int) -> jax.Array:
        begin, end, most = edges[:, axis], edges[:, axis + 2], np.float32(images.shape[axis + 1] - 1)
        if sizes[axis] == 1:
            return np.float32(0.5) * (begin + end)[:, None] * most
        step = (end - begin) * most / np.float32(sizes[axis] - 1)
        return (begin * most)[:, None] + np.arange(sizes[axis], dtype=np.float32) * step[:, None]

    rows, columns = positions(0), positions(1)
    within = [(at >= 0) & (at <= n - 1) for at, n in ((rows, images.shape[1]), (columns, images.shape[2]))]

    def pixels(of_row: jax.Array, of_column: jax.Array) -> jax.Array:
        places = _place(of_row, images.shape[1]), _place(of_column, images.shape[2])
        return _at(images, *places, numbers).astype(np.float32)

    if method == "nearest":
        found = pixels(jnp.floor(rows + 0.5), jnp.floor(columns + 0.5))
    else:
        top, left = jnp.floor(rows), jnp.floor(columns)
        down, across = (rows - top)[:, :, None, None], (columns - left)[:, None, :, None]
        upper, lower = (
            (first := pixels(row, left)) + (pixels(row, jnp.ceil(columns)) - first) * across
            for row in (top, jnp.ceil(rows))
        )
        found = upper + (lower - upper) * down
    known_ = within[0][:, :, None, None] & within[1][:, None, :, None]
    return jnp.where(known_, found, np.float32(extrapolation_value))


def _place(at: jax.Array, count: int) -> jax.Array:
    return jnp.clip(at, 0, count - 1).astype(np.int32)


RESIZING = "ResizeMethod crop_and_resize resize resize_with_pad"

operations(globals())
