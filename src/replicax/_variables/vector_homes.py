"""Where shared vectors of variables lie between calls of programs, and how arrays get to their devices."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from replicax._base import jax_internals
from replicax._base.host_memory import put
from replicax._values import ReplicaMesh, constrained

MOST_COPIES = 1 << 12  # of arrays on replicas; the host takes longer for more than it takes to compile a program

Leaves: TypeAlias = list[jax.Array]


class Slot(Protocol):
    """The place of a leaf in a vector."""

    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class DeviceVectors:
    """The home of shared vectors on one device.

    Args:
        device: the device.
        committed: whether JAX holds the vectors committed to it.
        stays: whether they come back to it from programs that run on other devices.
    """

    device: jax.Device
    committed: bool
    stays: bool
    copies_here = 1

    def copies(self, array: jax.Array) -> list[np.ndarray]:
        """Returns the array as the only copy."""
        return [np.asarray(array)]

    def of_copies(self, vectors: list[np.ndarray]) -> jax.Array:
        """Returns a vector of the host, brought here."""
        (vector,) = put(vectors, self.device, may_alias=False)
        return vector if self.committed else jax_internals.uncommitted(vector)

    def joined(self, arrays: Leaves) -> jax.Array:
        """Returns the vector of arrays that lie here."""
        return self.of_copies([np.concatenate([np.ravel(array) for array in arrays])])

    def placed(self, vector: jax.Array) -> jax.Array:
        """Returns a vector that came out of a program as it is kept."""
        return on_one_device(vector, self.device if self.stays else None)

    def leaving(self, vector: jax.Array) -> jax.Array:
        """Returns a new vector, inside of a program, as the program has to hand it out."""
        return vector

    def cut(self, vector: jax.Array, slot: Slot) -> jax.Array:
        """Returns a slot's part of the vector."""
        with jax_internals.untraced(), jax.default_device(self.device):
            return _cut(vector, slot)


@dataclass(frozen=True)
class MeshVectors:
    """The home of shared vectors that are replicated over a mesh; the methods are those of `DeviceVectors`."""

    mesh: ReplicaMesh

    @property
    def copies_here(self) -> int:
        """The number of replicas of this process."""
        return len(self.mesh.local_ids)

    def copies(self, array: jax.Array) -> list[np.ndarray]:
        """Returns an array's copies on the replicas of this process, which may have assigned different values."""
        return [np.asarray(copy) for copy in self.mesh.copies(array)]

    def of_copies(self, vectors: list[np.ndarray]) -> jax.Array:
        return self.mesh.mirror(vectors)

    def joined(self, arrays: Leaves) -> jax.Array:
        if isinstance(arrays[0], jax.ShapeDtypeStruct):
            size = sum(array.size for array in arrays)
            return jax.ShapeDtypeStruct((size,), arrays[0].dtype, sharding=self.mesh.mirrored)  # type: ignore[return-value]
        if self.mesh.all_local and len(arrays) * self.mesh.size > MOST_COPIES:
            joined: jax.Array = _joined(arrays, self.mesh.mirrored)
            return joined
        by_array = [self.copies(array) for array in arrays]
        return self.of_copies([np.concatenate([np.ravel(copy) for copy in copies]) for copies in zip(*by_array)])

    def placed(self, vector: jax.Array) -> jax.Array:
        return vector

    def leaving(self, vector: jax.Array) -> jax.Array:
        return constrained(vector, self.mesh.mirrored)

    def cut(self, vector: jax.Array, slot: Slot) -> jax.Array:
        with jax_internals.untraced():
            if self.mesh.all_local:
                return _cut(vector, slot)
            parts = [_cut(shard.data, slot) for shard in vector.addressable_shards]
            return jax.make_array_from_single_device_arrays(slot.shape, self.mesh.mirrored, parts)

    def cut_copy(self, vector: jax.Array, slot: Slot, replica: int) -> jax.Array:
        """Returns a slot's part of one replica's copy of the vector; no other device takes part."""
        with jax_internals.untraced():
            return jax_internals.uncommitted(_cut(self.mesh.shard(vector, replica), slot))


VectorHome: TypeAlias = DeviceVectors | MeshVectors


@functools.partial(jax.jit, static_argnums=1)
def _joined(arrays: Leaves, sharding: NamedSharding) -> jax.Array:
    return constrained(jnp.concatenate([jnp.ravel(array) for array in arrays]), sharding)


def _cut(vector: jax.Array, slot: Slot) -> jax.Array:
    part: jax.Array = _sliced(vector, np.int32(slot.start), slot.shape)
    return part


@functools.partial(jax.jit, static_argnums=2)
def _sliced(vector: jax.Array, start: np.int32, shape: tuple[int, ...]) -> jax.Array:
    return jnp.reshape(lax.dynamic_slice(vector, (start,), (math.prod(shape),)), shape)


def on_one_device(leaf: jax.Array, device: jax.Device | None) -> jax.Array:
    """Returns a leaf from anywhere as a variable of one copy keeps it: on `device`, or where it is."""
    leaf = jax_internals.first_copy(leaf)  # a program over several devices leaves a copy on each
    if device is None or device in leaf.devices():
        return leaf
    with jax_internals.untraced():
        return jax_internals.uncommitted(jax.device_put(leaf, device))
