"""Random replica functions of sharded variables compute what they compute with copies."""

from __future__ import annotations

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from strategies import MEAN, SUM, ctx, mirrored

import replicax as rx

N = 4
SHAPES = [(128, 64), (66, 64), (128, 128)]  # divided by rows, by columns, and by rows


@functools.cache
def sharded():
    return rx.MirroredStrategy([f"GPU:{i}" for i in range(N)], shard_variables=True)


# What may become of an array `a`, another one of its shape, a small variable's value, and ids.
STEPS = [
    lambda a, other, small, ids: a + 0.5 * other,
    lambda a, other, small, ids: jnp.tanh(a) * other,
    lambda a, other, small, ids: a.T,
    lambda a, other, small, ids: a * small,
    lambda a, other, small, ids: a[ids],
    lambda a, other, small, ids: jnp.zeros_like(a).at[ids % len(a)].add(0.1 * a[ids % len(a)]),
    lambda a, other, small, ids: ctx().all_reduce(MEAN, a),
    lambda a, other, small, ids: 0.1 * ctx().all_reduce(SUM, a),
    lambda a, other, small, ids: a - jnp.mean(a),
    lambda a, other, small, ids: a / (1.0 + jnp.linalg.norm(a)),
    lambda a, other, small, ids: jnp.take(a, ids, axis=1, mode="clip"),
    lambda a, other, small, ids: lax.scan(lambda t, i: (t + 0.1 * i * a, None), jnp.zeros_like(a), jnp.arange(3.0))[0],
    lambda a, other, small, ids: lax.cond(small > 0.5, lambda a: 0.5 * a, lambda a: a, a),
    lambda a, other, small, ids: jax.grad(lambda v: jnp.sum(jnp.take(v, ids, axis=0, mode="clip") ** 2))(a),
    lambda a, other, small, ids: jax.grad(jax.checkpoint(lambda v: jnp.sum(jnp.tanh(v * other))))(a),
]


def replica_function(seed, variables, small):
    def replica(x, ids):
        drawn = random.Random(seed)
        arrays, results = [*(v.value() for v in variables), x], []
        for _ in range(drawn.randint(6, 14)):
            a = drawn.choice(arrays)
            other = drawn.choice([v for v in arrays if v.shape == a.shape])
            arrays.append(drawn.choice(STEPS)(a, other, small.value(), ids))
            if drawn.random() < 0.4:
                results.append(drawn.choice([jnp.sum, jnp.max, lambda v: v[:1], lambda v: v])(arrays[-1]))
        for variable in variables:
            new = drawn.choice([v for v in arrays if v.shape == variable.shape])
            variable.assign(ctx().all_reduce(MEAN, new) + 0.5 * variable.value())
            results.append(jnp.sum(variable.value()))
        return [*results, jnp.sum(arrays[-1])]

    return replica


def computed(strategy, seed):
    with strategy.scope():
        variables = [
            rx.Variable(0.3 * np.random.default_rng(i).normal(size=shape).astype("f4"))
            for i, shape in enumerate(SHAPES)
        ]
        small = rx.Variable(0.7)

    def given(make):
        return strategy.experimental_distribute_values_from_function(
            lambda context: jnp.asarray(make(np.random.default_rng(10 + context.replica_id_in_sync_group)))
        )

    x = given(lambda rng: rng.normal(size=SHAPES[0]).astype("f4"))
    ids = given(lambda rng: rng.integers(-5, 60, size=3))
    replica = replica_function(seed, variables, small)
    found = rx.function(lambda x, ids: strategy.run(replica, args=(x, ids)))(x, ids)
    return [np.asarray(part) for value in found for part in value.values] + [v.numpy() for v in variables]


@pytest.mark.parametrize("seed", range(8))
def test_parts_give_what_copies_give(seed):
    expected = computed(mirrored(N), seed)
    for one, other in zip(computed(sharded(), seed), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)
