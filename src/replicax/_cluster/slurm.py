"""A resolver for the steps of a Slurm job."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Mapping

from replicax._cluster import local_processes
from replicax._cluster.explain import Explanation
from replicax._cluster.resolver import TaskClusterResolver
from replicax._cluster.spec import ClusterSpec
from replicax._job.channel import join_address

_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")


def expand_hosts(text: str) -> list[str]:
    """Expands Slurm's list of hosts, `n[1-3,07],m9`, to a list of names.

    >>> expand_hosts("n[08-10,12]-ib,m9")
    ['n08-ib', 'n09-ib', 'n10-ib', 'n12-ib', 'm9']
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:\[[^\[\]]*\]|[^,\[\]])+", text):
        # Every second piece stands in brackets.
        pieces = re.split(r"\[([^\]]*)\]", part)
        choices = [_range(piece, text) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        hosts += ["".join(choice) for choice in itertools.product(*choices)]
    if not hosts or not re.fullmatch(r"(\[[^\[\]]+\]|[^,\[\]]+)+(,(\[[^\[\]]+\]|[^,\[\]]+)+)*", text):
        raise ValueError(f"A list of hosts looks like n[1-3,7],m9; got {text!r}.")
    return hosts


def _range(text: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        if not (match := re.fullmatch(r"(\d+)(?:-(\d+))?", part)):
            raise ValueError(f"A list of hosts looks like n[1-3,7],m9; got {whole!r}, in which [{text}] does not.")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def expand_counts(text: str) -> list[int]:
    """Expands Slurm's tasks of each node, `2(x3),1`, to a list.

    >>> expand_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        if not (match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)):
            raise ValueError(f"The tasks of each node look like 2(x3),1; got {text!r}, in which {part!r} does not.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _variable(name: str) -> str:
    if name not in os.environ:
        raise RuntimeError(f"{name} not found in environment. Not running inside a SLURM step?")
    return os.environ[name]


def _number(name: str) -> int:
    text = _variable(name)
    if not text.isdecimal():
        raise RuntimeError(f"{name} must be a number; got {text!r}.")
    return int(text)


def _visible_gpus() -> list[str] | None:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names; None where it is not set."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    return [] if text in ("-1", "NoDevFiles") else [part.strip() for part in text.split(",") if part.strip()]


def _gpus_on_node() -> int | None:
    """Returns how many GPUs Slurm has given to the step on this node; None where it does not say."""
    if os.environ.get("SLURM_GPUS_ON_NODE", "").isdecimal():
        return int(os.environ["SLURM_GPUS_ON_NODE"])
    return len(text.split(",")) if (text := os.environ.get("SLURM_STEP_GPUS")) else None


def _count_gpus() -> int:
    """Returns the number of GPUs that the driver knows of."""
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


class SlurmClusterResolver(TaskClusterResolver):
    """A resolver for a step of a Slurm job, as `srun` starts it. It reads the environment when it is made.

    Hosts are taken in the order of their names, n2 before n10, and the tasks of a host get ports of their own.

    Args:
        jobs: how many tasks each job has, in the order of the jobs' names; by default all are `worker`.
        port_base: the port of the first task of each host.
        gpus_per_node: by default, what Slurm or the driver says.
        gpus_per_task: by default, those of a node divided among its tasks.
        tasks_per_node: a number, or a dict of them by host; by default what Slurm says.
        auto_set_gpu: whether `cluster_spec` sets CUDA_VISIBLE_DEVICES to this task's share, unless Slurm has done so.
            That counts only before JAX starts its backend.
        rpc_layer: what `master` puts in front.

    Raises:
        RuntimeError: a variable that srun sets is not there, or jobs and tasks or GPUs and tasks do not add up.
        ValueError: a list of Slurm's that does not read as one.

    >>> import os
    >>> from unittest import mock
    >>> import replicax as rx
    >>> step = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "n[1-2]"}
    >>> with mock.patch.dict(os.environ, step, SLURM_STEP_TASKS_PER_NODE="2,1", CUDA_VISIBLE_DEVICES=""):
    ...     resolver = rx.cluster_resolver.SlurmClusterResolver()
    >>> resolver.cluster_spec(), resolver.get_task_info()
    (ClusterSpec({'worker': ['n1:8888', 'n1:8889', 'n2:8888']}), ('worker', 2))
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str = "grpc",
    ):
        self._rank = _number("SLURM_PROCID")
        self._auto_set_gpu, self._rpc_layer = auto_set_gpu, rpc_layer
        jobs = {"worker": _number("SLURM_STEP_NUM_TASKS")} if jobs is None else jobs
        hosts = _tasks_by_host(tasks_per_node)
        tasks = [
            (host, index) for host in sorted(hosts, key=local_processes.natural) for index in range(hosts[host])
        ]  # in the order of ranks
        if sum(jobs.values()) != len(tasks):
            raise RuntimeError(f"Requested {sum(jobs.values())} tasks but only {len(tasks)} were assigned.")
        queue = iter(tasks)
        self._placed = {job: list(itertools.islice(queue, count)) for job, count in sorted(jobs.items())}
        self._addresses = {
            job: [join_address(host, port_base + index) for host, index in placed]
            for job, placed in self._placed.items()
        }
        ranks = [(job, index) for job, placed in self._placed.items() for index in range(len(placed))]
        if self._rank < len(ranks):
            self._task_type, self._task_id = ranks[self._rank]
        most = max(hosts.values())
        self._gpus, self._gpus_per_task = _share(gpus_per_node, gpus_per_task, most, tasks[self._rank : self._rank + 1])

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the step. Sets CUDA_VISIBLE_DEVICES to this task's GPUs, if that was asked for.

        >>> import os
        >>> from unittest import mock
        >>> import replicax as rx
        >>> step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
        >>> with mock.patch.dict(os.environ, step, SLURM_STEP_TASKS_PER_NODE="1(x2)", CUDA_VISIBLE_DEVICES=""):
        ...     rx.cluster_resolver.SlurmClusterResolver(port_base=9000).cluster_spec()
        ClusterSpec({'worker': ['n1:9000', 'n2:9000']})
        """
        if self._auto_set_gpu and self._gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus)
        return ClusterSpec(self._addresses)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns the job of this process, and its index.

        >>> import os
        >>> from unittest import mock
        >>> import replicax as rx
        >>> step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
        >>> with mock.patch.dict(os.environ, step, SLURM_STEP_TASKS_PER_NODE="1(x2)", CUDA_VISIBLE_DEVICES=""):
        ...     rx.cluster_resolver.SlurmClusterResolver().get_task_info()
        ('worker', 1)
        """
        return self.task_type, self.task_id

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> Mapping[str, int]:
        """Returns the GPUs of each task; the arguments are not used.

        >>> import os
        >>> from unittest import mock
        >>> import replicax as rx
        >>> step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
        >>> with mock.patch.dict(os.environ, step, SLURM_STEP_TASKS_PER_NODE="1(x2)", CUDA_VISIBLE_DEVICES="0,1"):
        ...     rx.cluster_resolver.SlurmClusterResolver().num_accelerators()
        {'GPU': 2}
        """
        return {"GPU": self._gpus_per_task}

    def _describe(self, report: Explanation) -> None:
        given = [name for name in _VARIABLES if name in os.environ]
        report.found += [f"{name}={os.environ[name]} in the environment" for name in given]
        report.found.append(f"GPUs of each task: {self._gpus_per_task}")
        count = sum(map(len, self._placed.values()))
        if self._task_type is None:
            report.contradictions.append(f"SLURM_PROCID is {self._rank}, but the last task has rank {count - 1}")
            return
        counted = os.environ.get("SLURM_STEP_NUM_TASKS", "")
        if counted.isdecimal() and int(counted) != count:
            report.contradictions.append(f"SLURM_STEP_NUM_TASKS is {counted}, but the cluster has {count} tasks")
        (host, index), node = self._placed[self._task_type][self._task_id or 0], os.environ.get("SLURMD_NODENAME")
        if node is not None and node != host:
            report.contradictions.append(
                f"SLURMD_NODENAME is {node}, but rank {self._rank} was given to {host}: tasks are taken to fill one "
                "node after the other, as `srun --distribution=block` places them"
            )
        local = os.environ.get("SLURM_LOCALID", "")
        if node == host and local.isdecimal() and int(local) != index:
            report.contradictions.append(f"SLURM_LOCALID is {local}, but rank {self._rank} was taken to be {index}")


def _tasks_by_host(given: int | Mapping[str, int] | None) -> Mapping[str, int]:
    if isinstance(given, Mapping):
        return given
    hosts = expand_hosts(_variable("SLURM_STEP_NODELIST"))
    if given is not None:
        return dict.fromkeys(hosts, int(given))
    counts = expand_counts(_variable("SLURM_STEP_TASKS_PER_NODE"))
    if len(counts) != len(hosts):
        raise RuntimeError(
            f"SLURM_STEP_NODELIST has {len(hosts)} hosts ({os.environ['SLURM_STEP_NODELIST']}), but "
            f"SLURM_STEP_TASKS_PER_NODE is for {len(counts)} ({os.environ['SLURM_STEP_TASKS_PER_NODE']})."
        )
    return dict(zip(hosts, counts))


def _share(per_node: int | None, per_task: int | None, most: int, own: list[tuple[str, int]]) -> tuple[list[str], int]:
    """Returns the GPUs to make visible to this task (none: leave it as it is), and the number of each task."""
    visible = _visible_gpus()
    if per_node is None:
        on_node = _gpus_on_node()
        if visible is not None and on_node is not None and 0 < len(visible) < on_node:
            return [], len(visible) if per_task is None else per_task  # Slurm has given each task its own
        per_node = len(visible) if visible is not None else on_node if on_node is not None else _count_gpus()
    per_task = per_node // most if per_task is None else per_task
    if most * per_task > per_node:
        raise RuntimeError(
            f"Requested more GPUs per node than available: {most} tasks with {per_task} GPUs each, on {per_node} GPUs."
        )
    names = visible if visible and len(visible) == per_node else [str(number) for number in range(per_node)]
    return [gpu for _, index in own for gpu in names[index * per_task : (index + 1) * per_task]], per_task
