"""Nodes that stack elements to batches, and that take batches apart."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from replicax._base.errors import InvalidArgumentError
from replicax._base.host_memory import Pool
from replicax._base.specs import TensorShape, TensorSpec
from replicax._base.types import Tree
from replicax._data import composites
from replicax._data.blocks import Blocks, groups
from replicax._data.composite_rows import (
    RaggedRowSpec,
    ragged_element,
    sparse_element,
    spec_of_ragged_element,
    spec_of_sparse_element,
)
from replicax._data.elements import flatten, grouped, num_rows, pad_and_stack, padded_shape, regroup, stack
from replicax._data.nodes.node import Mapped, Node, Replayed
from replicax._data.reading import Reading
from replicax._data.rows import RowBatches, skip_rows
from replicax._data.skipping import Recipe, Skip
from replicax._data.specs import batch_count, with_batch, without_batch


class _Batches(Node):
    """Batches of `size` elements; the last one may be smaller, or is dropped."""

    def __init__(self, method: str, source: Node, size: int, drop_remainder: bool):
        count = batch_count(source.cardinality, size, drop_remainder)
        super().__init__(f"{method}({size}{', drop_remainder=True' if drop_remainder else ''})", [source], count)
        self._size, self._drop, self.batch_size = size, drop_remainder, size

    def spec_of(self, *specs: Tree) -> Tree:
        return with_batch(specs[0], self._size if self._drop else None)

    def stack(self, elements: list[Tree]) -> Tree:
        """Return the elements as one batch."""
        raise NotImplementedError

    def _stack(self, elements: list[Tree]) -> Tree:
        try:
            return self.stack(elements)
        except Exception as error:
            self.explain(error)
            raise

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        elements = self.input.iterate(reading, start * self._size)
        return map(self._stack, grouped(elements, self._size, self._drop))

    def read_recipes(self, reading: Reading, skip: Skip) -> Iterator[Recipe]:
        return map(self._defer, grouped(self.input.recipes(reading, skip), self._size, self._drop))

    def _defer(self, recipes: list[Recipe]) -> Recipe:
        return lambda: self._stack([recipe() for recipe in recipes])


class Batch(_Batches):
    """Batches of elements of one shape."""

    def __init__(self, source: Node, size: int, drop_remainder: bool):
        super().__init__("batch", source, size, drop_remainder)
        self._pool = Pool()
        self.at_hand = source.rows is not None

    def stack(self, elements: list[Tree]) -> Tree:
        return stack(elements, self._pool)

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        if self.input.rows is not None:
            return self._row_batches(reading, start)
        elements = self.input.iterate(reading, start * self._size)
        if isinstance(elements, Blocks):
            return groups(elements, self._size, self._drop, self._pool, self._stack)
        return map(self._stack, grouped(elements, self._size, self._drop))

    def read_recipes(self, reading: Reading, skip: Skip) -> Iterator[Recipe]:
        if self.input.rows is not None:
            return self._row_batches(reading, 0).recipes()
        return super().read_recipes(reading, skip)

    def _row_batches(self, reading: Reading, start: int) -> RowBatches:
        rows = self.input.rows
        assert rows is not None
        return RowBatches(rows.fetch, skip_rows(rows.order(reading), start * self._size), self._size, self._drop)


class PaddedBatch(_Batches):
    """Batches of elements of different shapes, padded to the longest, or to `shapes`, with `values`."""

    def __init__(self, source: Node, size: int, shapes: Tree, values: Tree, drop_remainder: bool):
        super().__init__("padded_batch", source, size, drop_remainder)
        self._shapes, self._values = shapes, values

    def stack(self, elements: list[Tree]) -> Tree:
        _refuse_to_pad(elements[0])
        return pad_and_stack(elements, self._shapes, self._values)

    def spec_of(self, *specs: Tree) -> Tree:
        _refuse_to_pad(specs[0])
        leaves, structure = flatten(specs[0])
        if self._shapes is None:
            shapes = [TensorShape([None] * s.shape.rank) if s.shape.rank is not None else s.shape for s in leaves]
        else:
            shapes = [padded_shape(s) for s in structure.flatten_up_to(self._shapes)]
        padded = [TensorSpec(shape, s.dtype) for shape, s in zip(shapes, leaves)]
        return super().spec_of(structure.unflatten(padded))


def _refuse_to_pad(element: Tree) -> None:
    if any(composites.is_composite(leaf) or isinstance(leaf, RaggedRowSpec) for leaf in composites.leaves(element)):
        raise TypeError(
            "`padded_batch` is only supported for datasets that produce tensor elements, and these are ragged or "
            "sparse. Use `batch`, and `to_tensor()` of its batches."
        )


class AsRagged(Mapped):
    """The elements, of which batches are ragged where their shapes are not known; `dtype` is that of row splits."""

    def __init__(self, source: Node, dtype: np.dtype):
        super().__init__("as_ragged", [source], source.cardinality)
        self._dtype = dtype

    def compute(self, element: Tree) -> Tree:
        convert = functools.partial(ragged_element, dtype=self._dtype)
        return composites.on_rows(convert, element, self.input.spec(True))

    def spec_of(self, *specs: Tree) -> Tree:
        return composites.on_rows(spec_of_ragged_element, specs[0])


class AsSparse(Mapped):
    """The elements as sparse tensors that have all of their values, as parts of tensors of `shape`."""

    def __init__(self, source: Node, shape: TensorShape):
        super().__init__("as_sparse", [source], source.cardinality)
        self._shape = shape

    def compute(self, element: Tree) -> Tree:
        return jax.tree.map(lambda leaf: sparse_element(leaf, self._shape), element)

    def spec_of(self, *specs: Tree) -> Tree:
        return jax.tree.map(lambda s: spec_of_sparse_element(s, self._shape), specs[0])


class Unbatch(Replayed):
    """The rows of each element."""

    def __init__(self, source: Node):
        super().__init__("unbatch", [source])

    def spec_of(self, *specs: Tree) -> Tree:
        return without_batch(specs[0])

    def read_all(self, reading: Reading) -> Iterator[Tree]:
        return itertools.chain.from_iterable(reading.guarded(map(self._rows, self.input.iterate(reading))))

    def _rows(self, element: Tree) -> Iterator[Tree]:
        leaves = composites.leaves(element)
        count, *others = map(composites.row_count, leaves)
        if count is None or any(other != count for other in others):
            shapes = [tuple(leaf.shape) for leaf in leaves]
            error = InvalidArgumentError(
                f"unbatch needs elements with one and the same first dimension, got shapes {shapes}."
            )
            self.explain(error)
            raise error
        return map(functools.partial(_row, element), range(count))


def _row(element: Tree, number: int) -> Tree:
    return composites.on_rows(lambda leaf: composites.row(leaf, number), element)


class Rebatch(Replayed):
    """The rows of batches in batches of `sizes`, in turn."""

    def __init__(self, source: Node, sizes: Sequence[int], drop_remainder: bool):
        super().__init__(f"rebatch({', '.join(map(str, sizes))})", [source])
        self._sizes, self._drop = sizes, drop_remainder
        self.batch_size = sizes[0] if len(set(sizes)) == 1 else None

    def spec_of(self, *specs: Tree) -> Tree:
        return with_batch(without_batch(specs[0]), self.batch_size if self._drop else None)

    def read_all(self, reading: Reading) -> Iterator[Tree]:
        pieces = regroup(self.input.iterate(reading), itertools.cycle(self._sizes))
        for piece, size in zip(pieces, itertools.cycle(self._sizes)):
            if num_rows(piece) == size or not self._drop:
                yield piece
