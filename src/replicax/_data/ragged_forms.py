"""Further ways to make a RaggedTensor, and forms of it: a part of the class in `ragged`."""

from __future__ import annotations

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base.errors import InvalidArgumentError
from replicax._base.types import Leaf


class RaggedForms:
    """Methods of `RaggedTensor`."""

    values: Any
    row_splits: Any

    @classmethod
    def _rows_of(cls, values: Any, lengths: Any, dtype: Any = np.int64) -> Self:
        splits = np.append(0, np.cumsum(np.asarray(lengths))).astype(dtype)
        return cls.from_row_splits(values, splits)  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def from_value_rowids(
        cls, values: Any, value_rowids: Any, nrows: Any = None, name: str | None = None, validate: bool = True
    ) -> Self:
        """Returns a RaggedTensor of values `[total, ...]` and the row of each, `[total]` integers in order.

        Args:
            values: the values.
            value_rowids: their rows.
            nrows: how many rows there are; by default up to the last that has a value.
            validate: whether the rows are checked.

        Raises:
            InvalidArgumentError: `value_rowids` decrease or are negative.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_value_rowids([1, 2, 3], [0, 0, 2]).to_list()
        [[1, 2], [], [3]]
        """
        ids = np.asarray(value_rowids)
        if validate and len(ids) and ((np.diff(ids) < 0).any() or ids[0] < 0):
            raise InvalidArgumentError(f"value_rowids must not decrease or be negative, got {ids.tolist()}.")
        count = int(nrows) if nrows is not None else int(ids[-1]) + 1 if len(ids) else 0
        return cls._rows_of(values, np.bincount(ids.astype(np.int64), minlength=count))

    @classmethod
    def from_row_starts(cls, values: Any, row_starts: Any, name: str | None = None, validate: bool = True) -> Self:
        """Returns a RaggedTensor of values `[total, ...]`, and the place where each row begins, `[rows]`.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_starts([1, 2, 3], [0, 2]).to_list()
        [[1, 2], [3]]
        """
        return cls.from_row_splits(values, np.append(np.asarray(row_starts), np.shape(values)[0]))  # type: ignore

    @classmethod
    def from_row_limits(cls, values: Any, row_limits: Any, name: str | None = None, validate: bool = True) -> Self:
        """Returns a RaggedTensor of values `[total, ...]`, and the place where each row ends, `[rows]`.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_limits([1, 2, 3], [2, 3]).to_list()
        [[1, 2], [3]]
        """
        return cls.from_row_splits(values, np.insert(np.asarray(row_limits), 0, 0))  # type: ignore

    @classmethod
    def from_uniform_row_length(
        cls, values: Any, uniform_row_length: Any, nrows: Any = None, validate: bool = True, name: str | None = None
    ) -> Self:
        """Returns a RaggedTensor of values `[total, ...]` in rows of one length.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_uniform_row_length([1, 2, 3, 4], 2).to_list()
        [[1, 2], [3, 4]]
        """
        length = int(uniform_row_length)
        count = int(nrows) if nrows is not None else np.shape(values)[0] // max(1, length)
        return cls._rows_of(values, np.full(count, length))

    @classmethod
    def from_nested_row_splits(
        cls, flat_values: Any, nested_row_splits: Any, name: str | None = None, validate: bool = True
    ) -> Any:
        """Returns a RaggedTensor of values, and the row splits of each ragged dimension, the outermost first.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_nested_row_splits([1, 2, 3], [[0, 1, 2], [0, 2, 3]]).to_list()
        [[[1, 2]], [[3]]]
        """
        for splits in reversed(list(nested_row_splits)):
            flat_values = cls.from_row_splits(flat_values, splits)  # type: ignore[attr-defined]
        return flat_values

    @classmethod
    def from_nested_row_lengths(
        cls, flat_values: Any, nested_row_lengths: Any, name: str | None = None, validate: bool = True
    ) -> Any:
        """Returns a RaggedTensor of values, and the row lengths of each ragged dimension, the outermost first.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_nested_row_lengths([1, 2, 3], [[1, 1], [2, 1]]).to_list()
        [[[1, 2]], [[3]]]
        """
        for lengths in reversed(list(nested_row_lengths)):
            flat_values = cls._rows_of(flat_values, lengths)
        return flat_values

    @classmethod
    def from_tensor(
        cls,
        tensor: Any,
        lengths: Any = None,
        padding: Any = None,
        ragged_rank: int = 1,
        name: str | None = None,
        row_splits_dtype: Any = np.int64,
    ) -> Any:
        """Returns a RaggedTensor of the rows of an array: up to the given lengths, or without `padding` at their ends.

        Args:
            tensor: `[rows, width, ...]`.
            lengths: `[rows]` integers; by default all of a row counts.
            padding: the value that does not count at the end of a row.
            ragged_rank: how many dimensions become ragged.
            row_splits_dtype: the dtype of the splits.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_tensor([[1, 2], [3, 0]], padding=0).to_list()
        [[1, 2], [3]]
        """
        array = tensor if isinstance(tensor, (np.ndarray, jax.Array)) else np.asarray(tensor)
        if ragged_rank > 1:
            inner = cls.from_tensor(array.reshape(-1, *array.shape[2:]), lengths, padding, ragged_rank - 1)
            return cls._rows_of(inner, np.full(array.shape[0], array.shape[1]), row_splits_dtype)
        rows, width = array.shape[:2]
        counts = np.full(rows, width)
        if lengths is not None:
            counts = np.clip(np.asarray(lengths), 0, width)
        elif padding is not None:
            padding = padding.encode() if isinstance(padding, str) else padding
            other: Any = np.asarray(array != padding).reshape(rows, width, -1).any(2)
            counts = np.where(other.any(1), width - other[:, ::-1].argmax(1), 0)
        inside = np.arange(width) < counts[:, None]
        return cls._rows_of(array[inside], counts, row_splits_dtype)

    @classmethod
    def from_sparse(cls, st_input: Any, name: str | None = None, row_splits_dtype: Any = np.int64) -> Self:
        """Returns a RaggedTensor of a sparse matrix whose values stand at the beginnings of its rows.

        Raises:
            InvalidArgumentError: it is no matrix, or a row has a value behind one that is missing.

        >>> import replicax as rx
        >>> ragged = rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1])
        >>> rx.data.RaggedTensor.from_sparse(ragged.to_sparse()).to_list()
        [[1, 2], [3]]
        """
        indices, shape = np.asarray(st_input.indices), np.asarray(st_input.dense_shape)
        counts = np.bincount(indices[:, 0], minlength=int(shape[0]))
        within = np.arange(len(indices)) - np.repeat(counts.cumsum() - counts, counts)
        if len(shape) != 2 or (indices[:, 1] != within).any():
            raise InvalidArgumentError("The SparseTensor is not right-ragged: a row has no value before another one.")
        return cls._rows_of(st_input.values, counts, row_splits_dtype)

    def value_rowids(self, name: str | None = None) -> Leaf:
        """Returns the row of each value, `[total]`.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1]).value_rowids().tolist()
        [0, 0, 1]
        """
        if isinstance(self.row_splits, jax.core.Tracer):
            lengths = self.row_splits[1:] - self.row_splits[:-1]
            rows = jnp.arange(lengths.shape[0], dtype=lengths.dtype)
            return jnp.repeat(rows, lengths, total_repeat_length=self.values.shape[0])
        counts = np.diff(np.asarray(self.row_splits))
        return np.repeat(np.arange(len(counts)), counts)

    def row_starts(self, name: str | None = None) -> Leaf:
        """Returns the place where each row begins, `[rows]`.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1]).row_starts().tolist()
        [0, 2]
        """
        return self.row_splits[:-1]

    def row_limits(self, name: str | None = None) -> Leaf:
        """Returns the place where each row ends, `[rows]`.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1]).row_limits().tolist()
        [2, 3]
        """
        return self.row_splits[1:]

    def nested_row_lengths(self, name: str | None = None) -> tuple[Leaf, ...]:
        """Returns the row lengths of each ragged dimension, the outermost first.

        >>> import replicax as rx
        >>> ragged = rx.data.RaggedTensor.from_nested_row_lengths([1, 2, 3], [[1, 1], [2, 1]])
        >>> [lengths.tolist() for lengths in ragged.nested_row_lengths()]
        [[1, 1], [2, 1]]
        """
        return tuple(splits[1:] - splits[:-1] for splits in self.nested_row_splits)  # type: ignore[attr-defined]

    def bounding_shape(self, axis: Any = None, name: str | None = None, out_type: Any = None) -> Leaf:
        """Returns the shape of the smallest array that has all rows; of one axis, its size.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1]).bounding_shape().tolist()
        [2, 2]
        """
        sizes = [int(self.row_splits.shape[0]) - 1]
        level: Any = self
        while hasattr(level, "row_splits"):
            sizes.append(int(np.max(np.diff(np.asarray(level.row_splits)), initial=0)))
            level = level.values
        found = np.array([*sizes, *level.shape[1:]], np.int64 if out_type is None else out_type)
        return found if axis is None else found[axis]

    def merge_dims(self, outer_axis: int, inner_axis: int) -> Any:
        """Returns a RaggedTensor or an array in which the dimensions from `outer_axis` to `inner_axis` are one.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_nested_row_lengths([1, 2, 3], [[1, 1], [2, 1]]).merge_dims(1, 2).to_list()
        [[1, 2], [3]]
        """
        rank = len(self.shape)  # type: ignore[attr-defined]
        outer, inner = outer_axis % rank, inner_axis % rank
        if outer == inner:
            return self
        make: Any = type(self)
        if outer > 1:
            return make(_merged(self.values, outer - 1, inner - 1), self.row_splits)
        if outer == 0:
            return _merged(self.values, 0, inner - 1)
        if isinstance(self.values, RaggedForms):
            merged = make(self.values.values, self.values.row_splits[self.row_splits])
        else:
            merged = make(_merged(self.values, 0, 1), self.row_splits * self.values.shape[1])
        return merged.merge_dims(1, inner - 1)

    def with_values(self, new_values: Any) -> Self:
        """Returns the same rows with other values.

        >>> import numpy as np, replicax as rx
        >>> rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1]).with_values(np.array([7, 8, 9])).to_list()
        [[7, 8], [9]]
        """
        return type(self)(new_values, self.row_splits)  # type: ignore[call-arg]

    def with_flat_values(self, new_values: Any) -> Self:
        """Returns the same rows with other values inside of all ragged dimensions.

        >>> import numpy as np, replicax as rx
        >>> ragged = rx.data.RaggedTensor.from_nested_row_lengths([1, 2, 3], [[1, 1], [2, 1]])
        >>> ragged.with_flat_values(np.array([7, 8, 9])).to_list()
        [[[7, 8]], [[9]]]
        """
        inside = isinstance(self.values, RaggedForms)
        return self.with_values(self.values.with_flat_values(new_values) if inside else new_values)

    def with_row_splits_dtype(self, dtype: Any) -> Self:
        """Returns a RaggedTensor of the same rows, with splits of another dtype.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1]).with_row_splits_dtype("int32").row_splits.dtype
        dtype('int32')
        """
        inside = isinstance(self.values, RaggedForms)
        values = self.values.with_row_splits_dtype(dtype) if inside else self.values
        return type(self)(values, self.row_splits.astype(dtype))  # type: ignore[call-arg]

    def numpy(self) -> np.ndarray:
        """Returns an array of the rows' arrays; a plain array, where all rows have one length.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_lengths([1, 2, 3, 4], [2, 2]).numpy().tolist()
        [[1, 2], [3, 4]]
        """
        rows = [row.numpy() if isinstance(row, RaggedForms) else np.asarray(row) for row in self]  # type: ignore
        if len({row.shape for row in rows}) <= 1:
            return np.array(rows)
        out = np.empty(len(rows), object)
        out[:] = rows
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        if array.dtype == object and array.size and isinstance(array.flat[0], np.ndarray):
            raise ValueError(
                f"A RaggedTensor is no array, got one of shape {list(self.shape)}. "  # type: ignore[attr-defined]
                "Compute with its values (tf.ragged.map_flat_values), or pad its rows with `to_tensor()`."
            )
        return array.astype(dtype) if dtype is not None else array


def _merged(values: Any, outer: int, inner: int) -> Any:
    if outer == inner:
        return values
    if isinstance(values, RaggedForms):
        return values.merge_dims(outer, inner)
    return values.reshape(*values.shape[:outer], -1, *values.shape[inner + 1 :])
