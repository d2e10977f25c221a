"""Part of `Dataset`: batches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, Self

import jax
import numpy as np
from numpy.typing import DTypeLike

from replicax._base.errors import InvalidArgumentError
from replicax._base.specs import TensorShape, TensorSpec
from replicax._base.types import Tree
from replicax._data.base import Base
from replicax._data.blocks import Blocks, groups
from replicax._data.elements import flatten, grouped, num_rows, pad_and_stack, padded_shape, positive, regroup, stack
from replicax._data.ragged import refuse_composites
from replicax._data.reading import Maker, Reading, hands_on, replayed
from replicax._data.rows import RowBatches, skip_rows
from replicax._data.skipping import all_made, applied_to_each
from replicax._data.specs import UNKNOWN_CARDINALITY, batch_count, tensor_spec, with_batch, without_batch


class Batches(Base):
    """Methods of `Dataset`."""

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Self:
        """Returns batches of `batch_size` stacked elements; the last batch may be smaller, or is dropped.

        >>> from replicax.data import Dataset
        >>> list(Dataset.range(5).batch(3).as_numpy_iterator())
        [array([0, 1, 2]), array([3, 4])]
        """
        size = positive("batch_size", batch_size)
        rows = self._rows

        @hands_on
        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            if rows is None:
                elements = self._make(reading, start * size)
                if isinstance(elements, Blocks):
                    return groups(elements, size, drop_remainder)
                return _stacked(reading, stack, grouped(elements, size, drop_remainder))
            batches = RowBatches(rows.fetch, skip_rows(rows.order(reading), start * size), size, drop_remainder)
            return batches if reading.skip is None else batches.deferred(reading.skip)

        made = self._batched(make, size, drop_remainder, lambda s: with_batch(s, size if drop_remainder else None))
        made._at_hand = rows is not None
        return made

    def _batched(self, make: Maker, size: int, drop: bool, spec: Callable[[Tree], Tree]) -> Self:
        return self._derived(make, batch_count(self._cardinality, size, drop), spec, batch_size=size)

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Tree = None,
        padding_values: Tree = None,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Self:
        """Returns batches of elements of different shapes, each padded at its ends to the longest of the batch.

        Args:
            batch_size: how many elements a batch has.
            padded_shapes: the shapes to pad to, in the structure of the elements; None and -1 mean the longest.
            padding_values: what to pad with, one for all or in the structure of the elements; zeros by default.
            drop_remainder: whether to drop a last, smaller batch.
        """
        size = positive("batch_size", batch_size)

        padded = functools.partial(pad_and_stack, shapes=padded_shapes, values=padding_values)

        @hands_on
        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            return _stacked(reading, padded, grouped(self._make(reading, start * size), size, drop_remainder))

        def spec(found: Tree) -> Tree:
            leaves, structure = flatten(found)
            if padded_shapes is None:
                shapes = [TensorShape([None] * s.shape.rank) if s.shape.rank is not None else s.shape for s in leaves]
            else:
                shapes = [padded_shape(s) for s in structure.flatten_up_to(padded_shapes)]
            padded = [TensorSpec(shape, s.dtype) for shape, s in zip(shapes, leaves)]
            return with_batch(structure.unflatten(padded), size if drop_remainder else None)

        return self._batched(make, size, drop_remainder, spec)

    def ragged_batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        row_splits_dtype: DTypeLike = np.int64,
        name: str | None = None,
    ) -> Self:
        """Returns batches of elements of known shapes only: those of others would be ragged, which XLA cannot take.

        Args:
            batch_size: how many elements a batch has.
            drop_remainder: whether to drop a last, smaller batch.
            row_splits_dtype: accepted for compatibility.

        Raises:
            NotImplementedError: elements have dimensions that are not known, at once or when elements are asked for.
        """

        def refuse_unknown(spec: Tree) -> Tree:
            if not all(s.shape.rank is not None and s.shape[1:].is_fully_defined() for s in jax.tree.leaves(spec)):
                raise NotImplementedError(
                    "`ragged_batch` makes no ragged batches, and not all dimensions of these elements are known: the "
                    f"spec of a batch is {tensor_spec(spec)}. XLA's shapes are static: use `padded_batch`, or "
                    "`bucket_by_sequence_length`."
                )
            return spec

        batched = self.batch(batch_size, drop_remainder)
        if (known := batched._spec(False)) is not None:
            refuse_unknown(known)

        @hands_on
        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            refuse_unknown(batched._spec(True))
            return batched._make(reading, start)

        return batched._derived(make, batched._cardinality, refuse_unknown, batch_size=batched._batch_size)

    def sparse_batch(self, batch_size: int, row_shape: Tree, name: str | None = None) -> NoReturn:
        """Raises NotImplementedError: batches are dense. `padded_batch` pads elements to a common shape."""
        raise NotImplementedError(
            "`Dataset.sparse_batch` is not supported: batches are dense, since XLA's shapes are static. Use "
            f"`padded_batch({batch_size}, {row_shape})`, which pads with zeros."
        )

    def unbatch(self, name: str | None = None) -> Self:
        """Returns a dataset of the rows of each element."""

        @replayed
        def make(reading: Reading) -> Iterator[Tree]:
            def rows(element: Tree) -> Iterator[Tree]:
                refuse_composites(element, "cut into rows")
                leaves, structure = flatten(element)
                if len({a.shape[:1] for a in leaves}) != 1 or not leaves[0].ndim:
                    shapes = [a.shape for a in leaves]
                    raise InvalidArgumentError(
                        f"unbatch needs elements with one and the same first dimension, got shapes {shapes}."
                    )
                return (structure.unflatten([a[i, ...] for a in leaves]) for i in range(leaves[0].shape[0]))

            return itertools.chain.from_iterable(reading.guarded(map(rows, self._make(reading))))

        return self._derived(make, UNKNOWN_CARDINALITY, without_batch)

    def rebatch(self, batch_size: int | Sequence[int], drop_remainder: bool = False, name: str | None = None) -> Self:
        """Returns the batches cut anew, to `batch_size` or, where that is a list, to its numbers in turn.

        >>> from replicax.data import Dataset
        >>> list(Dataset.range(6).batch(4).rebatch([2, 1]).as_numpy_iterator())
        [array([0, 1]), array([2]), array([3, 4]), array([5])]
        """
        sizes = [positive("batch_size", n) for n in np.ravel(batch_size)]

        @replayed
        def make(reading: Reading) -> Iterator[Tree]:
            for piece, size in zip(regroup(self._make(reading), itertools.cycle(sizes)), itertools.cycle(sizes)):
                if num_rows(piece) == size or not drop_remainder:
                    yield piece

        known = sizes[0] if len(set(sizes)) == 1 else None

        def spec(found: Tree) -> Tree:
            return with_batch(without_batch(found), known if drop_remainder else None)

        return self._derived(make, UNKNOWN_CARDINALITY, spec, batch_size=known)


def _stacked(reading: Reading, stack: Callable[[list[Tree]], Tree], groups: Iterator[list[Tree]]) -> Iterator[Tree]:
    """Returns each group of elements as one."""
    if reading.skip is None:
        return map(stack, groups)
    return applied_to_each(reading.skip, lambda group: stack(all_made(group)), groups)
