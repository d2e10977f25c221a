"""Models that are trained on parameter servers: the parts of a cut program together compute what the whole does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cut_simulator import check, normal, simulate, unpacked, variable

import replicax as rx

ROWS, DIM, BATCH = 1000, 16, 32
TABLE = (ROWS, DIM)
PLACES = [(1, ()), (2, ()), (2, [TABLE]), (3, [TABLE])]  # servers, and the shapes that are divided over them
__all__ = ["unpacked"]


def embedding_step(optimizer, lookups=1, dtype=np.float32):
    strategy = rx.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        table = rx.Variable(normal(*TABLE).astype(dtype))
        weights = rx.Variable(normal(DIM, 1, seed=1))
        steps = rx.Variable(0)
        update = rx.Optimizer(optimizer, {"t": table, "w": weights}, reduce_op="SUM")

    @rx.function
    def step(ids, y):
        def replica(ids, y):
            def loss(p):
                rows = sum(p["t"][(ids + i) % ROWS] for i in range(lookups)).astype(jnp.float32)
                return jnp.mean((rows @ p["w"] - y[:, None]) ** 2)

            value, gradients = jax.value_and_grad(loss)({"t": table.value(), "w": weights.value()})
            update.apply_gradients(gradients)
            steps.assign_add(1)
            return value

        return strategy.run(replica, args=(ids, y)), steps.value()

    ids = np.random.default_rng(2).integers(0, ROWS, BATCH).astype(np.int32)
    ids[:4] = ids[4]
    return step, (jnp.asarray(ids), jnp.asarray(normal(BATCH, seed=3)))


def mlp_step(optimizer):
    weights = variable({"a": normal(DIM, 64), "b": normal(64, seed=1), "c": normal(64, 1, seed=2)})
    update = rx.Optimizer(optimizer, weights, reduce_op="SUM")

    @rx.function
    def step(x, y):
        def loss(p):
            return jnp.mean((jax.nn.relu(x @ p["a"] + p["b"]) @ p["c"] - y[:, None]) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights.value())
        update.apply_gradients(gradients)
        return value

    return step, (jnp.asarray(normal(BATCH, DIM, seed=3)), jnp.asarray(normal(BATCH, seed=4)))


MLP_BYTES = 4 * (DIM * 64 + 64 + 64)

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.01, 10)),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1),
    "clip_adamw": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "accumulating": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}
OF_ALL = pytest.mark.parametrize("name", OPTIMIZERS)
EXPORTED = ["sgd", "clip_adamw", "lamb"]


@pytest.mark.sampled(3, others="thorough")
@OF_ALL
def test_embeddings_trained_by_optax(name):
    """With a table that is divided over three servers, and in one of the other places."""
    step, args = embedding_step(OPTIMIZERS[name]())
    for servers, sharded in (PLACES[-1], PLACES[list(OPTIMIZERS).index(name) % 3]):
        exported = name in EXPORTED and servers == 3
        outcome = check(simulate(step, args, servers, sharded, exported=exported), 2e-6)
        assert not any(update.compared for update in outcome.cut.exchange.updates)


@pytest.mark.parametrize("lookups", [1, 2])
def test_an_embedding_step_ships_ids_and_rows_and_no_table(lookups):
    step, args = embedding_step(optax.sgd(0.1), lookups)
    rows = lookups * BATCH * DIM * 4
    for place in PLACES:
        outcome = check(simulate(step, args, *place))
        assert outcome.gathered == rows
        assert outcome.read <= DIM * 4 + 8
        # With the rows of the gradient their ids travel, and the gradient of the weights.
        assert outcome.shipped <= rows + lookups * BATCH * 4 + DIM * 4 + 8


def test_adams_slots_stay_on_the_servers():
    step, args = embedding_step(optax.adam(0.1))
    for servers, sharded in PLACES:
        outcome = simulate(step, args, servers, sharded, together=True)
        assert outcome.shipped <= BATCH * DIM * 4 + BATCH * 4 + servers * (DIM * 4 + 8)
        assert outcome.read <= 3 * DIM * 4 + 8


def test_embeddings_of_bfloat16():
    step, args = embedding_step(optax.sgd(0.1), 1, jnp.bfloat16)
    for place in PLACES:
        check(simulate(step, args, *place), 2e-2)


@pytest.mark.sampled(3, others="thorough")
@OF_ALL
def test_a_network_ships_its_gradients_and_reads_its_weights(name):
    outcome = check(simulate(*mlp_step(OPTIMIZERS[name]()), exported=name in EXPORTED), 2e-6)
    few = 4 * (DIM + 64 + 64 + 1) if name == "adafactor" else 16  # adafactor ships the means of rows and columns
    assert MLP_BYTES <= outcome.shipped <= MLP_BYTES + few
    assert outcome.read <= MLP_BYTES + 16
    assert not outcome.gathered


def test_layers_under_a_checkpoint_look_up_rows():
    table, weights = variable(normal(*TABLE)), variable(normal(DIM, 1))

    @rx.function
    def step(ids):
        def loss(table, weights):
            return jnp.sum(jnp.tanh(table[ids]) @ weights)

        gradients = jax.grad(jax.checkpoint(loss), (0, 1))(table.value(), weights.value())
        table.assign_sub(0.1 * gradients[0])
        weights.assign_sub(0.1 * gradients[1])

    outcome = check(simulate(step, (jnp.arange(BATCH),)))
    assert (outcome.gathered, outcome.read) == (BATCH * DIM * 4, DIM * 4)
    assert outcome.shipped == BATCH * DIM * 4 + BATCH * 4 + DIM * 4


def test_a_factorization_of_two_tables_on_one_server_ships_errors_in_place_of_rows():
    users, items = variable(normal(*TABLE)), variable(normal(*TABLE, seed=1))

    @rx.function
    def step(i, j, rating):
        def loss(users, items):
            return jnp.mean((jnp.sum(users[i] * items[j], -1) - rating) ** 2)

        value, gradients = jax.value_and_grad(loss, (0, 1))(users.value(), items.value())
        users.assign_sub(0.1 * gradients[0])
        items.assign_sub(0.1 * gradients[1])
        return value

    args = jnp.arange(BATCH), 2 * jnp.arange(BATCH), jnp.asarray(normal(BATCH))
    assert check(simulate(step, args)).shipped == 3 * 4 * BATCH
    for servers, sharded in [(2, ()), (3, [TABLE])]:
        assert check(simulate(step, args, servers, sharded)).shipped <= 2 * (BATCH * DIM * 4) + 4 * 4 * BATCH
