"""Agreement of workers that have input pipelines of their own: when the data end, and the shapes of a round's parts.

The iteration goes on until every worker is at its end; those that are there already get empty batches. Where all
shapes are fixed there are no empty batches, and the iteration ends for all where it ends for the first.

The workers tell each other, in the thread that fills the buffer, before an element is put on the devices. Where their
datasets know how many rounds they have, and the parts' shapes follow from that, once is enough.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax

from replicax._base import nest
from replicax._base.types import Leaf, Tree
from replicax._data import composites
from replicax._data.composite_rows import no_rows
from replicax._data.reading import Reading
from replicax._data.specs import INFINITE_CARDINALITY
from replicax._job import exchange
from replicax._values import is_array


class Worker(NamedTuple):
    """The rank of this worker, and the number of workers."""

    size: int = 1  # the number of workers
    rank: int = 0


class Kind(NamedTuple):
    """The shape and dtype of an array; for anything else, the name of its type."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)


Kinds = list[list[Kind]]  # for each of some replicas, the kinds of its part's leaves


class Round(NamedTuple):
    """A host structure for each local replica, and whether those of all replicas have one shape."""

    parts: list[Tree]
    alike: bool
    kinds_of_workers: Sequence[Kinds] = ()  # each worker's kinds, where there are several workers and the parts differ


def kinds_of(parts: Sequence[Tree]) -> Kinds:
    """Returns the shapes and dtypes of the parts' leaves."""

    def kind(leaf: Leaf) -> Kind:
        return Kind(leaf.shape, str(leaf.dtype)) if is_array(leaf) else Kind((), type(leaf).__name__)

    return [[kind(leaf) for leaf in nest.leaves(part)] for part in parts]


def most_rows_of(this_round: Round) -> int:
    """Returns the largest number of rows of any replica's part of a round."""
    kinds = [*kinds_of(this_round.parts), *(part for worker in this_round.kinds_of_workers for part in worker)]
    return max((kind.shape[0] for part in kinds for kind in part if kind.shape), default=0)


def empty(part: Tree) -> Tree:
    """Returns a part of the same structure without rows. A scalar becomes an empty vector."""

    def nothing(leaf: Leaf) -> Leaf:
        return leaf.reshape(1)[:0] if composites.row_count(leaf) is None else composites.rows_between(leaf, 0, 0)

    return composites.on_rows(nothing, part)


class Iteration(NamedTuple):
    """One iteration over a dataset that several workers iterate over together."""

    topic: str  # the name that the workers have for it
    stopped: Callable[[], bool] = lambda: False  # whether nobody takes elements here any more

    def all_gather(self, message: str) -> list[str]:
        """Returns each worker's message."""
        return exchange.all_gather(message, self.topic, self.stopped)


def one_order(iteration: Iteration, reading: Reading, rounds: Callable[[], Iterator[Round]]) -> Iterator[Round]:
    """Yields the rounds of a reading, in which random choices are those of worker 0.

    So the workers have the same batches to take their parts of, and those are of the shapes that each one expects.
    """
    with contextlib.suppress(exchange.Stopped):
        told = iteration.all_gather(json.dumps(reading.state()))
        if told[0] != told[jax.process_index()]:
            reading.adopt(json.loads(told[0]))
        yield from rounds()


def agreed(
    iteration: Iteration,
    rounds: Iterator[Round],
    *,
    replicas: int,
    count: int,
    shapes_follow: bool,
    spec: Callable[[], Tree],
) -> Iterator[Round]:
    """Yields the rounds, as many on all workers.

    Args:
        iteration: which one it is.
        rounds: this worker's own.
        replicas: how many replicas it has.
        count: how many rounds there are, negative where they have no end or it is not known.
        shapes_follow: whether each worker can tell by itself which shapes the parts of the others have.
        spec: gives the spec of a part.
    """
    with contextlib.suppress(exchange.Stopped):
        told = [text.split() for text in iteration.all_gather(f"{count} {int(shapes_follow)}")]
        counts = [int(text) for text, _ in told]
        known = all(n >= 0 or n == INFINITE_CARDINALITY for n in counts)
        if len(set(counts)) == 1 and known and all(follow == "1" for _, follow in told):
            yield from rounds
            return
        parts: list[Tree] = []
        fixed = None
        while True:
            own = next(rounds, None)
            parts = own.parts if own else parts
            told_now = iteration.all_gather(json.dumps(kinds_of(own.parts)) if own else "")
            if not any(told_now):
                return
            if not all(told_now):
                if fixed is None:
                    fixed = "1" in iteration.all_gather(str(int(all_static(spec()))))
                if fixed:
                    return
            if own is None:
                parts = [empty(part) for part in parts] or [_nothing(spec())] * replicas
            if not all(told_now):  # workers without data tell the kinds of their empty parts
                told_now = iteration.all_gather(json.dumps(kinds_of(parts)))
            kinds = {
                text: [[Kind(tuple(shape), dtype) for shape, dtype in part] for part in json.loads(text)]
                for text in set(told_now)
            }
            kinds_of_workers = [kinds[text] for text in told_now]
            alike = all(part == kinds_of_workers[0][0] for worker in kinds_of_workers for part in worker)
            yield Round(parts, alike, () if alike else kinds_of_workers)


def all_static(spec: Tree) -> bool:
    """Returns whether all shapes are fixed."""
    return all(s.shape.is_fully_defined() for s in jax.tree.leaves(spec))


def _nothing(spec: Tree) -> Tree:
    return composites.on_rows(no_rows, spec)
