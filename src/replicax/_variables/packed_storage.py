"""Stores that several variables share: vectors of small leaves, and lists of arrays.

A call of a compiled program costs time for every array that goes in and out of it. So variables that a program updates
in the same way, such as one optimizer's moments, share one array between calls, which the next call takes over and the
program updates at once (see `vectorize`). Their users notice nothing: what is read is an array of its own, cut out of
the vector; what is assigned from outside stands beside it until the next call puts it in.

A leaf of a variable comes to stand in a vector at most once, by the first program that updates it, so that the programs
which know of the vector stay as they are.

What else a program replaces is in a list between its calls, which goes in and comes out as it
is, where looking for hundreds of variables and telling each its new array would take longer than the call.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._base import jax_internals
from replicax._base.host_memory import put
from replicax._tracing import frames
from replicax._values import ReplicaMesh
from replicax._variables.storage import SharedStore, Slot, Storage, copies, on_one_device

# Measured with benchmarks/step.py --variables: below this number the arrays of a call cost less than to take a vector
# apart; larger arrays take longer to copy than to be handed over.
FEWEST = 4
FEWEST_IN_LIST = 4
LARGEST = 1 << 14  # bytes
LARGEST_PACK = 1 << 22
MOST_COPIES = 1 << 12  # of arrays on replicas; the host takes longer for more than it takes to compile a program


Leaf = tuple[Storage, int]  # of a variable: its storage, and its number there


class VectorHome:
    """Where a shared vector lies: on one device, to which JAX may hold it committed, or on all of a mesh.

    With `stays` it comes back to the device from programs that run on others.
    """

    def __init__(self, sharding: Any, mesh: ReplicaMesh | None = None, committed: bool = True, stays: bool = False):
        self.sharding, self.mesh, self.committed, self._stays = sharding, mesh, committed, stays
        self._key = sharding, mesh, committed, stays

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VectorHome) and self._key == other._key

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
        return vector if self.committed else jax_internals.uncommitted(vector)

    def joined(self, arrays: list[Any]) -> Any:
        """The vector of arrays that lie here."""
        if self.mesh is not None and self.mesh.all_local and len(arrays) * self.mesh.size > MOST_COPIES:
            return _joined(arrays, self)
        by_array = [self.copies(array) for array in arrays]
        return self.put([np.concatenate([np.ravel(copy) for copy in copies]) for copies in zip(*by_array)])

    def constrained(self, vector: Any) -> Any:
        """Inside of a program: a vector, to be returned to its home."""
        return vector if self.mesh is None else lax.with_sharding_constraint(vector, self.sharding)

    def copy(self, array: Any, replica: int) -> Any:
        """Returns one replica's copy of an array that lies here."""
        assert self.mesh is not None
        return self.mesh.copy(array, replica)

    def cut_copy(self, vector: Any, slot: Slot, replica: int) -> Any:
        """A slot's part of one replica's copy of the vector; no other device takes part."""
        assert self.mesh is not None
        with jax_internals.untraced():
            return jax_internals.uncommitted(_cut(self.mesh.shard(vector, replica), np.int32(slot.start), slot.shape))

    def kept(self, vector: Any) -> Any:
        """A vector that a program returned, as it is kept."""
        return vector if self.mesh is not None else on_one_device(vector, self.sharding if self._stays else None)

    def cut(self, vector: Any, slot: Slot) -> Any:
        """A slot's part of the vector."""
        with jax_internals.untraced():
            if self.mesh is None:
                with jax.default_device(self.sharding):
                    return _cut(vector, np.int32(slot.start), slot.shape)
            if self.mesh.all_local:
                return _cut(vector, np.int32(slot.start), slot.shape)
            parts = [_cut(shard.data, np.int32(slot.start), slot.shape) for shard in vector.addressable_shards]
            return jax.make_array_from_single_device_arrays(slot.shape, self.sharding, parts)


@functools.partial(jax.jit, static_argnums=1)
def _joined(arrays: list[Any], home: VectorHome) -> Any:
    return home.constrained(jnp.concatenate([jnp.ravel(array) for array in arrays]))


@functools.partial(jax.jit, static_argnums=2)
def _cut(vector: Any, start: Any, shape: tuple[int, ...]) -> Any:
    return jnp.reshape(lax.dynamic_slice(vector, (start,), (math.prod(shape),)), shape)


class _Store(SharedStore):
    """What shared vectors and lists have in common: places for leaves, and what was assigned to them meanwhile."""

    def __init__(self, leaves: Sequence[Leaf]):
        self.replaced = set()
        self.slots: list[Slot] = []
        start = 0
        for storage, index in leaves:
            self.slots.append(Slot(self, len(self.slots), storage, index, start))
            start += self.slots[-1].size
        self._take_in([storage.own()[index] for storage, index in leaves], leaves)
        for slot, (storage, _) in zip(self.slots, leaves):
            storage.join(slot)

    @abstractmethod
    def _take_in(self, arrays: list[Any], leaves: Sequence[Leaf]) -> None:
        """Keeps the arrays of the leaves."""

    def _assigned(self) -> list[tuple[Slot, Storage, Any]]:
        """Returns what was assigned: where it goes, its storage, and the leaf."""
        there = [(slot, slot.storage) for slot in self.replaced]
        return [(slot, storage, storage.own()[slot.index]) for slot, storage in there if storage is not None]

    def _taken_over(self, assigned: list[tuple[Slot, Storage, Any]]) -> None:
        """Has storages let go of what is in the store now."""
        for slot, storage, _ in assigned:
            storage.release(slot.index)
        self.replaced.clear()


class SharedVector(_Store):
    """Leaves of variables in one vector."""

    is_vector = True

    def __init__(self, home: VectorHome, leaves: Sequence[Leaf]):
        self.home = home
        # What was read since the vector was replaced, and what of one replica's copy.
        self.views: dict[Slot | tuple[Slot, int], Any] = {}
        super().__init__(leaves)

    def _take_in(self, arrays: list[Any], leaves: Sequence[Leaf]) -> None:
        self.array = self.home.joined(arrays)

    def read(self, slot: Slot) -> Any:
        """Returns a leaf, cut out."""
        if slot not in self.views:
            self.views[slot] = self.home.cut(self.array, slot)
        return self.views[slot]

    kept = read

    def read_copy(self, slot: Slot, replica: int) -> Any:
        """Returns one replica's copy of a leaf, cut out."""
        if slot in self.views:
            return self.home.copy(self.views[slot], replica)
        if (slot, replica) not in self.views:
            self.views[slot, replica] = self.home.cut_copy(self.array, slot, replica)
        return self.views[slot, replica]

    def is_lent(self, slot: Slot) -> bool:
        return True  # what was cut out is kept for others to read

    def put_one(self, slot: Slot, array: Any) -> Any:
        self.replaced.add(slot)
        return array

    def current(self) -> Any:
        """Returns the vector, with all that was assigned."""
        if self.replaced:
            assigned = self._assigned()
            by_leaf = [self.home.copies(leaf) for _, _, leaf in assigned]
            left = (slot for slot in self.slots if slot not in self.replaced)
            if not self.array.is_deleted() and any(slot.storage is not None for slot in left):
                vectors = [np.array(copy) for copy in self.home.copies(self.array)]
            else:  # all anew, or a program that failed has taken the vector with it
                vectors = [np.zeros(self.array.shape, self.array.dtype) for _ in self.home.replicas]
            for (slot, _, _), parts in zip(assigned, by_leaf):
                for vector, part in zip(vectors, parts):
                    vector[slot.start : slot.start + slot.size] = np.ravel(part)
            self.put(self.home.put(vectors))
            self._taken_over(assigned)
        return self.array

    def put(self, vector: Any) -> None:
        """Replaces the vector by one that a program returned."""
        self.array = self.home.kept(vector)
        self.views.clear()


class SharedList(_Store):
    """Leaves of variables as arrays in a list. Those in `lent` may be held by somebody, and must not be donated."""

    def _take_in(self, arrays: list[Any], leaves: Sequence[Leaf]) -> None:
        self.arrays = arrays
        self.lent = {place for place, (storage, _) in enumerate(leaves) if storage.lent}
        self._copied_last: list[int] = sorted(self.lent)

    def read(self, slot: Slot) -> Any:
        """Returns a leaf's array, which is lent from now on."""
        self.lent.add(slot.place)
        return self.arrays[slot.place]

    def read_copy(self, slot: Slot, replica: int) -> Any:
        """Returns one replica's copy of a leaf's array, which is lent from now on."""
        storage = slot.storage
        assert storage is not None and storage.mesh is not None
        return storage.mesh.copy(self.read(slot), replica)

    def kept(self, slot: Slot) -> Any:
        return self.arrays[slot.place]

    def is_lent(self, slot: Slot) -> bool:
        return slot.place in self.lent

    def put_one(self, slot: Slot, array: Any) -> None:
        self.replaced.discard(slot)
        self.lent.discard(slot.place)
        self.arrays[slot.place] = array

    def current(self) -> list[Any]:
        """Returns the arrays, with all that was assigned, and copies of what is lent."""
        if self.replaced:
            assigned = self._assigned()
            for slot, storage, leaf in assigned:
                self.arrays[slot.place] = leaf
                if storage.lent:
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


def arrange(groups: Sequence[Sequence[Leaf]]) -> None:
    """Puts leaves of each group that lie together and are small into shared vectors, as far as it is worth it."""
    with frames.lock, jax_internals.untraced():
        for group in groups:
            by_home: dict[Any, list[Leaf]] = {}
            for storage, index in group:
                kind = storage.types[index]
                if jax.dtypes.issubdtype(kind.dtype, jax.dtypes.extended) or index in storage.slots:
                    continue
                if 0 < kind.size * kind.dtype.itemsize <= LARGEST:
                    home = storage.vector_home(index)
                    if home is not None:
                        by_home.setdefault((home, kind.dtype), []).append((storage, index))
            for (home, dtype), leaves in by_home.items():
                for part in _of_limited_size(leaves, dtype):
                    if len(part) >= FEWEST:
                        SharedVector(home, part)
                        for storage in {id(storage): storage for storage, _ in part}.values():
                            storage.tell_moved()


def list_of(leaves: Sequence[Leaf]) -> SharedList | None:
    """Returns the list that has just these leaves, a new one if none is in any store yet; None where neither is so."""
    slots = [storage.slots.get(index) for storage, index in leaves]
    if len(leaves) >= FEWEST_IN_LIST and all(slot is None for slot in slots):
        with jax_internals.untraced():
            return SharedList(leaves)
    found = slots[0].store if slots and slots[0] is not None else None
    return found if isinstance(found, SharedList) and found.slots == slots else None


def _of_limited_size(leaves: list[Leaf], dtype: Any) -> list[list[Leaf]]:
    parts: list[list[Leaf]] = [[]]
    size = 0
    for storage, index in leaves:
        more = storage.types[index].size * dtype.itemsize
        if size + more > LARGEST_PACK:
            parts.append([])
            size = 0
        parts[-1].append((storage, index))
        size += more
    return parts
