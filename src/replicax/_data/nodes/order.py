"""Nodes that change the number or the order of elements, or keep them."""

from __future__ import annotations

import collections
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from replicax._base.types import Tree
from replicax._data.nodes.node import Arrangement, Node, Read, Reordered, reordered
from replicax._data.prefetch import Prefetched
from replicax._data.reading import CachedElements, Reading, Seeds
from replicax._data.rows import CHUNK, RowOrder, repeat_rows, shard_rows, shuffle_rows, skip_rows, take_rows
from replicax._data.skipping import Deferred, Recipe, Skip
from replicax._data.specs import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, common_spec, same_kinds, tensor_spec
from replicax._report.terminal import progress

_T = TypeVar("_T")


class Shuffle(Reordered):
    """The elements in random order, drawn from a buffer of `size` elements."""

    def __init__(self, source: Node, size: int, seeds: Seeds):
        self._size, self._seeds = size, seeds
        super().__init__(f"shuffle({size})", source, source.cardinality, [seeds])

    # Generators, so that a pass counts only once its first element is asked for.

    def arrange(self, reading: Reading, read: Read) -> Iterator[Tree]:
        yield from _draw_shuffled(read(self.input, reading), self._size, reading.generator(self._seeds))

    def row_order(self, order: RowOrder, reading: Reading) -> Iterator[np.ndarray]:
        yield from shuffle_rows(order(reading), self._size, reading.generator(self._seeds))


def _draw_shuffled(elements: Iterator[_T], size: int, rng: np.random.Generator) -> Iterator[_T]:
    """Shuffle elements: each new element replaces a random element of the buffer, which is yielded."""
    buffer: list[_T] = []
    with progress("filling the buffer of shuffle", total=size, unit="elements") as bar:
        for element in itertools.islice(elements, size):
            buffer.append(element)
            bar.advance()
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


class _Chain(Arrangement):
    """The elements of several nodes one after the other."""

    def parts(self) -> Iterable[Node]:
        """Return these nodes."""
        return self.inputs

    def sizes_are_known(self) -> bool:
        """Return whether the cardinality of each part is known, except that of the last one."""
        return self.inputs[0].cardinality >= 0

    until_empty = False  # whether an empty part ends the elements

    def arrange(self, reading: Reading, read: Read) -> Iterator[Tree]:
        return self._read_from(reading, 0, lambda node, part, start: read(node, part))

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        if not self.sizes_are_known():
            return super().read(reading, start)
        return self._read_from(reading, start, Node.iterate)

    def _read_from(
        self, reading: Reading, start: int, read: Callable[[Node, Reading, int], Iterator[Tree]]
    ) -> Iterator[Tree]:
        for number, node in enumerate(self.parts()):
            part = reading.part(number)
            if 0 < node.cardinality <= start:
                # All its elements are skipped, and gone through, since a cache in it may have been filled.
                collections.deque(node.iterate(part, node.cardinality), maxlen=0)
                start -= node.cardinality
                continue
            empty = not start
            for element in read(node, part, start):
                empty = False
                yield element
            start = 0
            if empty and self.until_empty:
                return


class Repeat(_Chain, Reordered):
    """Several passes, one after the other; without end if `times` is negative."""

    until_empty = True  # repeating an empty dataset would never end

    def __init__(self, source: Node, times: int):
        self._times, count = times, source.cardinality
        if times == 0 or count == 0:
            count = 0
        elif times < 0:
            count = INFINITE_CARDINALITY
        elif count > 0:
            count *= times
        super().__init__("repeat" if times < 0 else f"repeat({times})", source, count)

    def parts(self) -> Iterable[Node]:
        return itertools.repeat(self.input) if self._times < 0 else itertools.repeat(self.input, self._times)

    def sizes_are_known(self) -> bool:
        return self.cardinality >= 0 or self.input.cardinality > 0

    def row_order(self, order: RowOrder, reading: Reading) -> Iterator[np.ndarray]:
        return repeat_rows(order, self._times)(reading)


class Concatenate(_Chain):
    """The elements of one node and then those of another one."""

    def __init__(self, first: Node, second: Node):
        sizes = (first.cardinality, second.cardinality)
        count = UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in sizes else sum(sizes)
        if INFINITE_CARDINALITY in sizes:
            count = INFINITE_CARDINALITY
        super().__init__("concatenate", (first, second), count, files=first.files + second.files)
        self.batch_size = first.batch_size if first.batch_size == second.batch_size else None
        self.spec(False)  # raises TypeError if the elements are known to differ

    def spec_of(self, *specs: Tree) -> Tree:
        if not same_kinds(*specs):
            raise TypeError(f"Incompatible dataset elements: {' vs. '.join(str(tensor_spec(s)) for s in specs)}")
        return common_spec(*specs)


class Take(Reordered):
    """The first `count` elements."""

    def __init__(self, source: Node, count: int):
        self._count = count
        known = count if source.cardinality == INFINITE_CARDINALITY else min(count, source.cardinality)
        super().__init__(f"take({count})", source, known)

    def arrange(self, reading: Reading, read: Read) -> Iterator[Tree]:
        return itertools.islice(read(self.input, reading), self._count)

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        count = self._count
        if start < count or not count:
            return itertools.islice(self.input.iterate(reading, start), max(0, count - start))
        return itertools.islice(self.input.iterate(reading, count - 1), 1, 1)  # a pass begins with its first element

    def row_order(self, order: RowOrder, reading: Reading) -> Iterator[np.ndarray]:
        return take_rows(order(reading), self._count)


class SkipFirst(Reordered):
    """All but the first `count` elements."""

    def __init__(self, source: Node, count: int):
        self._count = count
        known = source.cardinality if source.cardinality < 0 else max(0, source.cardinality - count)
        super().__init__(f"skip({count})", source, known)

    def arrange(self, reading: Reading, read: Read) -> Iterator[Tree]:
        return itertools.islice(read(self.input, reading), self._count, None)

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        if not start:
            return self.arrange(reading, Node.iterate)
        return self.input.iterate(reading, self._count + start)

    def row_order(self, order: RowOrder, reading: Reading) -> Iterator[np.ndarray]:
        return skip_rows(order(reading), self._count)


class Shard(Reordered):
    """Every `count`-th element, from number `index` on."""

    def __init__(self, source: Node, count: int, index: int):
        self._count, self._index = count, index
        known = source.cardinality
        super().__init__(f"shard({count}, {index})", source, known if known < 0 else -((index - known) // count))

    def arrange(self, reading: Reading, read: Read) -> Iterator[Tree]:
        return itertools.islice(read(self.input, reading), self._index, None, self._count)

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        elements = self.input.iterate(reading, start * self._count)
        return itertools.islice(elements, self._index, None, self._count)

    def row_order(self, order: RowOrder, reading: Reading) -> Iterator[np.ndarray]:
        return shard_rows(order(reading), self._count, self._index)


class Cache(Node):
    """The elements of the first complete pass, kept in memory for the later ones."""

    def __init__(self, source: Node):
        self._kept = CachedElements(source.memories)
        super().__init__("cache", [source], source.cardinality, memories=[self._kept])
        self.batch_size, self.at_hand = source.batch_size, source.at_hand
        self.rows = reordered(source.rows, lambda order, reading: self._kept.read(reading, order))

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        return self._kept.read(reading, self.input.iterate, start)


class Prefetch(Node):
    """The same elements, made in a thread ahead of their use; `size` of them may wait."""

    def __init__(self, source: Node, size: int):
        super().__init__(f"prefetch({size})", [source], source.cardinality)
        self._size, self.batch_size = size, source.batch_size

    @property
    def without_thread(self) -> Node | None:
        return self.input if self.input.at_hand else None

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        if reading.probing:
            return self.input.iterate(reading, start)
        return Prefetched(functools.partial(self.input.iterate, reading, start), self._size)

    def read_recipes(self, reading: Reading, skip: Skip) -> Iterator[Recipe]:
        def ahead(recipes: Iterator[Recipe]) -> Iterator[Tree]:
            return Prefetched(lambda: map(operator.call, recipes), self._size)

        return Deferred(skip, self.input.recipes(reading, skip), lambda recipe: recipe, ahead)
