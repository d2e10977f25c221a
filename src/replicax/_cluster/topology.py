"""The coordinates of a TPU system's cores, and their assignment to replicas.

A `Topology` gives each device of each task (host) its coordinates in a mesh of x, y, z and core. A `DeviceAssignment`
gives each replica its cores; `DeviceAssignment.build` cuts the mesh into blocks of one shape.
"""

from __future__ import annotations

import enum
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np


class Topology:
    """The coordinates of a TPU system's devices.

    Args:
        serialized: what `serialized()` of another one gave; the other arguments are then ignored.
        mesh_shape: the extent of the mesh in x, y, z and cores: four positive integers.
        device_coordinates: an array `[tasks, devices of a task, 4]`; negative coordinates stand for a missing device.

    Raises:
        ValueError: `mesh_shape` is no such sequence, or the coordinates have another shape, lie outside of the mesh or
            are given twice; or `serialized` is no topology.

    >>> from replicax import tpu
    >>> topology = tpu.Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]])
    >>> topology.num_tpus_per_task, topology.tpu_device_name_at_coordinates([0, 0, 0, 1])
    (2, '/task:0/device:TPU:1')
    """

    def __init__(self, serialized: bytes | None = None, mesh_shape: Any = None, device_coordinates: Any = None):
        if serialized:
            mesh_shape, device_coordinates = _parsed(serialized)
        if mesh_shape is None or device_coordinates is None:
            raise ValueError("A Topology is made of `mesh_shape` and `device_coordinates`, or of `serialized` bytes.")
        self._mesh_shape = np.asarray(mesh_shape, np.int32)
        if self._mesh_shape.shape != (4,) or (self._mesh_shape < 1).any():
            raise ValueError(
                f"`mesh_shape` must be a sequence of 4 positive entries; got `mesh_shape={self._mesh_shape}`"
            )
        self._coordinates = np.asarray(device_coordinates, np.int32)
        if self._coordinates.ndim != 3 or self._coordinates.shape[-1] != 4:
            raise ValueError(
                "`device_coordinates` must have the shape [tasks, devices of a task, 4]; got an array of shape "
                f"{self._coordinates.shape}"
            )
        self._places: dict[tuple[int, ...], tuple[int, int]] = {}  # coordinates -> task, device of the task
        for task, devices in enumerate(self._coordinates.tolist()):
            for ordinal, coordinates in enumerate(devices):
                if min(coordinates) < 0:
                    continue
                if (np.asarray(coordinates) >= self._mesh_shape).any():
                    raise ValueError(
                        f"Device {ordinal} of task {task} has the coordinates {coordinates}, which lie outside of the "
                        f"mesh of shape {self._mesh_shape.tolist()}."
                    )
                place = self._places.setdefault(tuple(coordinates), (task, ordinal))
                if place != (task, ordinal):
                    raise ValueError(
                        f"Device {ordinal} of task {task} has the coordinates {coordinates} of device {place[1]} of "
                        f"task {place[0]}."
                    )

    @property
    def mesh_shape(self) -> np.ndarray:
        """The extent of the mesh in x, y, z and cores.

        >>> import replicax as rx
        >>> rx.tpu.Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0]]]).mesh_shape.tolist()
        [1, 1, 1, 2]
        """
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """The number of the mesh's dimensions.

        >>> import replicax as rx
        >>> rx.tpu.Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]]).mesh_rank
        4
        """
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> np.ndarray:
        """The coordinates of each task's devices: `[tasks, devices of a task, 4]`.

        >>> import replicax as rx
        >>> rx.tpu.Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0]]]).device_coordinates.shape
        (1, 1, 4)
        """
        return self._coordinates

    @property
    def missing_devices(self) -> np.ndarray:
        """The coordinates at which there is no device, one in a row.

        >>> import replicax as rx
        >>> rx.tpu.Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0]]]).missing_devices.tolist()
        [[0, 0, 0, 1]]
        """
        everywhere = itertools.product(*map(range, self._mesh_shape.tolist()))
        missing = [coordinates for coordinates in everywhere if coordinates not in self._places]
        return np.array(missing, np.int64).reshape(-1, self.mesh_rank)

    @property
    def num_tasks(self) -> int:
        """The number of tasks (hosts).

        >>> import replicax as rx
        >>> rx.tpu.Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0]], [[0, 0, 0, 1]]]).num_tasks
        2
        """
        return int(self._coordinates.shape[0])

    @property
    def num_tpus_per_task(self) -> int:
        """The number of devices of each task.

        >>> import replicax as rx
        >>> rx.tpu.Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0]]]).num_tpus_per_task
        1
        """
        return int(self._coordinates.shape[1])

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns the task whose device is there; `ValueError` if there is none.

        >>> import replicax as rx
        >>> topology = rx.tpu.Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0]], [[0, 0, 0, 1]]])
        >>> topology.task_ordinal_at_coordinates([0, 0, 0, 1])
        1
        """
        return self._place(device_coordinates)[0]

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns the number of the device there among those of its task; `ValueError` if there is none.

        >>> import replicax as rx
        >>> topology = rx.tpu.Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]])
        >>> topology.tpu_device_ordinal_at_coordinates([0, 0, 0, 1])
        1
        """
        return self._place(device_coordinates)[1]

    def cpu_device_name_at_coordinates(self, device_coordinates: Sequence[int], job: str | None = None) -> str:
        """Returns the name of the host's CPU to which the device there is attached.

        >>> import replicax as rx
        >>> topology = rx.tpu.Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]])
        >>> topology.cpu_device_name_at_coordinates([0, 0, 0, 1], job="worker")
        '/job:worker/task:0/device:CPU:0'
        """
        return f"{_job(job)}/task:{self._place(device_coordinates)[0]}/device:CPU:0"

    def tpu_device_name_at_coordinates(self, device_coordinates: Sequence[int], job: str | None = None) -> str:
        """Returns the name of the device there.

        >>> import replicax as rx
        >>> topology = rx.tpu.Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]])
        >>> topology.tpu_device_name_at_coordinates([0, 0, 0, 1], job="worker")
        '/job:worker/task:0/device:TPU:1'
        """
        task, ordinal = self._place(device_coordinates)
        return f"{_job(job)}/task:{task}/device:TPU:{ordinal}"

    def serialized(self) -> bytes:
        """Returns the topology as bytes, in JSON, of which `Topology(serialized=...)` makes it again.

        >>> import replicax as rx
        >>> topology = rx.tpu.Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]])
        >>> rx.tpu.Topology(serialized=topology.serialized())
        Topology(mesh_shape=[1, 1, 1, 2], 1 tasks of 2)
        """
        values = {"mesh_shape": self._mesh_shape.tolist(), "device_coordinates": self._coordinates.tolist()}
        return json.dumps(values).encode()

    def _place(self, coordinates: Sequence[int]) -> tuple[int, int]:
        key = tuple(int(n) for n in coordinates)
        if key not in self._places:
            raise ValueError(
                f"There is no TPU device at the coordinates {list(key)} of a mesh of shape {self._mesh_shape.tolist()}."
            )
        return self._places[key]

    def __repr__(self) -> str:
        return f"Topology(mesh_shape={self._mesh_shape.tolist()}, {self.num_tasks} tasks of {self.num_tpus_per_task})"


def _job(job: str | None) -> str:
    return "" if job is None else f"/job:{job}"


def _parsed(serialized: bytes) -> tuple[Any, Any]:
    if not isinstance(serialized, bytes):
        raise TypeError(f"`serialized` is the bytes that Topology.serialized() gives, got {type(serialized).__name__}.")
    try:
        values = json.loads(serialized)
        return values["mesh_shape"], values["device_coordinates"]
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"`serialized` is no serialized topology ({error}). It is the JSON text that Topology.serialized() gives, "
            "not TensorFlow's TopologyProto."
        ) from error


class DeviceOrderMode(enum.IntEnum):
    """The order in which `DeviceAssignment.build` goes through the mesh.

    >>> import replicax as rx
    >>> topology = rx.tpu.Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]])
    >>> rx.tpu.DeviceAssignment.build(topology, num_replicas=2, device_order_mode=rx.tpu.DeviceOrderMode.MESH)
    DeviceAssignment(2 replicas of 1 cores)
    """

    AUTO = 0  # RING where that is possible
    RING = 1  # neighbours in the order are neighbours in the mesh, the first and the last too
    MESH = 2  # by coordinates


class DeviceAssignment:
    """The cores of a TPU system that make up each replica.

    Args:
        topology: the system's `Topology`.
        core_assignment: an array `[replicas, cores of a replica, 4]` of coordinates.

    Raises:
        ValueError: `topology` is none, the array has another shape, or a device is missing or used twice.

    >>> from replicax import tpu
    >>> topology = tpu.Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]])
    >>> assignment = tpu.DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2], num_replicas=1)
    >>> assignment.num_cores_per_replica, assignment.tpu_device(replica=0, logical_core=1)
    (2, '/task:0/device:TPU:1')
    """

    def __init__(self, topology: Topology, core_assignment: Any):
        if not isinstance(topology, Topology):
            raise ValueError(f"topology must be a Topology object, got {type(topology)}")
        cores = np.asarray(core_assignment, np.int32)
        if cores.ndim != 3:
            raise ValueError(f"core_assignment must be a rank 3 numpy array, got shape {cores.shape}")
        if cores.shape[-1] != topology.mesh_rank:
            raise ValueError(
                f"core_assignment.shape[-1] must have size equal to topology rank ({topology.mesh_rank}), got "
                f"core_assignment.shape={cores.shape}"
            )
        self._topology, self._cores = topology, cores
        self._tasks = [[topology.task_ordinal_at_coordinates(core) for core in replica] for replica in cores]

    @staticmethod
    def build(
        topology: Topology,
        computation_shape: Any = None,
        computation_stride: Any = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> DeviceAssignment:
        """Cuts the mesh into blocks, one for each replica.

        Args:
            topology: the system's `Topology`, as `initialize_tpu_system` returns it.
            computation_shape: a replica's extent in x, y, z and cores; by default one core.
            computation_stride: how far apart a replica's cores are in each dimension; by default 1, a dense block.
            num_replicas: how many replicas to make.
            device_order_mode: see `DeviceOrderMode`.

        Raises:
            ValueError: an argument of another form, so many replicas do not fit into the mesh, or there is no ring.

        >>> import replicax as rx
        >>> topology = rx.tpu.Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]])
        >>> rx.tpu.DeviceAssignment.build(topology, computation_shape=[2, 1, 1, 1], num_replicas=1)
        DeviceAssignment(1 replicas of 2 cores)
        """
        if not isinstance(topology, Topology):
            raise ValueError(f"`topology` is not a Topology object; got {type(topology)}")
        mode, mesh = DeviceOrderMode(device_order_mode), topology.mesh_shape
        shape = _four_numbers("computation_shape", computation_shape)
        stride = _four_numbers("computation_stride", computation_stride)
        footprint = shape * stride
        if (footprint > mesh).any():
            raise ValueError(f"computation footprint {footprint} does not fit in TPU topology shape {mesh}")
        counts = mesh // footprint * stride
        most = math.prod(counts.tolist())
        if not 0 <= num_replicas <= most:
            raise ValueError(
                f"requested {num_replicas} replicas but only {most} replicas with shape {shape} and computation_stride "
                f"{stride} fit in a TPU mesh of shape {mesh}"
            )
        ring = num_replicas == most and shape[3] == mesh[3] and (stride == 1).all()
        if mode == DeviceOrderMode.RING and not ring:
            raise ValueError(
                f"device_order_mode=DeviceOrderMode.RING needs as many replicas as fit in the mesh of shape {mesh}, "
                f"with all cores of a chip in one replica; got {num_replicas} replicas of shape {shape} and stride "
                f"{stride}. Try setting device_order_mode=DeviceOrderMode.AUTO"
            )
        if ring and mode != DeviceOrderMode.MESH:
            positions: list[Any] = [(*chip, 0) for chip in _ring(*counts[:3].tolist())]
            inner: list[Any] = [(*chip, core) for chip in _ring(*shape[:3].tolist()) for core in range(shape[3])]
        else:
            positions = _by_coordinates(num_replicas, counts.tolist())
            inner = list(itertools.product(*map(range, shape.tolist())))
        starts = np.array(positions, np.int32).reshape(-1, 4)
        starts = starts // stride * footprint + starts % stride
        cores = starts[:, None] + (np.array(inner, np.int32) * stride)[None]
        return DeviceAssignment(topology, cores)

    @property
    def topology(self) -> Topology:
        """The system's topology.

        >>> import replicax as rx
        >>> topology = rx.tpu.Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]])
        >>> rx.tpu.DeviceAssignment.build(topology, num_replicas=2).topology
        Topology(mesh_shape=[2, 1, 1, 1], 1 tasks of 2)
        """
        return self._topology

    @property
    def core_assignment(self) -> np.ndarray:
        """The coordinates of each replica's cores: `[replicas, cores of a replica, 4]`.

        >>> import replicax as rx
        >>> topology = rx.tpu.Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]])
        >>> rx.tpu.DeviceAssignment.build(topology, num_replicas=2).core_assignment.tolist()
        [[[0, 0, 0, 0]], [[1, 0, 0, 0]]]
        """
        return self._cores

    @property
    def num_replicas(self) -> int:
        """The number of replicas.

        >>> import replicax as rx
        >>> topology = rx.tpu.Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]])
        >>> rx.tpu.DeviceAssignment.build(topology, num_replicas=2).num_replicas
        2
        """
        return int(self._cores.shape[0])

    @property
    def num_cores_per_replica(self) -> int:
        """The number of cores of each replica.

        >>> import replicax as rx
        >>> topology = rx.tpu.Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]])
        >>> rx.tpu.DeviceAssignment.build(topology, computation_shape=[2, 1, 1, 1]).num_cores_per_replica
        2
        """
        return int(self._cores.shape[1])

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Returns the coordinates of one of a replica's cores.

        >>> import replicax as rx
        >>> topology = rx.tpu.Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]])
        >>> [int(i) for i in rx.tpu.DeviceAssignment.build(topology, num_replicas=2).coordinates(1, 0)]
        [1, 0, 0, 0]
        """
        return tuple(self._cores[replica, logical_core])

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Returns the replicas whose core of this number belongs to this task; `ValueError` if there is none.

        >>> import replicax as rx
        >>> topology = rx.tpu.Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]])
        >>> rx.tpu.DeviceAssignment.build(topology, num_replicas=2).lookup_replicas(task_id=0, logical_core=0)
        [0, 1]
        """
        found = [replica for replica, tasks in enumerate(self._tasks) if (logical_core, task_id) in enumerate(tasks)]
        if not found:
            raise ValueError(f"Can not find any replica in task: {task_id} contains logical_core: {logical_core} ")
        return found

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Returns the number of a core's device among those of its task.

        >>> import replicax as rx
        >>> topology = rx.tpu.Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]])
        >>> rx.tpu.DeviceAssignment.build(topology, num_replicas=2).tpu_ordinal(replica=1)
        1
        """
        return self._topology.tpu_device_ordinal_at_coordinates(self.coordinates(replica, logical_core))

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns the name of the host's CPU to which a core is attached.

        >>> import replicax as rx
        >>> topology = rx.tpu.Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]])
        >>> rx.tpu.DeviceAssignment.build(topology, num_replicas=2).host_device(replica=1, job="worker")
        '/job:worker/task:0/device:CPU:0'
        """
        return self._topology.cpu_device_name_at_coordinates(self.coordinates(replica, logical_core), job)

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns the name of a core's device.

        >>> import replicax as rx
        >>> topology = rx.tpu.Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]])
        >>> rx.tpu.DeviceAssignment.build(topology, num_replicas=2).tpu_device(replica=1, job="worker")
        '/job:worker/task:0/device:TPU:1'
        """
        return self._topology.tpu_device_name_at_coordinates(self.coordinates(replica, logical_core), job)

    def __repr__(self) -> str:
        return f"DeviceAssignment({self.num_replicas} replicas of {self.num_cores_per_replica} cores)"


def _four_numbers(name: str, value: Any) -> np.ndarray:
    numbers = np.ones(4, np.int32) if value is None else np.asarray(value, np.int32)
    if numbers.shape != (4,):
        raise ValueError(f"{name} must have shape [4]; got {numbers.shape}")
    if (numbers < 1).any():
        raise ValueError(f"{name} must be positive; got {name}={numbers}")
    return numbers


def _by_coordinates(count: int, counts: list[int]) -> list[tuple[int, int, int, int]]:
    """Returns so many positions of a block of about equal sides: cores first, then x, y and z."""
    block = [1, 1, 1, min(count, counts[3])]
    remaining = -(-count // max(block[3], 1))
    for left, axis in zip((3, 2, 1), sorted(range(3), key=lambda axis: counts[axis])):
        block[axis] = min(math.ceil(remaining ** (1 / left)), counts[axis])
        remaining = -(-remaining // max(block[axis], 1))
    x, y, z, core = map(range, block)
    return [(i, j, k, c) for k in z for j in y for i in x for c in core][:count]


def _ring(x: int, y: int, z: int) -> list[tuple[int, int, int]]:
    """Orders all chips so that neighbours follow each other, the first the last too, if the sides allow it."""
    if any(side > 1 and side % 2 for side in (x, y, z)):
        return [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    return [(i, j, k) for (i, j), k in _snake(_snake(list(range(x)), y), z)]


def _snake(line: list[Any], rows: int) -> list[tuple[Any, int]]:
    """Goes along the first row, to and fro over the others but for their first items, and back by those."""
    if len(line) == 1:
        return [(line[0], row) for row in range(rows)]
    first, *rest = line
    there = [(item, row) for row in range(1, rows) for item in (rest[::-1] if row % 2 else rest)]
    return [(item, 0) for item in line] + there + [(first, row) for row in reversed(range(1, rows))]
