"""One replica on each of several devices, with one copy of each variable for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from replicax._base import devices, nest
from replicax._base.types import Args, Kwargs, Tree, VariableAggregation, VariableSynchronization, as_variable_option
from replicax._collectives.arithmetic import first_component
from replicax._collectives.cross_device_ops import CollectiveAllReduce
from replicax._collectives.reducer import Reducer
from replicax._strategies.replicated import ReplicatedExtended
from replicax._strategies.strategy import Strategy
from replicax._tracing.context import StrategyLike
from replicax._values import ReplicaMesh
from replicax._variables.central import AggregatingVariable, DeviceHome, HostHome
from replicax._variables.variable import Variable


class CentralStorageExtended(ReplicatedExtended):
    """The extended methods of `CentralStorageStrategy`."""

    _variables_live_once = True

    def __init__(
        self,
        container_strategy: StrategyLike,
        compute_devices: Sequence[str | jax.Device] | None,
        parameter_device: str | jax.Device | None,
    ):
        if not compute_devices:
            names = devices.default_devices()
            compute_devices = names[:1] if names[0].startswith("CPU:") else names
        mesh = ReplicaMesh(devices.find_devices(compute_devices))
        super().__init__(container_strategy, Reducer(mesh, CollectiveAllReduce()))
        if parameter_device is None:
            parameter_device = mesh.device_names[0] if mesh.size == 1 else "/device:CPU:0"
        self._parameter_device = parameter_device
        self._home = _home_on(devices.short_name(parameter_device), mesh)

    @property
    def worker_devices(self) -> list[str]:
        """The full names of the compute devices."""
        return list(self._mesh.device_names)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The parameter device, as it was given."""
        return (self._parameter_device,)

    def _new_variable(self, **kwargs: Tree) -> Variable:
        as_variable_option(VariableSynchronization, kwargs["synchronization"], kwargs["name"])
        as_variable_option(VariableAggregation, kwargs["aggregation"], kwargs["name"])
        return AggregatingVariable(
            strategy=self._container, reducer=self._reducer, home=self._home, device=self._parameter_device, **kwargs
        )

    def _update(self, var: Tree, fn: Callable[..., Tree], args: Args, kwargs: Kwargs, group: bool) -> Tree:
        if not isinstance(var, Variable):
            raise ValueError(f"You can not update `var` {var!r}. It must be a Variable.")
        args, kwargs = nest.map_structure(first_component, args), nest.map_structure(first_component, kwargs)
        result = fn(var, *args, **kwargs)
        return result if group else (result,)


def _home_on(name: str, mesh: ReplicaMesh) -> DeviceHome | HostHome:
    """Returns the home of variables: pinned memory if the device is the host and the replicas' are accelerators."""
    beside_accelerators = name.startswith("CPU:") and not devices.short_name(mesh.devices[0]).startswith("CPU:")
    if name == "CPU:0" and beside_accelerators and HostHome.possible(mesh):
        return HostHome(mesh)
    return DeviceHome(devices.find_device(name))


class CentralStorageStrategy(Strategy):
    """Runs one replica on each compute device, with one copy of every variable for all of them.

    What replicas assign to a variable is aggregated, so that a variable that is assigned in `run` needs an
    `aggregation`, and then assigned once. Where the compute devices are accelerators and the parameter device is the
    host, variables rest in its pinned memory: each compiled step brings those that it uses to the devices and back, and
    between steps they take no memory there.

    Args:
        compute_devices: names or `jax.Device` objects; by default all accelerators or, where there are none, one CPU
            device.
        parameter_device: what holds the variables; by default the compute device if there is one, else the host.

    Raises:
        DeviceError: a name does not parse, or there is no such device.
        AssertionError: a compute device is named twice.

    >>> import jax.numpy as jnp, replicax as rx
    >>> strategy = rx.experimental.CentralStorageStrategy(["GPU:0", "GPU:1"], "CPU:0")
    >>> with strategy.scope():
    ...     w = rx.Variable(1.0, aggregation=rx.VariableAggregation.SUM)
    >>> @rx.function
    ... def step():
    ...     return strategy.run(lambda: w.assign_add(jnp.float32(1.0) * 2))
    >>> float(step()), float(w), w.device
    (5.0, 5.0, '/job:localhost/replica:0/task:0/device:CPU:0')
    """

    def __init__(
        self,
        compute_devices: Sequence[str | jax.Device] | None = None,
        parameter_device: str | jax.Device | None = None,
    ):
        super().__init__(CentralStorageExtended(self, compute_devices, parameter_device))
