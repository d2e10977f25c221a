"""`Strategy`, with the methods that users call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

from replicax._base import nest, tracebacks
from replicax._base.indexed_slices import dense
from replicax._base.thread_state import current
from replicax._base.types import (
    InputContext,
    InputOptions,
    ReduceOp,
    RunOptions,
    Tree,
    ValueContext,
    as_input_options,
    as_integer,
    as_reduce_op,
    check_reduction_axis,
)
from replicax._data import calls
from replicax._engine.function import calls_of, is_function
from replicax._report.benchmark import Benchmark
from replicax._report.placement import Placement
from replicax._report.terminal import is_wanted, progress
from replicax._strategies import tools
from replicax._strategies.extended import StrategyExtended
from replicax._strategies.logical_devices import LayoutMethods
from replicax._strategies.scope import Scope
from replicax._tracing import active_tapes, autograph_switch, context
from replicax._values import arrays_of, marks_of, warn_of_reduction

if TYPE_CHECKING:
    from replicax._cluster.resolver import ClusterResolver

_T = TypeVar("_T")
_LARGE = 1 << 24  # bytes
_GATHER_NEEDED = (
    "tf.distribute.Strategy.gather method requires cross-replica context, use "
    "get_replica_context().all_gather() instead"
)

_OLDER = """colocate_vars_with configure experimental_distribute_datasets_from_function experimental_run group
make_dataset_iterator make_input_fn_iterator unwrap update_config_proto"""
_INSTEAD = {
    "experimental_run_v2": "it is `run` now",
    "experimental_make_numpy_dataset": "it is `Dataset.from_tensor_slices` now",
    **dict.fromkeys(_OLDER.split(), "`import replicax.tf` adds TensorFlow's older methods"),
}


class Strategy(LayoutMethods):
    """A way to spread a computation over devices.

    Write what one replica does as a function and give it to `run`; make variables inside of `scope`; spread the
    input with `experimental_distribute_dataset`; put results together with `reduce` and `gather`.

    Use one of the strategies, such as `MirroredStrategy`. The methods are those of `tf.distribute.Strategy`.

    >>> import replicax as rx
    >>> isinstance(rx.MirroredStrategy(["GPU:0", "GPU:1"]), rx.Strategy)
    True
    """

    _extended: StrategyExtended

    def __init__(self, extended: StrategyExtended):
        self._extended = extended

    def __getattr__(self, name: str) -> NoReturn:
        hint = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    @property
    def extended(self) -> StrategyExtended:
        """The lower-level methods.

        >>> import replicax as rx
        >>> rx.MirroredStrategy(["GPU:0", "GPU:1"]).extended.worker_devices
        ('/job:localhost/replica:0/task:0/device:GPU:0', '/job:localhost/replica:0/task:0/device:GPU:1')
        """
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas, on all workers together.

        >>> import replicax as rx
        >>> rx.MirroredStrategy(["GPU:0", "GPU:1"]).num_replicas_in_sync
        2
        """
        return 1 if (mesh := self._extended._mesh) is None else mesh.size

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the cluster, None on one machine.

        >>> import replicax as rx
        >>> rx.MirroredStrategy(["GPU:0", "GPU:1"]).cluster_resolver is None
        True
        """
        return self._extended._cluster_resolver

    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """Returns a context manager in which this strategy is current, in cross-replica context.

        Variables made in it are the strategy's. It may be nested in itself; each `with` needs a `scope()` of its own.

        Raises:
            RuntimeError: inside of another strategy's scope, or of `run`.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> with strategy.scope():
        ...     v = rx.Variable(1.0)
        >>> v.distribute_strategy is strategy, len(v.values)
        (True, 2)
        """
        return Scope(self, self._extended)

    def _own_scope(self) -> contextlib.AbstractContextManager[object]:
        """Returns the context that the methods below run in: the scope, if a subclass overrides `scope`."""
        return contextlib.nullcontext() if type(self).scope is Strategy.scope else self.scope()

    @tracebacks.boundary
    def run(
        self,
        fn: Callable[..., Tree],
        args: Sequence[Tree] = (),
        kwargs: dict[str, Tree] | None = None,
        options: RunOptions | None = None,
    ) -> Tree:
        """Calls `fn` on every replica.

        Inside of a `function` or `jax.jit` the replicas are compiled, `fn` being traced once whatever their number, and
        once for each shape where the components of an argument differ in shape; otherwise they run eagerly, one thread
        each, in a fixed order. A `function` given as `fn` is compiled.

        Args:
            fn: the replica function. In it, `get_replica_context()` tells who the replica is.
            args, kwargs: its arguments. Of a `PerReplica` value anywhere in them it gets the replica's component;
                everything else, variables included, as it is.
            options: accepted for compatibility.

        Returns:
            The replicas' results, put together: leaves are `PerReplica`, unless every replica returned the very
            same object, which comes back bare.

        Raises:
            RuntimeError: not in cross-replica context, the replicas did not make the same calls, or `fn` raised
                StopIteration where no dataset ended.
            ValueError: `args` is no list or tuple.
            AssertionError: the replicas returned different structures.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group * 10)
        PerReplica:{
          0: Array(0, dtype=int32),
          1: Array(10, dtype=int32)
        }
        """
        del options
        if not isinstance(args, (list, tuple)):
            raise ValueError(
                f"positional args must be a list or tuple, got {type(args)}. For one argument, write args=(x,)."
            )
        context.require_cross_replica(self)
        compiled = fn if is_function(fn) else None
        own = fn if compiled is None or self.num_replicas_in_sync == 1 else compiled._of_replicas
        try:
            with self._own_scope():
                if current.autograph:
                    own = autograph_switch.converted(own)
                result = self._extended._run(own, tuple(args), kwargs or {})
                return result if compiled is None else calls_of(compiled).code.result_of(result)
        except StopIteration as error:
            calls.refuse_stop(error, "The replica function", fn)
            raise

    @tracebacks.boundary
    def reduce(self, reduce_op: ReduceOp | str, value: Tree, axis: int | tuple[int, ...] | None) -> Tree:
        """Returns the sum or the mean of a per-replica value, as a plain array.

        Args:
            reduce_op: `ReduceOp` or its name in any case.
            value: a `PerReplica` value, or a nest of them, in which None stays None. The mean of a mirrored variable is
                the variable, since its copies are equal; of one with `copies_may_differ=True` it is the mean of them.
            axis: None to combine elementwise across replicas only. An int or a tuple of them to reduce each component
                along it first: components may then differ in size, and the mean weighs every element equally.

        Returns:
            The sum in the components' dtype. The mean of integers is floating point.

        Raises:
            RuntimeError: in replica context.
            ValueError: SUM of a value that is not distributed, or an axis that the components do not have.
            TypeError: `axis` is not None, an int or a tuple of ints.
            InvalidArgumentError: the components differ in shape or dtype, or are not numeric.

        >>> import numpy as np, replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> x = strategy.experimental_distribute_values_from_function(
        ...     lambda c: np.arange(2.0, dtype=np.float32) + c.replica_id_in_sync_group)
        >>> strategy.reduce("SUM", x, axis=None).tolist(), float(strategy.reduce("MEAN", x, axis=0))
        ([1.0, 3.0], 1.0)
        """
        context.require_cross_replica(self)
        check_reduction_axis(axis)
        op = as_reduce_op(reduce_op)
        if axis is None and (marks := marks_of(value)):
            warn_of_reduction(op, marks)
        return _followed("reduce", value, self._extended._reduce(op, value, axis))

    @tracebacks.boundary
    def gather(self, value: Tree, axis: int) -> Tree:
        """Returns the components of a per-replica value, concatenated along `axis`, as a plain array.

        Args:
            value: a `PerReplica` value or a nest of them, with components of at least one dimension, which may differ
                in size along `axis`. A value that is not distributed is returned as it is, and None in a nest too.
            axis: negative ones count from the end.

        Raises:
            RuntimeError: in replica context; use `ReplicaContext.all_gather` there.
            InvalidArgumentError: scalars, an axis out of range, or components that do not fit.
            TypeError: components that are not floating or integer, or an axis that is no int.
            NotImplementedError: `IndexedSlices` that are not distributed.

        >>> import numpy as np, replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> rows = lambda context: np.full(context.replica_id_in_sync_group + 1, 5)  # one, and two
        >>> parts = strategy.experimental_distribute_values_from_function(rows)
        >>> strategy.gather(parts, axis=0).tolist()
        [5, 5, 5]
        """
        context.require_cross_replica(self, _GATHER_NEEDED)
        axis = as_integer("axis", axis)
        with self._own_scope(), progress("gathering values") if _takes_long(value) else contextlib.nullcontext():
            gathered = nest.map_values(lambda leaf: self._extended._gather(dense(leaf, "gather"), axis), value)
        return _followed("gather", value, gathered)

    def experimental_local_results(self, value: Tree) -> tuple[Tree, ...]:
        """Returns the components of this process's replicas, as a tuple.

        Of a nest: a tuple with one nest for each replica. Of a value that is not distributed: the one-tuple of it.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> result = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
        >>> [int(part) for part in strategy.experimental_local_results(result)]
        [0, 1]
        """
        return _followed("experimental_local_results", value, self._extended._local_results(value))

    @tracebacks.boundary
    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Tree]) -> Tree:
        """Returns a per-replica value, made by calling `value_fn` for each replica.

        Args:
            value_fn: gets a `ValueContext`; what it returns is stored as it is.

        Returns:
            `PerReplica`, or the nest that `value_fn` returns with `PerReplica` leaves.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group * 10)
        PerReplica:{
          0: 0,
          1: 10
        }
        """
        return self._extended._values_from_function(value_fn)

    @tracebacks.boundary
    def experimental_distribute_dataset(self, dataset: object, options: InputOptions | None = None) -> Tree:
        """Splits each batch of a dataset among the replicas.

        Args:
            dataset: a `replicax.data.Dataset`, or anything that yields batches anew each time it is iterated:
                a list, a Grain dataset, a PyTorch DataLoader, a tf.data.Dataset.
            options: see `InputOptions`.

        Returns:
            An iterable of elements with `PerReplica` leaves. A batch of n goes to r replicas in parts of ceil(n/r) in
            order, until none is left; the last parts may be smaller or empty.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> batches = strategy.experimental_distribute_dataset(rx.data.Dataset.range(6).batch(4))
        >>> [[part.tolist() for part in batch.values] for batch in batches]
        [[[0, 1], [2, 3]], [[4], [5]]]
        """
        with self._own_scope():
            return self._extended._distribute_dataset(dataset, as_input_options(options))

    @tracebacks.boundary
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], object], options: InputOptions | None = None
    ) -> Tree:
        """Distributes a dataset whose batches are the replicas' parts already.

        Args:
            dataset_fn: called at once with an `InputContext`, once for each worker; returns a dataset of which
                consecutive batches go to the replicas in turn.
            options: see `InputOptions`.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> def dataset_fn(context):
        ...     return rx.data.Dataset.range(8).batch(context.get_per_replica_batch_size(4))
        >>> batches = strategy.distribute_datasets_from_function(dataset_fn)
        >>> [[part.tolist() for part in batch.values] for batch in batches]
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        """
        with self._own_scope():
            return self._extended._datasets_from_function(dataset_fn, as_input_options(options))

    @tracebacks.boundary
    def benchmark(self, step: Callable[..., Tree], batch: Tree, rounds: int = 20, steps: int = 5) -> Benchmark:
        """Measures where the time of a compiled step goes, and what it holds in memory.

        The step is run as users run it, and with its communication taken out, in rounds in which the two take turns.
        The variables' values are set back again and again, and stay as they are. The times in the figures'
        `seconds` are medians over the rounds:

        - "step": a step among steps that follow each other, all of one batch that is there already.
        - "communication": what such a step takes longer than one without communication, in which each replica takes its
          own value for what others would send. Communication that is hidden behind other work does not count.
        - "compute": the rest of the step.
        - "input": what a step takes longer where each of them takes a fresh element of the dataset.
        - "dispatch": how long a call takes to return, with devices that have nothing else to do.

        In a job of several workers each of them calls it in the same way, and has its own figures.

        Args:
            step: a `function`, or a function that is then compiled as one. It runs some `2 * rounds * (steps + 2)`
                times, and `rounds * (steps + 1)` times more with a dataset.
            batch: the arguments in a tuple, or the only one. A dataset or an iterator stands for the elements that it
                gives: dataset elements are used from its start on, those of an iterator go back to it at the end. An
                iterator in a tuple is passed to the step, which takes one element a call.
            rounds: how many rounds are measured, after one that is not.
            steps: how many steps a round has.

        Returns:
            A `Benchmark`: `print` shows a table, `as_dict` has the numbers.

        Raises:
            RuntimeError: the step has no program of its own for these arguments: it makes variables on its first call,
                loops over a dataset, or can take uneven parts only eagerly; this is not cross-replica context; or
                functions run eagerly.
            TypeError: `step` is no function.
            ValueError: `rounds` or `steps` is not a positive integer, an iterator or a dataset has too few elements, a
                call of `step` takes several steps, it takes elements of iterators that it is not given, or its
                replicas are another strategy's.

        >>> import jax.numpy as jnp, replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> with strategy.scope():
        ...     total = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)
        >>> @rx.function
        ... def step(x):
        ...     strategy.run(lambda x: total.assign_add(jnp.sum(x), read_value=False), args=(x,))
        >>> batch = strategy.experimental_distribute_values_from_function(lambda context: jnp.ones(3))
        >>> figures = strategy.benchmark(step, batch, rounds=2, steps=2)
        >>> figures.collectives, figures.bytes_per_device["variables"], float(total)
        ([{'kind': 'all-reduce', 'arrays': 1, 'bytes': 4}], 4, 0.0)
        >>> print(figures)
        step, MirroredStrategy
                              2 replicas
        a step                ...
        """
        figures: Benchmark = tools.find("benchmark")(self, step, batch, rounds, steps)
        return figures

    @tracebacks.boundary
    def visualize(self, value: Tree) -> Placement:
        """Shows which part of which array lies on which device, and the bytes on each device.

        Nothing is copied or computed. In a job of several workers each of them sees its own devices, and the bytes of
        all.

        Args:
            value: an array, a `PerReplica` or `Mirrored` value, a variable, a model of Flax NNX or Keras, an optimizer,
                or a structure of these.

        Returns:
            A `Placement`: `print` shows a table, a notebook shows a picture, `save` writes one to a file.

        Raises:
            RuntimeError: not in cross-replica context.
            InvalidArgumentError: a ValueError. There is no array in the value, or one that is traced or deleted.

        >>> import jax.numpy as jnp, replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"], shard_variables=lambda shape, dtype: [2, 1])
        >>> with strategy.scope():
        ...     table = rx.Variable(jnp.zeros((1000, 8)), name="table")
        >>> placement = strategy.visualize(table)
        >>> print(placement)
        MirroredStrategy, 2 replicas
        <BLANKLINE>
                                 GPU:0      GPU:1
                                 replica 0  replica 1
        ----------------------------------------------
        table  float32[1000, 8]  [0:500]    [500:1000]
        ----------------------------------------------
        bytes                    15.62 KiB  15.62 KiB
        <BLANKLINE>
        31.25 KiB on all devices together
        >>> placement["table"].parts["GPU:1"].index, placement.bytes
        ((slice(500, 1000, None), slice(0, 8, None)), {'GPU:0': 16000, 'GPU:1': 16000})
        """
        placement: Placement = tools.find("visualize")(self, value)
        return placement

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._extended._device_text()})"

    def __copy__(self) -> NoReturn:
        raise RuntimeError("Must only deepcopy DistributionStrategy.")

    def __deepcopy__(self, memo: dict[int, object]) -> Strategy:
        clone = type(self).__new__(type(self))
        clone._extended = self._extended._copied_for(clone)
        memo[id(self)] = clone
        return clone

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot pickle {type(self).__name__!r}: it stands for devices of this process")


def _takes_long(value: Tree) -> bool:
    """Returns whether a gather may be worth a display, which costs as much as to gather a small value."""
    return is_wanted() and sum(getattr(array, "nbytes", 0) for array in arrays_of(value)) >= _LARGE


def _followed(name: str, value: Tree, result: _T) -> _T:
    """Returns `result`, and tells gradient tapes that they have not seen how it was made of `value`."""
    if current.tapes:
        active_tapes.lost(
            f"A gradient is asked for through `strategy.{name}`, called eagerly with values that replicas of several "
            "devices computed, of which a GradientTape sees nothing. Call it, with the tape, in a `replicax.function`.",
            arrays_of(value),
            arrays_of(result),
        )
    return result
