"""TPU systems: their topology, and the assignment of cores to the replicas of a `TPUStrategy`.

>>> import replicax as rx
>>> rx.config.set_virtual_devices({"TPU": 8, "CPU": 4})  # not on a TPU
>>> rx.tpu.initialize_tpu_system()
Topology(mesh_shape=[2, 2, 1, 2], 1 tasks of 8)
"""

from replicax._cluster.topology import DeviceAssignment, DeviceOrderMode, Topology
from replicax._cluster.tpu_system import initialize_tpu_system, shutdown_tpu_system

__all__ = ["DeviceAssignment", "DeviceOrderMode", "Topology", "initialize_tpu_system", "shutdown_tpu_system"]
