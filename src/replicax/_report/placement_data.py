"""What a placement knows: places, arrays, their parts, and the collectives of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

HOST = "host"  # the place of what lies in the host's memory
Index: TypeAlias = tuple[slice, ...]


@dataclass(frozen=True)
class Place:
    """Something that holds arrays: a device, the host's memory, or a parameter server.

    Attributes:
        name: such as "GPU:0", "host" or "server 0".
        replica: the number of the replica that the device belongs to; None for other places.
    """

    name: str
    replica: int | None = None


@dataclass(frozen=True)
class Part:
    """What one device holds of an array.

    Attributes:
        index: which part of the array it is, a slice for each dimension. None if it is no part of one array: each
            replica has a value of its own.
        bytes: the memory that it takes.
        flat: whether the index, of one slice, counts the elements of the flattened array.
    """

    index: Index | None
    bytes: int
    flat: bool = False


@dataclass(frozen=True)
class PlacedArray:
    """An array, and its parts on the devices of this process.

    Attributes:
        name: the variable's name or the path in the structure.
        dtype: its name.
        shape: of the whole array. For a `PerReplica` value, of its components concatenated along axis 0.
        parts: the part that each device has, by the device's name.
        elsewhere: the bytes on the devices of other processes.
        group: "input" or "variable", of a step; empty otherwise.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Mapping[str, Part]
    elsewhere: int = 0
    group: str = ""

    @property
    def bytes(self) -> int:
        """The bytes on the devices of this process."""
        return sum(part.bytes for part in self.parts.values())

    @property
    def type(self) -> str:
        """The dtype and the shape, such as "float32[784, 256]"."""
        return f"{self.dtype}{list(self.shape)}"

    def text(self, place: str) -> str:
        """Returns which part of the array a device has, as text: "whole", "own", "-" or an index."""
        part = self.parts.get(place)
        if part is None:
            return "-"
        if part.index is None:
            return "own"
        whole = (math.prod(self.shape),) if part.flat else self.shape
        ranges = [
            ":" if (one.start, one.stop) == (0, size) else f"{one.start}:{one.stop}"
            for one, size in zip(part.index, whole)
        ]
        while ranges and ranges[-1] == ":":
            ranges.pop()
        return f"{'flat' if part.flat else ''}[{', '.join(ranges)}]" if ranges else "whole"


@dataclass(frozen=True)
class Collective:
    """A collective of a compiled step.

    Attributes:
        kind: such as "all-reduce".
        arrays: the dtype and the shape of each array that it carries, such as "float32[256, 64]".
        bytes: of all that it works on, on one device: what goes into an all-reduce, what comes out of an all-gather.
        groups: the names of the devices that take part together. For a collective-permute, pairs of a device that
            sends and one that receives.
        times: how often it runs in a call, as far as the program's loops say how often they run.
        overlaps: whether other operations run between its start and its end.
        source: the operation of the program that it belongs to; empty where XLA does not say.
    """

    kind: str
    arrays: tuple[str, ...]
    bytes: int
    groups: tuple[tuple[str, ...], ...]
    times: int = 1
    overlaps: bool = False
    source: str = ""


@dataclass(frozen=True)
class PlacementData:
    """The data of a `Placement`, which describes the fields: what its text and its picture are made from."""

    title: str
    devices: tuple[Place, ...]
    arrays: tuple[PlacedArray, ...]
    collectives: tuple[Collective, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    other_devices: int = 0

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes of the arrays on each device.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> with strategy.scope():
        ...     v = rx.Variable([1.0, 2.0])
        >>> strategy.visualize(v).bytes
        {'GPU:0': 8, 'GPU:1': 8}
        """
        return self.bytes_of()

    def bytes_of(self, group: str | None = None) -> dict[str, int]:
        """Returns the bytes of the arrays on each device.

        Args:
            group: "input" or "variable" for these arrays of `show` alone.

        >>> import jax.numpy as jnp, replicax as rx
        >>> v = rx.Variable(jnp.ones(3))
        >>> step = rx.function(lambda x: v.assign_add(x))
        >>> placement = rx.show(step, jnp.ones(3))
        >>> placement.bytes_of("variable")
        {'GPU:0': 12}
        """
        found = dict.fromkeys((place.name for place in self.devices), 0)
        for array in self.arrays:
            for name, part in array.parts.items() if group in (None, array.group) else ():
                found[name] += part.bytes
        return found

    @property
    def total_bytes(self) -> int:
        """The bytes of the arrays on the devices of all processes.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.OneDeviceStrategy("GPU:0").visualize(jnp.ones(3)).total_bytes
        12
        """
        return sum(array.bytes + array.elsewhere for array in self.arrays)


def titled(strategy: object, replicas: int) -> str:
    """Returns the name of a strategy's class, with the number of its replicas."""
    return f"{type(strategy).__name__.removeprefix('_')}, {replicas} replica{'s' * (replicas > 1)}"
