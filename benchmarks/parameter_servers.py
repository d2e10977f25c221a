"""Scheduled functions of a chief, two workers and one or two parameter servers, over processes: beside TensorFlow's.

    python benchmarks/parameter_servers.py --tensorflow PYTHON      # an interpreter that has TensorFlow

Each side does the same work, in turn, round by round: replicax with TLS on, TensorFlow without, as it has none. The
tables show the medians of the rounds, and CPU time is that of all processes of a side. The targets are the least
rates and the most times, of TensorFlow's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import sys
import time
from typing import Any

from sides import TENSORFLOW, Side, Table, Target, finish, numbers, parsed, parser, ratio

REPLICAX = "replicax"
SCRIPTS = {REPLICAX: "clusters_replicax.py", TENSORFLOW: "clusters_tensorflow.py"}
TITLES = {
    "up": "cluster up, with imports",
    "empty": "empty closures",
    "assign_add": "assign_add closures",
    "embedding": "embedding steps, 100,000 x 64, batch 1,024, SGD",
    "dense, SGD": "dense steps, 2 x 1 MB, SGD",
    "dense, Adam": "dense steps, 2 x 1 MB, Adam",
    "fetch": "schedule and fetch, empty",
    "write": "a large variable written",
    "read": "a large variable read",
}
RATES = {"empty": 1.5, "assign_add": 1.3, "embedding": 1.3, "dense, SGD": 1.0, "dense, Adam": 1.0}  # at least
TIMES = {"up": 0.5, "write": 1.2, "read": 1.2}  # at most
ONCE = ("write", "read")


def started(side: Side, stack: contextlib.ExitStack) -> float:
    """Starts a side; the seconds until a closure of its cluster has run."""
    since = time.perf_counter()
    stack.enter_context(side)
    side.ask(do="version")
    return time.perf_counter() - since


def measure(servers: int, pythons: dict[str, str], options: Any) -> dict[str, Any]:
    """The rounds' seconds and CPU seconds of each work, of both sides, with so many servers."""
    made = {
        name: functools.partial(Side, python, SCRIPTS[name], "chief", str(servers), str(options.megabytes), quiet=True)
        for name, python in pythons.items()
    }
    seconds: dict[str, Any] = {work: {name: [] for name in made} for work in TITLES}
    cpu: dict[str, Any] = {work: {name: [] for name in made} for work in TITLES if work != "up"}
    for _ in range(options.rounds - 1):
        for name, make in made.items():
            with contextlib.ExitStack() as stack:
                seconds["up"][name].append(started(make(), stack))
    with contextlib.ExitStack() as stack:
        sides = {name: make() for name, make in made.items()}
        for name, side in sides.items():
            seconds["up"][name].append(started(side, stack))
        for work in cpu:
            counts = {name: count(side, work, options.seconds) for name, side in sides.items()}
            for round_ in range(options.rounds):
                for name in list(sides) if round_ % 2 == 0 else list(sides)[::-1]:
                    answer = sides[name].ask(do="run", work=work, count=counts[name])
                    seconds[work][name].append(answer["seconds"] / counts[name])
                    cpu[work][name].append(answer["cpu"] / counts[name])
        versions = {name: side.ask(do="version")["version"] for name, side in sides.items()}
    return {"servers": servers, "rounds": seconds, "cpu": cpu, "versions": versions}


def count(side: Side, work: str, seconds: float) -> int:
    """How many of a work take about so long; the first ones, which compile, are left out."""
    if work in ONCE:
        side.ask(do="run", work=work, count=1)
        return 1
    side.ask(do="run", work=work, count=20)
    return max(10, int(seconds / (side.ask(do="run", work=work, count=20)["seconds"] / 20)))


def tables(found: dict[str, Any]) -> dict[str, Table]:
    return {f"servers {one['servers']}": table(one) for one in found["clusters"]}


def table(one: dict[str, Any]) -> Table:
    names = [name for name in SCRIPTS if name in one["rounds"]["up"]]
    head = ["operation", *names, "rate, of TensorFlow's", *(f"CPU, {name}" for name in names), "CPU, of TensorFlow's"]
    rows = []
    for work, title in TITLES.items():
        times, cpu = one["rounds"][work], one["cpu"].get(work)
        shown = [figure(work, statistics.median(times[name])) for name in names]
        used = [f"{statistics.median(cpu[name]) * 1e3:.2f} ms" if cpu else "–" for name in names]
        more = ratio(cpu, REPLICAX, TENSORFLOW) if cpu and any(cpu.get(TENSORFLOW, ())) else "–"
        rows.append([title, *shown, ratio(times, TENSORFLOW, REPLICAX), *used, more])
    return f"2 workers, parameter servers: {one['servers']}", head, rows


def figure(work: str, seconds: float) -> str:
    return f"{1 / seconds:.0f}/s" if work in RATES else f"{seconds * 1e3:.2f} ms"


def targets(found: dict[str, Any]) -> list[Target]:
    rounds = {f"servers: {one['servers']}": one["rounds"] for one in found["clusters"]}
    limits = [
        (RATES, "rate against TensorFlow's", (TENSORFLOW, REPLICAX)),
        (TIMES, "time against TensorFlow's", (REPLICAX, TENSORFLOW)),
    ]
    return [
        Target(
            f"{TITLES[work]}: {what}",
            limit,
            {case: ratio(r[work], *sides) for case, r in rounds.items()},
            works is RATES,
        )
        for works, what, sides in limits
        for work, limit in works.items()
    ]


def main() -> None:
    made = parser(__doc__)
    made.set_defaults(rounds=5)
    made.add_argument("--servers", type=numbers, default=[1, 2], help="how many parameter servers, each in turn")
    made.add_argument("--megabytes", type=int, default=100, help="of the large variable")
    options = parsed(made)
    options.seconds, options.megabytes = (0.02, 1) if options.quick else (1.0, options.megabytes)
    pythons = {REPLICAX: sys.executable} | ({TENSORFLOW: options.tensorflow} if options.tensorflow else {})
    before = os.getloadavg()[0]
    found: dict[str, Any] = {"clusters": [measure(servers, pythons, options) for servers in options.servers]}
    found["load"] = [before, os.getloadavg()[0]]
    versions = found["clusters"][0].pop("versions")
    found["versions"] = {name: version for name, version in versions.items() if version}
    print("load average before and after, of which one or two are this benchmark:", found["load"])
    finish(options, "cpu", ["jax", "jaxlib", "grpcio", "cryptography"], found, tables(found), targets(found))


if __name__ == "__main__":
    main()
