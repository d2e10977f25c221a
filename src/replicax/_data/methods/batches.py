"""The methods of `Dataset` that stack elements to batches, and that take batches apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np
from numpy.typing import DTypeLike

from replicax._base.specs import as_dtype
from replicax._base.types import Tree
from replicax._data.base import Base
from replicax._data.elements import padded_shape, positive
from replicax._data.nodes.batch import AsRagged, AsSparse, Batch, PaddedBatch, Rebatch, Unbatch

D = TypeVar("D", bound=Base)


def batch(
    self: D,
    batch_size: int,
    drop_remainder: bool = False,
    num_parallel_calls: int | None = None,
    deterministic: bool | None = None,
    name: str | None = None,
) -> D:
    """Returns batches of `batch_size` stacked elements; the last batch may be smaller, or is dropped.

    >>> from replicax.data import Dataset
    >>> list(Dataset.range(5).batch(3).as_numpy_iterator())
    [array([0, 1, 2]), array([3, 4])]
    """
    return self._then(Batch(self._node, positive("batch_size", batch_size), drop_remainder))


def padded_batch(
    self: D,
    batch_size: int,
    padded_shapes: Tree = None,
    padding_values: Tree = None,
    drop_remainder: bool = False,
    name: str | None = None,
) -> D:
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
    return self._then(PaddedBatch(self._node, size, padded_shapes, padding_values, drop_remainder))


def ragged_batch(
    self: D,
    batch_size: int,
    drop_remainder: bool = False,
    row_splits_dtype: DTypeLike = np.int64,
    name: str | None = None,
) -> D:
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
    size, known, source = positive("batch_size", batch_size), self._node.spec(False), self._node
    if known is None or not all(s.shape.is_fully_defined() for s in jax.tree.leaves(known)):
        source = AsRagged(source, as_dtype(row_splits_dtype))
    return self._then(Batch(source, size, drop_remainder))


def sparse_batch(self: D, batch_size: int, row_shape: Tree, name: str | None = None) -> D:
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
    source = AsSparse(self._node, padded_shape(row_shape))
    return self._then(Batch(source, positive("batch_size", batch_size), False))


def unbatch(self: D, name: str | None = None) -> D:
    """Returns a dataset of the rows of each element.

    Raises:
        InvalidArgumentError: at iteration, if the first dimensions of an element's arrays differ.

    >>> from replicax.data import Dataset
    >>> [int(x) for x in Dataset.range(4).batch(3).unbatch()]
    [0, 1, 2, 3]
    """
    return self._then(Unbatch(self._node))


def rebatch(self: D, batch_size: int | Sequence[int], drop_remainder: bool = False, name: str | None = None) -> D:
    """Returns the batches cut anew, to `batch_size` or, where that is a list, to its numbers in turn.

    >>> from replicax.data import Dataset
    >>> list(Dataset.range(6).batch(4).rebatch([2, 1]).as_numpy_iterator())
    [array([0, 1]), array([2]), array([3, 4]), array([5])]
    """
    sizes = [positive("batch_size", n) for n in np.ravel(batch_size)]
    return self._then(Rebatch(self._node, sizes, drop_remainder))
