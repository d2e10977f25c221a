"""The methods of `Dataset` that change the number or the order of elements, or keep them."""

from __future__ import annotations

import os
from typing import TypeVar

import numpy as np

from replicax._base.errors import InvalidArgumentError
from replicax._base.messages import received
from replicax._data.base import Base
from replicax._data.elements import positive, structure_of
from replicax._data.nodes.combine import Zip
from replicax._data.nodes.node import node_of
from replicax._data.nodes.order import Cache, Concatenate, Prefetch, Repeat, Shard, Shuffle, SkipFirst, Take
from replicax._data.nodes.saved import CacheInFile
from replicax._data.nodes.sources import count_from
from replicax._data.reading import Seeds
from replicax._data.specs import AUTOTUNE

D = TypeVar("D", bound=Base)

# The default number of elements that wait: one that is computed with, and one on its way.
_PREFETCHED = 2


def shuffle(
    self: D,
    buffer_size: int,
    seed: int | None = None,
    reshuffle_each_iteration: bool | None = True,
    name: str | None = None,
) -> D:
    """Returns the elements in random order, drawn from a buffer; one as large as the dataset shuffles fully.

    Args:
        buffer_size: how many elements wait in the buffer.
        seed: makes the orders the same in each program; without one they differ.
        reshuffle_each_iteration: whether each pass has an order of its own.

    Raises:
        InvalidArgumentError: `buffer_size` is not positive.

    >>> from replicax.data import Dataset
    >>> sorted(int(x) for x in Dataset.range(4).shuffle(4, seed=1))
    [0, 1, 2, 3]
    """
    seeds = Seeds(seed, reshuffle_each_iteration is None or bool(reshuffle_each_iteration))
    return self._then(Shuffle(self._node, positive("buffer_size", buffer_size), seeds))


def repeat(self: D, count: int | None = None, name: str | None = None) -> D:
    """Returns `count` passes one after the other; without end if it is None or -1.

    >>> from replicax.data import Dataset
    >>> [int(x) for x in Dataset.range(2).repeat(2)]
    [0, 1, 0, 1]
    """
    return self._then(Repeat(self._node, -1 if count is None else int(count)))


def take(self: D, count: int, name: str | None = None) -> D:
    """Returns the first `count` elements; all if it is -1.

    >>> from replicax.data import Dataset
    >>> [int(x) for x in Dataset.range(5).take(2)]
    [0, 1]
    """
    return self._then(self._node if count < 0 else Take(self._node, count))


def skip(self: D, count: int, name: str | None = None) -> D:
    """Returns all but the first `count` elements; none if it is -1.

    >>> from replicax.data import Dataset
    >>> [int(x) for x in Dataset.range(5).skip(3)]
    [3, 4]
    """
    return self._then(Take(self._node, 0) if count < 0 else SkipFirst(self._node, count))


def shard(self: D, num_shards: int, index: int, name: str | None = None) -> D:
    """Returns every `num_shards`-th element, from number `index` on.

    Raises:
        InvalidArgumentError: `num_shards` is not positive, or `index` is not from 0 to `num_shards - 1`.

    >>> from replicax.data import Dataset
    >>> [int(x) for x in Dataset.range(5).shard(num_shards=2, index=1)]
    [1, 3]
    """
    num_shards, index = positive("num_shards", num_shards), int(index)
    if not 0 <= index < num_shards:
        raise InvalidArgumentError(f"index must be between 0 and {num_shards - 1} = num_shards - 1, got {index}.")
    return self._then(Shard(self._node, num_shards, index))


def cache(self: D, filename: str = "", name: str | None = None) -> D:
    """Keeps the elements of the first complete pass for the later ones: in memory, or in a file.

    Args:
        filename: the file, which is there once a pass is complete, or not at all; programs that find it read it
            in place of the dataset. Delete it where the data have changed.

    >>> from replicax.data import Dataset
    >>> calls = []
    >>> dataset = Dataset.from_generator(lambda: calls.append("called") or [1, 2]).cache()
    >>> [[int(x) for x in dataset] for _ in range(2)], calls
    ([[1, 2], [1, 2]], ['called'])
    """
    return self._then(CacheInFile(self._node, os.fspath(filename)) if filename else Cache(self._node))


def prefetch(self: D, buffer_size: int | None = None, name: str | None = None) -> D:
    """Returns the same elements, made in a thread ahead of their use.

    The thread starts with the first element that is asked for, and ends with the iterator. Rows of arrays that
    are not batched yet are at hand anyway: for them there is none.

    Args:
        buffer_size: how many elements may wait; by default, and for AUTOTUNE, two.

    Raises:
        InvalidArgumentError: `buffer_size` is negative, and not AUTOTUNE.

    >>> from replicax.data import Dataset
    >>> [batch.tolist() for batch in Dataset.range(4).batch(2).prefetch(1)]
    [[0, 1], [2, 3]]
    """
    size = _PREFETCHED if buffer_size in (None, AUTOTUNE) else int(buffer_size or 0)
    if size < 0:
        raise InvalidArgumentError(f"buffer_size must be >= 0, or AUTOTUNE (-1), got {buffer_size}.")
    return self._then(Prefetch(self._node, size) if size and self._node.rows is None else self._node)


def enumerate(self: D, start: int = 0, name: str | None = None) -> D:
    """Returns pairs of a number (int64, from `start`) and an element.

    >>> from replicax.data import Dataset
    >>> [(int(number), int(x)) for number, x in Dataset.range(5, 7).enumerate(start=1)]
    [(1, 5), (2, 6)]
    """
    numbers = count_from(f"counter({start})", start, 1, np.dtype(np.int64))
    return self._then(Zip("enumerate", [numbers, self._node], structure_of((0, 0))))


def concatenate(self: D, dataset: Base, name: str | None = None) -> D:
    """Returns these elements and then those of `dataset`.

    Raises:
        TypeError: `dataset` is no Dataset, or its elements are known to be of another kind.

    >>> from replicax.data import Dataset
    >>> [int(x) for x in Dataset.range(2).concatenate(Dataset.range(5, 7))]
    [0, 1, 5, 6]
    """
    if not isinstance(dataset, Base):
        raise TypeError(f"`dataset` is a Dataset, got {received(dataset)}.")
    return self._of(Concatenate(self._node, node_of(dataset)), self._options.merge(dataset.options()))
