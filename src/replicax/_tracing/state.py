"""What frames need of variables and of where their arrays are."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from replicax._tracing.tape_trace import TapedVariable


class Stored(Protocol):
    """What frames need of where a variable's arrays are (see `_variables.storage`)."""

    lent: bool
    lost: tuple[str, BaseException] | None
    device: jax.Device | None

    def read(self) -> list[Any]: ...
    def write(self, leaves: list[Any]) -> None: ...
    def read_component(self, replica: int) -> list[Any]: ...
    def write_component(self, replica: int, leaves: list[Any]) -> None: ...
    def stored(self) -> list[Any]: ...
    def leaf_types(self, local: bool) -> list[jax.ShapeDtypeStruct]: ...
    def has_rows(self, index: int) -> bool: ...
    def copied(self, leaves: list[Any]) -> list[Any]: ...
    def entering(self, leaf: Any) -> Any: ...
    def leaving(self, leaves: list[Any]) -> list[Any]: ...
    def watch(self, watcher: Any) -> None: ...
    def refuse_lost(self) -> None: ...


class State(TapedVariable, Protocol):
    """What frames need of a variable. Leaves are lists, since a variable may hold a whole pytree."""

    _mesh: Any
    _equal_by_contract: bool
    _types: list[jax.ShapeDtypeStruct]

    @property
    def name(self) -> str: ...
    @property
    def _storage(self) -> Stored: ...


class OneCopy(Stored, Protocol):
    """Where one copy of a variable can be read."""

    def read_one(self) -> list[Any]: ...


class Components(OneCopy, Protocol):
    """Where the arrays of a distributed variable are."""

    def values(self) -> list[Any]: ...
    def global_leaf(self, leaf: Any, index: int, traced: bool) -> Any: ...


class OneCopyState(State, Protocol):
    """A variable of which one copy can be read."""

    @property
    def _storage(self) -> OneCopy: ...


class DistributedState(State, Protocol):
    """A variable that has a component for each replica."""

    @property
    def _storage(self) -> Components: ...
