"""Small variables side by side in one vector: a *pack*.

A call of a compiled program costs time for every array that goes in and out of it. So variables that a program updates
in the same way, such as one optimizer's moments, share one array between calls, which the next call takes over and the
program updates at once (see `_vectors`). Their users notice nothing: what is read is an array of its own, cut out of
the vector; what is assigned from outside stands beside it until the next call puts it in.

A leaf of a variable is packed at most once, by the first program that updates it, so that the programs which know of a
pack stay as they are.

What else a program replaces stands on a *shelf* between its calls: a list of arrays that goes in and comes out as it
is, where looking for hundreds of variables and telling each its new array would take longer than the call.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax import _levels, _private
from replicax._recycled import put

# Measured with benchmarks/step.py --variables: below this number the arrays of a call cost less than to take a vector
# apart; larger arrays take longer to copy than to be handed over.
FEWEST = 4
FEWEST_ON_SHELF = 4
LARGEST = 1 << 14  # bytes
LARGEST_PACK = 1 << 22
MOST_COPIES = 1 << 12  # of arrays on replicas; the host takes longer for more than it takes to compile a program

_nothing: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

changes = 0  # how many packs there are; programs that know of fewer look at theirs again


class Slot:
    """The place of one leaf of a variable in a pack or on a shelf."""

    __slots__ = ("index", "place", "shape", "start", "store", "variable")

    def __init__(self, store: Pack | Shelf, place: int, variable: Any, index: int, start: int, shape: tuple[int, ...]):
        self.store, self.place, self.index, self.start, self.shape = store, place, index, start, shape
        self.variable: Callable[[], Any] = weakref.ref(variable)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def close(self) -> None:
        """The leaf stands by itself from now on."""
        self.variable = _gone

    def read(self) -> Any:
        """The leaf as an array for anybody to keep."""
        return self.store.read(self)

    def read_copy(self, replica: int) -> Any:
        """One replica's copy of it, on that one's device."""
        return self.store.read_copy(self, replica)


def _gone() -> None:
    return None


class Home:
    """Where the vector of a pack lies: on one device, to which JAX may hold it committed, or on all of a mesh.

    With `stays` it comes back to the device from programs that run on others.
    """

    def __init__(self, sharding: Any, mesh: Any = None, committed: bool = True, stays: bool = False):
        self.sharding, self.mesh, self.committed, self._stays = sharding, mesh, committed, stays
        self._key = sharding, mesh, committed, stays

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Home) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def replicas(self) -> Sequence[int]:
        """The numbers of the replicas of this process."""
        return (0,) if self.mesh is None else self.mesh.local_ids

    def copies(self, array: Any) -> list[np.ndarray]:
        """What an array is on each replica of this process: they may have assigned different values."""
        copies = [array] if self.mesh is None else self.mesh.copies(array)
        return [np.asarray(copy) for copy in copies]

    def put(self, copies: list[np.ndarray]) -> Any:
        """A vector of the host for each of them, brought here."""
        if self.mesh is not None:
            return self.mesh.mirror(copies)
        (vector,) = put(copies, self.sharding, may_alias=False)
        return vector if self.committed else _private.uncommitted(vector)

    def joined(self, arrays: list[Any]) -> Any:
        """The vector of arrays that lie here."""
        if self.mesh is not None and self.mesh.all_local and len(arrays) * self.mesh.size > MOST_COPIES:
            return _joined(arrays, self)
        by_array = [self.copies(array) for array in arrays]
        return self.put([np.concatenate([np.ravel(copy) for copy in copies]) for copies in zip(*by_array)])

    def constrained(self, vector: Any) -> Any:
        """Inside of a program: a vector, to be returned to its home."""
        return vector if self.mesh is None else lax.with_sharding_constraint(vector, self.sharding)

    def cut_copy(self, vector: Any, slot: Slot, replica: int) -> Any:
        """A slot's part of one replica's copy of the vector; no other device takes part."""
        with _private.at_once():
            return _private.uncommitted(_cut(self.mesh.shard(vector, replica), np.int32(slot.start), slot.shape))

    def kept(self, vector: Any) -> Any:
        """A vector that a program returned, as it is kept."""
        return vector if self.mesh is not None else on_one_device(vector, self.sharding if self._stays else None)

    def cut(self, vector: Any, slot: Slot) -> Any:
        """A slot's part of the vector."""
        with _private.at_once():
            if self.mesh is None:
                with jax.default_device(self.sharding):
                    return _cut(vector, np.int32(slot.start), slot.shape)
            if self.mesh.all_local:
                return _cut(vector, np.int32(slot.start), slot.shape)
            parts = [_cut(shard.data, np.int32(slot.start), slot.shape) for shard in vector.addressable_shards]
            return jax.make_array_from_single_device_arrays(slot.shape, self.sharding, parts)


def on_one_device(leaf: Any, place: Any) -> Any:
    """A leaf from anywhere as a variable of one copy keeps it, which any program can take: there, or where it is."""
    leaf = _private.single(leaf)  # a program over several devices leaves a copy on each
    if place is None or place in leaf.devices():
        return leaf
    with _private.at_once():
        return _private.uncommitted(jax.device_put(leaf, place))


@functools.partial(jax.jit, static_argnums=1)
def _joined(arrays: list[Any], home: Home) -> Any:
    return home.constrained(jnp.concatenate([jnp.ravel(array) for array in arrays]))


@functools.partial(jax.jit, static_argnums=2)
def _cut(vector: Any, start: Any, shape: tuple[int, ...]) -> Any:
    return jnp.reshape(lax.dynamic_slice(vector, (start,), (math.prod(shape),)), shape)


class _Store:
    """Keeps the values of leaves of variables. Those in `replaced` have been assigned, and are not in it yet."""

    def __init__(self, leaves: Sequence[tuple[Any, int]]):
        self.replaced: set[Slot] = set()
        self.slots: list[Slot] = []
        start = 0
        for variable, index in leaves:
            shape = tuple(variable._types[index].shape)
            self.slots.append(Slot(self, len(self.slots), variable, index, start, shape))  # type: ignore[arg-type]
            start += self.slots[-1].size
        arrays = [variable._own_leaves([index])[0] for variable, index in leaves]
        self._take_in(arrays)
        for slot, (variable, index) in zip(self.slots, leaves):
            variable._slots = {**(variable._slots or {}), index: slot}
            variable._give_up(index)

    def _take_in(self, arrays: list[Any]) -> None:
        raise NotImplementedError

    def _assigned(self) -> list[tuple[Slot, Any, Any]]:
        """What was assigned: where it goes, the variable, and the leaf."""
        there = [(slot, slot.variable()) for slot in self.replaced]
        return [(slot, v, v._own_leaves([slot.index])[0]) for slot, v in there if v is not None]

    def _taken_over(self, assigned: list[tuple[Slot, Any, Any]]) -> None:
        """It is in the store now, so that the variables need not keep it."""
        for slot, variable, _ in assigned:
            variable._give_up(slot.index)
        self.replaced.clear()


class Pack(_Store):
    """Leaves of variables in one vector."""

    def __init__(self, home: Home, leaves: Sequence[tuple[Any, int]]):
        self.home = home
        # What was read since the vector was replaced, and what of one replica's copy.
        self.views: dict[Slot | tuple[Slot, int], Any] = {}
        super().__init__(leaves)

    def _take_in(self, arrays: list[Any]) -> None:
        self.array = self.home.joined(arrays)

    def read(self, slot: Slot) -> Any:
        """A leaf, cut out."""
        if slot not in self.views:
            self.views[slot] = self.home.cut(self.array, slot)
        return self.views[slot]

    def read_copy(self, slot: Slot, replica: int) -> Any:
        """One replica's copy of a leaf, cut out."""
        if slot in self.views:
            return self.home.mesh.copy(self.views[slot], replica)
        if (slot, replica) not in self.views:
            self.views[slot, replica] = self.home.cut_copy(self.array, slot, replica)
        return self.views[slot, replica]

    def current(self) -> Any:
        """The vector, with all that was assigned."""
        if self.replaced:
            assigned = self._assigned()
            copies = [self.home.copies(leaf) for _, _, leaf in assigned]
            left = (slot for slot in self.slots if slot not in self.replaced)
            if not self.array.is_deleted() and any(slot.variable() is not None for slot in left):
                vectors = [np.array(copy) for copy in self.home.copies(self.array)]
            else:  # all anew, or a program that failed has taken the vector with it
                vectors = [np.zeros(self.array.shape, self.array.dtype) for _ in self.home.replicas]
            for (slot, _, _), parts in zip(assigned, copies):
                for vector, part in zip(vectors, parts):
                    vector[slot.start : slot.start + slot.size] = np.ravel(part)
            self.put(self.home.put(vectors))
            self._taken_over(assigned)
        return self.array

    def put(self, vector: Any) -> None:
        """Replaces the vector by one that a program returned."""
        self.array = self.home.kept(vector)
        self.views.clear()


class Shelf(_Store):
    """Leaves of variables as arrays in a list. Those in `lent` may be held by somebody, and must not be donated."""

    def _take_in(self, arrays: list[Any]) -> None:
        self.arrays = arrays
        self.lent = {slot.place for slot in self.slots if slot.variable()._lent}
        self._copied_last: list[int] = sorted(self.lent)

    def read(self, slot: Slot) -> Any:
        """A leaf's array, which is lent from now on."""
        self.lent.add(slot.place)
        return self.arrays[slot.place]

    def read_copy(self, slot: Slot, replica: int) -> Any:
        """One replica's copy of a leaf's array, which is lent from now on."""
        return slot.variable()._mesh.copy(self.read(slot), replica)

    def current(self) -> list[Any]:
        """The arrays, with all that was assigned, and copies of what is lent."""
        if self.replaced:
            assigned = self._assigned()
            for slot, variable, leaf in assigned:
                self.arrays[slot.place] = leaf
                if variable._lent:
                    self.lent.add(slot.place)
            self._taken_over(assigned)
        if self.lent:
            places = sorted(self.lent)
            lent = [self.arrays[place] for place in places]
            # Together, which is a program for each choice of arrays, only where it is the same choice as last time.
            together = places == self._copied_last
            for place, copy in zip(places, copies(lent) if together else [copies([array])[0] for array in lent]):
                self.arrays[place] = copy
            self.lent.clear()
            self._copied_last = places
        return self.arrays

    def put(self, arrays: list[Any]) -> None:
        """Replaces the arrays by those that a program returned."""
        self.arrays = arrays

    def put_one(self, slot: Slot, array: Any) -> None:
        """Replaces one of them."""
        self.replaced.discard(slot)
        self.lent.discard(slot.place)
        self.arrays[slot.place] = array


def copies(arrays: list[Any]) -> list[Any]:
    """Copies of arrays, which may lie in several places."""
    by_devices: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        by_devices.setdefault(tuple(array.sharding.device_set), []).append(i)
    found = list(arrays)
    for devices, places in by_devices.items():
        with jax.default_device(devices[0]) if len(devices) == 1 else _nothing:
            copied = _copied([arrays[i] for i in places])
        for i, copy in zip(places, copied):
            found[i] = copy
    return found


@jax.jit
def _copied(arrays: list[Any]) -> list[Any]:
    return [jnp.copy(array) for array in arrays]


def stored(slots: dict[int, Slot] | None, index: int, leaf: Any) -> Any:
    """What a variable holds of a new leaf: None where it has a place on a shelf, to which it goes."""
    slot = (slots or {}).get(index)
    if slot is None:
        return leaf
    assert isinstance(slot.store, Shelf)
    slot.store.put_one(slot, leaf)
    return None


def note_change() -> None:
    """Has programs look again which variables stand in packs."""
    global changes
    changes += 1


def arrange(groups: Sequence[Sequence[tuple[Any, int]]]) -> None:
    """Packs leaves of variables, those of each group that lie together and are small, as far as it is worth it."""
    with _levels.lock, _private.at_once():
        for group in groups:
            by_home: dict[Any, list[tuple[Any, int]]] = {}
            for variable, index in group:
                kind = variable._types[index]
                if jax.dtypes.issubdtype(kind.dtype, jax.dtypes.extended) or index in (variable._slots or ()):
                    continue
                if 0 < kind.size * kind.dtype.itemsize <= LARGEST:
                    home = variable._pack_home(index)
                    if home is not None:
                        by_home.setdefault((home, kind.dtype), []).append((variable, index))
            for (home, dtype), leaves in by_home.items():
                for part in _of_limited_size(leaves, dtype):
                    if len(part) >= FEWEST:
                        Pack(home, part)
                        note_change()


def shelf_of(leaves: Sequence[tuple[Any, int]]) -> Shelf | None:
    """The shelf that has just these leaves, a new one if none of them stands anywhere yet; None where neither is so."""
    slots = [(variable._slots or {}).get(index) for variable, index in leaves]
    if len(leaves) >= FEWEST_ON_SHELF and all(slot is None for slot in slots):
        with _private.at_once():
            return Shelf(leaves)
    shelf = slots[0].store if slots and slots[0] is not None else None
    return shelf if isinstance(shelf, Shelf) and shelf.slots == slots else None


def _of_limited_size(leaves: list[tuple[Any, int]], dtype: Any) -> list[list[tuple[Any, int]]]:
    parts: list[list[tuple[Any, int]]] = [[]]
    size = 0
    for variable, index in leaves:
        more = variable._types[index].size * dtype.itemsize
        if size + more > LARGEST_PACK:
            parts.append([])
            size = 0
        parts[-1].append((variable, index))
        size += more
    return parts
