"""What a training step costs: replicax beside the same step written by hand in JAX, and beside TensorFlow.

    python benchmarks/step.py                              # all models, 1 to 8 virtual CPU devices
    python benchmarks/step.py --tensorflow PYTHON          # with an interpreter that has TensorFlow, beside it
    python benchmarks/step.py --workers 2                  # on two processes
    python benchmarks/step.py --keras                      # the MLP, also written with Keras
    python benchmarks/step.py --first-step 1,64            # the time to the first step

All sides take turns in one run, round by round, so that what else the machine does hits them alike; the medians of the
rounds are shown, and the medians of the rounds' ratios. The page on performance says what is compared, and what came
out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from typing import Any

from sides import (
    BY_HAND,
    HERE,
    TENSORFLOW,
    Side,
    Table,
    Target,
    best,
    environment,
    finish,
    names,
    numbers,
    parsed,
    parser,
    ratio,
    spread,
    take_turns,
)

JAX_SIDES = ["replicax", "replicax tape", *BY_HAND]
ALONE, KERAS = "by hand, alone", "Keras"
TENSORFLOW_REPLICAS = 64  # the most of which its first step is measured,
TENSORFLOW_DEADLINE = 1800.0  # and the seconds that it may take: two minutes, or many where others use the machine


def measure(model: str, replicas: int, sides: dict[str, Side], rounds: int, seconds: float) -> dict[str, Any]:
    """Median seconds of a step, and those to the first one, for each contender."""
    first, losses = {}, {}
    for name, side in sides.items():
        answer = side.ask(do="first", contender=name, model=model)
        first[name], losses[name] = answer["first"], [answer["loss"], answer["later_loss"]]
    for name, side in sides.items():
        side.ask(do="build", contender=name, model=model)
    times = take_turns(sides, rounds, seconds)
    reference = losses["by hand, packed"]
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


def tables(found: dict[str, Any]) -> dict[str, Table]:
    made = {}
    for key, where in (("steps", ""), ("workers", " between processes")):
        if key in found:
            made[key], made[f"{key} first"] = _step_table(found[key], where), _first_table(found[key], where)
    if "watch" in found:
        rows = [[name, f"{1e6 * seconds:.1f}"] for name, seconds in found["watch"].items()]
        made["watch"] = "What it costs to tell the job's watch of a call", ["call", "µs"], rows
    if "first_steps" in found:
        made["first_steps"] = _fresh_table(found["first_steps"])
    return made


def _step_table(results: list[dict[str, Any]], where: str) -> Table:
    sides = list(results[0]["step"])
    of_best = ["replicax", "replicax tape", *([KERAS] if KERAS in sides else [])]
    pairs = [("/ alone", "replicax", ALONE)] if ALONE in sides else []
    pairs += [("/ apart", "replicax", "by hand, apart"), ("/ TensorFlow", "replicax", TENSORFLOW)]
    rows = [
        [
            r["model"],
            str(r["replicas"]),
            *(f"{1e3 * r['step'][side]:.3f}" for side in sides),
            best(r["rounds"], BY_HAND).removeprefix("by hand, "),
            *(spread(r["rounds"], name, best(r["rounds"], BY_HAND)) for name in of_best),
            *(spread(r["rounds"], of, to) for _, of, to in pairs),
        ]
        for r in results
    ]
    head = ["model", "replicas", *sides, "best by hand", *(f"{name} / best" for name in of_best)]
    head += [title for title, _, _ in pairs]
    return f"Milliseconds of a training step{where}", head, rows


def _first_table(results: list[dict[str, Any]], where: str) -> Table:
    sides = list(results[0]["first"])
    rows = [[r["model"], str(r["replicas"]), *(f"{r['first'][side]:.2f}" for side in sides)] for r in results]
    return f"Seconds to the first step{where}, one after the other in one process", ["model", "replicas", *sides], rows


def _fresh_table(results: list[dict[str, Any]]) -> Table:
    parts = ["total", "trace", "lower", "compile", "run"]
    base: dict[tuple[str, str], float] = {}
    rows = []
    for r in results:
        flat = r["total"] - r.get("run", 0.0)
        ratio_ = flat / base.setdefault((r["model"], r["contender"]), flat)
        cells = [f"{r[part]:.2f}" if part in r else "–" for part in parts]
        counts = [str(r.get(part, "–")) for part in ("traces", "all_reduces")]
        rows.append([r["model"], r["contender"], str(r["replicas"]), *cells, *counts, f"{ratio_:.2f}"])
    head = ["model", "contender", "replicas", "s", *parts[1:], "traces", "all-reduces", "ratio without running"]
    return "The first step, in a fresh process", head, rows


def targets(found: dict[str, Any]) -> list[Target]:
    made = []
    if "steps" in found:
        of_best = {f"{r['model']}, {r['replicas']}": _against(r, best(r["rounds"], BY_HAND)) for r in found["steps"]}
        apart = {
            f"{r['replicas']} replicas": _against(r, "by hand, apart")
            for r in found["steps"]
            if r["model"] == "mlp" and r["replicas"] > 1
        }
        made += [
            Target("compiled step against the best form by hand", 1.02, of_best),
            Target("MLP's step at 2 to 8 replicas against one psum a tensor", 0.4, apart),
        ]
    if "first_steps" in found:
        ours = {(r["model"], r["replicas"]): r for r in found["first_steps"] if r["contender"] == "replicax"}
        theirs = {
            f"{r['model']}, {r['replicas']}": _of_medians(ours, r)
            for r in found["first_steps"]
            if r["contender"] == TENSORFLOW and r["replicas"] >= 64
        }
        flat = {}
        for model in {model for model, _ in ours}:
            one, *more = (r["total"] - r["run"] for (name, _), r in ours.items() if name == model)
            numbers = [replicas for name, replicas in ours if name == model][1:]
            flat |= {f"{model}, {n}": f"{seconds / one:.2f}" for n, seconds in zip(numbers, more)}
        made += [
            Target("first step at 64 replicas against TensorFlow's", 0.1, theirs),
            Target("first step against that at 1 replica, without the devices' run time", 1.5, flat),
        ]
    return made


def _against(result: dict[str, Any], other: str) -> str:
    return ratio(result["rounds"], "replicax", other)


def _of_medians(ours: dict[tuple[str, int], dict[str, Any]], theirs: dict[str, Any]) -> str:
    """Of fresh processes: ours may have run more often than theirs."""
    mine = ours.get((theirs["model"], theirs["replicas"]))
    return f"{mine['total'] / theirs['total']:.2f}" if mine else "–"


# Hundreds of virtual devices on a few cores may take longer to meet than XLA waits by itself.
PATIENCE = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120 --xla_cpu_collective_call_terminate_timeout_seconds=240"
)


def run_side(*arguments: str) -> Any:
    command = [sys.executable, str(HERE / "side_jax.py"), *arguments]
    env = environment()
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {PATIENCE}"
    answer = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
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
    return {"workers": results, "watch": watch, "versions": versions}


def compare_first_steps(options: argparse.Namespace) -> dict[str, Any]:
    """Fresh processes, three each, in turn; of TensorFlow one, whose time is many seconds at many replicas."""
    runs: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for round_ in range(1 if options.quick else min(3, options.rounds)):
        for model in options.models:
            for name in options.contenders:
                for replicas in options.first_step:
                    answer = run_side("first", options.device, str(replicas), name, model)
                    runs.setdefault((model, name, replicas), []).append(answer)
            for replicas in options.first_step if options.tensorflow and round_ == 0 else []:
                if replicas <= (8 if options.quick else TENSORFLOW_REPLICAS):
                    command = (options.tensorflow, "side_tensorflow.py", "serve", options.device, str(replicas))
                    with Side(*command, quiet=True, deadline=TENSORFLOW_DEADLINE) as side:
                        answer = {"total": side.ask(do="first", contender=TENSORFLOW, model=model)["first"]}
                    runs.setdefault((model, TENSORFLOW, replicas), []).append(answer)
    found = []
    for (model, name, replicas), answers in runs.items():
        medians = {part: statistics.median(r[part] for r in answers) for part in answers[0]}
        found.append({"model": model, "contender": name, "replicas": replicas, **medians})
    return {"first_steps": found}


def told() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--models", type=names, default=["mlp", "cnn", "transformer", "language model"])
    made.add_argument("--replicas", type=numbers, help="such as 1,2,4,8, which is the default on CPU")
    made.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    made.add_argument("--keras", action="store_true", help="also the MLP written with Keras, and that model alone")
    made.add_argument("--workers", type=int, metavar="N", help="replicas on the devices of so many processes, on CPU")
    made.add_argument("--devices-per-worker", type=int, metavar="N", default=1)
    made.add_argument("--first-step", type=numbers, metavar="N,N", help="the time to the first step, by replicas")
    made.add_argument("--contenders", type=_list, metavar="NAME;NAME", default=JAX_SIDES[:3], help="of the first step")
    options = parsed(made)
    options.models = ["mlp"] if options.keras else options.models
    options.replicas = options.replicas or ([1, 2, 4, 8] if options.device == "cpu" else [1])
    return options


def _list(text: str) -> list[str]:
    return [name.strip() for name in text.split(";")]


def main() -> None:
    options = told()
    if options.first_step:
        found = compare_first_steps(options)
    elif options.workers:
        found = compare_workers(options)
    else:
        found = compare_steps(options)
    finish(options, options.device, ("jax", "optax", "numpy"), found, tables(found), targets(found))


if __name__ == "__main__":
    main()
