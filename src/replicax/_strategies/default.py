"""The strategy that is current where no other is: one replica, on the devices that JAX picks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NoReturn

from replicax._base.types import Args, InputContext, InputOptions, Kwargs, Tree
from replicax._engine import modes
from replicax._strategies.single_replica import SingleReplicaContext, SingleReplicaExtended
from replicax._strategies.strategy import Strategy
from replicax._tracing import context
from replicax._variables.resource import ResourceVariable
from replicax._variables.variable import Variable


class _DefaultReplicaContext(SingleReplicaContext):
    """The context of programs outside of any strategy."""

    @property
    def devices(self) -> tuple[str, ...]:
        return ("",)


class DefaultExtended(SingleReplicaExtended):
    """The extended methods of the default strategy."""

    _mesh = None  # type: ignore[assignment]  # JAX picks the device

    @property
    def worker_devices(self) -> NoReturn:
        """Raises `RuntimeError`: JAX picks the device."""
        raise RuntimeError("worker_devices() method unsupported by default tf.distribute.Strategy.")

    @property
    def parameter_devices(self) -> NoReturn:
        """Raises `RuntimeError`: JAX picks the device."""
        raise RuntimeError("parameter_devices() method unsupported by default tf.distribute.Strategy.")

    def _device_text(self) -> str:
        return ""

    def _scope_context(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def _call(self, fn: Callable[..., Tree], args: Args, kwargs: Kwargs) -> Tree:
        return fn(*args, **kwargs)

    def _create_variable(self, **kwargs: Tree) -> Variable:
        modes.note_creation()
        return self._new_variable(**kwargs)

    def _new_variable(self, **kwargs: Tree) -> Variable:
        return ResourceVariable(**kwargs)

    def _broadcast(self, tensor: Tree, destinations: object) -> NoReturn:
        raise RuntimeError("The default strategy has one replica and combines nothing.")

    def _distribute_dataset(self, dataset: object, options: InputOptions) -> Tree:
        return dataset

    def _datasets_from_function(self, dataset_fn: Callable[[InputContext], object], options: InputOptions) -> Tree:
        return dataset_fn(InputContext())


class _DefaultDistributionStrategy(Strategy):
    """The default strategy: what `get_strategy()` gives outside of any scope."""

    def __init__(self) -> None:
        super().__init__(DefaultExtended(self))


def get_strategy() -> Strategy:
    """Returns the current strategy: the one whose scope was entered, or the default strategy.

    >>> import replicax as rx
    >>> rx.get_strategy().num_replicas_in_sync
    1
    """
    strategy = context.get_strategy()
    assert isinstance(strategy, Strategy)
    return strategy
