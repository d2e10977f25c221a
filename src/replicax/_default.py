"""The strategy that is current where no other is: one replica, on the devices that JAX picks."""

from __future__ import annotations

import contextlib
from typing import Any, cast

from replicax import _collectives, _compiled_runs, _context, _extended, _function, _levels, _nest
from replicax._context import ReplicaContext
from replicax._extended import StrategyExtended
from replicax._resource_variable import ResourceVariable
from replicax._strategy import Strategy
from replicax._types import InputContext, ValueContext
from replicax._values import is_array, is_text


class SingleReplicaContext(ReplicaContext):
    """The context of a strategy's only replica: meeting is calling."""

    def _merge(self, fn, args, kwargs, tag):
        with _context.entered(self._strategy, None):
            return fn(self._strategy, *args, **kwargs)

    def _all_reduce(self, op, leaves, options):
        return leaves

    def _all_gather(self, leaves, axis, options):
        return leaves


class SingleReplicaExtended(StrategyExtended):
    """The engine of strategies with one replica whose values are plain: methods that pass them through."""

    @property
    def _num_replicas_in_sync(self):
        return 1

    def _run(self, fn, args, kwargs):
        outermost = type(_levels.frame()) is _levels.Frame and not _levels.is_tracing()
        if _function.host_driven() and outermost and not any(map(_is_text, _nest.leaves((args, kwargs)))):
            return _compiled_runs.run_compiled(self._container, fn, args, kwargs)
        return self._call(fn, args, kwargs)

    def _call(self, fn, args, kwargs):
        """Calls a replica function here and now."""
        return fn(*args, **kwargs)

    def _reduce(self, op, value, axis):
        if axis is None:
            return value
        return _nest.map_structure(lambda leaf: _collectives.reduce_along(op, [leaf], axis), value)

    def _gather(self, value, axis):
        return value

    def _local_results(self, value):
        return (value,)

    def _values_from_function(self, value_fn):
        return value_fn(ValueContext(0, 1))

    def batch_reduce_to(self, reduce_op, value_destination_pairs, options=None):
        _context.require_cross_replica(self._container)
        return [value for value, _ in value_destination_pairs]

    def _new_variable(self, **kwargs: Any) -> Any:
        variable = ResourceVariable(**kwargs)
        variable._strategy = self._container
        return variable

    def _update(self, var, fn, args, kwargs, group):
        result = fn(var, *args, **kwargs)
        return result if group else (result,)


class _DefaultReplicaContext(SingleReplicaContext):
    """The context of programs outside of any strategy."""

    @property
    def devices(self):
        return ("",)


class DefaultExtended(SingleReplicaExtended):
    """The engine of the default strategy."""

    def __init__(self, container_strategy: Strategy):
        super().__init__(container_strategy)
        self._replica_context = _DefaultReplicaContext(container_strategy, 0)

    def _device_text(self):
        return ""

    def _scope_context(self):
        return contextlib.nullcontext()

    def _distribute_dataset(self, dataset, options):
        return dataset

    def _datasets_from_function(self, dataset_fn, options):
        return dataset_fn(InputContext())

    def _new_variable(self, **kwargs: Any) -> Any:
        variable = super()._new_variable(**kwargs)
        variable._strategy = None
        return variable

    def _create_variable(self, **kwargs: Any) -> Any:
        _function.note_creation()
        return self._new_variable(**kwargs)

    def variable_created_in_scope(self, v):
        return _levels.container_of(_extended._checked_variable(v))._strategy is None

    def _get_cross_device_ops(self, value=None):
        raise RuntimeError("The default strategy has one replica and combines nothing.")

    def broadcast_to(self, tensor, destinations):
        raise RuntimeError("The default strategy has one replica and combines nothing.")

    @property
    def should_checkpoint(self):
        return True

    should_save_summary = should_checkpoint

    @property
    def worker_devices(self):
        raise RuntimeError("worker_devices() method unsupported by default tf.distribute.Strategy.")

    @property
    def parameter_devices(self):
        raise RuntimeError("parameter_devices() method unsupported by default tf.distribute.Strategy.")


class _DefaultDistributionStrategy(Strategy):
    """The default strategy: what `get_strategy()` gives outside of any scope."""

    def __init__(self) -> None:
        super().__init__(DefaultExtended(self))


def _is_text(value: Any) -> bool:
    return is_array(value) and is_text(value)


def get_strategy() -> Strategy:
    """The current strategy: the one whose scope was entered, or the default strategy.

    >>> import replicax as rx
    >>> rx.get_strategy().num_replicas_in_sync
    1
    """
    return cast(Strategy, _context.get_strategy())
