"""Images in functions of datasets that run in Python: what NumPy and OpenCV compute fast for images of any size.

The results are in memory of a pool, which datasets take without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import ModuleType

import jax
import numpy as np

from replicax.tf import _host
from replicax.tf._core import host_memory, thread_state
from replicax.tf._images import kernels, libraries
from replicax.tf._types import TensorLike

pool = host_memory.Pool()
# The dtypes and the most channels and pixels of a side with which OpenCV is called.
_DTYPES = (np.dtype(np.uint8), np.dtype(np.float32))
_CHANNELS, _SIDE = 4, (1 << 15) - 1
# From so many standard deviations of the mean from 0 on, what `x * scale` is rounded by counts.
_FAR = 16


_MOST_SCRATCH = 1 << 22  # numbers: a thread keeps no more


def _scratch_for(image: np.ndarray) -> np.ndarray:
    """Returns an array of floats of an image's shape, which the thread may use until its next call."""
    if image.size > _MOST_SCRATCH:
        return pool.empty(image.shape, np.float32)
    scratch = thread_state.current.scratch
    if scratch is None or image.size > scratch.size:
        scratch = thread_state.current.scratch = np.empty(1 << (image.size - 1).bit_length(), np.float32)
    return scratch[: image.size].reshape(image.shape)


def has(tensor: TensorLike) -> bool:
    """Returns whether a tensor is on the host."""
    return isinstance(tensor, _host.HostTensor)


def _opencv_for(array: np.ndarray) -> ModuleType | None:
    """Returns OpenCV, if it is there and takes an image like this one."""
    fits = array.ndim == 3 and array.dtype in _DTYPES and 0 < array.shape[2] <= _CHANNELS
    return libraries.opencv() if fits and array.size > 0 and max(array.shape) <= _SIDE else None


def _images_of(array: np.ndarray) -> Iterable[tuple[int, ...]]:
    """Returns the indices of the images in a batch, `()` for an image."""
    return [()] if array.ndim == 3 else np.ndindex(array.shape[:-3])


def mirrored(image: TensorLike) -> jax.Array:
    """Returns an image with left and right exchanged."""
    array = np.asarray(image)
    found = pool.empty(array.shape, array.dtype)
    if (opencv := _opencv_for(array)) is not None:
        opencv.flip(array, 1, found)
    else:
        found[...] = array[..., ::-1, :]
    return _host.hosted(host_memory.settle(found))


def padded(image: TensorLike, top: int, left: int, height: int, width: int) -> jax.Array:
    """Returns an image, or a batch of images, of another size: zeros, with the image from `top` and `left` on."""
    array = np.asarray(image)
    found = pool.empty((*array.shape[:-3], height, width, array.shape[-1]), array.dtype)
    bottom, right = top + array.shape[-3], left + array.shape[-2]
    found[..., :top, :, :] = found[..., bottom:, :, :] = 0
    found[..., top:bottom, :left, :] = found[..., top:bottom, right:, :] = 0
    found[..., top:bottom, left:right, :] = array
    return _host.hosted(host_memory.settle(found))


def standardized(image: TensorLike) -> jax.Array:
    """Returns each image with mean 0 and variance 1, in few passes over its memory."""
    array = np.asarray(image)
    found = pool.empty(array.shape, np.float32)
    for at in _images_of(array):
        own, into = array[at], found[at]
        if (opencv := _opencv_for(own)) is None or not _standardize_at_once(opencv, own, into):
            _standardize(own, into)
    return _host.hosted(host_memory.settle(found))


def _standardize(image: np.ndarray, found: np.ndarray) -> None:
    """Standardizes an image into another array."""
    count, flat = image.size, found.reshape(-1)
    mean = np.float32(np.add.reduce(image, None, np.float32) / count)
    np.subtract(image, mean, found, dtype=np.float32)
    flat *= np.float32(1 / max(math.sqrt(flat @ flat / count), 1 / math.sqrt(count)))


def _standardize_at_once(opencv: ModuleType, image: np.ndarray, found: np.ndarray) -> bool:
    """Does what `_standardize` does, by one product and one sum for each number, if that is as exact."""
    count, rows = image.size, image.reshape(len(image), -1)
    mean = opencv.sumElems(rows)[0] / count
    variance = opencv.norm(rows, opencv.NORM_L2SQR) / count - mean * mean
    scale = 1 / max(math.sqrt(max(variance, 0)), 1 / math.sqrt(count))
    if not abs(mean) * scale < _FAR:  # not so if it is no number
        return False
    opencv.addWeighted(rows, scale, rows, 0, -mean * scale, found.reshape(rows.shape), opencv.CV_32F)
    return True


def resized(image: TensorLike, method: str, height: int, width: int, antialias: bool) -> jax.Array:
    """Returns an image, or a batch of images, of another size, by any method but "nearest"."""
    array = np.asarray(image)
    found = pool.empty((*array.shape[:-3], height, width, array.shape[-1]), np.float32)
    for at in _images_of(array):
        _resize(array[at], found[at], method, antialias)
    return _host.hosted(host_memory.settle(found))


def _resize(image: np.ndarray, found: np.ndarray, method: str, antialias: bool) -> None:
    """Resizes an image into another array."""
    (rows, columns, channels), (height, width, _) = image.shape, found.shape
    pixels = image
    if image.dtype != np.float32:
        pixels = _scratch_for(image)
        np.copyto(pixels, image, casting="unsafe")
    opencv = _opencv_for(pixels) if method == "bilinear" and not antialias else None
    if opencv is not None and max(height, width) <= _SIDE:
        opencv.resize(pixels, (width, height), found, interpolation=opencv.INTER_LINEAR)
        return
    lines = kernels.matrix(method, rows, height, antialias) @ pixels.reshape(rows, -1)
    by_columns = kernels.matrix(method, columns, width, antialias)
    np.matmul(by_columns, lines.reshape(height, columns, channels), out=found)
