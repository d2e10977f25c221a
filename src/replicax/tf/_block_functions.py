"""Blocks of elements of one signature, and compiled functions of them."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import jax
import numpy as np

from replicax.tf._core import (
    Blocks,
    Draws,
    ElementFunction,
    Item,
    MapOptions,
    Nested,
    Pool,
    Results,
    Signature,
    Tree,
    cut,
    flatten,
    has_composites,
    joined,
    length,
    row,
    rows,
    stack,
)


def signature(element: Tree) -> Signature | None:
    """Returns the signature of an element; None where it has leaves that no block can hold, such as strings."""
    if type(element) is np.ndarray and element.dtype.hasobject:
        return None
    leaves, structure = flatten(element)
    if has_composites(element) or any(isinstance(leaf, Nested) or leaf.dtype.hasobject for leaf in leaves):
        return None
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


class Chunk(NamedTuple):
    """Consecutive elements of one signature.

    Attributes:
        first: the number of the first of them in the dataset.
        rows: a block of them.
        size: how many there are.
        kind: their signature.
    """

    first: int
    rows: Tree
    size: int
    kind: Signature


class Chunks(Iterator[Chunk | Item]):
    """The elements of an iterator in chunks. Those that no block can hold come one by one, with their numbers.

    An exception in place of an element comes up after the chunk before it, and does not end the iterator.

    Args:
        elements: the elements.
        first: the number of the first of them.
        size: how many elements of a signature are to be in a chunk; 1 for those that are to come one by one.
        pool: has memory for chunks.
    """

    def __init__(self, elements: Iterator[Tree], first: int, size: Callable[[Signature], int], pool: Pool):
        self._elements, self._number, self._size, self._pool = elements, first, size, pool
        self._most = 1  # how many are asked for: as many as the elements before have in a chunk
        self._ahead: collections.deque[Tree] = collections.deque()  # elements that were taken but not used yet
        self._failure: Exception | None = None

    def __next__(self) -> Chunk | Item:
        if self._most > 1 and isinstance(self._elements, Blocks) and not self._ahead:
            elements, most = self._elements, self._most
            block, count = self._taken(lambda: elements.next_block(most))
            kind = None if count is None else signature(row(block, 0))
            self._most = 1 if kind is None else self._size(kind)
            if kind is not None and self._most > 1:
                return self._numbered(block, count, kind)
            self._ahead.extend([block] if count is None else rows(block))
        head = self._ahead.popleft() if self._ahead else self._taken(self._elements.__next__)
        kind = signature(head)
        self._most = 1 if kind is None else self._size(kind)
        if kind is None or self._most == 1:
            self._number += 1
            return Item(self._number - 1, head)
        found = [head]
        while len(found) < self._most and self._failure is None:
            element = self._next_of(kind)
            if element is None:
                break
            found.append(element)
        return self._numbered(stack(found, self._pool), len(found), kind)

    def _numbered(self, block: Tree, count: int, kind: Signature) -> Chunk:
        self._number += count
        return Chunk(self._number - count, block, count, kind)

    def _taken(self, take: Callable[[], Tree]) -> Tree:
        """Returns what `take` gives; an exception counts as an element, and one that waits comes first."""
        try:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            return take()
        except StopIteration:
            raise
        except Exception:
            self._number += 1
            raise

    def _next_of(self, kind: Signature) -> Tree | None:
        """Returns the next element if it has this signature; else None, and what comes in its place comes later."""
        try:
            element = self._ahead.popleft() if self._ahead else next(self._elements)
        except StopIteration:
            return None
        except Exception as error:
            self._failure = error
            return None
        if signature(element) == kind:
            return element
        self._ahead.appendleft(element)
        return None


class BlockProgram(Protocol):
    """A compiled function of blocks of `size` elements of one signature."""

    size: int

    def __call__(self, block: Tree, first: int, draws: Draws | None) -> Tree:
        """Returns the results as a block.

        Args:
            block: `size` elements.
            first: the number of the first of them in the dataset.
            draws: what `ElementFunction.draws` gave.
        """


class BlockFunction(ElementFunction):
    """A function of elements that may be compiled for blocks of elements.

    What is compiled is computed in this process: it leaves Python's lock, and another process would compile it anew.
    """

    def program(self, kind: Signature) -> BlockProgram | None:
        """Return the function compiled for elements of this signature, None if it runs in Python."""
        raise NotImplementedError

    def _program_for(self, element: Tree) -> BlockProgram | None:
        kind = signature(element)
        return None if kind is None else self.program(kind)

    def may_go_elsewhere(self, element: Tree) -> bool:
        return self._program_for(element) is None

    def of_one(self, element: Tree, number: int, draws: Draws | None) -> Tree:
        """Return the function of one element, bit for bit as within a block."""
        if (program := self._program_for(element)) is None:
            return super().of_one(element, number, draws)
        block = jax.tree.map(lambda a: a[None], element)
        return row(program(_padded(block, program.size), number, draws), 0)

    def results(self, elements: Iterator[Tree], start: int, draws: Draws | None, options: MapOptions) -> Results:
        def size(kind: Signature) -> int:
            program = self.program(kind) if options.ahead else None
            return 1 if program is None else program.size

        chunks = Chunks(elements, start, size, self.pool)
        return self.compute_each(functools.partial(self._compute, draws), chunks, draws, options)

    def _compute(self, draws: Draws | None, chunk: Chunk | Item) -> tuple[Tree, int | None]:
        """Return the function of a chunk as a block and the number of its rows; None for a single element."""
        if isinstance(chunk, Item):
            return self.of_one(chunk.element, chunk.number, draws), None
        program = self.program(chunk.kind)
        assert program is not None
        blocks = []
        for begin in range(0, chunk.size, program.size):
            part = cut(chunk.rows, begin, begin + program.size)
            results = program(_padded(part, program.size), chunk.first + begin, draws)
            blocks.append(cut(results, 0, length(part)))
        return joined(blocks, self.pool), chunk.size


def _padded(block: Tree, size: int) -> Tree:
    """Returns a block of `size` rows, in which the last row is repeated."""
    missing = size - length(block)
    return block if not missing else jax.tree.map(lambda a: np.concatenate([a, *[a[-1:]] * missing]), block)
