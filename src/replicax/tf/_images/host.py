"""Images in functions of datasets that run in Python: what NumPy and OpenCV compute fast for images of any size.

The results are in memory of a pool, which datasets take without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from replicax._base import host_memory
from replicax.tf import _host
from replicax.tf._images import kernels, libraries

pool = host_memory.Pool()
# The dtypes and the most channels and pixels of a side with which OpenCV is called.
_DTYPES = (np.dtype(np.uint8), np.dtype(np.float32))
_CHANNELS, _SIDE = 4, (1 << 15) - 1


def has(tensor: Any) -> bool:
    """Returns whether a tensor is on the host."""
    return isinstance(tensor, _host.HostTensor)


def _opencv_for(array: np.ndarray) -> Any:
    """Returns OpenCV, if it is there and takes an image like this one."""
    fits = array.ndim == 3 and array.dtype in _DTYPES and 0 < array.shape[2] <= _CHANNELS
    return libraries.opencv() if fits and array.size > 0 and max(array.shape) <= _SIDE else None


def _images_of(array: np.ndarray) -> Iterable[tuple[int, ...]]:
    """Returns the indices of the images in a batch, `()` for an image."""
    return [()] if array.ndim == 3 else np.ndindex(array.shape[:-3])


def mirrored(image: Any) -> Any:
    """Returns an image with left and right exchanged."""
    array = np.asarray(image)
    found = pool.empty(array.shape, array.dtype)
    if (opencv := _opencv_for(array)) is not None:
        opencv.flip(array, 1, found)
    else:
        found[...] = array[..., ::-1, :]
    return _host.hosted(host_memory.settle(found))


def standardized(image: Any) -> Any:
    """Returns each image with mean 0 and variance 1, in few passes over its memory."""
    array = np.asarray(image)
    found = pool.empty(array.shape, np.float32)
    count = math.prod(array.shape[-3:])
    for at in _images_of(array):
        own, flat = array[at], found[at].reshape(-1)
        mean = np.float32(np.add.reduce(own, None, np.float32) / count)
        np.subtract(own, mean, found[at], dtype=np.float32)
        flat *= np.float32(1 / max(math.sqrt(flat @ flat / count), 1 / math.sqrt(count)))
    return _host.hosted(host_memory.settle(found))


def resized(image: Any, method: str, height: int, width: int, antialias: bool) -> Any:
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
        pixels = pool.empty(image.shape, np.float32)
        np.copyto(pixels, image, casting="unsafe")
    opencv = _opencv_for(pixels) if method == "bilinear" and not antialias else None
    if opencv is not None and max(height, width) <= _SIDE:
        opencv.resize(pixels, (width, height), found, interpolation=opencv.INTER_LINEAR)
        return
    lines = kernels.matrix(method, rows, height, antialias) @ pixels.reshape(rows, -1)
    by_columns = kernels.matrix(method, columns, width, antialias)
    np.matmul(by_columns, lines.reshape(height, columns, channels), out=found)
