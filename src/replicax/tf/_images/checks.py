"""What the operations of `tf.image` have in common: checks of their arguments, and compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

from replicax.tf import _host
from replicax.tf._core import InvalidArgumentError
from replicax.tf._ops import convert_to_tensor
from replicax.tf._types import TensorLike

_P = ParamSpec("_P")
_R = TypeVar("_R")


def check(condition: object, text: str) -> None:
    """Raises ValueError with a text where a condition on shapes or Python numbers does not hold."""
    if not condition:
        raise ValueError(text)


def require(condition: object, text: str) -> None:
    """Raises InvalidArgumentError with a text where a condition does not hold."""
    if not condition:
        raise InvalidArgumentError(text)


def image_of(value: TensorLike, ranks: tuple[int, ...] = (3, 4)) -> jax.Array:
    """Returns an image `[height, width, channels]`, or a batch of images, as a tensor."""
    image = convert_to_tensor(value)
    if image.ndim not in ranks:
        told = "at least three-dimensional" if image.ndim < 3 else f"a tensor of rank {' or '.join(map(str, ranks))}"
        raise ValueError(f"'image' (shape {tuple(image.shape)}) must be {told}: [height, width, channels].")
    return image


def at_least_3d(value: TensorLike) -> jax.Array:
    """Returns an image with any number of dimensions in front as a tensor."""
    image = convert_to_tensor(value)
    check(image.ndim >= 3, f"'image' (shape {tuple(image.shape)}) must be at least three-dimensional.")
    return image


def compiled(compute: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes one program of a function of tensors, which otherwise would be one for each operation in it.

    In functions of datasets that run in Python, the function computes with NumPy.
    """
    program: Callable[_P, _R] = jax.jit(compute, inline=True)

    @functools.wraps(compute)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return compute(*args, **kwargs) if _host.is_on() else program(*args, **kwargs)

    return call
