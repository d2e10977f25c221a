"""Replicas on the devices of several processes, on one machine or many, with a copy of every variable on each."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax

from replicax._base import devices, doc_pages
from replicax._base.messages import received
from replicax._base.types import CommunicationImplementation, CommunicationOptions, as_options
from replicax._collectives import cross_process
from replicax._collectives.sharding import Rule
from replicax._job import exchange, state
from replicax._strategies import replica_devices
from replicax._strategies.replica_devices import ReplicaOptions
from replicax._strategies.replicated import MirroringExtended
from replicax._strategies.sharding_rules import Dimensions
from replicax._strategies.strategy import Strategy
from replicax._tracing.context import StrategyLike

if TYPE_CHECKING:
    from replicax._cluster.resolver import ClusterResolver

_JOBS = ("chief", "worker", "evaluator", "ps", None)


class MultiWorkerMirroredExtended(MirroringExtended):
    """The extended methods of `MultiWorkerMirroredStrategy`: replicas on a mesh over all workers."""

    _between_graph = True

    def __init__(
        self,
        container_strategy: StrategyLike,
        resolver: ClusterResolver,
        options: CommunicationOptions | None,
        replica_options: ReplicaOptions,
    ):
        self._shard(replica_options.shard_optimizer_state, replica_options.shard_variables)  # before anybody joins
        replica_devices.as_axes(replica_options.devices_per_replica)
        self._cluster_resolver, known = resolver, as_options(options, CommunicationOptions())
        tasks, addresses = _tasks(resolver)
        kind, index = resolver.task_type, resolver.task_id
        if tasks:
            assert kind is not None and index is not None  # which `_tasks` refuses
            devices.set_task(kind, index)
        alone = len(tasks) <= 1 or kind == "evaluator"  # which counts no replicas of the others
        if not alone:
            resolver._join(tasks, addresses, next(i for i, task in enumerate(tasks) if task == (kind, index)))
            if options is not None:  # else it is the environment's, or five minutes
                state.set_step_timeout(options.timeout_seconds)
        processes = [devices.find_devices(None)] if alone else _devices_of_all()
        mesh = replica_devices.mesh_of(processes, replica_options.devices_per_replica)
        reducer = replica_devices.reducer_of(mesh, None, known, self._shards_optimizer_state)
        super().__init__(container_strategy, reducer, sharding_rules=replica_options.sharding_rules)
        cross_process.connect(mesh)
        if known.implementation is CommunicationImplementation.NCCL and mesh.platform == "cpu":
            warnings.warn("NCCL is asked for, but the replicas are on CPU devices, which use Gloo.", stacklevel=4)


def _tasks(resolver: ClusterResolver) -> tuple[list[tuple[str, int]], list[str]]:
    """Returns the tasks of the cluster that run replicas, the chief first, with their addresses."""
    spec = resolver.cluster_spec()
    jobs = {} if spec is None else spec.as_dict()
    kind, index = resolver.task_type, resolver.task_id
    if kind not in _JOBS or any(job not in _JOBS for job in jobs):
        raise ValueError(
            f"Disallowed task type found in cluster spec. Allowed types are {_JOBS} and the cluster spec is {spec}."
        )
    if not jobs:
        return [], []
    if kind == "ps":
        raise ValueError("There is no id for task_type 'ps'")
    if kind is None or index is None:
        raise ValueError(
            f"The cluster {spec} is given without saying which task this process is: task type {kind}, task id {index}."
        )
    if kind not in jobs:
        raise KeyError(f"{kind}: this process is a {kind!r} task, which the cluster {spec} does not list")
    if index not in spec.task_indices(kind):
        raise ValueError(f"The `task_id` {index} exceeds the maximum id of {kind}.")
    tasks: list[tuple[str, int]] = [
        (job, i) for job in ("chief", "worker") if job in jobs for i in spec.task_indices(job)
    ]
    return tasks, [spec.task_address(*task) for task in tasks]


def _devices_of_all() -> list[list[jax.Device]]:
    """Returns each process's devices of replicas, in order; in each the same ones as a strategy of this one has."""
    mine = devices.find_devices(None)
    every: list[list[jax.Device]] = [[] for _ in range(jax.process_count())]
    for device in jax.devices(mine[0].platform):
        every[device.process_index].append(device)
    if len({len(own) for own in every}) > 1:
        counts = ", ".join(f"{exchange.name(i)} has {len(own)}" for i, own in enumerate(every))
        raise ValueError(
            f"Every worker needs the same number of devices, but {counts}. "
            f"See {doc_pages.page('how-to/launch#devices')}."
        )
    places = [every[jax.process_index()].index(device) for device in mine]
    return [[own[place] for place in places] for own in every]


class ExperimentalMultiWorkerMirroredStrategy(Strategy):
    """The older spelling of `MultiWorkerMirroredStrategy`, which takes the implementation alone."""

    def __init__(
        self,
        communication: CommunicationImplementation = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ):
        self._join(cluster_resolver, CommunicationOptions(implementation=communication), ReplicaOptions())

    def _join(
        self,
        resolver: ClusterResolver | None,
        options: CommunicationOptions | None,
        replica_options: ReplicaOptions,
    ) -> None:
        from replicax._cluster.environment import TFConfigClusterResolver
        from replicax._cluster.resolver import ClusterResolver

        if resolver is None:
            resolver = TFConfigClusterResolver()
        if not isinstance(resolver, ClusterResolver):
            raise ValueError(
                "cluster_resolver must be an instance of tf.distribute.cluster_resolver.ClusterResolver, got "
                f"{received(resolver)}."
            )
        super().__init__(MultiWorkerMirroredExtended(self, resolver, options, replica_options))


class MultiWorkerMirroredStrategy(ExperimentalMultiWorkerMirroredStrategy):
    """Runs replicas on the devices of several processes, keeping variables in step on all of them.

    Every process runs the same program and makes this strategy before anything else; together they are one job.
    Without a cluster it is `MirroredStrategy` on this machine's devices. Start the workers with `replicax launch`, or
    with a cluster's own launcher.

    Args:
        cluster_resolver: says who the workers are and which of them this process is; by default it is read from the
            environment variable `TF_CONFIG`.
        communication_options: `timeout_seconds` is how long a step may wait for a worker before all of them end with a
            report, `bytes_per_pack` how much one all-reduce carries.
        devices_per_replica: as of `MirroredStrategy`; all devices of a replica belong to one process.
        sharding_rules, shard_optimizer_state, shard_variables: see `MirroredStrategy`.

    Raises:
        DeviceError: the devices of a process are no whole number of replicas.
        TypeError: `communication_options` or another option of another type.
        ValueError: no resolver, a task that the cluster does not have, or options that exclude each other.
        RuntimeError: JAX has started already.

    >>> import replicax as rx
    >>> rx.MultiWorkerMirroredStrategy().num_replicas_in_sync  # no TF_CONFIG: the devices of this machine
    8
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        devices_per_replica: int | Mapping[str, int] = 1,
        sharding_rules: Mapping[str, Dimensions] | None = None,
        shard_optimizer_state: bool = False,
        shard_variables: Rule | bool = False,
    ):
        options = ReplicaOptions(devices_per_replica, sharding_rules, shard_optimizer_state, shard_variables)
        self._join(cluster_resolver, communication_options, options)
