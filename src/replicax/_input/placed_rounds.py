"""From rounds of input on the host to elements on the replicas' devices: what all distributed datasets share.

    source -> batch (host) -> round: one share for each replica (host, views) -> place (devices) -> buffer -> next

A background thread does everything up to the buffer, so that the next element is on its way to the devices while the
current one is computed with. What "on the devices" means is the strategy's: it gives `place`. The thread knows the
buffer and the source, never the iterator; see `_data.prefetch`.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from replicax._base.types import InputOptions, Tree
from replicax._data.dataset import Dataset
from replicax._data.multi_step import Block, Demand, stack_on_host
from replicax._data.nodes.node import Node, node_of
from replicax._data.prefetch import is_small
from replicax._data.reading import Position, Reading
from replicax._input.agreement import Iteration, Round, Worker, agreed, most_rows_of, one_order
from replicax._input.sources import Distributed
from replicax._input.split import ALONE, Shares
from replicax._job import state as _state

# place(round, fetch_to_device) returns the element made of one host structure for each of this worker's replicas; with
# a number of rows behind them, padded to it.
Place: TypeAlias = Callable[..., Tree]

_IN_A_ROW = 4  # the number of small batches that are made before the first of them goes to the devices
_numbers = itertools.count()
_nothing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class PlacedRounds(abc.ABC):
    """The rounds of a distributed dataset, as its iterators need them. A subclass says what the rounds are.

    Attributes:
        sources: the datasets on the host.
        total: the number of the replicas of all workers.
        share: of the files: the number of shares, and which of them is this worker's.
    """

    sources: list[Dataset]

    def __init__(self, num_replicas: int, place: Place, options: InputOptions | None, worker: Worker = ALONE) -> None:
        self.num_replicas, self.worker = num_replicas, worker
        self.total = num_replicas * worker.size
        self._number, self._passes = next(_numbers), itertools.count()
        self._place = place
        self.options = options or InputOptions()
        self.share = (1, 0)
        self._most_rows = 0  # to which parts are padded, as far as it is known

    def readings(self, saved: list[Any] | None = None) -> list[Reading]:
        """Returns new readings of the sources, or those that repeat the saved ones."""
        states = [None] * len(self.sources) if saved is None else saved
        return [Reading(node.memories, self.share, saved=state) for node, state in zip(self.nodes, states, strict=True)]

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the sources."""
        return [node_of(source) for source in self.sources]

    @abc.abstractmethod
    def rounds(self, readings: list[Reading], start: int) -> Iterator[Round]:
        """Returns this worker's parts from round `start` on, as far as it can tell by itself."""

    def position_after(self, rounds: int) -> Position:
        """Returns the place of an iterator that has given so many rounds."""
        return Position(rounds)

    def rounds_before(self, position: Position) -> int:
        """Return the number of rounds that an iterator at a position has given, of whatever dataset it is."""
        each = self.position_after(0).each
        return position.elements * position.each // each

    @abc.abstractmethod
    def shares_one_order(self) -> bool:
        """Returns whether all workers take their parts of the same batches."""

    @abc.abstractmethod
    def shapes_follow(self) -> bool:
        """Returns whether this worker can tell by itself which shapes the parts of the others have."""

    @abc.abstractmethod
    def replica_spec(self) -> Tree:
        """Returns the spec of one replica's part, on the host."""

    @abc.abstractmethod
    def cardinality(self) -> int:
        """Return the number of rounds, or one of the constants in `specs`."""

    @abc.abstractmethod
    def counts_for_all(self) -> bool:
        """Return whether the number of rounds, which workers agree on, follows from this worker's data alone."""

    def placed(self, iteration: Iteration, readings: list[Reading], start: int, demand: Demand) -> Iterator[Tree]:
        """Return the elements of all workers' rounds from round `start` on, on the replicas' devices."""
        if self.shares_one_order():
            rounds = one_order(iteration, readings[0], lambda: self.rounds(readings, start))
        else:
            rounds = self.rounds(readings, start)
        if self.worker.size > 1:
            rounds = agreed(
                iteration,
                rounds,
                replicas=self.num_replicas,
                count=self.cardinality(),
                shapes_follow=self.shapes_follow(),
                spec=self.replica_spec,
            )
        return self._on_devices(iteration, rounds, start, demand)

    def _on_devices(
        self, iteration: Iteration, rounds: Iterator[Round], position: int, demand: Demand
    ) -> Iterator[Tree]:
        """Yields elements made of rounds, as blocks where they are asked for and the rounds are alike."""
        fetch, at_hand, in_a_row = self.options.experimental_fetch_to_device, self.is_at_hand(), 1
        while not iteration.stopped():
            count, whole = demand.at(position)
            together = whole and count > 1 and fetch and not self.options.pad_last_batch
            if whole and count == 1:
                count = in_a_row
            if together and isinstance(rounds, Shares) and (parts := rounds.next_block(count)) is not None:
                yield Block(self._place(Round(parts, True), fetch), count)
                position += count
                continue
            taken: list[Round] = []
            end: BaseException | None = None
            while len(taken) < count and end is None and not iteration.stopped():
                try:
                    taken.append(next(rounds))
                except BaseException as error:  # raised after the elements that were made before it
                    end = error
            parts = None
            if together and count == len(taken) and all(this_round.alike for this_round in taken):
                parts = stack_on_host([this_round.parts for this_round in taken])
            if parts is not None:
                yield Block(self._place(Round(parts, True), fetch), count)
            else:
                yield from (self._placed_round(this_round) for this_round in taken)
            position += len(taken)
            # Making batches evicts from the processor's caches the code that moves one to the devices.
            in_a_row = _IN_A_ROW if taken and at_hand and is_small(taken[-1].parts) else 1
            if isinstance(end, StopIteration):
                return
            if end is not None:
                try:
                    raise end
                finally:
                    del end  # its traceback holds this frame

    def _placed_round(self, this_round: Round) -> Tree:
        """Returns a round as an element, padded to the largest part so far if the options ask for that."""
        fetch = self.options.experimental_fetch_to_device
        if not self.options.pad_last_batch:
            return self._place(this_round, fetch)
        # Of a single row JAX makes other programs than of several.
        self._most_rows = max(2, self._most_rows, most_rows_of(this_round))
        return self._place(this_round, fetch, self._most_rows)

    def is_at_hand(self) -> bool:
        """Returns whether elements take next to nothing to make, and no code of the user's."""
        return all(node.at_hand for node in self.nodes)

    def next_topic(self) -> str:
        """Returns the name under which the workers agree about the iteration that begins."""
        return f"input {self._number}.{next(self._passes)}"

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for `next`, in which it may wait for other workers."""
        return _state.waiting("next(iterator)") if self.worker.size > 1 else _nothing


class OfRounds(Distributed):
    """The base class of distributed datasets and their iterators: what has rounds."""

    _rounds: PlacedRounds

    @property
    def element_spec(self) -> Tree:
        """The elements' specs."""
        raise NotImplementedError


def rounds_of(distributed: OfRounds) -> PlacedRounds:
    """Return the rounds of a distributed dataset or of its iterator."""
    return distributed._rounds
