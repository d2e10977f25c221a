"""Everything on one device of the user's choice."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from replicax import _context, _cross_device_ops, _devices, _input, _levels
from replicax._default import SingleReplicaContext, SingleReplicaExtended
from replicax._placement import Placement
from replicax._strategy import Strategy
from replicax._values import ReplicaMesh


class OneDeviceContext(SingleReplicaContext):
    """The context of the only replica."""

    @property
    def replica_id_in_sync_group(self) -> Any:
        return jnp.asarray(0, dtype=jnp.int32)

    @property
    def devices(self) -> Any:
        return self._strategy.extended.worker_devices


class OneDeviceExtended(SingleReplicaExtended):
    """The engine of `OneDeviceStrategy`."""

    def __init__(self, container_strategy: Strategy, device: Any):
        super().__init__(container_strategy)
        self._mesh = ReplicaMesh([_devices.find_device(device)])
        self._placement = Placement(self._mesh)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """`tensor` itself: with one device there is nothing to copy it to."""
        _context.require_cross_replica(self._container)
        _cross_device_ops.check_destinations(destinations)
        return tensor

    def _call(self, fn, args, kwargs):
        strategy, frame = self._container, _levels.frame()
        if isinstance(frame, _levels.Level):
            frame.device = self._mesh.devices[0]
        context = OneDeviceContext(strategy, None)
        with _context.entered(strategy, context), jax.default_device(self._mesh.devices[0]):
            return fn(*args, **kwargs)

    def _new_variable(self, **kwargs: Any) -> Any:
        with jax.default_device(self._mesh.devices[0]):
            variable = super()._new_variable(**kwargs)
            there = [self._mesh.copies(self._mesh.mirror([leaf]))[0] for leaf in variable._storage.arrays]
            variable._storage.stay_on(self._mesh.devices[0], there)
        return variable

    def _device_text(self):
        return super()._device_text()[1:-1]

    def _distribute_dataset(self, dataset, options):
        return _input.DistributedDataset(dataset, 1, self._placement.place, options)


class OneDeviceStrategy(Strategy):
    """Runs everything on one device. Values are plain and variables ordinary ones.

    Good for trying out code written for several devices: every method works, and nothing is split.

    Args:
        device: a name such as `"GPU:0"` or a `jax.Device`.

    Raises:
        DeviceError: the name does not parse, or there is no such device.

    >>> import replicax as rx
    >>> strategy = rx.OneDeviceStrategy("CPU:0")
    >>> strategy.run(lambda x: x + 1, args=(1,))
    2
    """

    def __init__(self, device: Any):
        super().__init__(OneDeviceExtended(self, device))
