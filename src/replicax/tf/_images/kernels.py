"""How the methods of `tf.image.resize` weigh pixels: for each new pixel some old ones along one axis, and weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_F = np.float32


class Taps(NamedTuple):
    """The pixels of which new ones are made, along one axis.

    Attributes:
        places: the numbers of old pixels, `[new, taps]`.
        weights: their weights, of the same shape.
        size: how many old pixels there are.
    """

    places: np.ndarray
    weights: np.ndarray
    size: int

    def matrix(self) -> np.ndarray:
        """Returns the weights as a matrix `[new, old]`."""
        found = np.zeros((len(self.places), self.size), _F)
        np.add.at(found, (np.arange(len(self.places))[:, None], self.places), self.weights)
        return found


def _positions(old: int, new: int) -> np.ndarray:
    """Returns where the centers of new pixels lie among the old ones, in TensorFlow's single precision."""
    return (np.arange(new, dtype=_F) + _F(0.5)) * (_F(old) / _F(new)) - _F(0.5)


def nearest(old: int, new: int) -> np.ndarray:
    """Returns for each new pixel the old one."""
    places = np.floor((np.arange(new, dtype=_F) + _F(0.5)) * (_F(old) / _F(new)))
    result: np.ndarray = np.minimum(places, old - 1).astype(np.int32)
    return result


def _bilinear(old: int, new: int) -> Taps:
    at = _positions(old, new)
    low = np.floor(at)
    share = at - low
    places = np.stack([np.maximum(low, 0), np.minimum(np.ceil(at), old - 1)], 1)
    return Taps(places.astype(np.int32), np.stack([1 - share, share], 1), old)


# TensorFlow looks the weights of `bicubic` up in a table of so many steps from pixel to pixel.
_STEPS = 1024


def _bicubic(old: int, new: int) -> Taps:
    at = _positions(old, new)
    low = np.floor(at)
    share = np.rint((at - low) * _F(_STEPS)) / _F(_STEPS)
    places = low[:, None] + np.arange(-1, 3, dtype=_F)
    weights = _keys(np.abs(share[:, None] - np.arange(-1, 3, dtype=_F))).astype(_F)
    weights = np.where((places >= 0) & (places < old), weights, 0)
    return Taps(np.clip(places, 0, old - 1).astype(np.int32), _normal(weights), old)


def _area(old: int, new: int) -> Taps:
    scale = _F(old) / _F(new)
    begin, end = np.arange(new, dtype=_F) * scale, np.arange(1, new + 1, dtype=_F) * scale
    first = np.floor(begin)
    count = int(np.max(np.ceil(end) - first))
    places = first[:, None] + np.arange(count, dtype=_F)
    inside = np.minimum(places + 1, end[:, None]) - np.maximum(places, begin[:, None])
    return Taps(np.clip(places, 0, old - 1).astype(np.int32), (np.maximum(inside, 0) / scale).astype(_F), old)


def _triangle(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = np.maximum(1 - x, 0)
    return result


def _keys(x: np.ndarray) -> np.ndarray:
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _mitchell(x: np.ndarray) -> np.ndarray:
    near = (7.0 / 6.0 * x - 2) * x * x + 8.0 / 9.0
    far = ((-7.0 / 18.0 * x + 2) * x - 10.0 / 3.0) * x + 16.0 / 9.0
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _gaussian(x: np.ndarray) -> np.ndarray:
    return np.where(x < 1.5, np.exp(-2 * x * x), 0)


def _lanczos(radius: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.where(x < radius, np.sinc(x) * np.sinc(x / radius), 0)


# The radius and the function of each kernel.
_KERNELS: dict[str, tuple[float, Callable[[np.ndarray], np.ndarray]]] = {
    "bilinear": (1, _triangle),
    "bicubic": (2, _keys),
    "mitchellcubic": (2, _mitchell),
    "gaussian": (1.5, _gaussian),
    "lanczos3": (3, _lanczos(3)),
    "lanczos5": (5, _lanczos(5)),
}
METHODS = ("nearest", "area", *_KERNELS)


def _scaled(method: str, old: int, new: int, antialias: bool) -> Taps:
    radius, kernel = _KERNELS[method]
    step = _F(1) / (_F(new) / _F(old))
    stretch = max(step, _F(1)) if antialias else _F(1)
    at = (np.arange(new, dtype=_F) + _F(0.5)) * step
    first = np.maximum(np.ceil(at - _F(radius) * stretch - _F(0.5)), 0)
    count = min(old, 2 * math.ceil(radius * stretch) + 1)
    places = first[:, None] + np.arange(count, dtype=_F)
    distance = np.abs(places + _F(0.5) - at[:, None]) / stretch
    weights = np.where(places < old, kernel(distance), 0).astype(_F)
    return Taps(np.minimum(places, old - 1).astype(np.int32), _normal(weights), old)


def _normal(weights: np.ndarray) -> np.ndarray:
    total = weights.sum(1, keepdims=True)
    found: np.ndarray = weights / np.where(np.abs(total) < 1e-30, 1, total)
    return found


def keeps_size(method: str, antialias: bool) -> bool:
    """Returns whether an image of the same size stays as it is."""
    return method == "area" or (method in ("bilinear", "bicubic") and not antialias)


@functools.lru_cache(512)
def taps(method: str, old: int, new: int, antialias: bool) -> Taps:
    """Returns the pixels of which `new` pixels are made of `old` ones."""
    if method == "area":
        return _area(old, new)
    if not antialias and method in ("bilinear", "bicubic"):
        return (_bilinear if method == "bilinear" else _bicubic)(old, new)
    return _scaled(method, old, new, antialias)


@functools.lru_cache(64)
def matrix(method: str, old: int, new: int, antialias: bool) -> np.ndarray:
    """Returns the weights of `taps` as a matrix `[new, old]`."""
    return taps(method, old, new, antialias).matrix()
