"""`SparseTensor`: the values of an array that are not zero, and where they are."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import DTypeLike

from replicax._base.specs import TensorShape, as_dtype, dtype_name
from replicax._base.type_spec import TypeSpec
from replicax._base.types import Leaf
from replicax._data.composites import Composite
from replicax._data.elements import as_host, as_tensor
from replicax._data.ragged import RaggedTensor

_Array: TypeAlias = jax.Array | np.ndarray


@jax.tree_util.register_pytree_node_class
class SparseTensor(Composite):
    """The values of an array that are not zero, their indices in row-major order, and the array's shape; a pytree.

    Args:
        indices: `[count, rank]` integers, int64.
        values: `[count]`, of any dtype.
        dense_shape: `[rank]` integers, int64.

    >>> import replicax as rx
    >>> SparseTensor([[0, 1], [2, 0]], [5, 7], [3, 2]).shape
    TensorShape([3, 2])
    """

    def __init__(self, indices: Any, values: Any, dense_shape: Any):
        self.indices, self.values, self.dense_shape = _wide(indices), _values(values), _wide(dense_shape)
        shapes = np.shape(self.indices), np.shape(self.values), np.shape(self.dense_shape)
        if tuple(map(len, shapes)) != (2, 1, 1) or shapes[0] != (*shapes[1], *shapes[2]):
            raise ValueError(
                "A SparseTensor has indices [count, rank], values [count] and a dense_shape [rank], got shapes "
                f"{shapes[0]}, {shapes[1]} and {shapes[2]}."
            )

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values."""
        found: np.dtype = self.values.dtype
        return found

    @property
    def shape(self) -> TensorShape:
        """The shape, where it is known; in compiled code only its rank is."""
        dims = self.dense_shape
        unknown = isinstance(dims, jax.core.Tracer) or not hasattr(dims, "__array__")
        return TensorShape([None] * dims.shape[0] if unknown else np.asarray(dims).tolist())

    def get_shape(self) -> TensorShape:
        """Returns the shape."""
        return self.shape

    def with_values(self, new_values: Any) -> SparseTensor:
        """Returns a SparseTensor of other values at the same places."""
        return SparseTensor(self.indices, new_values, self.dense_shape)

    def numpy(self) -> SparseTensor:
        """Returns it with numpy arrays."""
        found: SparseTensor = jax.tree.map(np.asarray, self)
        return found

    def __repr__(self) -> str:
        return f"SparseTensor(indices={self.indices!r}, values={self.values!r}, dense_shape={self.dense_shape!r})"

    def tree_flatten(self) -> tuple[tuple[Leaf, Leaf, Leaf], None]:
        """Returns the three arrays, for `jax.tree`."""
        return (self.indices, self.values, self.dense_shape), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[Leaf, Leaf, Leaf]) -> SparseTensor:
        """Returns a SparseTensor of these arrays, for `jax.tree`."""
        self = object.__new__(cls)  # what `jax.tree` puts there may be anything
        self.indices, self.values, self.dense_shape = children
        return self


def _wide(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return value if value.dtype == np.int64 else as_tensor(np.asarray(value, np.int64))
    array = np.asarray(value, np.int64)
    return array if isinstance(value, np.ndarray) else as_tensor(array)


def _values(value: Any) -> Any:
    return value if isinstance(value, (jax.Array, np.ndarray)) else as_tensor(as_host(value))


class SparseTensorSpec(TypeSpec):
    """The spec of a SparseTensor: its shape and dtype.

    >>> SparseTensorSpec([None, 3], "float32")
    SparseTensorSpec(TensorShape([None, 3]), float32)
    """

    __slots__ = ("shape", "dtype")

    def __init__(self, shape: Any = None, dtype: DTypeLike = np.float32):
        self.shape, self.dtype = TensorShape(shape), as_dtype(dtype)

    @property
    def value_type(self) -> type:
        """The class of sparse tensors."""
        return SparseTensor

    @classmethod
    def from_value(cls, value: SparseTensor) -> SparseTensorSpec:
        """Returns the spec of a sparse tensor."""
        return cls(value.shape, value.dtype)

    def _serialize(self) -> tuple[Any, ...]:
        return self.shape, self.dtype

    def __repr__(self) -> str:
        return f"SparseTensorSpec({self.shape!r}, {dtype_name(self.dtype)})"


def _to_sparse(self: RaggedTensor, name: str | None = None) -> SparseTensor:
    """Returns the values as a SparseTensor.

    >>> import replicax as rx
    >>> rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1]).to_sparse().indices.tolist()
    [[0, 0], [0, 1], [1, 0]]
    """
    columns = [np.arange(self.nrows())]
    level: Any = self
    while isinstance(level, RaggedTensor):
        lengths = np.diff(np.asarray(level.row_splits))
        within = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
        columns = [*(np.repeat(column, lengths) for column in columns), within]
        level = level.values
    shape = [self.nrows(), *(int(column.max(initial=-1)) + 1 for column in columns[1:])]
    for size in level.shape[1:]:
        columns = [*(np.repeat(column, size) for column in columns), np.tile(np.arange(size), len(columns[0]))]
        shape.append(int(size))
    return SparseTensor(as_tensor(np.stack(columns, 1)), level.reshape(-1), as_tensor(np.array(shape, np.int64)))


RaggedTensor.to_sparse = _to_sparse  # type: ignore[attr-defined]  # here, since sparse tensors stand above ragged ones
