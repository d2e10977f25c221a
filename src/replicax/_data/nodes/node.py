"""The base classes of the nodes of a dataset: their facts, and how their elements are read.

A dataset is a chain, or a tree, of nodes: sources, and transformations of the elements of other nodes. Elements are
structures of numpy arrays throughout; only the user's functions and the user's loop see tensors.
"""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from replicax._base.errors import InvalidArgumentError
from replicax._base.tracebacks import Origin, origin
from replicax._base.types import Tree
from replicax._data.calls import explain
from replicax._data.elements import Nested
from replicax._data.reading import Memory, Reading
from replicax._data.rows import RowOrder, Rows
from replicax._data.skipping import Recipe, Skip, ready, warn_of_making
from replicax._data.specs import UNKNOWN_CARDINALITY, shown_spec


class Unsure(NamedTuple):
    """A source of elements that may be other ones when they are gone through again."""

    what: str
    origin: Origin


class Node(abc.ABC):
    """A source of elements, or a transformation of the elements of its inputs.

    A subclass implements `read` and, unless `spec` is given, `spec_of` or `find_spec`. If it can leave out elements
    without making them, it implements `read_recipes` as well.

    Args:
        name: what `print(dataset)` shows, such as `batch(4)`.
        inputs: the nodes whose elements this node reads.
        cardinality: the number of elements, or one of the constants in `specs`.
        memories: the memories of this node, without the memories of its inputs.
        files: the number of files that it reads, which may be divided among workers; by default, of the first input.
        unsure: why another reading may give other elements, besides the reasons of the inputs.
        spec: the spec of the elements, if it is known from the beginning.

    Attributes:
        batch_size: the number of rows of an element, where specs do not show it.
        rows: the order of the rows and how to fetch them, where elements are rows of arrays. Then `read` is not called.
        at_hand: whether it costs next to nothing to make an element, and calls no code of the user's.
    """

    batch_size: int | None = None
    rows: Rows | None = None
    at_hand = False

    def __init__(
        self,
        name: str,
        inputs: Iterable[Node] = (),
        cardinality: int = UNKNOWN_CARDINALITY,
        *,
        memories: Iterable[Memory] = (),
        files: int | None = None,
        unsure: Iterable[Unsure] = (),
        spec: Tree = None,
    ):
        self.name, self.inputs, self.cardinality = name, tuple(inputs), cardinality
        inherited = itertools.chain.from_iterable(node.memories for node in self.inputs)
        self.memories: tuple[Memory, ...] = tuple(dict.fromkeys((*inherited, *memories)))  # in the order of the code
        self.files: int = files if files is not None else self.inputs[0].files if self.inputs else 0
        of_inputs = itertools.chain.from_iterable(node.unsure for node in self.inputs)
        self.unsure: tuple[Unsure, ...] = tuple(dict.fromkeys((*of_inputs, *unsure)))
        self.origin = origin()
        self._spec = spec

    @property
    def input(self) -> Node:
        """The first input."""
        return self.inputs[0]

    @property
    def without_thread(self) -> Node | None:
        """The node for callers that read ahead in a thread of their own, if it is another one."""
        return None

    # Specs

    def spec(self, may_call: bool) -> Tree:
        """Return the spec of the elements; None if only the user's functions can tell and `may_call` is False."""
        if self._spec is None:
            self._spec = self.find_spec(may_call)
        return self._spec

    def find_spec(self, may_call: bool) -> Tree:
        """Return what `spec` returns; by default, of the specs of the inputs."""
        specs = [node.spec(may_call) for node in self.inputs]
        return None if any(spec is None for spec in specs) else self.spec_of(*specs)

    def spec_of(self, *specs: Tree) -> Tree:
        """Return the spec of the elements, given those of the inputs' elements."""
        return specs[0]

    # Elements

    def iterate(self, reading: Reading, start: int = 0) -> Iterator[Tree]:
        """Return an iterator over the elements of a reading, from number `start` on."""
        if self.rows is not None:
            return reading.guarded(self.rows.elements(reading, start))
        return reading.guarded(self.read(reading, start))

    @abc.abstractmethod
    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        """Return what `iterate` returns, where exceptions are not ignored."""

    def recipes(self, reading: Reading, skip: Skip) -> Iterator[Recipe]:
        """Return recipes for all elements of a reading, of which the skipped ones need not be made."""
        return self.read_recipes(reading, skip) if self.rows is None else self.rows.recipes(reading)

    def read_recipes(self, reading: Reading, skip: Skip) -> Iterator[Recipe]:
        """Return what `recipes` returns. By default, all elements are made, and a warning says so."""
        if skip.on:
            warn_of_making(skip.count, str(self.origin))
        return map(ready, self.iterate(reading))

    def explain(self, error: Exception, number: int | None = None) -> None:
        """Add a note to an exception that says in which node of the dataset it was raised."""
        explain(error, self.name, number)


class Replayed(Node):
    """A node whose elements depend on those before: a reading from a later one on makes all of them."""

    @abc.abstractmethod
    def read_all(self, reading: Reading) -> Iterator[Tree]:
        """Return an iterator over all elements."""

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        """Make the elements before `start` too, and drop them."""
        if not start:
            return self.read_all(reading)
        warn_of_making(start, str(self.origin))
        return itertools.islice(self.read_all(reading), start, None)


class Mapped(Node):
    """A node with one element for each of its input's elements, made by `compute`."""

    @abc.abstractmethod
    def compute(self, element: Tree) -> Tree:
        """Return the element that is made of one of the input's."""

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        """Compute each element."""
        return map(self.compute, self.input.iterate(reading, start))

    def read_recipes(self, reading: Reading, skip: Skip) -> Iterator[Recipe]:
        """Defer the computation of each element."""
        return map(self._defer, self.input.recipes(reading, skip))

    def _defer(self, recipe: Recipe) -> Recipe:
        return lambda: self.compute(recipe())


def after_skip(node: Node, reading: Reading, start: int) -> Iterator[Tree]:
    """Return the elements of a node from number `start` on, where recipes stand for those before."""
    skip = Skip(start)
    return skip.over(node.read_recipes(reading, skip))


# Reads a node in a reading: elements, or recipes for them.
Read: TypeAlias = Callable[[Node, Reading], Iterator[Tree]]


class Arrangement(Node):
    """A node that orders, leaves out or joins elements of its inputs, without a look at them.

    So it does the same with recipes for elements.
    """

    @abc.abstractmethod
    def arrange(self, reading: Reading, read: Read) -> Iterator[Tree]:
        """Return the elements, or recipes for them, where `read` returns those of a node."""

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        """Arrange elements; if there are some to skip, arrange recipes until then."""
        return self.arrange(reading, Node.iterate) if not start else after_skip(self, reading, start)

    def read_recipes(self, reading: Reading, skip: Skip) -> Iterator[Recipe]:
        """Arrange recipes."""

        def read(node: Node, part: Reading) -> Iterator[Recipe]:
            return node.recipes(part, skip) if skip.on else map(ready, node.iterate(part))

        return self.arrange(reading, read)


class Reordered(Arrangement):
    """An arrangement that may act on the row numbers of its input alone: see `Node.rows`."""

    def __init__(self, name: str, source: Node, cardinality: int, memories: Iterable[Memory] = ()):
        super().__init__(name, [source], cardinality, memories=memories)
        self.batch_size, self.at_hand = source.batch_size, source.at_hand
        self.rows = reordered(source.rows, self.row_order)

    @abc.abstractmethod
    def row_order(self, order: RowOrder, reading: Reading) -> Iterator[np.ndarray]:
        """Return the row numbers in chunks, given the order of the input's."""


def reordered(rows: Rows | None, row_order: Callable[[RowOrder, Reading], Iterator[np.ndarray]]) -> Rows | None:
    """Return rows whose order `row_order` makes of that of the given ones; None for None."""
    return None if rows is None else rows._replace(order=functools.partial(row_order, rows.order), in_order=False)


class NodeOwner(Nested):
    """What has a node: the base class of datasets."""

    _node: Node

    @property
    def element_spec(self) -> Tree:
        """The spec of the elements' tensors."""
        raise NotImplementedError


def node_of(dataset: NodeOwner) -> Node:
    """Return the last node of a dataset."""
    return dataset._node


def spec_of_first(node: Node, may_call: bool) -> Tree:
    """Return the spec that the first element shows, if it may be made: the `find_spec` of some nodes."""
    return first_spec(node) if may_call else None


def first_spec(node: Node) -> Tree:
    """Return the spec that the first element shows."""
    for element in node.read(Reading(probing=True), 0):
        return shown_spec(element)
    raise InvalidArgumentError("element_spec is not known: it is read off the first element, and the dataset is empty.")
