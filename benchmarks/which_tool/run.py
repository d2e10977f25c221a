"""Runs the same small training program in several tools, in turns, and fills docs/choosing-a-tool.md.

    python benchmarks/which_tool/run.py --tensorflow PYTHON --torch PYTHON    # three rounds, and the table
    python benchmarks/which_tool/run.py --json which.json ...                 # keeps every number
    python benchmarks/which_tool/run.py --page [which.json]                   # into the page: the programs, the table

This interpreter needs replicax, Optax and Keras; that of --torch needs PyTorch and Lightning Fabric. Each program runs
in fresh processes, with four CPU devices in one process or with four processes. A tool without an interpreter is left
out. Figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "choosing-a-tool.md"
SOURCES = HERE.parents[1] / "src"
DEVICES = 4
STEPS_AN_EPOCH = 16
WARM_UP = 5  # steps that do not count


class Program(NamedTuple):
    """A program of this folder: its tool, its file, how its command begins, and how many processes it has.

    Args:
        running_mean: whether the losses that it records are means since the epoch began.
    """

    tool: str
    file: str
    python: str = "jax"
    module: tuple[str, ...] = ()
    processes: int = 1
    running_mean: bool = False


TORCHRUN = ("torch.distributed.run", "--standalone", f"--nproc-per-node={DEVICES}")
LAUNCH = ("replicax", "launch", f"--workers={DEVICES}")
PROGRAMS = [
    Program("replicax", "with_replicax.py"),
    Program("jax.jit, NamedSharding", "with_jit.py"),
    Program("Keras distribution", "with_keras.py", running_mean=True),
    Program("TensorFlow, MirroredStrategy", "with_tensorflow.py", "tensorflow"),
    Program("replicax launch", "with_replicax.py", "jax", LAUNCH, DEVICES),
    Program("torchrun, DDP", "with_ddp.py", "torch", TORCHRUN, DEVICES),
    Program("Lightning Fabric", "with_fabric.py", "torch", processes=DEVICES),
]


def lines_of(file: str) -> int:
    """Returns how many lines of a program have code: neither blank nor a comment."""
    lines = (HERE / file).read_text(encoding="utf-8").splitlines()
    return sum(1 for line in lines if line.strip() and not line.lstrip().startswith("#"))


def run(program: Program, python: str) -> dict[str, float]:
    """Runs a program once. Returns its figures; seconds of the first step count from the start of the command."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "steps.json"
        environment = {**os.environ, "WHICH_TOOL_RESULT": str(result), "JAX_PLATFORMS": "cpu"}
        environment |= {"PYTHONPATH": os.pathsep.join([str(SOURCES), str(HERE)]), "TF_CPP_MIN_LOG_LEVEL": "2"}
        if program.processes == 1:
            environment["JAX_NUM_CPU_DEVICES"] = str(DEVICES)
        before = ["-m", *program.module] if program.module else []
        started = time.time()
        done = subprocess.run(
            [python, *before, str(HERE / program.file)], env=environment, cwd=folder, capture_output=True, text=True
        )
        if done.returncode or not result.exists():
            raise SystemExit(f"{program.file} failed with exit status {done.returncode}:\n{done.stderr[-3000:]}")
        steps = json.loads(result.read_text(encoding="utf-8"))

    def middle(key: str) -> float:
        values = [step[key] for step in steps[WARM_UP:]]
        return 1000 * statistics.median(b - a for a, b in zip(values, values[1:]))

    last = [step["loss"] for step in steps[-STEPS_AN_EPOCH:]]
    return {
        "first": steps[0]["time"] - started,
        "step": middle("time"),
        "cpu": middle("cpu") * program.processes,
        "loss": last[-1] if program.running_mean else statistics.mean(last),
    }


def measure(pythons: dict[str, str | None], rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {}
    load = []
    for round_ in range(rounds):
        for program in PROGRAMS if round_ % 2 == 0 else reversed(PROGRAMS):
            python = pythons[program.python]
            if python:
                figures = run(program, python)
                load.append(os.getloadavg()[0])
                found.setdefault(program.tool, []).append(figures)
                print(f"round {round_ + 1}, {program.tool}: {figures}", file=sys.stderr)
    return {"rounds": found, "machine": machine(pythons), "load": round(statistics.median(load), 1)}


def machine(pythons: dict[str, str | None]) -> str:
    """Says on what the programs were run: the date, the cores, the versions."""
    parts = [time.strftime("%Y-%m-%d"), f"{os.cpu_count()} cores", f"Python {sys.version.split()[0]}"]
    code = "import importlib.metadata as m, sys; print(m.version(m.packages_distributions()[sys.argv[1]][0]))"
    for kind, modules in {
        "jax": ("jax", "optax", "keras"),
        "tensorflow": ("tensorflow",),
        "torch": ("torch", "lightning_fabric"),
    }.items():
        if python := pythons[kind]:
            for module in modules:
                done = subprocess.run([python, "-c", code, module], capture_output=True, text=True, check=True)
                parts.append(f"{module.replace('_', '-')} {done.stdout.strip()}")
    return ", ".join(parts)


def table(results: dict[str, Any]) -> str:
    """Returns the figures as a table in Markdown."""
    head = "| tool | program | lines | processes | first step, s | step, ms | from, to | CPU ms a step | loss |"
    rows = [head, "|---|---|--:|--:|--:|--:|--:|--:|--:|"]
    for program in PROGRAMS:
        rounds = results["rounds"].get(program.tool)
        if not rounds:
            continue
        middle = {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
        least, most = (f(figures["step"] for figures in rounds) for f in (min, max))
        rows.append(
            f"| {program.tool} | `{program.file}` | {lines_of(program.file)} | {program.processes} | "
            f"{middle['first']:.1f} | {middle['step']:.1f} | {least:.1f}, {most:.1f} | "
            f"{middle['cpu']:.1f} | {middle['loss']:.3f} |"
        )
    return "\n".join([*rows, "", f"{results['machine']}; load of the machine: {results['load']}."]) + "\n"


def filled(page: str, results: dict[str, Any] | None) -> str:
    """Returns the page with the programs of this folder, and with the table if there are results."""
    blocks = {}
    for file in sorted({program.file for program in PROGRAMS}):
        blocks[f"program: {file}"] = f"```py\n{(HERE / file).read_text(encoding='utf-8')}```\n"
    if results:
        blocks["table: figures"] = table(results)
    for name, text in blocks.items():
        pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        page, count = pattern.subn(lambda found, text=text: found[1] + text + found[2], page)  # type: ignore[misc]
        if count != 1:
            raise SystemExit(f"{PAGE.name} needs one place for '{name}', between comments, and has {count}")
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tensorflow", metavar="PYTHON", default=os.environ.get("REPLICAX_TENSORFLOW_PYTHON"))
    parser.add_argument("--torch", metavar="PYTHON", default=os.environ.get("REPLICAX_TORCH_PYTHON"))
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every number there")
    parser.add_argument("--page", metavar="FILE", nargs="?", const="", help="only fill docs/choosing-a-tool.md")
    options = parser.parse_args()
    if options.page is not None:
        results = json.loads(Path(options.page).read_text(encoding="utf-8")) if options.page else None
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
        return
    results = measure({"jax": sys.executable, "tensorflow": options.tensorflow, "torch": options.torch}, options.rounds)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
