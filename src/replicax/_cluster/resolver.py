"""Cluster resolvers: which processes there are, and which of them this one is."""

from __future__ import annotations

import abc
import collections
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from replicax._base import devices
from replicax._base.errors import JobError
from replicax._cluster import explain as _explain
from replicax._cluster.spec import ClusterSpec

_T = TypeVar("_T", str, int)


def master_url(address: str, rpc_layer: str | None) -> str:
    """Returns an address with the rpc layer's name in front, where there is one."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


class ClusterResolver(abc.ABC):
    """The description of a cluster for strategies: its processes, and which of them this one is.

    A resolver of one's own defines `cluster_spec` and `master`. Reading either, or the task, starts no backend.

    >>> import replicax as rx
    >>> class Mine(rx.cluster_resolver.ClusterResolver):
    ...     def cluster_spec(self):
    ...         return rx.ClusterSpec({"worker": ["a:1", "b:2"]})
    ...
    ...     def master(self, task_type=None, task_id=None, rpc_layer=None):
    ...         return ""
    >>> resolver = Mine()
    >>> resolver.task_type, resolver.task_id = "worker", 1
    >>> resolver.cluster_spec().task_address(resolver.task_type, resolver.task_id)
    'b:2'
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment: str | None = ""

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the processes of the cluster, as they are now.

        >>> import replicax as rx
        >>> cluster = rx.ClusterSpec({"worker": ["a:1", "b:2"]})
        >>> rx.cluster_resolver.SimpleClusterResolver(cluster).cluster_spec().num_tasks("worker")
        2
        """

    @abc.abstractmethod
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the address of a task, with the rpc layer's name in front.

        Args:
            task_type: the task's job; with `task_id`, in place of what the resolver takes by default.
            task_id: the task's index.
            rpc_layer: the name to put in front, in place of the resolver's.

        >>> import replicax as rx
        >>> cluster = rx.ClusterSpec({"worker": ["a:1", "b:2"]})
        >>> rx.cluster_resolver.SimpleClusterResolver(cluster).master("worker", 1, rpc_layer="grpc")
        'grpc://b:2'
        """

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> Mapping[str, int]:
        """Returns how many accelerators this process has, by type. **Starts JAX's backend.**

        Args:
            task_type: the job of the task that is meant; of other tasks than this one nothing is known.
            task_id: the task's index.
            config_proto: not used.

        >>> import os
        >>> from unittest import mock
        >>> import replicax as rx
        >>> with mock.patch.dict(os.environ, TF_CONFIG="{}"):
        ...     dict(rx.cluster_resolver.TFConfigClusterResolver().num_accelerators())
        {'GPU': 8}
        """
        counts: dict[str, int] = collections.defaultdict(int)
        if task_type in (None, self.task_type) and task_id in (None, self.task_id):
            for name in devices.device_table():
                kind = name.partition(":")[0]
                if kind != "CPU":
                    counts[kind] += 1
        return counts

    def _join(self, tasks: Sequence[tuple[Any, Any]], addresses: Sequence[str], rank: int) -> None:
        """Joins the job of these tasks; what is known of the cluster is added to the error where that fails."""
        from replicax._job import join  # only jobs need it

        try:
            join.start(tasks, addresses, rank)
        except JobError as error:
            error.add_note(str(self.explain()))
            raise

    def _found(self, name: str, own: _T | None) -> _T | None:
        """Returns the task_type, task_id or rpc_layer that holds where `own` was given or set."""
        return own

    @property
    def environment(self) -> str | None:
        """The name of the environment; empty where none was given.

        >>> import replicax as rx
        >>> rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec({}), environment="cloud").environment
        'cloud'
        """
        return self._environment

    @property
    def task_type(self) -> str | None:
        """The job that this process belongs to, or None.

        >>> import replicax as rx
        >>> resolver = rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec({"worker": ["a:1"]}))
        >>> resolver.task_type = "worker"
        >>> resolver.task_type
        'worker'
        """
        return self._found("task_type", self._task_type)

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, or None.

        >>> import replicax as rx
        >>> resolver = rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec({"worker": ["a:1"]}))
        >>> resolver.task_id = 0
        >>> resolver.task_id
        0
        """
        return self._found("task_id", self._task_id)

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol that `master` puts in front of addresses, or None.

        >>> import replicax as rx
        >>> rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec({}), rpc_layer="grpc").rpc_layer
        'grpc'
        """
        return self._found("rpc_layer", self._rpc_layer)

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def explain(self) -> _explain.Explanation:
        """Returns what was found where, what is missing, and what contradicts, as a report to print.

        It raises nothing, starts no backend, and is there within seconds, even where a server does not answer.

        >>> import replicax as rx
        >>> rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec({})).explain().missing
        ['a cluster: without one, this process works alone']
        """
        sources = _explain.Explanation("")
        asked = {
            "task_type": lambda: self.task_type,
            "task_id": lambda: self.task_id,
            "where it reads": lambda: self._describe(sources),
            "cluster_spec()": lambda: self.cluster_spec(),
        }
        return _explain.explain(type(self).__name__, asked, sources)

    def _describe(self, report: _explain.Explanation) -> None:
        """Adds to the report what this kind of resolver knows about where it reads; may ask servers."""
        return None


class TaskClusterResolver(ClusterResolver):
    """The base of resolvers whose master is this process's own address."""

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the address of a task, by default of this process; empty if it is not known which that is.

        The arguments are those of `ClusterResolver.master`; ValueError if the cluster has no such task.

        >>> import os
        >>> from unittest import mock
        >>> import replicax as rx
        >>> step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
        >>> with mock.patch.dict(os.environ, step, SLURM_STEP_TASKS_PER_NODE="1(x2)", CUDA_VISIBLE_DEVICES=""):
        ...     rx.cluster_resolver.SlurmClusterResolver().master()
        'grpc://n2:8888'
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        return master_url(self.cluster_spec().task_address(task_type, task_id), rpc_layer or self.rpc_layer)


class SimpleClusterResolver(ClusterResolver):
    """A resolver that returns what it was given.

    Args:
        cluster_spec: a ClusterSpec.
        master: what `master()` returns where no task is named.
        task_type: the job of this process.
        task_id: its index.
        environment: a name for the environment.
        num_accelerators: how many accelerators each task has, by type.
        rpc_layer: what `master` puts in front.

    Raises:
        TypeError: `cluster_spec` is not a ClusterSpec, or `master` is not text.

    >>> import replicax as rx
    >>> cluster = rx.ClusterSpec({"worker": ["a:1", "b:2"]})
    >>> rx.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc").master("worker", 1)
    'grpc://b:2'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Any = None,
        rpc_layer: str | None = None,
    ):
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError("cluster_spec must be a `tf.train.ClusterSpec`.")
        if not isinstance(master, str):
            raise TypeError(f"`master` must be a string; got a {type(master).__name__}.")
        self._cluster_spec, self._master, self._environment = cluster_spec, master, environment
        self._task_type, self._task_id, self._rpc_layer = task_type, task_id, rpc_layer
        self._num_accelerators = {} if num_accelerators is None else num_accelerators

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster that was given.

        >>> import replicax as rx
        >>> rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec({"worker": ["a:1"]})).cluster_spec()
        ClusterSpec({'worker': ['a:1']})
        """
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the address of the task named; the given master if none, or only half of one, is named.

        The arguments are those of `ClusterResolver.master`; ValueError if the cluster has no such task.

        >>> import replicax as rx
        >>> resolver = rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec({"worker": ["a:1"]}), master="m:1")
        >>> resolver.master(), resolver.master("worker", 0)
        ('m:1', 'a:1')
        """
        named = task_type is not None and task_id is not None
        address = self._cluster_spec.task_address(task_type, task_id) if named else self._master  # type: ignore[arg-type]
        return master_url(address, rpc_layer or self._rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> Mapping[str, int]:
        """Returns the accelerators that were given; the arguments are not used.

        >>> import replicax as rx
        >>> resolver = rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec({}), num_accelerators={"GPU": 4})
        >>> resolver.num_accelerators()
        {'GPU': 4}
        """
        return self._num_accelerators


class UnionResolver(ClusterResolver):
    """The clusters of several resolvers as one; all else is the first resolver's.

    Lists of one job's addresses are joined one after the other, repetitions included; tasks given by index are merged.

    Args:
        *args: the resolvers.
        **kwargs: `task_type`, `task_id` and `rpc_layer`, in place of the first resolver's. As in TensorFlow, a
            `task_id` of 0 counts only where the first resolver has none.

    Raises:
        ValueError: no resolver was given, or another keyword.
        TypeError: something that is not a resolver.

    >>> import replicax as rx
    >>> workers = rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec({"worker": ["a:1"]}), task_type="worker")
    >>> servers = rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec({"ps": ["p:1"]}))
    >>> union = rx.cluster_resolver.UnionResolver(workers, servers)
    >>> union.cluster_spec(), union.task_type
    (ClusterSpec({'ps': ['p:1'], 'worker': ['a:1']}), 'worker')
    """

    def __init__(self, *args: ClusterResolver, **kwargs: Any):
        self._rpc_layer = kwargs.pop("rpc_layer", None)
        self._task_type, self._task_id = kwargs.pop("task_type", None), kwargs.pop("task_id", None)
        if kwargs:
            raise ValueError(f"UnionResolver takes task_type, task_id and rpc_layer; got {', '.join(kwargs)} too.")
        if not args:
            raise ValueError("At least one ClusterResolver is required.")
        if not all(isinstance(resolver, ClusterResolver) for resolver in args):
            raise TypeError("All arguments must be a sub-class of `ClusterResolver.`")
        self._resolvers = args

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of all the resolvers.

        Raises:
            KeyError: two resolvers give one index of a job whose tasks are given by index.

        >>> import replicax as rx
        >>> made = rx.cluster_resolver.SimpleClusterResolver
        >>> parts = [made(rx.ClusterSpec({"worker": [address]})) for address in ("a:1", "b:2")]
        >>> rx.cluster_resolver.UnionResolver(*parts).cluster_spec()
        ClusterSpec({'worker': ['a:1', 'b:2']})
        """
        clusters = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        merged: dict[str, Any] = {}
        for job in dict.fromkeys(job for cluster in clusters for job in cluster):
            parts = [cluster[job] for cluster in clusters if job in cluster]
            if all(isinstance(part, list) for part in parts):
                merged[job] = [address for part in parts for address in part]
                continue
            merged[job] = {}
            for part in parts:
                part = dict(enumerate(part)) if isinstance(part, list) else part
                if twice := part.keys() & merged[job].keys():
                    raise KeyError(f"Duplicate keys detected when merging two ClusterSpecs: {twice!r}")
                merged[job].update(part)
        return ClusterSpec(merged)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the address of the task named; the first resolver's master where none is.

        The arguments are those of `ClusterResolver.master`; ValueError if the cluster has no such task.

        >>> import replicax as rx
        >>> made = rx.cluster_resolver.SimpleClusterResolver
        >>> parts = [made(rx.ClusterSpec({"worker": [address]})) for address in ("a:1", "b:2")]
        >>> rx.cluster_resolver.UnionResolver(*parts).master("worker", 1)
        'b:2'
        """
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer)
        return master_url(self.cluster_spec().task_address(task_type, task_id), rpc_layer or self._rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> Mapping[str, int]:
        """Returns the first resolver's accelerators.

        >>> import replicax as rx
        >>> first = rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec({}), num_accelerators={"GPU": 4})
        >>> rx.cluster_resolver.UnionResolver(first).num_accelerators()
        {'GPU': 4}
        """
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str | None:
        """The first resolver's environment.

        >>> import replicax as rx
        >>> first = rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec({}), environment="cloud")
        >>> rx.cluster_resolver.UnionResolver(first).environment
        'cloud'
        """
        return self._resolvers[0].environment

    def _found(self, name: str, own: _T | None) -> _T | None:
        first: _T | None = getattr(self._resolvers[0], name)
        return own if own or first is None else first

    def _describe(self, report: _explain.Explanation) -> None:
        report.found.append("a union of " + _explain.listed([type(resolver).__name__ for resolver in self._resolvers]))
        for resolver in self._resolvers:
            resolver._describe(report)
        if self._task_id == 0 and self.task_id != 0:
            report.contradictions.append(
                f"task_id was set to 0, but the first resolver's {self.task_id} holds, as in TensorFlow: set the task "
                "of the first resolver"
            )
