"""What a pass over a distributed dataset takes: replicax beside TensorFlow, and numpy and `device_put` by hand.

    python benchmarks/input.py                          # two replicas
    python benchmarks/input.py --tensorflow PYTHON      # with an interpreter that has TensorFlow beside it

The data are 60,000 images of 28 x 28 float32 numbers (188 MB) with their labels, in batches of 256, of which each
replica gets its half on its device. All sides take turns in one run, round by round. A round is a pass, and includes
what a pass needs first, such as to fill the buffer of `shuffle`.

Then steps of some milliseconds, in a loop over the dataset and over a batch that is on the devices already: one that
computes on the cores, and one that waits in a callback, as for an accelerator. By hand is the same step in plain JAX,
whose batches come from a thread that is two ahead.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from typing import Any

from pipelines import BATCH, KINDS, PIPELINES, ROWS, STEPS
from sides import TENSORFLOW, Side, finish, names, numbers, parsed, parser, ratio, show, take_turns


def measure(name: str, sides: dict[str, Side], rounds: int) -> dict[str, Any]:
    """The rounds' times of each contender for a pass over the dataset of that name, and their medians."""
    for side_name, side in sides.items():
        rows = side.ask(do="build", contender=side_name, payload=name)["sums"][0]
        if rows != ROWS:
            raise SystemExit(f"{side_name} gave {rows} rows of {ROWS} for {name}.")
    times = take_turns(sides, rounds, 0.0, least=1)
    batches = -(-ROWS // BATCH)
    faults = {n: side.ask(do="run", contender=n, steps=2)["faults"] / batches for n, side in sides.items()}
    for side in set(sides.values()):
        side.ask(do="drop")
    medians = {side: statistics.median(values) for side, values in times.items()}
    return {"dataset": name, "pass": medians, "rounds": times, "faults": faults}


def measure_step(side: Side, kind: str, milliseconds: float, rounds: int, seconds: float) -> dict[str, Any]:
    """A step of about so long in a loop over a dataset, and over a batch that is on the devices already."""
    names = [f"{who}, {what}" for who in ("replicax", "by hand") for what in ("batch at hand", "with input")]
    for name in names:
        side.ask(do="build", contender=name, payload=f"{kind} {milliseconds}")
    times = take_turns(dict.fromkeys(names, side), rounds, seconds, least=1)
    faults = {name: side.ask(do="run", contender=name, steps=2)["faults"] / STEPS for name in names}
    side.ask(do="drop")
    medians = {name: statistics.median(values) / STEPS for name, values in times.items()}
    return {"kind": kind, "step": milliseconds, "took": medians, "rounds": times, "faults": faults}


def added(result: dict[str, Any], who: str) -> str:
    """The time of a step with its input, to that of the step alone."""
    return ratio(result["rounds"], f"{who}, with input", f"{who}, batch at hand")


def step_table(results: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    sides = ("replicax", "by hand")
    head = ["step", *(f"{who}: {what}" for who in sides for what in ("batch at hand", "with input", "ratio"))]
    rows = []
    for r in results:
        cells = []
        for who in sides:
            took = [f"{1e3 * r['took'][f'{who}, {what}']:.2f}" for what in ("batch at hand", "with input")]
            cells += [*took, added(r, who)]
        rows.append([case(r), *cells, f"{r['faults']['replicax, with input']:.1f}"])
    return [*head, "faults a batch"], rows


def case(result: dict[str, Any]) -> str:
    return f"{result['step']:g} ms {result['kind']}"


def table(results: list[dict[str, Any]], sides: list[str]) -> tuple[list[str], list[list[str]]]:
    against = [side for side in ("by hand", TENSORFLOW) if side in sides]
    head = ["dataset", *sides, *(f"/ {side}" for side in against), "us a batch", "faults a batch"]
    rows = []
    for r in results:
        cells = [f"{1e3 * r['pass'][side]:.0f}" for side in sides]
        ratios = [ratio(r["rounds"], "replicax", side) for side in against]
        each = [f"{1e6 * r['pass']['replicax'] / -(-ROWS // BATCH):.0f}", f"{r['faults']['replicax']:.1f}"]
        rows.append([r["dataset"], *cells, *ratios, *each])
    return head, rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--replicas", type=numbers, metavar="N,N", default=[2])
    made.add_argument("--datasets", type=names, metavar="NAME;NAME", help=f"some of {'; '.join(PIPELINES)}")
    made.add_argument("--steps", type=numbers, metavar="MS,MS", default=[5], help="of so many milliseconds")
    options = parsed(made)
    told = PIPELINES if options.datasets is None else ",".join(options.datasets).split(";")
    chosen = [name.strip() for name in told if name.strip()]
    found, stepped, versions = [], [], {}
    for replicas in options.replicas:
        with contextlib.ExitStack() as stack:
            ours = stack.enter_context(Side(sys.executable, "input_jax.py", str(replicas)))
            sides = {"replicax": ours, "by hand": ours}
            if options.tensorflow:
                theirs = Side(options.tensorflow, "input_tensorflow.py", str(replicas), quiet=True)
                sides[TENSORFLOW] = stack.enter_context(theirs)
                versions["tensorflow"] = sides[TENSORFLOW].ask(do="version")["version"]
            results = [measure(name, sides, options.rounds) for name in chosen]
            steps = [
                measure_step(ours, kind, ms, options.rounds, options.seconds) for ms in options.steps for kind in KINDS
            ]
        show(f"Milliseconds of a pass with {replicas} replicas", *table(results, list(sides)))
        show(f"Milliseconds of a step with {replicas} replicas", *step_table(steps))
        stepped += [{"replicas": replicas, **result} for result in steps]
        found += [{"replicas": replicas, **result} for result in results]
    finish(options, "cpu", ("jax", "numpy"), {"input": found, "steps": stepped, "versions": versions})


if __name__ == "__main__":
    main()
