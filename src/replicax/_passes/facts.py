"""The facts that passes know about a jaxpr beside its equations."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

from replicax._collectives.all_reduce import Packing
from replicax._values import ReplicaMesh


class Stage(enum.Enum):
    """A jaxpr that passes rewrite, see `_passes.pipeline`."""

    REPLICA = "replica function"
    FUNCTION = "function"
    PROGRAM = "program"


@dataclass(frozen=True)
class Parts:
    """The arguments and results of a replica function's jaxpr that a replica has parts of.

    Attributes:
        arguments: for their places, the axes along which arguments are divided among the replicas.
        results: the same for results.
        argument_layouts: for places, how arguments are split over the devices of a replica.
        result_layouts: the same for results.
        differ: for each argument, whether its values may differ between replicas.
    """

    arguments: Mapping[int, int]
    results: Mapping[int, int]
    argument_layouts: Mapping[int, PartitionSpec | None]
    result_layouts: Mapping[int, PartitionSpec | None]
    differ: Sequence[bool]


@dataclass(frozen=True)
class Facts:
    """The facts that passes know about a jaxpr beside its equations.

    Attributes:
        stage: which jaxpr it is.
        platform: of the devices that run it, such as "cpu".
        optimizes: whether passes that only make it faster may apply (`rx.config.optimize_programs`).
        mesh: the replicas' devices; None if no replicas run in it.
        packing: the messages that suit the devices; None to send the collectives as they were traced.
        parts: the values that a replica has parts of; None if it has all values whole.
        is_branch: whether it becomes a branch of a program, for replicas with parts of one shape.
        is_loop: whether it becomes the body of a loop over several steps.
        vectors: the places of results that are vectors of new leaves of variables; None for a program without vectors
            of variables.
        applied: the names of the passes that rewrite it, which `_passes.pipeline` adds.
    """

    stage: Stage
    platform: str
    optimizes: bool
    mesh: ReplicaMesh | None = None
    packing: Packing | None = None
    parts: Parts | None = None
    is_branch: bool = False
    is_loop: bool = False
    vectors: Collection[int] | None = None
    applied: list[str] = field(default_factory=list)
