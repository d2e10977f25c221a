"""Everything on one device of the user's choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from replicax._base import devices as _devices
from replicax._base.devices import DeviceLike
from replicax._base.types import Args, Kwargs, Tree
from replicax._collectives import cross_device_ops
from replicax._input.placement import Placement
from replicax._strategies.single_replica import SingleReplicaContext, SingleReplicaExtended
from replicax._strategies.strategy import Strategy
from replicax._tracing import context as _context
from replicax._tracing import frames
from replicax._tracing.context import StrategyLike
from replicax._tracing.protocols import storage_of
from replicax._values import ReplicaMesh
from replicax._variables.leaves import refuse_split
from replicax._variables.resource import ArrayStorage, ResourceVariable
from replicax._variables.variable import Variable


class OneDeviceContext(SingleReplicaContext):
    """The context of the only replica."""

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        return jnp.asarray(0, dtype=jnp.int32)

    @property
    def devices(self) -> Sequence[str]:
        return self._strategy.extended.worker_devices


class OneDeviceExtended(SingleReplicaExtended):
    """The extended methods of `OneDeviceStrategy`."""

    def __init__(self, container_strategy: StrategyLike, device: DeviceLike):
        super().__init__(container_strategy)
        self._mesh = ReplicaMesh([_devices.find_device(device)])
        self._placement = Placement(self._mesh)

    def _device_text(self) -> str:
        return super()._device_text()[1:-1]  # its only name

    def _call(self, fn: Callable[..., Tree], args: Args, kwargs: Kwargs) -> Tree:
        (device,) = self._mesh.devices
        frames.frame().run_on(device)
        context = OneDeviceContext(self._container, None)
        with _context.entered(self._container, context), jax.default_device(device):
            return fn(*args, **kwargs)

    def _new_variable(self, **kwargs: Tree) -> Variable:
        (device,) = self._mesh.devices
        with jax.default_device(device):
            variable = ResourceVariable(**kwargs)
            variable._strategy, storage = self._container, storage_of(variable)
            assert isinstance(storage, ArrayStorage)
            if not storage.is_abstract:
                refuse_split(storage.read(), variable.name)
                storage.stay_on(device, [self._mesh.copies(self._mesh.mirror([leaf]))[0] for leaf in storage.read()])
        return variable

    def _broadcast(self, tensor: Tree, destinations: object) -> Tree:
        cross_device_ops.check_destinations(destinations)
        return tensor  # with one device there is nothing to copy it to


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

    def __init__(self, device: DeviceLike):
        super().__init__(OneDeviceExtended(self, device))
