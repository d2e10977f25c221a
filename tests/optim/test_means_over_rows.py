"""Means over the rows of a batch whose parts differ in size: shares, weighted gradients, and warnings about others."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import carried, compiled, ctx, mirrored, over, per_replica, ways

import replicax as rx
from replicax._data.sparse import SparseTensor

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be compiled:UserWarning")

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = (X @ np.float32([[1], [2], [3]])) ** 2
PADDED = rx.InputOptions(pad_last_batch=True)
ROWS = [8, 6, 5, 1]  # of four replicas: all parts alike, one empty part, three parts of 2 rows and 1, one row


def batch_of(strategy, rows, options=None):
    """A distributed batch of so many rows; with padding, the second one, after a full one."""
    dataset = rx.data.Dataset.from_tensor_slices((X, Y))
    dataset = dataset.take(rows).batch(8) if options is None else dataset.take(8 + rows).batch(8)
    return list(strategy.experimental_distribute_dataset(dataset, options))[-1]


def one_step_by_hand(x, y):
    """The loss and the weights after a step of gradient descent from ones, in float64."""
    x, y, weights = x.astype(np.float64), y.astype(np.float64), np.ones((3, 1))
    errors = x @ weights - y
    return np.mean(errors**2), weights - 0.1 * 2 * x.T @ errors / len(x)


def train(make, way, batch, loss_of, **options):
    """The loss and the weights after a step with this loss of a replica's rows."""
    strategy = make()
    with strategy.scope():
        weights = rx.Variable(jnp.ones((3, 1)))
        optimizer = rx.Optimizer(optax.sgd(0.1), weights, **options)

    @way
    def step(x, y):
        def replica_step(x, y):
            loss, gradient = jax.value_and_grad(lambda w: loss_of((x @ w - y) ** 2))(weights.value())
            optimizer.apply_gradients(gradient)
            return loss

        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    return step(*batch), weights.numpy()


@pytest.mark.across_processes
@pytest.mark.parametrize("rows", ROWS)
@ways
@over(plain=True, logical=False)
def test_shares_add_up_to_the_loss_and_the_gradient_of_one_device(make, way, rows):
    loss, weights = train(make, way, batch_of(make(), rows), rx.share_of_mean)
    expected = one_step_by_hand(X[:rows], Y[:rows])
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    np.testing.assert_allclose(weights, expected[1], rtol=1e-5)


@pytest.mark.across_processes
@pytest.mark.parametrize("rows", ROWS)
@ways
@over(plain=True, logical=False)
def test_mean_of_gradients_is_weighted_by_rows(make, way, rows):
    _, weights = train(make, way, batch_of(make(), rows), jnp.mean, reduce_op="MEAN")
    np.testing.assert_allclose(weights, one_step_by_hand(X[:rows], Y[:rows])[1], rtol=1e-5)


@pytest.mark.parametrize("loss_of, options", [(rx.share_of_mean, {}), (jnp.mean, {"reduce_op": "MEAN"})])
@pytest.mark.parametrize("rows", ROWS)
@ways
def test_padded_batches_give_the_same(way, rows, loss_of, options):
    batch = batch_of(mirrored(4), rows, PADDED)
    _, weights = train(lambda: mirrored(4), way, batch, loss_of, **options)
    np.testing.assert_allclose(weights, one_step_by_hand(X[8 : 8 + rows], Y[8 : 8 + rows])[1], rtol=1e-5)


@pytest.mark.parametrize("loss_of, options", [(rx.share_of_mean, {}), (jnp.mean, {"reduce_op": "MEAN"})])
@ways
def test_sharded_optimizer_state_gives_the_same(way, loss_of, options):
    strategy = rx.MirroredStrategy([f"GPU:{i}" for i in range(4)], shard_optimizer_state=True)
    _, weights = train(lambda: strategy, way, batch_of(strategy, 6), loss_of, **options)
    np.testing.assert_allclose(weights, one_step_by_hand(X[:6], Y[:6])[1], rtol=1e-5)


@pytest.mark.parametrize(
    "values, where",
    [
        (np.arange(6.0), None),
        (np.arange(12).reshape(6, 2), None),
        (np.arange(6) > 3, None),
        (np.arange(12.0).reshape(6, 2), np.array([[1, 0]] * 3 + [[1, 1]] * 3, bool)),
        (np.arange(6.0).astype(jnp.bfloat16), None),
    ],
    ids=["floats", "integers of two dimensions", "booleans", "masked", "bfloat16"],
)
@ways
def test_shares_are_of_numpys_mean(way, values, where):
    strategy = mirrored(4)
    split = [slice(0, 3), slice(3, 3), slice(3, 4), slice(4, 6)]
    parts = per_replica(strategy, [values[part] for part in split])
    masks = None if where is None else per_replica(strategy, [where[part] for part in split])
    mean = way(lambda *args: strategy.reduce("SUM", strategy.run(rx.share_of_mean, args=args), axis=None))
    found = mean(parts) if masks is None else mean(parts, masks)
    assert found.dtype == jnp.mean(jnp.asarray(values)).dtype
    expected = np.mean(values.astype(np.float64), where=True if where is None else where)
    np.testing.assert_allclose(np.float64(found), expected, rtol=1e-6 if found.dtype != jnp.bfloat16 else 2e-2)


def test_share_outside_of_replicas_is_the_mean():
    assert float(rx.share_of_mean([1.0, 2.0, 6.0])) == 3.0
    with mirrored(4).scope(), pytest.raises(RuntimeError, match="takes the values of one replica: call it in the func"):
        rx.share_of_mean([1.0])


def test_even_parts_need_no_collective_for_the_number_of_rows():
    strategy = mirrored(4)
    program = rx.function(lambda x: strategy.reduce("SUM", strategy.run(rx.share_of_mean, args=(x,)), axis=None))
    assert carried(program, batch_of(strategy, 8)[0]) == [1]


# Reductions that are not what the user wants.

UNEQUAL = "gives every replica the same weight, but the replicas have 2, 2, 2, 0 rows"


@ways
def test_mean_of_unequal_parts_warns(way):
    strategy = mirrored(4)
    x, _ = batch_of(strategy, 6)
    with pytest.warns(UserWarning, match=rf"strategy.reduce\('MEAN', ..., axis=None\)` {UNEQUAL}"):
        way(lambda x: strategy.reduce("MEAN", strategy.run(jnp.sum, args=(x,)), axis=None))(x)
    with pytest.warns(UserWarning, match=rf"all_reduce\('MEAN', ...\)` {UNEQUAL}"):
        way(lambda x: strategy.run(lambda x: ctx().all_reduce("MEAN", jnp.sum(x)), args=(x,)))(x)


@ways
def test_means_that_are_right_do_not_warn(way):
    strategy = mirrored(4)
    rows = jnp.asarray(X[:6])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*cannot be compiled")
        means = way(lambda x: strategy.reduce("MEAN", strategy.run(jnp.mean, args=(x,)), axis=None))
        np.testing.assert_allclose(means(batch_of(strategy, 8)[0]), X[:8].mean(), rtol=1e-5)
        by_rows = way(lambda x: strategy.reduce("MEAN", strategy.run(lambda x: x * 1, args=(x,)), axis=0))
        np.testing.assert_allclose(by_rows(batch_of(strategy, 6)[0]), rows.mean(0), rtol=1e-5)


@ways
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_rows_of_other_lengths_do_not_warn(way, kind):
    """Ragged and sparse tensors of as many rows, with other numbers of values."""
    strategy = mirrored(2)
    values = per_replica(strategy, [np.ones(n, np.float32) for n in (3, 5)])
    if kind == "ragged":
        batch = rx.data.RaggedTensor(values, per_replica(strategy, [np.array([0, 1, n]) for n in (3, 5)]))
    else:
        whole = SparseTensor(np.zeros((1, 2)), np.ones(1), [2, 9])
        indices = per_replica(strategy, [np.zeros((n, 2), np.int64) for n in (3, 5)])
        shape = per_replica(strategy, [np.array([2, 9])] * 2)
        batch = jax.tree.unflatten(jax.tree.structure(whole), [indices, values, shape])
    labels = per_replica(strategy, [np.ones(2, np.float32)] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*cannot be compiled")

        def replica_step(batch, labels):
            return ctx().all_reduce("MEAN", jnp.sum(batch.values)) + jnp.sum(labels)

        step = way(lambda *args: strategy.reduce("MEAN", strategy.run(replica_step, args=args), axis=None))
        assert float(step(batch, labels)) == 6.0


@ways
def test_ragged_parts_of_other_numbers_of_rows_warn(way):
    strategy = mirrored(2)
    values = per_replica(strategy, [np.ones(4, np.float32)] * 2)
    batch = rx.data.RaggedTensor(values, per_replica(strategy, [np.array([0, 1, 4]), np.array([0, 1, 3, 4])]))
    with pytest.warns(UserWarning, match="the replicas have 2, 3 rows"):
        way(lambda x: strategy.run(lambda x: ctx().all_reduce("MEAN", jnp.sum(x.values)), args=(x,)))(batch)


@ways
def test_arguments_that_disagree_about_rows_warn_and_are_not_weighted(way):
    strategy = mirrored(2)
    with strategy.scope():
        weight = rx.Variable(0.0)
        optimizer = rx.Optimizer(optax.sgd(1.0), weight, reduce_op="MEAN")
    ids, labels = (per_replica(strategy, [np.zeros(n) for n in sizes]) for sizes in ((5, 2), (1, 1)))

    def replica_step(ids, labels):
        optimizer.apply_gradients(jnp.float32(ids.shape[0]))

    with pytest.warns(UserWarning, match=r"Optimizer\(reduce_op='MEAN'\).*arguments with different numbers of rows"):
        way(lambda *args: strategy.run(replica_step, args=args))(ids, labels)
    assert float(weight) == -3.5


def test_whole_batch_in_each_replica_warns():
    strategy = mirrored(4)
    with pytest.warns(
        UserWarning, match=r"gets arrays of shapes \(8, 3\), \(8, 1\) that were not distributed: each of the 4"
    ):
        train(lambda: strategy, compiled, (X[:8], Y[:8]), rx.share_of_mean)
    count = rx.function(lambda x: strategy.reduce("SUM", strategy.run(jnp.sum, args=(x,)), axis=None))
    with pytest.warns(UserWarning, match=r"gets arrays of shapes \(8, 3\) that were not distributed"):
        count(X[:8])


def test_common_arrays_do_not_warn_where_they_are_no_batch():
    strategy = mirrored(4)
    x, _ = batch_of(strategy, 8)
    scales = np.float32([1, 2, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        beside_a_batch = rx.function(
            lambda x: strategy.reduce("SUM", strategy.run(lambda x, s: jnp.sum(x * s), args=(x, scales)), axis=None)
        )
        np.testing.assert_allclose(beside_a_batch(x), (X[:8] * scales).sum(), rtol=1e-5)
        own = rx.function(
            lambda s: strategy.run(lambda s: ctx().all_reduce("SUM", s * ctx().replica_id_in_sync_group), args=(s,))
        )
        assert own(scales).values[0].tolist() == [6, 12, 18]


@pytest.mark.parametrize(
    ("values", "where", "match"),
    [
        ("text", None, "takes an array of numbers, got 'text' of type str"),
        (None, None, "takes an array of numbers, got None"),
        ({"a": 1.0}, None, "For a nest of arrays: jax.tree.map"),
        (np.ones(3), np.array([1.0, 0.0, 1.0]), "a mask of booleans, got dtype float32. Pass `where != 0`"),
        (
            np.ones(3),
            np.array([True, False]),
            r"`where` of shape \(2,\) does not broadcast to the values' shape \(3,\)",
        ),
        (np.ones(3), np.ones((2, 3), bool), r"`where` of shape \(2, 3\) does not broadcast"),
    ],
)
def test_share_names_what_it_cannot_take(values, where, match):
    with pytest.raises((TypeError, ValueError), match=match):
        rx.share_of_mean(values, where)
