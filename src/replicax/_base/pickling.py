"""Pickling arrays of 64-bit dtypes, which JAX itself loads as 32 bits wherever `jax_enable_x64` is off.

A pickled array then comes back with another dtype, and with another value where that does not fit, without a word.
`reduced` stores the array in JAX's own way and loads it with 64-bit dtypes enabled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import numpy as np

from replicax._base.types import Leaf, Tree

_Reduced: TypeAlias = tuple[Callable[..., jax.Array], tuple[object, ...]]

_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


def reduced(array: jax.Array) -> _Reduced:
    """Returns what pickle stores of a JAX array, as `__reduce__` does; loading it gives the same dtype and values.

    Arrays of other dtypes are stored as JAX stores them, so that loading them needs JAX alone.

    >>> import pickle, jax.numpy as jnp
    >>> with jax.enable_x64(True):
    ...     function, arguments = reduced(jnp.asarray(2**40))
    >>> function(*arguments).dtype
    dtype('int64')
    """
    parts: _Reduced = array.__reduce__()  # type: ignore[assignment]
    return (_loaded, parts) if array.dtype in _WIDE else parts


def _loaded(function: Callable[..., jax.Array], arguments: tuple[object, ...]) -> jax.Array:
    with jax.enable_x64(True):
        return function(*arguments)


class _Stored:
    """Stands in a pickled object's state for an array, which loading or copying the state gives back."""

    __slots__ = ("_array",)

    def __init__(self, array: jax.Array):
        self._array = array

    def __reduce__(self) -> _Reduced:
        return reduced(self._array)


def stored(tree: Tree) -> Tree:
    """Returns a pytree for a pickled object's state, whose arrays keep their 64-bit dtypes."""

    def of_leaf(leaf: Leaf) -> Leaf:
        is_concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        return _Stored(leaf) if is_concrete and leaf.dtype in _WIDE else leaf

    return jax.tree.map(of_leaf, tree)
