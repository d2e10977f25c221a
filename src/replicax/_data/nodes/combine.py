"""Nodes that draw elements from several inputs at a time."""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from replicax._base.errors import InvalidArgumentError
from replicax._base.types import Tree
from replicax._data.elements import Structure
from replicax._data.nodes.node import Arrangement, Node, NodeOwner, Read, node_of
from replicax._data.reading import Reading, Seeds
from replicax._data.rows import plain_rows
from replicax._data.skipping import Recipe, Skip
from replicax._data.specs import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, common_spec, same_kinds, tensor_spec


class Zip(Node):
    """The elements of several inputs side by side, in a structure."""

    def __init__(self, name: str, inputs: Sequence[Node], structure: Structure):
        sizes = [node.cardinality for node in inputs]
        count = min((n for n in sizes if n != INFINITE_CARDINALITY), default=INFINITE_CARDINALITY)
        super().__init__(name, inputs, count, files=max(node.files for node in inputs))
        self._structure, self.batch_size = structure, common_batch_size(inputs)
        sources = [node.rows for node in inputs if node.rows is not None and node.rows.in_order]
        if len(sources) == len(inputs):
            composite = any(rows.composite for rows in sources)
            self.rows = plain_rows(lambda i: structure.unflatten([s.fetch(i) for s in sources]), count, composite)

    def spec_of(self, *specs: Tree) -> Tree:
        return self._structure.unflatten(specs)

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        # Begin one element early, so that each input is begun even if all of its elements are skipped.
        first, raising = max(0, start - 1), reading.with_errors(None)
        sources = [node.iterate(raising, first) for node in self.inputs]
        return map(self._structure.unflatten, SideBySide(sources, start - first))

    def read_recipes(self, reading: Reading, skip: Skip) -> Iterator[Recipe]:
        raising = reading.with_errors(None)
        return map(self._defer, SideBySide([node.recipes(raising, skip) for node in self.inputs], 0))

    def _defer(self, recipes: list[Recipe]) -> Recipe:
        return lambda: self._structure.unflatten([recipe() for recipe in recipes])


class SideBySide(Iterator[list[Tree]]):
    """Iterates over several sources at once.

    Where one of them raises, the elements beside it are dropped, so that the sources stay in step. The first `skip`
    elements are left out when the first one is asked for.
    """

    def __init__(self, sources: list[Iterator[Tree]], skip: int):
        self._sources, self._skip = sources, skip

    def __next__(self) -> list[Tree]:
        while self._skip:
            self._skip -= 1
            self._take()
        return self._take()

    def _take(self) -> list[Tree]:
        elements, errors = [], []
        for source in self._sources:
            try:
                elements.append(next(source))
            except StopIteration:
                raise
            except Exception as e:
                errors.append(e)
        if errors:
            raise errors[0]
        return elements


class _Chosen(Arrangement):
    """Elements of several inputs, each of one that is chosen.

    Args:
        name: the name of the node.
        inputs: the inputs.
        chooser: a node that tells what to choose, if there is one.
        cardinality: the number of elements.
        stop_on_empty: whether to end when the chosen input has no more elements.
        seeds: of the choices, if they are random.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[Node],
        chooser: Node | None,
        cardinality: int,
        stop_on_empty: bool,
        seeds: Seeds | None = None,
    ):
        further = (*([] if seeds is None else [seeds]), *([] if chooser is None else chooser.memories))
        super().__init__(name, inputs, cardinality, memories=further, files=0)
        self._stop_on_empty, self.batch_size = stop_on_empty, common_batch_size(inputs)

    def spec_of(self, *specs: Tree) -> Tree:
        return functools.reduce(common_spec, specs)

    @abc.abstractmethod
    def choose(self, reading: Reading, left: np.ndarray) -> Iterator[int]:
        """Return the numbers of the chosen inputs; `left` has 0 for those without further elements."""

    def arrange(self, reading: Reading, read: Read) -> Iterator[Tree]:
        left = np.ones(len(self.inputs))
        return self._chosen(reading, read, self.choose(reading, left), left)

    def _chosen(self, reading: Reading, read: Read, choices: Iterator[int], left: np.ndarray) -> Iterator[Tree]:
        iterators = [read(node, reading) for node in self.inputs]
        for number in choices:
            for element in iterators[number]:
                yield element
                break
            else:
                left[number] = 0
                if self._stop_on_empty or not left.any():
                    return


class Choose(_Chosen):
    """Elements of several inputs, whose numbers come from `choices`."""

    def __init__(self, inputs: Sequence[Node], choices: Node, stop_on_empty: bool):
        super().__init__("choose_from_datasets", inputs, choices, UNKNOWN_CARDINALITY, stop_on_empty)
        self._choices = choices

    def choose(self, reading: Reading, left: np.ndarray) -> Iterator[int]:
        for choice in self._choices.iterate(reading):
            number = int(choice)
            if not 0 <= number < len(self.inputs):
                raise InvalidArgumentError(
                    f"`choice_dataset` chose dataset {number}; the datasets are 0 to {len(self.inputs) - 1}."
                )
            yield number


class Sample(_Chosen):
    """Elements of several inputs, chosen at random.

    Args:
        inputs: the inputs.
        weights: how probable each is, or a node of such vectors.
        seeds: the seeds of the choices.
        stop_on_empty: as for `Choose`.
    """

    def __init__(self, inputs: Sequence[Node], weights: np.ndarray | Node, seeds: Seeds, stop_on_empty: bool):
        sizes = [node.cardinality for node in inputs]
        count = sizes[0] if len(sizes) == 1 else UNKNOWN_CARDINALITY
        if INFINITE_CARDINALITY in sizes:
            count = INFINITE_CARDINALITY
        chooser = weights if isinstance(weights, Node) else None
        super().__init__("sample_from_datasets", inputs, chooser, count, stop_on_empty, seeds)
        self._weights, self._seeds = weights, seeds

    def choose(self, reading: Reading, left: np.ndarray) -> Iterator[int]:
        draw = reading.generator(self._seeds).random
        if isinstance(self._weights, Node):
            return self._drawn(draw, self._weights.iterate(reading), left)
        return self._drawn(draw, itertools.repeat(self._weights), left)

    def _drawn(self, draw: Callable[[], float], changing: Iterator[Tree], left: np.ndarray) -> Iterator[int]:
        for weights in changing:
            ends = np.cumsum(probabilities(weights) * left)
            if not ends[-1]:
                return
            yield int(np.searchsorted(ends, draw() * ends[-1], side="right"))


def common_batch_size(nodes: Sequence[Node]) -> int | None:
    """Return the batch size of nodes, None if they do not have one in common."""
    sizes = {node.batch_size for node in nodes}
    return sizes.pop() if len(sizes) == 1 else None


def probabilities(weights: ArrayLike) -> np.ndarray:
    """Return weights as a vector of floats; raise ValueError if one is negative or not finite."""
    found = np.ravel(np.asarray(weights)).astype(float)
    if (found < 0).any() or not np.isfinite(found).all():
        raise ValueError(f"`weights` must be numbers that are not negative, got {found.tolist()}.")
    return found


def alike(datasets: Iterable[object]) -> list[Node]:
    """Return the nodes of datasets; raise TypeError if their elements are known to differ in structure or dtype."""
    nodes: list[Node] = []
    for dataset in datasets:
        if not isinstance(dataset, NodeOwner):
            raise TypeError(f"`datasets` should be a list of datasets, got a {type(dataset).__name__} in it.")
        nodes.append(node_of(dataset))
    if not nodes:
        raise ValueError("`datasets` should not be empty.")
    specs = [node.spec(False) for node in nodes]
    for number, spec in enumerate(specs):
        if specs[0] is not None and spec is not None and not same_kinds(specs[0], spec):
            raise TypeError(
                f"`datasets` must have compatible elements, but those of number 0 are {tensor_spec(specs[0])}, and of "
                f"number {number} {tensor_spec(spec)}."
            )
    return nodes
