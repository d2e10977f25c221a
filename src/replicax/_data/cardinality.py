"""Datasets whose number of elements is asserted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from replicax._base.errors import FailedPreconditionError
from replicax._base.types import Tree
from replicax._data.base import Base
from replicax._data.reading import Reading, hands_on
from replicax._data.specs import INFINITE_CARDINALITY


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
    wanted = "an infinite number of" if expected == INFINITE_CARDINALITY else str(expected)

    def apply(dataset: Base) -> Base:
        @hands_on
        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            count = start
            for element in dataset._make(reading, start):
                count += 1
                if 0 <= expected < count:
                    raise _failure(wanted, f"at least {count}")
                yield element
            if count != expected:
                raise _failure(wanted, f"only {count}")

        return dataset._derived(make, expected, batch_size=dataset._batch_size)

    return apply


def _failure(wanted: str, found: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"Input dataset was expected to contain {wanted} elements but contained {found} elements."
    )
