"""A strategy of one's own, made as the architecture page says: variables on the first of several devices only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import SUM, ctx, each, mirrored, per_replica, ways

import replicax as rx
from replicax._base import devices, nest
from replicax._collectives.arithmetic import first_component
from replicax._collectives.cross_device_ops import CollectiveAllReduce
from replicax._collectives.reducer import Reducer
from replicax._strategies.replicated import ReplicatedExtended
from replicax._values import ReplicaMesh
from replicax._variables.central import AggregatingVariable, DeviceHome
from replicax._variables.variable import Variable


class FirstDeviceExtended(ReplicatedExtended):
    """The extended methods of `FirstDeviceStrategy`."""

    _variables_live_once = True

    def __init__(self, strategy: rx.Strategy, names: list[str]):
        super().__init__(strategy, Reducer(ReplicaMesh(devices.find_devices(names)), CollectiveAllReduce()))

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return self._mesh.device_names[:1]

    def _new_variable(self, **kwargs: Any) -> Variable:
        home = DeviceHome(self._mesh.local_devices[0])
        place = {"home": home, "device": self.parameter_devices[0]}
        return AggregatingVariable(strategy=self._container, reducer=self._reducer, **place, **kwargs)

    def _update(self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        args, kwargs = nest.map_structure(first_component, (args, kwargs))
        result = fn(var, *args, **kwargs)
        return result if group else (result,)


class FirstDeviceStrategy(rx.Strategy):
    """One replica on each device; variables are on the first device only, from which all replicas read."""

    def __init__(self, names: list[str]):
        super().__init__(FirstDeviceExtended(self, names))


def first_device(n: int) -> FirstDeviceStrategy:
    return FirstDeviceStrategy([f"GPU:{i}" for i in range(n)])


def trained(strategy: rx.Strategy, way: Any) -> dict[str, Any]:
    """Two steps of linear regression; each replica has rows of its own, and all numbers are exact in float32."""
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        weights = rx.Variable(jnp.asarray([1.0, -2.0]), aggregation=rx.VariableAggregation.MEAN)
        rows = rx.Variable(0.0, trainable=False, aggregation=rx.VariableAggregation.SUM)
        largest = rx.Variable(0.0, trainable=False, aggregation=rx.VariableAggregation.MEAN)
        first = rx.Variable(0.0, trainable=False, aggregation=rx.VariableAggregation.ONLY_FIRST_REPLICA)
        optimizer = rx.Optimizer(optax.sgd(0.125), weights)
    features = per_replica(strategy, [np.float32([[i, 1], [1, -i]]) for i in range(n)])

    def replica(x: jax.Array) -> jax.Array:
        with rx.GradientTape() as tape:
            loss = jnp.sum((x @ weights.read_value() - 1.0) ** 2)
        optimizer.apply_gradients(tape.gradient(loss, weights))
        rows.assign_add(jnp.float32(len(x)))
        largest.assign(jnp.max(x))
        first.assign(10.0 + ctx().replica_id_in_sync_group)
        return loss

    def step(x: Any) -> Any:
        return strategy.run(replica, args=(x,))

    run = way(step)
    losses = [each(strategy, run(features), float) for _ in range(2)]
    state = [np.asarray(v.read_value()).tolist() for v in (weights, rows, largest, first)]
    return {"losses": losses, "state": state}


@ways
@pytest.mark.parametrize("n", [2, 4])
def test_variables_on_the_first_device_train_as_mirrored_ones_do(n, way):
    result = trained(first_device(n), way)
    assert result == trained(mirrored(n), way)
    _, rows, largest, first = result["state"]
    # Two steps of two rows on each replica; replica i's largest number is i, or 1 where that is more; replica 0's.
    assert (rows, largest, first) == (4.0 * n, sum(max(i, 1) for i in range(n)) / n, 10.0)


@ways
def test_variables_are_on_the_first_device_only(way):
    strategy = first_device(2)
    with strategy.scope():
        v = rx.Variable(jnp.zeros(3), aggregation=rx.VariableAggregation.SUM)
    way(lambda: strategy.run(lambda: v.assign_add(jnp.ones(3))))()
    assert v.read_value().tolist() == [2.0] * 3 and v.device == strategy.extended.parameter_devices[0]
    assert [name[-5:] for name in strategy.extended.parameter_devices] == ["GPU:0"]
    assert v.read_value().devices() == {strategy.run(lambda: jnp.ones(())).values[0].devices().pop()}


@ways
def test_methods_of_the_strategy_work_on_variables_that_live_once(way):
    strategy = first_device(2)
    with strategy.scope():
        v = rx.Variable(1.0, aggregation=rx.VariableAggregation.SUM)
    x = per_replica(strategy, [3.0, 4.0])
    way(lambda x: strategy.extended.update(v, lambda v, a: v.assign_add(a), args=(x,)))(x)
    assert float(v) == 4.0  # one variable: the first component
    assert float(way(lambda x: strategy.reduce(SUM, x, axis=None))(x)) == 7.0
    assert repr(strategy).count("GPU:") == 2


def test_creators_entered_outside_of_the_scope_see_its_variables():
    seen = []

    def creator(make, **kwargs):
        seen.append(kwargs["name"])
        return make(**kwargs)

    with rx.variable_creator_scope(creator), first_device(2).scope():
        rx.Variable(1.0, name="a")
    assert seen == ["a"]
