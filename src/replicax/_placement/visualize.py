"""`Strategy.visualize`, and what notebooks show of variables and distributed values: a text and a picture."""

from __future__ import annotations

import html

from replicax._base import quantities
from replicax._base.errors import InvalidArgumentError
from replicax._base.types import Tree
from replicax._placement.arrays import Places
from replicax._placement.find import arrays_in, checked
from replicax._report.placement import Placement
from replicax._report.placement_data import titled
from replicax._tracing import context, frames
from replicax._tracing.context import StrategyLike
from replicax._values import Mirrored, PerReplica, mesh_of
from replicax._variables.variable import Variable

_LARGE = 1024  # bytes on all devices, from which on a value is not fetched from them
_MOST = 12  # arrays in a picture


def visualize(strategy: StrategyLike, value: Tree) -> Placement:
    """Implements `Strategy.visualize`."""
    context.require_cross_replica(strategy)
    mesh = context.mesh_of(strategy)
    places = Places(mesh)
    with frames.lock:
        arrays = checked(arrays_in(value, places), value)
    return Placement(
        titled(strategy, strategy.num_replicas_in_sync),
        places.with_others(arrays),
        tuple(arrays),
        other_devices=0 if mesh is None else mesh.mesh.size - len(places.here()),
    )


def to_html(value: object) -> tuple[str, str] | None:
    """Return HTML of a value, and a text without numbers if the value is large; None if it is not placed yet."""
    if isinstance(value, Variable):
        strategy = value.distribute_strategy
        mesh = None if strategy is None else context.mesh_of(strategy)
        title = f"{type(value).__name__} {value.name}"
    elif isinstance(value, PerReplica | Mirrored):
        mesh, title = mesh_of(value), type(value).__name__
    else:
        return None
    places = Places(mesh)
    try:
        with frames.lock:
            arrays = arrays_in(value, places)
    except InvalidArgumentError:  # a tracer, or a deleted array
        return None
    if not arrays:
        return None
    text = ""
    if sum(array.bytes for array in arrays) > _LARGE:
        lines = [
            f"{array.name}: {array.type}, {quantities.size(array.bytes)} on its devices" for array in arrays[:_MOST]
        ]
        more = [f"and {len(arrays) - _MOST} more arrays"] * (len(arrays) > _MOST)
        text = "\n".join([title, *lines, *more])
    picture = Placement(title, places.with_others(arrays), tuple(arrays[:_MOST]))._repr_html_()
    return f"<pre>{html.escape(text or repr(value))}</pre>{picture}", text
