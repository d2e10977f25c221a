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

import numpy as np

from replicax._base.types import InputOptions, Tree
from replicax._data.dataset import Dataset
from replicax._data.multi_step import Block, Demand, stack_on_host
from replicax._data.nodes.node import node_of
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


class PlacedRounds(Distributed, abc.ABC):
    """A distributed dataset, as far as its iterators need it. A subclass says what the rounds are."""

    _sources: list[Dataset]
    _share: tuple[int, int]

    def _prepare(self, num_replicas: int, place: Place, options: InputOptions | None, worker: Worker = ALONE) -> None:
        self._num_replicas, self._worker = num_replicas, worker
        self._total = num_replicas * worker.size  # how many replicas all workers have
        self._number, self._passes = next(_numbers), itertools.count()
        self._place = place
        self._options = options or InputOptions()
        self._share = (1, 0)  # of the files: how many there are, and which of them is this worker's
        self._found_spec: Tree = None
        self._most_rows = 0  # to which parts are padded, as far as it is known

    def _readings(self, saved: list[Any] | None = None) -> list[Reading]:
        """Returns new readings of the sources, or those that repeat the saved ones."""
        states = [None] * len(self._sources) if saved is None else saved
        nodes = map(node_of, self._sources)
        return [Reading(node.memories, self._share, saved=state) for node, state in zip(nodes, states, strict=True)]

    @abc.abstractmethod
    def _rounds(self, readings: list[Reading], start: int) -> Iterator[Round]:
        """Returns this worker's parts from round `start` on, as far as it can tell by itself."""

    def _told(self, rounds: int) -> Position:
        """Returns the place of an iterator that has given so many rounds."""
        return Position(rounds)

    def _taken(self, position: Position) -> int:
        """Returns the number of rounds that an iterator at a position of `_told`, of whatever dataset, has given."""
        each = self._told(0).each
        return position.elements * position.each // each

    @abc.abstractmethod
    def _shares_one_order(self) -> bool:
        """Returns whether all workers take their parts of the same batches."""

    @abc.abstractmethod
    def _shapes_follow(self) -> bool:
        """Returns whether this worker can tell by itself which shapes the parts of the others have."""

    @abc.abstractmethod
    def _replica_spec(self) -> Tree:
        """Returns the spec of one replica's part, on the host."""

    @property
    @abc.abstractmethod
    def cardinality(self) -> np.int64:
        """The number of elements; -1 for no end, -2 for not known.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> int(strategy.experimental_distribute_dataset(rx.data.Dataset.counter().batch(4)).cardinality)
        -1
        """

    @property
    @abc.abstractmethod
    def element_spec(self) -> Tree:
        """The elements' specs.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> dataset = rx.data.Dataset.from_tensor_slices([1.0, 2.0]).batch(2)
        >>> strategy.experimental_distribute_dataset(dataset).element_spec
        PerReplicaSpec(TensorSpec(shape=(None,), dtype=float32, name=None), TensorSpec(shape=(None,), ...))
        """

    def _placed(self, iteration: Iteration, readings: list[Reading], start: int, demand: Demand) -> Iterator[Tree]:
        # A method of the dataset, so that the thread that runs it does not hold the iterator.
        if self._shares_one_order():
            rounds = one_order(iteration, readings[0], lambda: self._rounds(readings, start))
        else:
            rounds = self._rounds(readings, start)
        if self._worker.size > 1:
            rounds = agreed(
                iteration,
                rounds,
                replicas=self._num_replicas,
                count=int(self.cardinality),
                shapes_follow=self._shapes_follow(),
                spec=self._replica_spec,
            )
        return self._on_devices(iteration, rounds, start, demand)

    def _on_devices(
        self, iteration: Iteration, rounds: Iterator[Round], position: int, demand: Demand
    ) -> Iterator[Tree]:
        """Yields elements made of rounds, as blocks where they are asked for and the rounds are alike."""
        fetch, at_hand, in_a_row = self._options.experimental_fetch_to_device, self._is_at_hand(), 1
        while not iteration.stopped():
            count, whole = demand.at(position)
            together = whole and count > 1 and fetch and not self._options.pad_last_batch
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
        fetch = self._options.experimental_fetch_to_device
        if not self._options.pad_last_batch:
            return self._place(this_round, fetch)
        # Of a single row JAX makes other programs than of several.
        self._most_rows = max(2, self._most_rows, most_rows_of(this_round))
        return self._place(this_round, fetch, self._most_rows)

    def _is_at_hand(self) -> bool:
        """Returns whether elements take next to nothing to make, and no code of the user's."""
        return all(node_of(source).at_hand for source in self._sources)

    def _next_topic(self) -> str:
        """Returns the name under which the workers agree about the iteration that begins."""
        return f"input {self._number}.{next(self._passes)}"

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for `next`, in which it may wait for other workers."""
        return _state.waiting("next(iterator)") if self._worker.size > 1 else _nothing
