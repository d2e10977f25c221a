"""Five programs of TensorFlow's kind, as they are, under TensorFlow and under `replicax run-tf`.

    python benchmarks/tensorflow_programs.py --tensorflow PYTHON

The programs, in the folder of this name, know nothing of replicax. They print a line at the end of their first step and
of each epoch. For both sides: seconds from the start of the process to the end of the first step, of the first epoch
from there on, and of a later epoch (the median of the others); and the losses of the epochs. replicax runs twice, with
an empty folder for compiled programs and with what the first run has left there. Seconds are of the clock and, behind a
slash, of the CPU, which says more on a busy machine.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sides import TENSORFLOW, environment, finish, numbers, parsed, parser, ratio

FOLDER = Path(__file__).parent / "tensorflow_programs"
PROGRAMS = ["resnet", "dcgan", "translation", "wide_deep", "word2vec"]
OURS, AGAIN = "replicax", "replicax, second run"
PHASES = ["first step", "first epoch", "later epoch"]


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process so far, 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def one_run(command: list[str], cache: str) -> dict[str, Any]:
    """Runs a program; the seconds of its phases, of the clock and of the CPU, and its losses."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "XDG_CACHE_HOME": cache}
    quiet["KERAS_BACKEND"] = "tensorflow"  # whatever the user's settings of Keras say
    start = time.perf_counter()
    process = subprocess.Popen(
        command, env={**environment(), **quiet}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stderr
    marks, losses = [(0.0, 0.0)], []
    for line in process.stdout:
        if line.startswith(("first step", "epoch")):
            marks.append((time.perf_counter() - start, cpu_seconds(process.pid)))
            losses.append(float(re.search(r"\bloss ([\d.]+)", line).group(1)))  # type: ignore[union-attr]
    errors = process.stderr.read()
    if process.wait():
        raise SystemExit(f"{' '.join(command)} failed:\n{errors[-3000:]}")
    steps = [tuple(b - a for a, b in zip(*pair)) for pair in zip(marks, marks[1:])]
    later = tuple(statistics.median(column) for column in zip(*steps[2:]))
    return {"phases": dict(zip(PHASES, [*steps[:2], later])), "losses": losses}


def table_of(found: dict[str, dict[str, list[dict[str, Any]]]]) -> tuple[str, list[str], list[list[str]]]:
    """For each program and phase the medians of the sides, and the ratios to TensorFlow's."""
    cells = []
    for name, sides in found.items():
        for phase in PHASES:
            row = [name, phase]
            for runs in sides.values():
                wall, cpu = (statistics.median(run["phases"][phase][i] for run in runs) for i in (0, 1))
                row.append(f"{wall:.1f} / {cpu:.1f}")
            for side in (OURS, AGAIN):
                both = []
                for i in (0, 1):
                    rounds = {side: [run["phases"][phase][i] for run in runs] for side, runs in sides.items()}
                    both.append(ratio(rounds, side, TENSORFLOW))
                row.append(" / ".join(both))
            cells.append(row)
    sides = list(next(iter(found.values())))
    head = ["program", "phase", *sides, f"{OURS} / {TENSORFLOW}", f"{AGAIN} / {TENSORFLOW}"]
    return "Seconds of the clock / of the CPU", head, cells


def losses_of(found: dict[str, dict[str, list[dict[str, Any]]]]) -> tuple[str, list[str], list[list[str]]]:
    cells = [
        [name, side, " ".join(f"{loss:.3f}" for loss in runs[-1]["losses"])]
        for name, sides in found.items()
        for side, runs in sides.items()
        if side != AGAIN
    ]
    return "Losses of the first step and of the epochs", ["program", "side", "losses"], cells


def main() -> None:
    made = parser(__doc__)
    made.set_defaults(rounds=1)
    made.add_argument("--programs", default=",".join(PROGRAMS))
    made.add_argument("--epochs", type=numbers, default=[4])
    options = parsed(made)
    rest = ["--epochs", str(3 if options.quick else options.epochs[0])]
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name in options.programs.split(","):
        sides: dict[str, list[dict[str, Any]]] = {TENSORFLOW: [], OURS: [], AGAIN: []}
        program = str(FOLDER / f"{name}.py")
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as cache:
                if options.tensorflow:
                    sides[TENSORFLOW].append(one_run([options.tensorflow, program, *rest], cache))
                for side in (OURS, AGAIN):
                    command = [sys.executable, "-m", "replicax", "run-tf", program, *rest]
                    sides[side].append(one_run(command, cache))
        found[name] = {side: runs for side, runs in sides.items() if runs}
        print(name, {side: [run["phases"] for run in runs] for side, runs in found[name].items()}, file=sys.stderr)
    tables = {"tensorflow_programs": table_of(found), "tensorflow_losses": losses_of(found)}
    finish(options, "cpu", ("jax", "keras", "numpy"), {"tensorflow_programs": found}, tables)


if __name__ == "__main__":
    main()
