"""`tf.io.parse_example` and `parse_single_example`: records of `tf.train.Example` as tensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeAlias

import jax
import numpy as np

from replicax.tf import _features, _host, _record_blocks, _wire, _wire_values
from replicax.tf._core import (
    InvalidArgumentError,
    Probe,
    RaggedTensor,
    SparseTensor,
    TensorShape,
    as_dtype,
    as_tensor,
    tensors_of,
)
from replicax.tf._features import Feature, Plan
from replicax.tf._ops import as_element, known
from replicax.tf._parsed_rows import ParsedRows, shown
from replicax.tf._types import Composed, DTypeLike, Rows, TensorLike

_DECODERS = {
    _wire.FLOAT: _wire_values.floats, _wire.INT64: _wire_values.integers, _wire.BYTES: _wire_values.strings,
}  # fmt: skip


def parse_example(
    serialized: TensorLike, features: Mapping[str, Feature], example_names: TensorLike = None, name: str | None = None
) -> dict[str, Composed]:
    """Parses a batch of serialized `tf.train.Example`s.

    Args:
        serialized: strings, `[batch]`; or a single one.
        features: for each key what is to be parsed: `FixedLenFeature` gives a tensor `[batch, *shape]`,
            `FixedLenSequenceFeature` one that is padded, `VarLenFeature` and `SparseFeature` a SparseTensor,
            `RaggedFeature` a RaggedTensor. Other features of the records are passed over.
        example_names: names of the records, for messages.

    Returns:
        a dict with the same keys.

    Raises:
        InvalidArgumentError: a record is damaged, or lacks a feature without a default, or has one of another type or
            size.
    """
    plan = plan_of(features)
    records = strings_of(serialized)
    if not records.ndim:
        return parsed(plan, [records.item()], alone=True)
    if records.ndim > 1:
        shape = ",".join(map(str, records.shape))
        raise InvalidArgumentError(f"Expected serialized to be a scalar or vector, got shape: [{shape}]")
    texts = records.tolist()
    if 0 < len(texts) <= _SMALL and (found := _of_neighbors(plan, texts)):
        rows, start = found
        return rows.tensors(slice(start, start + len(texts)))
    return _Batch(plan, texts, _names_of(example_names)).tensors()


def parse_single_example(
    serialized: TensorLike, features: Mapping[str, Feature], example_names: TensorLike = None, name: str | None = None
) -> dict[str, Composed]:
    """Parses one serialized `tf.train.Example`: as `parse_example`, without the batch's dimension.

    Raises:
        ValueError: `serialized` is not a single string.
        InvalidArgumentError: as `parse_example`.
    """
    plan = plan_of(features)
    records = strings_of(serialized)
    if records.ndim:
        raise ValueError(
            f"Input serialized must be a scalar, got shape {list(records.shape)}. Use tf.io.parse_example."
        )
    record = records.item()
    if found := _of_neighbors(plan, [record]):
        rows, within = found
        return rows.tensors((within, ...))
    return parsed(plan, [record], alone=True)


def _of_neighbors(plan: Plan, records: Sequence[bytes]) -> tuple[ParsedRows, int] | None:
    """Returns the values of some records' neighbors, and where theirs are; None where they are not parsed together."""
    if (neighbors := plan.neighbors) is None:
        if len(plan.dense) < len(plan.features):  # their sizes are not known
            return None
        size = sum(dense.size * _features.dtype_of(dense.kind).itemsize for dense in plan.dense.values())
        neighbors = plan.neighbors = _record_blocks.Neighbors(functools.partial(_dense_rows, plan), size)
    found = neighbors.of(*records)
    return None if found is None or found[0] is None else found


def _dense_rows(plan: Plan, records: Sequence[bytes]) -> ParsedRows | None:
    """Returns the values of records that are parsed together, None where one of them is not as the plan has it."""
    try:
        batch = _Batch(plan, list(records), [])
        return ParsedRows({key: batch._dense(key) for key in plan.features}, len(records))
    except (InvalidArgumentError, ValueError):
        return None


# How many records of a batch are parsed with their neighbors: to parse more takes as little time for each.
_SMALL = _record_blocks.GROUP // 4

# The plans of the last calls: most programs pass the same features again and again.
_plans: dict[tuple[object, ...], Plan] = {}


def plan_of(features: Mapping[str, Feature]) -> Plan:
    """Returns the plan of what a caller asks for; raises ValueError where that is nothing."""
    if features is None:
        raise ValueError("Invalid argument: features cannot be None.")
    if not features:
        raise ValueError("Invalid argument: features cannot be empty.")
    # A plan keeps the features alive, so that no other ones have the same ids.
    key = (*features, *map(id, features.values()))
    if (plan := _plans.get(key)) is None:
        if len(_plans) >= 64:
            _plans.clear()
        plan = _plans[key] = Plan(features)
    return plan


def strings_of(serialized: TensorLike) -> np.ndarray:
    """Returns strings as a numpy array of bytes."""
    if isinstance(serialized, np.ndarray) and serialized.dtype == np.dtype(object):
        return np.asarray(serialized)
    array = np.asarray(known(serialized, "A record", "Parse outside of compiled code, in Dataset.map."), object)
    found = [x.encode() if isinstance(x, str) else x for x in array.ravel().tolist()]
    if not all(isinstance(x, bytes) for x in found):
        raise ValueError(f"Serialized records are strings, got {found[0]!r:.80}: expected dtype string.")
    out = np.empty(len(found), object)
    out[:] = found
    return out.reshape(array.shape)


def _names_of(names: TensorLike) -> list[bytes]:
    return [] if names is None else strings_of(names).ravel().tolist()


class _Column:
    """The values of one feature of all records, one after the other, and how many each record has.

    It is full where each record has as many as a feature of a fixed size.
    """

    __slots__ = ("values", "counts", "kinds", "is_full")

    def __init__(self, values: np.ndarray, counts: np.ndarray, kinds: np.ndarray, is_full: bool = False):
        self.values, self.counts, self.kinds, self.is_full = values, counts, kinds, is_full


class _Batch:
    """Records that are parsed together; `alone` is a single one, whose tensors have no dimension of the batch."""

    def __init__(self, plan: Plan, records: list[bytes], names: list[bytes], alone: bool = False):
        self.plan, self.records, self._names, self._alone = plan, records, names, alone
        self._columns: dict[str, _Column] = {}
        if records and isinstance(probe := records[0], Probe):
            self._make_up(probe.size)
            return
        try:
            self._spans = plan.wire.spans(records)
        except _wire.WireError as error:
            raise damaged(records[error.record]) from error
        wrong = self._spans.kinds != plan.kinds[:, None]
        if wrong.any() and (wrong := wrong & (self._spans.kinds > 0)).any():
            self._refuse_kind(wrong)
        for part in plan.parts:
            self._decode(*part)

    def _decode(self, kind: int, rows: slice, names: list[str], single: list[bool]) -> None:
        plan, spans = self.plan, self._spans
        kinds, starts, stops = spans.kinds[rows], spans.starts[rows].ravel(), spans.stops[rows].ravel()
        if (found := _wire_values.single_values(kind, spans.data, starts, stops)) is not None:
            for name, own, kinds_of_it, is_full in zip(names, found.reshape(kinds.shape), kinds, single):
                self._columns[name] = _Column(own, self.ones, kinds_of_it, is_full)
            return
        try:
            values, counts = _DECODERS[kind](spans.data, starts, stops)
        except ValueError as error:
            raise damaged(self.records[0] if len(self.records) == 1 else b"") from error
        counts = counts.reshape(len(names), -1)
        full = ((counts == plan.sizes[rows, None]) & (kinds > 0)).all(1).tolist()
        borders = np.concatenate([[0], counts.sum(1).cumsum()]).tolist()
        for i, name in enumerate(names):
            self._columns[name] = _Column(values[borders[i] : borders[i + 1]], counts[i], kinds[i], full[i])

    @functools.cached_property
    def ones(self) -> np.ndarray:
        """One for each record: how many values a feature of one value has."""
        ones = np.ones(len(self.records), np.intp)
        ones.flags.writeable = False
        return ones

    def _make_up(self, size: int) -> None:
        """Makes up values, `size` where a feature may have any number of them."""
        count = len(self.records)
        for key, feature in self.plan.features.items():
            if getattr(feature, "partitions", ()):
                raise ValueError("How many rows the feature has is not known.")
            own = self.plan.dense[key].size if key in self.plan.dense else size
            if isinstance(feature, _features.FixedLenSequenceFeature):
                own = size * int(TensorShape(feature.shape).num_elements() or 1)
            names = [getattr(feature, "value_key", None) or key]
            if isinstance(feature, _features.SparseFeature):
                names += _features.index_keys(feature)
            for name in names:
                kind = self.plan.kinds[self.plan.row[name]]
                values = np.zeros(own * count, _features.dtype_of(kind))
                if kind == _wire.BYTES:
                    values[:] = [Probe.of_size(size)] * len(values)
                self._columns[name] = _Column(values, np.full(count, own), np.full(count, kind), key in self.plan.dense)

    def tensors(self) -> dict[str, Composed]:
        """Returns the tensors of all features."""
        found: dict[str, Composed] = {}
        arrays: dict[str, np.ndarray] = {}
        for key, feature in self.plan.features.items():
            if isinstance(feature, _features.FixedLenFeature):
                arrays[key] = self._dense(key)
            elif isinstance(feature, _features.VarLenFeature):
                found[key] = self._sparse(self._columns[key])
            elif isinstance(feature, _features.FixedLenSequenceFeature):
                arrays[key] = self._sequence(key, feature)
            elif isinstance(feature, _features.SparseFeature):
                found[key] = self._indexed(feature)
            else:
                found[key] = self._ragged(key, feature)
        tensors = shown(arrays)
        return {key: tensors[key] if key in tensors else found[key] for key in self.plan.features}

    # --- what the features become ---

    def _dense(self, key: str) -> np.ndarray:
        column, dense = self._columns[key], self.plan.dense[key]
        if column.is_full:
            return self._shaped(column.values, dense.shape)
        missing = column.kinds <= 0
        if missing.any() and dense.default is None:
            raise InvalidArgumentError(
                f"{self._who(missing)}Feature: {key} (data type: {_features.TYPE_NAMES[dense.kind]}) is required but "
                "could not be found."
            )
        if (wrong := ~missing & (column.counts != dense.size)).any():
            self._refuse_size(key, dense, wrong)
        assert dense.default is not None
        out = np.empty((len(self.records), *dense.shape), column.values.dtype)
        out[missing] = dense.default
        out[~missing] = column.values.reshape(-1, *dense.shape)
        return out[0, ...] if self._alone else out

    def _shaped(self, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return values.reshape(shape if self._alone else (len(self.records), *shape))

    def _sequence(self, key: str, feature: _features.FixedLenSequenceFeature) -> np.ndarray:
        if not feature.allow_missing:
            raise ValueError("Unsupported: FixedLenSequenceFeature requires allow_missing to be True.")
        shape = TensorShape(feature.shape)
        column, size = self._columns[key], int(shape.num_elements() or 1)
        if (wrong := column.counts % size != 0).any():
            record = int(np.flatnonzero(wrong)[0])
            raise InvalidArgumentError(
                f"{self._who(wrong)}Key: {key}, Index: {record}.  Number of values is not a multiple of stride length. "
                f"values size: {column.counts[record]} but output shape: {shape}"
            )
        counts = column.counts // size
        if self._alone:
            return column.values.reshape(-1, *shape)
        default = feature.default_value
        if default is None:
            default = b"" if column.values.dtype == np.dtype(object) else 0
        filler = _features.default_of(default, _features.kind_of(feature.dtype))
        out = np.full((len(counts), int(counts.max(initial=0)), *shape), filler, column.values.dtype)
        out[np.arange(out.shape[1]) < counts[:, None]] = column.values.reshape(-1, *shape)
        return out

    def _sparse(self, column: _Column) -> SparseTensor:
        if column.counts is self.ones:
            indices, longest = self._one_each, 1
        else:
            within = np.arange(len(column.values)) - np.repeat(column.counts.cumsum() - column.counts, column.counts)
            rows = np.repeat(np.arange(len(self.records)), column.counts)
            indices, longest = np.stack([rows, within], 1), int(column.counts.max(initial=0))
        if self._alone:
            return _sparse_tensor(indices[:, 1:], column.values, [longest])
        return _sparse_tensor(indices, column.values, [len(self.records), longest])

    @functools.cached_property
    def _one_each(self) -> np.ndarray:
        """The indices of one value for each record, which many features may have in common."""
        indices = np.zeros((len(self.records), 2), np.int64)
        indices[:, 0] = np.arange(len(self.records))
        indices.flags.writeable = False
        return indices

    def _indexed(self, feature: _features.SparseFeature) -> SparseTensor:
        values = self._columns[feature.value_key]
        indices = [self._columns[key] for key in _features.index_keys(feature)]
        sizes = list(np.atleast_1d(feature.size).tolist())
        for index in indices:
            if (index.counts != values.counts).any():
                raise ValueError(
                    f"Dimensions {len(values.values)} and {len(index.values)} are not compatible: the index of the "
                    f"sparse feature {feature.value_key!r} has another number of values."
                )
        rows = np.repeat(np.arange(len(self.records)), values.counts)
        columns = [] if self._alone else [rows]
        places = np.stack([*columns, *(index.values for index in indices)], 1)
        flat = values.values
        if not feature.already_sorted:
            order = np.lexsort(places.T[::-1])
            places, flat = places[order], flat[order]
        return sparse_tensor(places, flat, [*([] if self._alone else [len(self.records)]), *sizes])

    def _ragged(self, key: str, feature: _features.RaggedFeature) -> Rows:
        column = self._columns[feature.value_key or key]
        splits_dtype = feature.row_splits_dtype
        parts = [_partition(part, self._columns, len(self.records)) for part in feature.partitions]
        values, counts = _partitioned(as_tensor(column.values), column.counts, parts, splits_dtype)
        return values if self._alone else rows_of(values, counts, splits_dtype)

    # --- errors ---

    def _who(self, wrong: np.ndarray | np.bool) -> str:
        """Returns the beginning of a message about the first record of which this holds."""
        if self._alone:
            return ""
        record = int(np.flatnonzero(wrong)[0])
        return f"Name: {self._names[record].decode() if record < len(self._names) else '<unknown>'}, "

    def _refuse_kind(self, wrong: np.ndarray) -> NoReturn:
        record = int(np.flatnonzero(wrong.any(0))[0])
        row = int(np.flatnonzero(wrong[:, record])[0])
        key = self.plan.names[row]
        found = _features.TYPE_NAMES[int(self._spans.kinds[row, record])]
        expected = _features.TYPE_NAMES[int(self.plan.kinds[row])]
        fixed = isinstance(self.plan.features.get(key), (_features.FixedLenFeature, _features.FixedLenSequenceFeature))
        types = f"Data type: {found} but expected type: {expected}" if fixed else (
            f"Expected type: {expected}, Actual type: {found}"
        )  # fmt: skip
        index = "" if self._alone else f", Index: {record}"
        raise InvalidArgumentError(f"{self._who(wrong.any(0))}Key: {key}{index}.  Data types don't match. {types}")

    def _refuse_size(self, key: str, dense: _features.Dense, wrong: np.ndarray) -> NoReturn:
        record, kind = int(np.flatnonzero(wrong)[0]), _features.TYPE_NAMES[dense.kind]
        found = self._columns[key].counts[record]
        shape = ",".join(map(str, dense.shape))
        index = "" if self._alone else f", Index: {record}"
        raise InvalidArgumentError(
            f"{self._who(wrong)}Key: {key}{index}.  Number of {kind} values != expected.  Values size: {found} but "
            f"output shape: [{shape}]"
        )


def parsed(plan: Plan, records: list[bytes], alone: bool) -> dict[str, Composed]:
    """Returns the tensors of the features of records; of a single one, where it is `alone`, without its dimension."""
    return _Batch(plan, records, [], alone).tensors()


def damaged(record: bytes) -> InvalidArgumentError:
    """Returns the error for a record that is no `tf.train.Example`."""
    return InvalidArgumentError(f"Could not parse example input, value: '{record[:80].decode('latin1')}'")


def sparse_tensor(indices: np.ndarray, values: np.ndarray, shape: list[int]) -> SparseTensor:
    """Returns a SparseTensor of tensors."""
    return SparseTensor(*map(as_element, (indices.astype(np.int64, copy=False), values, np.array(shape, np.int64))))


def _sparse_tensor(indices: np.ndarray, values: np.ndarray, shape: list[int]) -> SparseTensor:
    """Does as `sparse_tensor` for what fits together."""
    parts = {"indices": indices, "values": values, "shape": np.array(shape, np.int64)}
    found = parts | {"values": _host.hosted(values)} if _host.is_on() else tensors_of(parts)
    return SparseTensor.tree_unflatten(None, (found["indices"], found["values"], found["shape"]))


# --- ragged features --------------------------------------------------------------------------------------------------


# A partition, and the values and counts of its feature; no values for rows of one length.
_Part: TypeAlias = "tuple[_features.Partition, np.ndarray, np.ndarray]"

_NONE = np.empty(0, np.int64)


def _partition(part: _features.Partition, columns: dict[str, _Column], count: int) -> _Part:
    """Returns a partition with its feature's values and counts; without those where the rows have one length."""
    if isinstance(part, _features._UniformRowLength):
        return part, _NONE, _NONE
    column = columns[part.key]
    return part, column.values, column.counts


def _partitioned(values: Rows, counts: np.ndarray, parts: list[_Part], dtype: DTypeLike) -> tuple[Rows, np.ndarray]:
    """Returns values in the rows of these partitions, the outermost first, and how many rows each record has."""
    for part, found, own in reversed(parts):
        if isinstance(part, _features._UniformRowLength):
            values = _uniform(values, part.length)
            counts = counts // part.length
            continue
        borders = np.concatenate([[0], own.cumsum()])
        lengths = [
            _lengths(part, found[start:stop], total)
            for start, stop, total in zip(borders[:-1].tolist(), borders[1:].tolist(), counts.tolist())
        ]
        rows = np.concatenate([np.empty(0, np.int64), *lengths])
        if rows.sum() != counts.sum() or (rows < 0).any():
            raise InvalidArgumentError(f"The partition {part} does not fit the {counts.sum()} values of its feature.")
        values, counts = rows_of(values, rows, dtype), np.array(list(map(len, lengths)), np.int64)
    return values, counts


def _lengths(part: _features.Partition, found: np.ndarray, total: int) -> np.ndarray:
    """Returns the lengths of the rows of one record's values."""
    if isinstance(part, _features._RowLengths):
        return found
    if isinstance(part, _features._RowSplits):
        return np.diff(found)
    if isinstance(part, _features._RowStarts):
        return np.diff(np.append(found, total))
    if isinstance(part, _features._RowLimits):
        return np.diff(np.insert(found, 0, 0))
    return np.bincount(found) if len(found) else found


def _uniform(values: Rows, length: int) -> Rows:
    if isinstance(values, RaggedTensor):
        rows = np.full(values.nrows() // length, length)
        return rows_of(values, rows, values.row_splits.dtype)
    rows_of_values: jax.Array = as_tensor(np.asarray(values).reshape(-1, length, *np.shape(values)[1:]))
    return rows_of_values


def rows_of(values: Rows, lengths: np.ndarray, dtype: DTypeLike) -> RaggedTensor:
    """Returns a RaggedTensor of values and the lengths of the rows."""
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(as_dtype(dtype))
    return RaggedTensor(values, as_tensor(splits))
