"""Plans as a picture: the memory of a device, and what bounds the time of a step. It needs matplotlib."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from replicax._base import doc_pages
from replicax._base.planning import PlanError
from replicax._plan.report import TopologyPlan

_PARTS = {
    "variables": "variables",
    "state": "optimizer and other state",
    "batch": "batch",
    "padding": "padding",
    "outputs": "results",
    "temporaries": "temporaries",
    "code": "program",
}


def check(path: str | os.PathLike[str]) -> None:
    """Raises `PlanError` if no picture can be written to this file."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlanError(f"Drawing a plan needs matplotlib: {doc_pages.install('plan')}.")
    from matplotlib.figure import Figure

    folder, kind = Path(path).parent, Path(path).suffix.removeprefix(".")
    known = Figure().canvas.get_supported_filetypes()
    if not folder.is_dir() or kind not in known:
        reason = f"there is no folder {folder}" if not folder.is_dir() else f"the ending is none of {', '.join(known)}"
        raise PlanError(f"The plan cannot be drawn to {path}: {reason}.")


def draw(path: str | os.PathLike[str], step: str, plans: Sequence[TopologyPlan]) -> None:
    """Writes the picture of a step's plans to a file."""
    check(path)
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    timed = [plan for plan in plans if plan.bounds]
    figure = Figure(figsize=(12 if timed else 7, 2.0 + 0.9 * len(plans)), layout="constrained")
    figure.suptitle(f"plan of {step}")
    axes: list[Axes] = list(figure.subplots(1, 2 if timed else 1, squeeze=False).flat)
    _memory(axes[0], plans)
    if timed:
        _times(axes[1], timed)
    figure.savefig(path, dpi=110)


def _memory(axes, plans: Sequence[TopologyPlan]) -> None:  # type: ignore[no-untyped-def]
    unit, name = _unit(max(plan.needed for plan in plans))
    names = [f"{plan.topology}\n{'fits' if plan.fits else 'does not fit'}" for plan in plans]
    start = [0.0] * len(plans)
    for attribute, label in _PARTS.items():
        sizes = [max(0, getattr(plan.memory, attribute)) / unit if plan.memory else 0.0 for plan in plans]
        axes.barh(names, sizes, left=start, label=label)
        start = [before + size for before, size in zip(start, sizes)]
    refused = [0.0 if plan.memory else plan.needed / unit for plan in plans]
    if any(refused):
        axes.barh(names, refused, color="none", edgecolor="red", hatch="//", label="needed, as the compiler says")
    widest = 1.05 * max(plan.needed for plan in plans) / unit
    for place, plan in enumerate(plans):
        if plan.available is not None and plan.available / unit <= 3 * widest:
            widest = max(widest, 1.05 * plan.available / unit)
            axes.plot([plan.available / unit] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2)
    axes.set_xlim(0, widest)
    axes.invert_yaxis()
    axes.set_xlabel(f"memory of a device in {name} (black: what there is)")
    _legend(axes)


def _times(axes, plans: Sequence[TopologyPlan]) -> None:  # type: ignore[no-untyped-def]
    kinds = list(plans[0].bounds)
    height = 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        places = [place + (number - (len(kinds) - 1) / 2) * height for place in range(len(plans))]
        axes.barh(places, [1e3 * plan.bounds[kind] for plan in plans], height, label=kind)
    axes.set_yticks(range(len(plans)), [plan.topology for plan in plans])
    axes.invert_yaxis()
    axes.set_xlabel("a step takes at least, in ms")
    _legend(axes)


def _legend(axes) -> None:  # type: ignore[no-untyped-def]
    """Draws the legend above the axes, where it hides nothing."""
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)


def _unit(size: float) -> tuple[float, str]:
    return next(((2.0**power, name) for power, name in ((30, "GiB"), (20, "MiB")) if size >= 2**power), (1024.0, "KiB"))
