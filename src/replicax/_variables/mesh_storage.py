"""Storage of variables of several replicas: each leaf is a global array on the replicas' mesh.

A *mirrored* leaf is one fully replicated array, a *stacked* one has a row for each replica, and of a *sharded* one each
replica has a part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax._collectives import cross_process, sharding
from replicax._tracing import frames
from replicax._values import (
    Mirrored,
    PerReplica,
    ReplicaMesh,
    as_copies,
    global_array,
    is_global,
    mesh_of,
    of_array,
)
from replicax._variables import packed_storage
from replicax._variables.storage import Leaves, Storage, Types, constrained, no_slots

_Array = TypeVar("_Array", np.ndarray, jax.Array)
Converted: TypeAlias = jax.Array | PerReplica | Mirrored  # what a leaf is assigned, of its shape and dtype


class MeshStorage(Storage):
    """The global arrays of a variable of several replicas."""

    mesh: ReplicaMesh

    def of_first(self, leaves: Leaves) -> Leaves:
        """Returns the initial values that all workers start from: the first one's."""
        if self.mesh.all_local:
            return leaves
        what = f"the initial value of {self.name.removesuffix(':0')}"
        return [leaf if is_global(leaf) else cross_process.from_first(self.mesh, leaf, what) for leaf in leaves]

    def may_be_listed(self, spread: bool) -> bool:
        return True

    def vector_home(self, index: int, array: jax.Array) -> Hashable:
        if self.mesh.crowded:  # taking vectors apart is one more thing to do beside a collective
            return None
        if self.has_rows(index) or not array.sharding.is_equivalent_to(self.mesh.mirrored, array.ndim):
            return None
        return packed_storage.MeshVectors(self.mesh)


class ComponentStorage(MeshStorage, ABC):
    """Global arrays that can be read and written by replica, as distributed values.

    Arrays and values are each made from the other when they are asked for.
    """

    value_type: type[PerReplica] | type[Mirrored]
    layouts: list[PartitionSpec | None] | None = None  # how each leaf is split over logical devices, if any is

    _values: list[PerReplica | Mirrored] | None = None  # the arrays as distributed values, where they were asked for
    _stale = False  # whether components were written, so that the values are newer than the arrays

    def __init__(self, name: str, types: Types, mesh: ReplicaMesh, leaves: Leaves, lent: bool):
        super().__init__(name, types, mesh, (), lent)
        self.arrays = [self.global_leaf(leaf, i, traced=False) for i, leaf in enumerate(self.of_first(leaves))]

    @abstractmethod
    def global_leaf(self, leaf: Converted, index: int, traced: bool) -> jax.Array:
        """Returns a converted value for a leaf in global form, outside or inside (`traced`) of a program."""

    @property
    def is_split(self) -> bool:
        """True if a leaf is split over logical devices, so that it need not fit on one device."""
        return self.layouts is not None

    def _hold(self, arrays: Sequence[jax.Array | None]) -> None:
        self.arrays, self._values, self._stale = arrays, None, False

    def own(self) -> Sequence[jax.Array | None]:
        if self._stale:
            assert self._values is not None
            self._hold(self.placed([_array_of(value) for value in self._values]))
        return self.arrays

    def values(self) -> list[PerReplica | Mirrored]:
        """Returns the leaves as distributed values."""
        if self._values is not None:
            return self._values
        values = [of_array(self.value_type, array, self.mesh) for array in self.read()]
        # Mirrored copies share the array's buffers; rows and parts put together are copies, not to be kept beside it,
        # and those of a shared vector are good until the next call.
        if self._shares_copies and not self.slots:
            self._values = values
        return values

    @property
    def _shares_copies(self) -> bool:
        """True if components share the buffers of the global arrays."""
        return self.value_type is Mirrored and self.layouts is None

    def read_component(self, replica: int) -> Leaves:
        if self.lost is not None:
            self.refuse_lost()
        self.lent = True
        if self._values is None and self._shares_copies:  # one copy, of however many
            return [
                self.slots[i].store.read_copy(self.slots[i], replica)
                if array is None
                else self.mesh.copy(array, replica)
                for i, array in enumerate(self.arrays)
            ]
        return [value.values[replica] for value in self.values()]

    def read_one(self) -> Leaves:
        """Returns the first replica's copies; of leaves that need not fit on one device, the global arrays."""
        if not self.is_split:
            return self.read_component(0)
        self.lent = True
        return self.read()

    def write_component(self, replica: int, leaves: Leaves) -> None:
        changed, values = [], self.values()
        self._leave_shared()
        for stored, leaf in zip(values, leaves):
            parts = list(stored.values)
            parts[replica] = leaf
            changed.append(self.value_type(parts, self.mesh))
        self.arrays = []  # not kept beside the components
        self._values, self._stale, self.lent = changed, True, True

    def _shardings(self) -> list[NamedSharding]:
        whole = self.mesh.mirrored if self.value_type is Mirrored else self.mesh.stacked
        layouts = self.layouts or [None] * len(self.types)
        return [whole if layout is None else NamedSharding(self.mesh.mesh, layout) for layout in layouts]

    def leaving(self, leaves: Leaves) -> Leaves:
        return [constrained(leaf, where) for leaf, where in zip(leaves, self._shardings())]

    def placed(self, leaves: Leaves) -> Leaves:
        return list(leaves) if self.layouts is None else jax.device_put(leaves, self._shardings())

    def returned(self, leaves: Leaves) -> Leaves:
        return list(leaves)  # which programs leave where they belong, see `leaving`


class MirroredStorage(ComponentStorage):
    """Leaves of which every replica has a copy."""

    value_type = Mirrored

    def __init__(self, name: str, types: Types, mesh: ReplicaMesh, leaves: Leaves, lent: bool):
        self.layouts = _if_any([mesh.layout_of(leaf) for leaf in leaves])
        super().__init__(name, types, mesh, leaves, lent)

    def lay_out(self, layouts: list[PartitionSpec | None]) -> None:
        """Spreads the leaves over each replica's logical devices in this way, now and from now on."""
        arrays = self.read()
        self.layouts = _if_any(layouts)
        self.tell_layouts()
        for slot in self.slots.values():
            slot.close()
        self.slots = no_slots
        self.tell_moved()
        self._hold(jax.device_put(arrays, self._shardings()))
        self.lent = True

    def vector_home(self, index: int, array: jax.Array) -> Hashable:
        return super().vector_home(index, array) if self.layouts is None else None

    def global_leaf(self, leaf: Converted, index: int, traced: bool) -> jax.Array:
        mesh = self.mesh
        if isinstance(leaf, Mirrored) and mesh_of(leaf) is mesh:
            return _array_of(leaf)
        if traced:
            return leaf if isinstance(leaf, jax.Array) else as_copies(_array_of(leaf), mesh)
        if not isinstance(leaf, jax.Array):
            return mesh.mirror(leaf.values)
        frames.refuse_tracers([leaf])
        if self.layouts is None and leaf.sharding == mesh.mirrored:
            return leaf
        if is_global(leaf) or (self.layouts is not None and self.layouts[index] is not None):
            return mesh.spread(leaf, self._shardings()[index])
        return mesh.mirror([leaf] * len(mesh.local_ids))


class StackedStorage(ComponentStorage):
    """Leaves of which every replica has one of its own."""

    value_type = PerReplica

    def has_rows(self, index: int) -> bool:
        return True

    def leaf_types(self, local: bool) -> Types:
        if local:
            return self.types
        return [jax.ShapeDtypeStruct((self.mesh.size, *kind.shape), kind.dtype) for kind in self.types]

    def global_leaf(self, leaf: Converted, index: int, traced: bool) -> jax.Array:
        assert isinstance(leaf, jax.Array), leaf
        if traced:
            return jnp.broadcast_to(leaf, (self.mesh.size, *leaf.shape))
        return self.mesh.stack([leaf] * len(self.mesh.local_ids))


class ShardedStorage(MeshStorage):
    """Leaves of which every replica keeps a part (see `_collectives.sharding`).

    In global form a leaf that is cut is a stacked array `[replicas, length]`; a small one is mirrored.
    """

    def has_rows(self, index: int) -> bool:
        return sharding.is_cut(self.types[index], self.mesh.size)

    def leaf_types(self, local: bool) -> Types:
        count, types = self.mesh.size, []
        for index, kind in enumerate(self.types):
            if self.has_rows(index):
                length = sharding.length(kind, count)
                kind = jax.ShapeDtypeStruct((length,) if local else (count, length), kind.dtype)
            types.append(kind)
        return types

    def global_leaves(self, leaves: Sequence[_Array]) -> Leaves:
        """Returns whole arrays in global form."""
        mesh = self.mesh
        arrays = []
        for index, leaf in enumerate(leaves):
            if self.has_rows(index):
                rows = sharding.as_rows(leaf, mesh.size)
                arrays.append(mesh.stack([rows[i] for i in mesh.local_ids]))
            else:
                arrays.append(mesh.mirror([leaf] * len(mesh.local_ids)))
        return arrays

    def leaving(self, leaves: Leaves) -> Leaves:
        mesh = self.mesh
        return [constrained(x, mesh.stacked if self.has_rows(i) else mesh.mirrored) for i, x in enumerate(leaves)]


def _if_any(layouts: list[PartitionSpec | None]) -> list[PartitionSpec | None] | None:
    return layouts if any(layout is not None for layout in layouts) else None


def _array_of(value: PerReplica | Mirrored) -> jax.Array:
    array = global_array(value)
    assert array is not None, value
    return array
