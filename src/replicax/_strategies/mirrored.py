"""Replicas on the devices of one machine, one device each or several, with a copy of every variable on each replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from replicax._base import devices as _devices
from replicax._base import doc_pages, tracebacks
from replicax._cluster.environment import TFConfigClusterResolver
from replicax._collectives.cross_device_ops import CrossDeviceOps
from replicax._collectives.sharding import Rule
from replicax._job import state
from replicax._strategies import replica_devices
from replicax._strategies.replica_devices import ReplicaOptions
from replicax._strategies.replicated import MirroringExtended
from replicax._strategies.sharding_rules import Dimensions
from replicax._strategies.strategy import Strategy
from replicax._tracing.context import StrategyLike


class MirroredExtended(MirroringExtended):
    """The extended methods of `MirroredStrategy`."""

    def __init__(
        self,
        container_strategy: StrategyLike,
        devices: Sequence[str | jax.Device] | None,
        cross_device_ops: CrossDeviceOps | None,
        options: ReplicaOptions,
    ):
        self._shard(options.shard_optimizer_state, options.shard_variables)
        mesh = replica_devices.mesh_of([_devices.find_devices(devices)], options.devices_per_replica)
        reducer = replica_devices.reducer_of(
            mesh, cross_device_ops, shards_optimizer_state=self._shards_optimizer_state
        )
        super().__init__(container_strategy, reducer, sharding_rules=options.sharding_rules)


class MirroredStrategy(Strategy):
    """Runs one replica on each device of a machine, or on each group of devices, keeping variables in step on all.

    With `devices_per_replica` a replica has several devices, over which XLA spreads what it computes: as layouts say
    (`split_to_devices` and the other methods below), and further as it sees fit. Eager replicas compute on the first
    of them. All replicas then need the same shapes.

    Args:
        devices: names such as `["GPU:0", "GPU:1"]` or `jax.Device` objects; by default all accelerators or,
            where there are none, all CPU devices.
        cross_device_ops: how values are combined over the devices, such as `NcclAllReduce()`; by default small tensors
            of one dtype share an all-reduce.
        devices_per_replica: how many consecutive devices each replica has, along one axis called "model"; or the names
            of several axes, with the number of devices along each, such as `{"expert": 2, "model": 4}`.
        sharding_rules: how variables are split over a replica's devices: regular expressions, and for each the
            dimensions of `split_to_devices`, such as `{"mlp/up/kernel": (None, "model")}`. A variable is split by the
            first one that is found in its name: that of an `rx.Variable` with the path of a leaf in its pytree, or the
            path of a Keras or NNX variable in its model. See `replicax docs how-to/large-models`.
        shard_optimizer_state: each replica keeps and updates its part of the state of an `rx.Optimizer`: gradients are
            reduced and scattered, and new parameters gathered. With any optimizer the results are the same up to
            rounding, and the state takes one nth of the memory on each of n devices. See
            `replicax docs explanation/communication#sharding-of-the-optimizers-state`.
        shard_variables: True, or a partitioner of `rx.partitioners`: each replica keeps a part of every variable that
            is not small, or that the partitioner divides, of its gradient and of its optimizer's state. Compiled
            replicas gather a variable where they use it. The program is the same as without. See
            `replicax docs how-to/large-models`.

    Raises:
        DeviceError: a name does not parse, there is no such device, or the devices are no whole number of replicas.
        AssertionError: a device is named twice.
        TypeError: `shard_optimizer_state` is not True or False, `shard_variables` is neither and no partitioner,
            `devices_per_replica` is neither a number nor a mapping of names to numbers, or `sharding_rules` is no
            mapping from patterns to dimensions.
        ValueError: `shard_optimizer_state` with `cross_device_ops` that cannot reduce and scatter in one; replicas of
            several devices with either of these two; an invalid number or name in `devices_per_replica`; or a rule
            with an unknown axis. Also later: when a variable is made whose shape its rule does not fit, and at the end
            of the first `run` with a model if a rule applies to no variable.

    >>> import jax.numpy as jnp, replicax as rx
    >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    >>> with strategy.scope():
    ...     w = rx.Variable(1.0, aggregation=rx.VariableAggregation.SUM)
    >>> @rx.function
    ... def step():
    ...     return strategy.run(lambda: w.assign_add(jnp.float32(1.0) * 2))
    >>> [float(x) for x in step().values], float(w)
    ([5.0, 5.0], 5.0)

    >>> pairs = rx.MirroredStrategy(devices_per_replica={"model": 2})  # 8 devices, 4 replicas
    >>> with pairs.scope():
    ...     w = rx.Variable(pairs.split_to_devices(jnp.ones((8, 16)), (None, "model")))
    >>> pairs.num_replicas_in_sync, w.value().addressable_shards[0].data.shape
    (4, (8, 8))
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        devices_per_replica: int | Mapping[str, int] = 1,
        sharding_rules: Mapping[str, Dimensions] | None = None,
        shard_optimizer_state: bool = False,
        shard_variables: Rule | bool = False,
    ):
        options = ReplicaOptions(devices_per_replica, sharding_rules, shard_optimizer_state, shard_variables)
        super().__init__(MirroredExtended(self, devices, cross_device_ops, options))
        _warn_of_other_workers()


def _warn_of_other_workers() -> None:
    """Warns where this process is a worker of several, which it has not joined: each would train a model of its own."""
    resolver = TFConfigClusterResolver()
    try:
        tasks, kind, index = resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id
    except (TypeError, ValueError):  # strategies that need TF_CONFIG say what is wrong with it
        return
    workers = len(tasks.get("chief", ())) + len(tasks.get("worker", ()))
    if state.current() is None and workers > 1 and kind in ("chief", "worker") and "ps" not in tasks:
        tracebacks.warn(
            f"TF_CONFIG says that this process is {kind} {index} in a job of {workers}, but MirroredStrategy trains "
            "on the devices of this process alone: each worker trains a model of its own, on all data, and all write "
            "to the same files. Use MultiWorkerMirroredStrategy to train one model on all workers. "
            f"See {doc_pages.page('how-to/launch')}."
        )
