"""One replica whose values are plain: its context, and the extended methods of its strategy."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

from replicax._base import nest
from replicax._base.thread_state import current
from replicax._base.types import Args, CommunicationOptions, Kwargs, Leaf, ReduceOp, Tree, ValueContext
from replicax._collectives import arithmetic
from replicax._engine import compiled_runs
from replicax._strategies.extended import StrategyExtended
from replicax._tracing import context, frames
from replicax._tracing.context import ReplicaContext, StrategyLike
from replicax._values import is_array, is_text


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
        return run_single(self._container, self._call, fn, args, kwargs)

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


def run_single(
    strategy: StrategyLike,
    call: Callable[..., Tree],
    fn: Callable[..., Tree],
    args: Args,
    kwargs: Kwargs,
) -> Tree:
    """Runs the only replica of a strategy and returns its result.

    There are two ways only, since it has no other replica to meet: a program of its own in a function that the host
    drives, and `call(fn, args, kwargs)` at once everywhere else.
    """
    outermost = frames.frame().compiles_runs and not frames.is_tracing()
    if not (outermost and current.driven is not None) or any(map(_is_text, nest.leaves((args, kwargs)))):
        return call(fn, args, kwargs)
    return compiled_runs.run_compiled(strategy, fn, args, kwargs)


def _is_text(leaf: Leaf) -> bool:
    return is_array(leaf) and is_text(leaf)
