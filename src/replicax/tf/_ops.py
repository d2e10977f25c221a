"""The basis of all operations of `replicax.tf`: conversion to tensors, and sizes and indices that tensors give.

Arguments may be variables, numpy arrays and Python numbers. Numbers become float32 and int32 tensors, as in TensorFlow;
numpy arrays keep their dtype.
"""

from __future__ import annotations

import contextlib
import math
import operator
from typing import Any, TypeGuard

import jax
import numpy as np
from jax import export

from replicax.tf import _conversions, _host, _known_values
from replicax.tf._core import (
    Composite,
    PerReplica,
    Strings,
    Variable,
    array_conversion,
    as_dtype,
    as_numpy,
    as_strings,
    as_tensor,
    errors,
    received,
)
from replicax.tf._core import value_errors as _errors
from replicax.tf._host import HostTensor, jnp
from replicax.tf._operations import value_of
from replicax.tf._types import DTypeLike, ShapeLike, TensorLike

# The classes of tensors of numbers.
TENSORS: tuple[type[jax.Array], ...] = (jax.Array, HostTensor)  # type: ignore[assignment]  # see `_host.hosted`
_NUMBERS = (bool, int, float, complex)


def convert_to_tensor(
    value: TensorLike,
    dtype: DTypeLike | None = None,
    dtype_hint: DTypeLike | None = None,
    name: str | None = None,
) -> jax.Array:
    """Converts a number, a nested list of numbers, an array or a variable to a tensor."""
    if type(value) is HostTensor and dtype is None and not _conversions.registered:
        return value  # type: ignore[return-value]  # see `_host.hosted`
    if _conversions.registered:
        value = _conversions.converted(value, dtype, name)
    if isinstance(value, Variable):
        value = value.value()
    if isinstance(value, PerReplica):
        raise _errors.not_a_tensor(value)
    if isinstance(value, Composite):
        raise _not_dense(value)
    if _is_of_bytes(value) and dtype in (None, np.dtype(object)):
        return string_tensor(value if isinstance(value, Strings) else value.copy())
    if array_conversion.has_symbolic_sizes(value):
        return _of_sizes(value, np.int32 if dtype is None else as_dtype(dtype))
    if hasattr(value, "__jax_array__") and not isinstance(value, jax.Array):  # Keras's variables too
        value = value.__jax_array__()  # type: ignore[union-attr]
    if isinstance(value, TENSORS):
        if dtype is not None and value.dtype != as_dtype(dtype):
            raise ValueError(
                f"Tensor conversion requested dtype {np.dtype(as_dtype(dtype)).name} for Tensor with dtype "
                f"{value.dtype}: {value!r}"
            )
        return value
    if isinstance(value, (list, tuple)) and array_conversion.holds_arrays(value):
        if dtype is None:
            found = [x.dtype for x in jax.tree.leaves(value, is_leaf=is_tensor) if is_tensor(x)]
            dtype = found[0] if found else None
        if all(export.is_symbolic_dim(x) or not hasattr(x, "dtype") for x in value) and dtype is None:
            return _of_sizes(np.array(value, object), np.int32)
        return jnp.stack([_element(x, dtype) for x in value])
    array = as_numpy(value)
    if array.dtype.kind in "OSU":
        if array.dtype.kind == "O" and not all(isinstance(x, (str, bytes)) for x in array.flat):
            found = next(x for x in array.flat if not isinstance(x, (str, bytes)))
            raise ValueError(f"A tensor is made of numbers or strings, got {received(found)}.")
        return string_tensor(np.vectorize(lambda x: x.encode() if isinstance(x, str) else x, otypes=[object])(array))
    if dtype is None and dtype_hint is not None and not hasattr(value, "dtype"):
        with contextlib.suppress(TypeError):
            return convert_to_tensor(value, dtype_hint)
    if dtype is not None and as_dtype(dtype) == np.dtype(object) and not array.size:
        return string_tensor(array.astype(object))
    if dtype is not None:
        array = _checked(array, as_dtype(dtype), value).astype(as_dtype(dtype))
    elif not isinstance(value, (np.ndarray, np.generic)):
        array = _narrow(array, value)
    return as_array(array)


def _not_dense(value: Composite) -> ValueError:
    """Return the error for a ragged or sparse tensor in place of a tensor."""
    kind = type(value).__name__
    ways = "tf.sparse.map_values), or make it dense with tf.sparse.to_dense."
    if kind == "RaggedTensor":
        ways = "tf.ragged.map_flat_values), or pad its rows with `to_tensor()`."
    shape = list(value.shape)  # type: ignore[attr-defined]
    return ValueError(f"A {kind} is no dense tensor, got one of shape {shape}. Compute with its values ({ways}")


def _is_of_bytes(value: object) -> TypeGuard[np.ndarray]:
    """Returns whether a value is an array of bytes objects, which takes less time than to look at each of them."""
    if not isinstance(value, np.ndarray) or value.dtype != np.dtype(object):
        return False
    return {*map(type, value.ravel().tolist())} == {bytes}


def string_tensor(array: np.ndarray) -> jax.Array:
    """Returns a tensor of strings: a NumPy array, which operations take as they take JAX's."""
    return as_strings(array)  # type: ignore[return-value]  # see `_host.hosted`


def as_array(array: np.ndarray) -> jax.Array:
    """Returns a numpy array as a tensor of the same dtype."""
    if _host.is_on():
        return _host.hosted(array)
    return array_conversion.as_array(array)


def as_element(array: np.ndarray) -> jax.Array:
    """Returns an array, of strings too, as datasets show it, and on the host in functions that run in Python."""
    tensor: jax.Array = _host.hosted(array) if _host.is_on() and array.dtype != object else as_tensor(array)
    return tensor


def _of_sizes(value: TensorLike, dtype: np.dtype | type) -> jax.Array:
    """Returns dimensions, symbolic ones among them, as a tensor that can still be used as a shape."""
    tensor = array_conversion.of_sizes(value, dtype)
    _known_values.remember(tensor, np.asarray(value, object))
    return tensor


def _element(value: TensorLike, dtype: DTypeLike | None) -> jax.Array:
    fits = dtype is None or (is_tensor(value) and value.dtype != as_dtype(dtype))
    return convert_to_tensor(value, None if fits else dtype)


def _narrow(array: np.ndarray, value: TensorLike) -> np.ndarray:
    """Converts Python numbers to TensorFlow's default dtypes; a nested list with numpy arrays keeps their dtype."""
    if isinstance(value, (list, tuple)) and any(
        isinstance(x, (np.ndarray, np.generic)) for x in jax.tree.leaves(value)
    ):
        return array
    if array.dtype == np.int64:
        fits = not array.size or (array.min() >= -(2**31) and array.max() < 2**31)
        return array.astype(np.int32) if fits else array
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _checked(array: np.ndarray, dtype: np.dtype, value: TensorLike) -> np.ndarray:
    """Raises, as TensorFlow does, for a Python number whose fraction or imaginary part would be lost."""
    loses = array_conversion.loses_a_part(array.dtype, dtype)
    if loses and array.size and not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(f"Cannot convert {value!r} to a tensor of dtype {np.dtype(dtype).name}: use tf.cast.")
    return array


def constant(
    value: TensorLike, dtype: DTypeLike | None = None, shape: ShapeLike | None = None, name: str = "Const"
) -> jax.Array:
    """Returns a tensor of these values; with `shape` in this shape, a single value repeated to fill it."""
    if isinstance(value, TENSORS):
        tensor = value if dtype is None else value.astype(as_dtype(dtype))
    else:
        tensor = convert_to_tensor(value, dtype)
    if shape is None:
        return tensor
    shape = as_shape(shape)
    if tensor.dtype == np.dtype(object):
        strings = np.asarray(tensor)
        return string_tensor(np.full(shape, strings.item(), object) if strings.size == 1 else strings.reshape(shape))
    return jnp.broadcast_to(tensor, shape) if tensor.size == 1 else jnp.reshape(tensor, shape)


def identity(input: TensorLike, name: str | None = None) -> jax.Array:
    """Returns a new tensor with the same value."""
    if isinstance(input, Composite):
        copied: jax.Array = jax.tree.map(identity, input)
        return copied
    tensor = convert_to_tensor(input)
    return tensor.copy() if tensor.dtype == np.dtype(object) else jnp.array(tensor, copy=True)


def is_tensor(x: object) -> TypeGuard[jax.Array]:
    """Returns whether `x` is a tensor or a variable."""
    return isinstance(x, (*TENSORS, Variable))


# Shapes and axes.


def known(value: TensorLike, what: str, instead: str) -> np.ndarray:
    """Returns `value` as a numpy array; the shape of a result depends on it, so it must be known while tracing.

    Raises:
        jax.errors.ConcretizationTypeError: the value is a tracer. (This is a TypeError.)
    """
    if isinstance(value, Variable):
        value = value.value()
    if isinstance(value, (list, tuple)) and array_conversion.holds_arrays(value):
        return np.asarray([known(x, what, instead) for x in value])
    if isinstance(value, jax.core.Tracer):
        if (constant := _known_values.value_of(value)) is not None:
            return constant
        # A traced function that gets this error runs on the host, if it can.
        raise jax.errors.ConcretizationTypeError(
            value,
            f"{what} determines the shape of a result, which compiled code must know while it is traced, got a traced "
            f"value that depends on {_known_values.source_of(value)}. {instead}",
        )
    return np.asarray(value, object) if array_conversion.has_symbolic_sizes(value) else as_numpy(value)


def is_known(value: TensorLike) -> bool:
    """Returns whether the value is known while tracing."""
    if isinstance(value, Variable):
        value = value.value()
    return not isinstance(value, jax.core.Tracer) or _known_values.value_of(value) is not None


_STATIC = "Use Python numbers, `x.shape` or `tf.shape(x)`, which is known while tracing."


_MOST = (
    2**58
)  # for elements of 16 bytes, the number of bytes must fit into 64 bits: XLA would end the process otherwise


def as_shape(shape: ShapeLike) -> tuple[int, ...]:
    """Converts a shape, given as a number, a list, a TensorShape or a tensor, to a tuple of ints.

    Raises:
        InvalidArgumentError: the shape is not a list of integers, or has too many elements.
    """
    try:
        if isinstance(shape, (list, tuple)):
            dims = tuple([n if type(n) is int else _dimension(n) for n in shape])
        else:
            dims = (
                (shape,)
                if type(shape) is int
                else tuple(map(_index, np.atleast_1d(known(shape, "The shape", _STATIC))))
            )
    except jax.errors.JAXTypeError:
        raise
    except (TypeError, ValueError) as error:
        said = f"Expected a shape of known integers, got {received(shape)}."
        raise errors.InvalidOperandError(said) from error
    if abs(math.prod([n for n in dims if isinstance(n, int)])) > _MOST:
        raise errors.InvalidArgumentError(f"The shape {list(dims)} has too many elements: {abs(math.prod(dims))}.")
    return dims


def _dimension(value: TensorLike) -> int:
    if isinstance(value, TENSORS) and value.dtype.kind == "f":
        return int(known(value, "An element of the shape", _STATIC))  # as in TensorFlow, where lists have such tensors
    return _index(known(value, "An element of the shape", _STATIC))


def _index(size: Any) -> int:
    """Returns a size as an int, or as the symbolic dimension that it is."""
    number: Any = size[()] if isinstance(size, np.ndarray) else size
    return number if export.is_symbolic_dim(number) else operator.index(number)  # type: ignore[return-value]


def as_new_shape(shape: ShapeLike) -> tuple[int, ...]:
    """Returns `as_shape` for the shape of a new tensor, and checks it.

    Raises:
        InvalidArgumentError: a dimension is negative, or `as_shape` raises it.
    """
    dims = as_shape(shape)
    if (least := min([n for n in dims if isinstance(n, int)], default=0)) < 0:
        raise errors.InvalidArgumentError(f"Dimension {least} must be >= 0, in the shape {list(dims)}.")
    return dims


def as_int(value: TensorLike, what: str) -> int:
    """Converts an integer that determines a shape, given as a Python number or as a tensor with a known value."""
    if type(value) is int:
        return value
    found = known(value, what, _STATIC)
    return _index(found) if found.dtype == np.dtype(object) else int(found)


def as_axis(axis: TensorLike) -> Any:
    """Converts an axis, or a list of axes, to the form that JAX takes."""
    if axis is None or isinstance(axis, int):
        return axis
    if isinstance(axis, (list, tuple)):
        return tuple(as_int(a, "The axis") for a in axis)
    array = known(axis, "The axis", _STATIC)
    return int(array) if array.ndim == 0 else tuple(int(a) for a in array)


def as_index(index: object) -> Any:
    """Converts an index to the form that JAX takes: variables to values, lists to tuples, bounds of slices to ints."""
    if isinstance(index, list) and not any(isinstance(x, (bool, list, tuple)) for x in index):
        index = tuple(index)
    return tuple(map(_part_of_index, index)) if isinstance(index, tuple) else _part_of_index(index)


def _part_of_index(part: object) -> Any:
    if isinstance(part, slice):
        return slice(*map(_bound, (part.start, part.stop, part.step)))
    return value_of(part)


def _bound(value: TensorLike) -> int | None:
    if value is None or type(value) is int:
        return value
    return _index(known(value, "A bound of a slice", "Use tf.slice with a size that is known, or tf.gather."))


def axes_of(tensor: jax.Array, axis: TensorLike) -> tuple[int, ...]:
    """Returns the given axes of a tensor, counted from 0; all of them for None."""
    n = tensor.ndim
    axes = tuple(range(n)) if axis is None else tuple(int(a) for a in np.atleast_1d(as_axis(axis)))
    if wrong := [a for a in axes if not -n <= a < n]:
        raise errors.InvalidArgumentError(f"There is no axis {wrong[0]} of a tensor of shape {tuple(tensor.shape)}.")
    return tuple(a % n for a in axes)


def check_range(indices: jax.Array, limit: int, what: str) -> None:
    """Raises for an index out of range in eager code. (Compiled code returns zeros, as TensorFlow does on GPUs.)"""
    if not isinstance(indices, jax.core.Tracer):
        array = np.asarray(indices)
        if array.size and (array.min() < 0 or array.max() >= limit):
            wrong = array[(array < 0) | (array >= limit)].flat[0]
            raise errors.InvalidArgumentError(f"{what}: indices[...] = {wrong} is not in [0, {limit})")


def is_shape(x: object) -> bool:
    """Returns whether a value may be a shape or a size that is known while a function is traced."""
    return isinstance(x, (np.ndarray, np.integer)) and x.ndim <= 1 and x.dtype in (np.int32, np.int64)
