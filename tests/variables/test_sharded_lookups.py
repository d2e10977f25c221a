"""Lookups in sharded tables: rows are sent, and not the table; so are their gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from strategies import MEAN, ctx, mirrored

import replicax as rx
from replicax._base import foreign_state
from replicax._benchmark import hlo

foreign_state.join()

N, ROWS, WIDTH, IDS = 4, 512, 32, 6  # IDS of each replica
COLUMNS = 513  # a table with so many rows is divided by columns


@functools.cache
def sharded(n=N):
    return rx.MirroredStrategy([f"GPU:{i}" for i in range(n)], shard_variables=True)


def table(rows=ROWS):
    return np.random.default_rng(0).normal(size=(rows, WIDTH)).astype("f4")


def ids_of(strategy, rows=ROWS, count=IDS, dtype="i4"):
    """Ids of each replica, the last of them out of bounds and the first ones negative."""
    drawn = np.random.default_rng(1).integers(0, rows, size=(N, 2, count // 2)).astype(dtype)
    drawn[:, -1, -1], drawn[:, 0, 0] = rows + 3, -2 if np.dtype(dtype).kind == "i" else 1
    return strategy.experimental_distribute_values_from_function(
        lambda context: jnp.asarray(drawn[context.replica_id_in_sync_group])
    )


LOOKUPS = {
    "index": lambda w, ids: w[ids],
    "take": lambda w, ids: jnp.nan_to_num(jnp.take(w, ids, axis=0)),
    "fill": lambda w, ids: jnp.take(w, ids, axis=0, fill_value=0.5),
    "clip": lambda w, ids: jnp.take(w, ids, axis=0, mode="clip"),
    "vmap": lambda w, ids: jax.vmap(lambda i: w[i])(ids.ravel()),
    "narrow": lambda w, ids: w.astype(jnp.bfloat16)[ids].astype(jnp.float32),
    "half rows": lambda w, ids: w[ids, : WIDTH // 2] + w[ids, WIDTH // 2 :],
    "elements": lambda w, ids: w[ids, ids % WIDTH],
    "checkpoint": lambda w, ids: jax.checkpoint(lambda w: jnp.sin(w[ids]))(w),
}


def trained(strategy, lookup, rows=ROWS, tape=False, use=lambda gradient: gradient, steps=2, ids=None):
    """Losses and the table after a few steps of Adam, and the collectives of a step."""
    with strategy.scope():
        w = rx.Variable(table(rows))
        optimizer = rx.Optimizer(optax.adam(0.01), [w], reduce_op="mean")

    def loss_of(w, ids):
        return jnp.mean(jnp.asarray(lookup(w, ids)) ** 2)

    def replica(ids):
        if tape:
            with rx.GradientTape() as recording:
                loss = loss_of(w.value(), ids)
            gradient = recording.gradient(loss, w)
        else:
            loss, gradient = jax.value_and_grad(loss_of)(w.value(), ids)
        optimizer.apply_gradients([use(gradient)])
        return loss

    step = rx.function(lambda ids: strategy.reduce(MEAN, strategy.run(replica, args=(ids,)), axis=None))
    ids = ids_of(strategy, rows) if ids is None else ids(strategy)
    found = hlo.collectives(step.lower(ids).compile().as_text())
    return [float(step(ids)) for _ in range(steps)], w.numpy(), found


def same_training(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], atol=2e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [ROWS, COLUMNS], ids=["rows", "columns"])
@pytest.mark.parametrize("name", LOOKUPS)
def test_rows_are_sent_in_place_of_the_table(name, rows):
    found = trained(sharded(), LOOKUPS[name], rows)
    same_training(found, trained(mirrored(N), LOOKUPS[name], rows))
    if (name, rows) in (("half rows", COLUMNS), ("elements", COLUMNS)):
        return  # which need other columns of each row than a replica has: the table is gathered
    sent = 4 * IDS * WIDTH  # bytes of the rows of a replica
    ids = N * IDS * 8
    assert found[2] and max(one.bytes for one in found[2]) <= max(N * sent, ids)
    assert sum(one.bytes for one in found[2]) <= 2 * N * sent + 2 * ids + 64 < rows * WIDTH


@pytest.mark.parametrize("rows", [ROWS, COLUMNS], ids=["rows", "columns"])
def test_what_is_sent(rows):
    found = trained(sharded(), LOOKUPS["index"], rows)[2]
    own, every = 4 * IDS * WIDTH, 4 * N * IDS * WIDTH
    sent = sorted((one.kind, one.bytes) for one in found if one.kind != "all-reduce")
    ids = ("all-gather", 4 * N * IDS)
    if rows == ROWS:
        assert sent == [ids, ("all-gather", every), ("reduce-scatter", own)]
    else:
        assert sent == [ids, ("all-to-all", own), ("all-to-all", own)]


def test_a_tape_and_what_is_computed_of_gradients():
    expected = trained(mirrored(N), LOOKUPS["take"], tape=True)
    found = trained(sharded(), LOOKUPS["take"], tape=True)
    same_training(found, expected)
    assert max(one.bytes for one in found[2]) == 4 * N * IDS * WIDTH
    for use in (lambda g: -0.5 * g / 3.0, lambda g: g.astype(jnp.bfloat16)):
        found = trained(sharded(), LOOKUPS["take"], use=use)
        np.testing.assert_allclose(found[1], trained(mirrored(N), LOOKUPS["take"], use=use)[1], atol=1e-4)
        assert max(one.bytes for one in found[2]) <= 4 * N * IDS * WIDTH


@pytest.mark.parametrize("rows", [8 * ROWS, 8 * ROWS + 1], ids=["rows", "columns"])
@pytest.mark.parametrize("one_is_whole", [False, True])
def test_sums_of_a_row_in_a_narrow_dtype_do_not_stop_growing(rows, one_is_whole):
    """Added one after the other, more than 256 ones are 256 in bfloat16."""
    strategy = sharded()
    with strategy.scope():
        w = rx.Variable(jnp.zeros((rows, WIDTH)))
    options = rx.CommunicationOptions(reduction_dtype="bfloat16")

    def replica(ids):
        one, other = (jax.grad(lambda w: jnp.sum(w[ids]))(w.value()) for _ in range(2))
        w.assign(ctx().all_reduce("SUM", one + other, options))
        return jnp.max(jnp.sum(one, axis=1)) if one_is_whole else 0.0

    ids = strategy.experimental_distribute_values_from_function(lambda context: jnp.zeros(400, jnp.int32))
    rx.function(lambda: strategy.run(replica, args=(ids,)))()
    np.testing.assert_array_equal(w.numpy()[0], N * 800)


def test_several_lookups_in_a_table():
    def twice(w, ids):
        return w[ids] * jnp.take(w, ids // 2, axis=0, mode="clip") + w[ids]

    found = trained(sharded(), twice)
    same_training(found, trained(mirrored(N), twice))
    assert max(one.bytes for one in found[2]) == 4 * N * IDS * WIDTH


def test_a_table_that_is_used_whole_too():
    """Its gradient is made whole, since the other part of it is, and is scattered once."""

    def tied(w, ids):
        return jnp.tanh(w[ids] @ w.T)

    found = trained(sharded(), tied)
    same_training(found, trained(mirrored(N), tied))
    scattered = [one.bytes for one in found[2] if one.kind == "reduce-scatter"]
    assert sorted(scattered) == [4 * IDS * WIDTH, 4 * ROWS * WIDTH // N]


def test_gradients_of_which_replicas_want_the_whole_too():
    def use(gradient):
        return gradient * jnp.minimum(1.0, 0.1 / jnp.linalg.norm(gradient))  # each clips its own

    same_training(trained(sharded(), LOOKUPS["index"], use=use), trained(mirrored(N), LOOKUPS["index"], use=use))


def test_many_ids_gather_the_table():
    """So many rows would be more to send."""
    found, expected = (
        trained(strategy, LOOKUPS["index"], ids=functools.partial(ids_of, count=ROWS))
        for strategy in (sharded(), mirrored(N))
    )
    same_training(found, expected)
    assert sorted(one.kind for one in found[2] if one.bytes > 64) == ["all-gather", "reduce-scatter"]


@pytest.mark.parametrize("dtype", ["u1", "u4", "i2"])
def test_ids_of_any_integer_dtype(dtype):
    rows, ids = 200 if dtype == "u1" else ROWS, functools.partial(ids_of, rows=200, dtype=dtype)
    same_training(
        trained(sharded(), LOOKUPS["clip"], rows, ids=ids), trained(mirrored(N), LOOKUPS["clip"], rows, ids=ids)
    )


def test_a_table_of_integers():
    numbers = np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH)
    strategy = sharded()
    with strategy.scope():
        w = rx.Variable(numbers, trainable=False)
    ids = ids_of(strategy)
    rows = rx.function(lambda ids: strategy.run(lambda ids: jnp.take(w.value(), ids, axis=0), args=(ids,)))(ids)
    for found, own in zip(rows.values, ids.values):
        np.testing.assert_array_equal(found, jnp.take(jnp.asarray(numbers), own, axis=0))


def test_lookups_in_a_loop():
    def recurrent(w, ids):
        return lax.scan(lambda h, i: (jnp.tanh(h + w[i]), None), jnp.zeros(WIDTH), ids.ravel())[0]

    same_training(trained(sharded(), recurrent), trained(mirrored(N), recurrent))


def embedding_of_nnx():
    model = nnx.Embed(ROWS, WIDTH, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

    def replica(ids):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(jnp.clip(ids, 0, ROWS - 1)) ** 2))(model)
        optimizer.update(model, ctx().all_reduce(MEAN, gradients))
        return loss

    return replica


def embedding_of_keras():
    model = keras.Sequential([keras.layers.Input((IDS // 2,)), keras.layers.Embedding(ROWS, WIDTH)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    def replica(ids):
        with rx.GradientTape() as tape:
            loss = jnp.mean(model(jnp.clip(ids, 0, ROWS - 1)) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return replica


@pytest.mark.parametrize("make", [embedding_of_nnx, embedding_of_keras])
def test_embedding_layers(make):
    losses, found = {}, []
    for strategy in (sharded(), mirrored(N)):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            replica = make()
        step = rx.function(lambda ids: strategy.reduce(MEAN, strategy.run(replica, args=(ids,)), axis=None))  # noqa: B023
        found.append(hlo.collectives(step.lower(ids_of(strategy)).compile().as_text()))
        losses[strategy] = [float(step(ids_of(strategy))) for _ in range(3)]
    np.testing.assert_allclose(losses[sharded()], losses[mirrored(N)], rtol=1e-6)
    assert max(one.bytes for one in found[0]) == 4 * N * IDS * WIDTH
    assert max(one.bytes for one in found[1]) >= 4 * ROWS * WIDTH
