"""`DistributedIterator`: the elements of a distributed dataset, made in a background thread ahead of their use."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from replicax._base.messages import received
from replicax._base.positioned import Positioned
from replicax._base.types import Tree
from replicax._data.iterators import ElementIterator, exclusive, living
from replicax._data.multi_step import Demand
from replicax._data.nodes.node import Node
from replicax._data.prefetch import Buffer
from replicax._data.reading import Reading, parsed, state_from_bytes, state_to_bytes
from replicax._input.agreement import Iteration
from replicax._input.placed_rounds import OfRounds, rounds_of


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
