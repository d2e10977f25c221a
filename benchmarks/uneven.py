"""What a batch whose parts differ in size costs, against one of equal parts: the first call, and later ones.

    python benchmarks/uneven.py                             # 4 replicas, MLP and CNN
    python benchmarks/uneven.py --workers 2                 # on two processes

Batches of 64 are even; the last one of an epoch has 42 rows, of which four replicas get 11, 11, 11 and 9 (or 41, of
which two get 21 and 20). Both go to one `rx.function`. The first calls are those of functions made anew for each round,
the later ones take turns.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from sides import Side, Table, Target, finish, names, numbers, parsed, parser, ratio, take_turns

BATCHES = ["even", "uneven"]


def measure(model: str, replicas: int | str, side: Side, options: Any) -> dict[str, Any]:
    first: dict[str, list[float]] = {name: [] for name in BATCHES}
    for _ in range(1 if options.quick else min(3, options.rounds)):
        made = side.ask(do="build", model=model)
        for name in BATCHES:
            first[name].append(made[name])
    if abs(made["loss of the parts"] - made["loss by hand"]) > 1e-4:
        raise SystemExit(f"The loss of an uneven batch is {made['loss of the parts']}, not {made['loss by hand']}.")
    times = take_turns(dict.fromkeys(BATCHES, side), options.rounds, options.seconds)
    return {"model": model, "replicas": replicas, "first": first, "rounds": times, "traces": made["traces"]}


def compare(options: Any) -> dict[str, Any]:
    results = []
    places = [(n, 1, n) for n in options.replicas]
    if options.workers:
        places = [(f"{options.workers} processes", options.workers, options.workers)]
    for place, workers, replicas in places:
        with Side(sys.executable, "uneven_jax.py", str(replicas), workers=workers) as side:
            for model in options.models:
                results.append(measure(model, place, side, options))
                print(f"{model}, {place}: done", file=sys.stderr)
    return {"uneven": results}


def tables(found: dict[str, Any]) -> dict[str, Table]:
    head = ["model", "replicas", "first call, s: even", "uneven", "ratio", "later, ms: even", "uneven", "ratio"]
    rows = []
    for r in found["uneven"]:
        first = [f"{statistics.median(r['first'][name]):.2f}" for name in BATCHES]
        later = [f"{1e3 * statistics.median(r['rounds'][name]):.2f}" for name in BATCHES]
        ratios = [ratio(r[part], "uneven", "even") for part in ("first", "rounds")]
        rows.append([r["model"], str(r["replicas"]), *first, ratios[0], *later, ratios[1]])
    return {"uneven": ("A batch of uneven parts", head, rows)}


def targets(found: dict[str, Any]) -> list[Target]:
    def seen(part: str) -> dict[str, str]:
        return {f"{r['model']}, {r['replicas']}": ratio(r[part], "uneven", "even") for r in found["uneven"]}

    return [
        Target("first use of an uneven batch against that of an even one", 3, seen("first")),
        Target("later uses of an uneven batch against those of an even one", 2, seen("rounds")),
    ]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--models", type=names, default=["mlp", "cnn"])
    made.add_argument("--replicas", type=numbers, metavar="N,N", default=[4])
    made.add_argument("--workers", type=int, metavar="N", help="replicas on so many processes, a device each")
    options = parsed(made)
    found = compare(options)
    finish(options, "cpu", ("jax", "optax", "numpy"), found, tables(found), targets(found))


if __name__ == "__main__":
    main()
