"""`RaggedTensor`: rows of different lengths as one array of values and the places where the rows end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from replicax._base.array_conversion import as_array
from replicax._base.errors import InvalidArgumentError
from replicax._base.messages import received
from replicax._base.specs import TensorShape, as_dtype, dtype_name
from replicax._base.type_spec import TypeSpec
from replicax._base.types import Leaf, Tree
from replicax._data import composites
from replicax._data.ragged_forms import RaggedForms

_Array: TypeAlias = jax.Array | np.ndarray
_Values: TypeAlias = "ArrayLike | jax.Array | RaggedTensor"


@jax.tree_util.register_pytree_node_class
class RaggedTensor(RaggedForms, composites.Composite):
    """Rows of different lengths: `values` has them one after the other, row i from `row_splits[i]` to the next split.

    A pytree, which `tf.strings.split` returns, for example. Values are an array, or a RaggedTensor where dimensions
    inside of the rows are ragged too. Many operations of `replicax.tf` take it. JAX's functions do not: compute with
    `flat_values`, or with `to_tensor()`.

    Args:
        values: `[total, ...]`, an array or a RaggedTensor.
        row_splits: `[rows + 1]` integers, from 0 to `total`.

    >>> import numpy as np, replicax as rx
    >>> ragged = rx.data.RaggedTensor(np.array([1, 2, 3]), np.array([0, 2, 2, 3]))
    >>> ragged.to_list(), ragged.shape, ragged.row_lengths().tolist(), ragged.to_tensor(-1).tolist()
    ([[1, 2], [], [3]], TensorShape([3, None]), [2, 0, 1], [[1, 2], [-1, -1], [3, -1]])
    """

    def __init__(self, values: _Array | RaggedTensor, row_splits: _Array):
        self.values, self.row_splits = values, row_splits

    @classmethod
    def from_row_splits(
        cls, values: _Values, row_splits: ArrayLike, name: str | None = None, validate: bool = True
    ) -> Self:
        """Returns a RaggedTensor of values and row splits; raises InvalidArgumentError if these do not span the values.

        Args:
            values: `[total, ...]`.
            row_splits: `[rows + 1]` integers, from 0 to `total`.
            validate: whether the splits are checked.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_splits([1, 2, 3], [0, 2, 2, 3]).to_list()
        [[1, 2], [], [3]]
        """
        own, splits = _array(values), _partition(row_splits)
        if validate and not isinstance(splits, jax.core.Tracer):
            found = np.asarray(splits)
            if found.ndim != 1 or not found.size or found[0] != 0 or (np.diff(found) < 0).any():
                raise InvalidArgumentError(f"row_splits must begin with 0 and not decrease, got {found.tolist()}.")
            if found[-1] != len(own):
                raise InvalidArgumentError(
                    f"row_splits must end with the number of values, {len(own)}, got {found.tolist()}."
                )
        return cls(own, splits)

    @classmethod
    def from_row_lengths(
        cls, values: _Values, row_lengths: ArrayLike, name: str | None = None, validate: bool = True
    ) -> Self:
        """Returns a RaggedTensor of values `[total, ...]` and the lengths of the rows, `[rows]`; see `from_row_splits`.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 0, 1]).to_list()
        [[1, 2], [], [3]]
        """
        lengths = _partition(row_lengths)
        return cls.from_row_splits(
            values, jnp.concatenate([jnp.zeros_like(lengths[:1]), lengths.cumsum()]), validate=validate
        )

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values.

        >>> import numpy as np, replicax as rx
        >>> rx.data.RaggedTensor.from_row_lengths(np.array([1, 2, 3], np.float32), [2, 1]).dtype
        dtype('float32')
        """
        found: np.dtype = self.values.dtype
        return found

    @property
    def shape(self) -> TensorShape:
        """The shape, None for ragged dimensions.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1]).shape
        TensorShape([2, None])
        """
        rows = self.row_splits.shape[0]
        inner = self.values.shape
        return TensorShape([None if rows is None else rows - 1, None, *tuple(inner)[1:]])

    def get_shape(self) -> TensorShape:
        """Returns the shape, None for ragged dimensions.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1]).get_shape()
        TensorShape([2, None])
        """
        return self.shape

    @property
    def ragged_rank(self) -> int:
        """The number of ragged dimensions.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1]).ragged_rank
        1
        """
        return 1 + (self.values.ragged_rank if isinstance(self.values, RaggedTensor) else 0)

    @property
    def flat_values(self) -> _Array:
        """The values inside of all ragged dimensions.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1]).flat_values.tolist()
        [1, 2, 3]
        """
        found: _Array = self.values.flat_values if isinstance(self.values, RaggedTensor) else self.values
        return found

    @property
    def nested_row_splits(self) -> tuple[_Array, ...]:
        """The row splits of each ragged dimension, the outermost first.

        >>> import replicax as rx
        >>> [splits.tolist() for splits in rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1]).nested_row_splits]
        [[0, 2, 3]]
        """
        inner = self.values.nested_row_splits if isinstance(self.values, RaggedTensor) else ()
        return (self.row_splits, *inner)

    def nrows(self, out_type: Any = None, name: str | None = None) -> int:
        """Returns the number of rows.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1]).nrows()
        2
        """
        return int(self.row_splits.shape[0]) - 1

    def row_lengths(self, axis: int = 1, name: str | None = None) -> _Array | RaggedTensor:
        """Returns the length of each row, `[rows]`; or of the rows of an inner dimension.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_splits([1, 2, 3], [0, 2, 3]).row_lengths().tolist()
        [2, 1]
        """
        if axis > 1:
            return RaggedTensor(self.values.row_lengths(axis - 1), self.row_splits)  # type: ignore[union-attr]
        lengths: _Array = self.row_splits[1:] - self.row_splits[:-1]
        return lengths

    def to_tensor(
        self, default_value: Leaf = None, name: str | None = None, shape: Sequence[int | None] | None = None
    ) -> _Array:
        """Returns an array of all rows, in which shorter rows are padded.

        Args:
            default_value: what they are filled with; 0 by default, empty strings for strings.
            shape: that of the result, None for what is as long as the longest. In compiled code it must be given.

        Raises:
            TypeError: in compiled code, `shape` is not given.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1]).to_tensor(default_value=-1).tolist()
        [[1, 2], [3, -1]]
        """
        wanted = [None] * (self.ragged_rank + 1) if shape is None else list(TensorShape(shape))
        values = self.values
        if isinstance(values, RaggedTensor):
            values = values.to_tensor(default_value, shape=[None, *wanted[2:]])
        splits, width = self.row_splits, wanted[1]
        if width is None:
            if isinstance(splits, jax.core.Tracer):
                raise TypeError(
                    "The longest row is not known in compiled code: give `to_tensor` the shape of its result, such as "
                    "shape=[None, 16]."
                )
            width = int(np.max(np.diff(np.asarray(splits)), initial=0))
        xp: Any = np if isinstance(values, np.ndarray) else jnp
        if default_value is None:
            default_value = b"" if values.dtype == np.dtype(object) else 0
        filler = xp.full((1, *values.shape[1:]), default_value, values.dtype)
        rows = self.nrows() if wanted[0] is None else wanted[0]
        more = (0, max(0, rows - self.nrows()))  # rows without values
        starts, lengths = (xp.pad(column, more)[:rows, None] for column in (splits[:-1], self.row_lengths()))
        columns = xp.arange(width)
        places = xp.where(columns < lengths, starts + columns, values.shape[0])
        dense: _Array = xp.concatenate([values, filler])[places]
        return dense.view(type(values)) if isinstance(values, np.ndarray) else dense

    def to_list(self) -> list[Tree]:
        """Returns the rows as lists.

        >>> import replicax as rx
        >>> rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1]).to_list()
        [[1, 2], [3]]
        """
        return [row.to_list() if isinstance(row, RaggedTensor) else np.asarray(row).tolist() for row in self]

    def __len__(self) -> int:
        return self.nrows()

    def __getitem__(self, key: Any) -> Any:
        if key is Ellipsis:
            return self
        if isinstance(key, tuple) and (places := [i for i, one in enumerate(key) if one is Ellipsis]):
            full = (slice(None),) * (len(self.shape) - len(key) + len(places))
            key = (*key[: places[0]], *full, *key[places[0] + 1 :])
        if isinstance(key, tuple):
            return self._at(*key)
        if isinstance(key, slice):
            rows = range(self.nrows())[key]
            if rows.step == 1:
                return _rows(RaggedTensor(self.values, self.row_splits), rows.start, max(rows.start, rows.stop))
            return select_rows(self, list(rows))
        try:
            row = range(self.nrows())[key]
        except TypeError as error:
            raise TypeError(
                "A RaggedTensor is indexed by integers, slices and `...`; for rows at other places use tf.gather. Got "
                f"{received(key)}."
            ) from error
        except IndexError as error:
            raise IndexError(f"There is no row {key}: the RaggedTensor has {self.nrows()}.") from error
        return _rows(self.values, int(self.row_splits[row]), int(self.row_splits[row + 1]))

    def _at(self, first: Any, *rest: Any) -> Any:
        """Returns the elements of some rows, or of all, at further indices."""
        found = self[first]
        if not rest or not isinstance(first, slice):
            return found[rest if len(rest) > 1 else rest[0]] if rest else found
        if rest[0] == slice(None) and len(rest) > 1:  # the rows stay whole, and may be empty
            return type(self)(found.values[(slice(None), *rest[1:])], found.row_splits)
        if not found.nrows() and isinstance(rest[0], slice):
            return found
        rows = [row[rest if len(rest) > 1 else rest[0]] for row in found]
        xp: Any = np if isinstance(self.flat_values, np.ndarray) else jnp
        if not isinstance(rest[0], slice):
            return xp.stack(rows)
        return type(self).from_row_lengths(xp.concatenate(rows), np.array(list(map(len, rows)), np.int64))

    def __iter__(self) -> Iterator[Tree]:
        return (self[row] for row in range(self.nrows()))

    def __repr__(self) -> str:
        try:
            return f"<tf.RaggedTensor {self.to_list()}>"
        except Exception:  # traced, or of specs
            return f"tf.RaggedTensor(values={self.values!r}, row_splits={self.row_splits!r})"

    def _replicax_rows(self) -> tuple[Leaf, int]:
        return self.row_splits, 1

    def tree_flatten(self) -> tuple[tuple[Leaf, Leaf], None]:
        """Returns the values and the splits, for `jax.tree`.

        >>> import jax, replicax as rx
        >>> [leaf.tolist() for leaf in jax.tree.leaves(rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1]))]
        [[1, 2, 3], [0, 2, 3]]
        """
        return (self.values, self.row_splits), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[Leaf, Leaf]) -> RaggedTensor:
        """Returns a RaggedTensor of these values and splits, for `jax.tree`.

        >>> import jax, replicax as rx
        >>> jax.tree.map(lambda x: x * 1, rx.data.RaggedTensor.from_row_lengths([1, 2, 3], [2, 1])).to_list()
        [[1, 2], [3]]
        """
        return cls(*children)


def _array(value: Tree) -> Any:
    if isinstance(value, (jax.Array, RaggedTensor)):
        return value
    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        return array
    return as_array(array) if isinstance(value, np.ndarray) else jnp.asarray(array)


def _partition(value: Tree) -> Any:
    """Returns what divides the values into rows, as int64 where it is no array."""
    return value if isinstance(value, jax.Array) else as_array(np.asarray(value, getattr(value, "dtype", np.int64)))


def _rows(values: _Array | RaggedTensor, start: int, stop: int) -> _Array | RaggedTensor:
    if not isinstance(values, RaggedTensor):
        return values[start:stop]
    splits = values.row_splits[start : stop + 1]
    return RaggedTensor(_rows(values.values, int(splits[0]), int(splits[-1])), splits - splits[0])


def select_rows(ragged: RaggedTensor, rows: Sequence[int] | np.ndarray) -> RaggedTensor:
    """Return the rows of these numbers."""
    splits, values = np.asarray(ragged.row_splits), ragged.values
    places = np.concatenate([np.empty(0, np.int64), *(np.arange(splits[i], splits[i + 1]) for i in rows)])
    lengths = np.array([splits[i + 1] - splits[i] for i in rows], np.int64)
    inside = select_rows(values, places) if isinstance(values, RaggedTensor) else values[places]
    return type(ragged).from_row_lengths(inside, lengths)


class RaggedTensorSpec(TypeSpec):
    """The spec of a RaggedTensor: its shape, dtypes and number of ragged dimensions.

    >>> RaggedTensorSpec([None, None], "int32", 1, "int64")
    RaggedTensorSpec(TensorShape([None, None]), int32, 1, int...)
    """

    __slots__ = ("shape", "dtype", "ragged_rank", "row_splits_dtype")

    def __init__(
        self,
        shape: Any = None,
        dtype: Any = np.float32,
        ragged_rank: int | None = None,
        row_splits_dtype: DTypeLike = np.int64,
        flat_values_spec: Any = None,
    ):
        self.shape, self.dtype = TensorShape(shape), as_dtype(dtype)
        if ragged_rank is None:
            if self.shape.rank is None:
                raise ValueError("Must specify ragged_rank or a shape with a known rank.")
            ragged_rank = self.shape.rank - 1
        self.ragged_rank, self.row_splits_dtype = ragged_rank, np.dtype(row_splits_dtype)

    @property
    def value_type(self) -> type:
        """The class of ragged tensors; that of tensors where no dimension is ragged."""
        return RaggedTensor if self.ragged_rank > 0 else jax.Array

    @property
    def flat_values_spec(self) -> None:
        """None: the values are a tensor."""

    @classmethod
    def from_value(cls, value: RaggedTensor) -> RaggedTensorSpec:
        """Returns the spec of a ragged tensor."""
        return cls(value.shape, value.dtype, value.ragged_rank, value.row_splits.dtype)

    def _serialize(self) -> tuple[Any, ...]:
        return self.shape, self.dtype, self.ragged_rank, self.row_splits_dtype

    def __repr__(self) -> str:
        names = dtype_name(self.dtype), self.ragged_rank, dtype_name(self.row_splits_dtype)
        return f"RaggedTensorSpec({self.shape!r}, {', '.join(map(str, names))})"
