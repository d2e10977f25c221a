"""What `tf.io.parse_example` is told of each feature of a record: type, shape and default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from replicax.tf import _wire
from replicax.tf._core import InvalidArgumentError, TensorShape, as_dtype
from replicax.tf._record_blocks import Neighbors
from replicax.tf._types import DTypeLike, TensorLike

_DTYPES: dict[int, np.dtype] = {
    _wire.FLOAT: np.dtype(np.float32),
    _wire.INT64: np.dtype(np.int64),
    _wire.BYTES: np.dtype(object),
}
_KINDS = {dtype: kind for kind, dtype in _DTYPES.items()}
TYPE_NAMES = {0: "none", _wire.FLOAT: "float", _wire.INT64: "int64", _wire.BYTES: "string"}


def kind_of(dtype: DTypeLike) -> int:
    """Returns the kind of list that has values of a dtype; raises InvalidArgumentError for others."""
    kind = _KINDS.get(as_dtype(dtype))
    if kind is None:
        raise InvalidArgumentError(
            f"Records have features of tf.float32, tf.int64 and tf.string, got {as_dtype(dtype)}: use tf.cast after "
            "parsing. (Value is not in the list of allowed values: float, int64, string)"
        )
    return kind


def dtype_of(kind: int) -> np.dtype:
    """Returns the dtype of the values of a kind of list."""
    return _DTYPES[kind]


class VarLenFeature(NamedTuple):
    """A feature of any number of values, which becomes a SparseTensor."""

    dtype: DTypeLike


class FixedLenFeature(NamedTuple):
    """A feature of values that fill a shape; where a record lacks it, the default, without which it is an error."""

    shape: Sequence[int | None] | None
    dtype: DTypeLike
    default_value: TensorLike = None


class FixedLenSequenceFeature(NamedTuple):
    """A feature of any number of values that fill a shape, padded with the default to the longest of a batch."""

    shape: Sequence[int | None] | None
    dtype: DTypeLike
    allow_missing: bool = False
    default_value: TensorLike = None


class SparseFeature(NamedTuple):
    """A SparseTensor whose values are one feature, and whose indices are another one, or several."""

    index_key: str | Sequence[str]
    value_key: str
    dtype: DTypeLike
    size: int | Sequence[int]
    already_sorted: bool = False


class _RowSplits(NamedTuple):
    """The key of a feature with row splits."""

    key: str


class _RowLengths(NamedTuple):
    """The key of a feature with row lengths."""

    key: str


class _RowStarts(NamedTuple):
    """The key of a feature with the place at which each row begins."""

    key: str


class _RowLimits(NamedTuple):
    """The key of a feature with the place at which each row ends."""

    key: str


class _ValueRowIds(NamedTuple):
    """The key of a feature with the row of each value."""

    key: str


class _UniformRowLength(NamedTuple):
    """The length of all rows."""

    length: int


Partition: TypeAlias = "_RowSplits | _RowLengths | _RowStarts | _RowLimits | _ValueRowIds | _UniformRowLength"


class _RaggedFields(NamedTuple):
    dtype: DTypeLike
    value_key: str | None = None
    partitions: tuple[Partition, ...] = ()
    row_splits_dtype: DTypeLike = np.int32
    validate: bool = False


class RaggedFeature(_RaggedFields):
    """A feature of any number of values, which becomes a RaggedTensor, in rows as other features say."""

    RowSplits, RowLengths, RowStarts, RowLimits = _RowSplits, _RowLengths, _RowStarts, _RowLimits
    ValueRowIds, UniformRowLength = _ValueRowIds, _UniformRowLength

    def __new__(
        cls,
        dtype: DTypeLike,
        value_key: str | None = None,
        partitions: Iterable[Partition | int] = (),
        row_splits_dtype: DTypeLike = np.int32,
        validate: bool = False,
    ) -> RaggedFeature:
        """Returns the feature; raises TypeError for partitions that are none."""
        parts = tuple(_UniformRowLength(part) if isinstance(part, int) else part for part in partitions)
        kinds = (_RowSplits, _RowLengths, _RowStarts, _RowLimits, _ValueRowIds, _UniformRowLength)
        for part in parts:
            if not isinstance(part, kinds):
                raise TypeError(f"`partitions` are RaggedFeature.RowSplits and the like, or ints; got {part!r:.80}.")
        return super().__new__(cls, dtype, value_key, parts, as_dtype(row_splits_dtype), validate)


Feature: TypeAlias = VarLenFeature | FixedLenFeature | FixedLenSequenceFeature | SparseFeature | RaggedFeature


class Dense(NamedTuple):
    """A feature of values that fill a shape, as it is parsed: `default` is an array of that shape, or None."""

    shape: tuple[int, ...]
    kind: int
    default: np.ndarray | None
    size: int


class Plan:
    """The features that a call of `parse_example` asks for, checked.

    Attributes:
        features: these, by key.
        dense: the FixedLenFeatures, as they are parsed.
        neighbors: what parses the neighbors of single records, once there was one.
        names: the names of all that is looked for in the records, by the kind of its values.
        kinds: the kinds of their values.
        sizes: how many values each has; -1 for one that may have any number.
        parts: for each kind of values the rows of `names` that have it, these names, and whether each has one value.
        wire: the same names, as they are looked for.
    """

    def __init__(self, features: Mapping[str, Feature]):
        self.features = dict(features)
        self.dense: dict[str, Dense] = {}
        kinds: dict[str, int] = {}

        def wanted(key: str, kind: int) -> None:
            if kinds.setdefault(key, kind) != kind:
                raise ValueError(f"Conflicting type {TYPE_NAMES[kind]} vs {TYPE_NAMES[kinds[key]]} for feature {key}.")

        for key, feature in self.features.items():
            if isinstance(feature, FixedLenFeature):
                self.dense[key] = _dense(key, feature)
                wanted(key, self.dense[key].kind)
            elif isinstance(feature, RaggedFeature):
                wanted(feature.value_key or key, kind_of(feature.dtype))
                for part in feature.partitions:
                    if not isinstance(part, _UniformRowLength):
                        wanted(part.key, _wire.INT64)
            elif isinstance(feature, SparseFeature):
                wanted(feature.value_key, kind_of(feature.dtype))
                for index in index_keys(feature):
                    wanted(index, _wire.INT64)
            elif isinstance(feature, (VarLenFeature, FixedLenSequenceFeature)):
                wanted(key, kind_of(feature.dtype))
            else:
                raise ValueError(f"Unsupported {type(feature).__name__} {feature!r:.80} for key {key!r}")
        self.neighbors: Neighbors | None = None
        self.names = sorted(kinds, key=lambda name: kinds[name])
        self.kinds = np.array([kinds[name] for name in self.names], np.int8)
        self.sizes = np.array([self.dense[name].size if name in self.dense else -1 for name in self.names], np.intp)
        self.parts: list[tuple[int, slice, list[str], list[bool]]] = []
        for kind in _DTYPES:
            rows = slice(*np.searchsorted(self.kinds, [kind, kind + 1]).tolist())
            if self.names[rows]:
                self.parts.append((kind, rows, self.names[rows], (self.sizes[rows] == 1).tolist()))
        self.row = {name: i for i, name in enumerate(self.names)}
        self.wire = _wire.Names(self.names, self.kinds)


def index_keys(feature: SparseFeature) -> list[str]:
    """Returns the keys of the indices of a sparse feature."""
    return [feature.index_key] if isinstance(feature.index_key, str) else list(feature.index_key)


def default_of(value: TensorLike, kind: int) -> np.ndarray:
    """Returns a default as an array of the dtype of a kind."""
    dtype = dtype_of(kind)
    if dtype != np.dtype(object):
        return np.asarray(value, dtype)
    array = np.asarray(value, object)
    flat = [v.encode() if isinstance(v, str) else v for v in array.ravel().tolist()]
    out = np.empty(len(flat), object)
    out[:] = flat
    return out.reshape(array.shape)


def _dense(key: str, feature: FixedLenFeature) -> Dense:
    if feature.shape is None or not feature.dtype:
        raise ValueError(f"Missing shape or dtype for feature {key!r}: {feature}")
    shape = TensorShape(feature.shape)
    if not shape.is_fully_defined():
        raise ValueError(
            f"First dimension of shape for feature {key} unknown. Consider using FixedLenSequenceFeature. Received "
            f"feature={feature}."
        )
    dims = tuple(d for d in shape if d is not None)
    kind, size = kind_of(feature.dtype), int(np.prod(dims))
    if feature.default_value is None:
        return Dense(dims, kind, None, size)
    default = default_of(feature.default_value, kind)
    if default.size != size:
        raise InvalidArgumentError(
            f"The default of feature {key!r}: Input to reshape is a tensor with {default.size} values, but the "
            f"requested shape has {size}"
        )
    return Dense(dims, kind, default.reshape(dims), size)
