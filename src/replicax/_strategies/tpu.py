"""Replicas on TPU cores, each on one or on several *logical devices* over which XLA spreads what it computes."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from replicax._base import devices
from replicax._base import nest as _nest
from replicax._base.types import Leaf, Tree, as_flag
from replicax._cluster import tpu_system
from replicax._cluster.resolver import ClusterResolver
from replicax._cluster.topology import DeviceAssignment
from replicax._collectives import arithmetic, cross_process
from replicax._collectives.cross_device_ops import AllReduceCrossDeviceOps, CollectiveAllReduce
from replicax._collectives.reducer import Reducer
from replicax._strategies import logical_devices
from replicax._strategies.replicated import MirroringExtended
from replicax._strategies.strategy import Strategy
from replicax._tracing.context import StrategyLike
from replicax._values import PerReplica, ReplicaMesh


class TPUExtended(MirroringExtended):
    """The extended methods of `TPUStrategy`."""

    _static_shapes = True

    def __init__(
        self,
        container_strategy: StrategyLike,
        resolver: ClusterResolver | None,
        assignment: DeviceAssignment | None,
        spmd: bool = False,
        shard_optimizer_state: bool = False,
    ):
        self._shards_optimizer_state = as_flag("shard_optimizer_state", shard_optimizer_state)
        self._refuses_assignment = spmd
        tpu_system.check_hosts(resolver)
        self._cluster_resolver = resolver
        mesh = ReplicaMesh(tpu_system.replica_devices(assignment))
        if shard_optimizer_state and mesh.logical_axes:
            raise ValueError(
                "shard_optimizer_state=True divides the state among replicas of one device each, and the assignment "
                f"gives each replica {mesh.logical_size}. Leave the option out: the state of a variable that is "
                "split over its replica's logical devices is split as the variable is."
            )
        cross_process.connect(mesh)
        # Packing tensors that are split over logical devices would bring them together first.
        ops = AllReduceCrossDeviceOps(0) if mesh.logical_axes else CollectiveAllReduce()
        super().__init__(container_strategy, Reducer(mesh, ops), _check_values)

    def _device_text(self) -> str:
        names = [devices.short_names(row) for row in self._mesh.logical_devices]
        return repr(names if self._mesh.logical_axes else [name for row in names for name in row])

    @property
    def num_hosts(self) -> int:
        """The number of hosts that the replicas run on."""
        return len({device.process_index for device in self._mesh.devices})

    @property
    def num_replicas_per_host(self) -> int:
        """The number of replicas that each host runs."""
        return self._mesh.size // self.num_hosts


def _check_values(nest: Tree) -> None:
    """Raises `InvalidArgumentError` if the components of a value in the tree differ in shape."""
    for leaf in _nest.leaves(nest):
        if isinstance(leaf, PerReplica):
            arithmetic.check_static(leaf)


class TPUStrategy(Strategy):
    """Runs one replica on each TPU core, or on each group of cores.

    The cores that `experimental_device_assignment` gives to a replica are its logical devices. What is computed is
    spread over them as the methods below say, and further as XLA sees fit. A variable is whole on each of them,
    unless its initial value is split, or the variable itself. Eager replicas compute on their first logical device.

    All replicas need the same shapes.

    Args:
        tpu_cluster_resolver: a `TPUClusterResolver` or the like. The devices are those that JAX finds.
        experimental_device_assignment: which cores make up each replica; by default every core is one.
        experimental_spmd_xla_partitioning: XLA always works so here; True only refuses
            `experimental_assign_to_logical_device`, as in TensorFlow.
        shard_optimizer_state: as of `MirroredStrategy`; for replicas of one device each.

    Raises:
        DeviceError: there are no TPUs, real or virtual, or not those of the assignment.
        ValueError: `shard_optimizer_state` with several logical devices to a replica.
        RuntimeError: the hosts of the TPU slice have not been joined.
        TypeError: the resolver or the assignment is none.

    >>> import jax.numpy as jnp, replicax as rx
    >>> rx.config.set_virtual_devices({"TPU": 8, "CPU": 4})  # not on a TPU
    >>> topology = rx.tpu.initialize_tpu_system()
    >>> pairs = rx.tpu.DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2], num_replicas=4)
    >>> strategy = rx.TPUStrategy(experimental_device_assignment=pairs)
    >>> with strategy.scope():
    ...     w = rx.Variable(strategy.experimental_split_to_logical_devices(jnp.ones((8, 16)), [1, 2]))
    >>> step = rx.function(lambda: strategy.run(lambda: jnp.ones((4, 8)) @ w))
    >>> strategy.num_replicas_in_sync, w.value().addressable_shards[0].data.shape, step().values[3].shape
    (4, (8, 8), (4, 16))
    """

    _extended: TPUExtended

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        shard_optimizer_state: bool = False,
    ):
        spmd, sharded = experimental_spmd_xla_partitioning, shard_optimizer_state
        super().__init__(TPUExtended(self, tpu_cluster_resolver, experimental_device_assignment, spmd, sharded))

    def experimental_assign_to_logical_device(self, tensor: Leaf, logical_device_id: int) -> Leaf:
        """Returns the tensor, not split: the program is one for all logical devices, and each holds all of it.

        Raises:
            ValueError: there is no logical device of that number, or with `experimental_spmd_xla_partitioning=True`.
        """
        logical_devices.check_device(self._extended._mesh, logical_device_id, self._extended._refuses_assignment)
        return self.experimental_replicate_to_logical_devices(tensor)

    def experimental_split_to_logical_devices(self, tensor: Leaf, partition_dimensions: Sequence[int]) -> Leaf:
        """Returns the tensor, split over the logical devices.

        In compiled replicas it is a constraint for XLA. Outside of replicas an array comes back split, and a variable
        that is made of it stays so; a variable is split itself.

        Args:
            tensor: an array, a variable or a per-replica value (whose components are split).
            partition_dimensions: in how many parts each dimension is split. Their product is the number of logical
                devices.

        Raises:
            TypeError: `partition_dimensions` is no list of integers.
            ValueError: it has not a number for each dimension, not that product, or a size cannot be divided so.
        """
        mesh = self._extended._mesh
        layout = logical_devices.split_spec(mesh, logical_devices.shape_of(tensor), partition_dimensions)
        return logical_devices.lay_out(mesh, tensor, layout)

    def experimental_replicate_to_logical_devices(self, tensor: Leaf) -> Leaf:
        """Returns the tensor, whole on each logical device; otherwise as `experimental_split_to_logical_devices`."""
        return logical_devices.lay_out(self._extended._mesh, tensor, PartitionSpec())


class ExperimentalTPUStrategy(Strategy):
    """The older `experimental.TPUStrategy`: `TPUStrategy` without the methods for logical devices."""

    def __init__(
        self, tpu_cluster_resolver: ClusterResolver | None = None, device_assignment: DeviceAssignment | None = None
    ):
        super().__init__(TPUExtended(self, tpu_cluster_resolver, device_assignment))
