"""What an epoch of very short steps takes, its input included: replicax beside a loop by hand, and TensorFlow's.

    python benchmarks/epoch.py                          # 2 and 4 replicas
    python benchmarks/epoch.py --tensorflow PYTHON      # with an interpreter that has TensorFlow beside it

The MLP of step.py over 12,800 rows in memory, shuffled anew in each epoch, in global batches of 64: 200 steps. What
counts is what comes with each: taking the rows, moving them to the devices, the call. All sides take turns, round by
round; a round is some epochs, each awaited at its end. `benchmarks/RESULTS.md` says what each contender does.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from typing import Any

from sides import Side, Table, Target, best, finish, numbers, parsed, parser, ratio, take_turns
from training import BY_HAND, STEPS, THREADED

OURS = ["replicax", "next", "several", "loop"]
THEIRS = ["TensorFlow, step", "TensorFlow, loop"]


def measure(replicas: int, sides: dict[str, Side], rounds: int, seconds: float) -> dict[str, Any]:
    """The rounds' times of an epoch for each contender; the model that each has trained has to fit the data alike."""
    losses = {name: side.ask(do="build", contender=name, payload="epoch")["sums"][0] for name, side in sides.items()}
    middle = statistics.median(losses.values())
    if wrong := {name: loss for name, loss in losses.items() if abs(loss - middle) > 0.03 * middle}:
        raise SystemExit(f"After an epoch the losses are {losses}; {', '.join(wrong)} computes something else.")
    times = take_turns(sides, rounds, seconds, least=1)
    for side in set(sides.values()):
        side.ask(do="drop")
    return {"replicas": replicas, "rounds": times, "loss": losses}


def compare(options: Any) -> dict[str, Any]:
    found, versions = [], {}
    for replicas in options.replicas:
        with contextlib.ExitStack() as stack:
            command = (sys.executable, "epoch_jax.py", str(replicas), str(options.steps_per_call))
            ours = stack.enter_context(Side(*command))
            sides = dict.fromkeys(ours.ask(do="contenders")["contenders"], ours)
            if options.tensorflow:
                theirs = Side(options.tensorflow, "epoch_tensorflow.py", str(replicas), quiet=True)
                sides |= dict.fromkeys(THEIRS, stack.enter_context(theirs))
                versions["tensorflow"] = sides[THEIRS[0]].ask(do="version")["version"]
            found.append(measure(replicas, sides, options.rounds, options.seconds))
        print(f"{replicas} replicas: done", file=sys.stderr)
    return {"epochs": found, "steps_per_call": options.steps_per_call, "versions": versions}


def tables(found: dict[str, Any]) -> dict[str, Table]:
    names = list(dict.fromkeys(name for r in found["epochs"] for name in r["rounds"]))
    head = ["contender"]
    columns = []
    for r in found["epochs"]:
        rounds, n = r["rounds"], r["replicas"]
        head += [f"{n} replicas: ms an epoch", "µs a step", "/ by hand", "/ TensorFlow"]
        hand, theirs = best(rounds, [BY_HAND, THREADED]), best(rounds, THEIRS)
        columns.append(
            {
                name: [
                    f"{1e3 * statistics.median(times):.0f}",
                    f"{1e6 * statistics.median(times) / STEPS:.0f}",
                    ratio(rounds, name, hand),
                    ratio(rounds, name, theirs),
                ]
                for name, times in rounds.items()
            }
        )
    rows = [[name, *(cell for column in columns for cell in column.get(name, ["–"] * 4))] for name in names]
    return {"epoch": (f"An epoch of {STEPS} steps", head, rows)}


def targets(found: dict[str, Any]) -> list[Target]:
    hand, theirs = {}, {}
    for r in found["epochs"]:
        ours = best(r["rounds"], OURS)
        hand[f"{r['replicas']} replicas"] = ratio(r["rounds"], ours, best(r["rounds"], [BY_HAND, THREADED]))
        theirs[f"{r['replicas']} replicas"] = ratio(r["rounds"], ours, best(r["rounds"], THEIRS))
    return [
        Target("dispatch-bound epoch against a loop by hand", 0.5, hand),
        Target("dispatch-bound epoch against TensorFlow's MirroredStrategy", 0.15, theirs),
    ]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--replicas", type=numbers, metavar="N,N", default=[2, 4])
    made.add_argument("--steps-per-call", type=int, metavar="K", default=32)
    options = parsed(made)
    found = compare(options)
    finish(options, "cpu", ("jax", "optax", "numpy"), found, tables(found), targets(found))


if __name__ == "__main__":
    main()
