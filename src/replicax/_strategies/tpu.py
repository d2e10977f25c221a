"""Replicas on TPU cores, each on one or on several *logical devices* over which XLA spreads what it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from replicax._base.types import Leaf
from replicax._cluster import tpu_system
from replicax._cluster.resolver import ClusterResolver
from replicax._cluster.topology import DeviceAssignment
from replicax._collectives import cross_process
from replicax._collectives.sharding import Rule
from replicax._strategies import logical_devices, replica_devices
from replicax._strategies.replica_devices import ReplicaOptions
from replicax._strategies.replicated import MirroringExtended
from replicax._strategies.sharding_rules import Dimensions
from replicax._strategies.strategy import Strategy
from replicax._tracing.context import StrategyLike
from replicax._values import mesh_of


class TPUExtended(MirroringExtended):
    """The extended methods of `TPUStrategy`."""

    _static_shapes = True

    def __init__(
        self,
        container_strategy: StrategyLike,
        resolver: ClusterResolver | None,
        assignment: DeviceAssignment | None,
        options: ReplicaOptions = ReplicaOptions(),  # noqa: B008 - it does not change
        devices_per_replica: int | Mapping[str, int] | None = None,
        spmd: bool = False,
    ):
        self._shard(options.shard_optimizer_state, options.shard_variables)
        self._refuses_assignment = spmd
        tpu_system.check_hosts(resolver)
        self._cluster_resolver = resolver
        if assignment is None:
            mesh = replica_devices.mesh_of(tpu_system.tpu_devices(), devices_per_replica or 1)
        else:
            mesh = replica_devices.mesh_of_rows(tpu_system.replica_devices(assignment), devices_per_replica)
        cross_process.connect(mesh)
        reducer = replica_devices.reducer_of(mesh, shards_optimizer_state=self._shards_optimizer_state)
        super().__init__(container_strategy, reducer, static_shapes=True, sharding_rules=options.sharding_rules)

    @property
    def num_hosts(self) -> int:
        """The number of hosts that the replicas run on."""
        return len({device.process_index for device in self._mesh.devices})

    @property
    def num_replicas_per_host(self) -> int:
        """The number of replicas that each host runs."""
        return self._mesh.size // self.num_hosts


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
        devices_per_replica: as of `MirroredStrategy`, in place of an assignment; beside one it names the axes of the
            logical devices.
        sharding_rules: see `MirroredStrategy`.
        shard_optimizer_state: as of `MirroredStrategy`; for replicas of one device each.
        shard_variables: as of `MirroredStrategy`.

    Raises:
        DeviceError: there are no TPUs, real or virtual, or not those of the assignment.
        ValueError: `shard_optimizer_state` with several logical devices to a replica, or `devices_per_replica` with an
            assignment that has another number.
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
        devices_per_replica: int | Mapping[str, int] | None = None,
        sharding_rules: Mapping[str, Dimensions] | None = None,
        shard_optimizer_state: bool = False,
        shard_variables: Rule | bool = False,
    ):
        options = ReplicaOptions(1, sharding_rules, shard_optimizer_state, shard_variables)
        devices = experimental_device_assignment, options, devices_per_replica
        super().__init__(TPUExtended(self, tpu_cluster_resolver, *devices, experimental_spmd_xla_partitioning))

    def experimental_assign_to_logical_device(self, tensor: Leaf, logical_device_id: int) -> Leaf:
        """Does as `assign_to_device`.

        Raises:
            ValueError: there is no logical device of that number, or with `experimental_spmd_xla_partitioning=True`.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.config.set_virtual_devices({"TPU": 8, "CPU": 4})  # not on a TPU
        >>> strategy = rx.TPUStrategy(devices_per_replica=2)
        >>> strategy.experimental_assign_to_logical_device(jnp.ones((2, 8)), 1).shape
        (2, 8)
        """
        if self._extended._refuses_assignment:
            raise ValueError(
                "With experimental_spmd_xla_partitioning=True no tensor is assigned to one logical device. Use "
                "experimental_split_to_logical_devices or experimental_replicate_to_logical_devices."
            )
        return logical_devices.assigned(mesh_of(self._extended), tensor, "logical_device_id", logical_device_id)

    def experimental_split_to_logical_devices(self, tensor: Leaf, partition_dimensions: Sequence[int]) -> Leaf:
        """Does as `split_to_devices`, with numbers in place of the names of axes.

        Args:
            tensor: an array, a variable or a per-replica value (whose components are split).
            partition_dimensions: in how many parts each dimension is split. Their product is the number of logical
                devices.

        Raises:
            TypeError: `partition_dimensions` is no list of integers.
            ValueError: it has not a number for each dimension, not that product, or a size cannot be divided so.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.config.set_virtual_devices({"TPU": 8, "CPU": 4})  # not on a TPU
        >>> strategy = rx.TPUStrategy(devices_per_replica=2)
        >>> halves = strategy.experimental_split_to_logical_devices(jnp.ones((2, 8)), [1, 2])
        >>> halves.shape, halves.addressable_shards[0].data.shape
        ((2, 8), (2, 4))
        """
        mesh = mesh_of(self._extended)
        assert mesh is not None
        layout = logical_devices.split_spec(mesh, logical_devices.shape_of(tensor), partition_dimensions)
        return logical_devices.lay_out(mesh, tensor, layout)

    def experimental_replicate_to_logical_devices(self, tensor: Leaf) -> Leaf:
        """Does as `replicate_to_devices`.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.config.set_virtual_devices({"TPU": 8, "CPU": 4})  # not on a TPU
        >>> whole = rx.TPUStrategy(devices_per_replica=2).experimental_replicate_to_logical_devices(jnp.ones((2, 8)))
        >>> len(whole.devices()), whole.addressable_shards[0].data.shape
        (8, (2, 8))
        """
        return self.replicate_to_devices(tensor)
