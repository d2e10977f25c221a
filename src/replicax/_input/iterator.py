"""`DistributedIterator`, and the rounds of input that it gives: from the host to the replicas' devices.

    source -> batch (host) -> round: one share for each replica (host, views) -> place (devices) -> buffer -> next

A background thread does everything up to the buffer, so that the next element is on its way to the devices while the
current one is computed with. What "on the devices" means is the strategy's: it gives `place`. The thread knows the
buffer and the source, never the iterator; see `_data.prefetch`.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from replicax._base.messages import received
from replicax._base.positioned import Positioned
from replicax._base.types import InputOptions, Tree
from replicax._data.dataset import Dataset
from replicax._data.iterators import ElementIterator, exclusive, living
from replicax._data.multi_step import Block, Demand, stack_on_host
from replicax._data.nodes.node import Node
from replicax._data.prefetch import Buffer, is_small
from replicax._data.reading import Position, Reading, parsed, state_from_bytes, state_to_bytes
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
        nodes: their nodes.
        total: the number of the replicas of all workers.
        share: of the files: the number of shares, and which of them is this worker's.
    """

    sources: list[Dataset]
    nodes: list[Node]

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


class DistributedIterator(ElementIterator, OfRounds, Positioned):
    """An iterator over the elements of a distributed dataset; `iter(distributed_dataset)` makes one.

    `next` raises StopIteration at the end and `get_next` raises `OutOfRangeError`, both again and again. An exception
    in the dataset comes up where its element would have come, and is the last that comes.

    >>> import replicax as rx
    >>> strategy = rx.OneDeviceStrategy("cpu:0")
    >>> iterator = iter(strategy.experimental_distribute_dataset(rx.data.Dataset.range(3).batch(2)))
    >>> next(iterator).tolist(), iterator.get_next().tolist()
    ([0, 1], [2])
    >>> bool(iterator.get_next_as_optional().has_value())
    False
    """

    def __init__(self, *args: Any, **kwargs: Any):  # the signature that `tf.distribute.DistributedIterator` shows
        self._open(*args, **kwargs)

    def _open(self, dataset: OfRounds) -> None:
        if not isinstance(dataset, OfRounds) or isinstance(dataset, ElementIterator):
            raise TypeError(
                f"An iterator is made of a distributed dataset, got {received(dataset)}. "
                "Call `iter(strategy.experimental_distribute_dataset(dataset))`."
            )
        self._dataset, self._rounds = dataset, rounds_of(dataset)
        self._begin(self._rounds.readings(), 0)
        living.add(self)

    @exclusive
    def _begin(self, readings: list[Reading], position: int) -> None:
        self._readings, self._start, self._position = readings, position, position
        self._topic = self._rounds.next_topic()
        self._buffer: Buffer | None = None
        self._elements: Iterator[Tree] | None = None
        self._waiting, self._ended = [], False
        self._demand = Demand()
        self._closed = False

    def _behind(self) -> tuple[Sequence[Node], Sequence[Reading]]:
        return self._rounds.nodes, self._readings

    def _ask_for(self, count: int) -> None:
        # The threads of several workers would learn it at different elements, and make different arrays of them.
        if self._rounds.worker.size == 1:
            self._demand.ask(count, self._position)

    def _next_element(self) -> Tree:
        if self._closed:
            raise StopIteration
        size = self._rounds.options.experimental_per_replica_buffer_size
        if size <= 0:
            self._elements = self._elements or self._rounds.placed(
                Iteration(self._topic), self._readings, self._start, self._demand
            )
            with self._rounds.watched():
                return next(self._elements)
        if self._buffer is None:
            # Neither the thread nor what it calls may hold this iterator; see `_data.prefetch`.
            placed, topic = self._rounds.placed, self._topic
            arguments = self._readings, self._start, self._demand
            make = lambda stopped: placed(Iteration(topic, stopped), *arguments)  # noqa: E731
            buffer = Buffer(make, size, self._rounds.is_at_hand())
            weakref.finalize(self, buffer.stop).atexit = False
            buffer.start()
            self._buffer = buffer
        with self._rounds.watched():
            return self._buffer.take()

    def save_state(self) -> bytes:
        """Returns the position of the iterator: after the last element that it gave, whatever waits in its buffer.

        Each worker saves its own.

        >>> import replicax as rx
        >>> batches = rx.OneDeviceStrategy("cpu:0").experimental_distribute_dataset(rx.data.Dataset.range(6).batch(2))
        >>> iterator, other = iter(batches), iter(batches)
        >>> _ = next(iterator)
        >>> other.restore_state(iterator.save_state())
        >>> next(other).tolist()
        [2, 3]
        """
        return state_to_bytes(self._rounds.position_after(self._position), self._readings)

    def _first_state(self) -> bytes:
        return state_to_bytes(self._rounds.position_after(self._start), self._readings)

    def restore_state(self, state: bytes) -> None:
        """Continues at the position of the iterator whose `save_state` returned `state`.

        See `DatasetIterator.restore_state`. The iterator may be one of another process, over the same dataset. All
        workers restore together. Datasets of other libraries are gone through once more up to that place. With another
        number of replicas, where each gets elements of its own (`distribute_datasets_from_function`), the elements of
        a round that is not complete come again.

        Raises:
            InvalidArgumentError: `state` is no such state, or of another dataset; the iterator stays as it was.

        >>> import replicax as rx
        >>> strategy = rx.OneDeviceStrategy("cpu:0")
        >>> batches = strategy.experimental_distribute_dataset(rx.data.Dataset.range(6).batch(2))
        >>> iterator = iter(batches)
        >>> _, state = next(iterator), iterator.save_state()
        >>> iterator = iter(batches)
        >>> iterator.restore_state(state)
        >>> [batch.tolist() for batch in iterator]
        [[2, 3], [4, 5]]
        """
        self._refuse_own_functions()
        position, saved = state_from_bytes(state, self._readings)
        self.close(timeout=0)  # a thread that waits for an element stops waiting
        self._begin(self._rounds.readings(saved), self._rounds.rounds_before(position))

    def _carried_over(self, states: Sequence[bytes]) -> bytes | None:
        """Returns what to restore of the states of another number of workers; None where none of it says it."""
        told = {parsed(state)[0] for state in states}
        same_for_all = self._rounds.position_after(0).of_all and len(told) == 1 and told.pop().of_all
        return states[0] if same_for_all else None

    def close(self, timeout: float | None = None) -> None:
        """Ends the iteration, drops what is in the buffer, and waits for the background thread.

        Dropping the iterator, as by leaving a loop, does as much by itself, but for the waiting: the thread ends when
        the dataset has come up with the element that it is at.

        Args:
            timeout: how many seconds to wait at the most; None for no limit.

        >>> import replicax as rx
        >>> dataset = rx.data.Dataset.range(6).batch(2)
        >>> iterator = iter(rx.OneDeviceStrategy("cpu:0").experimental_distribute_dataset(dataset))
        >>> _ = next(iterator)
        >>> iterator.close()
        >>> next(iterator, "no more")
        'no more'
        """
        self._closed = True
        self._elements = None
        self._waiting.clear()
        if self._buffer is not None:
            self._buffer.stop()
            self._buffer.join(timeout)
