"""The pictures of RESULTS.md, of docs/explanation/performance.md and of the README, from the tables of RESULTS.md.

    python benchmarks/report.py --redraw        # all of them, from the tables that are there

A line through a point shows the range in which the middle half of the rounds lies, where the table has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import measured_charts

from replicax._report import charts
from replicax._report.charts import Row, Value
from replicax._report.drawing import Drawing

# A table of the page: a dict for each row, from the names of the columns to the cells.
Cells = list[dict[str, str]]


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


def _value(cell: str) -> Value | None:
    """The number of a cell, and its range if there is one, as `sides.spread` writes them; None without a number.

    >>> _value("1.50 (1.25–1.75)")
    Value(value=1.5, range=(1.25, 1.75), text='')
    """
    found = re.fullmatch(r"([\d.]+)(?: \(([\d.]+)–([\d.]+)\))?", cell)
    if found is None:
        return None
    return Value(float(found[1]), (float(found[2]), float(found[3])) if found[2] else None)


def step(tables: dict[str, Cells], replicas: str | None = None) -> Drawing:
    """The time of a step beside the best form by hand and beside TensorFlow, on all numbers of replicas or on one."""
    steps = [cells for cells in tables["steps"] if replicas in (None, cells["replicas"])]
    columns = {"best by hand": "replicax / best", "TensorFlow": "/ TensorFlow"}
    series = {"best by hand": "against the best program by hand in JAX", "TensorFlow": "against TensorFlow"}
    rows, model = [], None
    for cells in steps:
        values = {
            series[name]: value for name, column in columns.items() if (value := _value(cells[column])) is not None
        }
        count = cells["replicas"]
        group = "" if cells["model"] == model else cells["model"]
        model = cells["model"]
        name = f"{count} replica{'s' * (count != '1')}"
        rows.append(Row(name, values, group) if replicas is None else Row(model, values))
    said = "; ".join(
        f"{cells['model']}, {cells['replicas']}: "
        + " and ".join(cells[column].partition(" ")[0] for column in columns.values())
        for cells in steps
    )
    return measured_charts.points(
        "Time of a training step with replicax",
        f"The ratio to the best program by hand and to TensorFlow, by model and number of replicas: {said}.",
        "ratio of times; left of 1, replicax is faster; lines: the middle half of the rounds",
        rows,
        ticks=[0.0625, 0.125, 0.25, 0.5, 1, 2],
        marked=1,
    )


def epoch(tables: dict[str, Cells]) -> Drawing:
    """The time of a step of an epoch, input included."""
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


def first(tables: dict[str, Cells]) -> Drawing:
    """The time to the first step, by the number of replicas."""
    series: dict[str, list[tuple[float, float]]] = {}
    for cells in tables["first_steps"]:
        series.setdefault(cells["contender"], []).append((float(cells["replicas"]), float(cells["s"])))
    return measured_charts.lines(
        "Time to the first step, in a fresh process",
        f"Seconds by the number of replicas: {_said(series)}.",
        ("replicas", "seconds"),
        series,
    )


def variables(tables: dict[str, Cells]) -> Drawing:
    """The time of a call, by the number of its variables."""
    most = max(int(cells["replicas"]) for cells in tables["variables"])
    series: dict[str, list[tuple[float, float]]] = {}
    for cells in tables["variables"]:
        for name in ("replicax", "one variable", "by hand", "by hand, packed"):
            if int(cells["replicas"]) == most:
                series.setdefault(name, []).append((float(cells["variables"]), float(cells[name])))
    return measured_charts.lines(
        f"A call with many variables, on {most} replicas",
        f"Microseconds by the number of variables: {_said(series)}.",
        ("variables", "µs"),
        series,
    )


def _said(series: dict[str, list[tuple[float, float]]]) -> str:
    return "; ".join(f"{name}: " + ", ".join(f"{y:g} for {x:g}" for x, y in points) for name, points in series.items())


# Benchmark -> how its picture is drawn, and the table below which it stands.
PICTURES: dict[str, tuple[Callable[[dict[str, Cells]], Drawing], str]] = {
    "step": (step, "steps"),
    "epoch": (epoch, "epoch"),
    "first": (first, "first_steps"),
    "variables": (variables, "variables"),
}
