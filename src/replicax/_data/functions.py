"""Part of `Dataset`: functions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from replicax._data.core import Base, made
from replicax._data.elements import positive
from replicax._data.iterators import call, call_to_host, fold
from replicax._data.specs import UNKNOWN_CARDINALITY, first_spec, result_spec

if TYPE_CHECKING:
    from replicax._data import Dataset

AUTOTUNE = -1
# How many inputs `interleave` reads at a time where it is not told: fixed, so that the order is the same everywhere.
_CYCLE_LENGTH = 8


class Functions(Base):
    """Methods of `Dataset`."""

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        synchronous: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """`map_func` of each element, in turn. After `batch` it is called once a batch, which is much faster.

        >>> from replicax.data import Dataset
        >>> list(Dataset.range(3).map(lambda x: x * 2).as_numpy_iterator())[-1].item()
        4
        """
        call = functools.partial(call_to_host, map_func)

        def make() -> Iterator[Any]:
            return map(call, self._make())

        def find(probe: bool) -> Any:
            return result_spec(call, self._spec(True), make) if probe else None

        return made(make, find, self._cardinality, options=self._options, files=self._files)

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """The elements for which `predicate` is true."""

        def make() -> Iterator[Any]:
            return (element for element in self._make() if bool(np.asarray(call(predicate, element))))

        return self._derived(make, UNKNOWN_CARDINALITY, batch_size=self._batch_size)

    def flat_map(self, map_func: Callable[..., Dataset], name: str | None = None) -> Dataset:
        """The elements of the datasets that `map_func` makes of each element, one dataset after the other."""
        return self.interleave(map_func, cycle_length=1)

    def interleave(
        self,
        map_func: Callable[..., Dataset],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """The elements of the datasets that `map_func` makes, taken from `cycle_length` of them in turn."""
        cycle = _CYCLE_LENGTH if cycle_length in (None, AUTOTUNE) else positive("cycle_length", cycle_length)
        block = 1 if block_length is None else positive("block_length", block_length)

        def open_next(inputs: Iterator[Any]) -> Iterator[Any] | None:
            for element in inputs:
                dataset = call(map_func, element)
                if not isinstance(dataset, Base):
                    raise TypeError(
                        f"`map_func` must return a Dataset here, got {type(dataset).__name__}. Use `map` for elements."
                    )
                return dataset._make()
            return None

        def make() -> Iterator[Any]:
            inputs = self._make()
            slots = [open_next(inputs) for _ in range(cycle)]
            while any(slot is not None for slot in slots):
                for i, slot in enumerate(slots):
                    if slot is None:
                        continue
                    taken = 0
                    for element in itertools.islice(slot, block):
                        taken += 1
                        yield element
                    if taken < block:
                        slots[i] = open_next(inputs)

        return made(make, lambda probe: first_spec(make) if probe else None, UNKNOWN_CARDINALITY, options=self._options)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any], name: str | None = None) -> Any:
        """The last of the states that `state = reduce_func(state, element)` goes through.

        >>> from replicax.data import Dataset
        >>> int(Dataset.range(4).reduce(np.int32(0), lambda total, x: total + x))
        6
        """
        return fold(self, initial_state, reduce_func)

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """`transformation_func` of this dataset."""
        return transformation_func(self._with(self._options))
