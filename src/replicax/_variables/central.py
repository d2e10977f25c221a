"""Variables that live once for all replicas: on the parameter device, or in the host's memory.

A *home* says where the leaves of a variable are between programs. On one device: programs of other devices are given
copies, and one of the copies that they return goes back. In the host's memory: compiled programs take the leaves from
there to their devices and put the new ones back themselves, so that XLA can do it while it computes.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from replicax._base import jax_internals, thread_state
from replicax._base.types import Leaf, Tree, VariableAggregation
from replicax._collectives.arithmetic import first_component
from replicax._tracing import context, frames
from replicax._values import AXIS, ReplicaMesh, constrained
from replicax._variables.distributed import OfReplicas
from replicax._variables.leaves import SCATTER, refuse_split
from replicax._variables.resource import ResourceVariable
from replicax._variables.storage import CentralStorage, Leaves

_HOST = "pinned_host"


class DeviceHome:
    """A device that holds whole leaves."""

    lends = True  # whether what is read out may share a buffer with what is stored

    def __init__(self, device: jax.Device):
        self._device = device

    def placed(self, leaf: jax.Array) -> jax.Array:
        """Returns a leaf from anywhere, brought home."""
        for shard in leaf.addressable_shards if len(leaf.devices()) > 1 else ():
            if shard.device == self._device:
                return jax_internals.uncommitted(shard.data)
        return jax_internals.uncommitted(jax.device_put(jax_internals.first_copy(leaf), self._device))

    def read(self, leaf: jax.Array, device: jax.Device | None) -> jax.Array:
        """Returns a leaf on this device, or, where that is None, wherever is nearest."""
        return leaf if device is None else jax_internals.uncommitted(jax.device_put(leaf, device))

    def entering(self, leaf: jax.Array) -> jax.Array:
        """Returns a leaf where a program over all replicas' devices may compute with it, in the program or outside."""
        return leaf

    def leaving(self, leaf: jax.Array) -> jax.Array:
        """Returns a new leaf, inside of a program, as the program has to hand it out."""
        return leaf

    def copied(self, leaf: jax.Array) -> jax.Array:
        """Returns a copy at home."""
        return leaf.copy()


class HostHome:
    """The pinned memory of the host that has the replicas' devices, which compiled programs reach by themselves.

    A leaf is split over the devices along a dimension that their number divides, so that the host has it once and
    each device fetches its part. Where there is no such dimension, as in scalars, each device has a copy.
    """

    lends = False

    def __init__(self, mesh: ReplicaMesh):
        self._mesh = mesh

    @staticmethod
    def possible(mesh: ReplicaMesh) -> bool:
        """Returns whether JAX has such memory on these devices."""
        return all(_HOST in {memory.kind for memory in device.addressable_memories()} for device in mesh.local_devices)

    def _on_devices(self, leaf: jax.Array) -> NamedSharding:
        size = self._mesh.size
        divided = (axis for axis, length in enumerate(leaf.shape) if size > 1 and length and length % size == 0)
        axis = next(divided, None)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)
        return NamedSharding(self._mesh.mesh, spec)

    def placed(self, leaf: jax.Array) -> jax.Array:
        on_devices = self._on_devices(leaf)
        at_home = on_devices.with_memory_kind(_HOST)
        if leaf.sharding == at_home:
            return leaf
        return _put(_put(leaf, on_devices), at_home, may_alias=False)

    def _fetched(self, leaf: jax.Array) -> jax.Array:
        # JAX moves an array between memories or between devices, not both at once.
        return _put(leaf, self._on_devices(leaf), may_alias=False)

    def read(self, leaf: jax.Array, device: jax.Device | None) -> jax.Array:
        device = self._mesh.local_devices[0] if device is None else device
        return jax_internals.uncommitted(jax.device_put(self._fetched(leaf), SingleDeviceSharding(device)))

    def entering(self, leaf: jax.Array) -> jax.Array:
        if isinstance(leaf, jax.core.Tracer):
            return constrained(_put(leaf, self._on_devices(leaf)), self._mesh.mirrored)
        return _put(self._fetched(leaf), self._mesh.mirrored)

    def leaving(self, leaf: jax.Array) -> jax.Array:
        on_devices = self._on_devices(leaf)
        return _put(constrained(leaf, on_devices), on_devices.with_memory_kind(_HOST))

    def copied(self, leaf: jax.Array) -> jax.Array:
        return self.placed(self._fetched(leaf))


def _put(leaf: jax.Array, where: NamedSharding, may_alias: bool | None = None) -> jax.Array:
    there: jax.Array = jax.device_put(leaf, where, may_alias=may_alias)
    return there


class AggregatingVariable(OfReplicas, ResourceVariable):
    """A variable that lives once. What replicas assign is aggregated first, and then assigned once."""

    _storage: CentralStorage

    def __init__(self, *args: Any, home: DeviceHome | HostHome, device: str, **kwargs: Any):
        self._home, self._device_name = home, device
        super().__init__(*args, **kwargs)

    def _device(self) -> str:
        return self._device_name

    def _new_storage(self, leaves: Leaves, lent: bool) -> CentralStorage:
        refuse_split(leaves, self.name)
        return CentralStorage(self.name, self._types, self._mesh, leaves, self._home)

    def _get(self) -> Leaves:
        return frames.frame().read_one(self)

    _read = _get

    def _update(self, method: str, value: Tree, read_value: bool) -> Tree:
        if method in SCATTER:
            return super()._update(method, value, read_value)
        self._replicas.check_scope()
        if not self._replicas.is_inside():
            new = self._write(method, self._signature.convert_first(value))
        elif self._aggregation is VariableAggregation.NONE and not thread_state.current.assigns_alike:
            raise ValueError(
                f"You must specify an aggregation method to update a {type(self).__name__} in Replica Context. You can "
                "do so by passing an explicit value for argument `aggregation` to tf.Variable(..). It lives once for "
                "all replicas, whose values are put together by that: `tf.VariableAggregation.SUM`, `MEAN` or "
                f"`ONLY_FIRST_REPLICA`. The variable is {self.name}."
            )
        else:
            if self._aggregation is VariableAggregation.NONE:  # Keras's variables do not belong to a replica
                value = self._signature.unflatten(self._signature.convert_components(method, value))
            new = self._aggregate(method, value)
        return self._signature.unflatten(new) if read_value else None

    def _merge(self, strategy: context.StrategyLike, method: str, value: Tree) -> Leaves:
        super()._merge(strategy, method, value)
        # Of their own identity: one value for all replicas, while what they read later is each one's.
        return [lax.optimization_barrier(x) if isinstance(x, jax.core.Tracer) else x for x in self._get()]

    def _write(self, method: str, leaves: list[Leaf]) -> Leaves:
        return super()._write(method, [first_component(leaf) for leaf in leaves])
