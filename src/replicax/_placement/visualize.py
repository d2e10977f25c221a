"""`Strategy.visualize`."""

from __future__ import annotations

from replicax._base.types import Tree
from replicax._placement.arrays import Places
from replicax._placement.find import arrays_in, checked
from replicax._report.placement import Placement
from replicax._report.placement_data import titled
from replicax._tracing import context, frames
from replicax._tracing.context import StrategyLike


def visualize(strategy: StrategyLike, value: Tree) -> Placement:
    """Implements `Strategy.visualize`."""
    context.require_cross_replica(strategy)
    mesh = strategy.extended._mesh
    places = Places(mesh)
    with frames.lock:
        arrays = checked(arrays_in(value, places), value)
    return Placement(
        titled(strategy, strategy.num_replicas_in_sync),
        places.with_others(arrays),
        tuple(arrays),
        other_devices=0 if mesh is None else mesh.mesh.size - len(places.here()),
    )
