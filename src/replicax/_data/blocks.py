"""Iterators over elements of which several can be taken at once, as one block with a new first axis."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax
import numpy as np

from replicax._base.host_memory import Pool
from replicax._base.types import Tree
from replicax._data.composites import has_composites
from replicax._data.elements import Nested, Structure, flatten, joined

# What elements of one block have in common: their structure, and the shapes and dtypes of their arrays.
Signature: TypeAlias = tuple[Structure, tuple[tuple[tuple[int, ...], np.dtype], ...]]


class Blocks(Iterator[Tree]):
    """An iterator over elements that also gives several of them as one block of rows."""

    @abc.abstractmethod
    def next_block(self, most: int) -> tuple[Tree, int | None]:
        """Returns a block of the next elements, at least one and at most `most`, and their number.

        An element that no block can hold comes by itself, with None. Raises StopIteration at the end.
        """


class RowElements(Blocks):
    """The rows with the numbers that `numbers` gives in chunks, one by one or as blocks."""

    def __init__(self, fetch: Callable[[int | np.ndarray], Tree], numbers: Iterator[np.ndarray]):
        self._fetch, self._numbers = fetch, numbers
        self._chunk = np.arange(0)
        self._list: list[int] = []
        self._at = 0

    def __next__(self) -> Tree:
        while self._at == len(self._list):
            self._next_chunk()
        self._at += 1
        return self._fetch(self._list[self._at - 1])

    def next_block(self, most: int) -> tuple[Tree, int | None]:
        while self._at == len(self._list):
            self._next_chunk()
        numbers = self._chunk[self._at : self._at + most]
        self._at += len(numbers)
        return self._fetch(numbers), len(numbers)

    def _next_chunk(self) -> None:
        chunk = next(self._numbers)
        self._chunk, self._list, self._at = chunk, chunk.tolist(), 0


def length(block: Tree) -> int:
    """Returns the number of rows of a block."""
    return len(flatten(block)[0][0])


def row(block: Tree, number: int) -> Tree:
    """Returns one element of a block."""
    return jax.tree.map(lambda a: a[number, ...], block)


def rows(block: Tree) -> Iterator[Tree]:
    """Returns the elements of a block."""
    leaves, structure = flatten(block)
    return (structure.unflatten([a[i, ...] for a in leaves]) for i in range(len(leaves[0])))


def groups(
    elements: Blocks, size: int, drop_remainder: bool, pool: Pool, stack: Callable[[list[Tree]], Tree]
) -> Iterator[Tree]:
    """Return the elements as blocks of `size` rows; the last one may be smaller, or is dropped.

    `stack` makes a block of elements that do not come as blocks.

    An exception in place of an element takes the elements of its block before it with it, and does not end the
    iterator.
    """
    arguments = map(itertools.repeat, (elements, size, pool, stack))
    blocks = itertools.takewhile(lambda block: block is not None, map(_group, *arguments))
    return filter(lambda block: length(block) == size, blocks) if drop_remainder else blocks


def _group(elements: Blocks, size: int, pool: Pool, stack: Callable[[list[Tree]], Tree]) -> Tree | None:
    parts: list[tuple[Tree, int | None]] = []
    missing = size
    while missing:
        try:
            part, count = elements.next_block(missing)
        except StopIteration:
            break
        parts.append((part, count))
        missing -= 1 if count is None else count
    if not parts:
        return None
    if all(count is not None for _, count in parts):
        blocks = [block for block, _ in parts]
        kinds = {_kind(block) for block in blocks}
        if len(kinds) == 1 and None not in kinds:
            return joined(blocks, pool)
    each = ([part] if count is None else rows(part) for part, count in parts)
    return stack(list(itertools.chain.from_iterable(each)))


def _kind(block: Tree) -> Signature | None:
    """Returns what blocks that can be joined have in common: as `signature` of a row, but strings are possible."""
    leaves, structure = flatten(block)
    if has_composites(block) or any(isinstance(leaf, Nested) for leaf in leaves):
        return None
    return structure, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
