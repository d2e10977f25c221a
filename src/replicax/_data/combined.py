"""Part of `Dataset`: several."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from replicax._data.core import Base, made
from replicax._data.elements import flatten
from replicax._data.rows import plain_rows
from replicax._data.specs import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, common_spec
from replicax._specs import TensorSpec

if TYPE_CHECKING:
    from replicax._data import Dataset


class Combined(Base):
    """Methods of `Dataset`."""

    @staticmethod
    def zip(*args: Any, datasets: Any = None, name: str | None = None) -> Dataset:
        """The elements of several datasets side by side, in the structure in which the datasets come.

        >>> from replicax.data import Dataset
        >>> a, b = Dataset.range(2), Dataset.range(5, 9)
        >>> list(Dataset.zip(a, b).as_numpy_iterator())
        [(np.int64(0), np.int64(5)), (np.int64(1), np.int64(6))]
        """
        tree = datasets if datasets is not None else args[0] if len(args) == 1 else args
        inputs, structure = flatten(tree)
        for dataset in inputs:
            if not isinstance(dataset, Base):
                raise TypeError(f"Dataset.zip takes datasets in tuples or dicts, got {type(dataset).__name__}.")
        if not inputs:
            raise TypeError("Dataset.zip needs at least one dataset.")
        sizes = [d._cardinality for d in inputs]
        cardinality = min((n for n in sizes if n != INFINITE_CARDINALITY), default=INFINITE_CARDINALITY)

        def find(probe: bool) -> Any:
            specs = [d._spec(probe) for d in inputs]
            return None if any(s is None for s in specs) else structure.unflatten(specs)

        batch_size = inputs[0]._batch_size if len({d._batch_size for d in inputs}) == 1 else None
        known: dict[str, Any] = {
            "batch_size": batch_size,
            "options": inputs[0]._options,
            "files": max(d._files for d in inputs),
        }
        sources = [d._rows for d in inputs if d._rows is not None and d._rows.in_order]
        if len(sources) == len(inputs):
            rows = plain_rows(lambda i: structure.unflatten([s.fetch(i) for s in sources]), cardinality)
            return made(rows.elements, find, cardinality, rows=rows, **known)

        def make() -> Iterator[Any]:
            return map(structure.unflatten, zip(*[d._make() for d in inputs]))

        return made(make, find, cardinality, **known)

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset:
        """Pairs of a number (int64, from `start`) and an element."""
        numbers = made(
            lambda: (np.asarray(i, np.int64) for i in itertools.count(start)),
            lambda probe: TensorSpec((), np.int64),
            INFINITE_CARDINALITY,
        )
        return self.zip(numbers, self)._with(self._options)

    def concatenate(self, dataset: Dataset, name: str | None = None) -> Dataset:
        """These elements and then those of `dataset`."""

        def make() -> Iterator[Any]:
            return itertools.chain.from_iterable(d._make() for d in (self, dataset))

        def find(probe: bool) -> Any:
            a, b = self._spec(probe), dataset._spec(probe)
            return None if a is None or b is None else jax.tree.map(common_spec, a, b)

        sizes = (self._cardinality, dataset._cardinality)
        unknown = UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in sizes else sum(sizes)
        return made(
            make,
            find,
            INFINITE_CARDINALITY if INFINITE_CARDINALITY in sizes else unknown,
            batch_size=self._batch_size if self._batch_size == dataset._batch_size else None,
            options=self._options.merge(dataset._options),
            files=self._files + dataset._files,
        )
