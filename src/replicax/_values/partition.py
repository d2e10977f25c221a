"""Layouts, which say along which axes of a mesh the dimensions of an array are split (`PartitionSpec`).

The axis `AXIS` divides it among the replicas, the others split a replica's part over its devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.sharding import PartitionSpec

from replicax._values.mesh import AXIS, ReplicaMesh


def axes_of(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the axes that a layout has for a dimension."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def cut_axis(layout: PartitionSpec | None) -> int | None:
    """Returns the dimension along which a layout divides an array among the replicas; None if each has the whole."""
    return next((axis for axis, entry in enumerate(layout or ()) if AXIS in axes_of(entry)), None)


def divided(layout: PartitionSpec | None, axis: int) -> PartitionSpec:
    """Returns a layout in which the replicas have parts along a dimension, and split their parts as before."""
    entries = [axes_of(entry) for entry in layout or ()]
    entries += [()] * (axis + 1 - len(entries))
    entries[axis] = (AXIS, *entries[axis])
    return _spec(entries)


def within_replica(layout: PartitionSpec | None) -> PartitionSpec | None:
    """Returns how a layout splits what one replica has over its devices; None if it does not."""
    entries = [tuple(name for name in axes_of(entry) if name != AXIS) for entry in layout or ()]
    while entries and not entries[-1]:
        entries.pop()
    return _spec(entries) if entries else None


def parts_along(mesh: ReplicaMesh, layout: PartitionSpec | None) -> list[int]:
    """Returns in how many parts a layout splits each dimension over the devices of a replica."""
    return [math.prod(mesh.axes[name] for name in axes_of(entry)) for entry in within_replica(layout) or ()]


def _spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(entry if len(entry) > 1 else entry[0] if entry else None for entry in entries))
