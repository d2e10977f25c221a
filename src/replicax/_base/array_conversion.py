"""Converting values to JAX arrays, of a given dtype or of their own."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import ArrayLike, DTypeLike

from replicax._base import devices, jax_internals
from replicax._base.thread_state import has_64_bit_types
from replicax._base.types import Leaf, Tree


def own_array(value: Tree, dtype: DTypeLike) -> jax.Array:
    """Returns a value as a JAX array of this dtype, which shares no memory that the user may write.

    (Where JAX has 64-bit types only on demand, it cuts off those of Python's numbers, and `jnp.array` numpy's as well.)

    Args:
        value: an array, a number, or a nested list of them, in which arrays and variables may be traced.
        dtype: the array's dtype.

    Raises:
        OverflowError: a Python integer is out of the range of the dtype.
        TypeError: the value is no number, or a float for an integer dtype, or a complex number for a real one.
    """
    if isinstance(value, np.ndarray):
        return jnp.asarray(value.copy(), dtype=dtype)
    if isinstance(value, (list, tuple)) and holds_arrays(value):
        return jnp.stack([own_array(part, dtype) for part in value])
    if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):
        value = value.__jax_array__()
    if not isinstance(value, (jax.Array, np.generic)):
        value = _of_numbers(value, dtype)
    elif loses_a_part(value.dtype, dtype) and isinstance(value, jax.Array):
        raise TypeError(f"Cannot convert an array of dtype {value.dtype} to dtype {dtype}: cast it first.")
    return jnp.asarray(np.asarray(value) if isinstance(value, np.generic) else value, dtype=dtype)


def beside(value: Tree, other: jax.Array) -> jax.Array:
    """Return an operand of an operation with an array; a list of numbers gets the array's dtype if it can."""
    if (
        isinstance(value, (list, tuple))
        and not holds_arrays(value)
        and not loses_a_part(np.asarray(value).dtype, other.dtype)
    ):
        return own_array(value, other.dtype)
    return jnp.asarray(value)


def holds_arrays(nest: Iterable[Leaf]) -> bool:
    """Returns whether a nested list holds tensors or variables, and not numbers alone."""
    return any(holds_arrays(x) if isinstance(x, (list, tuple)) else _is_array(x) for x in nest)


def _is_array(x: Leaf) -> bool:
    # `_is_tensor`: tensors of a front end that are no arrays of JAX
    return isinstance(x, jax.Array) or hasattr(x, "__jax_array__") or getattr(type(x), "_is_tensor", False)


def _of_numbers(value: Tree, dtype: DTypeLike) -> np.ndarray:
    """Returns a nested list of numbers as a NumPy array of the dtype, or of the 32-bit one that JAX uses instead."""
    found = np.asarray(value)
    if found.dtype.kind in "OSUMm" and not all(isinstance(x, (bool, int, float, complex)) for x in found.flat):
        raise TypeError(f"Expected a number or a nested list of numbers, got {value!r}.")
    if loses_a_part(found.dtype, dtype):
        raise TypeError(f"Cannot convert {value!r} to dtype {dtype} without losing a part of it: cast it first.")
    return np.array(value, dtype if has_64_bit_types() else jax.dtypes.canonicalize_dtype(dtype))


def loses_a_part(found: DTypeLike, wanted: DTypeLike) -> bool:
    """Returns whether a conversion would cut off a value's fraction or its imaginary part."""
    if jnp.issubdtype(wanted, jnp.integer):
        return bool(jnp.issubdtype(found, jnp.inexact))
    return bool(jnp.issubdtype(found, jnp.complexfloating) and jnp.issubdtype(wanted, jnp.floating))


def as_array(value: Leaf) -> jax.Array:
    """Returns a NumPy value or number as a JAX array; 64-bit dtypes are kept where JAX allows them.

    `jnp.asarray` without a dtype would be a program, which JAX compiles for each shape.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        if has_64_bit_types():
            return own_array(value, value.dtype)
        if not isinstance(value, np.ma.MaskedArray):  # which JAX refuses
            dtype = jax.dtypes.canonicalize_dtype(value.dtype)
            return jnp.asarray(np.array(value, dtype), dtype=dtype)
    return jnp.asarray(value)


def is_eager_on_cpu(shape: Iterable[Leaf]) -> bool:
    """Returns whether an array of this shape that is made here has its value now, and lies on one CPU device."""
    if not all(hasattr(size, "__index__") and size >= 0 for size in shape):
        return False
    if not jax.sharding.get_abstract_mesh().empty:
        return False
    return jax_internals.is_eager(jax_internals.current_trace()) and devices.default_device().platform == "cpu"


def sharing(array: np.ndarray) -> jax.Array:
    """Returns an array of NumPy, to which nobody writes any more, as a JAX array, which may share its memory."""
    return jax.device_put(array) if array.dtype.itemsize < 8 else as_array(array)  # which cuts 64 bits off


def has_symbolic_sizes(value: Leaf) -> bool:
    """Returns whether a value is a dimension of a symbolic shape, or a NumPy array of dimensions with such ones."""
    if isinstance(value, np.ndarray):
        if not value.dtype.hasobject or not value.size or isinstance(value.flat[0], bytes):
            return False  # of strings, to look at one is enough
        return any(map(export.is_symbolic_dim, value.flat))
    return bool(export.is_symbolic_dim(value))


def of_sizes(value: Leaf, dtype: DTypeLike = np.int32) -> jax.Array:
    """Returns dimensions, of which some are symbolic, as an array."""
    sizes = np.asarray(value, object)
    return jnp.stack([jnp.asarray(size, dtype=dtype) for size in sizes.flat]).reshape(sizes.shape)


def strong(array: ArrayLike) -> jax.Array:
    """Returns an array that is not weakly typed."""
    array = jnp.asarray(array)
    return jax.lax.convert_element_type(array, array.dtype) if array.aval.weak_type else array
