"""Variables whose values lie on parameter servers."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import jax
import numpy as np
from jax import lax

from replicax._base import jax_internals, planning
from replicax._base.types import Leaf, Tree
from replicax._parameter_server.arrays import of_kind
from replicax._parameter_server.places import Part, Place
from replicax._parameter_server.servers import Servers
from replicax._tracing import frames
from replicax._tracing.protocols import State, storage_of
from replicax._variables.homes import Home
from replicax._variables.leaves import SCATTER
from replicax._variables.resource import ResourceVariable
from replicax._variables.storage import Leaves, Storage, Types
from replicax._variables.variable import Variable


class Cluster(Protocol):
    """A cluster with parameter servers, as variables need it."""

    runner: Callable[[Any, Any, Sequence[Tree]], Tree]
    is_closed: bool

    @property
    def servers(self) -> Servers: ...
    def new_storage(
        self, name: str, types: Types, leaves: Leaves, parts: Sequence[Sequence[Part]]
    ) -> ServedStorage: ...


class _ServedHome(Home):
    """The memory of parameter servers."""

    def copied(self, leaves: Leaves) -> Leaves:
        return leaves  # they are copies


class ServedStorage(Storage):
    """Leaves that lie on parameter servers: each read and each write goes there.

    Args:
        name: the variable's, for errors.
        types: the shapes and dtypes of its leaves.
        cluster: the cluster with the servers.
        places: where each leaf lies.
    """

    def __init__(self, name: str, types: Types, cluster: Cluster, places: Sequence[Place]):
        super().__init__(name, _ServedHome(types), (), lent=True)
        self.cluster, self.places = cluster, list(places)

    @property
    def runner(self) -> Callable[[Any, Any, Sequence[Tree]], Tree]:  # type: ignore[override]
        """Runs programs of this process with the variable."""
        return self.cluster.runner

    @property
    def is_gone(self) -> bool:  # type: ignore[override]
        """Whether the program has closed the cluster."""
        return self.cluster.is_closed

    def owns_places(self) -> None:
        """Has the servers forget the leaves when this storage is no more."""
        weakref.finalize(self, self.cluster.servers.drop, self.places).atexit = False

    def own(self) -> Leaves:
        return self.read()

    def read(self) -> Leaves:
        return self.kept(range(len(self.places)))

    read_one = stored = read

    def read_component(self, replica: int) -> Leaves:
        return self.read()

    def write(self, leaves: Leaves) -> None:
        self.cluster.servers.combine("assign", self.places, leaves, answers=False)

    def write_component(self, replica: int, leaves: Leaves) -> None:
        self.write(leaves)

    def combine(self, method: str, leaves: Leaves, answers: bool) -> Leaves:
        """Assigns, adds or subtracts leaves on the servers; returns the new values if they are asked for."""
        arrays = self.cluster.servers.combine(method, self.places, leaves, answers)
        with jax_internals.untraced():
            return [of_kind(array, kind) for array, kind in zip(arrays, self.types)]

    def clone(self) -> Storage:
        """Returns a storage with the same values in places of its own, on the same servers."""
        return self.cluster.new_storage(self.name, self.types, self.read(), [place.parts for place in self.places])

    def __getstate__(self) -> dict[str, object]:
        raise TypeError(
            f"{self.name} lies on parameter servers, and only its value can be pickled: pickle `variable.numpy()`, or "
            "save it with a checkpoint."
        )

    def kept(self, indices: Sequence[int]) -> Leaves:
        places = [self.places[index] for index in indices]
        arrays = self.cluster.servers.read(places)
        with jax_internals.untraced():
            return [of_kind(array, self.types[index]) for array, index in zip(arrays, indices)]

    def put(self, indices: Sequence[int], leaves: Sequence[jax.Array]) -> None:
        places = [self.places[index] for index in indices]
        self.cluster.servers.combine("assign", places, leaves, answers=False)


class ServedVariable(ResourceVariable):
    """A variable whose leaves lie on parameter servers."""

    _storage: ServedStorage

    def __init__(self, *args: Any, cluster: Cluster, parts: Sequence[Sequence[Part]], **kwargs: Any):
        self._cluster, self._parts = cluster, parts
        super().__init__(*args, **kwargs)

    def _new_storage(self, leaves: Leaves, lent: bool) -> ServedStorage:
        if planning.are_abstract():
            name = self.name.removesuffix(":0")
            raise planning.PlanError(
                f"{name} would lie on parameter servers, without a value. A step whose variables lie there cannot be "
                "planned: workers and servers each run a part of it. Plan the model under MirroredStrategy."
            )
        return self._cluster.new_storage(self.name, self._types, leaves, self._parts)

    def _device(self) -> str:
        servers = dict.fromkeys(part.server for place in self._storage.places for part in place.parts)
        return ", ".join(f"/job:ps/replica:0/task:{server}/device:CPU:0" for server in servers)

    @property
    def device(self) -> str:
        """The full name of the parameter server's device."""
        return self._device()

    def _update(self, method: str, value: Tree, read_value: bool) -> Tree:
        if _is_traced():
            return super()._update(method, value, read_value)
        argument = self._signature.convert(method, value)
        if method in SCATTER:
            (rows,) = argument
            frames.note(cast(State, self))
            servers, (place,) = self._storage.cluster.servers, self._storage.places
            servers.scatter(method, place, np.asarray(rows.indices), np.asarray(rows.values))
            return self.value() if read_value else None
        frames.refuse_tracers(argument)
        frames.note(cast(State, self))
        new = self._storage.combine(method, argument, read_value)
        return self._signature.unflatten(new) if read_value else None


class ShardedVariable(ServedVariable):
    """A variable whose rows are divided among parameter servers.

    In compiled code it is one array, of which a lookup moves only the rows that it needs. `variables` are its parts,
    each a variable.
    """

    _made_parts: tuple[ServedStorage, list[PartVariable]] | None = None

    @property
    def variables(self) -> list[Variable]:
        """The parts, each on one server: the same objects each time, as tapes and optimizers know variables by that."""
        if self._made_parts is None or self._made_parts[0] is not self._storage:  # it is a copy's own then
            count = len(self._storage.places[0].parts)
            self._made_parts = self._storage, [PartVariable._part(self, number) for number in range(count)]
        return [*self._made_parts[1]]

    def __iter__(self) -> Iterator[Variable]:  # type: ignore[override]
        return iter(self.variables)

    def __len__(self) -> int:
        raise TypeError("object of type 'ShardedVariable' has no len()")

    def __getitem__(self, key: Any) -> Leaf:
        return self.value()[key]


_OWN = ("_storage", "_made_parts")  # attributes of a sharded variable that its parts do not have


class PartVariable(ServedVariable):
    """One part of a sharded variable. In compiled code it is rows of the whole."""

    _whole: ShardedVariable
    _start: int

    @classmethod
    def _part(cls, whole: ShardedVariable, number: int) -> PartVariable:
        self = cls.__new__(cls)
        self.__dict__.update({name: value for name, value in whole.__dict__.items() if name not in _OWN})
        place = storage_of(whole).places[0]
        part = place.part(number)
        self._whole, self._start = whole, place.parts[number].start
        self._name = f"{self._name}/part_{number}"
        self._signature = dataclasses.replace(self._signature, name=self.name, types=[part.kind])
        self._storage = ServedStorage(self.name, self._types, self._cluster, [part])
        return self

    def _get(self) -> Leaves:
        if not _is_traced():
            return super()._get()
        return [leaf[self._start : self._start + self._types[0].shape[0]] for leaf in self._whole._get()]

    def _put(self, leaves: Leaves) -> None:
        if not _is_traced():
            return super()._put(leaves)
        pairs = zip(self._whole._get(), leaves)
        self._whole._put([lax.dynamic_update_slice_in_dim(leaf, rows, self._start, 0) for leaf, rows in pairs])


def _is_traced() -> bool:
    return isinstance(frames.frame(), frames.TraceFrame)
