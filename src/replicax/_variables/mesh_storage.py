"""Storage of variables of several replicas: each leaf is a global array on the replicas' mesh.

A *mirrored* leaf is one fully replicated array, a *stacked* one has a row for each replica, and of a *sharded* one each
replica has a part.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax._base import jax_internals
from replicax._base.host_memory import put
from replicax._collectives import cross_process, in_flight, sharding
from replicax._tracing import frames
from replicax._values import (
    Kind,
    Mirrored,
    PerReplica,
    ReplicaMesh,
    as_copies,
    cut_axis,
    global_array,
    is_global,
    mesh_of,
    of_array,
    partition,
)
from replicax._variables import packed_storage
from replicax._variables.storage import Leaves, Storage, Types, constrained, no_slots

_Array = TypeVar("_Array", np.ndarray, jax.Array)
# Returns the layout of a leaf with that by which each replica has a part, if it is to have one.
Divided: TypeAlias = Callable[[Kind, PartitionSpec | None], PartitionSpec | None]
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

    def shardings(self) -> Sequence[NamedSharding]:
        mesh = self.mesh
        return [mesh.stacked if self.has_rows(i) else mesh.mirrored for i in range(len(self.types))]

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
    layouts: list[PartitionSpec | None] | None = None  # how each leaf is split over devices, if any is

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
        """True if a leaf is split over devices, so that it need not fit on one."""
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
        values = [of_array(self.value_type, array, self.mesh) for array in self.read_whole()]
        # Mirrored copies share the array's buffers; rows and parts put together are copies, not to be kept beside it,
        # and those of a shared vector are good until the next call.
        if self._shares_copies and not self.slots:
            self._values = values
        return values

    def read_whole(self) -> Leaves:
        """Returns the leaves as arrays of which each replica has its component."""
        return self.read()

    @property
    def _shares_copies(self) -> bool:
        """True if components share the buffers of the global arrays."""
        return self.value_type is Mirrored and self.layouts is None

    def read_component(self, replica: int) -> Leaves:
        if self.lost is not None:
            self.refuse_lost()
        if self.is_abstract:
            return list(self.leaf_types(True))  # type: ignore[arg-type]
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
        return self.read() if self.mesh.all_local else self.read_whole()

    def write_component(self, replica: int, leaves: Leaves) -> None:
        if self.is_abstract:
            return
        changed, values = [], self.values()
        self._leave_shared()
        for stored, leaf in zip(values, leaves):
            parts = list(stored.values)
            parts[replica] = leaf
            changed.append(self.value_type(parts, self.mesh))
        self.arrays = []  # not kept beside the components
        self._values, self._stale, self.lent = changed, True, True

    def shardings(self) -> Sequence[NamedSharding]:
        wholes = super().shardings()
        if self.layouts is None:
            return wholes
        return [
            x if layout is None else NamedSharding(self.mesh.mesh, layout) for x, layout in zip(wholes, self.layouts)
        ]

    def leaving(self, leaves: Leaves) -> Leaves:
        return [constrained(leaf, where) for leaf, where in zip(leaves, self.shardings())]

    def placed(self, leaves: Leaves) -> Leaves:
        return list(leaves) if self.layouts is None else put(leaves, self.shardings())

    def returned(self, leaves: Leaves) -> Leaves:
        return list(leaves)  # which programs leave where they belong, see `leaving`


class MirroredStorage(ComponentStorage):
    """Leaves of which every replica has a copy or, where `cut_axis` returns an axis, a part along it.

    Outside of replica functions a leaf that is cut is one array, which lies on the devices in parts. In a replica
    function it is whole (see `_engine.compiled`).
    """

    value_type = Mirrored

    def __init__(
        self,
        name: str,
        types: Types,
        mesh: ReplicaMesh,
        leaves: Leaves,
        lent: bool,
        layouts: Sequence[PartitionSpec | None],
        divided: Divided | None,
    ):
        self.types, self._divided = types, divided
        # What is split already stays so. Without values there are no leaves.
        given = [mesh.layout_of(leaf, name) for leaf in leaves] or [None] * len(types)
        self.layouts = self._with_parts([own or layout for own, layout in zip(given, layouts)])
        super().__init__(name, types, mesh, leaves, lent)

    def _with_parts(self, layouts: list[PartitionSpec | None]) -> list[PartitionSpec | None] | None:
        """Returns the layouts with those of leaves that are divided among the replicas; None if no leaf has one."""
        if self._divided is not None:
            layouts = [self._divided(kind, layout) for layout, kind in zip(layouts, self.types)]
        return _if_any(layouts)

    def abstract(self) -> Self:
        return self.abstract_by(self._divided)

    def abstract_by(self, divided: Divided | None) -> Self:
        """Return what `abstract` does, divided among the replicas by another function, or not at all."""
        other = super().abstract()
        if divided is not None or other._divided is not None:  # the number of replicas decides which leaves are
            kept = [partition.within_replica(layout) for layout in other.layouts or ()]
            other._divided = divided
            other.layouts = other._with_parts(kept or [None] * len(other.types))
            other._hold(other._kinds())
        return other

    @property
    def is_cut(self) -> bool:
        """True if each replica has a part of a leaf."""
        return self.is_split and any(self.cut_axis(index) is not None for index in range(len(self.types)))

    def cut_axis(self, index: int) -> int | None:
        return None if self.layouts is None else cut_axis(self.layouts[index])

    def device_layout(self, index: int) -> PartitionSpec | None:
        return None if self.layouts is None else partition.within_replica(self.layouts[index])

    def read_whole(self) -> Leaves:
        arrays = self.read()
        if not self.is_cut:
            return arrays
        with jax_internals.untraced(), in_flight.dispatching(self.mesh, f"reading {self.name}") as call:
            specs = (partition.within_replica(layout) or PartitionSpec() for layout in self.layouts or ())
            wholes: Leaves = _gathered(arrays, tuple(NamedSharding(self.mesh.mesh, spec) for spec in specs))
            call.output = wholes[0]
        return wholes

    def of_first(self, leaves: Leaves) -> Leaves:
        if self.layouts is None or self.mesh.all_local:
            return super().of_first(leaves)
        return [
            super(MirroredStorage, self).of_first([leaf])[0]
            if layout is None or is_global(leaf)
            else cross_process.from_first_laid_out(self.mesh, leaf, layout)
            for leaf, layout in zip(leaves, self.layouts)
        ]

    def take_from_host(self, arrays: Sequence[np.ndarray]) -> None:
        """Keeps whole arrays that all processes have in the host's memory, of which each device gets its part."""
        if self.mesh.all_local:
            self.write(put(arrays, self.shardings()))
        else:
            self.write([self.mesh.spread(array, where) for array, where in zip(arrays, self.shardings())])

    def lay_out(self, layouts: list[PartitionSpec | None]) -> None:
        """Splits the leaves over each replica's devices in this way, now and from now on."""
        arrays = self.read()
        self.layouts = self._with_parts(layouts)
        self.tell_layouts()
        for slot in self.slots.values():
            slot.close()
        self.slots = no_slots
        self.tell_moved()
        if self.is_abstract:
            return self._hold(self._kinds())
        self._hold(put(arrays, self.shardings()))
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
            return mesh.spread(leaf, self.shardings()[index])
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


@functools.partial(jax.jit, static_argnums=1)
def _gathered(arrays: Leaves, shardings: Sequence[NamedSharding]) -> Leaves:
    return list(map(constrained, arrays, shardings))


def _if_any(layouts: list[PartitionSpec | None]) -> list[PartitionSpec | None] | None:
    return layouts if any(layout is not None for layout in layouts) else None


def _array_of(value: PerReplica | Mirrored) -> jax.Array:
    array = global_array(value)
    assert array is not None, value
    return array
