"""The search for the largest batch of a step that fits the memory of a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from replicax._base import doc_pages, jax_internals
from replicax._base.planning import PlanError
from replicax._base.quantities import size
from replicax._plan import pool
from replicax._plan.chips import Topology
from replicax._plan.exports import Lowered
from replicax._plan.jit_steps import JitStep
from replicax._plan.lowering import Step
from replicax._plan.pool import Settings
from replicax._plan.report import TopologyPlan
from replicax._report.terminal import progress

RESOLUTION = 16  # the search ends when it knows the rows to one part in so many
_MOST_ROWS = 2**31 - 1  # XLA's indices have 32 bits
_JUMP = 1024  # the largest factor between the rows of two measurements


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch of a step that fits the memory of a device.

    Attributes:
        rows: the rows of each part of the batch, such as a replica's; 0 if the step does not fit with one row.
        parts: the number of parts.
        plan: the plan with these rows, with one row if `rows` is 0.
        refused: the fewest rows that the search has found too many, None if there is no limit.
        compiled: the number of compilations that the search took.
    """

    rows: int
    parts: int
    plan: TopologyPlan
    refused: int | None
    compiled: int

    def __str__(self) -> str:
        name, needed, available = self.plan.topology, size(self.plan.needed), size(self.plan.available or 0)
        if not self.rows:
            return f"largest batch on {name}: none. One row needs {needed} of {available}."
        in_all = f" in each of {self.parts} parts, {self.rows * self.parts} in all," if self.parts > 1 else ""
        above = f"; {self.refused} rows do not fit" if self.refused else ""
        return f"largest batch on {name}: {self.rows} rows{in_all} need {needed} of {available}{above}."


def check(topology: Topology) -> None:
    """Raise `PlanError` for virtual CPU devices."""
    if topology.memory is None:
        raise PlanError(
            f"{topology.name} has no largest batch: virtual CPU devices share the memory of the host, and a plan does "
            "not know its size. Name the topology of an accelerator, such as 'v5e:2x4'."
        )


def largest_batch(
    step: Step | JitStep, topology: Topology, first_plan: TopologyPlan, settings: Settings
) -> LargestBatch:
    """Search the largest batch of a step that fits a device, by compiling it with other batches.

    Args:
        step: the step.
        topology: the devices.
        first_plan: the plan of the step with its own batch.
        settings: the settings of the plan.

    Raises:
        PlanError: the devices are virtual CPU devices, the step's batch has no rows, or the step cannot be traced with
            another number of rows.
    """
    check(topology)
    rows = step.rows
    if not rows:
        raise PlanError(
            f"{step.name} has no largest batch: none of its inputs is a batch with rows, which are an array's first "
            "dimension. Pass the batch as an argument of the step. "
            f"See {doc_pages.page('how-to/planning#the-largest-batch')}."
        )
    plans = {rows: first_plan}
    with progress(f"searching the largest batch of {step.name} on {topology.name}") as bar:

        def plan(rows: int) -> TopologyPlan:
            if rows not in plans:
                bar.description = f"searching the largest batch of {step.name} on {topology.name}: {rows} rows"
                plans[rows] = pool.compile_one(_lower(step, rows, topology), topology, settings)
            return plans[rows]

        low, high = search(lambda rows: (plan(rows).fits, plan(rows).needed), rows, first_plan.available or 0.0)
    return LargestBatch(low, step.parts(first_plan.replicas), plans[low or 1], high, len(plans) - 1)


def _lower(step: Step | JitStep, rows: int, topology: Topology) -> Lowered:
    try:
        with jax_internals.assume_cudnn():
            return step.with_rows(rows).lowered(topology)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"{step.name} cannot be traced with {rows} rows in place of {step.rows}: {type(error).__name__}: {error} "
            "A step for batches of any size takes the number of rows from the shape of its batch."
        ) from error


def search(measure: Callable[[int], tuple[bool, float]], rows: int, available: float) -> tuple[int, int | None]:
    """Return the most rows that fit, and the fewest that do not; None if all numbers fit.

    The bytes are nearly linear in the rows, so that a line through two measurements says where to look next. Where it
    does not help, the rows are doubled or the interval is halved.

    Args:
        measure: returns whether so many rows fit, and the bytes that they need.
        rows: the number to begin with.
        available: the bytes that there are.
    """
    low, high, width = 0, _MOST_ROWS + 1, 0
    sizes: dict[int, float] = {}
    while high - low > max(1, low // RESOLUTION) and low < _MOST_ROWS:
        fits, sizes[rows] = measure(rows)
        low, high = (rows, high) if fits else (low, rows)
        least = max(1, low // RESOLUTION)
        guess = _where_line_ends(sizes, available)
        is_slow = 2 * (high - low) > width > 0 and high <= _MOST_ROWS
        width = high - low
        if high > _MOST_ROWS:
            guess = 2 * low if len(sizes) < 2 else min(guess or _MOST_ROWS, _JUMP * low)
        elif guess is None or is_slow:
            guess = (low + high) // 2
        rows = min(max(guess, low + least), max(high - least, low + 1))
    return low, None if high > _MOST_ROWS else high


def _where_line_ends(sizes: dict[int, float], available: float) -> int | None:
    """Return the rows that need the available bytes, by a line through the last two measurements; None without one."""
    if len(sizes) < 2:
        return None
    (rows, size), (other_rows, other_size) = list(sizes.items())[-2:]
    slope = (size - other_size) / (rows - other_rows)
    return int(rows + (available - size) / slope) if slope > 0 else None
