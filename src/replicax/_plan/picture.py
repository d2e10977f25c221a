"""Plans as a picture: the memory of a device, the bounds of a step's time, and its timeline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from replicax._base.errors import InvalidArgumentError
from replicax._base.planning import PlanError
from replicax._base.quantities import seconds, size
from replicax._plan import page, timeline
from replicax._plan.report import TopologyPlan
from replicax._report import charts, drawing
from replicax._report.charts import Chart, Row, Value

_PARTS = {
    "variables": "variables",
    "state": "optimizer and other state",
    "batch": "batch",
    "padding": "padding",
    "outputs": "results",
    "temporaries": "temporaries",
    "code": "program",
}
_PAGE = ".html"


def check(path: str | os.PathLike[str]) -> None:
    """Raises `PlanError` if no picture can be written to this file."""
    try:
        drawing.check(path, [".svg", _PAGE])
    except InvalidArgumentError as error:
        raise PlanError(f"The plan cannot be drawn to {path}: {error}") from None


def draw(path: str | os.PathLike[str], step: str, plans: Sequence[TopologyPlan]) -> None:
    """Writes the picture of a step's plans to a file; with the ending ".html", as a page."""
    check(path)
    if Path(path).suffix.lower() == _PAGE:
        page.write(path, step, _charts(step, plans).svg(), plans)
    else:
        drawing_of(step, plans).save(path)


def drawing_of(step: str, plans: Sequence[TopologyPlan]) -> Chart:
    """Returns the picture of a step's plans."""
    picture = _charts(step, plans)
    for plan in plans:
        if timeline.has_bars(plan.timeline):
            picture.put_below(timeline.chart(step, plan.topology, plan.timeline))
    return picture


def _charts(step: str, plans: Sequence[TopologyPlan]) -> Chart:
    """Returns the picture of memory and bounds."""
    picture = _memory(step, plans)
    if timed := [plan for plan in plans if plan.bounds]:
        picture.put_below(_times(step, timed))
    return picture


def _memory(step: str, plans: Sequence[TopologyPlan]) -> Chart:
    most = max(plan.needed for plan in plans)
    unit, name = _unit(most)

    def row(plan: TopologyPlan) -> Row:
        parts = {label: max(0, getattr(plan.memory, key)) for key, label in _PARTS.items()} if plan.memory else {}
        values = {label: Value(count / unit) for label, count in parts.items() if count}
        if not plan.memory:
            values = {"needed, as the compiler says": Value(plan.needed / unit)}
        near = plan.available is not None and plan.available <= 3 * most
        mark = plan.available / unit if plan.available is not None and near else None
        return Row(plan.topology, values, mark=mark, note="fits" if plan.fits else "does not fit")

    said = "; ".join(
        f"{plan.topology} needs {size(plan.needed)}"
        + (f" of {size(plan.available)}" if plan.available is not None else "")
        for plan in plans
    )
    axis = f"{name} on each device; the upright line marks what there is"
    return charts.bars(f"{step}: memory of a device", f"{said}.", axis, [row(plan) for plan in plans], stacked=True)


def _times(step: str, plans: Sequence[TopologyPlan]) -> Chart:
    rows = [Row(plan.topology, {kind: Value(1e3 * bound) for kind, bound in plan.bounds.items()}) for plan in plans]
    said = "; ".join(
        f"{plan.topology}: " + ", ".join(f"{kind} {seconds(bound)}" for kind, bound in plan.bounds.items())
        for plan in plans
    )
    return charts.bars(f"{step}: a step takes at least", f"{said}.", "ms", rows, stacked=False)


def _unit(count: float) -> tuple[float, str]:
    units = (2.0**30, "GiB"), (2.0**20, "MiB")
    return next((unit for unit in units if count >= unit[0]), (2.0**10, "KiB"))
