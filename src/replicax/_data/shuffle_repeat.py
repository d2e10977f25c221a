"""Part of `Dataset`: the number and the order of elements."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Self

import numpy as np

from replicax._base.errors import InvalidArgumentError
from replicax._base.types import Tree
from replicax._data.base import Base
from replicax._data.element_files import cached_in_file
from replicax._data.elements import positive
from replicax._data.prefetch import Prefetched
from replicax._data.reading import CachedElements, Reading, Seeds, hands_on, skipped
from replicax._data.rows import CHUNK, RowOrder, repeat_rows, shard_rows, shuffle_rows, skip_rows, take_rows
from replicax._data.skipping import deferred
from replicax._data.specs import AUTOTUNE, INFINITE_CARDINALITY
from replicax._report.progress import progress

# The default number of elements that wait: one that is computed with, and one on its way.
_PREFETCHED = 2


class Order(Base):
    """Methods of `Dataset`."""

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
        name: str | None = None,
    ) -> Self:
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
        size = positive("buffer_size", buffer_size)
        seeds = Seeds(seed, reshuffle_each_iteration is None or bool(reshuffle_each_iteration))

        # Generator functions, so that a pass counts only once its first element is asked for.
        @skipped
        def make(reading: Reading) -> Iterator[Tree]:
            yield from _shuffled(self._make(reading), size, reading.generator(seeds))

        def on_rows(order: RowOrder) -> RowOrder:
            def shuffled(reading: Reading) -> Iterator[np.ndarray]:
                yield from shuffle_rows(order(reading), size, reading.generator(seeds))

            return shuffled

        return self._reordered(make, on_rows, self._cardinality, seeds)

    def repeat(self, count: int | None = None, name: str | None = None) -> Self:
        """Returns `count` passes one after the other; without end if it is None or -1.

        >>> from replicax.data import Dataset
        >>> [int(x) for x in Dataset.range(2).repeat(2)]
        [0, 1, 0, 1]
        """
        times = -1 if count is None else int(count)
        cardinality = self._cardinality
        if times == 0 or cardinality == 0:
            cardinality = 0
        elif times < 0:
            cardinality = INFINITE_CARDINALITY
        elif cardinality > 0:
            cardinality *= times

        @hands_on
        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            passes = itertools.repeat(self) if times < 0 else itertools.repeat(self, times)
            return concatenated(passes, reading, start, cardinality >= 0 or self._cardinality > 0, until_empty=True)

        return self._reordered(make, lambda order: repeat_rows(order, times), cardinality)

    def take(self, count: int, name: str | None = None) -> Self:
        """Returns the first `count` elements; all if it is -1.

        >>> from replicax.data import Dataset
        >>> [int(x) for x in Dataset.range(5).take(2)]
        [0, 1]
        """
        if count < 0:
            return self._with(self._options)

        @hands_on
        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            if start < count or not count:
                return itertools.islice(self._make(reading, start), max(0, count - start))
            return itertools.islice(self._make(reading, count - 1), 1, 1)  # a pass begins with its first element

        known = count if self._cardinality == INFINITE_CARDINALITY else min(count, self._cardinality)
        return self._reordered(make, lambda order: lambda reading: take_rows(order(reading), count), known)

    def skip(self, count: int, name: str | None = None) -> Self:
        """Returns all but the first `count` elements; none if it is -1.

        >>> from replicax.data import Dataset
        >>> [int(x) for x in Dataset.range(5).skip(3)]
        [3, 4]
        """
        if count < 0:
            return self.take(0)

        @hands_on
        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            return self._make(reading, count + start) if start else itertools.islice(self._make(reading), count, None)

        known = self._cardinality if self._cardinality < 0 else max(0, self._cardinality - count)
        return self._reordered(make, lambda order: lambda reading: skip_rows(order(reading), count), known)

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Self:
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

        @hands_on
        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            return itertools.islice(self._make(reading, start * num_shards), index, None, num_shards)

        known = self._cardinality
        return self._reordered(
            make,
            lambda order: lambda reading: shard_rows(order(reading), num_shards, index),
            known if known < 0 else -((index - known) // num_shards),
        )

    def cache(self, filename: str = "", name: str | None = None) -> Self:
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
        if filename:
            return self._derived(cached_in_file(filename, self), self._cardinality, batch_size=self._batch_size)
        kept = CachedElements(self._nodes)

        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            return kept.read(reading, self._make, start)

        return self._reordered(make, lambda order: lambda reading: kept.read(reading, order), self._cardinality, kept)

    def prefetch(self, buffer_size: int | None = None, name: str | None = None) -> Self:
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
        if not size or self._rows is not None:
            return self._with(self._options)

        @hands_on
        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            if reading.probing:
                return self._make(reading, start)
            if reading.skip is not None and reading.skip.on:
                ahead = lambda rest: Prefetched(lambda: rest, size)  # noqa: E731
                return deferred(reading.skip, None, self._make(reading, start), ahead)
            return Prefetched(functools.partial(self._make, reading, start), size)

        dataset = self._derived(make, self._cardinality, batch_size=self._batch_size)
        dataset._in_place = self._with(self._options) if self._at_hand else None
        return dataset


def concatenated(
    parts: Iterable[Base], reading: Reading, start: int, known: bool, until_empty: bool = False
) -> Iterator[Tree]:
    """Returns the elements of datasets one after the other, from number `start` on.

    `known` says whether it is known of all of them how many elements they have.
    """
    if known:
        return _from(parts, reading, start, until_empty)
    return skipped(lambda reading: _from(parts, reading, 0, until_empty))(reading, start)


def _from(parts: Iterable[Base], reading: Reading, start: int, until_empty: bool) -> Iterator[Tree]:
    """Yields the elements of datasets, all of known sizes if `start` is not 0."""
    for number, part in enumerate(parts):
        own = reading.part(number)
        if 0 < part._cardinality <= start:
            # Its elements are all skipped. It is gone through all the same, since caches in it may have been filled.
            collections.deque(part._make(own, part._cardinality), maxlen=0)
            start -= part._cardinality
            continue
        empty = not start
        for element in part._make(own, start):
            empty = False
            yield element
        start = 0
        if empty and until_empty:
            return  # repeating an empty dataset would never end


def _filled(elements: Iterator[Tree], size: int) -> list[Tree]:
    """Returns the first elements, so many at most."""
    buffer: list[Tree] = []
    with progress("filling the buffer of shuffle", total=size, unit="elements") as bar:
        for element in itertools.islice(elements, size):
            buffer.append(element)
            bar.advance()
    return buffer


def _shuffled(elements: Iterator[Tree], size: int, rng: np.random.Generator) -> Iterator[Tree]:
    """Shuffles elements: each that comes in takes the place of a random one of the buffer, which goes out."""
    buffer = _filled(elements, size)
    slots: list[int] = []
    state, drawn = rng.bit_generator.state, 0
    for element in elements:
        if drawn == len(slots):  # many at once, since one takes as long as a hundred
            state, slots, drawn = rng.bit_generator.state, rng.integers(len(buffer), size=CHUNK).tolist(), 0
        slot = slots[drawn]
        drawn += 1
        leaving, buffer[slot] = buffer[slot], element
        yield leaving
    rng.bit_generator.state = state
    rng.integers(max(1, len(buffer)), size=drawn)  # as if no more had been drawn than were used
    for slot in rng.permutation(len(buffer)):
        yield buffer[slot]
