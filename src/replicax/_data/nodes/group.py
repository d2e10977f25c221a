"""Nodes whose elements go together, or are left out for what they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import jax
import numpy as np

from replicax._base.errors import InvalidArgumentError
from replicax._base.specs import TensorSpec
from replicax._base.types import Leaf, Tree
from replicax._data.elements import as_host, flatten, positive
from replicax._data.functions import ElementFunction, MapOptions, map_elements
from replicax._data.nodes.functions import MakeDataset, node_returned_by
from replicax._data.nodes.node import Node, Replayed, spec_of_first
from replicax._data.reading import Reading, Seeds
from replicax._data.specs import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, DatasetSpec


class Window(Node):
    """Datasets of `size` elements that are `stride` apart, each beginning `shift` elements after the one before."""

    def __init__(
        self, source: Node, size: int, shift: int, stride: int, drop_remainder: bool, make_dataset: MakeDataset
    ):
        self._shift, self._stride, self._drop, self._make_dataset = shift, stride, drop_remainder, make_dataset
        self._reach = reach = (size - 1) * stride + 1
        count = source.cardinality
        if count >= 0:
            count = max(0, -(-(count - reach + 1) // shift)) if drop_remainder else -(-count // shift)
        super().__init__(f"window({size}, {shift}, {stride})", [source], count)

    def spec_of(self, *specs: Tree) -> Tree:
        return jax.tree.map(DatasetSpec, specs[0])

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        elements = self.input.iterate(reading, start * self._shift)
        held: list[Tree] = []
        while True:
            held += itertools.islice(elements, max(0, self._reach - len(held)))
            if not held or (self._drop and len(held) < self._reach):
                return
            specs, structure = flatten(self.input.spec(True))
            columns = zip(*(jax.tree.leaves(element) for element in held[: self._reach : self._stride]))
            yield structure.unflatten([self._make_dataset([*items], spec) for items, spec in zip(columns, specs)])
            if self._shift > len(held):
                for _ in itertools.islice(elements, self._shift - len(held)):
                    pass
            held = held[self._shift :]


class GroupByWindow(Replayed):
    """The elements of the datasets that a function makes of elements with the same key.

    Args:
        source: the input.
        of_key: gives the key of an element.
        of_window: makes a dataset of a key and a dataset of elements that have it.
        size_of: gives the number of these elements, for a key.
        make_dataset: makes the dataset of these elements.
    """

    def __init__(
        self,
        source: Node,
        of_key: ElementFunction,
        of_window: ElementFunction,
        size_of: Callable[[np.ndarray], int],
        make_dataset: MakeDataset,
    ):
        super().__init__(of_window.name, [source])
        self._of_key, self._of_window, self._size_of, self._make_dataset = of_key, of_window, size_of, make_dataset

    find_spec = spec_of_first

    def read_all(self, reading: Reading) -> Iterator[Tree]:
        groups: dict[int, list[Tree]] = {}
        sizes: dict[int, int] = {}
        options = MapOptions(ahead=not self.unsure)
        pairs = map_elements(self._of_key, reading, self.input.iterate(reading), 0, options)
        for element, number in reading.guarded(pairs):
            key = integer("key_func", number)
            if key not in groups:
                groups[key], sizes[key] = [], positive("Window size", self._size_of(np.asarray(key, np.int64)))
            groups[key].append(element)
            if len(groups[key]) == sizes[key]:
                yield from self._reduced(reading, key, groups.pop(key))
        for key in sorted(groups):
            yield from self._reduced(reading, key, groups.pop(key))

    def _reduced(self, reading: Reading, key: int, elements: list[Tree]) -> Iterator[Tree]:
        pair = np.asarray(key, np.int64), self._make_dataset(elements, self.input.spec(True))
        return node_returned_by("reduce_func", self._of_window.call(pair)).iterate(reading.child())


class Buckets(GroupByWindow):
    """Batches of elements of similar length; `batch` gives the spec of a batch, for the spec of the elements."""

    def __init__(self, batch_spec: Callable[[Tree], Tree], *arguments: Leaf):
        super().__init__(*arguments)
        self.name, self._batch_spec = "bucket_by_sequence_length", batch_spec

    find_spec = Node.find_spec

    def spec_of(self, *specs: Tree) -> Tree:
        return self._batch_spec(specs[0])


class Unique(Replayed):
    """Each element once, where it comes first."""

    def __init__(self, source: Node):
        super().__init__("unique", [source])
        if (known := source.spec(False)) is not None:
            _check_unique(known)

    def read_all(self, reading: Reading) -> Iterator[Tree]:
        seen = set()
        for element in self.input.iterate(reading):
            _check_unique(element)
            (array,), _ = flatten(element)
            key = (array.shape, tuple(array.ravel()) if array.dtype == np.dtype(object) else array.tobytes())
            if key not in seen:
                seen.add(key)
                yield element


def _check_unique(element: Tree) -> None:
    leaves = jax.tree.leaves(element)
    if len(leaves) != 1:
        raise InvalidArgumentError(f"unique only supports elements of a single component, got {len(leaves)}.")
    if leaves[0].dtype not in (np.dtype(np.int32), np.dtype(np.int64), np.dtype(object)):
        raise TypeError(f"unique does not support {leaves[0].dtype}: only int32, int64 and strings.")


class RejectionResample(Replayed):
    """Pairs of a class and an element, some dropped at random so that classes are as often as in `target`.

    Args:
        source: the input.
        of_class: gives the class of an element.
        target: how often each class shall be.
        initial: how often each class is; None to count the elements as they come.
        seeds: the seeds of the choices.
    """

    def __init__(
        self, source: Node, of_class: ElementFunction, target: np.ndarray, initial: np.ndarray | None, seeds: Seeds
    ):
        count = INFINITE_CARDINALITY if source.cardinality == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY
        super().__init__(of_class.name, [source], count, memories=[seeds])
        self._of_class, self._target, self._initial, self._seeds = of_class, target, initial, seeds

    def spec_of(self, *specs: Tree) -> Tree:
        return TensorSpec((), np.int64), specs[0]

    def read_all(self, reading: Reading) -> Iterator[Tree]:
        draw, target = reading.generator(self._seeds).random, self._target
        counts = np.ones(len(target))
        for element in self.input.iterate(reading):
            label = integer("class_func", self._of_class.call(element))
            if not 0 <= label < len(target):
                raise InvalidArgumentError(
                    f"`class_func` returned {label}, of {len(target)} classes: 0 to {len(target) - 1}."
                )
            counts[label] += 1
            now = counts if self._initial is None else self._initial
            accept = np.divide(target, now, out=np.zeros(len(target)), where=now > 0)
            if draw() * accept.max() < accept[label]:
                yield np.asarray(label, np.int64), element


def integer(name: str, value: Leaf) -> int:
    """Return the integer that the function `name` returned; raise TypeError for anything else."""
    array = as_host(value)
    if array.dtype.kind not in "iu" or array.ndim:
        raise TypeError(f"`{name}` must return a scalar integer, got one of {array.dtype} of shape {array.shape}.")
    return int(array)
