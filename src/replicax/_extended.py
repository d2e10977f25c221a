"""`StrategyExtended`: the engine behind every strategy.

A strategy is a mesh of devices, one a replica, a kind of variable, and a way to combine values; `_run` picks the way
to run: compiled where the program is being traced, in lockstep otherwise. The strategies in `_mirrored`, `_one_device`
and `_default` say where they differ.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import (
    _across,
    _agreed_input,
    _collectives,
    _compiled_runs,
    _context,
    _conversion,
    _creation,
    _cross_device_ops,
    _data,
    _dispatch,
    _distributed_variables,
    _function,
    _input,
    _levels,
    _lockstep,
    _nest,
    _spmd,
    _tape,
    _variables,
)
from replicax._collectives import check_numeric, gather_axis
from replicax._indexed_slices import IndexedSlices
from replicax._types import (
    CommunicationOptions,
    InputContext,
    InputOptions,
    ReduceOp,
    ValueContext,
    VariableAggregation,
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
    as_rows,
    is_array,
    is_text,
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
        return self._worker.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this process is the one to write summaries."""
        return self._worker.rank == 0

    @property
    def _worker(self) -> _input.Worker:
        """Which of the processes that share the replicas this is."""
        return _input.Worker() if self._mesh.all_local else _input.Worker(jax.process_count(), jax.process_index())

    def _cross_device_ops_for(self, options: CommunicationOptions) -> _cross_device_ops.CrossDeviceOps:
        raise NotImplementedError

    def _get_cross_device_ops(self, value: Any = None) -> _cross_device_ops.CrossDeviceOps:
        return self._cross_device_ops_for(self._options)

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
        args, kwargs = _nest.map_structure(self._adopted, (args, kwargs))
        with _context.entered(strategy, None):
            if frame.local and frame.mesh is self._mesh and isinstance(frame, _levels.Level):
                return self._run_inline(fn, args, kwargs)
            if _levels.is_tracing():
                return _spmd.run(strategy, self._mesh, fn, args, kwargs)
            compile_it = _function.is_function(fn) and not _function.functions_run_eagerly()
            if (compile_it or _function.host_driven()) and not isinstance(frame, _levels.ReplicaFrame):
                return _compiled_runs.run_compiled(strategy, fn, args, kwargs)
            return _lockstep.run(strategy, self._mesh, fn, args, kwargs)

    def _run_inline(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """A run inside of a merge function of compiled replicas: goes on as the replica."""
        level = _levels.frame()
        assert isinstance(level, _levels.Level)
        replica_context = _spmd.SpmdContext(self._container, level, _spmd.context_outer(level))
        result: list[Any] = []

        def inside(leaf: Any) -> Any:
            return leaf._local if isinstance(leaf, (PerReplica, Mirrored)) and leaf._local is not None else leaf

        with _context.entered(self._container, replica_context):
            result.append(fn(*_nest.map_structure(inside, args), **_nest.map_structure(inside, kwargs)))
        return _nest.map_structure(
            lambda leaf: PerReplica.of_local(leaf, self._mesh) if replica_context._is_own(leaf) else leaf, result[0]
        )

    # Reducing and gathering.

    def _non_distributed(self, op: ReduceOp, value: Any) -> Any:
        if self._mesh.size == 1:
            return value if isinstance(value, (jax.Array, IndexedSlices)) else _context.as_array(value)
        if op is ReduceOp.MEAN:
            return value
        raise ValueError(f"A non-DistributedValues value {value!s} cannot be reduced with the given reduce op {op}.")

    def _as_value(self, op: ReduceOp, value: Any) -> Any:
        """A variable as the value to be reduced; refuses the sum of mirrored ones."""
        mirrored = isinstance(value, (Mirrored, _distributed_variables.MirroredVariable))
        assert not (mirrored and op is ReduceOp.SUM), (
            "The sum of a mirrored value is ambiguous: it is the same on every replica. Reduce a PerReplica value, or "
            "multiply by the number of replicas."
        )
        if isinstance(value, _distributed_variables.SyncOnReadVariable):
            return value._per_replica()
        return self._own(value)

    def _adopted(self, value: Any) -> Any:
        """A PerReplica value that the user made of components, as one of this strategy's."""
        made = isinstance(value, PerReplica) and value.mesh is None
        return PerReplica(value.values, self._mesh) if made and value.count == len(self._mesh.local_ids) else value

    def _own(self, value: Any) -> Any:
        """A plain value as this worker's component, where it has one replica of several."""
        mesh, value = self._mesh, self._adopted(value)
        if not mesh.lone or isinstance(value, DistributedValues):
            return value
        if isinstance(value, IndexedSlices):
            return PerReplica([value], mesh)
        array = _context.as_array(_read(value))
        if _levels.frame().local:  # within compiled replicas
            return PerReplica.of_local(array, mesh)
        if _levels.is_tracing():
            return PerReplica.of_array(as_rows(array, mesh), mesh)
        return PerReplica.of_bare(array, mesh)

    def _reduce(self, op: ReduceOp, value: Any, axis: Any) -> Any:
        leaves: list[Any] = []
        _nest.map_structure(leaves.append, value)
        with _context.entered(self._container, None):
            totals = iter(self._reduce_leaves(op, leaves, axis))
            return _nest.map_structure(lambda _: next(totals), value)

    def _reduce_leaves(self, op: ReduceOp, leaves: list[Any], axis: Any) -> list[Any]:
        values = [self._as_value(op, leaf) for leaf in leaves]
        together = [i for i, value in enumerate(values) if axis is None and self._takes_all_reduce(value)]
        ops = self._cross_device_ops_for(self._options) if len(together) > 1 else None
        if not isinstance(ops, _cross_device_ops.AllReduceCrossDeviceOps):
            return [self._reduce_leaf(op, value, axis) for value in values]
        pairs = [(values[i], values[i]) for i in together]
        totals = dict(zip(together, ops.batch_reduce(op, pairs, self._options.exact())))
        return [
            totals[i].values[0] if i in totals else self._reduce_leaf(op, value, axis) for i, value in enumerate(values)
        ]

    def _takes_all_reduce(self, value: Any) -> bool:
        """Whether reducing this value, now, is a collective of the devices."""
        if not isinstance(value, PerReplica) or value._local is not None or _levels.is_tracing():
            return False
        return value.whole or (not self._mesh.all_local and all(is_array(part) for part in value.values))

    def _reduce_leaf(self, op: ReduceOp, value: Any, axis: Any) -> Any:
        value = self._as_value(op, value)
        if isinstance(value, (Mirrored, _distributed_variables.MirroredVariable)):
            value = value.values[0]
            return value if axis is None else _collectives.reduce_along(op, [_read(value)], axis)
        if not isinstance(value, PerReplica):
            if axis is None:
                return self._non_distributed(op, value)
            return _collectives.reduce_along(op, [_context.as_array(_read(value))] * self._mesh.size, axis)
        if value._local is not None:
            return self._reduce_local(op, value._local, axis)
        if value.whole:
            return self._reduce_stacked(op, value._array, axis)
        if not self._mesh.all_local and not _levels.is_tracing():
            if axis is None:
                return _across.reduced(op, value.values, self._mesh)
            return _across.reduced_along(op, value.values, axis, self._mesh)
        if axis is None:
            return _collectives.reduce_parts(op, value.values)
        return _collectives.reduce_along(op, value.values, axis)

    def _reduce_local(self, op: ReduceOp, leaf: Any, axis: Any) -> Any:
        count: Any = self._mesh.size
        if axis is not None:
            dtype, axes = leaf.dtype, axis if isinstance(axis, tuple) else (axis,)
            own, level = int(np.prod([leaf.shape[a] for a in axes], dtype=np.int64)), _levels.frame()
            uneven = isinstance(level, _levels.Level) and level.gathers is not None
            count = _collectives.local_sum(jnp.asarray(own, jnp.int32)) if uneven else count * own
            total = _collectives.local_sum(_collectives.reduce_along(ReduceOp.SUM, [leaf], axis))
            return _collectives.divided(total, count, dtype) if op is ReduceOp.MEAN else total
        check_numeric(leaf.dtype)
        total = _collectives.local_sum(leaf)
        return _collectives.divided(total, count, leaf.dtype) if op is ReduceOp.MEAN else total

    def _reduce_stacked(self, op: ReduceOp, stacked: Any, axis: Any) -> Any:
        mesh, traced = self._mesh, isinstance(stacked, jax.core.Tracer) or _levels.is_tracing()
        row = jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype)
        check_numeric(row.dtype)
        axes = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
        if axis is not None:  # checks the axis, and raises in the components' terms
            jax.eval_shape(lambda x: _collectives.reduce_along(op, [x], axis), row)
        axes = tuple(a % len(row.shape) for a in axes)
        if traced:
            total = _collectives.sum_of_rows(stacked, axes)
        else:
            with _dispatch.calling(mesh, "reduce", [stacked]) as call:
                call.output = total = _sum_of_rows(stacked, axes)
            total = _tape.renamed(total, mesh.copies(total)[0])
        count = stacked.shape[0] * int(np.prod([row.shape[a] for a in axes], dtype=np.int64))
        return _collectives.divided(total, count, row.dtype) if op is ReduceOp.MEAN else total

    def _gather(self, value: Any, axis: int) -> Any:
        with _context.entered(self._container, None):
            if isinstance(value, _distributed_variables.MirroredVariable):
                value = PerReplica([_read(component) for component in value.values], self._mesh)
            value = self._as_value(ReduceOp.MEAN, value)
            if self._mesh.size == 1 and isinstance(value, PerReplica) and value._local is None:
                return value.values[0]
            return self._gather_merged(value, axis)

    def _gather_merged(self, value: Any, axis: int) -> Any:
        """The concatenation of a per-replica value's components; another value as it is."""
        if isinstance(value, Mirrored):
            value = PerReplica(value.values, value.mesh)
        if not isinstance(value, PerReplica):
            return value
        if value._local is not None:
            return _collectives.local_gather(value._local, axis)
        parts = []
        for part in value.values:
            part = _context._tensor(part, "gather", sparse=True)
            if not is_array(part):
                part = part.to_dense()
            parts.append(part)
        axis = gather_axis(axis, parts[0].ndim)
        if not self._mesh.all_local and not _levels.is_tracing():
            parts = _across.all_parts(self._mesh, parts, axis)
        _collectives.check_alike(parts, free_axis=axis)
        return jnp.concatenate(parts, axis)

    def _gathered_everywhere(self, value: Any, axis: int) -> Any:
        """What eager replicas get from `all_gather`."""
        return self._on_each_replica(self._gather_merged(value, axis))

    def _all_reduce_merged(self, op: ReduceOp, values: list[Any], options: CommunicationOptions) -> list[Any]:
        """What eager replicas get from `all_reduce`: one value for each they passed."""
        own = [i for i, value in enumerate(values) if isinstance(value, PerReplica)]
        for i in own:
            if is_array(values[i].values[0]):
                for part in values[i].values:
                    check_numeric(part.dtype)
                if self._mesh.all_local:  # else all workers' are compared
                    _collectives.check_alike(values[i].values)
        if self._mesh.size == 1:  # the only replica's values arrive bare
            return [_collectives.reduce_parts(op, [value]) if is_array(value) else value for value in values]
        results = [self._on_each_replica(value) for value in values]
        if own:
            pairs = [(values[i], values[i]) for i in own]
            for i, total in zip(own, self._cross_device_ops_for(options).batch_reduce(op, pairs, options)):
                results[i] = self._on_each_replica(total)
        return results

    def _on_each_replica(self, value: Any) -> Any:
        """A plain array as a value of its own on every replica's device."""
        mesh = self._mesh
        return Mirrored.of_array(mesh.mirror([value] * len(mesh.local_ids)), mesh) if is_array(value) else value

    def _aggregate(self, aggregation: VariableAggregation, value: Any) -> Any:
        """What the replicas' values to be assigned to a variable come to."""
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            value = self._own(value)
            if isinstance(value, PerReplica) and value._local is None and not self._mesh.all_local:
                return self._first_anywhere(value)
            return _distributed_variables.first_component(value) if isinstance(value, PerReplica) else value
        op = ReduceOp.from_variable_aggregation(aggregation)
        value = self._own(value)
        if not isinstance(value, PerReplica):
            return self._non_distributed(op, value)
        if value._local is not None:
            ops = self._cross_device_ops_for(self._options)
            return ops._local_reduce(op, [value._local], self._mesh, self._options.exact())[0]
        return self._reduce_leaf(op, value, None)

    def _first_anywhere(self, value: PerReplica) -> Any:
        """Replica 0's component, which another worker may hold."""

        def first(part: Any) -> Any:
            if isinstance(part, IndexedSlices):
                return IndexedSlices(first(part.values), first(part.indices), part.dense_shape)
            return _across.from_first(self._mesh, _context.as_array(part), "the first replica's value")

        return _nest.map_structure(first, value.values[0])

    def _everyones_sizes(self, size: Any) -> list[int]:
        """A number of each replica, on all workers."""
        sizes = list(size.values) if isinstance(size, PerReplica) else [size] * len(self._mesh.local_ids)
        return sizes if self._mesh.all_local else _across.everyones_sizes(self._mesh, sizes)

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
            values = [self._as_value(op, value) for value, _ in value_destination_pairs]
            results: list[Any] = list(values)
            batch = [i for i, value in enumerate(values) if isinstance(value, PerReplica)]
            for i, value in enumerate(values):
                if not isinstance(value, (PerReplica, Mirrored, _distributed_variables.MirroredVariable)):
                    results[i] = self._non_distributed(op, value)
            pairs = [(values[i], value_destination_pairs[i][1]) for i in batch]
            if pairs:
                reduced = self._reduce_batch(op, pairs, options)
                for i, result in zip(batch, reduced):
                    results[i] = result
            return results

    def _reduce_batch(self, op: ReduceOp, pairs: list[tuple[Any, Any]], options: CommunicationOptions) -> list[Any]:
        for _, destinations in pairs:
            _cross_device_ops.check_destinations(destinations)
        stacked = [value._array for value, _ in pairs if isinstance(value._array, jax.core.Tracer)]
        if len(stacked) < len(pairs):
            return self._cross_device_ops_for(options).batch_reduce(op, pairs, options)
        totals = [self._reduce_stacked(op, array, None) for array in stacked]
        return [
            Mirrored.of_array(total, self._mesh) if isinstance(pair[1], DistributedValues) else total
            for total, pair in zip(totals, pairs)
        ]

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """A copy of `tensor` at the destinations (see `reduce_to`)."""
        _context.require_cross_replica(self._container)
        return self._cross_device_ops_for(self._options).broadcast(tensor, destinations)

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
        variable = kind(strategy=self._container, mesh=self._mesh, **kwargs)
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

            return _spmd.run(self._container, mesh, in_replica, args, kwargs, alike=False)
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

    def _place(self, this_round: _input.Round, fetch_to_device: bool) -> Any:
        """One element of a distributed dataset from each local replica's host arrays."""
        parts, alike, everyones = this_round
        mesh = self._mesh
        told = mesh.by_replica(everyones) if everyones else []
        kinds = itertools.zip_longest(*told, fillvalue=_agreed_input.Kind((), ""))  # for each leaf, of all replicas

        def in_parts(components: Sequence[Any], of_all: Sequence[Any]) -> Any:
            if mesh.size == 1:
                return components[0]
            if alike and not mesh.all_local:
                of_all = list(components[:1]) * mesh.size
            return PerReplica.of_kinds(components, of_all, mesh)

        def place(leaves: Sequence[Any]) -> Any:
            of_all = next(kinds, leaves)
            if all(leaf is None for leaf in leaves):  # a part of the structure
                return None
            if any(not is_array(leaf) or is_text(leaf) for leaf in leaves):
                leaves = [_data.as_tensor(leaf) if is_array(leaf) else leaf for leaf in leaves]
                return leaves[0] if mesh.size == 1 else PerReplica(leaves, mesh)
            if not fetch_to_device:
                with jax.default_device(mesh.local_devices[0]):
                    arrays = [_context.as_array(leaf) for leaf in leaves]
                return in_parts(arrays, of_all)
            if mesh.size > 1 and alike and all(leaf.shape == leaves[0].shape for leaf in leaves):
                return PerReplica.of_array(mesh.stack(leaves), mesh)
            if mesh.size > 1 and (value := PerReplica.from_host(leaves, of_all, mesh)) is not None:
                return value
            return in_parts(mesh.components(leaves), of_all)

        return _nest.merge(list(parts), place)

    def _distribute_dataset(self, dataset: Any, options: InputOptions) -> Any:
        return _input.DistributedDataset(dataset, len(self._mesh.local_ids), self._place, options, worker=self._worker)

    def _datasets_from_function(self, dataset_fn: Callable[[Any], Any], options: InputOptions) -> Any:
        context = InputContext(*self._worker, self._mesh.size)
        return _input.DistributedDatasetsFromFunction(
            dataset_fn, len(self._mesh.local_ids), self._place, options, context, self._worker
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


_sum_of_rows = jax.jit(_collectives.sum_of_rows, static_argnums=1)


def _read(value: Any) -> Any:
    return value.read_value() if isinstance(value, _variables.Variable) else value


def _component_of(index: int) -> Callable[[Any], Any]:
    return lambda leaf: leaf.values[index] if isinstance(leaf, DistributedValues) else leaf


def _returning(variable: Any) -> Callable[..., Any]:
    return lambda **kwargs: variable


def _checked_variable(v: Any) -> _variables.Variable:
    if not isinstance(v, _variables.Variable):
        raise AttributeError(f"{v!r} is no variable and has no strategy.")
    return v
