"""Exported programs of planned steps, and where the axes of their meshes lie."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.extend.core as jex
import numpy as np
from jax import export
from jax.sharding import NamedSharding

from replicax._base import doc_pages, jax_internals
from replicax._base.jaxprs import equations
from replicax._base.planning import PlanError
from replicax._base.types import Leaf, Tree
from replicax._plan.chips import Topology
from replicax._plan.report import Inputs


@dataclass(frozen=True)
class Lowered:
    """A step, exported for planned devices.

    Attributes:
        program: the exported program, serialized.
        axes: the names and sizes of the mesh's axes.
        specs: for each argument, how its dimensions are split over the axes.
        donated: the numbers of the donated arguments.
        replicas: the number of replicas.
        inputs: the bytes of the inputs.
        order: the number of the device at each place of the mesh, in the order of its axes; None for the devices' own
            order.
    """

    program: bytes
    axes: dict[str, int]
    specs: list[list[object]]
    donated: list[int]
    replicas: int
    inputs: Inputs
    order: list[int] | None = None


def export_program(
    name: str, function: Any, args: Sequence[Tree], topology: Topology, *, has_devices: bool
) -> export.Exported:
    """Export a compiled function for the planned devices.

    JAX does not export calls of libraries and kernels that another version may not have. Here the compiler has the same
    version, so they are allowed.

    Args:
        name: the step's.
        function: a function of `jax.jit`.
        args: the shapes of its arguments.
        topology: the planned devices.
        has_devices: whether its mesh has devices of this process, or there is none.

    Raises:
        PlanError: JAX has no implementation of an operation for these devices.
    """
    allowed: dict[str, export.DisabledSafetyCheck] = {}
    while True:
        exporter = export.export(function, platforms=[topology.compiler], disabled_checks=list(allowed.values()))
        try:
            with contextlib.nullcontext() if has_devices else jax_internals.lower_without_devices():
                return exporter(*args)
        except Exception as error:  # of whichever type the operation's lowering raises
            text = str(error)
            targets = set(re.findall(r"custom_call @([\w.$]+)", text)) - set(allowed)
            if targets and "CustomSPMDPartitioning" not in targets:
                allowed.update({target: export.DisabledSafetyCheck.custom_call(target) for target in targets})
            else:
                raise PlanError(_not_lowered(name, topology, text)) from error


def refuse_callbacks(name: str, jaxpr: jex.ClosedJaxpr) -> None:
    """Raise PlanError if a step calls Python while it runs: another process cannot compile such a program."""
    for eqn in equations(jaxpr):
        if jax_internals.callback_of(eqn) is not None:
            raise PlanError(
                f"{name} cannot be planned: it calls Python while it runs, by {eqn.primitive.name} in "
                f"{jax_internals.users_line(eqn)}. Leave out what prints, asserts or calls back to plan the step. "
                f"See {doc_pages.page('how-to/planning#what-cannot-be-planned')}."
            )


def _not_lowered(name: str, topology: Topology, error: str) -> str:
    """Return the message about an operation that JAX does not lower for the planned devices."""
    start = f"{name} cannot be planned for {topology.name}: "
    if "CustomSPMDPartitioning" in error or "file a bug" in error:  # its Python function is of this process
        return (
            f"{start}it has an operation that a Python function partitions among devices (`custom_partitioning`), such "
            "as cuDNN's attention. Call it in `jax.shard_map`, where each device computes its own part."
        )
    return f"{start}JAX does not lower it. {(error.strip().splitlines() or [''])[0]}"


def arrange(lowered: Lowered, axes: Sequence[str] | None) -> Lowered:
    """Return a lowered step with the devices of its mesh in another order.

    Args:
        lowered: the step.
        axes: the mesh's axes from the outermost, which spans hosts, to the innermost, which lies within a host; None
            for the order of the mesh.

    Raises:
        PlanError: the mesh has other axes.
    """
    if axes is None:
        return lowered
    names, sizes = list(lowered.axes), lowered.axes
    if sorted(axes) != sorted(names):
        raise PlanError(
            f"`axes` lists the axes of the mesh, from the one that spans hosts to the one within a host. The mesh has "
            f"{', '.join(names)}; got {', '.join(axes)}."
        )
    numbers = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in axes])
    order = numbers.transpose([list(axes).index(name) for name in names]).ravel().tolist()
    return replace(lowered, order=order)


def layout(lowered: Lowered, topology: Topology) -> str:
    """Return where the axes of a mesh lie, for example "data 2x4, model 1x2" for hosts x devices of each.

    It is empty for one axis on one host.
    """
    used = math.prod(lowered.axes.values())
    if used < topology.size:
        return f"{used} of {topology.size} devices"
    grid = np.array(lowered.order or range(used)).reshape(list(lowered.axes.values())) // topology.per_host
    texts = []
    for place, (axis, count) in enumerate(lowered.axes.items()):
        line = grid[tuple(slice(None) if i == place else 0 for i in range(grid.ndim))]
        hosts = len(set(line.tolist()))
        texts += [f"{axis} {hosts}x{count // hosts}"] if count > 1 else []
    return ", ".join(texts) if len(texts) > 1 or topology.hosts > 1 else ""


def spec_of(leaf: Leaf) -> list[object]:
    """Return how the dimensions of an array are split over the axes of its mesh."""
    sharding = getattr(leaf, "sharding", None)
    return list(sharding.spec) if isinstance(sharding, NamedSharding) else []


def bytes_on_device(kind: Leaf, sharding: object) -> int:
    """Return the bytes of an array's part on one device."""
    shape = kind.shape
    if isinstance(sharding, NamedSharding):
        shape = sharding.shard_shape(tuple(shape))
    size: int = math.prod(shape) * kind.dtype.itemsize
    return size
