"""What a step holds, on the devices and on the host, and what it costs the system; replicax beside JAX by hand.

    python benchmarks/memory.py                         # the wide MLP and the CNN on 2 replicas
    python benchmarks/memory.py --replicas 4

Each line is the median of fresh processes, which take turns. The compiled program says what its arguments, results and
temporaries take on a device (results that take an argument's place count once); live are the buffers on a device after
some steps. The host's peak is that of the whole process, Python and libraries included: while it takes steps, with what
had been freed before given back to the system (on Linux), and since its start. On CPU the devices' memory is the
host's. `sharded` is `MirroredStrategy(shard_optimizer_state=True)`, where there is such a thing.

The second table is the step of a larger CNN with glibc's defaults and with GLIBC_TUNABLES=glibc.malloc.hugetlb=1, which
makes malloc ask for huge pages: page faults, and time in the system, a step.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from sides import HERE, Table, Target, environment, finish, names, numbers, parsed, parser, ratio

CONTENDERS = ["replicax", "replicax tape", "sharded", "by hand, packed"]
DEVICE, LIVE, HOST, PROCESS, OPTIMIZER = "device", "live", "host", "process", "optimizer"
KINDS = {
    "arguments": "arguments",
    "temporaries": "temp",
    "device": DEVICE,
    "live": LIVE,
    "of it optimizer": OPTIMIZER,
    "host, steps": HOST,
    "host, process": PROCESS,
}
TUNABLES = {"glibc's defaults": "glibc.malloc.hugetlb=0", "huge pages": "glibc.malloc.hugetlb=1"}


def fresh(contender: str, model: str, replicas: int, steps: int, tunables: str | None = None) -> dict[str, Any] | None:
    """What a process of its own says of so many steps; nothing, where there is no such contender."""
    command = [sys.executable, str(HERE / "memory_jax.py"), contender, model, str(replicas), str(steps)]
    env = environment() if tunables is None else {**environment(), "GLIBC_TUNABLES": tunables}
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


def compare(options: Any) -> dict[str, Any]:
    steps, rounds = (3, 1) if options.quick else (10, min(3, options.rounds))
    memory, faults = [], []
    for replicas in options.replicas:
        for model in options.models:
            runs: dict[str, list[dict[str, float]]] = {}
            for round_ in range(rounds):
                for name in CONTENDERS if round_ % 2 == 0 else CONTENDERS[::-1]:
                    if (answer := fresh(name, model, replicas, steps)) is not None:
                        runs.setdefault(name, []).append(answer)
            memory.append({"model": model, "replicas": replicas, "runs": {n: runs[n] for n in CONTENDERS if n in runs}})
            print(f"{model}, {replicas} replicas: done", file=sys.stderr)
        pairs: dict[str, dict[str, list[dict[str, float]]]] = {}
        for _ in range(rounds):
            for name in ("replicax", "by hand, packed"):
                for how, tunables in TUNABLES.items():
                    answer = fresh(name, "large", replicas, steps, tunables)
                    pairs.setdefault(name, {}).setdefault(how, []).append(answer)  # type: ignore[arg-type]
        faults.append({"replicas": replicas, "runs": pairs})
    return {"memory": memory, "faults": faults}


def tables(found: dict[str, Any]) -> dict[str, Table]:
    against = {"device / best": DEVICE, "steps / best": HOST, "process / best": PROCESS}
    head = ["model", "replicas", "contender", *KINDS, *against]
    rows = []
    for r in found["memory"]:
        for name, runs in r["runs"].items():
            cells = [_megabytes(runs, key) for key in KINDS.values()]
            cells += [_of(r, name, key) for key in against.values()]
            rows.append([r["model"], str(r["replicas"]), name, *cells])
    memory = "Megabytes of a step: on one device, and of the process", head, rows
    head = ["contender", "replicas", "malloc", "ms a step", "page faults", "ms in the system", "time / defaults"]
    rows = []
    for r in found["faults"]:
        for name, hows in r["runs"].items():
            times = {how: [run["seconds"] for run in runs] for how, runs in hows.items()}
            for how, runs in hows.items():
                median = {key: statistics.median(run[key] for run in runs) for key in ("seconds", "faults", "system")}
                cells = [f"{1e3 * median['seconds']:.2f}", f"{median['faults']:.0f}", f"{1e3 * median['system']:.2f}"]
                rows.append([name, str(r["replicas"]), how, *cells, ratio(times, how, next(iter(hows)))])
    return {"memory": memory, "faults": ("The step of a CNN of larger images, and the pages of memory", head, rows)}


def _megabytes(runs: list[dict[str, float]], key: str) -> str:
    return f"{statistics.median(run[key] for run in runs) / 1e6:.1f}"


def _of(result: dict[str, Any], name: str, key: str, to: str = "by hand, packed") -> str:
    if name not in result["runs"]:
        return "–"
    return ratio({n: [run[key] for run in runs] for n, runs in result["runs"].items()}, name, to)


def targets(found: dict[str, Any]) -> list[Target]:
    seen = {f"{r['model']}, {r['replicas']}": r for r in found["memory"]}
    sharded = {case: _of(r, "sharded", OPTIMIZER, "replicax") for case, r in seen.items() if r["model"] == "wide"}
    replicas = min((r["replicas"] for r in found["memory"]), default=2)

    def ours(key: str) -> dict[str, str]:
        return {case: _of(r, "replicax", key) for case, r in seen.items()}

    return [
        Target("peak memory of a step on a device", 1.05, ours(DEVICE)),
        Target("live memory of a device between steps", 1.05, ours(LIVE)),
        Target("peak memory of steps on the host", 1.05, ours(HOST)),
        Target("peak memory of the process, start and compiling included", 1.05, ours(PROCESS)),
        Target("optimizer memory of a device, sharded against not", round(1.05 / replicas, 3), sharded),
    ]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--models", type=names, default=["wide", "cnn"])
    made.add_argument("--replicas", type=numbers, metavar="N,N", default=[2])
    options = parsed(made)
    found = compare(options)
    finish(options, "cpu", ("jax", "optax", "numpy"), found, tables(found), targets(found))


if __name__ == "__main__":
    main()
