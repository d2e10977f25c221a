"""`tf.io.parse_sequence_example`: records of `tf.train.SequenceExample` as tensors.

Its context is laid out as the features of a `tf.train.Example`, and is parsed as one. Beside it there are lists of
features, one for each step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from replicax.tf import _features, _parse, _wire
from replicax.tf._core import InvalidArgumentError, RaggedTensor, SparseTensor, TensorShape, as_tensor
from replicax.tf._types import Composed, DTypeLike, TensorLike

if TYPE_CHECKING:
    from replicax.tf import _protos

_Lists: TypeAlias = "Mapping[str, _protos.FeatureList]"
_Features: TypeAlias = "Mapping[str, _features.Feature] | None"


def parse_sequence_example(
    serialized: TensorLike,
    context_features: _Features = None,
    sequence_features: _Features = None,
    example_names: TensorLike = None,
    name: str | None = None,
) -> tuple[dict[str, Composed], dict[str, Composed], dict[str, Composed]]:
    """Parses a batch of serialized `tf.train.SequenceExample`s.

    Args:
        serialized: strings, `[batch]`.
        context_features: what `parse_example` takes.
        sequence_features: for each key of a feature list `FixedLenSequenceFeature`, which gives a tensor
            `[batch, steps, *shape]`, padded to the longest; `VarLenFeature`, a SparseTensor; or `RaggedFeature`.
        example_names: names of the records, for messages.

    Returns:
        the context, the sequences, and the number of steps of each dense sequence, `[batch]`.

    Raises:
        InvalidArgumentError: a record is damaged, or lacks a feature without a default, or has one of another type or
            size.
    """
    records = _parse.strings_of(serialized)
    if records.ndim != 1:
        raise InvalidArgumentError(f"Expected serialized to be a vector, got shape: {list(records.shape)}")
    return _parsed(records.tolist(), context_features, sequence_features, False)


def parse_single_sequence_example(
    serialized: TensorLike,
    context_features: _Features = None,
    sequence_features: _Features = None,
    example_name: TensorLike = None,
    name: str | None = None,
) -> tuple[dict[str, Composed], dict[str, Composed]]:
    """Parses one serialized `tf.train.SequenceExample`: as `parse_sequence_example`, without the batch's dimension.

    Returns:
        the context and the sequences.
    """
    records = _parse.strings_of(serialized)
    if records.ndim:
        raise ValueError(f"Input serialized must be a scalar, got shape {list(records.shape)}.")
    return _parsed([records.item()], context_features, sequence_features, True)[:2]


def _parsed(
    records: list[bytes], context: _Features, sequences: _Features, alone: bool
) -> tuple[dict[str, Composed], dict[str, Composed], dict[str, Composed]]:
    if not (context or sequences):
        raise ValueError("Missing features: give context_features or sequence_features.")
    found = _parse.parsed(_parse.plan_of(context), records, alone) if context else {}
    values, lengths = dict[str, Composed](), dict[str, Composed]()
    lists = [_lists_of(record) for record in records] if sequences else []
    for key, feature in (sequences or {}).items():
        sequence = _Sequence(key, feature, lists, alone)
        if isinstance(feature, _features.FixedLenSequenceFeature):
            values[key] = as_tensor(sequence.dense(feature))
            lengths[key] = as_tensor(sequence.steps)
        elif isinstance(feature, _features.VarLenFeature):
            values[key] = sequence.sparse()
        elif isinstance(feature, _features.RaggedFeature) and not feature.partitions:
            values[key] = sequence.ragged(feature.row_splits_dtype)
        else:
            raise ValueError(f"Unsupported {type(feature).__name__} {feature!r:.80} for feature list {key!r}")
    return found, values, lengths


def _lists_of(record: bytes) -> _Lists:
    """Return the feature lists of a record, by key."""
    from replicax.tf import _protos

    try:
        return _protos.SequenceExample.FromString(record).feature_lists.feature_list  # type: ignore[no-any-return]
    except _protos.DecodeError as error:
        raise _parse.damaged(record) from error


class _Sequence:
    """A feature list of all records: how many steps each has, how many values each step has, and the values."""

    def __init__(self, key: str, feature: _features.Feature, lists: list[_Lists], alone: bool):
        self.key, self._alone = getattr(feature, "value_key", None) or key, alone
        kind = _features.kind_of(feature.dtype)
        if isinstance(feature, _features.FixedLenSequenceFeature) and not feature.allow_missing:
            self._require(lists)
        steps = [lists_of_record[self.key].feature if self.key in lists_of_record else () for lists_of_record in lists]
        parts = [
            self._values(step, kind, index) for steps_of_record in steps for index, step in enumerate(steps_of_record)
        ]
        self.steps = np.array(list(map(len, steps)), np.int64)
        self.counts = np.array(list(map(len, parts)), np.int64)
        self.values = _features.default_of(list(itertools.chain.from_iterable(parts)), kind)

    def _require(self, lists: list[_Lists]) -> None:
        if not all(self.key in lists_of_record for lists_of_record in lists):
            raise InvalidArgumentError(
                f"Name: <unknown>, Feature list '{self.key}' is required but could not be found.  Did you mean to "
                "include it in feature_list_dense_missing_assumed_empty or feature_list_dense_defaults? (Pass "
                "allow_missing=True.)"
            )

    def _values(self, step: _protos.Feature, kind: int, index: int) -> Sequence[bytes | float]:
        name = step.WhichOneof("kind")
        if name is None:
            return ()
        if name != _wire.LISTS[kind]:
            raise InvalidArgumentError(
                f"Name: <unknown>, Feature list: {self.key}, Index: {index}.  Data types don't match. Expected "
                f"type: {_features.TYPE_NAMES[kind]}"
            )
        values: Sequence[bytes | float] = getattr(step, name).value
        return values

    def dense(self, feature: _features.FixedLenSequenceFeature) -> np.ndarray:
        """Returns the values `[records, steps, *shape]`, padded with zeros or empty strings."""
        shape = TensorShape(feature.shape)
        size = int(shape.num_elements() or 1)
        if (self.counts != size).any():
            dims = ",".join(map(str, shape))
            raise InvalidArgumentError(
                f"Feature list '{self.key}' has an unexpected number of values.  Total values size: "
                f"{len(self.values)} is not consistent with output shape: [?,{dims}]"
            )
        rows = self.values.reshape(-1, *shape)
        if self._alone:
            return rows
        longest = int(self.steps.max(initial=0))
        filler: bytes | int = b"" if rows.dtype == np.dtype(object) else 0
        out = np.full((len(self.steps), longest, *shape), filler, rows.dtype)
        out[np.arange(longest) < self.steps[:, None]] = rows
        return out

    def sparse(self) -> SparseTensor:
        """Returns the values as a SparseTensor `[records, steps, values]`."""
        step = np.arange(len(self.counts)) - np.repeat(self.steps.cumsum() - self.steps, self.steps)
        within = np.arange(len(self.values)) - np.repeat(self.counts.cumsum() - self.counts, self.counts)
        columns = [np.repeat(step, self.counts), within]
        shape = [int(self.steps.max(initial=0)), int(self.counts.max(initial=0))]
        if not self._alone:
            columns.insert(0, np.repeat(np.repeat(np.arange(len(self.steps)), self.steps), self.counts))
            shape.insert(0, len(self.steps))
        return _parse.sparse_tensor(np.stack(columns, 1), self.values, shape)

    def ragged(self, dtype: DTypeLike) -> RaggedTensor:
        """Returns the values as a RaggedTensor `[records, (steps), (values)]`."""
        rows = _parse.rows_of(as_tensor(self.values), self.counts, dtype)
        return rows if self._alone else _parse.rows_of(rows, self.steps, dtype)
