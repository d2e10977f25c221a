"""Finds how values of a replica's program are split over the replica's devices, as far as variables' layouts say it.

Between the devices of a replica XLA spreads a program by itself; but what it finds does not reach through collectives
over the replicas, such as the gathers of `sharded_variables`: without a layout XLA brings the whole to every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import jax.extend.core as jex
from jax.sharding import PartitionSpec

from replicax._base.jaxprs import Atom, kind_of
from replicax._passes.part_demand import SAME, sums_of
from replicax._passes.primitives import ELEMENTWISE

Layouts: TypeAlias = Mapping[Atom, PartitionSpec]
Known: TypeAlias = dict[Atom, PartitionSpec | None]


def spread(jaxpr: jex.Jaxpr, known: Known) -> Layouts:
    """Returns the layouts of a jaxpr's variables, as far as they follow from those that are known.

    They follow through elementwise equations, transpositions and sums over the replicas.
    """
    found: dict[Atom, PartitionSpec] = {
        var: layout for var, layout in known.items() if layout is not None and isinstance(var, jex.Var)
    }
    if not found:
        return {}
    for eqn in jaxpr.eqns:
        for one, other, permutation in _alike(eqn):
            if one in found:
                found.setdefault(other, _permuted(found[one], permutation, kind_of(one).ndim))
    for eqn in reversed(jaxpr.eqns):
        for one, other, permutation in _alike(eqn):
            if other in found:
                back = None if permutation is None else [permutation.index(d) for d in range(len(permutation))]
                found.setdefault(one, _permuted(found[other], back, kind_of(one).ndim))
    return found


def of_slices(layout: PartitionSpec | None) -> PartitionSpec | None:
    """Returns the layout of what a loop takes, one by one, of an array along its first axis."""
    if not layout or layout[0] is not None:
        return None
    return PartitionSpec(*layout[1:])


def _alike(eqn: jex.JaxprEqn) -> list[tuple[jex.Var, jex.Var, tuple[int, ...] | None]]:
    """Returns operands and results of an equation that are split alike, with the permutation of a transposition."""
    pairs: list[tuple[Atom, jex.Var]] = [*sums_of(eqn)]
    name, permutation = eqn.primitive.name, None
    if not pairs and len(eqn.outvars) == 1:
        shape = kind_of(eqn.outvars[0]).shape
        if name in ELEMENTWISE or name in SAME:
            pairs = [(x, eqn.outvars[0]) for x in eqn.invars if kind_of(x).shape == shape]
        elif name == "transpose":
            pairs, permutation = [(eqn.invars[0], eqn.outvars[0])], tuple(eqn.params["permutation"])
    return [(one, other, permutation) for one, other in pairs if isinstance(one, jex.Var)]


def _permuted(layout: PartitionSpec, permutation: tuple[int, ...] | list[int] | None, rank: int) -> PartitionSpec:
    if permutation is None:
        return layout
    entries = [*layout, *[None] * (rank - len(layout))]
    return PartitionSpec(*(entries[d] for d in permutation))
