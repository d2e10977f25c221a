"""Small variables side by side in one vector: a *pack*.

A call of a compiled program costs time for every array that goes in and out of it. So variables that a program updates
in the same way, such as one optimizer's moments, share one array between calls, which the next call takes over and the
program updates at once (see `_vectors`). Their users notice nothing: what is read is an array of its own, cut out of
the vector; what is assigned from outside stands beside it until the next call puts it in.

A leaf of a variable is packed at most once, by the first program that updates it, so that the programs which know of a
pack stay as they are.
"""

from __future__ import annotations

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

# Measured with benchmarks/step.py --variables: below this number the arrays of a call cost less than to take a vector
# apart; larger arrays take longer to copy than to be handed over.
FEWEST = 4
LARGEST = 1 << 16  # bytes
LARGEST_PACK = 1 << 22

changes = 0  # how many packs there are; programs that know of fewer look at theirs again


class Slot:
    """The place of one leaf of a variable in a pack."""

    __slots__ = ("index", "pack", "place", "shape", "start", "variable")

    def __init__(self, pack: Pack, place: int, variable: Any, index: int, start: int, shape: tuple[int, ...]):
        self.pack, self.place, self.index, self.start, self.shape = pack, place, index, start, shape
        self.variable: Callable[[], Any] = weakref.ref(variable)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def close(self) -> None:
        """The leaf stands by itself from now on."""
        self.variable = _gone

    def read(self) -> Any:
        """The leaf as an array of its own."""
        views = self.pack.views
        if self not in views:
            views[self] = self.pack.home.cut(self.pack.array, self)
        return views[self]


def _gone() -> None:
    return None


class Home:
    """Where the vector of a pack lies: on one device, to which JAX may hold it committed, or on all of a mesh."""

    def __init__(self, sharding: Any, mesh: Any = None, committed: bool = True):
        self.sharding, self.mesh, self.committed = sharding, mesh, committed
        self._key = sharding, mesh, committed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Home) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def put(self, host: np.ndarray) -> Any:
        """A vector of the host, brought here."""
        if self.mesh is None:
            vector = jax.device_put(host, self.sharding, may_alias=False)
            return vector if self.committed else _private.uncommitted(vector)
        if self.mesh.all_local:
            return jax.device_put(host, self.sharding, may_alias=False)
        return self.mesh.spread(host, self.sharding)

    def constrained(self, vector: Any) -> Any:
        """Inside of a program: a vector, to be returned to its home."""
        return vector if self.mesh is None else lax.with_sharding_constraint(vector, self.sharding)

    def kept(self, vector: Any) -> Any:
        """A vector that a program returned, as it is kept."""
        return _private.single(vector) if self.mesh is None else vector

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


@functools.partial(jax.jit, static_argnums=2)
def _cut(vector: Any, start: Any, shape: tuple[int, ...]) -> Any:
    return jnp.reshape(lax.dynamic_slice(vector, (start,), (math.prod(shape),)), shape)


class Pack:
    """Leaves of variables in one vector. Those in `replaced` have been assigned, and are not in it yet."""

    def __init__(self, home: Home, leaves: Sequence[tuple[Any, int]]):
        self.home = home
        self.views: dict[Slot, Any] = {}  # what was read since the vector was replaced
        self.replaced: set[Slot] = set()
        self.slots: list[Slot] = []
        start = 0
        for variable, index in leaves:
            shape = tuple(variable._types[index].shape)
            self.slots.append(Slot(self, len(self.slots), variable, index, start, shape))
            start += self.slots[-1].size
        arrays = [variable._own_leaves([index])[0] for variable, index in leaves]
        self.array = home.put(np.concatenate([np.ravel(np.asarray(array)) for array in arrays]))
        for slot, (variable, index) in zip(self.slots, leaves):
            variable._slots = {**(variable._slots or {}), index: slot}
            variable._give_up(index)

    def current(self) -> Any:
        """The vector, with all that was assigned."""
        if self.replaced:
            host = np.array(self.array)
            taken = [(slot, variable) for slot in self.replaced if (variable := slot.variable()) is not None]
            for slot, variable in taken:
                (leaf,) = variable._own_leaves([slot.index])
                host[slot.start : slot.start + slot.size] = np.ravel(np.asarray(leaf))
            self.store(self.home.put(host))
            for slot, variable in taken:
                variable._give_up(slot.index)
            self.replaced.clear()
        return self.array

    def store(self, vector: Any) -> None:
        """Replaces the vector by one that a program returned."""
        self.array = self.home.kept(vector)
        self.views.clear()


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
