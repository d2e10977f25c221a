"""Injects faults into clusters with parameter servers, many times each, and prints what was seen and how soon.

python scripts/parameter_servers.py [TIMES] [--closures CLOSURES] [--slack SLACK]

Before that, CLOSURES functions (10,000) increment a counter on three workers, one of which is killed twice. The exit
status is 1 if anything was wrong, or later than it has to be.
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import sys
import time
from pathlib import Path

TIMEOUT = 8.0  # seconds without workers
HEARTBEAT = 5.0  # seconds after which a silent task is taken for dead
os.environ.update(JAX_PLATFORMS="cpu", REPLICAX_START_TIMEOUT="60", REPLICAX_HEARTBEAT_TIMEOUT="5")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np  # noqa: E402
from ps_clusters import FORGETS, UPDATES, Cluster, counting, raised  # noqa: E402

import replicax as rx  # noqa: E402

HOOKS = {"worker": UPDATES, "ps": FORGETS}

# Seconds within which each has to be seen on a machine that does nothing else; None where it is not said.
BEFORE, AFTER = "a worker is killed before its update", "... after its update, before its answer"
STOPPED, BACK = "a worker is stopped, and wakes up later", "a worker is back at its address"
FAILS, ENDS = "an exception in a closure", "the end of a dataset"
LARGE, NOBODY = "a result of 100 MB", f"all workers are gone (time-out {TIMEOUT:g} s)"
SERVER, COORDINATOR = "the parameter server is killed: join", "a coordinator is killed"
COUNTER = "closures, a worker killed twice"
WITHIN: dict[str, float | None] = {
    BEFORE: 1.0, AFTER: 1.0, STOPPED: HEARTBEAT + 2.0, BACK: 3.0, FAILS: 0.0, ENDS: 0.0, LARGE: None, NOBODY: TIMEOUT,
    SERVER: 3.0, COORDINATOR: HEARTBEAT, COUNTER: None,
}  # fmt: skip

seen: dict[str, list[tuple[str, float]]] = collections.defaultdict(list)


class Injections:
    """Faults of a cluster with two workers that lives on."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.use()

    def use(self) -> None:
        """Counts with the cluster's strategy from now on."""
        self.co, self.expected = self.cluster.coordinator, 0
        self.count, self.plain = counting(self.cluster)
        plain = self.plain

        @rx.function
        def watched():
            return plain()

        self.watched = watched
        self.cluster.wait_for_workers(2)

    def note(self, case: str, what: str, began: float) -> None:
        """Notes what was seen, so many seconds after an injection."""
        seen[case].append((what, time.monotonic() - began))

    def counted(self) -> str:
        """Returns whether the counter is as it must be after one more closure."""
        self.expected += 1
        found = int(self.count.numpy())
        return "ran once" if found == self.expected else f"WRONG: {found} for {self.expected}"

    def kill(self, number: int, case: str) -> None:
        """Kills or stops a worker that is about to update, or has just done so."""
        value = self.co.schedule(self.watched)
        one, other = self.cluster.first_to_speak()
        assert self.cluster.line("worker", one) == "updates"
        if case == AFTER:
            self.cluster.say("worker", one)
            assert self.cluster.line("worker", one) == "updated"
        began = time.monotonic()
        self.cluster.kill("worker", one, number)
        for line in ("updates", "updated"):
            assert self.cluster.line("worker", other) == line
            self.cluster.say("worker", other)
        value.fetch()
        self.co.join()
        what, again = self.counted(), time.monotonic()
        if number == signal.SIGSTOP:
            self.cluster.say("worker", one)
            self.cluster.kill("worker", one, signal.SIGCONT)
            if self.cluster.line("worker", one) == "updated":
                self.cluster.say("worker", one)
            self.cluster.wait_for_workers(2)
            what += ", not by the one that woke" if int(self.count.numpy()) == self.expected else ", WRONG after waking"
        seen[case].append((what, again - began))
        if number == signal.SIGKILL:
            self.cluster.start("worker", one)
            self.cluster.wait_until_up("worker", one)
            began = time.monotonic()
            self.cluster.wait_for_workers(2)
            self.note(BACK, "used again", began)

    def error(self) -> None:
        """Has a closure fail, and a dataset end."""
        import replicax.tf as tf

        @tf.function
        def bad(x):
            tf.debugging.assert_equal(x, 2)

        def empty():
            return rx.data.Dataset.range(0)

        for case, function, argument in (
            (FAILS, bad, tf.constant(1)),
            (ENDS, rx.function(lambda it: next(it)), iter(self.co.create_per_worker_dataset(empty))),
        ):
            began = time.monotonic()
            what, *_ = raised(self.co.schedule(function, args=(argument,)).fetch)
            self.note(case, what, began)
            assert raised(self.co.join)[0] == what
            self.co.schedule(self.plain).fetch()
            self.expected += 1

    def large(self) -> None:
        """Writes a variable of 100 MB, and has a worker return it."""
        with self.cluster.strategy.scope():
            variable = rx.Variable(np.zeros(25_000_000, "f4"))
        began = time.monotonic()
        found = self.co.schedule(rx.function(lambda: variable.value() + 1)).fetch()
        self.note(LARGE, "came" if found.sum() == 25e6 else "WRONG", began)

    def no_workers(self) -> None:
        """Kills all workers, and starts them again."""
        began = time.monotonic()
        for index in range(2):
            self.cluster.kill("worker", index)
        value = self.co.schedule(self.plain)
        self.cluster.patience(TIMEOUT)
        self.note(NOBODY, raised(self.co.join)[0], began)
        self.cluster.patience(60.0)
        for index in range(2):
            self.cluster.start("worker", index)
        for index in range(2):
            self.cluster.wait_until_up("worker", index)
        value.fetch()
        self.co.join()
        self.expected += 1
        self.cluster.wait_for_workers(2)

    def server(self) -> None:
        """Kills the parameter server while closures run, and goes on with a new strategy."""
        for _ in range(1000):
            self.co.schedule(self.plain)
        began = time.monotonic()
        self.cluster.kill("ps", 0)
        self.note(SERVER, raised(self.co.join)[0], began)
        assert raised(self.co.schedule, self.plain)[0] == raised(self.count.numpy)[0] == "UnavailableError"
        self.cluster.start("ps", 0)
        self.cluster.wait_until_up("ps", 0)
        self.cluster.use()
        self.use()

    def coordinator(self) -> None:
        """Kills another coordinator of the same tasks."""
        other = self.cluster.start_coordinator()
        began = time.monotonic()
        other.kill()
        other.wait()
        assert self.cluster.line("ps", 0) == "forgotten, 1 left"
        self.note(COORDINATOR, "its variables are gone", began)
        self.co.schedule(self.plain).fetch()
        self.expected += 1


def counter(closures: int) -> None:
    """Counts with many closures, while a worker is killed twice."""
    with Cluster(workers=3, servers=1, processes=True) as cluster:
        co = cluster.coordinator
        count, step = counting(cluster)
        began = time.monotonic()
        values = [co.schedule(step) for _ in range(closures)]
        for fraction in (5, 2):
            values[closures // fraction].fetch()
            cluster.restart("worker", 0)
        co.join()
        found = int(count.numpy())
        what = f"{'' if found == closures else 'WRONG: '}{closures} closures count {found}"
        seen[COUNTER].append((what, time.monotonic() - began))


def limit(case: str, slack: float) -> float | None:
    """Returns the seconds within which an injection has to be seen, on a machine that is busy with other things too."""
    within = WITHIN[case]
    return None if within is None else slack * (within + 1.0)


def table(slack: float) -> bool:
    """Prints what was seen; returns whether all of it was right, and soon enough."""
    print(f"{'injection':42} {'seen':40} runs  seconds: least  median  most  limit")
    good = True
    for case, found in seen.items():
        most = limit(case, slack)
        for what in dict.fromkeys(what for what, _ in found):
            seconds = sorted(each for other, each in found if other == what)
            least, middle, last = seconds[0], seconds[len(seconds) // 2], seconds[-1]
            late = most is not None and last > most
            good = good and not late and "WRONG" not in what
            text = "-" if most is None else f"{most:.1f}{' TOO LATE' if late else ''}"
            print(f"{case:42} {what:40} {len(seconds):4} {least:15.2f} {middle:7.2f} {last:5.2f}  {text}", flush=True)
    return good


def main() -> None:
    """Injects everything, and prints the table, also of what was seen before a failure."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("times", type=int, nargs="?", default=20)
    options.add_argument("--closures", type=int, default=10_000)
    options.add_argument("--slack", type=float, default=2.0, help="limits are so many times a second more (2)")
    chosen, good = options.parse_args(), False
    try:
        counter(chosen.closures)
        with Cluster(workers=2, servers=1, processes=True, hooks=HOOKS) as cluster:
            injections = Injections(cluster)
            for _ in range(chosen.times):
                injections.kill(signal.SIGKILL, BEFORE)
                injections.kill(signal.SIGKILL, AFTER)
                injections.kill(signal.SIGSTOP, STOPPED)
                injections.error()
                injections.large()
                injections.no_workers()
                injections.coordinator()
                injections.server()
    finally:
        good = table(chosen.slack)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
