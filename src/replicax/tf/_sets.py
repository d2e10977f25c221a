"""`tf.sets`: each row of the last axis is a set. Shapes depend on values, so compiled code has none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import numpy as np

from replicax.tf._core import SparseTensor
from replicax.tf._ops import convert_to_tensor, known
from replicax.tf._types import TensorLike

_Place: TypeAlias = tuple[int, ...]
_Value: TypeAlias = "int | bytes"
_Set: TypeAlias = "set[_Value]"


def _rows(sets: TensorLike) -> tuple[dict[_Place, list[_Value]], tuple[int, ...], np.dtype]:
    """Returns the values of each row, by the row's place; the shape of places, and the dtype."""
    if isinstance(sets, SparseTensor):
        shape = tuple(np.asarray(sets.dense_shape).tolist())[:-1]
        rows: dict[_Place, list[_Value]] = {place: [] for place in np.ndindex(shape)}
        for index, value in zip(np.asarray(sets.indices).tolist(), np.asarray(sets.values).tolist()):
            rows[tuple(index[:-1])].append(value)
        return rows, shape, np.asarray(sets.values).dtype
    values = known(convert_to_tensor(sets), "A set", "Compute with sets outside of compiled code.")
    shape = values.shape[:-1]
    return {place: values[place].tolist() for place in np.ndindex(shape)}, shape, values.dtype


def _computed(a: TensorLike, b: TensorLike, combine: Callable[[_Set, _Set], _Set]) -> SparseTensor:
    ours, shape, dtype = _rows(a)
    theirs, other, _ = _rows(b)
    if shape != other:
        raise ValueError(f"The sets have shapes {shape} and {other}, which must be the same.")
    found = {place: sorted(combine(set(ours[place]), set(theirs[place]))) for place in np.ndindex(shape)}
    indices = [[*place, number] for place, row in found.items() for number in range(len(row))]
    values = [value for row in found.values() for value in row]
    dense = [*shape, max(map(len, found.values()), default=0)]
    array = np.array(indices, np.int64).reshape(-1, len(shape) + 1)
    return SparseTensor(array, convert_to_tensor(np.array(values, dtype)), np.array(dense, np.int64))


def difference(a: TensorLike, b: TensorLike, aminusb: bool = True, validate_indices: bool = True) -> SparseTensor:
    """Returns what is in the sets of `a` and not in those of `b`, or the other way round."""
    return _computed(a, b, lambda x, y: x - y if aminusb else y - x)


def intersection(a: TensorLike, b: TensorLike, validate_indices: bool = True) -> SparseTensor:
    """Returns what is in the sets of both."""
    return _computed(a, b, lambda x, y: x & y)


def union(a: TensorLike, b: TensorLike, validate_indices: bool = True) -> SparseTensor:
    """Returns what is in the sets of one or the other."""
    return _computed(a, b, lambda x, y: x | y)


def size(a: TensorLike, validate_indices: bool = True) -> jax.Array:
    """Returns how many values each set of a SparseTensor has, int32."""
    rows, shape, _ = _rows(a)
    return convert_to_tensor(np.array([len(set(row)) for row in rows.values()], np.int32).reshape(shape))


SETS = "difference intersection size union"
