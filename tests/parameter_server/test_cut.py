"""The parts of a cut program together compute what the whole program does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cut_simulator import check, simulate

import replicax as rx

ROWS, DIM, BATCH = 1000, 16, 32
PLACES = pytest.mark.parametrize(("servers", "sharded"), [(1, ()), (2, ()), (2, [(ROWS, DIM)]), (3, [(ROWS, DIM)])])


@pytest.fixture(autouse=True)
def unpacked():
    rx.config.optimize_programs(False)
    yield
    rx.config.optimize_programs(True)


@pytest.fixture
def strategy():
    return rx.OneDeviceStrategy("CPU:0")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def embedding_step(strategy, optimizer, lookups=1):
    with strategy.scope():
        table = rx.Variable(normal(ROWS, DIM))
        weights = rx.Variable(normal(DIM, 1, seed=1))
        steps = rx.Variable(0)
        update = rx.Optimizer(optimizer, {"t": table, "w": weights}, reduce_op="SUM")

    @rx.function
    def step(ids, y):
        def replica(ids, y):
            def loss(p):
                rows = sum(p["t"][(ids + i) % ROWS] for i in range(lookups))
                return jnp.mean((rows @ p["w"] - y[:, None]) ** 2)

            value, gradients = jax.value_and_grad(loss)({"t": table.value(), "w": weights.value()})
            update.apply_gradients(gradients)
            steps.assign_add(1)
            return value

        return strategy.run(replica, args=(ids, y)), steps.value()

    ids = np.random.default_rng(2).integers(0, ROWS, BATCH).astype(np.int32)
    ids[:4] = ids[4]
    return step, (jnp.asarray(ids), jnp.asarray(normal(BATCH, seed=3)))


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.01, 10)),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "adagrad": lambda: optax.adagrad(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1),
    "clip_adamw": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lion": lambda: optax.lion(1e-2),
    "multi": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}


@PLACES
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_embeddings_trained_by_optax(strategy, name, servers, sharded):
    step, args = embedding_step(strategy, OPTIMIZERS[name]())
    outcome = check(simulate(step, args, servers, sharded), 2e-6)
    assert not any(update.compared for update in outcome.cut.updates) or name == "multi"
