"""`ClusterSpec`: jobs, the tasks of each job, and the address of each task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass
class JobDef:
    """One job of a `ClusterDef`.

    Args:
        name: the job's name.
        tasks: the tasks' addresses by index.

    >>> JobDef("worker", {0: "a:1"}).tasks[0]
    'a:1'
    """

    name: str = ""
    tasks: dict[int, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class ClusterDef:
    """A cluster as plain data, as `ClusterSpec.as_cluster_def` gives it and `ClusterSpec` takes it.

    Args:
        job: the jobs.

    >>> ClusterSpec(ClusterDef([JobDef("worker", {0: "a:1"})]))
    ClusterSpec({'worker': ['a:1']})
    """

    job: list[JobDef] = dataclasses.field(default_factory=list)


class ClusterSpec:
    """The processes of a cluster: jobs of tasks with their addresses. An empty one is false.

    Args:
        cluster: a dict of job names, each to a list of addresses or to a dict of index to address; or another
            ClusterSpec, or a ClusterDef.

    Raises:
        TypeError: something of another type, or a name or an address that is not text.
        ValueError: two addresses for one index, or an index below zero.

    >>> import replicax as rx
    >>> cluster = rx.ClusterSpec({"worker": ["a:1", "b:2"], "ps": {3: "p:3"}})
    >>> cluster.task_address("worker", 1), cluster.num_tasks("ps"), cluster.jobs
    ('b:2', 1, ['worker', 'ps'])
    """

    _jobs: dict[str, dict[int, str]]

    def __init__(self, cluster: Any):
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        elif isinstance(cluster, ClusterDef):
            cluster = {job.name: job.tasks for job in cluster.job}
        elif not isinstance(cluster, Mapping):
            raise TypeError(
                "`cluster` must be a dictionary mapping one or more job names to lists of network addresses, or a "
                "`ClusterDef` protocol buffer"
            )
        self._jobs = {_text("Job name", name): _tasks(name, tasks) for name, tasks in cluster.items()}

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return self._jobs == (other._jobs if isinstance(other, ClusterSpec) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))})"

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order given.

        >>> import replicax as rx
        >>> rx.ClusterSpec({"worker": ["a:1", "b:2"], "ps": ["c:3"]}).jobs
        ['worker', 'ps']
        """
        return list(self._jobs)

    def as_dict(self) -> dict[str, Any]:
        """Returns the jobs as a dict: lists of addresses, or dicts of index to address where some are left out.

        >>> import replicax as rx
        >>> rx.ClusterSpec({"worker": {1: "b:2"}, "ps": ["c:3"]}).as_dict()
        {'worker': {1: 'b:2'}, 'ps': ['c:3']}
        """
        dense = {job: list(tasks) == list(range(len(tasks))) and bool(tasks) for job, tasks in self._jobs.items()}
        return {job: list(tasks.values()) if dense[job] else dict(tasks) for job, tasks in self._jobs.items()}

    def as_cluster_def(self) -> ClusterDef:
        """Returns the cluster as plain data, jobs sorted by name.

        >>> import replicax as rx
        >>> rx.ClusterSpec({"worker": ["a:1", "b:2"]}).as_cluster_def().job[0].tasks
        {0: 'a:1', 1: 'b:2'}
        """
        return ClusterDef([JobDef(name, dict(tasks)) for name, tasks in sorted(self._jobs.items())])

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of a job's tasks; `ValueError` if there is no such job.

        >>> import replicax as rx
        >>> rx.ClusterSpec({"worker": ["a:1", "b:2"]}).num_tasks("worker")
        2
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the indices of a job's tasks, in order; `ValueError` if there is no such job.

        >>> import replicax as rx
        >>> rx.ClusterSpec({"worker": {0: "a:1", 3: "d:4"}}).task_indices("worker")
        [0, 3]
        """
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of a task; `ValueError` if there is no such job, or no such task in it.

        >>> import replicax as rx
        >>> rx.ClusterSpec({"worker": ["a:1", "b:2"]}).task_address("worker", 1)
        'b:2'
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(f"No task with index {task_index!r} in job {job_name!r}")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of a job's tasks by index, None for one that is left out; `ValueError` for no job.

        >>> import replicax as rx
        >>> rx.ClusterSpec({"worker": {0: "a:1", 2: "c:3"}}).job_tasks("worker")
        ['a:1', None, 'c:3']
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _job(self, name: str) -> dict[int, str]:
        if name not in self._jobs:
            raise ValueError(f"No such job in cluster: {name!r}")
        return self._jobs[name]


def _text(what: str, value: Any) -> str:
    if not isinstance(value, (str, bytes)):
        raise TypeError(f"{what} {value!r} must be bytes or unicode")
    return value.decode() if isinstance(value, bytes) else value


def _tasks(job: Any, tasks: Any) -> dict[int, str]:
    """Returns the tasks of one job by index, in order."""
    if isinstance(tasks, (list, tuple)):
        tasks = dict(enumerate(tasks))
    if not isinstance(tasks, Mapping):
        raise TypeError(f"The tasks for job {job!r} must be a list or a dictionary from integers to strings.")
    found: dict[int, str] = {}
    for key, address in tasks.items():
        try:
            index = int(key)
        except (TypeError, ValueError):
            raise TypeError(f"The tasks of job {job!r} have integers for indices; got {key!r}.") from None
        if index < 0:
            raise ValueError(f"The tasks of job {job!r} are numbered from 0; got the index {index}.")
        if index in found:
            raise ValueError(f"Job {job!r} has two addresses for task {index}: {found[index]!r} and {address!r}.")
        found[index] = _text("Task address", address)
    return dict(sorted(found.items()))
