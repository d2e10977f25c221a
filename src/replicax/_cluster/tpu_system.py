"""The TPU system that the program sees: its devices, found through JAX, and their topology.

With virtual TPUs (`REPLICAX_VIRTUAL_DEVICES=TPU:8`) it is one of CPU devices, laid out as a small TPU is: two cores to
a chip where their number is even, and the chips in a rectangle.
"""

from __future__ import annotations

import collections
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from replicax._base import devices as _devices
from replicax._base.errors import DeviceError
from replicax._base.messages import received
from replicax._cluster.topology import DeviceAssignment, Topology


def tpu_devices() -> list[list[jax.Device]]:
    """Returns the TPU devices of each process, in order, or raises `DeviceError`. Starts JAX's backend."""
    names = _devices.device_table()
    local = [device for name, device in names.items() if name.startswith("TPU:")]
    if not local:
        raise DeviceError(
            f"TPUs not found in the cluster. This process has: {', '.join(names)}. To try the program out without "
            "TPUs, ask for virtual ones: REPLICAX_VIRTUAL_DEVICES=TPU:8 in the environment, or "
            "replicax.config.set_virtual_devices({'TPU': 8}) before JAX starts."
        )
    platform = local[0].platform
    everywhere = jax.devices(platform)
    here = jax.local_devices(backend=platform)
    places = [here.index(device) for device in local]
    by_process = [[d for d in everywhere if d.process_index == process] for process in range(jax.process_count())]
    return [[devices[place] for place in places] for devices in by_process]


def topology() -> Topology:
    """Returns the coordinates of these devices."""
    devices = tpu_devices()
    if all(hasattr(device, "coords") for task in devices for device in task):
        coordinates = np.array([[[*device.coords, device.core_on_chip] for device in task] for task in devices])
        coordinates -= coordinates.min(axis=(0, 1))
        return Topology(mesh_shape=coordinates.max(axis=(0, 1)) + 1, device_coordinates=coordinates)
    count = sum(map(len, devices))
    cores = 2 - count % 2
    chips = count // cores
    rows = max(n for n in range(1, math.isqrt(chips) + 1) if chips % n == 0)
    places = [(x, y, 0, core) for y in range(rows) for x in range(chips // rows) for core in range(cores)]
    return Topology(
        mesh_shape=(chips // rows, rows, 1, cores), device_coordinates=np.reshape(places, (len(devices), -1, 4))
    )


def replica_devices(assignment: DeviceAssignment | None) -> list[list[jax.Device]]:
    """Returns each replica's logical devices; without an assignment each device is a replica."""
    devices = tpu_devices()
    if assignment is None:
        return [[device] for task in devices for device in task]
    if not isinstance(assignment, DeviceAssignment):
        raise TypeError(
            "`experimental_device_assignment` is a DeviceAssignment, such as DeviceAssignment.build(topology, "
            f"computation_shape=[1, 1, 1, 2], num_replicas=4); got {assignment!r}."
        )
    grid = []
    for replica in range(assignment.num_replicas):
        row = []
        for core in range(assignment.num_cores_per_replica):
            place, topology = assignment.coordinates(replica, core), assignment.topology
            task = topology.task_ordinal_at_coordinates(place)
            ordinal = topology.tpu_device_ordinal_at_coordinates(place)
            if task >= len(devices) or ordinal >= len(devices[task]):
                raise DeviceError(
                    f"The device assignment has device {ordinal} of task {task} for replica {replica}, but there are "
                    f"{len(devices)} tasks with {len(devices[0])} TPU devices each. Build it with the topology that "
                    "initialize_tpu_system returns."
                )
            row.append(devices[task][ordinal])
        if len({device.process_index for device in row}) > 1:
            raise DeviceError(
                f"The logical devices of replica {replica} belong to several hosts, {row}. Choose a computation shape "
                "that fits into one host."
            )
        grid.append(row)
    hosts = collections.Counter(row[0].process_index for row in grid)
    if grid and (len(hosts) < len(devices) or len(set(hosts.values())) > 1):
        raise DeviceError(
            f"Every one of the {len(devices)} hosts runs the same number of replicas, but the device assignment has "
            f"{[hosts[host] for host in range(len(devices))]} for them."
        )
    flat = [device for row in grid for device in row]
    if not flat or len(set(flat)) < len(flat):
        raise DeviceError(
            "A device assignment gives each core to one replica, and makes one replica at least; got "
            f"{assignment.core_assignment.tolist()}."
        )
    return grid


def initialize_tpu_system(cluster_resolver: Any = None) -> Topology:
    """Returns the topology of the TPU system, which JAX has initialized or initializes now.

    Args:
        cluster_resolver: is told the topology, where it has `set_tpu_topology`. Its cluster has to be the one in which
            this program runs: one process on each host.

    Raises:
        DeviceError: there are no TPUs, real or virtual.
        RuntimeError: the cluster has several hosts, and this program runs on one.

    >>> import replicax as rx
    >>> rx.config.set_virtual_devices({"TPU": 8, "CPU": 4})  # not on a TPU
    >>> rx.tpu.initialize_tpu_system()
    Topology(mesh_shape=[2, 2, 1, 2], 1 tasks of 8)
    """
    found = topology()
    check_hosts(cluster_resolver)
    if hasattr(cluster_resolver, "set_tpu_topology"):
        cluster_resolver.set_tpu_topology(found.serialized())
    return found


def shutdown_tpu_system(cluster_resolver: Any = None) -> None:
    """Raises `DeviceError` if there are no TPUs, and does nothing else: JAX gives them back when the process ends.

    >>> import replicax as rx
    >>> rx.config.set_virtual_devices({"TPU": 8, "CPU": 4})  # not on a TPU
    >>> rx.tpu.shutdown_tpu_system()
    """
    tpu_devices()


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: Any,
    job_name: str = "localhost",
    task_index: int = 0,
    protocol: str | None = None,
    make_master_device_default: bool = True,
    cluster_device_filters: object = None,
) -> None:
    """Joins the machines of a TPU slice, each of which runs the program itself; to be called before JAX starts.

    With another cluster, with TPUs of one machine, or on a machine that is none of the slice's there is nothing to do.

    Args:
        cluster_spec_or_resolver: a `ClusterSpec` or a cluster resolver, such as `TPUClusterResolver()`.
        job_name, task_index, protocol, make_master_device_default, cluster_device_filters: not needed.

    Raises:
        ValueError: the first argument is neither.
        JobError: the machines do not come together.
        RuntimeError: JAX has started already.

    >>> import replicax as rx
    >>> rx.config.experimental_connect_to_cluster("worker0:8470")
    Traceback (most recent call last):
    ValueError: `cluster_spec_or_resolver` must be a `ClusterSpec` or a `ClusterResolver`. Received 'worker0:8470'.
    """
    if not (hasattr(cluster_spec_or_resolver, "cluster_spec") or hasattr(cluster_spec_or_resolver, "as_dict")):
        raise ValueError(
            "`cluster_spec_or_resolver` must be a `ClusterSpec` or a `ClusterResolver`. Received "
            f"{cluster_spec_or_resolver!r}."
        )
    if hasattr(cluster_spec_or_resolver, "_connect"):
        cluster_spec_or_resolver._connect()


def experimental_connect_to_host(remote_host: str | Sequence[str] | None = None, job_name: str = "worker") -> None:
    """Does nothing, and is accepted for compatibility: each host runs the program itself.

    Args:
        remote_host: an address, or a list of them.
        job_name: not needed.

    Raises:
        ValueError: no address.

    >>> import replicax as rx
    >>> rx.config.experimental_connect_to_host("worker0:8470")
    """
    if not remote_host:
        raise ValueError("Must provide at least one remote_host")


def check_hosts(resolver: Any) -> None:
    """Raises `RuntimeError` if the cluster has several hosts, and this process has not been joined with the others."""
    check_resolver(resolver)
    if len(tpu_devices()) > 1:
        if not jax.distributed.is_initialized():
            raise RuntimeError(
                f"The TPU slice has {jax.process_count()} hosts, which have not been joined. Call "
                "experimental_connect_to_cluster(TPUClusterResolver()) first, before JAX starts."
            )
    elif (hosts := _hosts(resolver)) > 1:  # which may ask the Cloud TPU service
        raise RuntimeError(
            f"The cluster has {hosts} TPU hosts, and this program runs on one of them. In JAX each host runs the "
            "program itself and reaches its own TPU devices: start it on all hosts (for instance with `gcloud compute "
            "tpus tpu-vm ssh --worker=all`), and call experimental_connect_to_cluster(TPUClusterResolver()) first. To "
            "use the TPU devices of this host alone, give TPUClusterResolver('local')."
        )


def check_resolver(resolver: object) -> None:
    """Raises `TypeError` for what is no cluster resolver."""
    if resolver is not None and not (hasattr(resolver, "cluster_spec") and hasattr(resolver, "master")):
        raise TypeError(
            "`tpu_cluster_resolver` is a cluster resolver, such as TPUClusterResolver('local'), or None; got "
            f"{received(resolver)}."
        )


def _hosts(resolver: Any) -> int:
    """Returns the number of tasks of the resolver's cluster or, without one, of machines in the environment."""
    if resolver is None:
        names = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES") or ""
        return len(names.split(","))
    spec: Any = resolver.cluster_spec()
    jobs = spec.as_dict() if hasattr(spec, "as_dict") else {}
    return len(jobs.get(getattr(resolver, "task_type", None) or "worker", ()))
