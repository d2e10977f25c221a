"""Stores that several variables share: vectors of small leaves, and lists of arrays.

A call of a compiled program costs time for every array that goes in and out of it. So variables that a program updates
in the same way, such as one optimizer's moments, share one array between calls, which the next call takes over and the
program updates at once (see `vectorize`). Their users notice nothing: what is read is an array of its own, cut out of
the vector; what is assigned from outside stands beside it until the next call puts it in.

A leaf of a variable comes to stand in a vector at most once, by the first program that updates it, so that the programs
which know of the vector stay as they are.

What else a program replaces is in a list between its calls, which goes in and comes out as it is, where looking for
hundreds of variables and telling each its new array would take longer than the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from replicax._base import jax_internals
from replicax._tracing import frames
from replicax._variables.homes import Leaves, copies
from replicax._variables.storage import LeafOf, SharedStore, Slot, Storage
from replicax._variables.vector_homes import MeshVectors, VectorHome

# Measured with benchmarks/step.py --variables: below this number the arrays of a call cost less than to take a vector
# apart; larger arrays take longer to copy than to be handed over.
FEWEST = 4
FEWEST_IN_LIST = 4
LARGEST = 1 << 14  # bytes
LARGEST_PACK = 1 << 22


class SharedVector(SharedStore):
    """Leaves of variables in one vector."""

    is_vector = True

    def __init__(self, home: VectorHome, leaves: Sequence[LeafOf]):
        self.home = home
        # What was read since the vector was replaced, and what of one replica's copy.
        self.views: dict[Slot | tuple[Slot, int], jax.Array] = {}
        super().__init__(leaves)

    def _take_in(self, arrays: Leaves, leaves: Sequence[LeafOf]) -> None:
        self.array = self.home.joined(arrays)

    def read(self, slot: Slot) -> jax.Array:
        if slot not in self.views:
            self.views[slot] = self.home.cut(self.array, slot)
        return self.views[slot]

    kept = read

    def read_copy(self, slot: Slot, replica: int) -> jax.Array:
        assert isinstance(self.home, MeshVectors)
        if slot in self.views:
            return self.home.mesh.copy(self.views[slot], replica)
        if (slot, replica) not in self.views:
            self.views[slot, replica] = self.home.cut_copy(self.array, slot, replica)
        return self.views[slot, replica]

    def is_lent(self, slot: Slot) -> bool:
        return True  # what was cut out is kept for others to read

    def put_one(self, slot: Slot, array: jax.Array) -> jax.Array:
        self.replaced.add(slot)
        return array

    def current(self) -> jax.Array:
        """Returns the vector, with all that was assigned."""
        if self.replaced:
            assigned = self._assigned()
            by_leaf = [self.home.copies(leaf) for _, _, leaf in assigned]
            left = (slot for slot in self.slots if slot not in self.replaced)
            if not self.array.is_deleted() and any(slot.storage is not None for slot in left):
                vectors = [np.array(copy) for copy in self.home.copies(self.array)]
            else:  # all anew, or a program that failed has taken the vector with it
                vectors = [np.zeros(self.array.shape, self.array.dtype) for _ in range(self.home.copies_here)]
            for (slot, _, _), parts in zip(assigned, by_leaf):
                for vector, part in zip(vectors, parts):
                    vector[slot.start : slot.start + slot.size] = np.ravel(part)
            self.put(self.home.of_copies(vectors))
            self._taken_over(assigned)
        return self.array

    def put(self, vector: jax.Array) -> None:
        """Replaces the vector by one that a program returned."""
        self.array = self.home.placed(vector)
        self.views.clear()


class SharedList(SharedStore):
    """Leaves of variables as arrays in a list. Those in `lent` may be held by somebody, and must not be donated."""

    def _take_in(self, arrays: Leaves, leaves: Sequence[LeafOf]) -> None:
        self.arrays = arrays
        self.lent = {position for position, (storage, _) in enumerate(leaves) if storage.lent}
        self._copied_last: list[int] = sorted(self.lent)

    def read(self, slot: Slot) -> jax.Array:
        """Returns a leaf's array, which is lent from now on."""
        self.lent.add(slot.position)
        return self.arrays[slot.position]

    def read_copy(self, slot: Slot, replica: int) -> jax.Array:
        storage = slot.storage
        assert storage is not None and storage.home.mesh is not None
        return storage.home.mesh.copy(self.read(slot), replica)

    def kept(self, slot: Slot) -> jax.Array:
        return self.arrays[slot.position]

    def is_lent(self, slot: Slot) -> bool:
        return slot.position in self.lent

    def put_one(self, slot: Slot, array: jax.Array) -> None:
        self.replaced.discard(slot)
        self.lent.discard(slot.position)
        self.arrays[slot.position] = array

    def current(self) -> Leaves:
        """Returns the arrays, with all that was assigned, and copies of what is lent."""
        if self.replaced:
            assigned = self._assigned()
            for slot, storage, leaf in assigned:
                self.arrays[slot.position] = leaf
                if storage.lent:
                    self.lent.add(slot.position)
            self._taken_over(assigned)
        if self.lent:
            positions = sorted(self.lent)
            lent = [self.arrays[position] for position in positions]
            # Together, which is a program for each choice of arrays, only where it is the same choice as last time.
            together = positions == self._copied_last
            for position, copy in zip(positions, copies(lent) if together else [copies([array])[0] for array in lent]):
                self.arrays[position] = copy
            self.lent.clear()
            self._copied_last = positions
        return self.arrays

    def put(self, arrays: Leaves) -> None:
        """Replaces the arrays by those that a program returned."""
        self.arrays = arrays


def arrange(groups: Sequence[Sequence[LeafOf]]) -> None:
    """Puts leaves of each group that lie together and are small into shared vectors, as far as it is worth it."""
    with frames.lock, jax_internals.untraced():
        for group in groups:
            by_home: dict[tuple[VectorHome, np.dtype], list[LeafOf]] = {}
            for storage, index in group:
                if (home := _home_of(storage, index)) is not None:
                    by_home.setdefault((home, storage.types[index].dtype), []).append((storage, index))
            for (home, _), leaves in by_home.items():
                for part in _of_limited_size(leaves):
                    if len(part) >= FEWEST:
                        SharedVector(home, part)
                        for storage in {id(storage): storage for storage, _ in part}.values():
                            storage.watchers.tell_moved()


def _home_of(storage: Storage, index: int) -> VectorHome | None:
    """Returns the home of a vector that a leaf may stand in; None where it may not, or is in a store already."""
    kind, array = storage.types[index], storage.own()[index]
    if array is None or index in storage.slots or jax.dtypes.issubdtype(kind.dtype, jax.dtypes.extended):
        return None
    home = storage.home.vectors(index, array) if 0 < kind.size * kind.dtype.itemsize <= LARGEST else None
    return home if isinstance(home, VectorHome) else None


def list_of(leaves: Sequence[LeafOf]) -> SharedList | None:
    """Returns the list that has just these leaves, a new one if none is in any store yet; None where neither is so."""
    slots = [storage.slots.get(index) for storage, index in leaves]
    if len(leaves) >= FEWEST_IN_LIST and all(slot is None for slot in slots):
        with jax_internals.untraced():
            return SharedList(leaves)
    found = slots[0].store if slots and slots[0] is not None else None
    return found if isinstance(found, SharedList) and found.slots == slots else None


def _of_limited_size(leaves: list[LeafOf]) -> list[list[LeafOf]]:
    parts: list[list[LeafOf]] = [[]]
    size = 0
    for storage, index in leaves:
        more = storage.types[index].size * storage.types[index].dtype.itemsize
        if size + more > LARGEST_PACK:
            parts.append([])
            size = 0
        parts[-1].append((storage, index))
        size += more
    return parts
