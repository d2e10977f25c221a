"""Going over from replicated arrays to stacked ones and back inside of compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from replicax._values.mesh import AXIS, ReplicaMesh


def as_rows(copies: Any, mesh: ReplicaMesh) -> Any:
    """Inside of compiled code: one stacked array of the copies that the replicas' devices have of a value."""
    return mapped(lambda copy: copy[None], mesh, PartitionSpec(), PartitionSpec(AXIS))(copies)


def as_copies(rows: Any, mesh: ReplicaMesh) -> Any:
    """Inside of compiled code: the rows of a stacked array as copies of one that is called replicated.

    So a program hands out the only component of this process without a second program that takes its row.
    """
    return mapped(lambda row: row[0], mesh, PartitionSpec(AXIS), PartitionSpec())(rows)


def mapped(function: Callable[..., Any], mesh: ReplicaMesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """A function of one replica's blocks, mapped over the replicas."""
    over_all = jax.shard_map(
        function, mesh=mesh.mesh, in_specs=in_specs, out_specs=out_specs, axis_names={AXIS}, check_vma=False
    )
    return jax.jit(over_all) if mesh.logical_axes else over_all  # over logical devices only the compiler spreads it
