"""The options of `replicax plan`, which the command passes to the process that runs the program."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from replicax._base.messages import received
from replicax._base.planning import PlanError
from replicax._plan.chips import Topology

MOST_DEVICES = 256  # the most devices that a program sees: XLA has too few threads to run programs on more of a CPU
TIME_LIMIT = 1800.0  # seconds for one compilation


def check_time_limit(seconds: object) -> float:
    """Return a time limit; raise `PlanError` if it is not a positive number of seconds."""
    try:
        number = float(seconds)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise PlanError(f"A time limit is a positive number of seconds, such as 600; got {received(seconds)}.")
    return number


def virtual_devices(topology: Topology) -> str:
    """Return the value of REPLICAX_VIRTUAL_DEVICES for a program that sees the devices of a topology."""
    return f"{topology.platform.upper()}:{min(topology.size, MOST_DEVICES)}"


@dataclass(frozen=True)
class Options:
    """The options of a plan.

    Attributes:
        topologies: their names.
        step: the name of the function that is the step, None for the first that assigns variables.
        picture: the file to draw to, None for none.
        module: whether the program is a module.
        axes: the axes of the step's mesh, from the one that spans hosts to the one within a host; None for the mesh's
            own order.
        time_limit: the most seconds that one compilation takes.
        compare: whether to plan the step also with other options of its strategy.
        largest_batch: whether to search the largest batch.
        result: the file to which the plans are written, pickled, in place of printing them; None to print.
        command: the program and its arguments.
    """

    topologies: list[str]
    step: str | None = None
    picture: str | None = None
    module: bool = False
    axes: list[str] | None = None
    time_limit: float = TIME_LIMIT
    compare: bool = False
    largest_batch: bool = False
    result: str | None = None
    command: list[str] = field(default_factory=list)
