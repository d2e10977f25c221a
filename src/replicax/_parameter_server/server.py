"""`Server`: a task of a cluster with parameter servers, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replicax._base.errors import InternalError, NotFoundError
from replicax._base.messages import received
from replicax._cluster.spec import ClusterDef, ClusterSpec
from replicax._parameter_server.parameter_server import ParameterServer
from replicax._parameter_server.worker import Worker
from replicax._transport.service import Service


@dataclass
class ServerDef:
    """A task of a cluster.

    Args:
        cluster: the cluster.
        job_name, task_index: the task's job and its index in the job.
        protocol: `"grpc"`.
    """

    cluster: ClusterDef
    job_name: str
    task_index: int
    protocol: str = "grpc"


class Server:
    """A task of a cluster: a worker, which runs functions for a coordinator, or a parameter server.

    The server runs in threads of this process. The program of a task makes a server and calls `join`, which waits
    until the process ends. One process can run several servers, and the coordinator too.

    Args:
        server_or_cluster_def: a `ClusterSpec`, an argument for `ClusterSpec`, or a `ServerDef`.
        job_name, task_index: the task's job and its index in the job. Optional if the cluster has only one task.
        protocol: `"grpc"`.
        config: accepted for compatibility.
        start: whether the server starts immediately.

    Raises:
        ValueError: the cluster has several tasks, and `job_name` or `task_index` is missing.
        InternalError: the cluster does not have the job or the task.
        NotFoundError: the protocol is not `"grpc"`.
        JobError: other machines could reach the server, and the job has no secret. The message says how to make one.
        OSError: the server cannot listen at the address.

    >>> from replicax.coordinator import Server
    >>> Server.create_local_server(start=False).server_def.job_name
    'localhost'
    """

    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: object = None,
        start: bool = True,
    ):
        self._def = _server_def(server_or_cluster_def, job_name, task_index, protocol)
        spec = ClusterSpec(self._def.cluster)
        job = [address for name in spec.jobs for address in spec.job_tasks(name) if address is not None]
        address = spec.task_address(self._def.job_name, self._def.task_index)
        self._tasks = ParameterServer(), Worker()
        methods = {name: method for task in self._tasks for name, method in task.methods().items()}
        name = f"{self._def.job_name} {self._def.task_index}"
        self._service = Service(address, methods, job=job, name=name, unpickles=True)
        self._started = False
        if start:
            self.start()

    @property
    def server_def(self) -> ServerDef:
        """The task.

        >>> from replicax.coordinator import Server
        >>> server = Server({"worker": ["localhost:0"]}, start=False)
        >>> server.server_def.job_name, server.server_def.task_index
        ('worker', 0)
        """
        return self._def

    @property
    def target(self) -> str:
        """The address with the prefix `grpc://`; for port 0, with the free port that the server took.

        >>> from replicax.coordinator import Server
        >>> Server({"worker": ["localhost:0"]}, start=False).target
        'grpc://localhost:...'
        """
        return f"grpc://{self._service.address}"

    def start(self) -> None:
        """Start the server, unless it runs already.

        >>> from replicax.coordinator import Server
        >>> server = Server.create_local_server(start=False)
        >>> server.start()
        """
        if not self._started:
            self._started = True
            self._service.start()

    def join(self) -> None:
        """Wait until the server stops. Only the end of the process stops it.

        >>> import threading
        >>> from replicax.coordinator import Server
        >>> server = Server.create_local_server()
        >>> waiting = threading.Thread(target=server.join, daemon=True)
        >>> waiting.start()
        >>> waiting.is_alive()
        True
        """
        self._service.wait()

    @staticmethod
    def create_local_server(config: object = None, start: bool = True) -> Server:
        """Return a server for a cluster of one task, at a free port of this machine.

        Args:
            config: accepted for compatibility.
            start: whether the server starts immediately.

        >>> from replicax.coordinator import Server
        >>> Server.create_local_server(start=False).server_def.task_index
        0
        """
        return Server({"localhost": ["localhost:0"]}, protocol="grpc", config=config, start=start)


def _server_def(definition: Any, job_name: str | None, task_index: int | None, protocol: str | None) -> ServerDef:
    """Check the arguments of `Server`, and return the task that they name."""
    cluster = definition
    if isinstance(definition, ServerDef):
        cluster = definition.cluster
        job_name = definition.job_name if job_name is None else job_name
        task_index = definition.task_index if task_index is None else task_index
        protocol = definition.protocol if protocol is None else protocol
    elif not isinstance(definition, (ClusterSpec, ClusterDef, Mapping)):
        raise TypeError(
            f"A Server is made of a ClusterSpec, a dict of jobs, or a ServerDef, got {received(definition)}."
        )
    spec = ClusterSpec(cluster)
    job_name = _only(spec.jobs, "job_name") if job_name is None else job_name
    if job_name not in spec.jobs:
        raise InternalError(f'Job "{job_name}" was not defined in cluster')
    tasks = spec.task_indices(job_name)
    task_index = _only(tasks, "task_index") if task_index is None else task_index
    if task_index not in tasks:
        raise InternalError(f'Task {task_index} was not defined in job "{job_name}"')
    if protocol not in (None, "grpc"):
        raise NotFoundError(
            f'No server factory registered for the given ServerDef: protocol is "{protocol}", not "grpc".'
        )
    return ServerDef(spec.as_cluster_def(), job_name, task_index)


def _only(names: Sequence[Any], argument: str) -> Any:
    """Return the only name; raise an error that asks for the argument if there are several."""
    if len(names) != 1:
        raise ValueError(f"Must specify an explicit `{argument}`.")
    return names[0]
