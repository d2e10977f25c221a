"""What starting costs: the imports of replicax and of its TensorFlow names, beside JAX's, TensorFlow's and Keras's.

    python benchmarks/start.py                          # medians of 15 rounds
    python benchmarks/start.py --tensorflow PYTHON      # with an interpreter that has TensorFlow beside it

Each import is a fresh process, which tells the time from before the import to after it. All take turns, round by round.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from typing import Any

from sides import TENSORFLOW, Table, environment, finish, own_python_with, parsed, parser, ratio

PROGRAM = "import sys, time; since = time.perf_counter(); {}; print(time.perf_counter() - since)"
IMPORTS = {
    "jax": "import jax",
    "replicax": "import replicax",
    "replicax.tf": "import replicax.tf",
    "replicax.tf.keras": "from replicax.tf import keras",
}


def seconds(python: str, statement: str) -> float:
    command = [python, "-c", PROGRAM.format(statement)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    return float(done.stdout.split()[-1])


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
    for side in sides.values():
        seconds(*side)  # the files are read and compiled to bytecode
    for round_ in range(options.rounds):
        for name in list(sides) if round_ % 2 == 0 else list(sides)[::-1]:
            rounds[name].append(seconds(*sides[name]))
    found = {"rounds": rounds}
    finish(options, "imports alone", ["jax"], found, tables(found))


def tables(found: dict[str, Any]) -> dict[str, Table]:
    rounds = found["rounds"]
    rows = [[name, f"{statistics.median(times):.2f}", ratio(rounds, name, "jax")] for name, times in rounds.items()]
    return {"start": ("Seconds of an import, and against JAX's", ["import", "seconds", "/ jax"], rows)}


if __name__ == "__main__":
    main()
