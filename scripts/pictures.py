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

import diagrams_start  # noqa: F401 (registers its diagrams)
import jax
import jax.numpy as jnp
from diagrams import DIAGRAMS

import replicax as rx
from replicax._plan import timeline as timelines
from replicax._plan.picture import drawing_of
from replicax._plan.report import Memory, TopologyPlan
from replicax._plan.schedule import Event
from replicax._report.benchmark import TIMES, chart
from replicax._report.drawing import Drawing

HERE = Path(__file__).parents[1]
IMAGES = HERE / "docs" / "images"
TIMELINE = Path(__file__).with_name("timeline.json")


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
