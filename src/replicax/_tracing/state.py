"""What frames need of variables and of where their arrays are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSet, Sequence
from typing import Any, Protocol, TypeVar

import jax
from jax.sharding import PartitionSpec

from replicax._base.types import Leaf, Tree
from replicax._tracing.tape_trace import TapedVariable
from replicax._values import Mirrored, PerReplica, ReplicaMesh


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
