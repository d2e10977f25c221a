"""The older spellings of strategies' methods, for programs that were written for TensorFlow 1 or early TensorFlow 2.

Each works, and warns once in a process, with the name to use now. It is a `DeprecationWarning`, which Python shows to
a program's authors, in the script that they run and in their tests, and not to those who only run the program.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ParamSpec, Protocol, TypeVar

from replicax.tf._core import (
    ClusterResolver,
    Dataset,
    DeviceAssignment,
    DistributedDataset,
    DistributedIterator,
    InputContext,
    InputOptions,
    InputReplicationMode,
    Leaf,
    ReduceOp,
    Strategy,
    StrategyExtended,
    StrategyLike,
    TPUExtended,
    Tree,
    Variable,
    nest,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")

_warned: set[str] = set()


def warn_once(name: str, now: str, stacklevel: int = 2) -> None:
    """Warns that `name` is an older spelling, the first time; `now` says what to do."""
    if name not in _warned:
        _warned.add(name)
        warnings.warn(f"`{name}` is an older spelling: {now}.", DeprecationWarning, stacklevel=stacklevel + 1)


def older(now: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Returns a decorator for a function or method of which `now` says what to do in its place."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def warning(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            warn_once(function.__name__, now)
            return function(*args, **kwargs)

        return warning

    return decorate


class InitializableIterator(DistributedIterator):
    """An iterator over a distributed dataset that can be started anew."""

    def initialize(self) -> None:
        """Starts anew with the first element. A new iterator needs no call."""
        self.close(timeout=0)
        self._begin(self._rounds.readings(), 0)


class _Endless:
    """A dataset of the results of a function without arguments, which is called again and again."""

    def __init__(self, function: Callable[[], Tree]):
        self._function = function

    def __iter__(self) -> Iterator[Tree]:
        while True:
            yield self._function()


class _Strategy(StrategyLike, Protocol):
    """The methods of `Strategy` that the older ones call."""

    @property
    def extended(self) -> StrategyExtended: ...
    def experimental_distribute_dataset(self, dataset: object) -> Iterable[Tree]: ...
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], object], options: InputOptions | None
    ) -> Iterable[Tree]: ...
    def experimental_local_results(self, value: Tree) -> tuple[Tree, ...]: ...


def _iterator(dataset: Iterable[Tree]) -> Iterator[Tree]:
    return InitializableIterator(dataset) if isinstance(dataset, DistributedDataset) else iter(dataset)


_NO_SESSION = "leave it out, there is no session to configure"


class OlderMethods:
    """The older methods, which `dress` gives to every strategy."""

    @older("use `run(fn, args=(next(iterator),))`")
    def experimental_run(
        self: _Strategy, fn: Callable[..., Tree], input_iterator: Iterator[Tree] | None = None
    ) -> Tree:
        """Calls `run(fn, args=(next(input_iterator),))`, or `run(fn)` without one; `OutOfRangeError` at the end.

        >>> import warnings, replicax.tf as tf
        >>> warnings.simplefilter("ignore", DeprecationWarning)
        >>> strategy = tf.distribute.OneDeviceStrategy("cpu:0")
        >>> int(strategy.experimental_run(lambda x: x + 1, iter(tf.data.Dataset.range(2))))
        1
        """
        if input_iterator is None:
            return self.run(fn)
        get_next: Callable[[], Tree] = getattr(input_iterator, "get_next", lambda: next(input_iterator))
        return self.run(fn, args=(get_next(),))

    @older("use `iter(strategy.experimental_distribute_dataset(dataset))`")
    def make_dataset_iterator(self: _Strategy, dataset: object) -> Iterator[Tree]:
        """Returns an iterator over the distributed dataset, with `get_next()` and `initialize()`.

        >>> import warnings, replicax.tf as tf
        >>> warnings.simplefilter("ignore", DeprecationWarning)
        >>> iterator = tf.distribute.OneDeviceStrategy("cpu:0").make_dataset_iterator(tf.data.Dataset.range(4).batch(2))
        >>> iterator.get_next().tolist()
        [0, 1]
        """
        return _iterator(self.experimental_distribute_dataset(dataset))

    @older("use `iter(strategy.distribute_datasets_from_function(input_fn))`")
    def make_input_fn_iterator(
        self: _Strategy,
        input_fn: Callable[[InputContext], object],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> Iterator[Tree]:
        """Returns an iterator over the datasets that `input_fn` makes, or the results of a function that it returns.

        >>> import warnings, replicax.tf as tf
        >>> warnings.simplefilter("ignore", DeprecationWarning)
        >>> strategy = tf.distribute.OneDeviceStrategy("cpu:0")
        >>> strategy.make_input_fn_iterator(lambda context: tf.data.Dataset.range(4).batch(2)).get_next().tolist()
        [0, 1]
        """

        def dataset_fn(context: InputContext) -> object:
            made = input_fn(context)
            return _Endless(made) if callable(made) else made

        options = InputOptions(experimental_replication_mode=replication_mode)
        return _iterator(self.distribute_datasets_from_function(dataset_fn, options))

    @older("use `distribute_datasets_from_function`")
    def experimental_distribute_datasets_from_function(
        self: _Strategy, dataset_fn: Callable[[InputContext], object], options: InputOptions | None = None
    ) -> Iterable[Tree]:
        """Calls `distribute_datasets_from_function`.

        >>> import warnings, replicax.tf as tf
        >>> warnings.simplefilter("ignore", DeprecationWarning)
        >>> strategy = tf.distribute.OneDeviceStrategy("cpu:0")
        >>> dataset_fn = lambda context: tf.data.Dataset.range(4).batch(2)
        >>> batches = strategy.experimental_distribute_datasets_from_function(dataset_fn)
        >>> [batch.tolist() for batch in batches]
        [[0, 1], [2, 3]]
        """
        return self.distribute_datasets_from_function(dataset_fn, options)

    @older("use `experimental_local_results`")
    def unwrap(self: _Strategy, value: Tree) -> tuple[Tree, ...]:
        """Calls `experimental_local_results`.

        >>> import warnings, replicax.tf as tf
        >>> warnings.simplefilter("ignore", DeprecationWarning)
        >>> tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).unwrap(1)
        (1,)
        """
        return self.experimental_local_results(value)

    @older("leave it out, what it groups is done already")
    def group(self: _Strategy, value: Tree, name: str | None = None) -> Leaf:
        """Returns the value if it has one component and no name is given, else None: nothing is left to be run.

        >>> import warnings, replicax.tf as tf
        >>> warnings.simplefilter("ignore", DeprecationWarning)
        >>> tf.distribute.OneDeviceStrategy("cpu:0").group(5)
        5
        """
        results = nest.leaves(self.experimental_local_results(value))
        return results[0] if len(results) == 1 and name is None else None

    @older("use `strategy.extended.colocate_vars_with`")
    def colocate_vars_with(
        self: _Strategy, colocate_with_variable: Variable
    ) -> contextlib.AbstractContextManager[None]:
        """Calls `extended.colocate_vars_with`.

        >>> import warnings, replicax.tf as tf
        >>> warnings.simplefilter("ignore", DeprecationWarning)
        >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     v = tf.Variable(1.0)
        ...     with strategy.colocate_vars_with(v):
        ...         slot = tf.Variable(0.0)
        >>> slot.device == v.device
        True
        """
        return self.extended.colocate_vars_with(colocate_with_variable)

    @older(_NO_SESSION)
    def configure(
        self,
        session_config: object = None,
        cluster_spec: object = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Does nothing; there is no session to configure.

        >>> import warnings, replicax.tf as tf
        >>> warnings.simplefilter("ignore", DeprecationWarning)
        >>> tf.distribute.OneDeviceStrategy("cpu:0").configure()
        """

    @older(_NO_SESSION)
    def update_config_proto(self, config_proto: _T) -> _T:
        """Returns its argument; there is no session to configure.

        >>> import warnings, replicax.tf as tf
        >>> warnings.simplefilter("ignore", DeprecationWarning)
        >>> tf.distribute.OneDeviceStrategy("cpu:0").update_config_proto("config")
        'config'
        """
        return config_proto


class ExperimentalTPUStrategy(Strategy):
    """The older `experimental.TPUStrategy`: `TPUStrategy` without the methods for logical devices."""

    def __init__(
        self, tpu_cluster_resolver: ClusterResolver | None = None, device_assignment: DeviceAssignment | None = None
    ):
        super().__init__(TPUExtended(self, tpu_cluster_resolver, device_assignment))


_OMITTED = object()


class V1Methods:
    """The further methods of strategies of TensorFlow 1."""

    @older("use `run`")
    def experimental_run_v2(
        self: _Strategy, fn: Callable[..., Tree], args: Sequence[Tree] = (), kwargs: dict[str, Tree] | None = None
    ) -> Tree:
        """Calls `run`."""
        return self.run(fn, args, kwargs)

    @older("use `Dataset.from_tensor_slices`")
    def experimental_make_numpy_dataset(self: _Strategy, numpy_input: Tree, session: object = None) -> Dataset:
        """Returns a dataset over the rows of numpy arrays."""
        return self.extended.experimental_make_numpy_dataset(numpy_input, session)

    def reduce(self, reduce_op: ReduceOp | str, value: Tree, axis: object = _OMITTED) -> Tree:
        """Calls `Strategy.reduce`, where `axis` may be left out for None."""
        if axis is _OMITTED:
            warn_once("reduce without an axis", "pass `axis=None`")
            axis = None
        return super().reduce(reduce_op, value, axis)  # type: ignore[misc]


@older("losses are summed, use `ReduceOp.SUM`")
def get_loss_reduction() -> ReduceOp:
    """Returns the reduction by which losses of replicas are combined: `ReduceOp.SUM`."""
    return ReduceOp.SUM


def dress() -> None:
    """Give strategies the older methods."""
    for name, method in vars(OlderMethods).items():
        if not name.startswith("__"):
            setattr(Strategy, name, method)
