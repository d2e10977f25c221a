"""`fit`, `evaluate` and `predict` under a strategy with a coordinator: each batch is a function that a worker runs.

Batches come from one of two places. Where `fit` is told `steps_per_epoch`, and its data are a dataset or a function
that makes one, each worker has a dataset of its own. All others are read here, and each batch is sent to a worker.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from replicax._base.errors import OutOfRangeError
from replicax._base.types import Tree
from replicax._data.calls import ends_data
from replicax._data.specs import INFINITE_CARDINALITY
from replicax._engine import function
from replicax._parameter_server.coordinator import ClusterCoordinator
from replicax._parameter_server.remote_value import RemoteValue

_AHEAD = 3  # functions for each worker that are scheduled before the first of them is waited for


def coordinator_of(strategy: Any) -> ClusterCoordinator | None:
    """Returns the coordinator of a strategy, None for a strategy that has none."""
    return ClusterCoordinator(strategy) if hasattr(strategy, "_cluster_coordinator") else None


def is_dataset_function(x: object) -> bool:
    """Returns whether the data of `fit` are a function that makes a dataset."""
    return callable(x) and not hasattr(x, "__array__") and not hasattr(x, "__iter__") and not hasattr(x, "__getitem__")


def made_here(dataset_fn: Callable[..., Tree], strategy: Any) -> Tree:
    """Returns the dataset that a function makes for this process, for all of its replicas."""
    if _takes_context(dataset_fn):
        return strategy.distribute_datasets_from_function(dataset_fn)
    return dataset_fn()


def _takes_context(dataset_fn: Callable[..., Tree]) -> bool:
    return bool(inspect.signature(dataset_fn).parameters)


class Batches:
    """The batches of one loop of Keras, and the functions that were scheduled for them.

    Args:
        strategy: the strategy.
        data: the dataset, or the function that makes it; None where workers have none of their own.
        here: the batches, read in this process.
        steps: how many an epoch has, None for all that there are.

    Raises:
        ValueError: the data have no end, and no steps are given.
    """

    def __init__(self, strategy: Any, data: Tree, here: Tree, steps: int | None):
        if steps is None and here.cardinality == INFINITE_CARDINALITY:
            raise ValueError(
                "The dataset has no end: say how many steps an epoch has, by `steps_per_epoch` (of validation data "
                "`validation_steps`; of `evaluate` and `predict` `steps`)."
            )
        self._strategy, self.data, self.here, self.steps = strategy, data, here, steps
        self.coordinator = coordinator_of(strategy)

    def __iter__(self) -> Scheduled:
        workers = self._strategy.extended._cluster.worker_addresses
        return Scheduled(self, _AHEAD * len(workers))

    def of_workers(self) -> Iterator[Tree]:
        """Returns the iterator that each worker has of its own."""
        data = self.data
        if is_dataset_function(data) and _takes_context(data):
            data = functools.partial(_distributed, self._strategy, data)
        assert self.coordinator is not None
        return iter(self.coordinator.create_per_worker_dataset(data))  # type: ignore[call-overload, no-any-return]


def _distributed(strategy: Any, dataset_fn: Callable[..., Tree]) -> Tree:
    return strategy.distribute_datasets_from_function(dataset_fn)


class Scheduled:
    """An iterator over the batches of this process. A loop asks for the results of a function of them in place of them.

    Args:
        batches: the batches.
        ahead: how many functions are scheduled before the result of the first is waited for.
    """

    def __init__(self, batches: Batches, ahead: int):
        self._batches, self._ahead = batches, ahead
        self._here: Iterator[Tree] | None = None
        self._workers: Iterator[Tree] | None = None
        self._pending: deque[RemoteValue] = deque()
        self._left: int | None = None  # of the steps of an epoch, those that were not scheduled yet
        self._ended = False

    def __iter__(self) -> Scheduled:
        return self

    def __next__(self) -> Tree:
        if self._here is None:
            self._here = iter(self._batches.here)
        return next(self._here)

    def results(self, steps: Steps, count: int) -> list[Tree]:
        """Returns the results of the next `count` batches, fewer at the end of the data.

        Raises:
            StopIteration: there is none.
        """
        found: list[Tree] = []
        try:
            while len(found) < count and self._scheduled(steps, count):
                found.append(self._pending[0].get())
                self._pending.popleft()
        except Exception as error:
            raise self._first_of(error) from None
        if not found:
            raise StopIteration
        return found

    def _scheduled(self, steps: Steps, count: int) -> bool:
        """Schedules functions up to the number that may be ahead; returns whether any result is to come."""
        if not self._pending and not self._left and self._batches.steps is not None:
            self._left = -(-self._batches.steps // count) * count  # of a new epoch, in whole executions as Keras does
        while len(self._pending) < max(self._ahead, count) and self._left != 0 and not self._ended:
            try:
                self._pending.append(self._next(steps))
            except StopIteration:
                self._ended = True
            if self._left is not None:
                self._left -= 1
        return bool(self._pending)

    def _next(self, steps: Steps) -> RemoteValue:
        coordinator = self._batches.coordinator
        assert coordinator is not None
        if not steps.reads_datasets or self._batches.data is None or self._batches.steps is None:
            return coordinator.schedule(steps.of_batch, args=(next(self),))
        if self._workers is None:
            self._workers = self._batches.of_workers()
        return coordinator.schedule(steps.of_iterator, args=(self._workers,))

    def _first_of(self, error: Exception) -> Exception:
        """Returns the error that was the first one, after all that is under way has ended."""
        self._pending.clear()
        self._ended = True
        coordinator = self._batches.coordinator
        assert coordinator is not None
        try:
            coordinator.join()
        except Exception as first:  # others were cancelled because of it
            error = first
        if isinstance(error, OutOfRangeError) and ends_data(error):
            end = StopIteration()
            end.__cause__ = error
            return end
        return error


class Steps:
    """A step of a model as functions to be scheduled.

    Args:
        step: the step, of a batch.
        reads_datasets: whether workers may have datasets of their own for it.
    """

    def __init__(self, step: Callable[[Tree], Tree], reads_datasets: bool):
        self.reads_datasets = reads_datasets
        self.of_batch = function.function(step)
        self.of_iterator = function.function(lambda iterator: step(next(iterator)))


def join(strategy: Any) -> None:
    """Waits until nothing is under way any more, if the strategy has a coordinator."""
    coordinator = getattr(strategy, "_cluster_coordinator", None)
    if coordinator is not None:
        try:
            coordinator.join()
        except OutOfRangeError as error:  # which the loop comes to, as the result of a step
            if not ends_data(error):
                raise
