"""Compiles programs for planned devices, several at a time."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from replicax._base import jax_internals
from replicax._plan import apart
from replicax._plan.chips import Topology
from replicax._plan.exports import Lowered, arrange, layout
from replicax._plan.options import TIME_LIMIT
from replicax._plan.report import TopologyPlan, report
from replicax._report.terminal import progress


@dataclass(frozen=True)
class Settings:
    """The settings of all compilations of a plan.

    Attributes:
        axes: the axes of the step's mesh, from the one that spans hosts to the one within a host; None for the order of
            the mesh.
        time_limit: the most seconds that one compilation takes.
    """

    axes: Sequence[str] | None = None
    time_limit: float = TIME_LIMIT


def compile_one(
    lowered: Lowered, topology: Topology, settings: Settings, processes: apart.Processes | None = None
) -> TopologyPlan:
    """Return the plan of a program for one topology; `processes` is that of `apart.compile_apart`."""
    lowered = arrange(lowered, settings.axes)
    measured = apart.compile_apart(lowered, topology, settings.time_limit, processes)
    arranged = dataclasses.replace(topology, order=tuple(lowered.order or ()))
    return report(arranged, lowered.replicas, lowered.inputs, measured, layout(lowered, topology))


def compile_all(
    name: str, programs: Iterable[tuple[Lowered, Topology]], total: int, settings: Settings
) -> list[Future[TopologyPlan]]:
    """Return the plans of all programs of the step with this name, or their errors, as futures that are done.

    Args:
        programs: the programs with their topologies, from an iterator that lowers them while others are compiled.
        total: the number of programs that progress is shown of.
        settings: the settings of the plan.
    """
    processes: apart.Processes = set()
    with (
        jax_internals.assume_cudnn(),
        progress(f"planning {name}", total=total, unit="programs") as bar,
        concurrent.futures.ThreadPoolExecutor(apart.AT_ONCE) as pool,
    ):
        try:
            waiting = [
                pool.submit(compile_one, lowered, topology, settings, processes) for lowered, topology in programs
            ]
            for future in concurrent.futures.as_completed(waiting):
                if future.exception() is None:
                    bar.advance()
        except BaseException:  # the user's interrupt among them: the pool would wait for the compilers
            pool.shutdown(wait=False, cancel_futures=True)
            apart.stop(processes)
            raise
    return waiting
