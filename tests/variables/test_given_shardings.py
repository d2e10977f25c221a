"""Arrays that are sharded already as initial values of variables: they stay so, or that is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from strategies import central, grouped, mirrored, one_device, sharded

import replicax as rx
from replicax._base import foreign_state

foreign_state.join()

VALUE = np.arange(64 * 128, dtype="f4").reshape(64, 128)
SPLIT = "an array that is split over devices"


def given(strategy, *layout, **axes):
    """An array that is split by a mesh of the user over the strategy's devices, by default along one axis, "x"."""
    devices = np.array(strategy.extended._mesh.logical_devices)
    mesh = Mesh(devices.reshape(tuple(axes.values()) or -1), tuple(axes) or ("x",))
    return jax.device_put(VALUE, NamedSharding(mesh, PartitionSpec(*layout)))


def parts(array):
    return [(shard.device, shard.index) for shard in array.addressable_shards]


@pytest.mark.parametrize(
    "strategy, layout, axes",
    [
        (mirrored(4), ("x",), {}),
        (mirrored(4), (None, "x"), {}),
        (sharded(2), (None, "x"), {}),
        (grouped(2, model=2), ("x",), {}),
        (grouped(2, model=2), ("x", "y"), {"x": 2, "y": 2}),
        (grouped(2, model=2), (None, "y"), {"x": 2, "y": 2}),
    ],
    ids=["rows", "columns", "other than divided", "over all devices", "both", "in a replica"],
)
def test_an_array_stays_as_it_is_split(strategy, layout, axes):
    value = given(strategy, *layout, **axes)
    with strategy.scope():
        variable, tree = rx.Variable(value), rx.Variable({"a": value, "b": jnp.ones(3)})
    for array in (variable.value(), tree.value()["a"]):
        assert parts(array) == parts(value)
        np.testing.assert_array_equal(array, VALUE)

    def replica(x):
        variable.assign_sub(rx.get_replica_context().all_reduce("MEAN", variable.value() * x))

    x = strategy.experimental_distribute_values_from_function(lambda context: jnp.float32(0.25))
    rx.function(lambda x: strategy.run(replica, args=(x,)))(x)
    np.testing.assert_allclose(variable.numpy(), 0.75 * VALUE, rtol=1e-6)
    assert parts(variable.value()) == parts(value)


def test_an_array_on_every_device_is_one_value():
    strategy = mirrored(4)
    with strategy.scope():
        variable = rx.Variable(given(strategy))
    assert variable.value().sharding.is_fully_replicated


@pytest.mark.parametrize(
    "strategy, of, layout, axes",
    [
        (mirrored(4), mirrored(4), ("x", "y"), {"x": 2, "y": 2}),
        (sharded(2), mirrored(4), ("x",), {}),
        (mirrored(2), mirrored(4), ("x",), {}),
        (central(), mirrored(2), ("x",), {}),
        (one_device(), mirrored(2), ("x",), {}),
    ],
    ids=["both dimensions", "more devices", "no parts", "one copy", "one device"],
)
def test_what_a_strategy_cannot_keep_split_is_refused(strategy, of, layout, axes):
    with strategy.scope(), pytest.raises(ValueError, match=SPLIT):
        rx.Variable(given(of, *layout, **axes), name="table")
    with strategy.scope():
        assert rx.Variable(np.asarray(given(of, *layout, **axes))).shape == VALUE.shape


def test_variables_of_each_replica_are_not_split():
    value = given(mirrored(2), "x")
    with mirrored(2).scope(), pytest.raises(ValueError, match=SPLIT):
        rx.Variable(value, synchronization=rx.VariableSynchronization.ON_READ)
    with mirrored(2).scope(), pytest.raises(ValueError, match="copies_may_differ"):
        rx.Variable(value, copies_may_differ=True)


def test_models_keep_arrays_split():
    strategy = mirrored(4)
    value = given(strategy, None, "x")
    with strategy.scope():
        param, weight = nnx.Param(value), keras.Variable(value, name="weight")

    @rx.function
    def step():
        def replica():
            weight.assign(weight.value * 2.0)
            param[...] = param[...] * 2.0

        strategy.run(replica)

    step()
    for array in (param[...], weight.value):
        assert parts(array) == parts(value)
        np.testing.assert_array_equal(array, 2.0 * VALUE)
    other = given(strategy, "x", "y", x=2, y=2)
    with strategy.scope(), pytest.raises(ValueError, match=SPLIT):
        keras.Variable(other, name="weight")
    with strategy.scope():
        unlike = nnx.Param(other)
    with pytest.raises(ValueError, match=SPLIT):
        rx.function(lambda: strategy.run(lambda: unlike[...] * 2.0))()


def test_initial_values_need_not_fit_on_an_accelerator():
    """Functions that make them run on the host where a variable is split or divided."""
    divided = rx.MirroredStrategy([f"GPU:{i}" for i in range(4)], shard_variables=True)
    host = jax.local_devices(backend="cpu")[0]
    for strategy, expected in ((divided, host), (mirrored(4), None)):
        mesh = strategy.extended._mesh
        with mesh.standing_for("tpu", mesh.size):
            where = getattr(strategy.extended, "_where_initial_values_are")()  # noqa: B009
        with where:
            assert jax.config.jax_default_device is expected
