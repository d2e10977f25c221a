"""Part of `Dataset`: batches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import jax
import numpy as np
from numpy.typing import DTypeLike

from replicax._base.errors import InvalidArgumentError
from replicax._base.host_memory import Pool
from replicax._base.specs import TensorShape, TensorSpec, as_dtype
from replicax._base.types import Tree
from replicax._data import composites
from replicax._data.base import Base
from replicax._data.blocks import Blocks, groups
from replicax._data.composite_rows import (
    RaggedRowSpec,
    ragged_element,
    sparse_element,
    spec_of_ragged_element,
    spec_of_sparse_element,
)
from replicax._data.elements import flatten, grouped, num_rows, pad_and_stack, padded_shape, positive, regroup, stack
from replicax._data.reading import Maker, Reading, hands_on, replayed
from replicax._data.rows import RowBatches, skip_rows
from replicax._data.skipping import all_made, applied_to_each, made
from replicax._data.specs import UNKNOWN_CARDINALITY, batch_count, with_batch, without_batch


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
        rows, pool = self._rows, Pool()

        @hands_on
        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            if rows is None:
                elements = self._make(reading, start * size)
                if isinstance(elements, Blocks):
                    return groups(elements, size, drop_remainder, pool)
                stacked = functools.partial(stack, pool=pool)
                return _stacked(reading, stacked, grouped(elements, size, drop_remainder))
            batches = RowBatches(rows.fetch, skip_rows(rows.order(reading), start * size), size, drop_remainder)
            return batches if reading.skip is None else batches.deferred(reading.skip)

        batched = self._batched(make, size, drop_remainder, lambda s: with_batch(s, size if drop_remainder else None))
        batched._at_hand = rows is not None
        return batched

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

        >>> import numpy as np
        >>> from replicax.data import Dataset
        >>> dataset = Dataset.range(1, 4).map(lambda n: np.arange(n))
        >>> [batch.tolist() for batch in dataset.padded_batch(3)]
        [[[0, 0, 0], [0, 1, 0], [0, 1, 2]]]
        """
        size = positive("batch_size", batch_size)

        def padded(elements: list[Tree]) -> Tree:
            _refuse_to_pad(elements[0])
            return pad_and_stack(elements, padded_shapes, padding_values)

        @hands_on
        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            return _stacked(reading, padded, grouped(self._make(reading, start * size), size, drop_remainder))

        def spec(found: Tree) -> Tree:
            _refuse_to_pad(found)
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
        """Returns batches in which components whose shapes are not all known are ragged tensors.

        Args:
            batch_size: how many elements a batch has.
            drop_remainder: whether to drop a last, smaller batch.
            row_splits_dtype: the dtype of the row splits, int32 or int64.

        >>> from replicax.data import Dataset
        >>> dataset = Dataset.range(4).map(lambda n: np.arange(n)).ragged_batch(2)
        >>> [batch.to_list() for batch in dataset]
        [[[], [0]], [[0, 1], [0, 1, 2]]]
        """
        known = self._spec(False)
        if known is not None and all(s.shape.is_fully_defined() for s in jax.tree.leaves(known)):
            return self.batch(batch_size, drop_remainder)
        splits = as_dtype(row_splits_dtype)

        def ragged(spec: Tree, element: Tree) -> Tree:
            return composites.on_rows(functools.partial(ragged_element, dtype=splits), element, spec)

        def specs(spec: Tree) -> Tree:
            return composites.on_rows(spec_of_ragged_element, spec)

        return self._each(lambda: functools.partial(ragged, self._spec(True)), specs).batch(batch_size, drop_remainder)

    def sparse_batch(self, batch_size: int, row_shape: Tree, name: str | None = None) -> Self:
        """Returns batches that are sparse tensors, of elements of different shapes: each has all of its values.

        Args:
            batch_size: how many elements a batch has.
            row_shape: the shape of the rows of a batch, None where it is that of the largest.

        Raises:
            DataLossError: at iteration, an element is larger than `row_shape`.

        >>> from replicax.data import Dataset
        >>> dataset = Dataset.range(3).map(lambda n: np.arange(n)).sparse_batch(3, [4])
        >>> [(batch.shape, batch.values.tolist()) for batch in dataset]
        [(TensorShape([3, 4]), [0, 0, 1])]
        """
        shape = padded_shape(row_shape)

        def specs(spec: Tree) -> Tree:
            return jax.tree.map(lambda s: spec_of_sparse_element(s, shape), spec)

        def sparse(element: Tree) -> Tree:
            return jax.tree.map(lambda leaf: sparse_element(leaf, shape), element)

        return self._each(lambda: sparse, specs).batch(batch_size)

    def _each(self, function: Callable[[], Callable[[Tree], Tree]], spec: Callable[[Tree], Tree]) -> Self:
        """Returns a dataset of a function of each element on the host; it is made where elements are asked for."""

        @hands_on
        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            elements = self._make(reading, start)
            if reading.skip is None:
                return map(function(), elements)
            return applied_to_each(reading.skip, lambda element: function()(made(element)), elements)

        return self._derived(make, self._cardinality, spec)

    def unbatch(self, name: str | None = None) -> Self:
        """Returns a dataset of the rows of each element.

        Raises:
            InvalidArgumentError: at iteration, if the first dimensions of an element's arrays differ.

        >>> from replicax.data import Dataset
        >>> [int(x) for x in Dataset.range(4).batch(3).unbatch()]
        [0, 1, 2, 3]
        """

        @replayed
        def make(reading: Reading) -> Iterator[Tree]:
            def rows(element: Tree) -> Iterator[Tree]:
                leaves = composites.leaves(element)
                count, *others = map(composites.row_count, leaves)
                if count is None or any(other != count for other in others):
                    shapes = [tuple(leaf.shape) for leaf in leaves]
                    raise InvalidArgumentError(
                        f"unbatch needs elements with one and the same first dimension, got shapes {shapes}."
                    )
                return map(functools.partial(_row, element), range(count))

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


def _row(element: Tree, number: int) -> Tree:
    return composites.on_rows(lambda leaf: composites.row(leaf, number), element)


def _stacked(reading: Reading, stack: Callable[[list[Tree]], Tree], groups: Iterator[list[Tree]]) -> Iterator[Tree]:
    """Returns each group of elements as one."""
    if reading.skip is None:
        return map(stack, groups)
    return applied_to_each(reading.skip, lambda group: stack(all_made(group)), groups)


def _refuse_to_pad(element: Tree) -> None:
    if any(composites.is_composite(leaf) or isinstance(leaf, RaggedRowSpec) for leaf in composites.leaves(element)):
        raise TypeError(
            "`padded_batch` is only supported for datasets that produce tensor elements, and these are ragged or "
            "sparse. Use `batch`, and `to_tensor()` of its batches."
        )
