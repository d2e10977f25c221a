"""What a training step costs: replicax beside the same step written by hand in JAX, and beside TensorFlow.

    python benchmarks/step.py                              # all models, 1 to 8 virtual CPU devices
    python benchmarks/step.py --tensorflow PYTHON          # with an interpreter that has TensorFlow, beside it
    python benchmarks/step.py --first-step 1,64            # the time to the first step
    python benchmarks/step.py --variables 6,50,500         # what a call costs by the number of variables

All sides take turns in one run, round by round, so that what else the machine does hits them alike; the medians of the
rounds are shown, and the medians of the rounds' ratios. docs/benchmarks.md says what is compared, and what came out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
JAX_SIDES = ["replicax", "replicax tape", "by hand, best", "by hand, usual"]
TENSORFLOW = "TensorFlow"


class Side:
    """A process that holds contenders."""

    def __init__(self, python: str, script: str, device: str, replicas: int):
        command = [python, str(HERE / script), "serve", device, str(replicas)]
        quiet = subprocess.DEVNULL if script == "side_tensorflow.py" else None
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=quiet, text=True, env=environment()
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"The process for {request} ended with {self._process.wait()}.")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def measure(model: str, replicas: int, sides: dict[str, Side], rounds: int, seconds: float) -> dict[str, Any]:
    """Median seconds of a step, and those to the first one, for each contender."""
    first, times, steps, losses = {}, {}, {}, {}
    for name, side in sides.items():
        answer = side.ask(do="first", contender=name, model=model)
        first[name], losses[name], times[name] = answer["first"], [answer["loss"], answer["later_loss"]], []
    for name, side in sides.items():
        side.ask(do="build", contender=name, model=model)
    for name, side in sides.items():
        side.ask(do="run", contender=name, steps=10)
        took = side.ask(do="run", contender=name, steps=10)["seconds"] / 10
        steps[name] = max(5, int(seconds / took))
    for round_ in range(rounds):
        order = list(sides) if round_ % 2 == 0 else list(sides)[::-1]
        for name in order:
            took = sides[name].ask(do="run", contender=name, steps=steps[name])["seconds"]
            times[name].append(took / steps[name])
    reference = losses["by hand, best"]
    for name, values in losses.items():
        if any(abs(a - b) > 1e-3 * abs(b) for a, b in zip(values, reference)):
            raise SystemExit(f"{name} computes something else: losses {values} where {reference} are right ({model}).")
    return {
        "model": model,
        "replicas": replicas,
        "step": {name: statistics.median(values) for name, values in times.items()},
        "first": first,
        "rounds": times,
    }


def ratio(result: dict[str, Any], of: str, to: str) -> str:
    """The median of the rounds' ratios: what slows the machine for a while slows both sides of a round."""
    rounds = result["rounds"]
    if of not in rounds or to not in rounds:
        return "–"
    return f"{statistics.median(a / b for a, b in zip(rounds[of], rounds[to])):.2f}"


def steps_table(results: list[dict[str, Any]], sides: list[str]) -> tuple[list[str], list[list[str]]]:
    head = ["model", "replicas", *(f"{side}, ms" for side in sides), "/ best", "tape / best", "/ usual", "/ TensorFlow"]
    rows = [
        [
            r["model"],
            str(r["replicas"]),
            *(f"{1e3 * r['step'][side]:.3f}" for side in sides),
            ratio(r, "replicax", "by hand, best"),
            ratio(r, "replicax tape", "by hand, best"),
            ratio(r, "replicax", "by hand, usual"),
            ratio(r, "replicax", TENSORFLOW),
        ]
        for r in results
    ]
    return head, rows


def show(title: str, head: list[str], rows: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        print(f"\n{title}")
        for row in [head, *rows]:
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths)))
        return
    table = Table(title=title)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def run_side(*arguments: str) -> Any:
    command = [sys.executable, str(HERE / "side_jax.py"), *arguments]
    answer = subprocess.run(command, env=environment(), check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(answer.stdout.splitlines()[-1])


def compare_steps(options: argparse.Namespace) -> dict[str, Any]:
    results, versions = [], {}
    names = [*JAX_SIDES, *([TENSORFLOW] if options.tensorflow else [])]
    for replicas in options.replicas:
        jax_side = Side(sys.executable, "side_jax.py", options.device, replicas)
        for model in options.models:
            sides = dict.fromkeys(JAX_SIDES, jax_side)
            if options.tensorflow:  # a process for each model: a second strategy reuses the first one's collectives
                side = sides[TENSORFLOW] = Side(options.tensorflow, "side_tensorflow.py", options.device, replicas)
                versions["tensorflow"] = side.ask(do="version")["version"]
            results.append(measure(model, replicas, sides, options.rounds, options.seconds))
            print(f"{model}, {replicas} replicas: done", file=sys.stderr)
            if options.tensorflow:
                sides[TENSORFLOW].close()
        jax_side.close()
    results.sort(key=lambda r: (options.models.index(r["model"]), r["replicas"]))
    show("A training step", *steps_table(results, names))
    head = ["model", "replicas", *(f"{name}, s" for name in names)]
    rows = [[r["model"], str(r["replicas"]), *(f"{r['first'][name]:.2f}" for name in names)] for r in results]
    show("The first step", head, rows)
    return {"steps": results, "versions": versions}


def compare_first_steps(options: argparse.Namespace) -> dict[str, Any]:
    """Fresh processes, three each, in turn."""
    names = ["replicax", "replicax tape", "by hand, best"]
    runs: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for _ in range(1 if options.quick else 3):
        for model in options.models:
            for name in names:
                for replicas in options.first_step:
                    answer = run_side("first", options.device, str(replicas), name, model)
                    runs.setdefault((model, name, replicas), []).append(answer)
    medians = {
        key: {part: statistics.median(r[part] for r in found) for part in found[0]} for key, found in runs.items()
    }
    head = ["model", "contender", "replicas", "s", "trace", "lower", "compile", "run", "traces", "all-reduces", "ratio"]
    rows = []
    for (model, name, replicas), m in medians.items():
        base = medians[model, name, options.first_step[0]]["total"]
        parts = [f"{m[part]:.3f}" for part in ("total", "trace", "lower", "compile", "run")]
        counts = [f"{m['traces']:.0f}", f"{m['all_reduces']:.0f}", f"{m['total'] / base:.2f}"]
        rows.append([model, name, str(replicas), *parts, *counts])
    show("The first step, in a fresh process", head, rows)
    return {"first_steps": [{"model": k[0], "contender": k[1], "replicas": k[2], **m} for k, m in medians.items()]}


def compare_variables(options: argparse.Namespace) -> dict[str, Any]:
    results = run_side("variables", options.device, "1", ",".join(map(str, options.variables)), str(options.rounds))
    names = [name for name in results[0] if name != "variables"]
    rows = [[str(r["variables"]), *(f"{1e6 * r[name]:.0f}" for name in names)] for r in results]
    show("A call on one device", ["arrays", *(f"{name}, µs" for name in names)], rows)
    return {"variables": results}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=["mlp", "cnn", "transformer"])
    parser.add_argument("--replicas", type=numbers, help="such as 1,2,4,8, which is the default on CPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--tensorflow", metavar="PYTHON", default=os.environ.get("REPLICAX_TENSORFLOW_PYTHON"))
    parser.add_argument("--first-step", type=numbers, metavar="N,N", help="the time to the first step, by replicas")
    parser.add_argument("--variables", type=numbers, metavar="N,N", help="the cost of a call, by variables")
    parser.add_argument("--quick", action="store_true", help="few short rounds, to see whether it works")
    parser.add_argument("--json", metavar="FILE", help="write every number there")
    options = parser.parse_args()
    options.replicas = options.replicas or ([1, 2, 4, 8] if options.device == "cpu" else [1])
    options.seconds = 0.03 if options.quick else 0.2
    options.rounds = min(options.rounds, 3) if options.quick else options.rounds
    return options


def main() -> None:
    options = parsed()
    if options.first_step:
        found = compare_first_steps(options)
    elif options.variables:
        found = compare_variables(options)
    else:
        found = compare_steps(options)
    from importlib.metadata import version

    versions = {name: version(name) for name in ("jax", "optax", "numpy")}
    versions = {**versions, **found.pop("versions", {}), "python": platform.python_version()}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {options.device}"
    print(f"{machine}; " + ", ".join(f"{name} {number}" for name, number in versions.items()))
    if options.json:
        Path(options.json).write_text(json.dumps({"machine": machine, "versions": versions, **found}, indent=1))


if __name__ == "__main__":
    main()
