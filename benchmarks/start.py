"""What starting costs: imports beside JAX's, TensorFlow's and Keras's, and the demo with and without compiled programs.

    python benchmarks/start.py                          # medians of 15 rounds, and of 5 of the demo
    python benchmarks/start.py --tensorflow PYTHON      # with an interpreter that has TensorFlow beside it

Each import is a fresh process, which tells the time from before the import to after it, and the processor time. All
take turns, round by round. Python keeps the bytecode of what it has imported, as it does of an installed package.

The demo, examples/digits.py with one epoch, is started twice in each round, with a compilation cache that is empty and
then filled. Its times are those at which its lines come, from before its process starts.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from sides import HERE, TENSORFLOW, Table, Target, environment, finish, own_python_with, parsed, parser, ratio

CLOCKS = "time.perf_counter(), time.process_time()"
PROGRAM = f"import time; a = {CLOCKS}; {{}}; b = {CLOCKS}; print(b[0] - a[0], b[1] - a[1])"
IMPORTS = {
    "jax": "import jax",
    "replicax": "import replicax as rx; rx.MirroredStrategy",  # whose names come on use
    "replicax.tf": "import replicax.tf",
    "replicax.tf.keras": "from replicax.tf import keras",
}

EXAMPLES = HERE.parent / "examples"
NEEDED = ("optax", "sklearn", "matplotlib", "rich")
DEMO = "import digits, sys; print('imported'); digits.main(sys.argv[1:])"
FIRST, SECOND = "first start", "second start"


def seconds(python: str, statement: str) -> list[float]:
    """The wall time and the processor time of an import."""
    command = [python, "-c", PROGRAM.format(statement)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    return [float(part) for part in done.stdout.split()[-2:]]


def demo(cache: str) -> dict[str, float]:
    """The seconds until the demo has been imported, has taken its first step, and has ended."""
    env = {**environment(), "REPLICAX_COMPILATION_CACHE": cache, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", DEMO, "--epochs", "1", "--output", os.path.join(cache, "digits.png")]
    start, at = time.perf_counter(), {}
    with subprocess.Popen(command, cwd=EXAMPLES, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            at[line.partition(":")[0].strip()] = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}.")
    return {"imported": at["imported"], "step": at["first step"], "whole": time.perf_counter() - start}


def demo_rounds(rounds: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {FIRST: [], SECOND: []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for start in found.values():
                start.append(demo(cache))
    return found


def main() -> None:
    made = parser(__doc__)
    made.set_defaults(rounds=15)
    options = parsed(made)
    sides = {name: (sys.executable, statement) for name, statement in IMPORTS.items()}
    if own_python_with("keras") is None:
        del sides["replicax.tf.keras"]
    if options.tensorflow:
        sides[TENSORFLOW] = options.tensorflow, "import tensorflow"
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    processor: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        seconds(*side)  # the files are read and compiled to bytecode
    for round_ in range(options.rounds):
        for name in list(sides) if round_ % 2 == 0 else list(sides)[::-1]:
            wall, cpu = seconds(*sides[name])
            rounds[name].append(wall)
            processor[name].append(cpu)
    found: dict[str, Any] = {"rounds": rounds, "processor": processor}
    if all(map(importlib.util.find_spec, NEEDED)):
        found["demo"] = demo_rounds(1 if options.quick else min(5, options.rounds))
    finish(options, "imports alone", ["jax"], found, tables(found), targets(found))


def tables(found: dict[str, Any]) -> dict[str, Table]:
    rounds, processor = found["rounds"], found["processor"]
    rows = [
        [name, *(cell for clock in (rounds, processor) for cell in (_median(clock[name]), ratio(clock, name, "jax")))]
        for name in rounds
    ]
    head = ["import", "seconds", "/ jax", "of the processor", "/ jax"]
    made = {"start": ("Seconds of an import, and against JAX's", head, rows)}
    if "demo" in found:
        rows = []
        for key, title in (("step", "to the end of the first step"), ("whole", "to its end")):
            for imports, said in ((True, title), (False, f"{title}, without imports")):
                times = demo_times(found["demo"], key, imports)
                rows.append([said, *map(_median, times.values()), ratio(times, FIRST, SECOND)])
        made["demo"] = "Seconds of the demo", ["from its start", FIRST, SECOND, "first / second"], rows
    return made


def _median(times: list[float]) -> str:
    return f"{statistics.median(times):.2f}"


def demo_times(demo: dict[str, list[dict[str, float]]], key: str, imports: bool) -> dict[str, list[float]]:
    """The seconds of both starts, with their imports or without."""
    return {start: [one[key] - (0 if imports else one["imported"]) for one in rounds] for start, rounds in demo.items()}


def targets(found: dict[str, Any]) -> list[Target]:
    imports = {name: ratio(found["rounds"], name, "jax") for name in ("replicax", "replicax.tf")}
    made = [Target("import against JAX's", 1.5, imports)]
    if "demo" in found:
        cases = {"with imports": True, "without imports": False}
        seen = {
            case: ratio(demo_times(found["demo"], "step", imports), FIRST, SECOND) for case, imports in cases.items()
        }
        made.append(Target("first step of the demo: its second start is sooner by a factor of", 2, seen, least=True))
    return made


if __name__ == "__main__":
    main()
