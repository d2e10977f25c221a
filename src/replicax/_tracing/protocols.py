"""What modules below variables and strategies need of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, MutableSet, Sequence
from typing import Any, Protocol, TypeVar

import jax
from jax.sharding import PartitionSpec

from replicax._base.types import Leaf, RunOptions, Tree
from replicax._input.agreement import Worker
from replicax._tracing.tape_trace import TapedVariable
from replicax._values import Kind, Mirrored, PerReplica, ReplicaMesh


class Watcher(Protocol):
    """A compiled program, which is told of changes of the storages that it takes arrays from."""

    def leaves_moved(self) -> None:
        """Leaves have come to stand in shared vectors, or stand in them no more."""

    def layouts_changed(self) -> None:
        """Arrays are split over devices in another way."""


class Home(Protocol):
    """What frames and programs need of the home of a variable (see `_variables.homes`)."""

    @property
    def device(self) -> jax.Device | None: ...
    def leaf_types(self, local: bool) -> list[jax.ShapeDtypeStruct]: ...
    def has_rows(self, index: int) -> bool: ...
    def cut_axis(self, index: int) -> int | None: ...
    def device_layout(self, index: int) -> PartitionSpec | None: ...
    def copied(self, leaves: list[jax.Array]) -> list[jax.Array]: ...
    def entering(self, leaf: jax.Array) -> jax.Array: ...
    def leaving(self, leaves: list[jax.Array]) -> list[jax.Array]: ...


class HomeOfComponents(Home, Protocol):
    """The home of a distributed variable."""

    def global_leaf(self, leaf: Leaf, index: int, traced: bool) -> jax.Array: ...


class Stored(Protocol):
    """What frames need of where a variable's arrays are (see `_variables.storage`)."""

    lent: bool
    lost: tuple[str, BaseException] | None
    runner: Callable[[Any, Any, Sequence[Tree]], Tree] | None

    @property
    def home(self) -> Home: ...
    @property
    def slots(self) -> Mapping[int, Any]: ...
    @property
    def watchers(self) -> MutableSet[Watcher]: ...
    def read(self) -> list[jax.Array]: ...
    def write(self, leaves: list[jax.Array]) -> None: ...
    def read_component(self, replica: int) -> list[jax.Array]: ...
    def write_component(self, replica: int, leaves: list[jax.Array]) -> None: ...
    def stored(self) -> list[jax.Array]: ...
    def refuse_lost(self) -> None: ...


class TypedVariable(Protocol):
    """A variable with leaves of known shapes and dtypes."""

    @property
    def _types(self) -> list[jax.ShapeDtypeStruct]: ...


class State(TapedVariable, TypedVariable, Protocol):
    """What frames need of a variable. Leaves are lists, since a variable may hold a whole pytree."""

    _changed: bool
    _changed_by_input: bool

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> Tree: ...
    @property
    def _equal_by_contract(self) -> bool: ...
    @property
    def _mesh(self) -> ReplicaMesh | None: ...
    @property
    def _storage(self) -> Stored: ...


_S = TypeVar("_S", covariant=True)


class _Storing(Protocol[_S]):
    @property
    def _storage(self) -> _S: ...


def storage_of(variable: _Storing[_S]) -> _S:
    """Return the object that holds the arrays of a variable."""
    return variable._storage


def types_of(variable: TypedVariable) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a variable's leaves."""
    return variable._types


def tree_of(variable: TapedVariable) -> jax.tree_util.PyTreeDef:
    """Return the structure of a variable's value."""
    return variable._treedef


class OneCopy(Stored, Protocol):
    """Where one copy of a variable can be read."""

    def read_one(self) -> list[jax.Array]: ...


class Components(OneCopy, Protocol):
    """Where the arrays of a distributed variable are."""

    @property
    def home(self) -> HomeOfComponents: ...
    def values(self) -> list[PerReplica | Mirrored]: ...


class OneCopyState(State, Protocol):
    """A variable of which one copy can be read."""

    @property
    def _storage(self) -> OneCopy: ...


class DistributedState(State, Protocol):
    """A variable that has a component for each replica."""

    @property
    def _storage(self) -> Components: ...


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
