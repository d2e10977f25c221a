"""Partitioners: rules for the number of shards of a variable, and the axis along which it is split.

The rules are those of `tf.distribute.experimental.partitioners` (TensorFlow 2.21).

>>> import replicax as rx
>>> rx.experimental.partitioners.MinSizePartitioner(min_shard_bytes=12, max_shards=5)((10,), "float32")
[4]
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


class Partitioner:
    """A rule for the number of shards of a variable; a rule of one's own defines `__call__`.

    Called with a shape, a dtype and the axis to split (0 by default), it returns the number of shards along each axis:
    1 along all but that one. An axis below 0 counts from the last.

    >>> class Halves(Partitioner):
    ...     def __call__(self, shape, dtype, axis=0):
    ...         return [2 if i == axis else 1 for i in range(len(shape))]
    >>> Halves()((10, 3), "float32")
    [2, 1]
    """

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of shards along each axis."""
        raise NotImplementedError(f"{type(self).__name__} does not define `__call__(self, shape, dtype, axis=0)`.")


class FixedShardsPartitioner(Partitioner):
    """A fixed number of shards, or the size of the axis where that is less.

    Args:
        num_shards: the number, above 0.

    Raises:
        ValueError: a number that is not above 0; in a call, a shape without that axis.

    >>> FixedShardsPartitioner(4)((10, 3), "float32"), FixedShardsPartitioner(4)((10, 3), "float32", axis=1)
    ([4, 1], [1, 3])
    """

    def __init__(self, num_shards: int):
        self._num_shards = _positive("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of shards along each axis."""
        return _cut(shape, axis, self._num_shards)


class MinSizePartitioner(Partitioner):
    """As many shards as there are times `min_shard_bytes` in the variable, rounded up, and at most `max_shards`.

    Args:
        min_shard_bytes: bytes of a shard, which only rounding undercuts.
        max_shards: the most shards.
        bytes_per_string: the bytes that an element of a string dtype (numpy's `object`) counts as.

    Raises:
        ValueError: a number that is not above 0; in a call, a shape without that axis.

    >>> MinSizePartitioner(min_shard_bytes=12, max_shards=5)((10,), "float32")
    [4]
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16):
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of shards along each axis."""
        size = math.prod(shape) * _bytes(dtype, self._bytes_per_string)
        return _cut(shape, axis, min(self._max_shards, -(-size // self._min_shard_bytes)))


class MaxSizePartitioner(Partitioner):
    """As few shards as there can be of at most `max_shard_bytes` each, though never more than `max_shards`.

    Args:
        max_shard_bytes: bytes of a shard; a shard of one row may be larger.
        max_shards: the most shards, which goes before the size; None for no limit.
        bytes_per_string: the bytes that an element of a string dtype (numpy's `object`) counts as.

    Raises:
        ValueError: a number that is not above 0; in a call, a shape without that axis.

    >>> MaxSizePartitioner(16)((10,), "float32"), MaxSizePartitioner(16, max_shards=2)((10,), "float32")
    ([3], [2])
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16):
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = max_shards and _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of shards along each axis."""
        rows = shape[_axis(shape, axis)]
        row = math.prod(shape) // max(rows, 1) * _bytes(dtype, self._bytes_per_string)
        a_shard = max(1, self._max_shard_bytes // max(row, 1))  # rows
        return _cut(shape, axis, min(-(-rows // a_shard), self._max_shards or rows))


def _positive(name: str, value: object) -> int:
    number = operator.index(value) if isinstance(value, SupportsIndex) else 0
    if number < 1:
        raise ValueError(f"Argument `{name}` must be positive. Received: {value!r}")
    return number


def _bytes(dtype: DTypeLike, of_a_string: int) -> int:
    kind = np.dtype(dtype)
    return of_a_string if kind.kind in "OSU" else kind.itemsize


def _axis(shape: Sequence[int], axis: int) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"Cannot partition variable along axis {axis} when shape is only {tuple(shape)}")
    return axis % len(shape)


def _cut(shape: Sequence[int], axis: int, shards: int) -> list[int]:
    """Returns the number of shards along each axis: `shards` along this one, or the number of its rows if less."""
    axis = _axis(shape, axis)
    return [max(1, min(shards, shape[i])) if i == axis else 1 for i in range(len(shape))]
