"""What it costs and gains to pad the last batch of an epoch (`InputOptions(pad_last_batch=True)`).

    python benchmarks/padding.py                            # 4 replicas, MLP, CNN and transformer

The batches are those of uneven.py. Without padding each of the two has a program; with it, both have one, which is
traced three or four times. The first calls, of an even batch and then of an uneven one, are those of functions made
anew for each round, in seconds of the processor; the later ones, of both ways, take turns.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from sides import Side, Table, finish, names, numbers, parsed, parser, ratio, take_turns

WAYS, BATCHES = ["apart", "padded"], ["even", "uneven"]


def measure(model: str, replicas: int, side: Side, options: Any) -> dict[str, Any]:
    first: dict[str, list[float]] = {way: [] for way in WAYS}
    one: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(1 if options.quick else min(3, options.rounds)):
        for way in WAYS:
            made = side.ask(do="build", model=model, pad=way == "padded")
            one[way].append(made["even, CPU"])
            first[way].append(made["even, CPU"] + made["uneven, CPU"])
            if abs(made["loss of the parts"] - made["loss by hand"]) > 1e-4:
                raise SystemExit(f"The loss of an uneven batch is {made['loss of the parts']}, {way}.")
    contenders = [f"{batch}, {way}" for batch in BATCHES for way in WAYS]
    times = take_turns(dict.fromkeys(contenders, side), options.rounds, options.seconds)
    return {"model": model, "replicas": replicas, "one": one, "first": first, "rounds": times}


def compare(options: Any) -> dict[str, Any]:
    results = []
    for replicas in options.replicas:
        with Side(sys.executable, "uneven_jax.py", str(replicas)) as side:
            for model in options.models:
                results.append(measure(model, replicas, side, options))
                print(f"{model}, {replicas}: done", file=sys.stderr)
    return {"padding": results}


def tables(found: dict[str, Any]) -> dict[str, Table]:
    head = ["model", "replicas", "first call", "first calls of an epoch", "full batch", "last batch"]
    rows = []
    for r in found["padding"]:
        ratios = [ratio(r[part], "padded", "apart") for part in ("one", "first")]
        ratios += [ratio(r["rounds"], f"{batch}, padded", f"{batch}, apart") for batch in BATCHES]
        seconds = [statistics.median(r[part]["padded"]) for part in ("one", "first")]
        texts = [f"{value} ({second:.2f} s)" for value, second in zip(ratios, seconds)] + ratios[2:]
        rows.append([r["model"], str(r["replicas"]), *texts])
    return {"padding": ("Padded batches against batches with programs of their own", head, rows)}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--models", type=names, default=["mlp", "cnn", "transformer"])
    made.add_argument("--replicas", type=numbers, metavar="N,N", default=[4])
    options = parsed(made)
    found = compare(options)
    finish(options, "cpu", ("jax", "optax", "numpy"), found, tables(found))


if __name__ == "__main__":
    main()
