"""Rows that lie in arrays."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from replicax._base.host_memory import Pool
from replicax._base.types import Tree
from replicax._data import composites
from replicax._data.blocks import RowElements
from replicax._data.elements import flatten, regroup
from replicax._data.reading import Reading
from replicax._data.skipping import Recipe

# The number of row numbers handled at once; large enough that the cost of Python does not count.
CHUNK = 1 << 13


RowOrder: TypeAlias = Callable[[Reading], Iterator[np.ndarray]]
Fetch: TypeAlias = Callable[[int | np.ndarray], Tree]  # one number gives one element, several a block of rows


class Rows(NamedTuple):
    """Rows that lie in arrays: their numbers in the order of the dataset, and how to fetch them."""

    fetch: Fetch
    order: RowOrder
    in_order: bool = False  # whether the order is still 0, 1, 2, ...
    composite: bool = False  # whether some are ragged or sparse, so that several are a batch but no block

    def elements(self, reading: Reading, start: int = 0) -> Iterator[Tree]:
        """Return an iterator over the rows, from number `start` on."""
        numbers = skip_rows(self.order(reading), start)
        if self.composite:
            return map(self.fetch, _each(numbers))
        return RowElements(self.fetch, numbers)

    def recipes(self, reading: Reading) -> Iterator[Recipe]:
        """Return how to make each row."""
        return (functools.partial(self.fetch, number) for number in _each(self.order(reading)))


def _each(order: Iterator[np.ndarray]) -> Iterator[int]:
    return itertools.chain.from_iterable(numbers.tolist() for numbers in order)


def plain_rows(fetch: Fetch, count: int, composite: bool = False) -> Rows:
    """Returns rows 0 to `count`, or without end where that is negative."""

    def order(reading: Reading) -> Iterator[np.ndarray]:
        for start in itertools.count(0, CHUNK) if count < 0 else range(0, count, CHUNK):
            yield np.arange(start, start + CHUNK if count < 0 else min(start + CHUNK, count))

    return Rows(fetch, order, True, composite)


def fetch_from(arrays: Tree) -> Fetch:
    """Returns a function that fetches rows of arrays: a view of consecutive ones, a copy of others."""
    if composites.has_composites(arrays):
        return functools.partial(_fetch_composites, arrays)
    leaves, structure = flatten(arrays)
    pool = Pool()

    def fetch(numbers: int | np.ndarray) -> Tree:
        if isinstance(numbers, int):
            return structure.unflatten([a[numbers, ...] for a in leaves])
        first, last = int(numbers[0]), int(numbers[-1])
        if last - first == len(numbers) - 1 and (np.diff(numbers) == 1).all():
            return structure.unflatten([a[first : last + 1] for a in leaves])
        return structure.unflatten([pool.rows(a, numbers) for a in leaves])

    return fetch


def _fetch_composites(arrays: Tree, numbers: int | np.ndarray) -> Tree:
    if isinstance(numbers, int):
        return composites.on_rows(lambda leaf: composites.row(leaf, numbers), arrays)
    return composites.on_rows(lambda leaf: composites.rows_at(leaf, numbers), arrays)


class RowBatches(Iterator[Tree]):
    """Batches of `size` rows with these numbers, the last one perhaps smaller; one by one, or as blocks."""

    def __init__(self, fetch: Fetch, numbers: Iterator[np.ndarray], size: int, drop_remainder: bool):
        self._fetch, self._numbers, self._drop, self.size = fetch, numbers, drop_remainder, size
        self._ahead = _NO_NUMBERS  # numbers that were read but not used yet

    def __next__(self) -> Tree:
        return self._fetch(self._next_numbers())

    def recipes(self) -> Iterator[Recipe]:
        """Return how to make each batch."""
        with contextlib.suppress(StopIteration):
            while True:
                yield functools.partial(self._fetch, self._next_numbers())

    def _next_numbers(self) -> np.ndarray:
        numbers = self._next(self.size)
        if not len(numbers) or (self._drop and len(numbers) < self.size):
            raise StopIteration
        return numbers

    def next_block(self, count: int, shares: int) -> Tree:
        """Returns the next `count` batches, each cut into `shares`, as arrays `[shares, count, rows, ...]`.

        None where there are fewer, or where they have strings, or ragged or sparse rows; then they are to come yet. The
        size of a batch is a multiple of `shares`.
        """
        numbers = self._next(count * self.size)
        if len(numbers) < count * self.size or _no_block(self._fetch(numbers[:1])):
            self._ahead = np.concatenate([numbers, self._ahead])
            return None
        rows = self.size // shares
        block = self._fetch(numbers.reshape(count, shares, rows).swapaxes(0, 1).ravel())
        return jax.tree.map(lambda a: a.reshape(shares, count, rows, *a.shape[1:]), block)

    def _next(self, count: int) -> np.ndarray:
        """Returns the next `count` numbers, or those that there are."""
        parts, missing = [self._ahead], count - len(self._ahead)
        self._ahead = _NO_NUMBERS
        while missing > 0 and (more := next(self._numbers, None)) is not None:
            parts.append(more)
            missing -= len(more)
        numbers = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._ahead = numbers[count:]
        return numbers[:count]


_NO_NUMBERS = np.arange(0)


def _no_block(batch: Tree) -> bool:
    return composites.has_composites(batch) or any(array.dtype.hasobject for array in jax.tree.leaves(batch))


def take_rows(order: Iterator[np.ndarray], count: int) -> Iterator[np.ndarray]:
    """Yields the first `count` row numbers."""
    for numbers in order if count > 0 else ():
        yield numbers[:count]
        count -= len(numbers)
        if count <= 0:
            return


def skip_rows(order: Iterator[np.ndarray], count: int) -> Iterator[np.ndarray]:
    """Yields all but the first `count` row numbers."""
    for numbers in order:
        if count < len(numbers):
            yield numbers[count:]
        count = max(0, count - len(numbers))


def shard_rows(order: Iterator[np.ndarray], num_shards: int, index: int) -> Iterator[np.ndarray]:
    """Yields every `num_shards`-th row number, from number `index` on."""
    seen = 0
    for numbers in order:
        mine = numbers[(index - seen) % num_shards :: num_shards]
        if len(mine):
            yield mine
        seen += len(numbers)


def shuffle_rows(order: Iterator[np.ndarray], size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Shuffles row numbers by the procedure of `shuffled_elements`, a whole chunk at a time."""
    chunks = regroup(order, itertools.chain([size], itertools.repeat(CHUNK)))
    buffer = np.array(next(chunks, ()), np.int64)
    for incoming in chunks:
        slots = rng.integers(len(buffer), size=len(incoming))
        # The row that leaves at time t is the one that last entered its slot before t, or the one there at the start.
        by_slot = np.argsort(slots, kind="stable")
        from_start = np.diff(slots[by_slot], prepend=-1) != 0
        before = incoming[np.roll(by_slot, 1)]
        leaving = np.empty_like(incoming)
        leaving[by_slot] = np.where(from_start, buffer[slots[by_slot]], before)
        buffer[slots] = incoming  # where a slot comes twice, numpy keeps the last
        yield leaving
    if len(buffer):
        yield rng.permutation(buffer)


def repeat_rows(order: RowOrder, count: int) -> RowOrder:
    """Returns the order of `count` passes; of passes without end where that is negative."""

    def again(reading: Reading) -> Iterator[np.ndarray]:
        for number in itertools.count() if count < 0 else range(count):
            empty = True
            for numbers in order(reading.part(number)):
                empty = False
                yield numbers
            if empty:
                return  # repeating an empty dataset would never end

    return again
