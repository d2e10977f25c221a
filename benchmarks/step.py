"""What a training step costs: replicax beside the same step written by hand in JAX, and beside TensorFlow.

    python benchmarks/step.py                              # all models, 1 to 8 virtual CPU devices
    python benchmarks/step.py --tensorflow PYTHON          # with an interpreter that has TensorFlow, beside it
    python benchmarks/step.py --workers 2                  # on two processes
    python benchmarks/step.py --keras                      # the MLP, also written with Keras
    python benchmarks/step.py --first-step 1,64            # the time to the first step
    python benchmarks/step.py --variables 6,50,500         # what a call costs by the number of variables

All sides take turns in one run, round by round, so that what else the machine does hits them alike; the medians of the
rounds are shown, and the medians of the rounds' ratios. docs/benchmarks.md says what is compared, and what came out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from typing import Any

from sides import HERE, TENSORFLOW, Side, environment, finish, names, numbers, parsed, parser, ratio, show, take_turns

JAX_SIDES = ["replicax", "replicax tape", "by hand, best", "by hand, usual"]
ALONE, KERAS = "by hand, alone", "Keras"


def measure(model: str, replicas: int, sides: dict[str, Side], rounds: int, seconds: float) -> dict[str, Any]:
    """Median seconds of a step, and those to the first one, for each contender."""
    first, losses = {}, {}
    for name, side in sides.items():
        answer = side.ask(do="first", contender=name, model=model)
        first[name], losses[name] = answer["first"], [answer["loss"], answer["later_loss"]]
    for name, side in sides.items():
        side.ask(do="build", contender=name, model=model)
    times = take_turns(sides, rounds, seconds)
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


def show_steps(results: list[dict[str, Any]], where: str = "") -> None:
    sides = list(results[0]["step"])
    pairs = [("/ best", "replicax", "by hand, best"), ("tape / best", "replicax tape", "by hand, best")]
    pairs += [("/ alone", "replicax", ALONE)] if ALONE in sides else []
    pairs += [("Keras / best", KERAS, "by hand, best")] if KERAS in sides else []
    pairs += [("/ usual", "replicax", "by hand, usual"), ("/ TensorFlow", "replicax", TENSORFLOW)]
    head = ["model", "replicas", *sides, *(title for title, _, _ in pairs)]
    rows = [
        [
            r["model"],
            str(r["replicas"]),
            *(f"{1e3 * r['step'][side]:.3f}" for side in sides),
            *(ratio(r["rounds"], of, to) for _, of, to in pairs),
        ]
        for r in results
    ]
    show(f"Milliseconds of a training step{where}", head, rows)
    head = ["model", "replicas", *sides]
    rows = [[r["model"], str(r["replicas"]), *(f"{r['first'][side]:.2f}" for side in sides)] for r in results]
    show(f"Seconds to the first step{where}", head, rows)


def run_side(*arguments: str) -> Any:
    command = [sys.executable, str(HERE / "side_jax.py"), *arguments]
    answer = subprocess.run(command, env=environment(), check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(answer.stdout.splitlines()[-1])


def compare_steps(options: argparse.Namespace) -> dict[str, Any]:
    results, versions = [], {}
    for replicas in options.replicas:
        with Side(sys.executable, "side_jax.py", "serve", options.device, str(replicas)) as jax_side:
            for model in options.models:
                # A process for each model: a second strategy of TensorFlow's reuses the first one's collectives.
                with contextlib.ExitStack() as stack:
                    sides = dict.fromkeys([*JAX_SIDES, KERAS] if options.keras else JAX_SIDES, jax_side)
                    if options.tensorflow:
                        command = (options.tensorflow, "side_tensorflow.py", "serve", options.device, str(replicas))
                        side = sides[TENSORFLOW] = stack.enter_context(Side(*command, quiet=True))
                        versions["tensorflow"] = side.ask(do="version")["version"]
                    results.append(measure(model, replicas, sides, options.rounds, options.seconds))
                print(f"{model}, {replicas} replicas: done", file=sys.stderr)
    results.sort(key=lambda r: (options.models.index(r["model"]), r["replicas"]))
    show_steps(results)
    return {"steps": results, "versions": versions}


def compare_workers(options: argparse.Namespace) -> dict[str, Any]:
    """The same over processes. Those by hand are in replicax's processes too, and in some without it."""
    workers, devices = options.workers, options.devices_per_worker
    replicas, results, versions = str(workers * devices), [], {}

    def processes(*command: str, quiet: bool = False) -> Side:
        return Side(*command, "cpu", replicas, workers=workers, devices=devices, quiet=quiet)

    with processes(sys.executable, "side_jax.py", "serve") as ours:
        with processes(sys.executable, "side_jax.py", "alone") as alone:
            for model in options.models:
                with contextlib.ExitStack() as stack:
                    sides = {**dict.fromkeys(JAX_SIDES, ours), ALONE: alone}
                    if options.tensorflow:
                        side = processes(options.tensorflow, "side_tensorflow.py", "serve", quiet=True)
                        sides[TENSORFLOW] = stack.enter_context(side)
                        versions["tensorflow"] = side.ask(do="version")["version"]
                    results.append(measure(model, int(replicas), sides, options.rounds, options.seconds))
                print(f"{model}, {workers} processes: done", file=sys.stderr)
        watch = ours.ask(do="watch")
    show_steps(results, f" on {workers} processes of {devices} devices")
    show(
        "What it costs to tell the job's watch of a call", ["", "µs"], [[k, f"{1e6 * v:.1f}"] for k, v in watch.items()]
    )
    return {"workers": results, "watch": watch, "versions": versions}


def compare_first_steps(options: argparse.Namespace) -> dict[str, Any]:
    """Fresh processes, three each, in turn."""
    contenders = ["replicax", "replicax tape", "by hand, best"]
    runs: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for _ in range(1 if options.quick else 3):
        for model in options.models:
            for name in contenders:
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
    kinds = [name for name in results[0] if name != "variables"]
    rows = [[str(r["variables"]), *(f"{1e6 * r[name]:.0f}" for name in kinds)] for r in results]
    show("A call on one device", ["arrays", *(f"{name}, µs" for name in kinds)], rows)
    return {"variables": results}


def told() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--models", type=names, default=["mlp", "cnn", "transformer"])
    made.add_argument("--replicas", type=numbers, help="such as 1,2,4,8, which is the default on CPU")
    made.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    made.add_argument("--keras", action="store_true", help="also the MLP written with Keras, and that model alone")
    made.add_argument("--workers", type=int, metavar="N", help="replicas on the devices of so many processes, on CPU")
    made.add_argument("--devices-per-worker", type=int, metavar="N", default=1)
    made.add_argument("--first-step", type=numbers, metavar="N,N", help="the time to the first step, by replicas")
    made.add_argument("--variables", type=numbers, metavar="N,N", help="the cost of a call, by variables")
    options = parsed(made)
    options.models = ["mlp"] if options.keras else options.models
    options.replicas = options.replicas or ([1, 2, 4, 8] if options.device == "cpu" else [1])
    return options


def main() -> None:
    options = told()
    if options.first_step:
        found = compare_first_steps(options)
    elif options.variables:
        found = compare_variables(options)
    elif options.workers:
        found = compare_workers(options)
    else:
        found = compare_steps(options)
    finish(options, options.device, ("jax", "optax", "numpy"), found)


if __name__ == "__main__":
    main()
