"""The replicas of a strategy, as a variable needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from replicax._base import errors
from replicax._base.types import Tree
from replicax._collectives.reducer import Reducer
from replicax._tracing import context

_T = TypeVar("_T")


class Replicas:
    """The replicas of a strategy.

    Args:
        strategy: the strategy.
        reducer: reduces their values.
    """

    def __init__(self, strategy: context.StrategyLike, reducer: Reducer):
        self.strategy, self.reducer, self.mesh = strategy, reducer, reducer.mesh

    def is_inside(self) -> bool:
        """Return True in a replica function of the strategy."""
        replica_context = context.get_replica_context()
        return replica_context is not None and replica_context.strategy is self.strategy

    def check_scope(self) -> None:
        """Raise `RuntimeError` in the scope of another strategy."""
        current = context.get_strategy()
        if context.has_strategy() and current is not self.strategy:
            raise errors.mixing(current, self.strategy)

    def meet(self, merge_fn: Callable[..., _T], method: str, value: Tree, tag: tuple[object, ...]) -> _T:
        """Meet the other replicas, in replica context, and call `merge_fn(strategy, method, value)` once for all."""
        replica_context = context.get_replica_context()
        assert replica_context is not None
        result: _T = replica_context._merge(merge_fn, (method, value), {}, tag)
        return result
