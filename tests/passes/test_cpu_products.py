"""Gradients of weights are computed by XLA's fast matrix product on CPU devices, and are the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from strategies import ctx, mirrored, replica_id

import replicax as rx
from replicax._passes import pipeline
from replicax._passes.facts import Facts, Stage

IN_REPLICA = Facts(Stage.REPLICA, "cpu", optimizes=True)
SUMS = "lhs_contracting_dims={0}"  # how the product stands in a compiled program that the fast routine refuses


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [
        ((8,), (3,), (5,)),
        ((8,), (5,), (3,)),
        ((2, 4), (6,), (6,)),
        ((4,), (2, 3), (5,)),
        ((4,), (3,), (5, 2)),
        ((1,), (2,), (2,)),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32])
def test_products_are_the_same(rows, inputs, outputs, dtype):
    first = tuple(range(len(rows)))

    def product(g, x):
        return lax.dot_general(g, x, ((first, first), ((), ())), preferred_element_type=jnp.float32)

    rng = np.random.default_rng(0)
    g, x = (rng.integers(-3, 4, (*rows, *sizes)).astype(dtype) for sizes in (outputs, inputs))
    (found,) = pipeline.evaluate(jax.make_jaxpr(product)(g, x), IN_REPLICA, [g, x])
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.tensordot(g.astype(np.float32), x.astype(np.float32), (first, first)))


@pytest.mark.parametrize("jitted", [False, True])
def test_the_gradient_of_a_layer(jitted):
    strategy = mirrored(2)
    with strategy.scope():
        weights = rx.Variable(jnp.ones((32, 48)))
    x = np.random.default_rng(0).integers(-2, 3, (64, 32)).astype(np.float32)

    def output(w, x):
        return x @ w

    layer = jax.jit(output) if jitted else output

    def step_of():
        def replica():
            own = jnp.asarray(x) * (replica_id() + 1.0)
            gradient = jax.grad(lambda w: jnp.sum(layer(w, own) ** 2) / 2)(weights.value())
            return ctx().all_reduce("sum", gradient)

        return rx.function(lambda: strategy.run(replica))

    step = step_of()
    assert SUMS not in step.lower().compile().as_text()
    # The gradient of each replica is x^T (x w), where x is the first one's times the replica's number.
    expected = sum((r * x).T @ (r * x @ np.ones((32, 48), np.float32)) for r in (1, 2))
    np.testing.assert_allclose(step().values[1], expected, rtol=1e-6)
    rx.config.optimize_programs(False)
    try:
        plain = step_of()
        assert SUMS in plain.lower().compile().as_text()  # or the pass would be of no use with this JAX
        np.testing.assert_allclose(plain().values[0], expected, rtol=1e-6)
    finally:
        rx.config.optimize_programs(True)


def test_large_factors_stay_as_they_are():
    def product(g, x):
        return lax.dot_general(g, x, (((0,), (0,)), ((), ())))

    def barriers(*shapes):
        kinds = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        jaxpr = jax.make_jaxpr(product)(*kinds)
        return str(jax.make_jaxpr(lambda *args: pipeline.evaluate(jaxpr, IN_REPLICA, args))(*kinds)).count("barrier")

    assert barriers((512, 64), (512, 64)) > 0
    assert barriers((1 << 12, 1024), (1 << 12, 1024)) == 0
