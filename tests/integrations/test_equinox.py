"""Models of Equinox: a variable holds their arrays, and training is that of one device without replicax."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import MEAN, SUM, ctx, mirrored, over, sharded, ways

import replicax as rx

rng = np.random.default_rng(0)
X = rng.normal(size=(22, 3)).astype(np.float32)  # the last batch of 8 rows has 6
Y = X.sum(axis=1, keepdims=True)
MODEL = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
PARAMS, STATIC = eqx.partition(MODEL, eqx.is_inexact_array)
TRANSFORMATION = optax.adam(0.01)


@eqx.filter_value_and_grad
def loss_and_gradients(params, x, y):
    return jnp.sum((jax.vmap(eqx.combine(params, STATIC))(x) - y) ** 2) / 8


@functools.cache
def losses_of_one_device():
    step, params, state, losses = eqx.filter_jit(loss_and_gradients), PARAMS, TRANSFORMATION.init(PARAMS), []
    for start in (0, 8):
        loss, gradients = step(params, X[start : start + 8], Y[start : start + 8])
        updates, state = TRANSFORMATION.update(gradients, state, params)
        params = eqx.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, params


@pytest.mark.across_processes
@over(plain=True)
@ways
def test_filtered_gradients_train_a_model(make, way, tmp_path):
    strategy = make()
    with strategy.scope():
        params = rx.Variable(PARAMS)
        optimizer = rx.Optimizer(TRANSFORMATION, params)

    def replica(x, y):
        loss, gradients = loss_and_gradients(params.value(), x, y)
        optimizer.apply_gradients(gradients)
        return loss

    step = way(lambda x, y: strategy.reduce(SUM, strategy.run(replica, args=(x, y)), axis=None))
    dataset = rx.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(8)
    losses = [float(step(*batch)) for batch in strategy.experimental_distribute_dataset(dataset)]
    expected, expected_params = losses_of_one_device()
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    trained = params.value()
    assert jax.tree.structure(trained) == jax.tree.structure(PARAMS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), trained, expected_params)
    assert eqx.combine(trained, STATIC)(X[0]).shape == (1,)


@pytest.mark.filterwarnings("ignore:.* were not distributed")
@over(plain=True, one_of_each=True)
@ways
def test_models_are_arguments_of_replicas_and_checkpoints_restore_them(make, way, tmp_path):
    """Layers, which hold arrays and numbers but no functions, are values as a whole."""
    strategy, layer = make(), eqx.nn.Linear(3, 2, use_bias=False, key=jax.random.key(0))
    with strategy.scope():
        variable = rx.Variable(layer)

    def replica(layer):
        assert isinstance(layer, eqx.nn.Linear) and layer.bias is None
        return ctx().all_reduce(MEAN, jax.tree.map(lambda w: w * 2, layer)), layer(jnp.ones(3))

    doubled, outputs = way(lambda: strategy.run(replica, args=(variable.value(),)))()
    (weight, *_), (output, *_) = (strategy.experimental_local_results(x) for x in (doubled.weight, outputs))
    np.testing.assert_allclose(weight, layer.weight * 2)
    np.testing.assert_allclose(output, layer(jnp.ones(3)), rtol=1e-5)
    path = rx.train.Checkpoint(layer=variable).save(str(tmp_path / "ckpt"))
    variable.assign(jax.tree.map(jnp.zeros_like, layer))
    rx.train.Checkpoint(layer=variable).restore(path).assert_consumed()
    np.testing.assert_array_equal(variable.value().weight, layer.weight)


class Normalized(eqx.Module):
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, axis_name):
        self.norm = eqx.nn.BatchNorm(3, axis_name=axis_name, mode="batch")
        self.out = eqx.nn.Linear(3, 1, key=jax.random.key(0))

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.out(x), state


@pytest.mark.parametrize("make", [functools.partial(mirrored, 4), functools.partial(sharded, 2)])
def test_batch_norm_over_all_replicas_has_the_statistics_of_one_device(make):
    """Its `State` refuses values of another type, and types have the mesh of the replicas."""

    def trained(strategy, axis_name):
        model, state = eqx.nn.make_with_state(Normalized)(axis_name)
        arrays, static = eqx.partition(model, eqx.is_inexact_array)
        with strategy.scope():
            params, statistics = rx.Variable(arrays), rx.Variable(state, trainable=False)
            optimizer = rx.Optimizer(TRANSFORMATION, params)

        def replica(x, y):
            def loss_of(arrays, state):
                model = jax.vmap(eqx.combine(arrays, static), axis_name="batch", in_axes=(0, None), out_axes=(0, None))
                outputs, state = model(x, state)
                return rx.share_of_mean((outputs - y) ** 2), state

            (_, state), gradients = jax.value_and_grad(loss_of, has_aux=True)(params.value(), statistics.value())
            optimizer.apply_gradients(gradients)
            statistics.assign(state)

        dataset = rx.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(8)
        step = rx.function(lambda x, y: strategy.run(replica, args=(x, y)))
        for batch in strategy.experimental_distribute_dataset(dataset):
            step(*batch)
        return jax.tree.leaves((params.value(), statistics.value()))

    expected = trained(rx.OneDeviceStrategy("CPU:0"), "batch")
    for found, leaf in zip(trained(make(), ("batch", "replica")), expected, strict=True):
        np.testing.assert_allclose(found, leaf, rtol=1e-4, atol=1e-5)
