"""Plain arrays: what is one, and parts of arrays that are filled up to a common shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ARRAYS = (np.ndarray, np.generic, jax.Array)  # the quickest to tell first


def part_of(array: Any, shape: tuple[int, ...]) -> Any:
    """The first so many entries along each dimension."""
    return array if array.shape == shape else array[tuple(slice(n) for n in shape)]


def filled(part: Any, shape: tuple[int, ...]) -> Any:
    """An array of this shape that begins with `part`, and is zero behind it."""
    if part.shape == shape:
        return part
    module = np if isinstance(part, np.ndarray) else jnp
    return module.pad(part, [(0, n - m) for m, n in zip(part.shape, shape)])


def is_text(array: Any) -> bool:
    """Whether an array is one of strings or objects, which numpy has and JAX has not."""
    return getattr(array.dtype, "kind", "V") in "OSU"


def is_array(value: Any) -> bool:
    """Whether `value` is an array, of JAX (concrete or traced) or numpy."""
    return isinstance(value, ARRAYS)


def largest_of(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The smallest shape in which all of these fit."""
    return tuple(max(sizes) for sizes in zip(*shapes))


def is_global(array: Any) -> bool:
    """Whether some of an array lies on devices of other processes."""
    return isinstance(array, jax.Array) and not array.is_fully_addressable
