"""`ClusterCoordinator`: schedules functions, which workers run."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from replicax._base import nest
from replicax._base.errors import UnavailableError
from replicax._base.messages import received
from replicax._base.types import Tree
from replicax._engine.concrete_function import ConcreteFunction
from replicax._engine.function import Function, calls_of, is_function
from replicax._job import state
from replicax._parameter_server.closures import ClosureQueue
from replicax._parameter_server.cluster import Cluster, aside
from replicax._parameter_server.datasets import PerWorkerDistributedIterator, PerWorkerValue, per_worker_dataset
from replicax._parameter_server.planner import Planner, ScheduledCall
from replicax._parameter_server.remote_value import RemoteValue, RemoteValueImpl, SeveralSteps
from replicax._parameter_server.scheduling import Kinds
from replicax._parameter_server.worker_links import MOST_LOST, WorkerLink
from replicax._parameter_server.worker_values import MadeValue, with_examples

if TYPE_CHECKING:
    from replicax._tracing.context import StrategyLike


class ClusterCoordinator:
    """Schedules functions, which the workers of a `ParameterServerStrategy` run when they are free.

    `ClusterCoordinator(strategy)` is one object for each strategy. The example of `ParameterServerStrategy` makes the
    `coordinator` of the examples here.

    Args:
        strategy: the strategy.

    Raises:
        AttributeError: it is another kind of strategy.

    >>> import jax.numpy as jnp, replicax as rx
    >>> result = coordinator.schedule(rx.function(lambda x: x + 1), args=(jnp.float32(1),))
    >>> coordinator.join()
    >>> result.fetch()
    np.float32(2.0)
    """

    _strategy: StrategyLike

    def __new__(cls, strategy: StrategyLike) -> ClusterCoordinator:
        known = getattr(strategy, "_cluster_coordinator", _UNKNOWN)
        if known is _UNKNOWN:
            raise AttributeError(
                f"{type(strategy).__name__!r} object has no attribute '_cluster_coordinator': a ClusterCoordinator is "
                f"made of a ParameterServerStrategy, got {received(strategy)}."
            )
        if known is None:
            known = super().__new__(cls)
        return cast(ClusterCoordinator, known)

    def __init__(self, strategy: StrategyLike):
        if hasattr(self, "_strategy"):  # `__new__` has returned the strategy's own
            return
        self._strategy = strategy
        self._cluster: Cluster = strategy._cluster  # type: ignore[attr-defined]
        self._queue = ClosureQueue(self._cluster.numbers, state.timeouts()["start"])
        self._planner = Planner(self._cluster, strategy)
        self._cluster.on_lost = self._queue.fail_all
        self._cluster.alone = self._queue.alone
        self._links = [
            WorkerLink(self._cluster, self._queue, self._planner, index)
            for index in range(len(self._cluster.worker_addresses))
        ]
        stop = functools.partial(_stopped, self._queue, self._links)
        weakref.finalize(self, aside, stop)
        self._cluster.on_close = stop
        strategy._cluster_coordinator = self  # type: ignore[attr-defined]

    @property
    def strategy(self) -> StrategyLike:
        """The strategy.

        >>> import replicax as rx
        >>> isinstance(coordinator.strategy, rx.ParameterServerStrategy)
        True
        """
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Tree],
        args: tuple[Tree, ...] | None = None,
        kwargs: dict[str, Tree] | None = None,
    ) -> RemoteValue:
        """Has some worker run a function, and returns its result to come.

        Args:
            fn: a `function`, or a concrete one.
            args, kwargs: its arguments. A per-worker iterator arrives as the worker's own.

        Raises:
            TypeError: `fn` is no compiled function, or the arguments do not fit it.
            ValueError: an argument is a `RemoteValue`.
            Exception: that of a function which was scheduled before and failed; what waited is cancelled.

        >>> import jax.numpy as jnp, replicax as rx
        >>> square = rx.function(lambda x: x * x)
        >>> results = [coordinator.schedule(square, args=(jnp.int32(i),)) for i in range(3)]
        >>> [int(result.fetch()) for result in results]
        [0, 1, 4]
        """
        args, kwargs = tuple(args) if args is not None else (), kwargs or {}
        leaves = nest.leaves((args, kwargs))
        made = [leaf for leaf in leaves if isinstance(leaf, MadeValue)]
        if made:
            args, kwargs = with_examples((args, kwargs))
        function, args, kwargs = _bound(fn, args, kwargs)
        if any(isinstance(leaf, RemoteValue) for leaf in leaves):
            raise ValueError(
                "`tf.distribute.experimental.coordinator.RemoteValue` used as an input to scheduled function is not "
                "yet supported."
            )
        call, plan = self._planner.planned(function, args, kwargs)
        values = [RemoteValueImpl(self._queue.wait_for) for _ in range(function.steps_per_call)]
        numbers = [self._cluster.numbers.open() for _ in values]
        try:
            closures = [
                ScheduledCall(number, value, function, call, plan, step > 0, made)
                for step, (number, value) in enumerate(zip(numbers, values))
            ]
            closures[0].iterators()
            self._queue.put(closures)
        except BaseException:
            for number in numbers:
                self._cluster.numbers.close(number)
            raise
        return values[0] if len(values) == 1 else SeveralSteps(values)

    def join(self) -> None:
        """Waits until all scheduled functions have ended; raises the exception of one that failed, once.

        >>> import replicax as rx
        >>> with coordinator.strategy.scope():
        ...     count = rx.Variable(0)
        >>> _ = coordinator.schedule(rx.function(lambda: count.assign_add(1)))
        >>> coordinator.join()
        >>> int(count)
        1
        """
        self._queue.join()

    def done(self) -> bool:
        """Returns whether all scheduled functions have ended; raises the exception of one that failed, once.

        >>> import replicax as rx
        >>> _ = coordinator.schedule(rx.function(lambda: 1))
        >>> coordinator.join()
        >>> coordinator.done()
        True
        """
        return self._queue.is_done()

    def fetch(self, val: Tree) -> Tree:
        """Returns a nest with the results of the `RemoteValue`s in it, as numpy arrays, for which it waits.

        >>> import jax.numpy as jnp, replicax as rx
        >>> result = coordinator.schedule(rx.function(lambda: jnp.int32(7)))
        >>> coordinator.fetch({"a": result, "b": 3})
        {'a': np.int32(7), 'b': 3}
        """
        return nest.map_structure(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val)

    def create_per_worker_dataset(self, dataset_fn: object) -> object:
        """Returns a dataset of which each worker has its own.

        Args:
            dataset_fn: a dataset, or a function that makes one; it is called once here, for the specs of its elements,
                and once on each worker.

        Raises:
            ValueError: there is no dataset.

        >>> import replicax as rx
        >>> iterator = iter(coordinator.create_per_worker_dataset(lambda: rx.data.Dataset.range(5, 8)))
        >>> step = rx.function(lambda iterator: next(iterator) * 2)
        >>> [int(coordinator.schedule(step, args=(iterator,)).fetch()) for _ in range(3)]
        [10, 12, 14]
        """
        return per_worker_dataset(dataset_fn, self._ask_kinds)

    def create_per_worker_value(self, value_fn: Callable[[], Tree]) -> PerWorkerValue:
        """Returns a value of which each worker has its own, to be passed to scheduled functions.

        Args:
            value_fn: returns a nest of arrays or numbers; it is called once here, for their shapes and dtypes, and once
                on each worker.

        Raises:
            TypeError: `value_fn` is not callable, or returns something else.

        >>> import jax.numpy as jnp, replicax as rx
        >>> table = coordinator.create_per_worker_value(lambda: jnp.arange(3))
        >>> coordinator.schedule(rx.function(lambda table: table[1] + 1), args=(table,)).fetch()
        np.int32(2)
        """
        return MadeValue(value_fn)

    def _ask_kinds(self, iterator: PerWorkerDistributedIterator) -> Kinds:
        """Returns the shapes and dtypes of the next element that some worker has."""
        for _ in range(MOST_LOST):
            kinds = cast(WorkerLink, self._queue.any_link()).kinds_of(iterator)
            if kinds is not None:
                return kinds
        raise UnavailableError(
            f"{MOST_LOST} workers were lost while they were asked for the next element of a dataset. Its function may "
            "be what ends them, for want of memory for one."
        )


_UNKNOWN = object()


def _stopped(queue: ClosureQueue, links: list[WorkerLink]) -> None:
    queue.stop()
    for link in links:
        link.close()


def _bound(
    fn: object, args: tuple[Tree, ...], kwargs: dict[str, Tree]
) -> tuple[Function, tuple[Tree, ...], dict[str, Tree]]:
    """Returns the function of what was scheduled, with its arguments."""
    function: Function
    if isinstance(fn, ConcreteFunction):
        function = cast(Function, fn.function)
        args, kwargs = fn.bound(args, kwargs)
    elif is_function(fn):
        function = fn
    else:
        raise TypeError(
            "`tf.distribute.experimental.coordinator.ClusterCoordinator.schedule` only accepts a `tf.function` or a "
            f"concrete function. Got {received(fn)}."
        )
    signature = calls_of(function).code.signature
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"Binding inputs to tf.function failed due to `{error}`. Received args: {args} and kwargs: {kwargs} for "
            f"signature: {signature}."
        ) from None
    return function, args, kwargs
