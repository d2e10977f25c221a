"""Clusters with parameter servers, for programs of tests: tasks in the program's process, or each in one of its own.

A program uses it with `ENVIRONMENT`:

    run_well('''
        with Cluster(workers=2, servers=1, processes=True) as cluster:
            ...
    ''', head=HEAD, env=ENVIRONMENT)

`run_here` runs programs whose tasks are in the same process in that of pytest, which is much quicker.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

import jax
import numpy as np
from processes import free_ports
from tasks import PYTHONPATH, forked

import replicax as rx
from replicax._base.jax_internals import backend_started
from replicax._parameter_server.parameter_server import ParameterServer
from replicax._parameter_server.worker import Worker
from replicax._transport.handlers import Answer
from replicax.coordinator import ClusterCoordinator, Server, experimental_get_current_worker_index

ENVIRONMENT = {"PYTHONPATH": PYTHONPATH, "REPLICAX_START_TIMEOUT": "60", "REPLICAX_HEARTBEAT_TIMEOUT": "5"}

# Before programs: the names that they use.
HEAD = """
    import gc, os, signal, threading, weakref
    import jax, jax.numpy as jnp, numpy as np
    import replicax as rx
    from ps_clusters import FORGETS, UPDATES, Blocked, Cluster, checks, counting, moved, raised
    from replicax.coordinator import ClusterCoordinator, experimental_get_current_worker_index
"""

_TASK = """
import sys, json
from replicax.coordinator import Server
exec(sys.argv[4])
server = Server(json.loads(sys.argv[1]), job_name=sys.argv[2], task_index=int(sys.argv[3]), protocol="grpc")
print("up", flush=True)
server.join()
"""

# Workers that say when they are about to update for a function named "watched", and when they have; each time a line of
# input lets them go on.
UPDATES = """
    import sys
    from replicax._parameter_server import execution
    real = execution.update
    def update(plan, *args):
        if "watched" not in plan.key:
            return real(plan, *args)
        print("updates", flush=True)
        assert sys.stdin.readline()
        try:
            found = real(plan, *args)
        except Exception as error:
            print(f"failed: {error}", flush=True)
            raise
        print("updated", flush=True)
        assert sys.stdin.readline()
        return found
    execution.update = update
"""

# Parameter servers that say how many coordinators they still know, when they have forgotten one.
FORGETS = """
    from replicax._parameter_server.parameter_server import ParameterServer
    forget = ParameterServer._forget
    def forgets(self, owner):
        forget(self, owner)
        print(f"forgotten, {len(self._owners)} left", flush=True)
    ParameterServer._forget = forgets
"""

_COORDINATOR = """
import json, sys
import replicax as rx
from replicax.coordinator import ClusterCoordinator
resolver = rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec(json.loads(sys.argv[1])), rpc_layer="grpc")
strategy = rx.ParameterServerStrategy(resolver)
with strategy.scope():
    count = rx.Variable(0)
coordinator = ClusterCoordinator(strategy)
step = rx.function(lambda: count.assign_add(1))
coordinator.schedule(step).fetch()
print("up", flush=True)
for _ in range(100_000):
    coordinator.schedule(step)
coordinator.join()
"""


def addresses(workers: int, servers: int) -> dict[str, list[str]]:
    """Returns a cluster at free ports of this machine."""
    ports = [f"127.0.0.1:{port}" for port in free_ports(workers + servers)]
    return {"worker": ports[:workers], "ps": ports[workers:]}


class _Forked:
    """A process that was forked from this one and runs a program when it is told; of `Popen`, what tests need."""

    def __init__(self) -> None:
        (given, writing), (reading, printed) = os.pipe(), os.pipe()

        def run() -> None:
            os.dup2(given, 0), os.dup2(printed, 1)
            os.close(writing), os.close(reading)
            sys.stdin = os.fdopen(0)
            if told := sys.stdin.readline():
                program, arguments, env = json.loads(told)
                os.environ.clear()
                os.environ.update(env)
                sys.argv = ["", *arguments]
                exec(program, {"__name__": "__main__"})

        self.pid, self._has_ended = forked(run, {}), False
        os.close(given), os.close(printed)
        self.stdin, self.stdout = os.fdopen(writing, "w"), os.fdopen(reading)

    def begin(self, program: str, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        """Has it run a program with these arguments, in this environment."""
        print(json.dumps([program, arguments, dict(env)]), file=self.stdin, flush=True)

    def poll(self) -> int | None:
        if not self._has_ended and os.waitpid(self.pid, os.WNOHANG)[0]:
            self._has_ended = True
        return 0 if self._has_ended else None

    def send_signal(self, number: int) -> None:
        if not self._has_ended:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        if not self._has_ended:
            os.waitpid(self.pid, 0)
            self._has_ended = True


class Cluster:
    """A cluster, with the strategy and the coordinator in this process.

    Args:
        workers, servers: how many tasks there are.
        processes: whether each is in a process of its own. It is forked from this one, where that uses neither devices
            nor gRPC yet.
        partitioner: the strategy's.
        env: is laid over the environment of the tasks.
        hooks: Python code that tasks run before they begin, by their jobs. What it prints comes out of `line`.
        spares: how many processes are forked for what is started later.
        of: a cluster whose first tasks it has, in place of tasks of its own. They live on when it ends, and those that
            have ended are started again.
    """

    def __init__(
        self,
        workers: int = 2,
        servers: int = 1,
        processes: bool = False,
        partitioner: Callable[..., Sequence[int]] | None = None,
        env: Mapping[str, str] | None = None,
        hooks: Mapping[str, str] | None = None,
        spares: int = 3,
        of: Cluster | None = None,
    ):
        counts = {"worker": workers, "ps": servers}
        self.spec = {job: of.spec[job][:count] for job, count in counts.items()} if of else addresses(workers, servers)
        self._env = {**os.environ, "JAX_PLATFORMS": "cpu", **(env or {})}
        self._hooks, self._spares, self._of = hooks or {}, spares, of
        self._spare: list[_Forked] = []
        self.tasks: dict[tuple[str, int], _Forked | subprocess.Popen[str]] = {}
        if of:
            self._hooks, self._spare, self.tasks = of._hooks, of._spare, of.tasks
        self._local: list[Server] = []
        self.strategy: rx.ParameterServerStrategy | None = None
        try:
            if of is None:
                self._begin(processes)
            self.use(partitioner)
        except BaseException:
            self.close()
            raise

    def _begin(self, processes: bool) -> None:
        names = [(job, index) for job, tasks in self.spec.items() for index in range(len(tasks))]
        if processes:
            if "grpc" not in sys.modules and not backend_started():
                self._spare += (_Forked() for _ in range(len(names) + self._spares))
            for job, index in names:
                self.start(job, index)
            for name in names:
                self.wait_until_up(*name)
        else:
            self._local += (Server(self.spec, job_name=job, task_index=index) for job, index in names)

    def use(self, partitioner: Callable[..., Sequence[int]] | None = None) -> None:
        """Makes a strategy and its coordinator, in place of those that there were."""
        if self.strategy is not None:
            self.strategy._cluster.close()
        resolver = rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec(self.spec), rpc_layer="grpc")
        self.strategy = rx.ParameterServerStrategy(resolver, partitioner)
        self.coordinator = ClusterCoordinator(self.strategy)

    def start_coordinator(self) -> _Forked | subprocess.Popen[str]:
        """Starts another coordinator of the tasks in a process, and waits until it has scheduled functions."""
        started = self._started(_COORDINATOR, [json.dumps(self.spec)])
        assert started.stdout is not None and started.stdout.readline() == "up\n"
        return started

    def patience(self, seconds: float) -> None:
        """Has the coordinator wait so long without any worker, from the next wait on."""
        self.coordinator._queue._workers.timeout = seconds

    def wait_for_workers(self, count: int) -> None:
        """Waits until so many workers run functions."""
        index = rx.function(lambda: experimental_get_current_worker_index() + 0)
        seen: set[int] = set()
        while len(seen) < count:
            values = [self.coordinator.schedule(index) for _ in range(2 * count)]
            seen = {int(value.fetch()) for value in values}

    def start(self, job: str, index: int) -> None:
        """Starts a task in a process."""
        hook = textwrap.dedent(self._hooks.get(job, ""))
        arguments = [json.dumps(self.spec), job, str(index), hook]
        self.tasks[job, index] = self._started(_TASK, arguments)

    def _started(self, program: str, arguments: Sequence[str]) -> _Forked | subprocess.Popen[str]:
        if self._spare:
            process = self._spare.pop()
            process.begin(program, arguments, self._env)
            return process
        command, pipe = [sys.executable, "-c", program, *arguments], subprocess.PIPE
        return subprocess.Popen(command, text=True, env=self._env, stdin=pipe, stdout=pipe)

    def local(self, job: str) -> list[ParameterServer | Worker]:
        """Returns the tasks of a job that are in this process."""
        kind = {"worker": Worker, "ps": ParameterServer}[job]
        servers = [server for server in self._local if server.server_def.job_name == job]
        return [task for server in servers for task in server._tasks if type(task) is kind]

    def wait_until_up(self, job: str, index: int) -> None:
        """Waits until a task that was started listens."""
        assert self.line(job, index) == "up"

    def line(self, job: str, index: int) -> str:
        """Returns the next line that a task prints, waiting for it; an empty one when it has ended."""
        output = self.tasks[job, index].stdout
        assert output is not None
        return output.readline().rstrip("\n")

    def first_to_speak(self) -> tuple[int, int]:
        """Waits until one of two workers has printed something; returns its index and the other one's."""
        with selectors.DefaultSelector() as selector:
            for index in range(2):
                output = self.tasks["worker", index].stdout
                assert output is not None
                selector.register(output, selectors.EVENT_READ, index)
            (key, _), *_ = selector.select()
        return key.data, 1 - key.data

    def say(self, job: str, index: int, line: str = "go") -> None:
        """Writes a line to a task's input."""
        given = self.tasks[job, index].stdin
        assert given is not None
        given.write(line + "\n")
        given.flush()

    def kill(self, job: str, index: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a task; waits for the end if it is SIGKILL."""
        self.tasks[job, index].send_signal(number)
        if number == signal.SIGKILL:
            self.tasks[job, index].wait()

    def restart(self, job: str, index: int) -> None:
        """Kills a task and starts it again at the same address."""
        self.kill(job, index)
        self.start(job, index)
        self.wait_until_up(job, index)

    def _start_what_has_ended(self) -> None:
        ended = [name for name, task in self.tasks.items() if task.poll() is not None]
        for name in ended:
            self.start(*name)
        for name in ended:
            self.wait_until_up(*name)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the strategy and all tasks."""
        if self.strategy is not None:
            self.strategy._cluster.close()
        if self._of:
            return self._of._start_what_has_ended()
        for task in (*self.tasks.values(), *self._spare):
            task.kill()
            task.wait()
        for server in self._local:
            server._service.stop()


class Blocked:
    """Makes a dataset of ones on a worker in this process, which come when the program lets them.

    Attributes:
        begun: is set when an element is asked for.
        go: has it come when it is set.
    """

    def __init__(self, elements: int = 1):
        self.begun, self.go = threading.Event(), threading.Event()
        self._elements = elements

    def __call__(self) -> rx.data.Dataset:
        return rx.data.Dataset.from_generator(self._generate, output_signature=rx.TensorSpec([]))

    def _generate(self) -> Iterator[np.float32]:
        for _ in range(self._elements):
            self.begun.set()
            self.go.wait()
            yield np.float32(1)


def raised(function: Callable[..., object], *args: object, **kwargs: object) -> tuple[str, object, str]:
    """Returns the type, the text and the notes of the exception that a call raises; else "nothing" and its result."""
    try:
        return "nothing", function(*args, **kwargs), ""
    except Exception as error:
        return type(error).__name__, str(error), "".join(getattr(error, "__notes__", ()))


def counting(cluster: Cluster, value: int = 0) -> tuple[rx.Variable, Callable[[], object]]:
    """Returns a variable on the servers, and a function that adds 1 to it and returns the sum."""
    with cluster.strategy.scope():
        count = rx.Variable(value)

    @rx.function
    def step() -> object:
        count.assign_add(1)
        return count.read_value()

    return count, step


def checks(right: jax.Array, text: str = "It is not so.") -> None:
    """Has the function that is being traced fail where this is not true, as an assertion of TensorFlow does."""

    def check(right: np.ndarray) -> None:
        if not right:
            raise rx.InvalidArgumentError(text)

    jax.debug.callback(check, right)


def moved(cluster: Cluster, run: Callable[[], object]) -> int:
    """Returns the bytes of arrays that the only worker, in this process, exchanges with servers during a call."""
    (session,) = cluster.local("worker")[0]._sessions.values()
    found: list[int] = []

    def counted(call: Callable[..., Answer]) -> Callable[..., Answer]:
        def count(
            method: str, head: Mapping[str, object], arrays: Sequence[jax.Array] = (), **options: float
        ) -> Answer:
            answer, back = call(method, head, arrays, **options)
            found.extend(array.nbytes for array in (*arrays, *back))
            return answer, back

        return count

    peers = session.servers._peers
    for peer in peers:
        peer.call = counted(peer.call)
    try:
        run()
    finally:
        for peer in peers:
            del peer.call
    return sum(found)


def in_turn(programs: Mapping[str, str], head: str = HEAD, **options: object) -> str:
    """Returns a program that runs others one after the other, which saves the imports.

    Args:
        programs: by their names; in them `processes` says whether tasks are processes.
        head: what they begin with.
        options: of a cluster with tasks in processes, which all of them use; without any, each makes its own.
    """
    return textwrap.dedent(f"""
        import contextlib, functools, ps_clusters, textwrap
        head, options = textwrap.dedent({head!r}), {options!r}
        with ps_clusters.Cluster(processes=True, **options) if options else contextlib.nullcontext() as tasks:
            if options:
                ps_clusters.Cluster = functools.partial(ps_clusters.Cluster, of=tasks)
            for name, text in {dict(programs)!r}.items():
                print(name, flush=True)
                names = {{"__name__": name, "processes": bool(options)}}
                exec(compile(head + textwrap.dedent(text), name, "exec"), names)
    """)
