"""Dividing the rows of a batch among replicas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax
import numpy as np  # noqa: F401  for the examples

from replicax._base.errors import InvalidArgumentError
from replicax._base.types import Tree
from replicax._data import composites
from replicax._data.elements import flatten, num_rows, regroup, rows_between
from replicax._data.rows import RowBatches
from replicax._input.agreement import Round, Worker, empty, kinds_of

ALONE = Worker()


def split_batch(element: Tree, num_replicas: int) -> list[Tree]:
    """Splits a batch into a part for each replica, as views: ceil(n / num_replicas) rows until none are left.

    >>> [part.tolist() for part in split_batch(np.arange(5), 4)]
    [[0, 1], [2, 3], [4], []]
    """
    batch = _batch(element, num_replicas)
    if composites.has_composites(batch):
        share = -(-num_rows(batch) // num_replicas)
        return [rows_between(batch, i * share, (i + 1) * share) for i in range(num_replicas)]
    leaves, structure = flatten(batch)
    share = -(-leaves[0].shape[0] // num_replicas)
    return [structure.unflatten([a[i * share : (i + 1) * share] for a in leaves]) for i in range(num_replicas)]


class Shares(Iterator[Round]):
    """Batches as rounds, of which each has the shares of this worker's replicas; or as blocks of several.

    Args:
        batches: the batches of all workers.
        num_replicas: of all workers. Where there is one, batches stay whole, and need not be batches.
        worker: which one this is.
    """

    def __init__(self, batches: Iterator[Tree], num_replicas: int, worker: Worker = ALONE):
        self._batches, self._replicas, self._worker = batches, num_replicas, worker

    def __next__(self) -> Round:
        element = next(self._batches)
        if self._replicas == 1:
            return Round([element], True)
        shares, (size, rank) = split_batch(element, self._replicas), self._worker
        alike = num_rows(element) % self._replicas == 0 and not composites.has_composites(element)
        kinds_of_workers = [] if alike or size == 1 else [kinds_of(shares[i::size]) for i in range(size)]
        return Round(shares[rank::size], alike, kinds_of_workers)

    def next_block(self, count: int) -> list[Tree] | None:
        """Returns each replica's shares of the next batches, stacked along a new first axis.

        Rows that lie in arrays are taken out of these once, for all of the batches. None where that cannot be.

        >>> import replicax as rx
        >>> from replicax._data.nodes.node import node_of
        >>> from replicax._data.reading import Reading
        >>> shares = Shares(node_of(rx.data.Dataset.range(9).batch(4)).iterate(Reading()), 2)
        >>> [share.tolist() for share in shares.next_block(2)], [share.tolist() for share in next(shares).parts]
        ([[[0, 1], [4, 5]], [[2, 3], [6, 7]]], [[8], []])
        """
        batches = self._batches
        if not isinstance(batches, RowBatches) or batches.size % self._replicas:
            return None
        block = batches.next_block(count, self._replicas)
        if block is None:
            return None
        leaves, structure = flatten(block)
        shares = range(self._worker.rank, self._replicas, self._worker.size)
        return [structure.unflatten([a[i] for a in leaves]) for i in shares]


def _batch(element: Tree, num_replicas: int) -> Tree:
    """Returns `element`; raises InvalidArgumentError unless it is a batch: arrays with one first dimension."""
    counts = set(map(composites.row_count, composites.leaves(element)))
    if len(counts) != 1 or None in counts:
        raise not_a_batch(element, num_replicas)
    return element


def not_a_batch(element: Tree, num_replicas: int) -> InvalidArgumentError:
    """Returns the error for an element (of arrays or specs) that has not one first dimension to split."""
    leaves = jax.tree_util.tree_leaves_with_path(element)
    if not leaves:
        return InvalidArgumentError(
            f"An element of the dataset has no array in it that could be split, got {element!r:.80}."
        )
    shapes = {f"element{jax.tree_util.keystr(path)}": tuple(leaf.shape) for path, leaf in leaves}
    where = ", ".join(f"{name}: {shape}" for name, shape in shapes.items())
    if all(shapes.values()):
        return InvalidArgumentError(
            f"A batch is split along its first dimension, which must be the same in each array of it; got {where}."
        )
    return InvalidArgumentError(
        f"An element of the dataset has a scalar in it, which cannot be split among {num_replicas} replicas; "
        f"got {where}. Batch the dataset first, `dataset.batch(global_batch_size)`; in a list of batches each one "
        "must be an array or a structure of arrays (a Python list of numbers is not: use `np.array`)."
    )


def rebatched_rounds(
    elements: Iterator[Tree], batch_size: int, num_replicas: int, worker: Worker = ALONE
) -> Iterator[list[Tree]]:
    """Yields rounds of shares cut from consecutive rows, whatever batches they come in, for policies OFF and FILE.

    Each worker cuts its own rows. The sizes are such that the shares of all workers in one round add up to a batch.

    >>> rounds = rebatched_rounds(iter([np.arange(4), np.arange(4, 6)]), 4, 3)
    >>> [[part.tolist() for part in parts] for parts in rounds]
    [[[0, 1], [2], [3]], [[4, 5], [], []]]
    """
    total, first = num_replicas * worker.size, num_replicas * worker.rank
    sizes = [(batch_size + total - 1 - i % total) // total for i in range(first, first + total)]
    pieces = regroup((_batch(element, total) for element in elements), itertools.cycle(sizes))
    while parts := list(itertools.islice(pieces, num_replicas)):
        yield parts + [empty(parts[-1])] * (num_replicas - len(parts))
