"""One replica whose values are plain: its context, and the extended methods of its strategy."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

from replicax._base import nest
from replicax._base.types import Args, CommunicationOptions, Kwargs, Leaf, ReduceOp, Tree, ValueContext
from replicax._collectives import arithmetic
from replicax._strategies import run
from replicax._strategies.extended import StrategyExtended
from replicax._tracing import context
from replicax._tracing.context import ReplicaContext


class SingleReplicaContext(ReplicaContext):
    """The context of a strategy's only replica, which has no other to meet: functions are called at once."""

    def _merge(self, fn: Callable[..., Tree], args: Args, kwargs: Kwargs, tag: tuple[object, ...]) -> Tree:
        with context.entered(self._strategy, None):
            return fn(self._strategy, *args, **kwargs)

    def _all_reduce(self, op: ReduceOp, leaves: list[Leaf], options: CommunicationOptions) -> list[Leaf]:
        return leaves

    def _all_gather(self, leaves: list[Leaf], axis: int, options: CommunicationOptions) -> list[Leaf]:
        return leaves


class SingleReplicaExtended(StrategyExtended):
    """The extended methods of a strategy with one replica, which pass values through."""

    @abc.abstractmethod
    def _call(self, fn: Callable[..., Tree], args: Args, kwargs: Kwargs) -> Tree:
        """Calls a replica function at once, in the replica's context."""

    def _run(self, fn: Callable[..., Tree], args: Args, kwargs: Kwargs) -> Tree:
        return run.run_single(self._container, self._call, fn, args, kwargs)

    def _reduce(self, op: ReduceOp, value: Tree, axis: int | tuple[int, ...] | None) -> Tree:
        if axis is None:
            return value
        return nest.map_values(lambda leaf: arithmetic.reduce_along(op, [leaf], axis), value)

    def _gather(self, value: Tree, axis: int) -> Tree:
        return value

    def _batch_reduce(
        self, op: ReduceOp, pairs: Sequence[tuple[Tree, object]], options: CommunicationOptions
    ) -> list[Tree]:
        return [value for value, _ in pairs]

    def _update(self, var: Tree, fn: Callable[..., Tree], args: Args, kwargs: Kwargs, group: bool) -> Tree:
        result = fn(var, *args, **kwargs)
        return result if group else (result,)

    def _local_results(self, value: Tree) -> tuple[Tree, ...]:
        return (value,)

    def _values_from_function(self, value_fn: Callable[[ValueContext], Tree]) -> Tree:
        return value_fn(ValueContext(0, 1))
