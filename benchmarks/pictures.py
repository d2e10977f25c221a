"""The pictures of docs/performance.md and of the README, drawn from the tables of that page.

    python benchmarks/report.py --redraw        # all of them, from the tables that are there

Where the rounds of a measurement are at hand, a line through a point shows the range in which the middle half of the
rounds lies. The tables have medians alone.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from sides import BY_HAND, TENSORFLOW, best

from replicax._base import charts
from replicax._base.charts import Row, Value
from replicax._base.drawing import Drawing

# A table of the page: a dict for each row, from the names of the columns to the cells.
Cells = list[dict[str, str]]
Spread = dict[tuple[str, str, str], tuple[float, float]]  # model, replicas, series


def tables_of(page: str) -> dict[str, Cells]:
    """The tables of a page that stand between comments, by their names.

    >>> tables_of("<!-- table: a -->\\n| x | y |\\n| --- | --: |\\n| b | 2 |\\n<!-- end -->")
    {'a': [{'x': 'b', 'y': '2'}]}
    """
    found = {}
    for name, text in re.findall(r"<!-- table: (.*?) -->\n(.*?)<!-- end -->", page, re.DOTALL):
        lines = [line for line in text.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        if len(cells) > 2:
            found[name] = [dict(zip(cells[0], row)) for row in cells[2:]]
    return found


def spread_of_steps(results: Sequence[dict[str, Any]]) -> Spread:
    """The quartiles of the rounds' ratios, of the rounds of benchmarks/step.py."""
    found: Spread = {}
    for r in results:
        rounds = r["rounds"]
        for name, other in (("best by hand", best(rounds, BY_HAND)), ("TensorFlow", TENSORFLOW)):
            if "replicax" in rounds and len(rounds.get(other, [])) > 1:
                ratios = [a / b for a, b in zip(rounds["replicax"], rounds[other])]
                low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
                found[r["model"], str(r["replicas"]), name] = low, high
    return found


def step(tables: dict[str, Cells], spread: Spread) -> Drawing:
    """The time of a step beside the best form by hand and beside TensorFlow."""
    columns = {"best by hand": "replicax / best", "TensorFlow": "/ TensorFlow"}
    series = {"best by hand": "against the best program by hand in JAX", "TensorFlow": "against TensorFlow"}
    rows, model = [], None
    for cells in tables["steps"]:
        values = {
            series[name]: Value(float(cells[column]), spread.get((cells["model"], cells["replicas"], name)))
            for name, column in columns.items()
            if re.fullmatch(r"[\d.]+", cells[column])
        }
        count = cells["replicas"]
        group = "" if cells["model"] == model else cells["model"]
        model = cells["model"]
        rows.append(Row(f"{count} replica{'s' * (count != '1')}", values, group))
    said = "; ".join(
        f"{cells['model']}, {cells['replicas']}: {cells['replicax / best']} and {cells['/ TensorFlow']}"
        for cells in tables["steps"]
    )
    return charts.points(
        "Time of a training step with replicax",
        f"The ratio to the best program by hand and to TensorFlow, by model and number of replicas: {said}.",
        "ratio of times; left of 1, replicax is faster" + ("; lines: the middle half of the rounds" if spread else ""),
        rows,
        ticks=[0.0625, 0.125, 0.25, 0.5, 1, 2],
        marked=1,
    )


def epoch(tables: dict[str, Cells], spread: Spread) -> Drawing:
    """The time of a step of an epoch, input included."""
    del spread
    column = [name for name in tables["epoch"][0] if name.startswith("µs a step")][-1]
    replicas = next(name for name in reversed(tables["epoch"][0]) if "replicas" in name).split()[0]
    rows = []
    for cells in tables["epoch"]:
        name = cells["contender"]
        side = "by hand" if name.startswith("by hand") else "TensorFlow" if "TensorFlow" in name else "replicax"
        rows.append(Row(name, {side: Value(float(cells[column]), text=f"{int(cells[column]):,}")}))
    said = ", ".join(f"{cells['contender']} {cells[column]}" for cells in tables["epoch"])
    axis = f"µs of a step, input included, on {replicas} replicas"
    return charts.bars("An epoch of 200 short steps", f"{axis}: {said}.", axis, rows, stacked=False)


def first(tables: dict[str, Cells], spread: Spread) -> Drawing:
    """The time to the first step, by the number of replicas."""
    del spread
    series: dict[str, list[tuple[float, float]]] = {}
    for cells in tables["first_steps"]:
        series.setdefault(cells["contender"], []).append((float(cells["replicas"]), float(cells["s"])))
    return charts.lines(
        "Time to the first step, in a fresh process",
        f"Seconds by the number of replicas: {_said(series)}.",
        ("replicas", "seconds"),
        series,
    )


def variables(tables: dict[str, Cells], spread: Spread) -> Drawing:
    """The time of a call, by the number of its variables."""
    del spread
    most = max(int(cells["replicas"]) for cells in tables["variables"])
    series: dict[str, list[tuple[float, float]]] = {}
    for cells in tables["variables"]:
        for name in ("replicax", "one variable", "by hand", "by hand, packed"):
            if int(cells["replicas"]) == most:
                series.setdefault(name, []).append((float(cells["variables"]), float(cells[name])))
    return charts.lines(
        f"A call with many variables, on {most} replicas",
        f"Microseconds by the number of variables: {_said(series)}.",
        ("variables", "µs"),
        series,
    )


def _said(series: dict[str, list[tuple[float, float]]]) -> str:
    return "; ".join(f"{name}: " + ", ".join(f"{y:g} for {x:g}" for x, y in points) for name, points in series.items())


# Benchmark -> how its picture is drawn, and the table below which it stands.
PICTURES: dict[str, tuple[Callable[[dict[str, Cells], Spread], Drawing], str]] = {
    "step": (step, "steps"),
    "epoch": (epoch, "epoch"),
    "first": (first, "first_steps"),
    "variables": (variables, "variables"),
}
