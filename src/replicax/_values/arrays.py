"""Plain arrays: tests for them, and padding to a common shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array: TypeAlias = np.ndarray | np.generic | jax.Array
ARRAYS = (np.ndarray, np.generic, jax.Array)  # the quickest to tell first
_Array = TypeVar("_Array", np.ndarray, jax.Array)


def part_of(array: _Array, shape: tuple[int, ...]) -> _Array:
    """Returns the leading part of an array that has this shape."""
    return array if array.shape == shape else array[tuple(slice(n) for n in shape)]


def filled(part: _Array, shape: tuple[int, ...]) -> _Array:
    """Returns `part` padded with zeros at the end of each dimension to this shape."""
    if part.shape == shape:
        return part
    padding = [(0, n - m) for m, n in zip(part.shape, shape)]
    return np.pad(part, padding) if isinstance(part, np.ndarray) else jnp.pad(part, padding)


def is_text(array: Array) -> bool:
    """Returns whether an array holds strings or objects, which JAX does not support."""
    return getattr(array.dtype, "kind", "V") in "OSU"


def is_array(value: object) -> TypeGuard[Array]:
    """Returns whether `value` is an array, of JAX (concrete or traced) or NumPy."""
    return isinstance(value, ARRAYS)


def is_numeric(value: object) -> TypeGuard[Array]:
    """Returns whether `value` is an array that JAX can take: not one of strings or objects."""
    return is_array(value) and not is_text(value)


def is_number(value: object) -> TypeGuard[Array | bool | int | float | complex]:
    """Returns whether `value` is such an array or one of Python's numbers."""
    return isinstance(value, (bool, int, float, complex)) or is_numeric(value)


def largest_of(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the smallest shape in which all of these fit."""
    return tuple(max(sizes) for sizes in zip(*shapes))


def is_global(array: object) -> bool:
    """Returns whether part of an array lies on devices of other processes."""
    return isinstance(array, jax.Array) and not array.is_fully_addressable
