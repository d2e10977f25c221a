"""Homes: where the arrays of a variable are between calls of programs, and in which form.

A leaf in *global form* is one array for all replicas: replicated if each replica has a copy, stacked if each has its
own value, and an array on one device or in the host's memory if it lives once. A home never changes; a variable that
moves gets another home.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax._base import jax_internals
from replicax._base.host_memory import put
from replicax._collectives import cross_process, sharding
from replicax._tracing import frames
from replicax._values import (
    Kind,
    Mirrored,
    PerReplica,
    ReplicaMesh,
    as_copies,
    constrained,
    cut_axis,
    global_array,
    is_global,
    mesh_of,
    partition,
)
from replicax._variables.vector_homes import DeviceVectors, MeshVectors, on_one_device

Types: TypeAlias = list[jax.ShapeDtypeStruct]
Leaves: TypeAlias = list[jax.Array]
Layouts: TypeAlias = Sequence[PartitionSpec | None]
# Returns the layout of a leaf with the axis along which each replica has a part, if the leaf is to be divided.
Divided: TypeAlias = Callable[[Kind, PartitionSpec | None], PartitionSpec | None]
Converted: TypeAlias = jax.Array | PerReplica | Mirrored  # what a leaf is assigned, of its shape and dtype
_Array = TypeVar("_Array", np.ndarray, jax.Array)


class Place(Protocol):
    """The place of a variable that lives once for all replicas, see `_variables.central`."""

    lends: bool

    def placed(self, leaf: jax.Array) -> jax.Array: ...
    def read(self, leaf: jax.Array, device: jax.Device | None) -> jax.Array: ...
    def entering(self, leaf: jax.Array) -> jax.Array: ...
    def leaving(self, leaf: jax.Array) -> jax.Array: ...
    def copied(self, leaf: jax.Array) -> jax.Array: ...


class Home:
    """Where the arrays of a variable's leaves are.

    Attributes:
        types: the shapes and dtypes of the leaves.
        mesh: the replicas' devices; None for a variable of one device.
        device: the device that the arrays stay on, if the variable's strategy has one.
        lends: whether an array that is written or read may share its buffer with somebody.
    """

    mesh: ReplicaMesh | None = None
    device: jax.Device | None = None
    lends = True

    def __init__(self, types: Types):
        self.types = types

    def leaf_types(self, local: bool) -> Types:
        """Return the shapes and dtypes of the leaves in global form, or of one replica's components of them."""
        return self.types

    def has_rows(self, index: int) -> bool:
        """Return whether a leaf has a row for each replica in global form."""
        return False

    def cut_axis(self, index: int) -> int | None:
        """Return the axis along which each replica has a part of a leaf; None if the leaf is whole on each."""
        return None

    def device_layout(self, index: int) -> PartitionSpec | None:
        """Return how the array that a replica has of a leaf is split over the replica's devices; None if it is not."""
        return None

    def shardings(self) -> Sequence[NamedSharding | None]:
        """Return how the leaves are laid out on the devices of a mesh; None for leaves on one device."""
        return [None] * len(self.types)

    def kinds(self) -> Leaves:
        """Return shapes, dtypes and shardings of the leaves in global form, to be held in place of arrays."""
        kinds = zip(self.leaf_types(False), self.shardings())
        return [jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=where) for kind, where in kinds]  # type: ignore[misc]

    def placed(self, leaves: Leaves) -> Leaves:
        """Return new leaves in global form, brought here."""
        return list(leaves)

    def returned(self, leaves: Leaves) -> Leaves:
        """Return leaves that a program returned, brought here."""
        return self.placed(leaves)

    def entering(self, leaf: jax.Array) -> jax.Array:
        """Return a leaf where a program over all replicas' devices can compute with it, in the program or outside."""
        return leaf

    def leaving(self, leaves: Leaves) -> Leaves:
        """Return new leaves, in a program, as the program has to hand them out."""
        return leaves

    def copied(self, leaves: Leaves) -> Leaves:
        """Return copies of leaves, for a program that takes them over."""
        return copies(leaves)

    def vectors(self, index: int, array: jax.Array) -> Hashable:
        """Return the home of a vector that may hold this leaf, whose array is `array` here; None for no vector."""
        return None

    def may_be_listed(self, is_spread: bool) -> bool:
        """Return whether leaves may be in the list of a program, which may be spread over several devices."""
        return False


class OneDevice(Home):
    """One device, on which the arrays stay if `device` is given."""

    def __init__(self, types: Types, device: jax.Device | None = None):
        super().__init__(types)
        self.device = device

    def placed(self, leaves: Leaves) -> Leaves:
        return [on_one_device(leaf, self.device) for leaf in leaves]

    def vectors(self, index: int, array: jax.Array) -> Hashable:
        if isinstance(array, jax.ShapeDtypeStruct) or not array.is_fully_addressable or len(array.devices()) > 1:
            return None
        (device,) = array.devices()
        return DeviceVectors(device, array.committed, stays=self.device is not None)

    def may_be_listed(self, is_spread: bool) -> bool:
        return not is_spread


class OnMesh(Home):
    """The devices of several replicas."""

    mesh: ReplicaMesh

    def __init__(self, types: Types, mesh: ReplicaMesh):
        super().__init__(types)
        self.mesh = mesh

    def shardings(self) -> Sequence[NamedSharding]:
        mesh = self.mesh
        return [mesh.stacked if self.has_rows(i) else mesh.mirrored for i in range(len(self.types))]

    def leaving(self, leaves: Leaves) -> Leaves:
        return [constrained(leaf, where) for leaf, where in zip(leaves, self.shardings())]

    def returned(self, leaves: Leaves) -> Leaves:
        return list(leaves)  # which programs leave where they belong, see `leaving`

    def may_be_listed(self, is_spread: bool) -> bool:
        return True

    def vectors(self, index: int, array: jax.Array) -> Hashable:
        if self.mesh.crowded:  # taking vectors apart is one more thing to do beside a collective
            return None
        if self.has_rows(index) or not array.sharding.is_equivalent_to(self.mesh.mirrored, array.ndim):
            return None
        return MeshVectors(self.mesh)

    def of_first(self, leaves: Leaves, name: str) -> Leaves:
        """Return the initial values that all workers start from, those of the first worker, for a variable."""
        if self.mesh.all_local:
            return leaves
        what = f"the initial value of {name.removesuffix(':0')}"
        return [leaf if is_global(leaf) else cross_process.from_first(self.mesh, leaf, what) for leaf in leaves]


class Components(OnMesh, ABC):
    """A home of variables that are read and written by replica, as distributed values."""

    value_type: type[PerReplica] | type[Mirrored]
    layouts: Layouts | None = None  # how each leaf is split over devices, if any is
    shares_copies = False  # whether components share the buffers of the global arrays

    @property
    def is_cut(self) -> bool:
        """Whether each replica has a part of a leaf."""
        return self.layouts is not None and any(self.cut_axis(i) is not None for i in range(len(self.types)))

    @abstractmethod
    def global_leaf(self, leaf: Converted, index: int, traced: bool) -> jax.Array:
        """Return a converted value for a leaf in global form, outside or inside (`traced`) of a program."""


class MirroredHome(Components):
    """A copy of each leaf on every replica's device or, where `cut_axis` returns an axis, a part along it.

    Outside of replica functions a leaf that is cut is one array, which lies on the devices in parts. In a replica
    function it is whole (see `_engine.compiled`).

    Args:
        types: the shapes and dtypes of the leaves.
        mesh: the replicas' devices.
        layouts: how the leaves are split over the devices of each replica.
        divided: how leaves are divided among the replicas; None if they are not.
    """

    value_type = Mirrored

    def __init__(self, types: Types, mesh: ReplicaMesh, layouts: Layouts, divided: Divided | None):
        super().__init__(types, mesh)
        self.divided = divided
        if divided is not None:
            layouts = [divided(kind, layout) for layout, kind in zip(layouts, types)]
        self.layouts = layouts if any(layout is not None for layout in layouts) else None
        self.shares_copies = self.layouts is None

    def with_layouts(self, layouts: Layouts) -> Self:
        """Return a home of the same leaves that are split over each replica's devices in another way."""
        return type(self)(self.types, self.mesh, layouts, self.divided)

    def divided_by(self, divided: Divided | None) -> Self:
        """Return a home of the same leaves that are divided among the replicas by another function, or not at all."""
        if divided is None and self.divided is None:
            return self
        layouts = [partition.within_replica(layout) for layout in self.layouts or ()] or [None] * len(self.types)
        return type(self)(self.types, self.mesh, layouts, divided)

    def cut_axis(self, index: int) -> int | None:
        return None if self.layouts is None else cut_axis(self.layouts[index])

    def device_layout(self, index: int) -> PartitionSpec | None:
        return None if self.layouts is None else partition.within_replica(self.layouts[index])

    def shardings(self) -> Sequence[NamedSharding]:
        wholes = super().shardings()
        if self.layouts is None:
            return wholes
        pairs = zip(wholes, self.layouts)
        return [x if layout is None else NamedSharding(self.mesh.mesh, layout) for x, layout in pairs]

    def placed(self, leaves: Leaves) -> Leaves:
        return list(leaves) if self.layouts is None else put(leaves, self.shardings())

    def vectors(self, index: int, array: jax.Array) -> Hashable:
        return super().vectors(index, array) if self.layouts is None else None

    def of_first(self, leaves: Leaves, name: str) -> Leaves:
        if self.layouts is None or self.mesh.all_local:
            return super().of_first(leaves, name)
        return [
            super(MirroredHome, self).of_first([leaf], name)[0]
            if layout is None or is_global(leaf)
            else cross_process.from_first_laid_out(self.mesh, leaf, layout)
            for leaf, layout in zip(leaves, self.layouts)
        ]

    def of_host(self, arrays: Sequence[np.ndarray]) -> Leaves:
        """Return the leaves of whole arrays that all processes have in the host's memory; each device gets its part."""
        if self.mesh.all_local:
            return put(arrays, self.shardings())
        return [self.mesh.spread(array, where) for array, where in zip(arrays, self.shardings())]

    def global_leaf(self, leaf: Converted, index: int, traced: bool) -> jax.Array:
        mesh = self.mesh
        if isinstance(leaf, Mirrored) and mesh_of(leaf) is mesh:
            return array_of(leaf)
        if traced:
            return leaf if isinstance(leaf, jax.Array) else as_copies(array_of(leaf), mesh)
        if not isinstance(leaf, jax.Array):
            return mesh.mirror(leaf.values)
        frames.refuse_tracers([leaf])
        if self.layouts is None and leaf.sharding == mesh.mirrored:
            return leaf
        if is_global(leaf) or (self.layouts is not None and self.layouts[index] is not None):
            return mesh.spread(leaf, self.shardings()[index])
        return mesh.mirror([leaf] * len(mesh.local_ids))


class StackedHome(Components):
    """A value of each leaf on every replica's device."""

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


class PartsHome(OnMesh):
    """A part of each leaf on every replica's device (see `_collectives.sharding`).

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

    def of_whole(self, leaves: Sequence[_Array]) -> Leaves:
        """Return whole arrays in global form."""
        mesh, arrays = self.mesh, []
        for index, leaf in enumerate(leaves):
            if self.has_rows(index):
                rows = sharding.as_rows(leaf, mesh.size)
                arrays.append(mesh.stack([rows[i] for i in mesh.local_ids]))
            else:
                arrays.append(mesh.mirror([leaf] * len(mesh.local_ids)))
        return arrays


class CentralHome(Home):
    """One place for all replicas: their parameter device, or the host's memory (see `_variables.central`)."""

    mesh: ReplicaMesh

    def __init__(self, types: Types, mesh: ReplicaMesh, place: Place):
        super().__init__(types)
        self.mesh, self.place, self.lends = mesh, place, place.lends

    def placed(self, leaves: Leaves) -> Leaves:
        with jax_internals.untraced():
            return [self.place.placed(leaf) for leaf in leaves]

    def entering(self, leaf: jax.Array) -> jax.Array:
        return self.place.entering(leaf)

    def leaving(self, leaves: Leaves) -> Leaves:
        return [self.place.leaving(leaf) for leaf in leaves]

    def copied(self, leaves: Leaves) -> Leaves:
        return [self.place.copied(leaf) for leaf in leaves]


def array_of(value: PerReplica | Mirrored) -> jax.Array:
    """Return the array of a distributed value of a variable."""
    array = global_array(value)
    assert array is not None, value
    return array


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
