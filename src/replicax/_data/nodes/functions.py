"""Nodes with a user's function of elements."""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Iterator

import jax
import numpy as np

from replicax._base.specs import TensorSpec
from replicax._base.types import Tree
from replicax._data.calls import as_bool, as_tensors
from replicax._data.composite_rows import RaggedRow, RaggedRowSpec, filled
from replicax._data.elements import Probe, host_structure
from replicax._data.functions import ElementFunction, MapOptions, map_elements, map_recipes
from replicax._data.nodes.node import Arrangement, Node, NodeOwner, Read, Replayed, first_spec, node_of, spec_of_first
from replicax._data.ragged import RaggedTensor
from replicax._data.reading import Reading
from replicax._data.skipping import Recipe, Skip
from replicax._data.specs import DatasetSpec, common_spec, host_spec, same_kinds

# Makes a dataset of elements of a spec, for the user's functions.
MakeDataset = Callable[[list[Tree], Tree], NodeOwner]


def node_returned_by(name: str, dataset: object) -> Node:
    """Return the node of the dataset that the function `name` returned; raise TypeError for anything else."""
    if not isinstance(dataset, NodeOwner):
        raise TypeError(f"`{name}` must return a Dataset here, got {type(dataset).__name__}. Use `map` for elements.")
    return node_of(dataset)


class Map(Node):
    """The function of each element."""

    def __init__(self, source: Node, function: ElementFunction, options: MapOptions, make_dataset: MakeDataset):
        super().__init__(function.name, [source], source.cardinality, memories=function.memories)
        self._function, self._make_dataset = function, make_dataset
        # A generator may wait for what happens in the program: it is asked for no more than one element ahead.
        self._options = options._replace(ahead=options.threads is not None or not self.unsure)

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        return map_elements(self._function, reading, self.input.iterate(reading, start), start, self._options)

    def read_recipes(self, reading: Reading, skip: Skip) -> Iterator[Recipe]:
        return map_recipes(self._function, reading, skip, self.input.recipes(reading, skip), self._options)

    def find_spec(self, may_call: bool) -> Tree:
        """Return the common spec of the results for zeros and for ones.

        A dimension is unknown if it changes with the values or with an unknown dimension.
        """
        if not may_call:
            return None
        spec = self.input.spec(True)
        unknown = any(isinstance(s, DatasetSpec) or not s.shape.is_fully_defined() for s in jax.tree.leaves(spec))
        try:
            elements = [self._fill(spec, *how) for how in ((2, 0), (3 if unknown else 2, 1))]
            return common_spec(*map(self._function.spec_of, elements))
        except Exception:  # the function was not meant for such elements: see what it returns for the first one
            return first_spec(self)

    def _fill(self, spec: Tree, size: int, value: int) -> Tree:
        """Return an element of `spec` made of this number, with `size` for dimensions that are not known."""

        def full(s: TensorSpec | DatasetSpec | RaggedTensor) -> Tree:
            if isinstance(s, DatasetSpec):
                return self._make_dataset([self._fill(s.element_spec, size, value)] * size, s.element_spec)
            if isinstance(s, RaggedTensor):
                splits = s.row_splits.shape[0]
                return filled(s, size if splits is None else splits - 1, value)
            if isinstance(s, RaggedRowSpec):
                return filled(s, value, value).view(RaggedRow)
            shape = [size if d is None else d for d in s.shape.as_list()]
            out = np.empty(shape, s.dtype)
            out.fill(Probe.of_size(value) if s.dtype == np.dtype(object) else value)
            return out

        return jax.tree.map(full, spec, is_leaf=lambda s: isinstance(s, RaggedTensor))


class Filter(Replayed):
    """The elements for which a predicate is true."""

    def __init__(self, source: Node, predicate: ElementFunction):
        super().__init__(predicate.name, [source], memories=predicate.memories)
        self._predicate, self.batch_size = predicate, source.batch_size

    def read_all(self, reading: Reading) -> Iterator[Tree]:
        return map(operator.itemgetter(0), filter(_is_true, self._pairs(reading)))

    def _pairs(self, reading: Reading) -> Iterator[tuple[Tree, Tree]]:
        """Return each element with the predicate of it."""
        options = MapOptions(ahead=not self.unsure)
        return map_elements(self._predicate, reading, self.input.iterate(reading), 0, options)


class TakeWhile(Filter):
    """The elements before the first one for which a predicate is false."""

    def read_all(self, reading: Reading) -> Iterator[Tree]:
        return map(operator.itemgetter(0), itertools.takewhile(_is_true, self._pairs(reading)))


def _is_true(pair: tuple[Tree, Tree]) -> bool:
    return as_bool(np.asarray(pair[1]))


class Scan(Replayed):
    """What a function makes of each element and a state, which it hands on."""

    def __init__(self, source: Node, initial_state: Tree, function: ElementFunction):
        super().__init__(function.name, [source], source.cardinality)
        self._first, self._function = as_tensors(initial_state), function

    find_spec = spec_of_first

    def read_all(self, reading: Reading) -> Iterator[Tree]:
        state = self._first

        def step(element: Tree) -> Tree:
            nonlocal state
            found = self._function.call((state, element))
            if not isinstance(found, tuple | list) or len(found) != 2:
                raise TypeError(
                    "`scan_func` should return a pair consisting of the new state and the output value, but it "
                    f"returned a {type(found).__name__}: {found!r:.80}"
                )
            state = as_tensors(found[0])
            expected, received = host_spec(self._first), host_spec(state)
            if not same_kinds(expected, received):
                raise TypeError(
                    "`scan_func` must return a state of the initial one's structure and dtypes. Expected "
                    f"{expected}, got {received}."
                )
            return host_structure(found[1])

        return map(step, self.input.iterate(reading))


class Interleave(Arrangement):
    """The elements of datasets that a function makes of each element: `block` at a time from `cycle` of them."""

    def __init__(self, source: Node, function: ElementFunction, cycle: int, block: int):
        super().__init__(function.name, [source])
        self._function, self._cycle, self._block = function, cycle, block

    find_spec = spec_of_first

    def arrange(self, reading: Reading, read: Read) -> Iterator[Tree]:
        def opened(element: Tree) -> Iterator[Tree]:
            # If the inputs were divided among workers already, all files of this dataset belong to this worker.
            part = reading.child((1, 0) if self.files else reading.share)
            return read(node_returned_by("map_func", self._function.call(element)), part)

        inputs = reading.guarded(map(opened, self.input.iterate(reading)))
        slots = [next(inputs, None) for _ in range(self._cycle)]
        while any(slot is not None for slot in slots):
            for i, slot in enumerate(slots):
                if slot is None:
                    continue
                taken = 0
                for element in itertools.islice(slot, self._block):
                    taken += 1
                    yield element
                if taken < self._block:
                    slots[i] = next(inputs, None)


class IgnoreErrors(Replayed):
    """The elements that come without an exception."""

    def __init__(self, source: Node, log_warning: bool):
        super().__init__("ignore_errors", [source])
        self._log_warning, self.batch_size = log_warning, source.batch_size

    def find_spec(self, may_call: bool) -> Tree:
        try:
            return self.input.spec(may_call)
        except Exception:  # such as the first element's, of which the spec is told
            return first_spec(self)

    def read_all(self, reading: Reading) -> Iterator[Tree]:
        return self.input.iterate(reading.with_errors(self._note))

    def _note(self, error: Exception) -> None:
        if self._log_warning:
            logging.getLogger("replicax").warning("Left out an element of a dataset: %r", error)
