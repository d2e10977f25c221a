"""Specs of values other than tensors, `tf.type_spec_from_value`, and `tf.TypeSpec` itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from replicax.tf._core import (
    DatasetIterator,
    DatasetSpec,
    IndexedSlices,
    Nested,
    Optional,
    PerReplica,
    PerReplicaSpec,
    RaggedTensor,
    RaggedTensorSpec,
    SparseTensor,
    SparseTensorSpec,
    TensorShape,
    Tree,
    TypeSpec,
    Variable,
    as_dtype,
    dtype_name,
    received,
    spec_of,
)
from replicax.tf._ops import convert_to_tensor
from replicax.tf._tensor_array import TensorArray
from replicax.tf._types import DTypeLike


class IndexedSlicesSpec(TypeSpec):
    """The spec of `tf.IndexedSlices`."""

    def __init__(
        self,
        shape: Iterable[int | None] | int | None = None,
        dtype: DTypeLike = "float32",
        indices_dtype: DTypeLike = "int64",
        dense_shape_dtype: DTypeLike | None = None,
        indices_shape: Iterable[int | None] | int | None = None,
    ):
        self._shape, self._dtype, self._indices_dtype = TensorShape(shape), as_dtype(dtype), as_dtype(indices_dtype)
        self._dense_shape_dtype = None if dense_shape_dtype is None else as_dtype(dense_shape_dtype)
        self._indices_shape = TensorShape([None] if indices_shape is None else indices_shape)

    @property
    def value_type(self) -> type:
        """`tf.IndexedSlices`."""
        return IndexedSlices

    @classmethod
    def from_value(cls, value: IndexedSlices) -> IndexedSlicesSpec:
        """Returns the spec of the slices of a tensor."""
        rest, known = value.values.shape[1:], value.dense_shape is not None
        shape = tuple(map(int, value.dense_shape)) if value.dense_shape is not None else (None, *rest)
        kind = getattr(value.dense_shape, "dtype", "int32") if known else None
        return cls(shape, value.dtype, value.indices.dtype, kind, value.indices.shape)

    def _serialize(self) -> tuple[object, ...]:
        return self._shape, self._dtype, self._indices_dtype, self._dense_shape_dtype, self._indices_shape

    def __repr__(self) -> str:
        dense = None if self._dense_shape_dtype is None else dtype_name(self._dense_shape_dtype)
        names = f"{dtype_name(self._dtype)}, {dtype_name(self._indices_dtype)}, {dense}"
        return f"IndexedSlicesSpec({self._shape!r}, {names}, {self._indices_shape!r})"


class TensorArraySpec(TypeSpec):
    """The spec of a `tf.TensorArray`."""

    def __init__(
        self,
        element_shape: Iterable[int | None] | int | None = None,
        dtype: DTypeLike = "float32",
        dynamic_size: bool = False,
        infer_shape: bool = True,
    ):
        self._shape, self._dtype = TensorShape(element_shape), as_dtype(dtype)
        self._dynamic_size, self._infer_shape = dynamic_size, infer_shape

    @property
    def value_type(self) -> type:
        """`tf.TensorArray`."""
        return TensorArray

    @classmethod
    def from_value(cls, value: TensorArray) -> TensorArraySpec:
        """Returns the spec of an array of tensors."""
        return cls(value.element_shape, value.dtype, value.dynamic_size)

    def _serialize(self) -> tuple[object, ...]:
        return self._shape, self._dtype, self._dynamic_size, self._infer_shape

    def __repr__(self) -> str:
        flags = f"{self._dynamic_size}, {self._infer_shape}"
        return f"TensorArraySpec({self._shape!r}, {dtype_name(self._dtype)}, {flags})"


class _OfElements(TypeSpec):
    """The spec of what has elements."""

    def __init__(self, element_spec: Tree):
        self._element_spec = element_spec

    @property
    def element_spec(self) -> Tree:
        """The spec of the elements."""
        return self._element_spec

    @classmethod
    def from_value(cls, value: Optional | DatasetIterator) -> _OfElements:
        """Returns the spec of a value."""
        return cls(value.element_spec)

    def _serialize(self) -> tuple[object, ...]:
        return (self._element_spec,)


class OptionalSpec(_OfElements):
    """The spec of a `tf.experimental.Optional`."""

    @property
    def value_type(self) -> type:
        """`tf.experimental.Optional`."""
        return Optional


class IteratorSpec(_OfElements):
    """The spec of an iterator over a dataset."""

    @property
    def value_type(self) -> type:
        """`tf.data.Iterator`."""
        return DatasetIterator


class NoneTensorSpec(TypeSpec):
    """The spec of None."""

    @property
    def value_type(self) -> type:
        """The class of None."""
        return type(None)

    @classmethod
    def from_value(cls, value: None) -> NoneTensorSpec:
        """Returns the spec of None."""
        return cls()

    def _serialize(self) -> tuple[object, ...]:
        return ()


_KINDS: dict[type, Any] = {
    RaggedTensor: RaggedTensorSpec,
    SparseTensor: SparseTensorSpec,
    IndexedSlices: IndexedSlicesSpec,
    TensorArray: TensorArraySpec,
    Optional: OptionalSpec,
    Nested: DatasetSpec,
    DatasetIterator: IteratorSpec,
    type(None): NoneTensorSpec,
}


def type_spec_from_value(value: Any) -> Any:
    """Returns the spec of a value: a tensor, a number or what can be made one, a dataset, a ragged tensor and so on.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(value, PerReplica):
        return PerReplicaSpec(*(spec_of(part) for part in value.values))
    of_extension: Any = getattr(value, "Spec", None)
    if isinstance(of_extension, type) and issubclass(of_extension, TypeSpec):
        return value.Spec.from_value(value)
    for kind, spec in _KINDS.items():
        if isinstance(value, kind):
            return spec.from_value(value)
    if isinstance(value, (jax.Array, Variable, bool, int, float, complex, str, bytes)) or hasattr(value, "dtype"):
        return spec_of(value)
    if isinstance(value, (list, tuple)):
        return spec_of(convert_to_tensor(value))
    raise TypeError(f"Could not build a TypeSpec for {received(value)}.")
