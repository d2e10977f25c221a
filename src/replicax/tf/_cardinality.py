"""`tf.data.experimental.assert_cardinality`: datasets whose number of elements is asserted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from replicax.tf._core import FailedPreconditionError, Node, Reading, Recipe, Skip, Tree, data, node_of
from replicax.tf._datasets import Dataset

_T = TypeVar("_T")


def assert_cardinality(expected_cardinality: int) -> Callable[[Dataset], Dataset]:
    """Returns a function for `Dataset.apply`: its dataset has this cardinality, and is checked while it is read.

    Args:
        expected_cardinality: the number of elements, or `INFINITE_CARDINALITY`.

    Raises:
        FailedPreconditionError: when the dataset is read, if it has another number of elements.

    >>> import replicax.tf as tf
    >>> odd = tf.data.Dataset.range(5).filter(lambda x: x % 2 == 1)
    >>> int(odd.apply(tf.data.experimental.assert_cardinality(2)).cardinality())
    2
    """
    expected = int(expected_cardinality)
    return lambda dataset: dataset._then(AssertCardinality(node_of(dataset), expected))


class AssertCardinality(Node):
    """The same elements; an error if there are others than `expected`, a number or INFINITE_CARDINALITY."""

    def __init__(self, source: Node, expected: int):
        super().__init__(f"assert_cardinality({expected})", [source], expected)
        self._expected, self.batch_size = expected, source.batch_size

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        return self._counted(self.input.iterate(reading, start), start)

    def read_recipes(self, reading: Reading, skip: Skip) -> Iterator[Recipe]:
        return self._counted(self.input.recipes(reading, skip), 0)

    def _counted(self, elements: Iterator[_T], count: int) -> Iterator[_T]:
        for element in elements:
            count += 1
            if 0 <= self._expected < count:
                raise self._failure(f"at least {count}")
            yield element
        if count != self._expected:
            raise self._failure(f"only {count}")

    def _failure(self, found: str) -> FailedPreconditionError:
        wanted = "an infinite number of" if self._expected == data.INFINITE_CARDINALITY else str(self._expected)
        return FailedPreconditionError(
            f"Input dataset was expected to contain {wanted} elements but contained {found} elements."
        )
