"""Part of `Dataset`: order."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from replicax._data.core import Base
from replicax._data.elements import positive
from replicax._data.rows import (
    Passes,
    cached,
    drawn,
    repeated,
    shard_rows,
    shuffle_elements,
    shuffle_rows,
    skip_rows,
    take_rows,
)
from replicax._data.specs import INFINITE_CARDINALITY
from replicax._errors import InvalidArgumentError

if TYPE_CHECKING:
    from replicax._data import Dataset


class Order(Base):
    """Methods of `Dataset`."""

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
        name: str | None = None,
    ) -> Dataset:
        """The elements in random order, drawn from a buffer of `buffer_size`; one of the whole size shuffles fully.

        Args:
            buffer_size: how many elements wait in the buffer.
            seed: makes the orders the same in each program; without one they differ.
            reshuffle_each_iteration: whether each pass has an order of its own.
        """
        size = positive("buffer_size", buffer_size)
        passes = Passes(seed, reshuffle_each_iteration is None or bool(reshuffle_each_iteration))
        return self._reordered(
            lambda make: lambda: drawn(shuffle_elements, make, size, passes),
            lambda order: lambda: drawn(shuffle_rows, order, size, passes),
            self._cardinality,
        )

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset:
        """`count` passes one after the other; without end if it is None or -1."""
        times = -1 if count is None else int(count)
        cardinality = self._cardinality
        if times == 0 or cardinality == 0:
            cardinality = 0
        elif times < 0:
            cardinality = INFINITE_CARDINALITY
        elif cardinality > 0:
            cardinality *= times
        again = lambda make: lambda: repeated(make, times)  # noqa: E731
        return self._reordered(again, again, cardinality)

    def take(self, count: int, name: str | None = None) -> Dataset:
        """The first `count` elements; all if it is -1."""
        if count < 0:
            return self._with(self._options)
        known = count if self._cardinality == INFINITE_CARDINALITY else min(count, self._cardinality)
        return self._reordered(
            lambda make: lambda: itertools.islice(make(), count),
            lambda order: lambda: take_rows(order(), count),
            known,
        )

    def skip(self, count: int, name: str | None = None) -> Dataset:
        """All but the first `count` elements; none if it is -1."""
        if count < 0:
            return self.take(0)
        return self._reordered(
            lambda make: lambda: itertools.islice(make(), count, None),
            lambda order: lambda: skip_rows(order(), count),
            self._cardinality if self._cardinality < 0 else max(0, self._cardinality - count),
        )

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Dataset:
        """Every `num_shards`-th element, from number `index` on."""
        num_shards, index = positive("num_shards", num_shards), int(index)
        if not 0 <= index < num_shards:
            raise InvalidArgumentError(f"index must be between 0 and {num_shards - 1} = num_shards - 1, got {index}.")
        known = self._cardinality
        return self._reordered(
            lambda make: lambda: itertools.islice(make(), index, None, num_shards),
            lambda order: lambda: shard_rows(order(), num_shards, index),
            known if known < 0 else -((index - known) // num_shards),
        )

    def cache(self, filename: str = "", name: str | None = None) -> Dataset:
        """Keeps the elements of the first complete pass in memory, for the later ones."""
        if filename:
            raise NotImplementedError(f"cache keeps elements in memory only, got the file {filename!r}. Leave it out.")
        return self._reordered(cached, cached, self._cardinality)

    def prefetch(self, buffer_size: int | None = None, name: str | None = None) -> Dataset:
        """This dataset. Prefetching belongs to distributed datasets, which do it on their own."""
        return self._with(self._options)
