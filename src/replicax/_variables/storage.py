"""Storages: the arrays of variables, and what is known of them.

A variable has one `Storage`, whose `home` says how its arrays lie on devices. A leaf's array is held by the storage
itself, or has a place, a `Slot`, in a store that several variables share (see `packed_storage`). Frames (`frames`), the
layouts of compiled programs (`_engine.argument_layout`) and shared stores use the methods here; the variable itself
decides what is assigned.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from replicax._base import jax_internals, pickling
from replicax._base.types import Tree
from replicax._collectives import in_flight
from replicax._tracing import lost_values
from replicax._tracing.protocols import Watcher
from replicax._values import Mirrored, PerReplica, ReplicaMesh, constrained, of_array, partition
from replicax._variables.homes import (
    CentralHome,
    Components,
    Divided,
    Home,
    Layouts,
    MirroredHome,
    PartsHome,
    Place,
    StackedHome,
    array_of,
)
from replicax._variables.homes import Leaves as Leaves
from replicax._variables.homes import Types as Types

LeafOf: TypeAlias = "tuple[Storage, int]"  # a leaf of a variable: its storage, and its number there

no_slots: dict[int, Slot] = {}


class SharedStore(ABC):
    """A store of leaves of several variables. Those in `replaced` have been assigned, and are not in it yet."""

    is_vector = False  # whether the leaves are one array

    def __init__(self, leaves: Sequence[LeafOf]):
        self.replaced: set[Slot] = set()
        self.slots: list[Slot] = []
        start = 0
        for storage, index in leaves:
            self.slots.append(Slot(self, len(self.slots), storage, index, start))
            start += self.slots[-1].size
        self._take_in([array for storage, index in leaves for array in storage.kept([index])], leaves)
        for slot, (storage, index) in zip(self.slots, leaves):
            storage.slots = {**storage.slots, index: slot}
            storage.release(index)

    @abstractmethod
    def _take_in(self, arrays: Leaves, leaves: Sequence[LeafOf]) -> None:
        """Keep the arrays of the leaves."""

    @abstractmethod
    def read(self, slot: Slot) -> jax.Array:
        """Return a leaf as an array for anybody to keep."""

    @abstractmethod
    def read_copy(self, slot: Slot, replica: int) -> jax.Array:
        """Return one replica's copy of a leaf, on the replica's device."""

    @abstractmethod
    def kept(self, slot: Slot) -> jax.Array:
        """Return a leaf for a program, which nobody else may keep."""

    @abstractmethod
    def is_lent(self, slot: Slot) -> bool:
        """Return whether somebody may hold the leaf's array, so that it must not be donated."""

    @abstractmethod
    def put_one(self, slot: Slot, array: jax.Array) -> jax.Array | None:
        """Replace a leaf by an array that a program returned; return the array if the storage itself has to hold it."""

    def _assigned(self) -> list[tuple[Slot, Storage, jax.Array]]:
        """Return the leaves that were assigned: their slots, storages and arrays."""
        there = [(slot, slot.storage) for slot in self.replaced]
        return [(slot, storage, storage.kept([slot.index])[0]) for slot, storage in there if storage is not None]

    def _taken_over(self, assigned: list[tuple[Slot, Storage, jax.Array]]) -> None:
        """Have storages release leaves that are in the store now."""
        for slot, storage, _ in assigned:
            storage.release(slot.index)
        self.replaced.clear()


class Slot:
    """The place of one leaf of a variable in a shared store.

    Args:
        store: the store.
        position: the number of the leaf in the store.
        storage: the storage of the leaf's variable.
        index: the number of the leaf in its variable.
        start: the number of elements before it in the store.
    """

    __slots__ = ("_storage", "index", "position", "shape", "size", "start", "store")

    def __init__(self, store: SharedStore, position: int, storage: Storage, index: int, start: int):
        self.store, self.position, self.index, self.start = store, position, index, start
        self.shape, self.size = storage.types[index].shape, storage.types[index].size
        self._storage: weakref.ref[Storage] | None = weakref.ref(storage)

    @property
    def storage(self) -> Storage | None:
        """The storage of the leaf's variable, None once it is gone or the slot is closed."""
        return None if self._storage is None else self._storage()

    def close(self) -> None:
        """Give the place up: the leaf's array is held by its storage from now on."""
        self._storage = None


class Watchers(weakref.WeakSet[Watcher]):
    """The compiled programs that are told of changes of a storage. Copies and pickles have none."""

    def __reduce__(self) -> tuple[type[Watchers], tuple[()]]:
        return Watchers, ()

    def tell_moved(self) -> None:
        """Tell programs that leaves have moved into a shared store or out of it."""
        for watcher in list(self):
            watcher.leaves_moved()

    def tell_layouts(self) -> None:
        """Tell programs that the arrays are split over devices in another way."""
        for watcher in list(self):
            watcher.layouts_changed()


class Storage:
    """The arrays of one variable's leaves.

    Args:
        name: the variable's, for errors.
        home: where the arrays are.
        arrays: of each leaf; None later for a leaf that is in a shared store.
        lent: whether somebody else may hold the arrays, so that they must not be donated.

    Attributes:
        types: the shapes and dtypes of the variable's leaves.
        slots: the places of leaves in shared stores, by the leaves' numbers.
        lost: the step that has taken the arrays with it, and its error; None if the arrays are there.
        watchers: the programs to tell of changes.
    """

    is_abstract = False  # whether there are shapes in place of arrays, see `abstract`
    is_gone = False  # whether the program has given up the processes that held the arrays
    # Runs compiled programs with the variable, if its arrays are in other processes: it is called with the program, the
    # call's arguments and the elements of datasets, and returns the result.
    runner: Callable[[Any, Any, Sequence[Tree]], Tree] | None = None

    def __init__(self, name: str, home: Home, arrays: Sequence[jax.Array | None], lent: bool):
        self.name, self.home, self.types, self.arrays, self.lent = name, home, home.types, arrays, lent
        self.slots: dict[int, Slot] = no_slots  # replaced, never changed: others may be reading it
        self.lost: tuple[str, BaseException] | None = None
        self.watchers = Watchers()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "arrays": pickling.stored(self.arrays)}

    def _copy(self, **attributes: object) -> Self:
        other = type(self).__new__(type(self))  # `copy.copy` would take what is to be pickled
        other.__dict__.update(self.__dict__, watchers=Watchers(), **attributes)
        return other

    def clone(self) -> Storage:
        """Return a storage with the same values for another variable; the arrays themselves are shared, so lent."""
        self.refuse_lost()
        self.lent = True
        other = self._copy(arrays=list(self.arrays))
        if self.slots:
            other.slots = no_slots
            other.write(self.read())
        return other

    def abstract(self, home: Home | None = None) -> Self:
        """Return a storage that has shapes, dtypes and shardings in place of arrays, for programs that are planned.

        Args:
            home: in place of this one's.
        """
        other = self._copy(slots=no_slots, lent=False, lost=None, home=home or self.home, is_abstract=True)
        other._hold(other.home.kinds())
        return other

    # Reading and writing from outside of compiled programs.

    def own(self) -> Sequence[jax.Array | None]:
        """Return the arrays that are held here, and None for leaves that are in shared stores."""
        return self.arrays

    def read(self) -> Leaves:
        """Return the leaves in global form, to compute with; raise `StepError` if they are lost."""
        if self.is_abstract:
            return self.home.kinds()
        if self.lost is not None:
            self.refuse_lost()
        own = self.own()
        if not self.slots:
            return own  # type: ignore[return-value]  # none of them is elsewhere
        return [self.slots[i].store.read(self.slots[i]) if array is None else array for i, array in enumerate(own)]

    def write(self, leaves: Leaves) -> None:
        """Replace the leaves, in global form."""
        if self.is_abstract:
            return
        for slot in self.slots.values():
            slot.store.replaced.add(slot)
        self._hold(self.home.placed(leaves))
        self.lent, self.lost = self.home.lends, None

    def _hold(self, arrays: Sequence[jax.Array | None]) -> None:
        self.arrays = arrays

    def read_component(self, replica: int) -> Leaves:
        """Return the components that one replica of this process has."""
        raise NotImplementedError

    def write_component(self, replica: int, leaves: Leaves) -> None:
        """Replace the components that one replica of this process has."""
        raise NotImplementedError

    def refuse_lost(self) -> None:
        """Raise `StepError` if a step that failed has taken the arrays with it."""
        if self.lost is not None:
            step, error = self.lost
            raise lost_values.lost_error(self.name, step) from error

    # For the layouts of compiled programs.

    def stored(self) -> Leaves:
        """Return the leaves where they are, for a program that brings them to its devices by itself."""
        return self.read()

    def kept(self, indices: Sequence[int]) -> Leaves:
        """Return leaves for a program that leaves them as they are."""
        own = self.own()
        return [self.slots[i].store.kept(self.slots[i]) if (array := own[i]) is None else array for i in indices]

    def taken(self, indices: Sequence[int]) -> Leaves:
        """Return leaves for a program that takes them over."""
        slots = (self.slots.get(index) for index in indices)
        lent = self.lent or any(slot is not None and slot.store.is_lent(slot) for slot in slots)
        return self.home.copied(self.kept(indices)) if lent else self.kept(indices)

    def put(self, indices: Sequence[int], leaves: Sequence[jax.Array]) -> None:
        """Replace leaves by arrays that a program returned."""
        arrays = list(self.own())
        for index, leaf in zip(indices, self.home.returned(list(leaves))):
            slot = self.slots.get(index)
            arrays[index] = leaf if slot is None else slot.store.put_one(slot, leaf)
        self._hold(arrays)

    def release(self, index: int) -> None:
        """Let go of a leaf's array: its value is in its shared store."""
        self._hold([None if i == index else array for i, array in enumerate(self.own())])


class ComponentStorage(Storage):
    """Global arrays that can be read and written by replica, as distributed values.

    Arrays and values are each made from the other when they are asked for.
    """

    home: Components

    _values: list[PerReplica | Mirrored] | None = None  # the arrays as distributed values, if they were asked for
    _stale = False  # whether components were written, so that the values are newer than the arrays

    def __init__(self, name: str, home: Components, leaves: Leaves, lent: bool):
        super().__init__(name, home, (), lent)
        self.arrays = [home.global_leaf(leaf, i, traced=False) for i, leaf in enumerate(home.of_first(leaves, name))]

    def _hold(self, arrays: Sequence[jax.Array | None]) -> None:
        self.arrays, self._values, self._stale = arrays, None, False

    def own(self) -> Sequence[jax.Array | None]:
        if self._stale:
            assert self._values is not None
            self._hold(self.home.placed([array_of(value) for value in self._values]))
        return self.arrays

    def values(self) -> list[PerReplica | Mirrored]:
        """Return the leaves as distributed values."""
        if self._values is not None:
            return self._values
        values = [of_array(self.home.value_type, array, self.home.mesh) for array in _read_whole(self)]
        # Mirrored copies share the array's buffers; rows and parts put together are copies, not to be kept beside it,
        # and those of a shared vector are good until the next call.
        if self.home.shares_copies and not self.slots:
            self._values = values
        return values

    def read_component(self, replica: int) -> Leaves:
        if self.lost is not None:
            self.refuse_lost()
        if self.is_abstract:
            return list(self.home.leaf_types(True))  # type: ignore[arg-type]
        self.lent = True
        if self._values is None and self.home.shares_copies:  # one copy, of however many
            return [
                self.slots[i].store.read_copy(self.slots[i], replica)
                if array is None
                else self.home.mesh.copy(array, replica)
                for i, array in enumerate(self.arrays)
            ]
        return [value.values[replica] for value in self.values()]

    def read_one(self) -> Leaves:
        """Return the first replica's copies; of leaves that need not fit on one device, the global arrays."""
        if self.home.layouts is None:
            return self.read_component(0)
        self.lent = True
        return self.read() if self.home.mesh.all_local else _read_whole(self)

    def write_component(self, replica: int, leaves: Leaves) -> None:
        if self.is_abstract:
            return
        changed, values = [], self.values()
        for slot in self.slots.values():
            slot.store.replaced.add(slot)
        for stored, leaf in zip(values, leaves):
            parts = list(stored.values)
            parts[replica] = leaf
            changed.append(self.home.value_type(parts, self.home.mesh))
        self.arrays = []  # not kept beside the components
        self._values, self._stale, self.lent = changed, True, True

    def lay_out(self, home: Components) -> None:
        """Lay the leaves out on the devices as another home does, now and from now on."""
        arrays = self.read()
        self.home = home
        self.watchers.tell_layouts()
        for slot in self.slots.values():
            slot.close()
        self.slots = no_slots
        self.watchers.tell_moved()
        if self.is_abstract:
            return self._hold(home.kinds())
        self._hold(home.placed(arrays))
        self.lent = True


class MirroredStorage(ComponentStorage):
    """Leaves of which every replica has a copy or a part."""

    home: MirroredHome

    def __init__(
        self,
        name: str,
        types: Types,
        mesh: ReplicaMesh,
        leaves: Leaves,
        lent: bool,
        layouts: Layouts,
        divided: Divided | None,
    ):
        # What is split already stays so. Without values there are no leaves.
        given = [mesh.layout_of(leaf, name) for leaf in leaves] or [None] * len(types)
        layouts = [own or layout for own, layout in zip(given, layouts)]
        super().__init__(name, MirroredHome(types, mesh, layouts, divided), leaves, lent)


class StackedStorage(ComponentStorage):
    """Leaves of which every replica has one of its own."""

    home: StackedHome

    def __init__(self, name: str, types: Types, mesh: ReplicaMesh, leaves: Leaves, lent: bool):
        super().__init__(name, StackedHome(types, mesh), leaves, lent)


class CentralStorage(Storage):
    """Leaves that live once for all replicas."""

    home: CentralHome

    def __init__(self, name: str, types: Types, mesh: ReplicaMesh, leaves: Leaves, place: Place):
        home = CentralHome(types, mesh, place)
        super().__init__(name, home, home.placed(leaves), home.lends)

    def stored(self) -> Leaves:
        return super().read()

    def read(self) -> Leaves:
        with jax_internals.untraced():
            return [self.home.entering(leaf) for leaf in self.stored()]

    def _read_on(self, device: jax.Device | None) -> Leaves:
        leaves = self.stored()
        self.lent = self.lent or self.home.lends
        with jax_internals.untraced():
            return [self.home.place.read(leaf, device) for leaf in leaves]

    def read_one(self) -> Leaves:
        """Return the leaves wherever is nearest."""
        return self._read_on(None)

    def read_component(self, replica: int) -> Leaves:
        return self._read_on(self.home.mesh.local_devices[replica])

    def write_component(self, replica: int, leaves: Leaves) -> None:
        self.write(leaves)


class ShardedStorage(Storage):
    """Leaves of which every replica keeps a part (see `PartsHome`); `arrays` are in global form."""

    home: PartsHome

    def __init__(self, name: str, types: Types, mesh: ReplicaMesh, arrays: Sequence[jax.Array], lent: bool):
        super().__init__(name, PartsHome(types, mesh), arrays, lent)


def _read_whole(storage: ComponentStorage) -> Leaves:
    """Return the leaves as arrays of which each replica has its component."""
    arrays, home = storage.read(), storage.home
    if not home.is_cut:
        return arrays
    with jax_internals.untraced(), in_flight.dispatching(home.mesh, f"reading {storage.name}") as call:
        specs = (partition.within_replica(layout) or PartitionSpec() for layout in home.layouts or ())
        wholes: Leaves = _gathered(arrays, tuple(NamedSharding(home.mesh.mesh, spec) for spec in specs))
        call.output = wholes[0]
    return wholes


@functools.partial(jax.jit, static_argnums=1)
def _gathered(arrays: Leaves, shardings: Sequence[NamedSharding]) -> Leaves:
    return list(map(constrained, arrays, shardings))
