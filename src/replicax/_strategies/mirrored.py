"""One replica on each of several devices of one machine, with a copy of every variable on each."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from replicax._base import devices as _devices
from replicax._base.types import as_flag
from replicax._collectives.cross_device_ops import CollectiveAllReduce, CrossDeviceOps, NcclAllReduce
from replicax._collectives.reducer import Reducer
from replicax._strategies.replicated import MirroringExtended
from replicax._strategies.strategy import Strategy
from replicax._tracing.context import StrategyLike
from replicax._values import ReplicaMesh


class MirroredExtended(MirroringExtended):
    """The extended methods of `MirroredStrategy`."""

    def __init__(
        self,
        container_strategy: StrategyLike,
        devices: Sequence[str | jax.Device] | None,
        cross_device_ops: CrossDeviceOps | None,
        shard_optimizer_state: bool = False,
    ):
        self._shards_optimizer_state = as_flag("shard_optimizer_state", shard_optimizer_state)
        scatters = cross_device_ops is None or isinstance(cross_device_ops, (CollectiveAllReduce, NcclAllReduce))
        if shard_optimizer_state and not scatters:
            raise ValueError(
                "With shard_optimizer_state=True gradients are reduced and scattered in one, for which "
                f"cross_device_ops is NcclAllReduce(...) or None, got {cross_device_ops!r}."
            )
        mesh = ReplicaMesh(_devices.find_devices(devices))
        super().__init__(container_strategy, Reducer(mesh, cross_device_ops or CollectiveAllReduce()))


class MirroredStrategy(Strategy):
    """Runs one replica on each device of a machine, keeping variables in step on all of them.

    Args:
        devices: names such as `["GPU:0", "GPU:1"]` or `jax.Device` objects; by default all accelerators or,
            where there are none, all CPU devices.
        cross_device_ops: how values are combined over the devices, such as `NcclAllReduce()`; by default all
            tensors of one dtype go into one all-reduce.
        shard_optimizer_state: each replica keeps and updates its part of what an `rx.Optimizer` knows: gradients are
            reduced and scattered, and new parameters gathered. The results are the same to rounding, whatever the
            optimizer, and its memory on each of n devices is a part of n. See docs/guide.md.

    Raises:
        DeviceError: a name does not parse, or there is no such device.
        AssertionError: a device is named twice.
        TypeError: `shard_optimizer_state` is not True or False.
        ValueError: `shard_optimizer_state` with `cross_device_ops` that cannot reduce and scatter in one.

    >>> import jax.numpy as jnp, replicax as rx
    >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    >>> with strategy.scope():
    ...     w = rx.Variable(1.0, aggregation=rx.VariableAggregation.SUM)
    >>> @rx.function
    ... def step():
    ...     return strategy.run(lambda: w.assign_add(jnp.float32(1.0) * 2))
    >>> [float(x) for x in step().values], float(w)
    ([5.0, 5.0], 5.0)
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        shard_optimizer_state: bool = False,
    ):
        super().__init__(MirroredExtended(self, devices, cross_device_ops, shard_optimizer_state))
