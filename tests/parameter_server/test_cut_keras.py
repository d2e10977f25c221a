"""Keras optimizers on parameter servers."""

from __future__ import annotations

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from cut_simulator import check, normal, simulate, unpacked

import replicax as rx

__all__ = ["unpacked"]
TABLE = (1000, 16)

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01, clipnorm=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, clipnorm=0.5),
    "average": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1, use_ema=True),
    "accumulating": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
}


# What these do is not the same for each element; on one server all is together.
ON_ONE_SERVER = ["AdamW", "average", "loss scale"]


@pytest.mark.sampled(3, others="thorough")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_with_an_embedding_dropout_and_moving_averages(name):
    strategy = rx.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = keras.layers
        model = keras.Sequential(
            [layers.Input((5,), dtype="int32"), layers.Embedding(*TABLE), layers.Flatten(), layers.Dense(8, "relu")]
            + [layers.Dropout(0.3), layers.BatchNormalization(), layers.Dense(1)]
        )
        optimizer = OPTIMIZERS[name]()
        optimizer.build(model.trainable_variables)

    @rx.function
    def step(x, y):
        def replica(x, y):
            with rx.GradientTape() as tape:
                loss = jnp.mean((model(x, training=True) - y[:, None]) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return strategy.run(replica, args=(x, y))

    ids = np.random.default_rng(0).integers(0, TABLE[0], (32, 5)).astype(np.int32)
    args = jnp.asarray(ids), jnp.asarray(normal(32))
    for servers, sharded in [(3, [TABLE]), *([(1, ())] if name in ON_ONE_SERVER else [])]:
        outcome = check(simulate(step, args, servers, sharded, together=True), 5e-6)
        assert outcome.gathered == ids.size * TABLE[1] * 4
        assert outcome.read < TABLE[0] * TABLE[1] and outcome.shipped < TABLE[0] * TABLE[1]
        assert not any(update.compared for update in outcome.cut.exchange.updates)
