"""The parts of strategies that modules below the strategies use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jax.sharding import PartitionSpec

from replicax._base.types import RunOptions, Tree
from replicax._input.agreement import Worker
from replicax._values import Kind, ReplicaMesh


class RulesLike(Protocol):
    """Rules that say by name how variables are split over the devices of each replica."""

    def layouts(self, name: str, leaves: Sequence[tuple[Any, Any]], trainable: bool) -> Sequence[object]: ...


class ExtendedLike(Protocol):
    """The part of `StrategyExtended` that modules below the strategies use."""

    _variables_live_once: bool
    _shards_optimizer_state: bool

    @property
    def worker_devices(self) -> Sequence[str]:
        """The full names of the replicas' devices."""

    @property
    def _mesh(self) -> ReplicaMesh | None: ...
    @property
    def _reducer(self) -> object: ...  # a `Reducer`, which stands above this module, or None
    @property
    def _rules(self) -> RulesLike | None: ...
    @property
    def _worker(self) -> Worker: ...
    def _create_variable(self, **kwargs: Tree) -> object: ...
    def _new_variable(self, **kwargs: Tree) -> Any: ...
    def _colocate_state(self, variables: Tree) -> contextlib.AbstractContextManager[None]: ...
    @property
    def _division(self) -> Callable[[Kind, PartitionSpec | None], PartitionSpec | None] | None: ...
    def _divided(self, kind: Kind, layout: PartitionSpec | None) -> PartitionSpec | None: ...


class StrategyLike(Protocol):
    """What modules below the strategies ask of a strategy."""

    @property
    def extended(self) -> ExtendedLike:
        """The methods for those who write optimizers and the like."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas, on all workers together."""

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context in which the strategy is current."""

    def run(
        self,
        fn: Callable[..., Tree],
        args: Sequence[Tree] = (),
        kwargs: dict[str, Tree] | None = None,
        options: RunOptions | None = None,
    ) -> Tree:
        """Calls a function on every replica."""


def variables_live_once(strategy: StrategyLike) -> bool:
    """Return whether a variable of the strategy has a single value for all replicas."""
    return strategy.extended._variables_live_once


def shards_optimizer_state(strategy: StrategyLike) -> bool:
    """Return whether the state of optimizers is divided among the replicas."""
    return strategy.extended._shards_optimizer_state


def colocate_state(strategy: StrategyLike, variables: Tree) -> contextlib.AbstractContextManager[None]:
    """Return a context that splits new variables like these, whose optimizer's state they are."""
    return strategy.extended._colocate_state(variables)


def worker_of(strategy: StrategyLike) -> Worker:
    """Return this process among the processes of a strategy."""
    return strategy.extended._worker


def rules_of(strategy: StrategyLike) -> RulesLike | None:
    """Return the rules that say by name how variables of a strategy are split."""
    return strategy.extended._rules
