"""Arrays as they are laid out on devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.sharding import Sharding

from replicax._base import devices as _devices
from replicax._base.errors import InvalidArgumentError
from replicax._report.placement_data import HOST, Part, Place, PlacedArray
from replicax._values import ReplicaMesh


@dataclass(frozen=True)
class Places:
    """The devices of a strategy in order, with names for all devices of all processes."""

    mesh: ReplicaMesh | None
    names: dict[jax.Device, str] = field(default_factory=dict)

    def name(self, device: jax.Device) -> str:
        """Returns a device's short name; with its process in front of it if that is another one."""
        if not self.names:
            table = _devices.device_table()
            self.names.update({device: name for name, device in table.items()})
        if device not in self.names:
            devices = jax.devices(device.platform) if self.mesh is None else list(self.mesh.mesh.devices.flat)
            here = [other for other in devices if other.process_index == jax.process_index()]
            index = [other for other in devices if other.process_index == device.process_index].index(device)
            # Virtual devices have the names there that they have here.
            name = self.names.get(here[index]) if index < len(here) else None
            name = name or f"{_devices.short_name(device).partition(':')[0]}:{index}"
            self.names[device] = f"process {device.process_index} {name}"
        return self.names[device]

    def of_replica(self, replica: int) -> Sequence[jax.Device]:
        """Returns the devices of one replica."""
        assert self.mesh is not None
        return self.mesh.logical_devices[replica]

    def here(self) -> list[Place]:
        """Returns this process's devices of the strategy."""
        if self.mesh is None:
            return []
        pairs = ((i, device) for i in self.mesh.local_ids for device in self.of_replica(i))
        return [Place(self.name(device), i) for i, device in pairs]

    def with_others(self, arrays: Sequence[PlacedArray]) -> tuple[Place, ...]:
        """Returns this process's devices of the strategy, and behind them the other places that hold parts."""
        holds = {name for array in arrays for name in array.parts}
        here = self.here()
        if len(here) == 1 and here[0].name not in holds:  # as where all variables are on parameter servers
            here = []
        found = {place.name: place for place in here}
        for array in arrays:
            for name in array.parts:
                found.setdefault(name, Place(name))
        return tuple(found.values())


def laid_out(name: str, shape: Sequence[int], dtype: np.dtype, sharding: Sharding, places: Places) -> PlacedArray:
    """Returns an array of this shape, dtype and sharding."""
    process, elsewhere = jax.process_index(), 0
    parts: dict[str, Part] = {}
    device: jax.Device
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        ranges = tuple(slice(*each.indices(size)[:2]) for each, size in zip(index, shape))
        count = math.prod(each.stop - each.start for each in ranges) * dtype.itemsize
        if device.process_index != process:
            elsewhere += count
        elif _is_of_host(sharding, device):
            parts[HOST] = _both(parts.get(HOST), Part(ranges, count))
        else:
            parts[places.name(device)] = Part(ranges, count)
    return PlacedArray(name, str(dtype), tuple(shape), parts, elsewhere)


def of_array(name: str, array: jax.Array | np.ndarray, places: Places) -> PlacedArray:
    """Returns an array of JAX, or one of NumPy, which lies in the host's memory.

    Raises:
        InvalidArgumentError: the array is a tracer or has been deleted.
    """
    if isinstance(array, jax.core.Tracer):
        raise InvalidArgumentError(
            f"{name} has no place yet: it is an array of a function that is being traced. Call `visualize` outside of "
            "`rx.function`, `jax.jit` and other transformations."
        )
    if not isinstance(array, jax.Array):
        whole = tuple(slice(0, size) for size in array.shape)
        return PlacedArray(name, str(array.dtype), array.shape, {HOST: Part(whole, array.nbytes)})
    if array.is_deleted():
        raise InvalidArgumentError(
            f"The array {name} has been deleted: a compiled function took it over. Pass the array that the function "
            "returned in its place."
        )
    return laid_out(name, array.shape, array.dtype, array.sharding, places)


def _is_of_host(sharding: Sharding, device: jax.Device) -> bool:
    kind = sharding.memory_kind
    return kind is not None and kind != device.default_memory().kind and kind.endswith("host")


def _both(one: Part | None, other: Part) -> Part:
    """Returns two parts that lie in the same place as one."""
    if one is None or one.index is None or other.index is None:
        return other
    pairs = zip(one.index, other.index)
    hull = tuple(slice(min(x.start, y.start), max(x.stop, y.stop)) for x, y in pairs)
    return Part(hull, one.bytes + other.bytes)
