"""Specs of elements: dtypes and shapes that are known before there are elements."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from replicax._base.specs import TensorShape, TensorSpec, spec_of
from replicax._base.type_spec import TypeSpec
from replicax._base.types import Leaf, Tree
from replicax._data import composites
from replicax._data.composite_rows import RaggedRow, RaggedRowSpec
from replicax._data.elements import Nested, structure_of, tensor_dtype
from replicax._data.ragged import RaggedTensor, RaggedTensorSpec
from replicax._data.sparse import SparseTensor, SparseTensorSpec

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2
AUTOTUNE = -1


class DatasetSpec(TypeSpec):
    """The spec of a dataset that is an element of another one, such as those that `window` makes.

    >>> import replicax as rx
    >>> rx.data.Dataset.range(4).window(2).element_spec
    DatasetSpec(TensorSpec(shape=(), dtype=int..., name=None), TensorShape([]))
    """

    __slots__ = ("_element_spec",)
    shape, dtype = TensorShape(()), np.dtype(object)  # a scalar, of the dtype of strings and other objects

    def __init__(self, element_spec: Tree, dataset_shape: object = ()):
        self._element_spec = element_spec

    @property
    def element_spec(self) -> Tree:
        """The spec of the dataset's elements.

        >>> import replicax as rx
        >>> rx.data.Dataset.from_tensor_slices([1.0, 2.0]).window(2).element_spec.element_spec
        TensorSpec(shape=(), dtype=float32, name=None)
        """
        return self._element_spec

    @property
    def value_type(self) -> type:
        """The class of datasets.

        >>> import replicax as rx
        >>> window = next(iter(rx.data.Dataset.range(2).window(2)))
        >>> isinstance(window, rx.data.Dataset.range(2).window(2).element_spec.value_type)
        True
        """
        return Nested

    @classmethod
    def from_value(cls, value: Any) -> DatasetSpec:
        """Returns the spec of a dataset.

        >>> import replicax as rx
        >>> rx.data.DatasetSpec.from_value(rx.data.Dataset.from_tensor_slices([1.0, 2.0]))
        DatasetSpec(TensorSpec(shape=(), dtype=float32, name=None), TensorShape([]))
        """
        return cls(value.element_spec)

    def _serialize(self) -> tuple[Tree, ...]:
        return (self.element_spec,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DatasetSpec) and self.element_spec == other.element_spec

    def __hash__(self) -> int:
        return hash(("DatasetSpec", str(self.element_spec)))

    def __repr__(self) -> str:
        return f"DatasetSpec({self.element_spec}, {self.shape!r})"


def tensor_spec(spec: Tree) -> Tree:
    """Returns the specs of the tensors that users see of elements of `spec`."""

    def shown(s: TensorSpec | DatasetSpec | RaggedTensor | SparseTensor) -> Tree:
        if isinstance(s, DatasetSpec):
            return DatasetSpec(tensor_spec(s.element_spec))
        if isinstance(s, RaggedTensor):
            splits = tensor_dtype(s.row_splits.dtype)
            return RaggedTensorSpec(s.shape, tensor_dtype(s.dtype), s.ragged_rank, splits)
        if isinstance(s, SparseTensor):
            rank = s.dense_shape.shape[0]
            return SparseTensorSpec(None if rank is None else [None] * rank, tensor_dtype(s.dtype))
        if isinstance(s, RaggedRowSpec):
            return RaggedTensorSpec(s.shape, tensor_dtype(s.dtype), 0, tensor_dtype(np.dtype(np.int64)))
        return TensorSpec(s.shape, tensor_dtype(s.dtype), s.name)

    return composites.on_rows(shown, spec)


def host_spec(element: Tree) -> Tree:
    """Returns the spec of one element."""

    def shown(leaf: Leaf) -> Tree:
        if isinstance(leaf, Nested):
            return leaf._leaf_spec()
        return _spec_of_ragged_row(leaf) if isinstance(leaf, RaggedRow) else spec_of(leaf)

    return jax.tree.map(shown, element)


def _spec_of_ragged_row(leaf: RaggedRow) -> RaggedRowSpec:
    return RaggedRowSpec((None, *leaf.shape[1:]), leaf.dtype)


def shown_spec(element: Tree) -> Tree:
    """Returns the spec that an element shows. Its first dimensions count as unknown: those of the next may differ."""

    def shown(leaf: Leaf) -> Tree:
        if isinstance(leaf, Nested):
            return leaf._leaf_spec()
        if isinstance(leaf, RaggedRow):
            return _spec_of_ragged_row(leaf)
        return TensorSpec((None, *leaf.shape[1:]) if leaf.ndim else (), leaf.dtype)

    return jax.tree.map(shown, element)


def common_spec(one: Tree, other: Tree) -> Tree:
    """Returns the most specific spec that both fit."""

    def common(a: Leaf, b: Leaf) -> Tree:
        if isinstance(a, DatasetSpec):
            return DatasetSpec(common_spec(a.element_spec, b.element_spec))
        if isinstance(a, RaggedRowSpec) and isinstance(b, RaggedRowSpec):
            return a
        if a.shape.rank != b.shape.rank or None in (a.shape.rank, b.shape.rank):
            return TensorSpec(None, a.dtype)
        return TensorSpec([x if x == y else None for x, y in zip(a.shape, b.shape)], a.dtype)

    return jax.tree.map(common, one, other)


def same_kinds(one: Tree, other: Tree) -> bool:
    """Returns whether two specs have one structure, and the same dtypes."""
    if structure_of(one) != structure_of(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other))
    return all(type(a) is type(b) and a.dtype == b.dtype for a, b in pairs)


def batch_count(cardinality: int, size: int, drop_remainder: bool) -> int:
    """Returns the number of batches of this many elements; unknown and infinite cardinalities stay."""
    return cardinality if cardinality < 0 else cardinality // size if drop_remainder else -(-cardinality // size)


def with_batch(spec: Tree, size: int | None) -> Tree:
    """Returns the spec of batches of `size` elements."""
    return composites.on_rows(lambda s: composites.spec_of_batch(s, size), spec)


def without_batch(spec: Tree) -> Tree:
    """Returns the spec of the elements of batches."""
    return composites.on_rows(composites.spec_of_row, spec)
