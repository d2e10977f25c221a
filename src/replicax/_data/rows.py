"""Rows that lie in arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from replicax._data.elements import flatten, regroup
from replicax._data.specs import Maker, probing

# How many row numbers are handled at once; large enough that Python's part does not count.
CHUNK = 1 << 13


class Rows(NamedTuple):
    """Rows that lie in arrays: their numbers in the order of the dataset, and how to fetch them."""

    fetch: Callable[[Any], Any]  # one number gives one element, an array of numbers gives a block
    order: Callable[[], Iterator[np.ndarray]]
    in_order: bool = False  # whether the order is still 0, 1, 2, ...

    def elements(self) -> Iterator[Any]:
        for numbers in self.order():
            for number in numbers.tolist():
                yield self.fetch(number)


def plain_rows(fetch: Callable[[Any], Any], count: int) -> Rows:
    def order() -> Iterator[np.ndarray]:
        for start in range(0, count, CHUNK):
            yield np.arange(start, min(start + CHUNK, count))

    return Rows(fetch, order, in_order=True)


def fetch_from(arrays: Any) -> Callable[[Any], Any]:
    """How to fetch rows of a structure of arrays. Rows in a row are a view, which costs nothing; others a copy."""
    leaves, structure = flatten(arrays)

    def fetch(numbers: Any) -> Any:
        if isinstance(numbers, int):
            return structure.unflatten([a[numbers, ...] for a in leaves])
        first, last = int(numbers[0]), int(numbers[-1])
        if last - first == len(numbers) - 1 and (np.diff(numbers) == 1).all():
            return structure.unflatten([a[first : last + 1] for a in leaves])
        return structure.unflatten([a.take(numbers, axis=0) for a in leaves])

    return fetch


def take_rows(order: Iterator[np.ndarray], count: int) -> Iterator[np.ndarray]:
    for numbers in order if count > 0 else ():
        yield numbers[:count]
        count -= len(numbers)
        if count <= 0:
            return


def skip_rows(order: Iterator[np.ndarray], count: int) -> Iterator[np.ndarray]:
    for numbers in order:
        if count < len(numbers):
            yield numbers[count:]
        count = max(0, count - len(numbers))


def shard_rows(order: Iterator[np.ndarray], num_shards: int, index: int) -> Iterator[np.ndarray]:
    seen = 0
    for numbers in order:
        mine = numbers[(index - seen) % num_shards :: num_shards]
        if len(mine):
            yield mine
        seen += len(numbers)


def shuffle_rows(order: Iterator[np.ndarray], size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """`shuffle_elements` for chunks of row numbers: the same procedure, a whole chunk at a time."""
    chunks = regroup(order, itertools.chain([size], itertools.repeat(CHUNK)))
    buffer = np.array(next(chunks, ()), np.int64)
    for incoming in chunks:
        slots = rng.integers(len(buffer), size=len(incoming))
        # What leaves at time t is what came into the same slot last before t, or else what was there at the start.
        by_slot = np.argsort(slots, kind="stable")
        from_start = np.diff(slots[by_slot], prepend=-1) != 0
        before = incoming[np.roll(by_slot, 1)]
        leaving = np.empty_like(incoming)
        leaving[by_slot] = np.where(from_start, buffer[slots[by_slot]], before)
        buffer[slots] = incoming  # where a slot comes twice, numpy keeps the last
        yield leaving
    if len(buffer):
        yield rng.permutation(buffer)


def shuffle_elements(elements: Iterator[Any], size: int, rng: np.random.Generator) -> Iterator[Any]:
    """Each element that comes in takes the place of a random one of the buffer, which goes out."""
    buffer = list(itertools.islice(elements, size))
    for element in elements:
        slot = rng.integers(len(buffer))
        leaving, buffer[slot] = buffer[slot], element
        yield leaving
    for slot in rng.permutation(len(buffer)):
        yield buffer[slot]


class Passes:
    """The random numbers of each pass over a shuffled dataset: new ones, unless it shall not be reshuffled."""

    def __init__(self, seed: int | None, reshuffle: bool):
        entropy: Any = np.random.SeedSequence().entropy
        self._seed: int = entropy if seed is None else int(seed) % 2**64
        self._reshuffle = reshuffle
        self._passes = 0

    def __call__(self) -> np.random.Generator:
        number = self._passes if self._reshuffle else 0
        if not probing.on:
            self._passes += 1
        return np.random.default_rng([self._seed, number])


def repeated(make: Maker, count: int) -> Iterator[Any]:
    for _ in itertools.repeat(None) if count < 0 else range(count):
        empty = True
        for element in make():
            empty = False
            yield element
        if empty:
            return  # or else repeating nothing would never end


def cached(make: Maker) -> Maker:
    """Keeps what the first complete pass yields."""
    kept: list[Any] | None = None

    def elements() -> Iterator[Any]:
        nonlocal kept
        if kept is not None:
            yield from kept
            return
        seen = []
        for element in make():
            seen.append(element)
            yield element
        kept = seen

    return elements


def drawn(
    shuffle: Callable[..., Iterator[Any]], make: Maker, size: int, passes: Callable[[], np.random.Generator]
) -> Iterator[Any]:
    # A generator function, so that a pass counts from its first element: an iterator never used is none.
    yield from shuffle(make(), size, passes())
