"""Rows of ragged and sparse tensors, so that datasets can be made of them, batched, cut and split."""

from __future__ import annotations

from typing import Any

import numpy as np

from replicax._base.errors import DataLossError, InvalidArgumentError
from replicax._base.specs import TensorShape, TensorSpec
from replicax._base.types import Leaf, Tree
from replicax._data import composites
from replicax._data.ragged import RaggedTensor, RaggedTensorSpec
from replicax._data.sparse import SparseTensor, SparseTensorSpec


class RaggedRow(np.ndarray, composites.Composite):
    """A row of a ragged tensor without further ragged dimensions: an array, of which batches are ragged again."""


class RaggedRowSpec(TensorSpec):
    """The spec of a `RaggedRow`, whose first dimension is unknown."""


def ragged_element(leaf: Leaf, spec: Tree, dtype: np.dtype) -> Leaf:
    """Returns an array whose shape is not all known by its spec as an element of which batches are ragged.

    `dtype` is that of the row splits.
    """
    unknown = _unknown(spec)
    if unknown is None:
        return leaf
    if unknown == 0:
        return leaf.view(RaggedRow)
    return RaggedTensor.from_tensor(leaf, ragged_rank=unknown, row_splits_dtype=dtype)


def spec_of_ragged_element(spec: Tree) -> Tree:
    """Returns the spec of what `ragged_element` gives for arrays of this spec."""
    unknown = _unknown(spec)
    if unknown is None:
        return spec
    found: Tree = RaggedRowSpec((None, *tuple(spec.shape)[unknown + 1 :]), spec.dtype)
    for size in reversed(tuple(spec.shape)[:unknown]):
        found = composites.spec_of_batch(found, size)
    return found


def _unknown(spec: Tree) -> int | None:
    """Returns the last dimension of an array that is unknown by its spec; None where all are known."""
    if composites.is_composite(spec) or isinstance(spec, RaggedRowSpec):
        return None
    if spec.shape.rank is None:
        raise InvalidArgumentError(f"Batches of elements of unknown rank cannot be ragged: their spec is {spec}.")
    return max((axis for axis, size in enumerate(spec.shape) if size is None), default=None)


def sparse_element(leaf: np.ndarray, shape: TensorShape) -> SparseTensor:
    """Returns an array as a sparse tensor that has all of its values, as a part of a tensor of this shape."""
    too_large = any(size is not None and size < own for size, own in zip(shape, leaf.shape))
    if shape.rank != leaf.ndim or too_large:
        raise DataLossError(
            f"An element of shape {leaf.shape} does not fit into the `row_shape` of `sparse_batch`, {shape}."
        )
    indices = np.stack([axis.ravel() for axis in np.indices(leaf.shape)], 1)
    sizes = [own if size is None else size for size, own in zip(shape, leaf.shape)]
    return SparseTensor(indices, leaf.ravel(), np.array(sizes, np.int64))


def spec_of_sparse_element(spec: TensorSpec, shape: TensorShape) -> Tree:
    """Returns the spec of what `sparse_element` gives for arrays of this spec."""
    return _spec_of_sparse(shape.rank, spec.dtype)


def host_spec_of(spec: RaggedTensorSpec | SparseTensorSpec) -> Tree:
    """Returns the spec of what has a spec that users see: a pytree of those of its arrays."""
    if isinstance(spec, SparseTensorSpec):
        return _spec_of_sparse(spec.shape.rank, spec.dtype)
    inner = tuple(spec.shape)[spec.ragged_rank + 1 :]
    if not spec.ragged_rank:
        return RaggedRowSpec((None, *inner), spec.dtype)
    found: Tree = TensorSpec((None, *inner), spec.dtype)
    for size in (*[None] * (spec.ragged_rank - 1), spec.shape[0]):
        found = RaggedTensor(found, _spec_of_splits(size, spec.row_splits_dtype))  # type: ignore[arg-type]
    return found


def filled(spec: RaggedTensor | RaggedRowSpec, rows: int, value: int) -> Leaf:
    """Returns so many rows for a spec, all of the length `value`, and made of this number."""
    if isinstance(spec, RaggedTensor):
        inner = filled(spec.values, rows * value, value)
        return RaggedTensor(inner, (np.arange(rows + 1) * value).astype(spec.row_splits.dtype))
    shape = (value if size is None else size for size in tuple(spec.shape)[1:])
    return np.full((rows, *shape), b"" if spec.dtype.hasobject else value, spec.dtype)


def no_rows(spec: Tree) -> Leaf:
    """Returns a leaf of a batch of this spec that has no rows."""
    if isinstance(spec, RaggedTensor):
        return filled(spec, 0, 0)
    if isinstance(spec, SparseTensor):
        rank = spec.indices.shape[1] or 1
        return SparseTensor(np.zeros((0, rank), np.int64), np.zeros(0, spec.dtype), np.zeros(rank, np.int64))
    return np.zeros((0, *(n or 0 for n in tuple(spec.shape)[1:])), spec.dtype)


@composites.row_count.register
def _(leaf: RaggedTensor) -> int:
    return leaf.nrows()


@composites.row.register
def _(leaf: RaggedTensor, number: int) -> Leaf:
    found = leaf[number]
    return found if isinstance(found, RaggedTensor) else np.asarray(found).view(RaggedRow)


@composites.rows_between.register
def _(leaf: RaggedTensor, start: int, stop: int | None) -> Leaf:
    return leaf[start:stop]


@composites.rows_at.register
def _(leaf: RaggedTensor, numbers: np.ndarray) -> Leaf:
    splits = np.asarray(leaf.row_splits)
    begins, lengths = splits[numbers], splits[numbers + 1] - splits[numbers]
    ends = lengths.cumsum()
    places = np.repeat(begins - (ends - lengths), lengths) + np.arange(lengths.sum())
    return RaggedTensor(composites.rows_at(leaf.values, places), _splits(lengths, splits.dtype))


@composites.stacked.register
def _(leaf: RaggedTensor, *others: RaggedTensor) -> Leaf:
    parts = [leaf, *others]
    return RaggedTensor(composites.joined(*parts), _splits([part.nrows() for part in parts], leaf.row_splits.dtype))


@composites.stacked.register
def _(leaf: RaggedRow, *others: RaggedRow) -> Leaf:
    parts = [np.asarray(part) for part in (leaf, *others)]
    return RaggedTensor(np.concatenate(parts), _splits([*map(len, parts)]))


@composites.joined.register
def _(leaf: RaggedTensor, *others: RaggedTensor) -> Leaf:
    parts = [leaf, *others]
    lengths = np.concatenate([np.diff(np.asarray(part.row_splits)) for part in parts])
    values = composites.joined(*[part.values for part in parts])
    return RaggedTensor(values, _splits(lengths, leaf.row_splits.dtype))


def _splits(lengths: Any, dtype: Any = np.int64) -> np.ndarray:
    return np.append(0, np.cumsum(lengths)).astype(dtype)


@composites.row_count.register
def _(leaf: SparseTensor) -> int:
    return int(leaf.dense_shape[0])


@composites.row.register
def _(leaf: SparseTensor, number: int) -> Leaf:
    there = leaf.indices[:, 0] == number
    return SparseTensor(leaf.indices[there][:, 1:], leaf.values[there], leaf.dense_shape[1:])


@composites.rows_between.register
def _(leaf: SparseTensor, start: int, stop: int | None) -> Leaf:
    first, last, _ = slice(start, stop).indices(int(leaf.dense_shape[0]))
    there = (leaf.indices[:, 0] >= first) & (leaf.indices[:, 0] < last)
    return SparseTensor(
        _moved(leaf.indices[there], -first), leaf.values[there], _of_rows(leaf.dense_shape, max(0, last - first))
    )


@composites.rows_at.register
def _(leaf: SparseTensor, numbers: np.ndarray) -> Leaf:
    return composites.stacked(*[composites.row(leaf, number) for number in numbers.tolist()])


@composites.stacked.register
def _(leaf: SparseTensor, *others: SparseTensor) -> Leaf:
    parts = [leaf, *others]
    indices = [np.insert(part.indices, 0, number, axis=1) for number, part in enumerate(parts)]
    shape = np.append(len(parts), np.max([part.dense_shape for part in parts], axis=0, initial=0))
    return SparseTensor(np.concatenate(indices), np.concatenate([part.values for part in parts]), shape)


@composites.joined.register
def _(leaf: SparseTensor, *others: SparseTensor) -> Leaf:
    parts = [leaf, *others]
    counts = np.array([composites.row_count(part) for part in parts])
    indices = [_moved(part.indices, before) for part, before in zip(parts, counts.cumsum() - counts)]
    shape = _of_rows(np.max([part.dense_shape for part in parts], axis=0), counts.sum())
    return SparseTensor(np.concatenate(indices), np.concatenate([part.values for part in parts]), shape)


def _moved(indices: np.ndarray, rows: int) -> np.ndarray:
    moved = np.array(indices)
    moved[:, 0] += rows
    return moved


def _of_rows(shape: np.ndarray, count: int) -> np.ndarray:
    return np.append(count, shape[1:])


@composites.spec_of_batch.register
def _(spec: RaggedRowSpec, size: int | None) -> Tree:
    values = TensorSpec((None, *tuple(spec.shape)[1:]), spec.dtype)
    return RaggedTensor(values, _spec_of_splits(size, np.int64))  # type: ignore[arg-type]


@composites.spec_of_batch.register
def _(spec: RaggedTensor, size: int | None) -> Tree:
    return RaggedTensor(_any_rows(spec), _spec_of_splits(size, spec.row_splits.dtype))  # type: ignore[arg-type]


@composites.spec_of_row.register
def _(spec: RaggedTensor) -> Tree:
    if isinstance(spec.values, RaggedTensor):
        return _any_rows(spec.values)
    return RaggedRowSpec((None, *tuple(spec.values.shape)[1:]), spec.dtype)


@composites.spec_of_batch.register
def _(spec: SparseTensor, size: int | None) -> Tree:
    return _with_rank(spec, 1)


@composites.spec_of_row.register
def _(spec: SparseTensor) -> Tree:
    return _with_rank(spec, -1)


def _any_rows(spec: RaggedTensor) -> RaggedTensor:
    """Returns the spec of a ragged tensor with any number of rows."""
    values = spec.values
    inner = _any_rows(values) if isinstance(values, RaggedTensor) else TensorSpec((None, *values.shape[1:]), spec.dtype)
    return RaggedTensor(inner, _spec_of_splits(None, spec.row_splits.dtype))  # type: ignore[arg-type]


def _spec_of_splits(rows: int | None, dtype: Any) -> TensorSpec:
    return TensorSpec((None if rows is None else rows + 1,), dtype)


def _spec_of_sparse(rank: int | None, dtype: np.dtype) -> Tree:
    leaves = TensorSpec((None, rank), np.int64), TensorSpec((None,), dtype), TensorSpec((rank,), np.int64)
    return SparseTensor.tree_unflatten(None, leaves)


def _with_rank(spec: SparseTensor, more: int) -> Tree:
    rank = spec.indices.shape[1]
    return _spec_of_sparse(None if rank is None else rank + more, spec.dtype)
