"""Datasets whose number of elements is asserted."""

from __future__ import annotations

from collections.abc import Callable

from replicax._data.base import Base
from replicax._data.nodes.node import node_of
from replicax._data.nodes.order import AssertCardinality


def assert_cardinality(expected_cardinality: int) -> Callable[[Base], Base]:
    """Returns a function for `Dataset.apply`: its dataset has this cardinality, and is checked while it is read.

    Args:
        expected_cardinality: the number of elements, or `INFINITE_CARDINALITY`.

    Raises:
        FailedPreconditionError: when the dataset is read, if it has another number of elements.

    >>> from replicax.data import Dataset
    >>> odd = Dataset.range(5).filter(lambda x: x % 2 == 1)
    >>> int(odd.apply(assert_cardinality(2)).cardinality())
    2
    """
    expected = int(expected_cardinality)
    return lambda dataset: dataset._then(AssertCardinality(node_of(dataset), expected))
