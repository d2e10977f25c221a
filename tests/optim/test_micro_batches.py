"""`rx.accumulate_gradients` of batches whose rows do not divide evenly: the results of the whole batch at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import ctx, last, mirrored, over, parts, ways

import replicax as rx

rng = np.random.default_rng(0)
X = rng.normal(size=(14, 3)).astype(np.float32)
Y = rng.normal(size=14).astype(np.float32)
W = rng.normal(size=3).astype(np.float32)


def errors(w, x, y):
    return (x @ w - y) ** 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["one by one", "looped"])
def test_results_are_those_of_the_whole_batch_for_any_number_of_rows(jit, op):
    called = []

    def loss(w, x, y):
        called.append(len(x))
        return (jnp.mean if op == "MEAN" else jnp.sum)(errors(w, x, y))

    whole = jax.jit(jax.value_and_grad(loss))
    accumulated = jit(rx.accumulate_gradients(jax.value_and_grad(loss), 4, op))
    # By the number of rows, those of the micro-batches.
    sizes = {8: [2] * 4, 7: [2, 2, 2, 1], 5: [2, 2, 1], 6: [2, 2, 2], 3: [1] * 3, 1: [1], 13: [4, 4, 4, 1]}
    for rows, expected in sizes.items():
        x, y = X[:rows], Y[:rows]
        called.clear()
        found = accumulated(W, x, y)
        # In a loop the function is traced once for each size that there is.
        assert called == (expected if jit is not jax.jit else list(dict.fromkeys(expected)))
        value, gradient = whole(W, x, y)
        np.testing.assert_allclose(found[0], value, rtol=1e-5)
        np.testing.assert_allclose(found[1], gradient, rtol=1e-5, atol=1e-6)


def test_means_of_integers_and_short_floats_are_weighted_by_rows():
    def means(x):
        return {"int": len(x) * jnp.ones((), jnp.int32), "half": jnp.mean(x).astype(jnp.float16)}

    found = rx.accumulate_gradients(means, 2, "MEAN", batch_argnums=0)(jnp.arange(5.0))
    # Of 3 and 2 rows, with means 1 and 3.5.
    assert float(found["int"]) == pytest.approx((3 * 3 + 2 * 2) / 5)
    assert float(found["half"]) == 2.0 and found["half"].dtype == jnp.float16


@pytest.mark.across_processes
@over(plain=True, one_of_each=True)
@ways
@pytest.mark.parametrize("rows", last([3, 13]))
def test_training_on_an_uneven_batch_is_that_of_the_whole_batch(make, way, rows):
    """The replicas have different numbers of rows, which the micro-batches do not divide, or fewer than these."""
    strategy, traced = make(), []
    rows += rows % 2 * strategy.extended.experimental_require_static_shapes  # whose replicas need as many rows each
    with strategy.scope():
        w = rx.Variable(W)
        optimizer = rx.Optimizer(optax.sgd(1.0), w)
        seen = rx.Variable(
            0.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation=rx.VariableAggregation.SUM
        )

    # Where variables live once the replicas meet to assign, and they may have different numbers of micro-batches.
    assigns = not strategy.extended._variables_live_once

    def gradients_of(w, x, y):
        traced.append(len(x))
        if assigns:
            seen.assign_add(jnp.sum(y))
        return jax.value_and_grad(lambda w: jnp.sum(errors(w, x, y)) / rows)(w)

    def replica(x, y):
        value, gradient = rx.accumulate_gradients(gradients_of, 4)(w.value(), x, y)
        optimizer.apply_gradients(gradient)
        return value

    step = way(lambda element: strategy.run(replica, args=element))
    data = X[:rows], Y[:rows]
    (element,) = strategy.experimental_distribute_dataset([data])
    value = strategy.reduce("SUM", step(element), axis=None)
    expected, gradient = jax.value_and_grad(lambda w: jnp.sum(errors(w, *data)) / rows)(W)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(w.numpy(), W - gradient, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(seen.numpy(), Y[:rows].sum() * assigns, rtol=1e-4, atol=1e-5)
    sizes = {len(part) for part in parts(strategy, element[0])}
    assert set(traced) <= {size for n in sizes for size in (-(-n // 4), n % max(1, -(-n // 4)))}


def test_replicas_may_communicate_where_they_have_as_many_micro_batches():
    strategy = mirrored(2)

    def total(x):
        return ctx().all_reduce("SUM", jnp.sum(x))

    def replica(x):
        return rx.accumulate_gradients(total, 2, batch_argnums=0)(x)

    (x,) = strategy.experimental_distribute_dataset([np.arange(7, dtype=np.float32)])  # of 4 and 3 rows
    for run in (strategy.run, rx.function(strategy.run)):
        assert [float(part) for part in run(replica, args=(x,)).values] == [21.0, 21.0]


def test_results_of_other_shapes_for_the_last_micro_batch_are_refused():
    for jit in (lambda f: f, jax.jit):
        outputs = jit(rx.accumulate_gradients(lambda x: x * 2, 2, batch_argnums=0))
        with pytest.raises(rx.InvalidArgumentError, match=r"\[\(1,\)\] after \[\(2,\)\].* not one output for each"):
            outputs(jnp.arange(3.0))
    both = rx.accumulate_gradients(lambda w, x, y: w, 2)
    with pytest.raises(rx.InvalidArgumentError, match=r"into 2 .* the same in each .* \(3,\), \(5,\)"):
        both(W, jnp.ones(3), jnp.ones(5))
