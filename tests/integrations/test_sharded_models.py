"""Models and optimizers of Flax NNX and Keras, of whose variables each replica keeps a part."""

from __future__ import annotations

import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx
from strategies import MEAN, compiled, ctx, eager, mirrored

import replicax as rx
from replicax._base import foreign_state
from replicax._benchmark import hlo

foreign_state.join()

WIDTH, ROWS = 64, 4


def sharded(n):
    return rx.MirroredStrategy([f"GPU:{i}" for i in range(n)], shard_variables=True)


def data(n):
    return np.random.default_rng(0).normal(size=(n * ROWS, WIDTH)).astype("f4")


def per_replica(strategy):
    rows = np.split(data(strategy.num_replicas_in_sync), strategy.num_replicas_in_sync)
    return strategy.experimental_distribute_values_from_function(
        lambda context: jnp.asarray(rows[context.replica_id_in_sync_group])
    )


class Block(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.b(nnx.relu(self.a(x)))


def nnx_step(strategy):
    """A training step as Flax's documentation has it, and the arrays that it updates."""
    with strategy.scope():
        model = Block(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01)), wrt=nnx.Param)

    def replica(x):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, ctx().all_reduce(MEAN, gradients))
        return loss

    kernels = lambda: [model.a.kernel[...], model.b.kernel[...], optimizer.opt_state[1][0].mu["a"]["kernel"][...]]  # noqa: E731
    return lambda x: strategy.reduce(MEAN, strategy.run(replica, args=(x,)), axis=None), kernels


def keras_step(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(2 * WIDTH, activation="relu"), keras.layers.Dense(WIDTH)]
        model = keras.Sequential([keras.layers.Input((WIDTH,)), *layers])
        optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
        optimizer.build(model.trainable_variables)

    def replica(x):
        with rx.GradientTape() as tape:
            loss = jnp.mean((model(x) - x) ** 2) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    kernels = lambda: [model.weights[0].value, model.weights[2].value, optimizer.variables[2].value]  # noqa: E731
    return lambda x: strategy.reduce(MEAN, strategy.run(replica, args=(x,)), axis=None), kernels


@pytest.mark.parametrize("way", [compiled, eager])
@pytest.mark.parametrize("make", [nnx_step, keras_step])
def test_a_model_and_its_optimizer_train_in_parts(make, way):
    n = 4 if way is compiled else 2
    plain, own = mirrored(n), sharded(n)
    (step, kernels), (own_step, own_kernels) = make(plain), make(own)
    step, own_step = way(step), way(own_step)
    for _ in range(2):
        np.testing.assert_allclose(own_step(per_replica(own)), step(per_replica(plain)), rtol=1e-6)
    for one, other in zip(own_kernels(), kernels()):
        assert one.addressable_shards[0].data.shape == (one.shape[0] // n, one.shape[1])
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("make", [nnx_step, keras_step])
def test_what_a_step_sends(make):
    """A gather of each kernel, which is used backwards at once; no gather of what optimizers know."""
    strategy = sharded(4)
    step, _ = make(strategy)
    found = hlo.collectives(rx.function(step).lower(per_replica(strategy)).compile().as_text())
    kernel = 4 * 2 * WIDTH**2
    assert [one.bytes for one in found if one.kind == "all-gather"] == [kernel] * 2
    assert [one.bytes for one in found if one.kind == "reduce-scatter"] == [kernel // 4] * 2
    assert sum(one.bytes for one in found if one.kind == "all-reduce") < 4 * 4 * WIDTH  # biases, loss and norms


def test_keras_fits_saves_and_loads(tmp_path):
    def fitted(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers = [keras.layers.Dense(2 * WIDTH, activation="relu"), keras.layers.Dense(WIDTH)]
            model = keras.Sequential([keras.layers.Input((WIDTH,)), *layers])
            model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
        x = data(4)
        losses = model.fit(x, x, batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]
        return model, losses

    strategy = sharded(4)
    (model, losses), (_, expected) = fitted(strategy), fitted(mirrored(4))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    model.save(tmp_path / "model.keras")
    for other in (strategy, mirrored(2)):
        with other.scope():
            loaded = keras.models.load_model(tmp_path / "model.keras")
        for one, two in zip(loaded.get_weights(), model.get_weights()):
            np.testing.assert_array_equal(one, two)
        if other is strategy:
            assert loaded.weights[0].value.sharding.spec[0] == "replica"
