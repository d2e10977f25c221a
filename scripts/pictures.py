"""Draws pictures of the README and of the documentation, in docs/images.

    python scripts/pictures.py              # all of them
    python scripts/pictures.py idea launch  # some
    python scripts/pictures.py --record     # plan the step of the timeline anew, with XLA's compiler for GPUs

`python benchmarks/report.py --redraw` draws those of measurements.
"""

from __future__ import annotations

import argparse
import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from diagrams import DIAGRAMS

import replicax as rx
from replicax._base.drawing import HUES, Circle, Drawing, Line, Rect, Shape, Text
from replicax._benchmark.picture import chart
from replicax._benchmark.report import TIMES
from replicax._plan import timeline as timelines
from replicax._plan.picture import drawing_of
from replicax._plan.report import Memory, TopologyPlan
from replicax._plan.schedule import Event

HERE = Path(__file__).parents[1]
IMAGES = HERE / "docs" / "images"
TIMELINE = Path(__file__).with_name("timeline.json")


def matrix(x: float, y: float, fill: str, *, rows: int = 3, columns: int = 4, cell: float = 9) -> list[Shape]:
    """A matrix with lines between its elements, whose upper left corner is here."""
    wide, tall = columns * cell, rows * cell
    shapes: list[Shape] = [Rect(x, y, wide, tall, fill=fill)]
    shapes += [Line([(x + i * cell, y), (x + i * cell, y + tall)], "page", 0.8) for i in range(1, columns)]
    shapes += [Line([(x, y + i * cell), (x + wide, y + i * cell)], "page", 0.8) for i in range(1, rows)]
    return [*shapes, Rect(x, y, wide, tall, stroke="edge")]


def idea() -> Drawing:
    """What a step does: a batch split among replicas, one function on each, one all-reduce, equal variables."""
    drawing = Drawing(
        "The idea of replicax",
        "One batch of 64 rows is split into four parts of 16 rows. Four devices each run the same function on their "
        "part, with a copy of the same variables. One all-reduce adds up the gradients of all four. Then every copy of "
        "the variables changes in the same way, and the loss is one number.",
        860,
        520,
    )
    left, wide = 250.0, 146.0
    middles = [left + wide * (i + 0.5) for i in range(4)]

    def said(y: float, number: int, title: str, *lines: str) -> None:
        drawing.add(Circle(33, y - 5, 12, "ink"), Text(33, y - 0.5, str(number), 13, "middle", "page", bold=True))
        drawing.add(Text(54, y, title, 14.5, bold=True))
        drawing.add(*(Text(54, y + 18 + 16 * i, line, 12, fill="muted") for i, line in enumerate(lines)))

    said(44, 1, "A batch is split", "64 rows, 16 for each replica")
    for hue, middle in zip(HUES, middles):
        drawing.add(Rect(middle - wide / 2 + 1, 26, wide - 2, 36, fill=hue))
        drawing.add(Line([(middle, 66), (middle, 92)], "edge", 1.5, arrow=True))
    lines = "the same function on its device,", "with its rows and with its copy", "of the variables"
    said(150, 2, "Every replica runs", *lines)
    for i, (hue, middle) in enumerate(zip(HUES, middles)):
        _replica(drawing, i, hue, middle)
    said(322, 3, "One all-reduce", "adds up the gradients and the loss,", "for the whole model at once")
    drawing.add(Line([(middles[0], 326), (middles[-1], 326)], "red", 4))
    for middle in middles:
        drawing.add(Line([(middle, 288), (middle, 318)], "edge", 1.5), Circle(middle, 326, 8, "red"))
        drawing.add(Line([(middle, 336), (middle, 368)], "edge", 1.5, arrow=True))
    said(394, 4, "Every copy is updated", "in the same way, so that", "the copies stay equal")
    for middle in middles:
        drawing.add(*matrix(middle - 24, 374, "purple", cell=12))
    said(474, 5, "You get one result", "the mean loss of the whole batch")
    drawing.add(Line([(middles[0], 420), (middles[0], 440), (middles[-1], 440), (middles[-1], 420)], "edge", 1.5))
    center = (middles[0] + middles[-1]) / 2
    drawing.add(Line([(center, 440), (center, 456)], "edge", 1.5, arrow=True))
    drawing.add(Rect(center - 62, 460, 124, 32, fill="card", stroke="edge", radius=16))
    drawing.add(Text(center, 481, "loss = 0.42", 13, "middle", mono=True))
    return drawing


def _replica(drawing: Drawing, number: int, hue: str, middle: float) -> None:
    """The card of one replica: rows and variables go into the function, a gradient comes out."""
    drawing.add(Rect(middle - 66, 98, 132, 190, fill="card", stroke="faint", radius=8))
    drawing.add(Text(middle, 118, f"GPU {number}", 13, "middle", bold=True))
    drawing.add(*matrix(middle - 50, 132, hue, rows=4, columns=4, cell=9))
    drawing.add(Text(middle - 32, 182, "16 rows", 10.5, "middle", "muted"))
    drawing.add(*matrix(middle + 12, 136, "purple", rows=3, columns=4, cell=9))
    drawing.add(Text(middle + 30, 182, "variables", 10.5, "middle", "muted"))
    drawing.add(Line([(middle - 32, 188), (middle - 32, 204)], "edge", 1.3, arrow=True))
    drawing.add(Line([(middle + 30, 188), (middle + 30, 204)], "edge", 1.3, arrow=True))
    drawing.add(Rect(middle - 54, 208, 108, 30, fill="page", stroke="edge", radius=5))
    drawing.add(Text(middle, 228, "train_step(x)", 12, "middle", mono=True))
    drawing.add(Line([(middle, 240), (middle, 253)], "edge", 1.3, arrow=True))
    drawing.add(Text(middle, 272, "its gradient", 11.5, "middle", "muted"))


def devices() -> Drawing:
    """Two replicas of two devices each: each device has half of a kernel."""
    drawing = Drawing(
        "Two replicas of two devices each",
        "Each replica has two devices, which have the left and the right half of a kernel: parts along the axis model. "
        "Along the axis replica, GPU:0 and GPU:2 have equal halves, and so do GPU:1 and GPU:3; gradients of equal "
        "halves are summed.",
        640,
        270,
    )
    for replica in range(2):
        x = 30 + 300 * replica
        drawing.add(Rect(x, 20, 280, 165, fill="card", stroke="faint", radius=8))
        drawing.add(Text(x + 140, 42, f"replica {replica}", 14, "middle", bold=True))
        for part, hue in enumerate(HUES[:2]):
            middle = x + 75 + 130 * part
            drawing.add(Rect(middle - 57, 54, 114, 104, fill="page", stroke="faint", radius=5))
            drawing.add(Text(middle, 73, f"GPU:{2 * replica + part}", 13, "middle"))
            drawing.add(Rect(middle - 36, 84, 72, 60, fill="card"))
            drawing.add(
                Rect(middle - 36 + 36 * part, 84, 36, 60, fill=hue), Rect(middle - 36, 84, 72, 60, stroke="edge")
            )
        drawing.add(Text(x + 140, 176, "axis “model”: parts of one kernel", 12, "middle", "muted"))
    for part, hue in enumerate(HUES[:2]):
        y, first = 222 - 14 * (1 - part), 105 + 130 * part
        drawing.add(
            Line([(first, y), (first + 300, y)], hue, 2), *(Circle(x, y, 4.5, hue) for x in (first, first + 300))
        )
    drawing.add(Text(320, 252, "axis “replica”: gradients of equal parts are summed", 12, "middle", "muted"))
    return drawing


def digits() -> None:
    """Runs the demo, whose picture shows what it has learned."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "digits.png")
        subprocess.run([sys.executable, HERE / "examples" / "digits.py", "--output", file], check=True)
        (IMAGES / "digits.png").write_bytes(file.read_bytes())


def benchmark() -> Drawing:
    """The picture of the figures that the page on profiling shows as a table."""
    page = (HERE / "docs" / "how-to" / "profiling.md").read_text(encoding="utf-8")

    def figure(name: str) -> tuple[float, float | None]:
        found = re.search(rf"^    {name} +([\d.]+)(?: ±([\d.]+))? (ms|µs)$", page, re.MULTILINE)
        assert found is not None, f"The page has no line of {name}."
        unit = {"ms": 1e-3, "µs": 1e-6}[found[3]]
        return float(found[1]) * unit, float(found[2]) * unit if found[2] else None

    found = {key: figure(name) for key, name in TIMES.items()}
    shown = SimpleNamespace(
        seconds={key: seconds for key, (seconds, _) in found.items()},
        spread={key: half for key, (_, half) in found.items() if half is not None},
    )
    return chart("train_step, MirroredStrategy", ["2 replicas"], [shown])


def plan() -> Drawing:
    """The picture of the plan that the page on planning shows as a table."""
    page = (HERE / "docs" / "how-to" / "planning.md").read_text(encoding="utf-8")
    table = page.partition("images/plan.svg")[2].split("```")[1].strip().splitlines()
    rows = [re.split(r"  +", line.strip()) for line in table]
    cells = {name: values for name, *values in rows if values}
    topologies = table[0].split()[3:]
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "ms": 1e-3}

    def figure(name: str, column: int) -> float:
        number, unit = cells[name][column].split()
        return float(number) * units[unit]

    def of_column(i: int) -> TopologyPlan:
        sizes = {key: round(figure(name, i)) for key, name in PLAN_ROWS.items()}
        arguments = sizes["variables"] + sizes["state"] + sizes["batch"] + sizes.pop("padding")
        kinds = [name.removeprefix("for ") for name, values in cells.items() if name.startswith("for ")]
        bounds = {kind: figure(f"for {kind}", i) for kind in kinds if cells[f"for {kind}"][i] != "-"}
        needed, available = figure("needed", i), figure("there is", i)
        memory = Memory(**sizes, arguments=arguments)
        return TopologyPlan(
            topologies[i], int(cells["replicas"][i]), memory, needed, available, (), 0.0, 0.0, 0.0, (), None, bounds
        )

    return drawing_of("train_step", [of_column(i) for i in range(len(topologies))])


def timeline() -> Drawing:
    """The timeline of the step in timeline.json, beside this script, which `record_timeline` writes."""
    example = json.loads(TIMELINE.read_text(encoding="utf-8"))
    return timelines.chart(example["step"], example["topology"], [Event(*values) for values in example["events"]])


def record_timeline() -> None:
    """Plans the larger model of the page on planning, with four layers, and writes its timeline to timeline.json."""
    page = (HERE / "docs" / "how-to" / "planning.md").read_text(encoding="utf-8")
    (program,) = re.findall(
        r"^```py\n(import jax.*?)^with strategy.scope\(\):\n    batch", page, re.DOTALL | re.MULTILINE
    )
    program = program.replace("ROWS = 32,", "ROWS = 4,")  # the first of the sizes, LAYERS
    linecache.cache["model.py"] = (len(program), None, program.splitlines(keepends=True), "model.py")
    names: dict[str, Any] = {}
    exec(compile(program, "model.py", "exec"), names)
    with names["strategy"].scope():
        batch = rx.PerReplicaSpec(rx.TensorSpec((names["ROWS"], names["LENGTH"] + 1), jnp.int32))
        plan = rx.plan(names["train_step"], batch, topology="h100:8")["h100:8"]
    shortened = [
        [e.name, e.kind, *(round(time, 7) for time in (e.start, e.end, e.exposed)), e.operation, e.line, round(e.size)]
        for e in plan.timeline
        if e.end - e.start > 2e-6
    ]
    lines = ",\n".join(json.dumps(values) for values in shortened)
    head = f'{{"step": "train_step", "topology": "h100:8", "source": "JAX {jax.__version__}", "events": [\n'
    TIMELINE.write_text(f"{head}{lines}\n]}}\n", encoding="utf-8")


PLAN_ROWS = {
    "variables": "variables",
    "state": "optimizer and other state",
    "batch": "batch",
    "padding": "padding, less what is unused",
    "outputs": "results",
    "temporaries": "temporaries",
    "code": "program",
}


def train_step() -> None:
    """Runs the program of the page on where arrays are, which saves the picture of its step."""
    page = HERE / "docs" / "how-to" / "see-where-arrays-are.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "REPLICAX_VIRTUAL_DEVICES": "GPU:4,CPU:1"}
        subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=folder, env=environment, check=True)
        picture = Path(folder, "train_step.svg").read_text(encoding="utf-8")
        (IMAGES / "train_step.svg").write_text(picture, encoding="utf-8")


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "idea": idea,
    "devices": devices,
    "benchmark": benchmark,
    "plan": plan,
    "timeline": timeline,
    **DIAGRAMS,
}
PROGRAMS = {"train_step": train_step, "digits": digits}


def main(arguments: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*DRAWINGS, *PROGRAMS]
    made.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; default: all of them")
    made.add_argument("--record", action="store_true", help="plan the step of the timeline anew, and draw it alone")
    options = made.parse_args(arguments)
    if options.record:
        record_timeline()
    for name in ["timeline"] if options.record else options.names or known:
        if name in DRAWINGS:
            DRAWINGS[name]().save(IMAGES / f"{name}.svg")
        elif name in PROGRAMS:
            PROGRAMS[name]()
        else:
            made.error(f"There is no picture {name!r}; there are {', '.join(known)}.")


if __name__ == "__main__":
    main()
