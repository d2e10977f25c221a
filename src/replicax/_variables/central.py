"""Variables that live once for all replicas: on the parameter device, or in the host's memory.

A *home* says where the leaves of a variable are at rest. One device: programs of other devices are given copies, and
one of the copies that they return goes back. The host's memory: compiled programs take the leaves from there to their
devices and put the new ones back themselves, so that XLA can do it while it computes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from replicax._base import jax_internals, nest
from replicax._base.types import VariableAggregation
from replicax._collectives.arithmetic import first_component
from replicax._collectives.reducer import Reducer
from replicax._tracing import frames
from replicax._values import AXIS, ReplicaMesh
from replicax._variables.distributed import OfReplicas
from replicax._variables.resource import ResourceVariable
from replicax._variables.storage import Storage, Types
from replicax._variables.variable import Variable, register

_HOST = "pinned_host"


class DeviceHome:
    """A device that holds whole leaves."""

    lends = True  # whether what is read out may share a buffer with what is stored

    def __init__(self, device: jax.Device):
        self._device = device

    def put(self, leaf: Any) -> Any:
        """A leaf from anywhere, brought home."""
        for shard in leaf.addressable_shards if len(leaf.devices()) > 1 else ():
            if shard.device == self._device:
                return jax_internals.uncommitted(shard.data)
        return jax_internals.uncommitted(jax.device_put(jax_internals.first_copy(leaf), self._device))

    def read(self, leaf: Any, device: Any) -> Any:
        """A leaf on this device, or, where that is None, wherever is nearest."""
        return leaf if device is None else jax_internals.uncommitted(jax.device_put(leaf, device))

    def spread(self, leaf: Any) -> Any:
        """A leaf as programs over all replicas' devices can compute with it; inside of them as well."""
        return leaf

    def gathered(self, leaf: Any) -> Any:
        """Inside of a program: a new leaf, to be returned to its home."""
        return leaf

    def copied(self, leaf: Any) -> Any:
        """A copy at home."""
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
        """Whether JAX has such memory on these devices."""
        return all(_HOST in {memory.kind for memory in device.addressable_memories()} for device in mesh.local_devices)

    def _on_devices(self, leaf: Any) -> NamedSharding:
        size = self._mesh.size
        split = next(
            (axis for axis, length in enumerate(leaf.shape) if size > 1 and length and length % size == 0), None
        )
        return NamedSharding(
            self._mesh.mesh, PartitionSpec() if split is None else PartitionSpec(*[None] * split, AXIS)
        )

    def put(self, leaf: Any) -> Any:
        on_devices = self._on_devices(leaf)
        at_home = on_devices.with_memory_kind(_HOST)
        if leaf.sharding == at_home:
            return leaf
        return jax.device_put(jax.device_put(leaf, on_devices), at_home, may_alias=False)

    def _fetched(self, leaf: Any) -> Any:
        # JAX moves an array between memories or between devices, not both at once.
        return jax.device_put(leaf, self._on_devices(leaf), may_alias=False)

    def read(self, leaf: Any, device: Any) -> Any:
        device = self._mesh.local_devices[0] if device is None else device
        return jax_internals.uncommitted(jax.device_put(self._fetched(leaf), SingleDeviceSharding(device)))

    def spread(self, leaf: Any) -> Any:
        if isinstance(leaf, jax.core.Tracer):
            return lax.with_sharding_constraint(jax.device_put(leaf, self._on_devices(leaf)), self._mesh.mirrored)
        return jax.device_put(self._fetched(leaf), self._mesh.mirrored)

    def gathered(self, leaf: Any) -> Any:
        on_devices = self._on_devices(leaf)
        split = lax.with_sharding_constraint(leaf, on_devices)
        return jax.device_put(split, on_devices.with_memory_kind(_HOST))

    def copied(self, leaf: Any) -> Any:
        return self.put(self._fetched(leaf))


class HomeStorage(Storage):
    """Leaves that live once for all replicas, on one device or in the host's memory."""

    mesh: ReplicaMesh

    def __init__(self, name: str, types: Types, mesh: ReplicaMesh, leaves: list[Any], home: DeviceHome | HostHome):
        super().__init__(name, types, mesh, home.lends)
        self._home = home
        self.arrays = self.placed(leaves)

    def stored(self) -> list[Any]:
        if self.lost is not None:
            self.refuse_lost()
        return self.arrays

    def read(self) -> list[Any]:
        with jax_internals.untraced():
            return [self._home.spread(leaf) for leaf in self.stored()]

    def read_on(self, device: jax.Device | None) -> list[Any]:
        """Returns the leaves on this device, or, where that is None, wherever is nearest."""
        leaves = self.stored()
        self.lent = self.lent or self._home.lends
        with jax_internals.untraced():
            return [self._home.read(leaf, device) for leaf in leaves]

    def read_one(self) -> list[Any]:
        """Returns the leaves wherever is nearest."""
        return self.read_on(None)

    def placed(self, leaves: list[Any]) -> list[Any]:
        with jax_internals.untraced():
            return [self._home.put(leaf) for leaf in leaves]

    def write(self, leaves: list[Any]) -> None:
        super().write(leaves)
        self.lent = self._home.lends

    def read_component(self, replica: int) -> list[Any]:
        return self.read_on(self.mesh.local_devices[replica])

    def write_component(self, replica: int, leaves: list[Any]) -> None:
        self.write(leaves)

    def entering(self, leaf: Any) -> Any:
        return self._home.spread(leaf)

    def leaving(self, leaves: list[Any]) -> list[Any]:
        return [self._home.gathered(leaf) for leaf in leaves]

    def copied(self, leaves: list[Any]) -> list[Any]:
        return [self._home.copied(leaf) for leaf in leaves]


class _Assigning(threading.local):
    def __init__(self) -> None:
        self.alike = False


_assigning = _Assigning()


@contextlib.contextmanager
def alike() -> Iterator[None]:
    """A context in which all replicas assign the same to variables without an aggregation; one's value is taken."""
    before, _assigning.alike = _assigning.alike, True
    try:
        yield
    finally:
        _assigning.alike = before


class AggregatingVariable(OfReplicas, ResourceVariable):
    """A variable that lives once. What replicas assign is aggregated first, and then assigned once."""

    _storage: HomeStorage

    def __init__(
        self, *args: Any, strategy: Any, reducer: Reducer, home: DeviceHome | HostHome, device: Any, **kwargs: Any
    ):
        self._strategy, self._reducer, self._mesh = strategy, reducer, reducer.mesh
        self._home, self._device_name = home, device
        super().__init__(*args, **kwargs)

    def _device(self) -> Any:
        return self._device_name

    def _new_storage(self, leaves: list[jax.Array], lent: bool) -> HomeStorage:
        assert self._mesh is not None
        return HomeStorage(self.name, self._types, self._mesh, leaves, self._home)

    def _get(self) -> list[Any]:
        return frames.frame().read_one(self)

    _read = _get

    def _update(self, combine, value, read_value, method):
        self._check_strategy()
        if not self._in_own_replica():
            value = value if isinstance(value, Variable) else nest.map_structure(first_component, value)
            new = self._apply(combine, self._convert(value))
        elif self._aggregation is VariableAggregation.NONE and not _assigning.alike:
            raise ValueError(
                f"You must specify an aggregation method to update a {type(self).__name__} in Replica Context. You can "
                "do so by passing an explicit value for argument `aggregation` to tf.Variable(..). It lives once for "
                "all replicas, whose values are put together by that: `tf.VariableAggregation.SUM`, `MEAN` or "
                f"`ONLY_FIRST_REPLICA`. The variable is {self.name}."
            )
        else:
            if self._aggregation is VariableAggregation.NONE:
                value = self._of_leaves(self._convert(value))  # Keras's variables are no values of a replica's
            new = self._update_aggregated(combine, value, method)
        return self._of_leaves(new) if read_value else None

    def _merge_update(self, strategy: Any, combine: Any, value: Any) -> list[Any]:
        super()._merge_update(strategy, combine, value)
        # Of their own identity: one value for all replicas, while what they read later is each one's.
        return [lax.optimization_barrier(x) if isinstance(x, jax.core.Tracer) else x for x in self._get()]

    def _apply(self, combine: Callable[[Any, Any], Any], leaves: list[Any]) -> list[Any]:
        with frames.lock:
            new = self._combined(combine, leaves)
            self._put(new)
        return new


register(AggregatingVariable)
