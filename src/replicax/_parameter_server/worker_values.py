"""Values that each worker makes for itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax

from replicax._base import array_conversion, nest
from replicax._base.messages import received
from replicax._base.types import Leaf, Tree
from replicax._parameter_server import scheduling
from replicax._parameter_server.arrays import copied
from replicax._parameter_server.datasets import PerWorkerValue
from replicax._values import is_number

# Where a worker's own array goes: its place among the arrays of a call, the value's key, and its number in the value.
Placed = tuple[int, str, int]

_numbers = itertools.count()


class MadeValue(PerWorkerValue):
    """A value that each worker makes by calling a function.

    Args:
        source: the function.

    Attributes:
        key: by which workers know it.
        example: the value that it makes here, with arrays for leaves.
    """

    def __init__(self, source: Callable[[], Tree]):
        if not callable(source):
            raise TypeError(f"`create_per_worker_value` takes a function that makes the value, got {received(source)}.")
        self.source, self.key = source, f"value {next(_numbers)}"
        with scheduling.on_worker(0):
            # Copies, so that no other array among a call's is taken for the value's.
            self.example: Tree = nest.map_values(lambda leaf: copied(_array(leaf)), source())
        self._places = {id(array): number for number, array in enumerate(nest.values(self.example))}

    @property
    def numbers(self) -> set[int]:
        """The numbers of all leaves of the example."""
        return {*self._places.values()}

    def number(self, array: Leaf) -> int | None:
        """Returns which leaf of the example an array is; None if it is none of them."""
        return self._places.get(id(array))


def with_examples(nested: Tree) -> Tree:
    """Returns arguments with the examples of values that workers make for themselves."""
    return nest.map_structure(lambda leaf: leaf.example if isinstance(leaf, MadeValue) else leaf, nested)


def own_arrays(source: Callable[[], Tree]) -> list[jax.Array]:
    """Returns the leaves of a worker's own value."""
    return nest.values(nest.map_values(_array, source()))


def _array(leaf: Leaf) -> jax.Array:
    if not is_number(leaf):
        raise TypeError(f"A per-worker value is a nest of arrays or numbers, got a leaf {received(leaf)}.")
    return leaf if isinstance(leaf, jax.Array) else array_conversion.as_array(leaf)


def places_of(values: Sequence[MadeValue], arrays: Sequence[jax.Array]) -> list[Placed]:
    """Returns which of a call's arrays stand for workers' own.

    Raises:
        TypeError: an array of a value is not among them.
    """
    found: list[Placed] = []
    for place, array in enumerate(arrays):
        for value in values:
            number = value.number(array)
            if number is not None:
                found.append((place, value.key, number))
    for value in values:
        if {number for _, key, number in found if key == value.key} != value.numbers:
            raise TypeError(
                "A per-worker value came to a scheduled function as another array: its input signature has another "
                "dtype. Make the value of that dtype."
            )
    return found
