"""TPU systems: their topology, and the assignment of cores to the replicas of a `TPUStrategy`."""

from replicax._cluster.topology import DeviceAssignment, DeviceOrderMode, Topology
from replicax._cluster.tpu_system import initialize_tpu_system, shutdown_tpu_system

__all__ = ["DeviceAssignment", "DeviceOrderMode", "Topology", "initialize_tpu_system", "shutdown_tpu_system"]
