"""Nodes without inputs: where elements come from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np

from replicax._base.host_memory import kept
from replicax._base.messages import shown
from replicax._base.specs import TensorSpec, dtype_name
from replicax._base.tracebacks import origin
from replicax._base.types import Tree
from replicax._data.calls import call_name, call_user
from replicax._data.composite_rows import RaggedRow, RaggedRowSpec
from replicax._data.elements import as_host, host_structure, structure_of
from replicax._data.nodes.node import Node, Replayed, Unsure, spec_of_first
from replicax._data.reading import Reading, Seeds
from replicax._data.rows import CHUNK, Rows, plain_rows
from replicax._data.skipping import Recipe, Skip, ready
from replicax._data.specs import INFINITE_CARDINALITY


class Items(Node):
    """Elements that are there already, in a list."""

    def __init__(self, name: str, items: Sequence[Tree], spec: Tree):
        super().__init__(name, cardinality=len(items), spec=spec)
        self._items = items

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        return itertools.islice(self._items, start, None)

    def read_recipes(self, reading: Reading, skip: Skip) -> Iterator[Recipe]:
        return map(ready, self._items)


class RowSource(Node):
    """Rows that lie in arrays, or that are computed from their numbers."""

    rows: Rows

    def __init__(self, name: str, rows: Rows, spec: Tree, cardinality: int):
        super().__init__(name, cardinality=cardinality, spec=spec)
        self.rows = rows

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        return self.rows.elements(reading, start)


def count_from(name: str, start: int, step: int, dtype: np.dtype, count: int = INFINITE_CARDINALITY) -> RowSource:
    """Return a node of `count` numbers `start`, `start + step`, ..."""
    rows = plain_rows(lambda i: np.asarray(start + step * np.asarray(i, np.int64)).astype(dtype), count)
    return RowSource(name, rows, TensorSpec((), dtype), count)


class RandomNumbers(Node):
    """Random numbers of 32 bits, without end."""

    def __init__(self, seeds: Seeds):
        spec = TensorSpec((), np.int64)
        super().__init__("random", cardinality=INFINITE_CARDINALITY, memories=[seeds], spec=spec)
        self._seeds = seeds

    def _numbers(self, reading: Reading) -> Iterator[np.int64]:
        generator = reading.generator(self._seeds)
        while True:
            yield from generator.integers(2**32, size=CHUNK, dtype=np.int64)

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        return map(np.asarray, itertools.islice(self._numbers(reading), start, None))

    def read_recipes(self, reading: Reading, skip: Skip) -> Iterator[Recipe]:
        return map(ready, self.read(reading, 0))


class FileNames(Node):
    """The names of files, of which each worker may get a share."""

    def __init__(self, name: str, names: Sequence[bytes]):
        super().__init__(name, cardinality=len(names), files=len(names), spec=TensorSpec((), np.object_))
        self._names = names

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        count, index = reading.share
        return iter([as_host(name) for name in self._names[index::count][start:]])

    def read_recipes(self, reading: Reading, skip: Skip) -> Iterator[Recipe]:
        return map(ready, self.read(reading, 0))


class Generated(Replayed):
    """What a user's generator yields, called anew for each reading.

    Args:
        generator: a function that returns something iterable.
        arguments: its arguments.
        spec: what the elements must fit; None to take them as they come.
    """

    def __init__(self, generator: Callable[..., Iterable[Tree]], arguments: Sequence[Tree], spec: Tree):
        unsure = Unsure(f"the generator {shown(generator)}", origin())
        super().__init__(call_name("from_generator", generator), unsure=[unsure], spec=spec)
        self._generator, self._arguments, self._declared = generator, arguments, spec

    find_spec = spec_of_first

    def read_all(self, reading: Reading) -> Iterator[Tree]:
        yield from reading.guarded(map(self._host, self._values()))

    def _values(self) -> Iterator[Tree]:
        number = 0
        try:
            for value in call_user("`generator` of `Dataset.from_generator`", self._generator, *self._arguments):
                yield value
                number += 1
        except Exception as error:
            self.explain(error, number)
            raise

    def _host(self, value: Tree) -> Tree:
        found = host_structure(value) if self._declared is None else _checked(value, self._declared)
        return jax.tree.map(kept, found)  # it may be a buffer that the generator fills again for the next element


def _checked(value: Tree, spec: Tree) -> Tree:
    """Return what a generator yielded, as arrays of the declared dtypes and shapes."""
    structure = structure_of(spec)
    try:
        leaves = structure.flatten_up_to(value)
    except (ValueError, TypeError) as e:
        raise TypeError(
            "`generator` yielded an element that did not match the expected structure. "
            f"The expected structure was {spec}, but the yielded element was {value!r:.80}."
        ) from e
    return structure.unflatten([_checked_leaf(leaf, s) for leaf, s in zip(leaves, jax.tree.leaves(spec))])


def _checked_leaf(value: Tree, spec: TensorSpec) -> np.ndarray:
    try:
        array: np.ndarray = as_host(value)
        array = array if array.dtype == spec.dtype else array.astype(spec.dtype)
    except (ValueError, TypeError) as e:
        raise TypeError(
            "`generator` yielded an element that could not be converted to the expected type. "
            f"The expected type was {dtype_name(spec.dtype)}, but the yielded element was {value!r:.80}."
        ) from e
    if not spec.shape.is_compatible_with(array.shape):
        raise TypeError(
            f"`generator` yielded an element of shape {array.shape} where an element of shape {spec.shape} was "
            "expected."
        )
    return array.view(RaggedRow) if isinstance(spec, RaggedRowSpec) else array
