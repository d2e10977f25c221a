"""Where the arrays of a variable are: its storage.

A variable has one `Storage`, which knows how its arrays lie on devices. A leaf's array is held by the storage itself,
or has a place, a `Slot`, in a store that several variables share (see `packed_storage`). Frames (`frames`), compiled
programs (`_engine.program`) and shared stores use the methods here; the variable itself decides what is assigned.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from replicax._base import jax_internals, pickling
from replicax._base.types import Tree
from replicax._tracing import lost_values
from replicax._tracing.state import Watcher
from replicax._values import ReplicaMesh

Types: TypeAlias = list[jax.ShapeDtypeStruct]
Leaves: TypeAlias = list[jax.Array]
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
        for slot, (storage, _) in zip(self.slots, leaves):
            storage.join(slot)

    @abstractmethod
    def _take_in(self, arrays: Leaves, leaves: Sequence[LeafOf]) -> None:
        """Keeps the arrays of the leaves."""

    @abstractmethod
    def read(self, slot: Slot) -> jax.Array:
        """Returns a leaf as an array for anybody to keep."""

    @abstractmethod
    def read_copy(self, slot: Slot, replica: int) -> jax.Array:
        """Returns one replica's copy of it, on that one's device."""

    @abstractmethod
    def kept(self, slot: Slot) -> jax.Array:
        """Returns a leaf for a program, which need not be anybody else's to keep."""

    @abstractmethod
    def is_lent(self, slot: Slot) -> bool:
        """Returns whether somebody may hold the leaf's array, so that it must not be donated."""

    @abstractmethod
    def put_one(self, slot: Slot, array: jax.Array) -> jax.Array | None:
        """Replaces a leaf by what a program returned; returns the array if the storage itself has to hold it."""

    def _assigned(self) -> list[tuple[Slot, Storage, jax.Array]]:
        """Returns what was assigned: where it goes, its storage, and the leaf."""
        there = [(slot, slot.storage) for slot in self.replaced]
        return [(slot, storage, storage.kept([slot.index])[0]) for slot, storage in there if storage is not None]

    def _taken_over(self, assigned: list[tuple[Slot, Storage, jax.Array]]) -> None:
        """Has storages let go of what is in the store now."""
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
        """Gives the place up: the leaf's array is held by its storage from now on."""
        self._storage = None


class Storage:
    """Where the arrays of one variable's leaves are.

    Args:
        name: the variable's, for errors.
        types: the shapes and dtypes of the variable's leaves.
        mesh: the replicas' devices, where the variable is of a strategy that has several.
        arrays: of each leaf; None later for one that stands in a shared store.
        lent: whether somebody else may hold the arrays, so that they must not be donated.
    """

    is_abstract = False  # whether there are shapes in place of arrays, see `abstract`
    is_gone = False  # whether the program has given up the processes that held the arrays
    device: jax.Device | None = None  # the one that the arrays stay on, where the variable's strategy has one
    # Runs compiled programs with the variable, where its arrays are in other processes: it is called with the program,
    # the call's arguments and the elements of datasets, and returns the result.
    runner: Callable[[Any, Any, Sequence[Tree]], Tree] | None = None

    def __init__(
        self, name: str, types: Types, mesh: ReplicaMesh | None, arrays: Sequence[jax.Array | None], lent: bool
    ):
        self.name, self.types, self.mesh, self.arrays, self.lent = name, types, mesh, arrays, lent
        self.slots: dict[int, Slot] = no_slots  # replaced, never changed: others may be reading it
        self.lost: tuple[str, BaseException] | None = None  # the step that has taken the arrays with it, and its error
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()

    # Reading and writing from outside of compiled programs.

    def own(self) -> Sequence[jax.Array | None]:
        """Returns the arrays that are held here, and None for leaves that stand in shared stores."""
        return self.arrays

    def read(self) -> Leaves:
        """Returns the leaves in global form, to compute with; raises `StepError` where they are lost."""
        if self.is_abstract:
            return self._kinds()
        if self.lost is not None:
            self.refuse_lost()
        own = self.own()
        if not self.slots:
            return own  # type: ignore[return-value]  # none of them is elsewhere
        return [self.slots[i].store.read(self.slots[i]) if array is None else array for i, array in enumerate(own)]

    def write(self, leaves: Leaves) -> None:
        """Replaces the leaves, in global form."""
        if self.is_abstract:
            return
        self._leave_shared()
        self._hold(self.placed(leaves))
        self.lent, self.lost = True, None

    def _hold(self, arrays: Sequence[jax.Array | None]) -> None:
        self.arrays = arrays

    def read_component(self, replica: int) -> Leaves:
        """Returns what one replica of this process has of the leaves."""
        raise NotImplementedError

    def write_component(self, replica: int, leaves: Leaves) -> None:
        """Replaces what one replica of this process has of the leaves."""
        raise NotImplementedError

    def refuse_lost(self) -> None:
        """Raises `StepError` if a step that failed has taken the arrays with it."""
        if self.lost is not None:
            step, error = self.lost
            raise lost_values.lost_error(self.name, step) from error

    def clone(self) -> Storage:
        """Returns a storage with the same values for another variable; the arrays themselves are shared, so lent."""
        self.refuse_lost()
        self.lent = True
        other = type(self).__new__(type(self))  # `copy.copy` would take what is to be pickled
        other.__dict__.update(self.__dict__, arrays=list(self.arrays), _watchers=weakref.WeakSet())
        if self.slots:
            other.slots = no_slots
            other.write(self.read())
        return other

    def __getstate__(self) -> dict[str, object]:
        state = {name: value for name, value in self.__dict__.items() if name != "_watchers"}
        return {**state, "arrays": pickling.stored(self.arrays)}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._watchers = weakref.WeakSet()

    # The form of the arrays.

    def leaf_types(self, local: bool) -> Types:
        """Returns the shapes and dtypes of the leaves in global form, or of one replica's components of them."""
        return self.types

    def has_rows(self, index: int) -> bool:
        """Returns whether a leaf has a row for each replica in global form."""
        return False

    def cut_axis(self, index: int) -> int | None:
        """Returns the axis along which each replica has a part of a leaf; None if the leaf is whole on each."""
        return None

    def device_layout(self, index: int) -> PartitionSpec | None:
        """Returns how what a replica has of a leaf is split over the replica's devices; None if it is not."""
        return None

    def placed(self, leaves: Leaves) -> Leaves:
        """Returns new leaves in global form as they are held here."""
        return list(leaves)

    def returned(self, leaves: Leaves) -> Leaves:
        """Returns leaves that a program returned as they are held here."""
        return self.placed(leaves)

    def abstract(self) -> Self:
        """Returns a storage that has shapes, dtypes and shardings in place of arrays, for programs that are planned."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__, slots=no_slots, lent=False, lost=None, _watchers=weakref.WeakSet())
        other.is_abstract = True
        other._hold(other._kinds())
        return other

    def _kinds(self) -> Leaves:
        """Returns the shapes, dtypes and shardings of the leaves in global form, to be held in place of arrays."""
        kinds = zip(self.leaf_types(False), self.shardings())
        return [jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=each) for kind, each in kinds]  # type: ignore[misc]

    def shardings(self) -> Sequence[NamedSharding | None]:
        """Returns how the leaves lie on the devices of a mesh; None for those on one device."""
        return [None] * len(self.types)

    # For compiled programs.

    def stored(self) -> Leaves:
        """Returns the leaves where they are held, for a program that brings them to its devices by itself."""
        return self.read()

    def entering(self, leaf: jax.Array) -> jax.Array:
        """Returns a leaf of `stored`, inside of a program, where the program may compute with it."""
        return leaf

    def leaving(self, leaves: Leaves) -> Leaves:
        """Returns new leaves, inside of a program, as the program has to hand them out."""
        return leaves

    def copied(self, leaves: Leaves) -> Leaves:
        """Returns copies of leaves of `stored`, which a program may take over."""
        return copies(leaves)

    def kept(self, indices: Sequence[int]) -> Leaves:
        """Returns leaves for a program that leaves them as they are."""
        own = self.own()
        return [self.slots[i].store.kept(self.slots[i]) if (array := own[i]) is None else array for i in indices]

    def taken(self, indices: Sequence[int]) -> Leaves:
        """Returns leaves for a program that takes them over."""
        slots = (self.slots.get(index) for index in indices)
        lent = self.lent or any(slot is not None and slot.store.is_lent(slot) for slot in slots)
        return self.copied(self.kept(indices)) if lent else self.kept(indices)

    def put(self, indices: Sequence[int], leaves: Sequence[jax.Array]) -> None:
        """Replaces leaves by what a program returned."""
        arrays = list(self.own())
        for index, leaf in zip(indices, self.returned(list(leaves))):
            slot = self.slots.get(index)
            arrays[index] = leaf if slot is None else slot.store.put_one(slot, leaf)
        self._hold(arrays)

    # For shared stores.

    def vector_home(self, index: int, array: jax.Array) -> Hashable:
        """Returns where a vector lies that this leaf, held here as `array`, may stand in; None if it may not."""
        return None

    def may_be_listed(self, spread: bool) -> bool:
        """Returns whether the leaves may stand in the list of a program, which may be spread over several devices."""
        return False

    def join(self, slot: Slot) -> None:
        """Lets go of a leaf's array, which stands in a shared store from now on."""
        self.slots = {**self.slots, slot.index: slot}
        self.release(slot.index)

    def release(self, index: int) -> None:
        """Lets go of a leaf's array: its value stands in its shared store."""
        self._hold([None if i == index else array for i, array in enumerate(self.own())])

    def _leave_shared(self) -> None:
        """Notes, before leaves are written from outside, that no leaf's value stands in a shared store any more."""
        for slot in self.slots.values():
            slot.store.replaced.add(slot)

    # Telling programs of changes.

    def watch(self, watcher: Watcher) -> None:
        """Has a program told of changes, as long as there is the program."""
        self._watchers.add(watcher)

    def tell_moved(self) -> None:
        """Tells programs that leaves have come to stand in a shared vector, or stand in it no more."""
        for watcher in list(self._watchers):
            watcher.leaves_moved()

    def tell_layouts(self) -> None:
        """Tells programs that the arrays are split over devices in another way."""
        for watcher in list(self._watchers):
            watcher.layouts_changed()


def copies(arrays: Leaves) -> Leaves:
    """Returns copies of arrays, which may lie in several places."""
    by_devices: dict[tuple[jax.Device, ...], list[int]] = {}
    for i, array in enumerate(arrays):
        by_devices.setdefault(tuple(array.sharding.device_set), []).append(i)
    found = list(arrays)
    for devices, indices in by_devices.items():
        with jax.default_device(devices[0]) if len(devices) == 1 else contextlib.nullcontext():
            copied = _copied([arrays[i] for i in indices])
        for i, array in zip(indices, copied):
            found[i] = array
    return found


@jax.jit
def _copied(arrays: Leaves) -> Leaves:
    return [jnp.copy(array) for array in arrays]


def constrained(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns an array, inside of a program, which has to lie in this way where it leaves the program."""
    there: jax.Array = lax.with_sharding_constraint(array, sharding)
    return there


def on_one_device(leaf: jax.Array, device: jax.Device | None) -> jax.Array:
    """Returns a leaf from anywhere as a variable of one copy keeps it: on `device`, or where it is."""
    leaf = jax_internals.first_copy(leaf)  # a program over several devices leaves a copy on each
    if device is None or device in leaf.devices():
        return leaf
    with jax_internals.untraced():
        return jax_internals.uncommitted(jax.device_put(leaf, device))
