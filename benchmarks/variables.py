"""What a call with many small variables costs: replicax beside JAX by hand, with as many arrays and with one.

    python benchmarks/variables.py                          # 6, 50 and 500 variables; 1 and 4 replicas
    python benchmarks/variables.py --variables 500 --replicas 4

Two programs: `add` adds 1 to every variable of four numbers; `train` is a step of momentum for a model of as many small
variables, in which the gradients are summed over the replicas. All arrays are replicated and donated. All sides take
turns, round by round; the states that they have come to are compared.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from sides import Side, Table, Target, finish, names, numbers, parsed, parser, ratio, take_turns

CONTENDERS = ["replicax", "one variable", "by hand", "by hand, packed"]


def measure(program: str, count: int, replicas: int, side: Side, options: Any) -> dict[str, Any]:
    """The rounds' times of a call for each contender."""
    payload = f"{program} {count}"
    sums = {n: side.ask(do="build", contender=n, payload=payload)["sums"] for n in CONTENDERS}
    right = sums["by hand"]
    if wrong := [n for n, s in sums.items() if any(abs(a - b) > 1e-4 * (1 + abs(b)) for a, b in zip(s, right))]:
        raise SystemExit(f"{', '.join(wrong)} computes something else for {payload}: {sums}.")
    times = take_turns(dict.fromkeys(CONTENDERS, side), options.rounds, options.seconds)
    side.ask(do="drop")
    return {"program": program, "variables": count, "replicas": replicas, "rounds": times}


def compare(options: Any) -> dict[str, Any]:
    results = []
    for replicas in options.replicas:
        with Side(sys.executable, "variables_jax.py", str(replicas)) as side:
            for program in options.programs:
                for count in options.variables:
                    results.append(measure(program, count, replicas, side, options))
                    print(f"{program}, {count} variables, {replicas} replicas: done", file=sys.stderr)
    return {"variables": results}


def tables(found: dict[str, Any]) -> dict[str, Table]:
    head = ["program", "replicas", "variables", *CONTENDERS, "/ by hand", "/ packed"]
    rows = []
    for r in found["variables"]:
        rounds = r["rounds"]
        cells = [f"{1e6 * statistics.median(rounds[name]):.0f}" for name in CONTENDERS]
        ratios = [ratio(rounds, "replicax", "by hand"), ratio(rounds, "replicax", "by hand, packed")]
        rows.append([r["program"], str(r["replicas"]), str(r["variables"]), *cells, *ratios])
    return {"variables": ("Microseconds of a call with so many variables", head, rows)}


def targets(found: dict[str, Any]) -> list[Target]:
    seen = {r["program"]: ratio(r["rounds"], "replicax", "by hand") for r in found["variables"] if _large(r)}
    call = {"a call": seen["add"]} if "add" in seen else {}
    return [Target("a call with 500 small variables, 4 replicas, against 500 arrays by hand", 0.1, call)]


def _large(r: dict[str, Any]) -> bool:
    return r["variables"] >= 500 and r["replicas"] == 4


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--variables", type=numbers, metavar="N,N", default=[6, 50, 500])
    made.add_argument("--replicas", type=numbers, metavar="N,N", default=[1, 4])
    made.add_argument("--programs", type=names, default=["add", "train"], help="some of add, train")
    options = parsed(made)
    found = compare(options)
    finish(options, "cpu", ("jax", "optax", "numpy"), found, tables(found), targets(found))


if __name__ == "__main__":
    main()
