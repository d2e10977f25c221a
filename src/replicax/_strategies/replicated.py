"""The extended methods of strategies with replicas on the devices of a mesh, and of those that mirror variables.

`strategy.run` has four ways to run the replicas:

| the call is | the replicas run |
|---|---|
| in a merge function of compiled replicas of this strategy | *inline*: the function goes on as the replica |
| in a program that is traced, by `rx.function` or `jax.jit` | *compiled*: traced once for all, as a part of it |
| of an `rx.function`, or in one that the host drives | in a *program of their own*: `rx.function` of this call |
| any other | *eagerly*: a thread for each of them, of which one runs at a time |

The first two are in `_engine.compiled`, the third is in `_engine.compiled_runs`, which comes back here while it traces,
the last is in `_engine.eager`. An eager replica has no program of its own: what it calls meets the others eagerly, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec

from replicax._base import devices, nest, thread_state
from replicax._base.messages import received
from replicax._base.types import (
    Args,
    CommunicationOptions,
    Kwargs,
    Leaf,
    ReduceOp,
    Tree,
    ValueContext,
    VariableAggregation,
    VariableSynchronization,
    as_flag,
    as_variable_option,
)
from replicax._collectives import arithmetic, sharding
from replicax._collectives.cross_device_ops import CrossDeviceOps
from replicax._collectives.reducer import Reducer
from replicax._data.composites import refuse_composites
from replicax._engine import compiled, compiled_runs, eager, function, modes
from replicax._input.placement import Placement
from replicax._strategies import replica_devices
from replicax._strategies.extended import StrategyExtended
from replicax._strategies.sharding_rules import Dimensions, ShardingRules
from replicax._tracing import autograph_switch, frames
from replicax._tracing import context as _context
from replicax._tracing.context import StrategyLike
from replicax._values import (
    DistributedValues,
    Kind,
    Mirrored,
    PerReplica,
    ReplicaMesh,
    adopted,
    component_count,
    cut_axis,
    is_array,
    mesh_of,
    of_traced,
    own_component,
    partition,
    select,
)
from replicax._variables import layouts
from replicax._variables.distributed import DistributedVariable, MirroredVariable, SyncOnReadVariable
from replicax._variables.homes import Divided
from replicax._variables.variable import Variable


class ReplicatedExtended(StrategyExtended):
    """The extended methods of a strategy whose replicas are on the devices of a mesh, one each or several.

    Args:
        container_strategy: the strategy.
        reducer: combines the replicas' values; its mesh says where they are.
        check: called with what goes into and comes out of replica functions and with elements of datasets; it raises
            where the strategy does not take such values.
    """

    _reducer: Reducer

    def __init__(self, container_strategy: StrategyLike, reducer: Reducer, check: Callable[[Tree], None] | None = None):
        super().__init__(container_strategy)
        self._reducer, self._mesh, self._options = reducer, reducer.mesh, reducer.options
        self._check, self._placement = check, Placement(reducer.mesh, check, pads=True)
        self._worker = self._placement.worker

    def _run(self, fn: Callable[..., Tree], args: Args, kwargs: Kwargs) -> Tree:
        if self._check is None:
            return run(self._container, self._reducer, fn, args, kwargs)
        self._check((args, kwargs))
        result = run(self._container, self._reducer, fn, args, kwargs)
        self._check(result)
        return result

    def _reduce(self, op: ReduceOp, value: Tree, axis: int | tuple[int, ...] | None) -> Tree:
        if not isinstance(value, DistributedValues):
            refuse_composites(value, "reduced")  # its row splits or indices would be added up
        with _context.entered(self._container, None):
            return self._reducer.reduce(op, value, axis)

    def _gather(self, value: Tree, axis: int) -> Tree:
        if not isinstance(value, DistributedValues):
            refuse_composites(value, "gathered")
        with _context.entered(self._container, None):
            return self._reducer.gather(value, axis)

    def _batch_reduce(
        self, op: ReduceOp, pairs: Sequence[tuple[Tree, object]], options: CommunicationOptions
    ) -> list[Tree]:
        with _context.entered(self._container, None):
            return self._reducer.batch_reduce(op, pairs, options)

    def _broadcast(self, tensor: Tree, destinations: object) -> Tree:
        return self._reducer.ops.broadcast(tensor, destinations)

    def _get_cross_device_ops(self, value: Tree = None) -> CrossDeviceOps:
        return self._reducer.ops

    def _local_results(self, value: Tree) -> tuple[Tree, ...]:
        if isinstance(value, DistributedValues):
            return value.values
        nested = isinstance(value, (list, tuple, dict))
        if not nested and not any(isinstance(leaf, DistributedValues) for leaf in nest.leaves(value)):
            return (value,)
        return tuple(nest.map_structure(_component_of(i), value) for i in range(len(self._mesh.local_ids)))

    def _values_from_function(self, value_fn: Callable[[ValueContext], Tree]) -> Tree:
        values = [value_fn(ValueContext(i, self._mesh.size)) for i in self._mesh.local_ids]
        return nest.merge(values, lambda parts: PerReplica(parts, self._mesh))


def run(strategy: StrategyLike, reducer: Reducer, fn: Callable[..., Tree], args: Args, kwargs: Kwargs) -> Tree:
    """Calls `fn` on every replica and returns the results put together.

    Args:
        strategy: the strategy of the replicas.
        reducer: by which the replicas combine values; its mesh says where they are.
        fn: the replica function.
        args, kwargs: its arguments, with `PerReplica` leaves where replicas get values of their own.

    Raises:
        ValueError, IndexError: an argument has components for other replicas.
    """
    frame, mesh = frames.frame(), reducer.mesh
    _check_counts(strategy, mesh, (args, kwargs))
    args, kwargs = nest.map_structure(lambda leaf: adopted(leaf, mesh), (args, kwargs))
    with _context.entered(strategy, None):
        if frame.is_replica_of(mesh):
            return compiled.run_inline(strategy, reducer, fn, args, kwargs)
        if frames.is_tracing():
            return compiled.run(strategy, reducer, fn, args, kwargs)
        if frame.compiles_runs and _asks_for_program(fn):
            return compiled_runs.run_compiled(strategy, fn, args, kwargs)
        return eager.run(strategy, reducer, fn, args, kwargs)


def _asks_for_program(fn: Callable[..., Tree]) -> bool:
    return (function.is_function(fn) and not modes.functions_run_eagerly()) or thread_state.current.driven is not None


def _check_counts(strategy: StrategyLike, mesh: ReplicaMesh, arguments: Tree) -> None:
    """Raise `ValueError`, or `IndexError` for too few components, for a value of other replicas.

    Eager replicas take components by their number, on whatever devices they are, as in TensorFlow; a program cannot.
    """
    for leaf in nest.leaves(arguments):
        if not isinstance(leaf, (PerReplica, Mirrored)):
            continue
        count, home = component_count(leaf), mesh_of(leaf)
        if count != (mesh.size if home is not None else len(mesh.local_ids)):
            where = ""
        elif home is not None and frames.is_tracing() and home.devices != mesh.devices:
            where = f", on the devices {', '.join(devices.short_names(home.device_names))},"
        else:
            continue
        kind = IndexError if count < mesh.size else ValueError  # a replica would take a component that is missing
        raise kind(
            f"A {type(leaf).__name__} value with {count} components{where} is passed to {strategy!r}, which has "
            f"{mesh.size} replicas. Values belong to the strategy that made them: distribute the dataset, or the "
            "values, with the strategy that runs the step."
        )


class MirroringExtended(ReplicatedExtended):
    """The extended methods of a strategy whose variables have a component on each replica's device.

    Replicas of several devices each are one program that the compiler spreads, so all of them need the same shapes.

    Args:
        container_strategy, reducer: see `ReplicatedExtended`.
        static_shapes: whether all replicas need the same shapes also where each has one device.
        sharding_rules: how variables are split over a replica's devices, by their names.
    """

    _divides: sharding.Rule | bool = False  # which variables each replica keeps a part of

    def __init__(
        self,
        container_strategy: StrategyLike,
        reducer: Reducer,
        static_shapes: bool = False,
        sharding_rules: Mapping[str, Dimensions] | None = None,
    ):
        self._static_shapes = static_shapes or bool(reducer.mesh.logical_axes)
        self._rules = None if sharding_rules is None else ShardingRules(sharding_rules, reducer.mesh)
        super().__init__(container_strategy, reducer, _check_shapes if self._static_shapes else None)

    def _run(self, fn: Callable[..., Tree], args: Args, kwargs: Kwargs) -> Tree:
        result = super()._run(fn, args, kwargs)
        if self._rules is not None:
            self._rules.check_all_used()
        return result

    def _device_text(self) -> str:
        if not self._mesh.logical_axes:
            return super()._device_text()
        rows = [self._mesh.logical_devices[i] for i in self._mesh.local_ids]
        return repr([devices.short_names(row) for row in rows])

    def _shard(self, optimizer_state: object, variables: object) -> None:
        """Takes a strategy's arguments that say what is divided among the replicas; raises `TypeError` for others."""
        self._divides = _as_rule(variables)
        sharded = as_flag("shard_optimizer_state", optimizer_state)
        self._shards_optimizer_state = sharded and self._divides is False  # else it is divided as the variables are

    @contextlib.contextmanager
    def _with_options(self, optimizer_state: bool, variables: bool) -> Iterator[None]:
        """Return a context in which the strategy has other values of its options `shard_...`, for plans.

        Raises:
            ValueError: the strategy cannot have these values.
        """
        before = self._divides, self._shards_optimizer_state
        try:
            self._shard(optimizer_state, variables)
            if self._shards_optimizer_state:
                replica_devices.check_sharding_of_state(self._mesh, self._reducer.ops)
            yield
        finally:
            self._divides, self._shards_optimizer_state = before

    def _new_variable(self, **kwargs: Tree) -> Variable:
        name = kwargs["name"]
        synchronization = as_variable_option(VariableSynchronization, kwargs["synchronization"], name)
        as_variable_option(VariableAggregation, kwargs["aggregation"], name)
        if synchronization is VariableSynchronization.NONE:
            raise ValueError(
                "`NONE` variable synchronization mode is not supported with tf.distribute strategy. Please change the "
                f"`synchronization` for variable: {name}"
            )
        kwargs |= {"strategy": self._container, "reducer": self._reducer}
        if synchronization is VariableSynchronization.ON_READ:
            return SyncOnReadVariable(**kwargs)
        if not self._mesh.logical_axes and self._rules is None and self._divides is False:
            return MirroredVariable(**kwargs)
        trainable = kwargs["trainable"] is not False
        of_leaves = functools.partial(self._layouts, trainable)
        with self._where_initial_values_are():
            return MirroredVariable(layouts=of_leaves, divided=self._division, **kwargs)

    def _layouts(self, trainable: bool, name: str, leaves: layouts.PathsAndTypes) -> list[PartitionSpec | None]:
        """Returns how the leaves of a new variable are split over a replica's devices."""
        beside = thread_state.current.beside
        if beside is not None:
            return layouts.alike(beside, leaves)
        if self._rules is not None:
            return self._rules.layouts(thread_state.current.rule_name or name, leaves, trainable)
        return [None] * len(leaves)

    @property
    def _division(self) -> Divided | None:
        return None if self._divides is False else self._divided

    def _divided(self, kind: Kind, layout: PartitionSpec | None) -> PartitionSpec | None:
        if self._divides is False or cut_axis(layout) is not None:
            return layout
        rule, split = None if self._divides is True else self._divides, partition.parts_along(self._mesh, layout)
        axis = sharding.cut_axis(kind, self._mesh.size, rule, split)
        return layout if axis is None else partition.divided(layout, axis)

    def _where_initial_values_are(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context in which initial values are made in the host's memory, since no device need hold them."""
        if (self._rules is None and self._divides is False) or self._mesh.platform == "cpu":
            return contextlib.nullcontext()
        host: contextlib.AbstractContextManager[object] = jax.default_device(jax.local_devices(backend="cpu")[0])
        return host

    def _colocate_state(self, variables: Tree) -> contextlib.AbstractContextManager[None]:
        splits = self._mesh.logical_axes or self._rules
        return thread_state.entered(beside=variables) if splits else contextlib.nullcontext()

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable) -> Iterator[None]:
        """Returns a context manager, used in scope, under which new variables are split over devices as this one."""
        with super().colocate_vars_with(colocate_with_variable), self._colocate_state(colocate_with_variable):
            yield

    def _update(self, var: Tree, fn: Callable[..., Tree], args: Args, kwargs: Kwargs, group: bool) -> Tree:
        assert isinstance(var, DistributedVariable) and var.distribute_strategy is self._container, (
            f"update takes a variable made in the strategy's scope, got {var!r}."
        )
        merged = _update_components(self._container, self._reducer, var, fn, args, kwargs)
        traced = frames.frame().is_replica_of(self._mesh) or frames.is_tracing()
        return merged if group or traced else self._local_results(merged)


def _check_shapes(values: Tree) -> None:
    """Raises `InvalidArgumentError` if the components of a value in the tree differ in shape."""
    for leaf in nest.leaves(values):
        if isinstance(leaf, PerReplica):
            arithmetic.check_static(leaf)


def _as_rule(shard_variables: object) -> sharding.Rule | bool:
    """Returns the argument `shard_variables` of a strategy; raises `TypeError` for what is no partitioner or flag."""
    if callable(shard_variables) and not isinstance(shard_variables, type):
        return shard_variables
    if isinstance(shard_variables, (bool, np.bool_)):
        return bool(shard_variables)
    raise TypeError(
        "`shard_variables` is True, False or a partitioner, such as "
        f"replicax.partitioners.MinSizePartitioner(max_shards=8), got {received(shard_variables)}."
    )


def _component_of(index: int) -> Callable[[Leaf], Leaf]:
    return lambda leaf: leaf.values[index] if isinstance(leaf, DistributedValues) else leaf


def _update_components(
    strategy: StrategyLike,
    reducer: Reducer,
    var: DistributedVariable,
    fn: Callable[..., Tree],
    args: Args,
    kwargs: Kwargs,
) -> Tree:
    """Calls `fn(component, *args, **kwargs)` for each component; returns the results put together.

    In a program the components are those of compiled replicas, for which it is traced once.
    """
    mesh = reducer.mesh
    if frames.frame().is_replica_of(mesh):
        args, kwargs = nest.map_structure(own_component, args), nest.map_structure(own_component, kwargs)
        result = autograph_switch.converted(fn)(var.values[0], *args, **kwargs)
        return nest.map_structure(
            lambda leaf: of_traced(Mirrored, leaf, mesh) if isinstance(leaf, jax.core.Tracer) else leaf, result
        )
    if frames.is_tracing():

        def in_replica(*a: Tree, **k: Tree) -> Tree:
            replica_context = _context.get_replica_context()
            assert replica_context is not None
            return replica_context.merge_call(
                lambda _, *b, **c: _update_components(strategy, reducer, var, fn, b, c), a, k
            )

        return compiled.run(strategy, reducer, in_replica, args, kwargs, alike=False)
    results = []
    for index, component in enumerate(var.values):
        with jax.default_device(mesh.local_devices[index]):
            results.append(fn(component, *select(index, args), **select(index, kwargs)))
    return nest.merge(results, lambda values: _mirrored_if_arrays(values, mesh))


def _mirrored_if_arrays(values: Sequence[Leaf], mesh: ReplicaMesh) -> Leaf:
    if all(value is values[0] for value in values):
        return values[0]
    return Mirrored(values, mesh) if all(is_array(value) for value in values) else PerReplica(values, mesh)
