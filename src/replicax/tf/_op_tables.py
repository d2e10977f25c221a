"""How operations of `replicax.tf` are made of functions of arrays: their operands, and tables of operations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from replicax.tf._core import DistributedValues, IndexedSlices, PerReplica, Variable, array_conversion, errors
from replicax.tf._core import value_errors as _errors
from replicax.tf._host import jnp, lax
from replicax.tf._operations import fitting, of_broadcast, on_values
from replicax.tf._ops import _NUMBERS, TENSORS, as_array, as_axis, axes_of, convert_to_tensor, is_shape, is_tensor
from replicax.tf._types import DTypeLike, TensorLike


def elementwise(compute: Callable[[jax.Array], jax.Array], doc: str) -> Callable[..., jax.Array]:
    """Returns an operation on one tensor, `x`."""

    def op(x: TensorLike, name: str | None = None) -> jax.Array:
        return on_rows(compute, x)  # type: ignore[return-value]  # IndexedSlices of IndexedSlices

    op.__doc__ = doc
    return on_values(1)(op)


def on_rows(compute: Callable[[jax.Array], jax.Array], x: TensorLike) -> jax.Array | IndexedSlices:
    """Applies `compute` to a tensor, or to the rows of IndexedSlices."""
    if isinstance(x, IndexedSlices):
        return IndexedSlices(compute(convert_to_tensor(x.values)), x.indices, x.dense_shape)
    return compute(convert_to_tensor(x))


def pair(x: TensorLike, y: TensorLike) -> tuple[jax.Array, jax.Array]:
    """Converts two operands to tensors; Python numbers and lists of numbers get the dtype of the other operand."""
    for value in (x, y):
        if isinstance(value, PerReplica):
            in_variable = any(isinstance(other, DistributedValues) and isinstance(other, Variable) for other in (x, y))
            error = _errors.not_a_tensor(value)
            raise AttributeError(*error.args) if in_variable else error
    if isinstance(x, _NUMBERS) and isinstance(y, _NUMBERS):
        return convert_to_tensor(x), convert_to_tensor(y)
    return beside(x, y), beside(y, x)


def of_dtype(value: TensorLike, dtype: DTypeLike) -> jax.Array:
    """Converts a number or tensor to a dtype. (`jnp.asarray` would convert a Python number to 32 bits first.)"""
    return value.astype(dtype) if isinstance(value, TENSORS) else as_array(np.asarray(value).astype(dtype))


def beside(value: TensorLike, other: TensorLike) -> jax.Array:
    """Converts one operand of an operation with `other`; a number or a list of numbers gets the dtype of `other`."""
    if isinstance(value, _NUMBERS):
        dtype = np.dtype(getattr(other, "dtype", np.int8))
        if dtype.itemsize >= 8 and np.can_cast(np.asarray(value).dtype, dtype, "same_kind") and not is_shape(other):
            return of_dtype(value, dtype)
        return value if hasattr(other, "dtype") else convert_to_tensor(value)  # type: ignore[return-value]  # a number
    if isinstance(value, (list, tuple)) and is_tensor(other) and not array_conversion.holds_arrays(value):
        return convert_to_tensor(value, other.dtype)
    return convert_to_tensor(value)


def _is_number(value: object) -> bool:
    return isinstance(value, _NUMBERS)


def tensors(x: TensorLike, y: TensorLike) -> tuple[jax.Array, jax.Array]:
    """Converts two operands like `pair`, to one dtype, for functions of `jax.lax` and those that differ at 0."""
    a, b = pair(x, y)
    dtype = b.dtype if _is_number(a) else a.dtype if _is_number(b) else jnp.result_type(a, b)
    return of_dtype(a, dtype), of_dtype(b, dtype)


# Operations on strings, for which JAX has no arrays.
_OF_STRINGS: dict[Callable[..., jax.Array], np.ufunc] = {jnp.equal: np.equal, jnp.not_equal: np.not_equal}


def binary(
    compute: Callable[..., jax.Array],
    doc: str,
    operands: Callable[[TensorLike, TensorLike], tuple[jax.Array, jax.Array]] = pair,
) -> Callable[..., jax.Array]:
    """Returns an operation on two tensors, `x` and `y`, which are broadcast to one shape."""
    compute, of_strings = fitting(compute, of_broadcast), _OF_STRINGS.get(compute)

    def op(x: TensorLike, y: TensorLike, name: str | None = None) -> jax.Array:
        a, b = operands(x, y)
        if any(getattr(value, "dtype", None) == np.dtype(object) for value in (a, b)):
            if of_strings is None:
                raise TypeError(
                    f"`{op.__name__}` takes no strings: tensors of strings can only be compared, and joined by "
                    "tf.strings.join."
                )
            return convert_to_tensor(np.asarray(of_strings(a, b), np.bool_))
        return compute(a, b)

    op.__doc__ = doc
    return on_values(2)(op)


def reduction(
    compute: Callable[..., jax.Array], doc: str, keep_dtype: bool = True, logical: bool = False
) -> Callable[..., jax.Array]:
    """Returns a reduction `compute(tensor, axis=, keepdims=)`, whose result has the tensor's dtype.

    With `logical` it takes only bools; the other reductions take none.
    """

    def op(
        input_tensor: TensorLike, axis: TensorLike = None, keepdims: bool = False, name: str | None = None
    ) -> jax.Array:
        tensor = convert_to_tensor(input_tensor)
        if (tensor.dtype == np.bool_) is not logical:
            needed = "bools" if logical else "numbers"
            raise errors.InvalidArgumentError(f"{op.__name__} takes {needed}, got dtype {tensor.dtype}: use tf.cast.")
        result = compute(tensor, axis=as_axis(axis), keepdims=bool(keepdims))
        return result.astype(tensor.dtype) if keep_dtype else result

    op.__doc__ = doc
    return op


def _extreme(compute: Callable[..., jax.Array]) -> Callable[[jax.Array, TensorLike, bool], jax.Array]:
    """Replaces `jnp.max` and `jnp.min`, which fail on 64-bit integers if `jax_enable_x64` is off (JAX 0.10 to 0.12)."""

    def reduce(tensor: jax.Array, axis: TensorLike, keepdims: bool) -> jax.Array:
        axes = axes_of(tensor, axis)
        result = compute(tensor, axes=axes)
        return jnp.expand_dims(result, axes) if keepdims else result

    return reduce


largest, smallest = _extreme(lax.reduce_max), _extreme(lax.reduce_min)


def no_nan(compute: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return `compute`, but 0 where the second operand is 0, with a gradient that is not NaN there."""
    return lambda x, y: jnp.where(y == 0, jnp.zeros_like(x), compute(x, jnp.where(y == 0, jnp.ones_like(y), y)))


def take(tensor: jax.Array, indices: jax.Array | np.ndarray, axis: int, **options: Any) -> jax.Array:
    """Return `jnp.take`, also of no elements along an empty axis, where JAX ignores the shape of the indices."""
    if tensor.shape[axis] == 0 and indices.size == 0:
        return jnp.zeros((*tensor.shape[:axis], *indices.shape, *tensor.shape[axis + 1 :]), tensor.dtype)
    return jnp.take(tensor, indices, axis=axis, **options)


def namespace_of(table: Mapping[str, Callable[..., object]], target: dict[str, Any]) -> None:
    """Adds a table's operations to a module's names."""
    for name, op in table.items():
        for function in (op, inspect.unwrap(op)):  # messages of the inner one name it too
            function.__name__ = function.__qualname__ = name
        op.__module__ = target["__name__"]
        target[name] = op
