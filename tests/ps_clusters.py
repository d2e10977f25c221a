"""Clusters with parameter servers, for programs of tests: tasks in the program's process, or each in one of its own.

A program uses it with `ENVIRONMENT`:

    run_python('''
        from ps_clusters import Cluster
        with Cluster(workers=2, servers=1, processes=True) as cluster:
            ...
    ''', env=ENVIRONMENT)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from processes import free_ports

import replicax as rx
from replicax.coordinator import ClusterCoordinator, Server

ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parent), "REPLICAX_START_TIMEOUT": "60"}

_TASK = """
import sys, json
from replicax.coordinator import Server
exec(sys.argv[4])
server = Server(json.loads(sys.argv[1]), job_name=sys.argv[2], task_index=int(sys.argv[3]), protocol="grpc")
print("up", flush=True)
server.join()
"""


def addresses(workers: int, servers: int) -> dict[str, list[str]]:
    """Returns a cluster at free ports of this machine."""
    ports = [f"127.0.0.1:{port}" for port in free_ports(workers + servers)]
    return {"worker": ports[:workers], "ps": ports[workers:]}


class Cluster:
    """A cluster, with the strategy and the coordinator in this process.

    Args:
        workers, servers: how many tasks there are.
        processes: whether each is in a process of its own.
        partitioner: the strategy's.
        env: is laid over the environment of the tasks.
        hooks: Python code that tasks run before they begin, by their jobs. What it prints comes out of `line`.
    """

    def __init__(
        self,
        workers: int = 2,
        servers: int = 1,
        processes: bool = False,
        partitioner: Callable[..., Sequence[int]] | None = None,
        env: Mapping[str, str] | None = None,
        hooks: Mapping[str, str] | None = None,
    ):
        self.spec = addresses(workers, servers)
        self._hooks = hooks or {}
        self._env = {**os.environ, "JAX_PLATFORMS": "cpu", **(env or {})}
        self.tasks: dict[tuple[str, int], subprocess.Popen[str]] = {}
        self._local: list[Server] = []
        names = [(job, index) for job, tasks in self.spec.items() for index in range(len(tasks))]
        if processes:
            for job, index in names:
                self.start(job, index)
            for name in names:
                self.wait_until_up(*name)
        else:
            self._local = [Server(self.spec, job_name=job, task_index=index) for job, index in names]
        resolver = rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec(self.spec), rpc_layer="grpc")
        self.strategy = rx.ParameterServerStrategy(resolver, partitioner)
        self.coordinator = ClusterCoordinator(self.strategy)

    def start(self, job: str, index: int) -> None:
        """Starts a task in a process."""
        hook = textwrap.dedent(self._hooks.get(job, ""))
        command = [sys.executable, "-c", _TASK, json.dumps(self.spec), job, str(index), hook]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.tasks[job, index] = subprocess.Popen(command, text=True, env=self._env, **pipes)

    def wait_until_up(self, job: str, index: int) -> None:
        """Waits until a task that was started listens."""
        assert self.line(job, index) == "up"

    def line(self, job: str, index: int) -> str:
        """Returns the next line that a task prints, waiting for it; an empty one when it has ended."""
        output = self.tasks[job, index].stdout
        assert output is not None
        return output.readline().rstrip("\n")

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

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.strategy._cluster.close()
        for task in self.tasks.values():
            task.kill()
            task.wait()
        for server in self._local:
            server._service.stop()
