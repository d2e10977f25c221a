"""`StrategyExtended`: the methods of a strategy for those who write optimizers and the like.

The public methods come first, then those that each kind of strategy implements: in `replicated` for replicas on a mesh
of devices, in `single_replica` for one replica whose values are plain.
"""

from __future__ import annotations

import abc
import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Self

from jax.sharding import PartitionSpec

from replicax._base.messages import received
from replicax._base.types import (
    Args,
    CommunicationOptions,
    InputContext,
    InputOptions,
    Kwargs,
    ReduceOp,
    StepContext,
    Tree,
    ValueContext,
    as_options,
    as_reduce_op,
)
from replicax._collectives.reducer import Reducer
from replicax._data.dataset import Dataset
from replicax._engine import modes
from replicax._input.agreement import Worker
from replicax._input.distributed_dataset import DistributedDataset
from replicax._input.from_function import DistributedDatasetsFromFunction
from replicax._input.placement import Placement
from replicax._strategies import new_variables
from replicax._strategies.sharding_rules import ShardingRules
from replicax._tracing import autograph_switch, lost_values
from replicax._tracing import context as _context
from replicax._values import Kind, ReplicaMesh
from replicax._variables.homes import Divided
from replicax._variables.variable import Variable

if TYPE_CHECKING:
    from replicax._cluster.resolver import ClusterResolver


class StrategyExtended(abc.ABC):
    """The lower-level methods of a strategy, for those who write optimizers and the like.

    Get it as `strategy.extended`.

    >>> import replicax as rx
    >>> extended = rx.MirroredStrategy(["GPU:0", "GPU:1"]).extended
    >>> isinstance(extended, rx.StrategyExtended), extended.should_checkpoint
    (True, True)
    """

    _mesh: ReplicaMesh  # of the replicas' devices
    _placement: Placement  # of input on them
    _reducer: Reducer | None = None  # of values of its replicas, if they are on a mesh
    _rules: ShardingRules | None = None  # how variables are split over the devices of each replica
    _worker = Worker()  # which of the processes that share the replicas this is
    _options = CommunicationOptions()  # of collectives where none are given
    _cluster_resolver: ClusterResolver | None = None
    _between_graph = False  # whether the strategy is one of several processes
    _static_shapes = False  # whether all replicas need the same shapes
    _shards_optimizer_state = False  # whether `Optimizer` keeps a part of its state on each replica
    _variables_live_once = False  # whether a variable is one thing for all replicas, with no component for each

    def __init__(self, container_strategy: _context.StrategyLike):
        self._container = container_strategy

    # Devices, and the role of this process.

    @property
    def worker_devices(self) -> Sequence[str]:
        """The full names of the replicas' devices.

        >>> import replicax as rx
        >>> rx.OneDeviceStrategy("GPU:1").extended.worker_devices
        ('/job:localhost/replica:0/task:0/device:GPU:1',)
        """
        return self._mesh.device_names

    @property
    def parameter_devices(self) -> Sequence[str]:
        """The full names of the devices that hold variables.

        >>> import replicax as rx
        >>> rx.OneDeviceStrategy("GPU:1").extended.parameter_devices
        ('/job:localhost/replica:0/task:0/device:GPU:1',)
        """
        return self._mesh.device_names

    @property
    def experimental_require_static_shapes(self) -> bool:
        """True if all replicas need the same shapes.

        >>> import replicax as rx
        >>> rx.MirroredStrategy(["GPU:0"]).extended.experimental_require_static_shapes
        False
        """
        return self._static_shapes

    @property
    def experimental_between_graph(self) -> bool:
        """True if each process runs the replicas on its own devices, False if one process runs all of them.

        >>> import replicax as rx
        >>> rx.MirroredStrategy(["GPU:0"]).extended.experimental_between_graph
        False
        """
        return self._between_graph

    @property
    def experimental_should_init(self) -> bool:
        """True if this process gives variables their initial values.

        >>> import replicax as rx
        >>> rx.MirroredStrategy(["GPU:0"]).extended.experimental_should_init
        True
        """
        return True

    @property
    def should_checkpoint(self) -> bool:
        """True if this process is the one to write checkpoints: the only one, the chief, or worker 0.

        >>> import replicax as rx
        >>> rx.MirroredStrategy(["GPU:0"]).extended.should_checkpoint
        True
        """
        return self._worker.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """True if this process is the one to write summaries.

        >>> import replicax as rx
        >>> rx.MirroredStrategy(["GPU:0"]).extended.should_save_summary
        True
        """
        return self._worker.rank == 0

    # Running, reducing.

    def call_for_each_replica(
        self, fn: Callable[..., Tree], args: Sequence[Tree] = (), kwargs: dict[str, Tree] | None = None
    ) -> Tree:
        """Calls `Strategy.run`, of which this is the older name.

        >>> import replicax as rx
        >>> extended = rx.MirroredStrategy(["GPU:0", "GPU:1"]).extended
        >>> extended.call_for_each_replica(lambda x: x + 1, (rx.PerReplica([1, 2]),)).values
        (2, 3)
        """
        return self._container.run(fn, tuple(args), kwargs)

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Tree, destinations: object, options: CommunicationOptions | None = None
    ) -> Tree:
        """Returns the sum or mean of a per-replica value, placed at the destinations.

        Args:
            reduce_op: `ReduceOp` or its name in any case.
            value: a `PerReplica` value.
            destinations: a variable or a distributed value, for a `Mirrored` result on its devices; a device's name or
                an array, for a plain one there.
            options: see `CommunicationOptions`.

        Raises:
            RuntimeError: in replica context.
            ValueError: SUM of a value that is not distributed, or no destinations.

        >>> import numpy as np, replicax as rx
        >>> value = rx.PerReplica([np.float32(1), np.float32(5)])
        >>> rx.MirroredStrategy(["GPU:0", "GPU:1"]).extended.reduce_to("MEAN", value, "CPU:0").item()
        3.0
        """
        return self.batch_reduce_to(reduce_op, [(value, destinations)], options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Tree, object]],
        options: CommunicationOptions | None = None,
    ) -> list[Tree]:
        """Reduces several (value, destinations) pairs in one collective, and returns a list of the results.

        >>> import numpy as np, replicax as rx
        >>> value = rx.PerReplica([np.float32(1), np.float32(5)])
        >>> extended = rx.MirroredStrategy(["GPU:0", "GPU:1"]).extended
        >>> [total.item() for total in extended.batch_reduce_to("SUM", [(value, "GPU:0"), (value, "GPU:1")])]
        [6.0, 6.0]
        """
        _context.require_cross_replica(self._container)
        return self._batch_reduce(as_reduce_op(reduce_op), value_destination_pairs, as_options(options, self._options))

    def broadcast_to(self, tensor: Tree, destinations: object) -> Tree:
        """Returns a copy of `tensor` at the destinations (see `reduce_to`).

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> with strategy.scope():
        ...     v = rx.Variable(1.0)
        >>> [copy.item() for copy in strategy.extended.broadcast_to(3.0, v).values]
        [3.0, 3.0]
        """
        _context.require_cross_replica(self._container)
        return self._broadcast(tensor, destinations)

    # Variables.

    def update(
        self,
        var: Tree,
        fn: Callable[..., Tree],
        args: Sequence[Tree] = (),
        kwargs: dict[str, Tree] | None = None,
        group: bool = True,
    ) -> Tree:
        """Calls `fn(component, *args, **kwargs)` for each component of a variable, on its device.

        Distributed values in the arguments are replaced by the component for that device. Called in replica context,
        it is a meeting point and then does the same.

        Args:
            var: a variable of this strategy.
            fn: typically assigns the component; it runs in cross-replica context.
            args, kwargs: its further arguments.
            group: False to get a tuple with each component's result.

        Returns:
            The results put together: `Mirrored` arrays, or what all calls returned alike.

        Raises:
            AssertionError: `var` is no variable of this strategy.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> with strategy.scope():
        ...     v = rx.Variable(1.0)
        >>> _ = strategy.extended.update(v, lambda copy, delta: copy.assign_add(delta), args=(2.0,))
        >>> float(v)
        3.0
        """
        replica_context = _context.get_replica_context()
        if replica_context is not None and replica_context.strategy is self._container:
            return replica_context.merge_call(
                lambda strategy, *a, **k: self.update(var, fn, a, k, group), args=tuple(args), kwargs=kwargs
            )
        if not isinstance(args, (list, tuple)):
            raise TypeError(f"Value after * must be an iterable, not {type(args).__name__}")
        _context.require_cross_replica(self._container)
        with _context.entered(self._container, None):
            return self._update(var, fn, tuple(args), kwargs or {}, group)

    def update_non_slot(
        self,
        colocate_with: Tree,
        fn: Callable[..., Tree],
        args: Sequence[Tree] = (),
        kwargs: dict[str, Tree] | None = None,
        group: bool = True,
    ) -> Tree:
        """Calls `fn(*args, **kwargs)` once, in cross-replica context.

        >>> import replicax as rx
        >>> extended = rx.MirroredStrategy(["GPU:0", "GPU:1"]).extended
        >>> extended.update_non_slot(extended.non_slot_devices([]), lambda x: x + 1, (1,))
        2
        """
        _context.require_cross_replica(self._container)
        with _context.entered(self._container, None):
            return autograph_switch.converted(fn)(*args, **(kwargs or {}))

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Sequence[str]:
        """Returns the devices on which an optimizer keeps state that belongs to no single variable.

        >>> import replicax as rx
        >>> rx.OneDeviceStrategy("GPU:1").extended.non_slot_devices([])
        ('/job:localhost/replica:0/task:0/device:GPU:1',)
        """
        return self.parameter_devices

    def variable_created_in_scope(self, v: Tree) -> bool:
        """Returns whether the variable, or the one that it is a component of, was made in this strategy's scope.

        Raises:
            AttributeError: `v` is no variable.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> strategy.extended.variable_created_in_scope(rx.Variable(1.0))
        False
        """
        if not isinstance(v, Variable):
            raise AttributeError(f"{v!r} is no variable and has no strategy.")
        strategy = lost_values.container_of(v).distribute_strategy
        return (_context.default_strategy() if strategy is None else strategy) is self._container

    def value_container(self, value: Tree) -> Tree:
        """Returns the distributed variable that a component belongs to; anything else as it is.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> with strategy.scope():
        ...     v = rx.Variable(1.0)
        >>> strategy.extended.value_container(v.values[1]) is v
        True
        """
        return lost_values.container_of(value)

    def read_var(self, v: Tree) -> Tree:
        """Returns the variable's value.

        Raises:
            TypeError: `v` is no variable.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> with strategy.scope():
        ...     strategy.extended.read_var(rx.Variable(2.0)).item()
        2.0
        """
        if not hasattr(v, "read_value"):
            raise TypeError(f"`read_var` takes a variable, got {received(v)}.")
        return v.read_value()

    def colocate_vars_with(self, colocate_with_variable: Variable) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager, used in scope, under which new variables live on the devices of this one.

        Raises:
            ValueError: it is no variable of this strategy.
            RuntimeError: outside of the scope.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> with strategy.scope():
        ...     v = rx.Variable(1.0)
        ...     with strategy.extended.colocate_vars_with(v):
        ...         slot = rx.Variable(0.0)
        >>> slot.device == v.device
        True
        """
        return new_variables.colocated(self._container, self.variable_created_in_scope, colocate_with_variable)

    def _colocate_state(self, variables: Tree) -> contextlib.AbstractContextManager[None]:
        """Return a context in which new variables are an optimizer's state of a nest of variables and lie with them."""
        return contextlib.nullcontext()

    @property
    def _division(self) -> Divided | None:
        """The function `_divided`; None if the strategy divides no variables."""
        return None

    def _divided(self, kind: Kind, layout: PartitionSpec | None) -> PartitionSpec | None:
        """Returns the layout of a variable's leaf with that by which each replica has a part, if it is to have one."""
        return layout

    # Input.

    def experimental_make_numpy_dataset(self, numpy_input: Tree, session: object = None) -> Dataset:
        """Returns a dataset over the rows of numpy arrays.

        >>> import numpy as np, replicax as rx
        >>> extended = rx.MirroredStrategy(["GPU:0", "GPU:1"]).extended
        >>> dataset = extended.experimental_make_numpy_dataset(np.array([1.0, 2.0]))
        >>> [float(x) for x in dataset]
        [1.0, 2.0]
        """
        return Dataset.from_tensor_slices(numpy_input)

    def experimental_run_steps_on_iterator(
        self, fn: Callable[..., Tree], iterator: Iterator[Tree], iterations: int = 1, initial_loop_values: Tree = None
    ) -> Tree:
        """Calls `fn(context, inputs)` for each of `iterations` elements of the iterator; returns the context.

        `context.set_last_step_output(name, output, reduce_op=None)` keeps an output of the last step.

        >>> import replicax as rx
        >>> extended = rx.OneDeviceStrategy("cpu:0").extended
        >>> def step(context, x):
        ...     context.set_last_step_output("x", int(x))
        >>> context = extended.experimental_run_steps_on_iterator(step, iter(rx.data.Dataset.range(5)), iterations=3)
        >>> context.last_step_outputs
        {'x': 2}
        """
        context = StepContext()
        for _ in range(iterations):
            fn(context, next(iterator))
        return context

    # Implemented or overridden by each kind of strategy, most of it for the method of `Strategy` of that name.

    def _copied_for(self, strategy: _context.StrategyLike) -> Self:
        """Returns a copy of these methods for a copy of the strategy."""
        clone = copy.copy(self)
        clone._container = strategy
        return clone

    def _device_text(self) -> str:
        """Returns the text in the parentheses of the strategy's `repr`."""
        return repr([name.rpartition("device:")[2] for name in self._mesh.device_names])

    def _scope_context(self) -> contextlib.AbstractContextManager[object]:
        return _context.entered(self._container, None)

    def _distribute_dataset(self, dataset: object, options: InputOptions) -> Tree:
        count = len(self._mesh.local_ids)
        return DistributedDataset(dataset, count, self._placement.place, options, worker=self._worker)

    def _datasets_from_function(self, dataset_fn: Callable[[InputContext], object], options: InputOptions) -> Tree:
        count, context = len(self._mesh.local_ids), InputContext(*self._worker, self._mesh.size)
        return DistributedDatasetsFromFunction(dataset_fn, count, self._placement.place, options, context, self._worker)

    def _create_variable(self, **kwargs: Tree) -> Variable:
        """Makes a variable of the strategy's kind; inside of `run`, one for all replicas."""
        modes.note_creation()
        return new_variables.create(self._container, self._new_variable, kwargs)

    @abc.abstractmethod
    def _new_variable(self, **kwargs: Tree) -> Variable:
        """Makes a variable, in cross-replica context."""

    @abc.abstractmethod
    def _run(self, fn: Callable[..., Tree], args: Args, kwargs: Kwargs) -> Tree: ...
    @abc.abstractmethod
    def _reduce(self, op: ReduceOp, value: Tree, axis: int | tuple[int, ...] | None) -> Tree: ...
    @abc.abstractmethod
    def _gather(self, value: Tree, axis: int) -> Tree: ...
    @abc.abstractmethod
    def _batch_reduce(
        self, op: ReduceOp, pairs: Sequence[tuple[Tree, object]], options: CommunicationOptions
    ) -> list[Tree]: ...
    @abc.abstractmethod
    def _broadcast(self, tensor: Tree, destinations: object) -> Tree: ...
    @abc.abstractmethod
    def _update(self, var: Tree, fn: Callable[..., Tree], args: Args, kwargs: Kwargs, group: bool) -> Tree: ...
    @abc.abstractmethod
    def _local_results(self, value: Tree) -> tuple[Tree, ...]: ...
    @abc.abstractmethod
    def _values_from_function(self, value_fn: Callable[[ValueContext], Tree]) -> Tree: ...
