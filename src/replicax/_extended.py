"""`StrategyExtended`: the engine behind every strategy.

A strategy is a mesh of devices, one a replica, a kind of variable, and a way to combine values; `_run` picks the way
to run: compiled where the program is being traced, in lockstep otherwise. The strategies in `_mirrored`, `_one_device`
and `_default` say where they differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from replicax import (
    _compiled_runs,
    _context,
    _conversion,
    _creation,
    _data,
    _distributed_variables,
    _function,
    _input,
    _levels,
    _lockstep,
    _nest,
    _spmd,
    _variables,
)
from replicax._cross_device_ops import CrossDeviceOps
from replicax._placement import Placement
from replicax._reducer import Reducer
from replicax._types import (
    CommunicationOptions,
    InputContext,
    InputOptions,
    ReduceOp,
    ValueContext,
    VariableSynchronization,
    as_aggregation,
    as_options,
    as_reduce_op,
    as_synchronization,
)
from replicax._values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReplicaMesh,
    adopted,
    is_array,
    own_component,
    select,
)

if TYPE_CHECKING:
    from replicax._strategy import Strategy


class StrategyExtended:
    """The lower-level methods of a strategy, for those who write optimizers and the like.

    Get it as `strategy.extended`.
    """

    _mesh: ReplicaMesh
    _reducer: Reducer
    _placement: Placement
    _cluster_resolver: Any = None
    _options = CommunicationOptions()  # of collectives where none are given
    _shards_optimizer_state = False  # whether `Optimizer` keeps a part of its state on each replica
    _variables_live_once = False  # whether a variable is one thing for all replicas, with no component for each

    def __init__(self, container_strategy: Strategy):
        self._container = container_strategy

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._mesh.size

    def _copied_for(self, strategy: Strategy) -> StrategyExtended:
        clone = type(self).__new__(type(self))
        clone.__dict__.update(self.__dict__)
        clone._container = strategy
        return clone

    def _device_text(self) -> str:
        return repr([name.rpartition("device:")[2] for name in self._mesh.device_names])

    def _scope_context(self) -> Any:
        return _context.entered(self._container, None)

    # What a strategy is made of.

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The full names of the replicas' devices."""
        return self._mesh.device_names

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The full names of the devices that hold variables."""
        return self._mesh.device_names

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether all replicas need the same shapes."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """False: one process runs all replicas."""
        return False

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process gives variables their initial values."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process is the one to write checkpoints: the only one, the chief, or worker 0."""
        return self._placement.worker.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this process is the one to write summaries."""
        return self._placement.worker.rank == 0

    def _get_cross_device_ops(self, value: Any = None) -> CrossDeviceOps:
        return self._reducer.ops

    def _replica_devices(self, replica_context: Any) -> Any:
        names = self._mesh.device_names
        if isinstance(replica_context, _lockstep.LockstepContext):
            return [[names[self._mesh.local_ids.index(replica_context._replica.id)]]]
        return [list(names)]

    # Running.

    def call_for_each_replica(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict | None = None):
        """The older name of `Strategy.run`."""
        return self._container.run(fn, tuple(args), kwargs)

    def _run(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        strategy, frame = self._container, _levels.frame()
        for leaf in _nest.leaves((args, kwargs)):
            if not isinstance(leaf, PerReplica):
                continue
            if leaf.count > self._mesh.size or (leaf.mesh is None and leaf.count != len(self._mesh.local_ids)):
                raise ValueError(
                    f"A PerReplica value with {leaf.count} components is passed to {strategy!r}, which has "
                    f"{self._mesh.size} replicas. Values belong to the strategy that made them."
                )
        args, kwargs = _nest.map_structure(lambda leaf: adopted(leaf, self._mesh), (args, kwargs))
        with _context.entered(strategy, None):
            if frame.local and frame.mesh is self._mesh and isinstance(frame, _levels.Level):
                return self._run_inline(fn, args, kwargs)
            if _levels.is_tracing():
                return _spmd.run(strategy, self._reducer, fn, args, kwargs)
            compile_it = _function.is_function(fn) and not _function.functions_run_eagerly()
            if (compile_it or _function.host_driven()) and not isinstance(frame, _levels.ReplicaFrame):
                return _compiled_runs.run_compiled(strategy, fn, args, kwargs)
            return _lockstep.run(strategy, self._reducer, fn, args, kwargs)

    def _run_inline(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """A run inside of a merge function of compiled replicas: goes on as the replica."""
        level = _levels.frame()
        assert isinstance(level, _levels.Level)
        replica_context = _spmd.SpmdContext(self._container, self._reducer, level, _spmd.context_outer(level))
        result: list[Any] = []

        def inside(leaf: Any) -> Any:
            return leaf._local if isinstance(leaf, (PerReplica, Mirrored)) and leaf._local is not None else leaf

        with _context.entered(self._container, replica_context):
            result.append(fn(*_nest.map_structure(inside, args), **_nest.map_structure(inside, kwargs)))
        return _nest.map_structure(
            lambda leaf: PerReplica.of_local(leaf, self._mesh) if replica_context._is_own(leaf) else leaf, result[0]
        )

    # Reducing and gathering.

    def _reduce(self, op: ReduceOp, value: Any, axis: Any) -> Any:
        with _context.entered(self._container, None):
            return self._reducer.reduce(op, value, axis)

    def _gather(self, value: Any, axis: int) -> Any:
        with _context.entered(self._container, None):
            return self._reducer.gather(value, axis)

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """The sum or mean of a per-replica value, left where `destinations` is.

        Args:
            reduce_op: `ReduceOp` or its name in any case.
            value: a `PerReplica` value.
            destinations: a variable or a distributed value, for a `Mirrored` result on its devices; a device's name or
                an array, for a plain one there.
            options: see `CommunicationOptions`.

        Raises:
            RuntimeError: in replica context.
            ValueError: SUM of a value that is not distributed, or no destinations.
        """
        return self.batch_reduce_to(reduce_op, [(value, destinations)], options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """`reduce_to` of several (value, destinations) pairs, in one collective; the results in their order."""
        _context.require_cross_replica(self._container)
        op, options = as_reduce_op(reduce_op), as_options(options, self._options)
        with _context.entered(self._container, None):
            return self._reducer.batch_reduce(op, value_destination_pairs, options)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """A copy of `tensor` at the destinations (see `reduce_to`)."""
        _context.require_cross_replica(self._container)
        return self._reducer.ops.broadcast(tensor, destinations)

    # Variables.

    def _create_variable(self, **kwargs: Any) -> Any:
        """A variable of the strategy's kind; inside of `run`, one for all replicas."""
        _function.note_creation()
        replica_context = _context.get_replica_context()
        if replica_context is not None and replica_context.strategy is self._container:
            tag = ("the creation of a variable", id(self._container))
            return replica_context._merge(self._create_merged, (_distributed_variables._Box(kwargs),), {}, tag)
        return self._new_variable(**kwargs)

    def _create_merged(self, strategy: Strategy, boxes: Any) -> Any:
        all_kwargs = [box.content for box in (boxes.values if isinstance(boxes, PerReplica) else (boxes,))]
        for index, other in enumerate(all_kwargs):
            if other["name"] != all_kwargs[0]["name"]:
                raise RuntimeError(f"Tried to create variable {other['name']} with mismatching name on device {index}")
        return self._new_variable(**all_kwargs[0])

    def _new_variable(self, **kwargs: Any) -> Any:
        name = kwargs["name"]
        synchronization = as_synchronization(kwargs["synchronization"], name)
        as_aggregation(kwargs["aggregation"], name)
        if synchronization is VariableSynchronization.NONE:
            raise ValueError(
                "`NONE` variable synchronization mode is not supported with tf.distribute strategy. Please change the "
                f"`synchronization` for variable: {name}"
            )
        on_read = synchronization is VariableSynchronization.ON_READ
        kind = _distributed_variables.SyncOnReadVariable if on_read else _distributed_variables.MirroredVariable
        variable = kind(strategy=self._container, reducer=self._reducer, **kwargs)
        if _creation.state.creators:
            for component in variable.values:
                suffix = f"/replica_{component._index}/" if component._index else ""
                make = _creation.through_creators(_returning(component), inside_scope=False)
                make(**{**kwargs, "name": (name or "Variable") + suffix})
        return variable

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
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

    def _update(self, var: Any, fn: Callable[..., Any], args: tuple, kwargs: dict, group: bool) -> Any:
        assert isinstance(var, _distributed_variables._Distributed) and var._strategy is self._container, (
            f"update takes a variable made in the strategy's scope, got {var!r}."
        )
        frame, mesh = _levels.frame(), self._mesh
        if frame.local and frame.mesh is mesh:
            args, kwargs = _nest.map_structure(own_component, args), _nest.map_structure(own_component, kwargs)
            result = _conversion.converted(fn)(var.values[0], *args, **kwargs)
            return _nest.map_structure(
                lambda leaf: Mirrored.of_local(leaf, mesh) if isinstance(leaf, jax.core.Tracer) else leaf, result
            )
        if _levels.is_tracing():

            def in_replica(*a: Any, **k: Any) -> Any:
                replica_context = _context.get_replica_context()
                assert replica_context is not None
                return replica_context.merge_call(lambda _, *b, **c: self._update(var, fn, b, c, True), a, k)

            return _spmd.run(self._container, self._reducer, in_replica, args, kwargs, alike=False)
        results = []
        for index, component in enumerate(var.values):
            with jax.default_device(mesh.local_devices[index]):
                results.append(fn(component, *select(index, args), **select(index, kwargs)))
        merged = _nest.merge(results, self._mirror_alike)
        return merged if group else self._local_results(merged)

    def _mirror_alike(self, values: Sequence[Any]) -> Any:
        if all(value is values[0] for value in values):
            return values[0]
        if all(is_array(value) for value in values):
            return Mirrored(values, self._mesh)
        return PerReplica(values, self._mesh)

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether the variable, or the one that it is a component of, was made in this strategy's scope."""
        return _levels.container_of(_checked_variable(v))._strategy is self._container

    def value_container(self, value: Any) -> Any:
        """The distributed variable that a component belongs to; anything else itself."""
        return _levels.container_of(value)

    def read_var(self, v: Any) -> Any:
        """The variable's value."""
        if not hasattr(v, "read_value"):
            raise TypeError(f"`read_var` takes a variable, got {v!r} of type {type(v).__name__}.")
        return v.read_value()

    def colocate_vars_with(self, colocate_with_variable: Any) -> contextlib.AbstractContextManager[None]:
        """A context manager, used in scope, under which new variables live on the devices of this one.

        Raises:
            ValueError: it is no variable of this strategy.
            RuntimeError: outside of the scope.
        """
        return self._colocated(colocate_with_variable)

    @contextlib.contextmanager
    def _colocated(self, variable: Any) -> Iterator[None]:
        if _context.get_strategy() is not self._container:
            raise RuntimeError(f'Need to be inside "with strategy.scope()" for {self._container!r}')
        if not (isinstance(variable, _variables.Variable) and self.variable_created_in_scope(variable)):
            raise ValueError(
                "`colocate_vars_with` must only be passed a variable created in this tf.distribute.Strategy.scope(), "
                f"not: {variable!r}"
            )
        yield

    def non_slot_devices(self, var_list: Sequence[Any]) -> Any:
        """Where an optimizer keeps what belongs to no single variable."""
        return self.parameter_devices

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(*args, **kwargs)` once, in cross-replica context."""
        _context.require_cross_replica(self._container)
        with _context.entered(self._container, None):
            return _conversion.converted(fn)(*args, **(kwargs or {}))

    # Values and input.

    def _local_results(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, DistributedValues):
            return value.values
        if not isinstance(value, (list, tuple, dict)):
            return (value,)
        return tuple(_nest.map_structure(_component_of(i), value) for i in range(len(self._mesh.local_ids)))

    def _values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        values = [value_fn(ValueContext(i, self._mesh.size)) for i in self._mesh.local_ids]
        return _nest.merge(values, lambda parts: PerReplica(parts, self._mesh))

    def _distribute_dataset(self, dataset: Any, options: InputOptions) -> Any:
        placement = self._placement
        return _input.DistributedDataset(
            dataset, len(self._mesh.local_ids), placement.place, options, worker=placement.worker
        )

    def _datasets_from_function(self, dataset_fn: Callable[[Any], Any], options: InputOptions) -> Any:
        placement = self._placement
        context = InputContext(*placement.worker, self._mesh.size)
        return _input.DistributedDatasetsFromFunction(
            dataset_fn, len(self._mesh.local_ids), placement.place, options, context, placement.worker
        )

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Any:
        """A dataset over the rows of numpy arrays."""
        return _data.Dataset.from_tensor_slices(numpy_input)

    def experimental_run_steps_on_iterator(
        self, fn: Callable[..., Any], iterator: Any, iterations: int = 1, initial_loop_values: Any = None
    ) -> Any:
        """Calls `fn(context, inputs)` for so many elements of the iterator; returns the context.

        `context.set_last_step_output(name, output, reduce_op=None)` keeps an output of the last step.
        """
        context = _StepContext()
        for _ in range(iterations):
            fn(context, next(iterator))
        return context


class _StepContext:
    def __init__(self) -> None:
        self.last_step_outputs: dict[str, Any] = {}

    def set_last_step_output(self, name: str, output: Any, reduce_op: Any = None) -> None:
        """Keeps an output under this name."""
        self.last_step_outputs[name] = output


def _component_of(index: int) -> Callable[[Any], Any]:
    return lambda leaf: leaf.values[index] if isinstance(leaf, DistributedValues) else leaf


def _returning(variable: Any) -> Callable[..., Any]:
    return lambda **kwargs: variable


def _checked_variable(v: Any) -> _variables.Variable:
    if not isinstance(v, _variables.Variable):
        raise AttributeError(f"{v!r} is no variable and has no strategy.")
    return v
