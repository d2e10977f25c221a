"""First values of Keras's variables without a program for each shape.

Where they are made eagerly on a CPU, JAX would compile several programs for the shape of each variable, which takes
longer than anything else as a model is built. What one program has drawn, or one number, is cut to shape by NumPy
instead, and the values are the same.

| in Keras | what changes |
|---|---|
| `random.normal`, `truncated_normal`, `uniform` | some more numbers are drawn, and those that are over dropped |
| `ops.zeros`, `ones`, `full` | made by NumPy |
"""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Iterable, Sequence
from types import NoneType
from typing import Any, TypeAlias

import jax
import numpy as np

from replicax._base import array_conversion
from replicax._base.foreign_state import Original, wrap
from replicax._base.types import Tree

_SMALLEST, _LARGEST = 1 << 16, 1 << 20  # how many numbers are drawn: a power of 4 times the smallest
_OFTEN = 100  # after so many draws a shape is worth a program of its own, whose calls are quicker
_Kind: TypeAlias = "tuple[Original, tuple[int, ...]]"
_draws: collections.Counter[_Kind] = collections.Counter()


def join() -> None:
    """Changes Keras as the table above says."""
    import keras

    backend = keras.src.backend.jax
    for name in ("normal", "truncated_normal", "uniform"):
        wrap(backend.random, name, _drawn)
    for name in ("zeros", "ones", "full"):
        wrap(backend.numpy, name, _filled)


def _drawn(draw: Original, /, shape: Sequence[int], *args: Tree, **kwargs: Tree) -> Tree:
    options = [*args[:2], *(value for name, value in kwargs.items() if name != "seed")]
    if not (array_conversion.is_eager_on_cpu(shape) and _are_plain(options) and _first_are_the_same()):
        return draw(shape, *args, **kwargs)
    count, size, kind = math.prod(shape), _SMALLEST, (draw, tuple(shape))
    if 0 < count <= _LARGEST:
        _draws[kind] += 1
    if not 0 < _draws[kind] <= _OFTEN:
        return draw(shape, *args, **kwargs)
    while size < count:
        size *= 4
    drawn = np.asarray(draw((size,), *args, **kwargs))[:count]
    return array_conversion.sharing(drawn.reshape(shape).copy())  # all that was drawn would be kept in memory


def _filled(make: Original, shape: Sequence[int] | int, *args: Tree, **kwargs: Tree) -> Tree:
    sizes: Any = [operator.index(shape)] if np.ndim(shape) == 0 else shape  # type: ignore[arg-type]
    if not (array_conversion.is_eager_on_cpu(sizes) and _are_plain([*args, *kwargs.values()])):
        return make(shape, *args, **kwargs)
    value = np.asarray(make((), *args, **kwargs))
    return array_conversion.sharing(np.full(tuple(sizes), value, value.dtype))


def _are_plain(parameters: Iterable[Tree]) -> bool:
    """Returns whether none of them is an array: they are numbers, dtypes, or None."""
    return all(
        isinstance(each, (int, float, complex, str, np.generic, np.dtype, type, NoneType)) for each in parameters
    )


def _first_are_the_same() -> bool:
    """Returns whether JAX draws the same first numbers however many it draws."""
    config = jax.config
    same: bool = config.jax_threefry_partitionable and config.jax_default_prng_impl == "threefry2x32"  # type: ignore[attr-defined]
    return same
