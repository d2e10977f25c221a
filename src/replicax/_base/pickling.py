"""Pickling arrays of 64-bit dtypes, which JAX itself loads as 32 bits wherever `jax_enable_x64` is off.

A pickled array then comes back with another dtype, and with another value where that does not fit, without a word.
`reduced` stores the array in JAX's own way and loads it with 64-bit dtypes enabled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


def reduced(array: Any) -> tuple[Any, ...]:
    """What pickle stores of a JAX array, as `__reduce__` returns it: loading it gives the same dtype and values.

    Arrays of other dtypes are stored as JAX stores them, so that loading them needs JAX alone.

    >>> import pickle, jax.numpy as jnp
    >>> with jax.enable_x64(True):
    ...     function, arguments = reduced(jnp.asarray(2**40))
    >>> function(*arguments).dtype
    dtype('int64')
    """
    function, arguments = array.__reduce__()
    return (_loaded, (function, arguments)) if array.dtype in _WIDE else (function, arguments)


def _loaded(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    with jax.enable_x64(True):
        return function(*arguments)


class _Stored:
    """Stands in a pickled object's state for an array, which loading or copying the state gives back."""

    __slots__ = ("_array",)

    def __init__(self, array: Any):
        self._array = array

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self._array)


def stored(tree: Any) -> Any:
    """A pytree for a pickled object's state, whose arrays keep their 64-bit dtypes."""

    def of_leaf(leaf: Any) -> Any:
        is_concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        return _Stored(leaf) if is_concrete and leaf.dtype in _WIDE else leaf

    return jax.tree.map(of_leaf, tree)
