"""Injects faults into clusters with parameter servers, many times each, and prints what was seen and how soon.

python scripts/parameter_servers.py [TIMES [CLOSURES]]

Before that, CLOSURES functions (10,000) increment a counter on three workers, one of which is killed twice.
"""

from __future__ import annotations

import collections
import os
import selectors
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

TIMEOUT = "8"  # seconds without workers
os.environ.update(JAX_PLATFORMS="cpu", REPLICAX_START_TIMEOUT="60")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np  # noqa: E402
from ps_clusters import Cluster  # noqa: E402

import replicax as rx  # noqa: E402
from replicax.coordinator import ClusterCoordinator, experimental_get_current_worker_index  # noqa: E402

# A worker waits for a line of input before it updates for a function "held", and after that for one "answered".
WORKER = """
    import sys
    from replicax._parameter_server import execution
    real = execution.update
    def update(plan, *args):
        waits = "held" in plan.key or "answered" in plan.key
        def wait(name):
            print(name, flush=True)
            assert sys.stdin.readline()
        if waits:
            wait("updates")
        found = real(plan, *args)
        if "answered" in plan.key:
            wait("updated")
        return found
    execution.update = update
"""
SERVER = """
    from replicax._parameter_server.parameter_server import ParameterServer
    forget = ParameterServer._forget
    def forgets(self, owner):
        forget(self, owner)
        print("forgotten", flush=True)
    ParameterServer._forget = forgets
"""
HOOKS = {"worker": WORKER, "ps": SERVER}

COORDINATOR = """
    import json, sys
    import replicax as rx
    from replicax.coordinator import ClusterCoordinator
    resolver = rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec(json.loads(sys.argv[1])), rpc_layer="grpc")
    strategy = rx.ParameterServerStrategy(resolver)
    with strategy.scope():
        count = rx.Variable(0)
    co = ClusterCoordinator(strategy)
    step = rx.function(lambda: count.assign_add(1))
    co.schedule(step).fetch()
    print("up", flush=True)
    for _ in range(100_000):
        co.schedule(step)
    co.join()
"""

seen: dict[str, list[tuple[str, float]]] = collections.defaultdict(list)


class Injections:
    """Faults of a cluster with two workers that lives on."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.use(cluster.strategy)

    def use(self, strategy: rx.ParameterServerStrategy) -> None:
        """Counts on the servers of this strategy from now on."""
        self.co = ClusterCoordinator(strategy)
        with strategy.scope():
            count = self.count = rx.Variable(0)

        def held():
            return count.assign_add(1)

        def answered():
            return count.assign_add(1)

        def plain():
            return count.assign_add(1)

        self.held, self.answered, self.plain = rx.function(held), rx.function(answered), rx.function(plain)
        self.expected = 0

    def on_worker(self) -> tuple[int, int]:
        """Returns which of the two workers has come to an update, and the other."""
        with selectors.DefaultSelector() as selector:
            for index in range(2):
                selector.register(self.cluster.tasks["worker", index].stdout, selectors.EVENT_READ, index)
            (key, _), *_ = selector.select()
        assert self.cluster.line("worker", key.data) == "updates"
        return key.data, 1 - key.data

    def note(self, case: str, what: str, began: float) -> None:
        """Notes what was seen, so many seconds after an injection."""
        seen[case].append((what, time.monotonic() - began))

    def counted(self) -> str:
        """Returns whether the counter is as it must be after one more closure."""
        self.expected += 1
        found = int(self.count.numpy())
        return "ran once" if found == self.expected else f"WRONG: {found} for {self.expected}"

    def wait_for_workers(self) -> None:
        """Waits until both workers are used."""
        index = rx.function(lambda: experimental_get_current_worker_index() + 0)
        while len({int(value.fetch()) for value in [self.co.schedule(index) for _ in range(4)]}) < 2:
            pass

    def kill(self, function: object, number: int, case: str) -> None:
        """Kills or stops a worker that is about to update, or has just done so."""
        value = self.co.schedule(function)
        one, other = self.on_worker()
        if function is self.answered:
            self.cluster.say("worker", one)
            assert self.cluster.line("worker", one) == "updated"
        began = time.monotonic()
        self.cluster.kill("worker", one, number)
        assert self.cluster.line("worker", other) == "updates"
        again = time.monotonic()
        self.cluster.say("worker", other)
        if function is self.answered:
            assert self.cluster.line("worker", other) == "updated"
            self.cluster.say("worker", other)
        value.fetch()
        self.co.join()
        what = self.counted()
        if number == signal.SIGSTOP:
            self.cluster.say("worker", one)
            self.cluster.kill("worker", one, signal.SIGCONT)
            self.wait_for_workers()
            what += ", not by the one that woke" if int(self.count.numpy()) == self.expected else ", WRONG after waking"
        seen[case].append((what, again - began))
        if number == signal.SIGKILL:
            self.cluster.start("worker", one)
            self.cluster.wait_until_up("worker", one)
            began = time.monotonic()
            self.wait_for_workers()
            self.note("a worker is back at its address", "used again", began)

    def error(self) -> None:
        """Has a closure fail, and a dataset end."""
        import replicax.tf as tf

        @tf.function
        def bad(x):
            tf.debugging.assert_equal(x, 2)

        def empty():
            return rx.data.Dataset.range(0)

        for case, function, argument in (
            ("an exception in a closure", bad, tf.constant(1)),
            ("the end of a dataset", rx.function(lambda it: next(it)), iter(self.co.create_per_worker_dataset(empty))),
        ):
            began = time.monotonic()
            what = raised(self.co.schedule(function, args=(argument,)).fetch)
            self.note(case, what, began)
            assert raised(self.co.join) == what
            self.co.schedule(self.plain).fetch()
            self.expected += 1

    def large(self) -> None:
        """Writes a variable of 100 MB, and has a worker return it."""
        with self.co.strategy.scope():
            variable = rx.Variable(np.zeros(25_000_000, "f4"))
        began = time.monotonic()
        found = self.co.schedule(rx.function(lambda: variable.value() + 1)).fetch()
        self.note("a result of 100 MB", "came" if found.sum() == 25e6 else "WRONG", began)

    def no_workers(self) -> None:
        """Kills all workers, and starts them again."""
        began = time.monotonic()
        for index in range(2):
            self.cluster.kill("worker", index)
        value = self.co.schedule(self.plain)
        self.co._queue._timeout = float(TIMEOUT)
        self.note(f"all workers are gone (time-out {TIMEOUT} s)", raised(self.co.join), began)
        self.co._queue._timeout = 60.0
        for index in range(2):
            self.cluster.start("worker", index)
        for index in range(2):
            self.cluster.wait_until_up("worker", index)
        value.fetch()
        self.co.join()
        self.expected += 1
        self.wait_for_workers()

    def server(self) -> None:
        """Kills the parameter server while closures run, and goes on with a new strategy."""
        for _ in range(1000):
            self.co.schedule(self.plain)
        began = time.monotonic()
        self.cluster.kill("ps", 0)
        self.note("the parameter server is killed: join", raised(self.co.join), began)
        assert raised(self.co.schedule, self.plain) == raised(self.count.numpy) == "UnavailableError"
        old = self.co.strategy
        self.cluster.start("ps", 0)
        self.cluster.wait_until_up("ps", 0)
        old._cluster.close()
        self.use(rx.ParameterServerStrategy(old.cluster_resolver))
        self.wait_for_workers()

    def coordinator(self) -> None:
        """Kills another coordinator of the same tasks."""
        import json

        command = [sys.executable, "-c", textwrap.dedent(COORDINATOR), json.dumps(self.cluster.spec)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            began = time.monotonic()
            other.kill()
            assert self.cluster.line("ps", 0) == "forgotten"
            self.note("a coordinator is killed", "its variables are gone", began)
        self.co.schedule(self.plain).fetch()
        self.expected += 1


def raised(function: Callable[..., object], *args: object) -> str:
    """Returns the type of the exception that a call raises."""
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__
    return "nothing"


def counter(closures: int) -> None:
    """Counts with many closures, while a worker is killed twice."""
    with Cluster(workers=3, servers=1, processes=True) as cluster:
        co = cluster.coordinator
        with cluster.strategy.scope():
            count = rx.Variable(0)
        step = rx.function(lambda: count.assign_add(1))
        began = time.monotonic()
        values = [co.schedule(step) for _ in range(closures)]
        for fraction in (5, 2):
            values[closures // fraction].fetch()
            cluster.restart("worker", 0)
        co.join()
        found = int(count.numpy())
        what = f"{'' if found == closures else 'WRONG: '}the counter is {found}"
        seen[f"{closures} closures, a worker killed twice"].append((what, time.monotonic() - began))


def table() -> None:
    """Prints what was seen."""
    print(f"{'injection':42} {'seen':40} runs  seconds: least  median  most")
    for case, found in seen.items():
        for what in dict.fromkeys(what for what, _ in found):
            seconds = sorted(each for other, each in found if other == what)
            least, middle, most = seconds[0], seconds[len(seconds) // 2], seconds[-1]
            print(f"{case:42} {what:40} {len(seconds):4} {least:15.2f} {middle:7.2f} {most:5.2f}", flush=True)


def main() -> None:
    """Inject everything, and print the table, also of what was seen before a failure."""
    times, closures = (int(text) for text in (sys.argv[1:] + ["20", "10000"][len(sys.argv) - 1 :])[:2])
    try:
        counter(closures)
        with Cluster(workers=2, servers=1, processes=True, hooks=HOOKS) as cluster:
            injections = Injections(cluster)
            injections.wait_for_workers()
            for _ in range(times):
                injections.kill(injections.held, signal.SIGKILL, "a worker is killed before its update")
                injections.kill(injections.answered, signal.SIGKILL, "... after its update, before its answer")
                injections.kill(injections.held, signal.SIGSTOP, "a worker is stopped, and wakes up later")
                injections.error()
                injections.large()
                injections.no_workers()
                injections.coordinator()
                injections.server()
    finally:
        table()
    raise SystemExit(any("WRONG" in what for found in seen.values() for what, _ in found))


if __name__ == "__main__":
    main()
