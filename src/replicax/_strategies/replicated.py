"""The extended methods of strategies with replicas on the devices of a mesh, and of those that mirror variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from replicax._base import nest
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
    as_variable_option,
)
from replicax._collectives.cross_device_ops import CrossDeviceOps
from replicax._collectives.reducer import Reducer
from replicax._engine import compiled
from replicax._input.placement import Placement
from replicax._strategies import run
from replicax._strategies.extended import StrategyExtended
from replicax._tracing import autograph_switch, frames
from replicax._tracing import context as _context
from replicax._tracing.context import StrategyLike
from replicax._values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReplicaMesh,
    is_array,
    of_traced,
    own_component,
    select,
)
from replicax._variables.distributed import MirroredVariable, SyncOnReadVariable, _Distributed
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
        self._check, self._placement = check, Placement(reducer.mesh, check)
        self._worker = self._placement.worker

    def _run(self, fn: Callable[..., Tree], args: Args, kwargs: Kwargs) -> Tree:
        if self._check is None:
            return run.run(self._container, self._reducer, fn, args, kwargs)
        self._check((args, kwargs))
        result = run.run(self._container, self._reducer, fn, args, kwargs)
        self._check(result)
        return result

    def _reduce(self, op: ReduceOp, value: Tree, axis: int | tuple[int, ...] | None) -> Tree:
        with _context.entered(self._container, None):
            return self._reducer.reduce(op, value, axis)

    def _gather(self, value: Tree, axis: int) -> Tree:
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
        if not isinstance(value, (list, tuple, dict)):
            return (value,)
        return tuple(nest.map_structure(_component_of(i), value) for i in range(len(self._mesh.local_ids)))

    def _values_from_function(self, value_fn: Callable[[ValueContext], Tree]) -> Tree:
        values = [value_fn(ValueContext(i, self._mesh.size)) for i in self._mesh.local_ids]
        return nest.merge(values, lambda parts: PerReplica(parts, self._mesh))


class MirroringExtended(ReplicatedExtended):
    """The extended methods of a strategy whose variables have a component on each replica's device."""

    def _new_variable(self, **kwargs: Tree) -> Variable:
        name = kwargs["name"]
        synchronization = as_variable_option(VariableSynchronization, kwargs["synchronization"], name)
        as_variable_option(VariableAggregation, kwargs["aggregation"], name)
        if synchronization is VariableSynchronization.NONE:
            raise ValueError(
                "`NONE` variable synchronization mode is not supported with tf.distribute strategy. Please change the "
                f"`synchronization` for variable: {name}"
            )
        on_read = synchronization is VariableSynchronization.ON_READ
        kind: type[_Distributed] = SyncOnReadVariable if on_read else MirroredVariable
        return kind(strategy=self._container, reducer=self._reducer, **kwargs)

    def _update(self, var: Tree, fn: Callable[..., Tree], args: Args, kwargs: Kwargs, group: bool) -> Tree:
        assert isinstance(var, _Distributed) and var._strategy is self._container, (
            f"update takes a variable made in the strategy's scope, got {var!r}."
        )
        merged = _update_components(self._container, self._reducer, var, fn, args, kwargs)
        traced = frames.frame().is_replica_of(self._mesh) or frames.is_tracing()
        return merged if group or traced else self._local_results(merged)


def _component_of(index: int) -> Callable[[Leaf], Leaf]:
    return lambda leaf: leaf.values[index] if isinstance(leaf, DistributedValues) else leaf


def _update_components(
    strategy: StrategyLike,
    reducer: Reducer,
    var: _Distributed,
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
