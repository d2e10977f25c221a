"""Passes work together: uneven batches, sharded variables and the forms for CPUs, each pair and all three."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from strategies import SUM, ctx, mirrored, one_device

import replicax as rx
from replicax._base.jaxprs import equations
from replicax._passes import cpu_forms, pipeline
from replicax._passes.facts import Stage

N, WIDTH = 4, 64
RANDOM = np.random.default_rng(0)
DATA = RANDOM.integers(-2, 3, (6, WIDTH)).astype(np.float32)  # of the replicas: 2, 2, 2 and 0 rows
EVEN = RANDOM.integers(-2, 3, (8, WIDTH)).astype(np.float32)
IMAGES = RANDOM.normal(size=(6, 6, 6, 8)).astype(np.float32)
START = RANDOM.integers(-1, 2, (WIDTH, 2 * WIDTH)).astype(np.float32) / 8


def sharded():
    return rx.MirroredStrategy([f"GPU:{i}" for i in range(N)], shard_variables=True)


def copies():
    return mirrored(N)


def training_step(strategy):
    """Return a matrix and a step of gradient descent on the sum of (x w)^2 / 2 over the rows of a global batch."""
    with strategy.scope():
        weights = rx.Variable(START)

    def replica(x):
        def loss_of(w):
            return jnp.sum((x @ w) ** 2) / 2

        loss, gradient = jax.value_and_grad(loss_of)(weights.value())
        weights.assign_sub(0.01 * ctx().all_reduce(SUM, gradient))
        return ctx().all_reduce(SUM, loss)

    return weights, rx.function(lambda x: strategy.run(replica, args=(x,)))


def train(strategy, data):
    weights, step = training_step(strategy)
    (batch,) = strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensor_slices(data).batch(len(data)))
    loss = step(batch)
    jaxpr = next(iter(step._programs.entries.values()))[0].jaxpr
    return loss, weights.numpy(), collections.Counter(eqn.primitive.name for eqn in equations(jaxpr)), step


def by_hand(data):
    product = data @ START
    return np.sum(product**2) / 2, START - 0.01 * data.T @ product


def applied(step):
    lines = [line.split("  ") for line in step.pretty_printed_passes().splitlines()[1:]]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    return {name for stage, name, effect in cells if stage == Stage.REPLICA.value and effect == "applied"}


@pytest.mark.parametrize(
    ("make", "data", "passes"),
    [
        (copies, EVEN, {"cpu_forms"}),
        (copies, DATA, {"cpu_forms"}),
        (sharded, EVEN, {"sharded_variables", "cpu_forms"}),
        (sharded, DATA, {"sharded_variables", "cpu_forms"}),
    ],
    ids=["even copies", "uneven copies", "even parts", "uneven parts"],
)
def test_passes_work_together_on_products(make, data, passes):
    loss, weights, counts, step = train(make(), data)
    expected_loss, expected = by_hand(data)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([float(x) for x in loss.values], [expected_loss] * N, rtol=1e-5)
    assert applied(step) == passes
    if make is sharded:  # gathered once for the product, the gradient is only sent in parts
        assert (counts["all_gather"], counts["reduce_scatter"]) == (1, 1)
    else:
        assert (counts["all_gather"], counts["reduce_scatter"]) == (0, 0)
    assert counts["replicax_all_reduce"] == (1 if make is sharded else 2)


@pytest.mark.parametrize("make", [copies, sharded])
@pytest.mark.parametrize("rows", [6, 8], ids=["uneven", "even"])
def test_passes_work_together_on_convolutions(make, rows):
    """Of strided convolutions whose gradients have a faster form on CPUs, in branches as well."""

    def train(strategy):
        with strategy.scope():
            kernel = rx.Variable(np.full((3, 3, 8, 128), 0.1, np.float32))
            head = rx.Variable(np.linspace(-1, 1, 128, dtype=np.float32))

        def replica(x):
            def loss_of(values):
                kernel, head = values
                y = lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
                return jnp.sum(jnp.tanh(y * head))

            gradients = jax.grad(loss_of)([kernel.value(), head.value()])
            for variable, gradient in zip((kernel, head), ctx().all_reduce(SUM, gradients)):
                variable.assign_sub(0.01 * gradient)

        step = rx.function(lambda x: strategy.run(replica, args=(x,)))
        images = np.concatenate([IMAGES, IMAGES])[:rows]
        for batch in strategy.experimental_distribute_dataset(
            rx.data.Dataset.from_tensor_slices(images).batch(rows).repeat(2)
        ):
            step(batch)
        return kernel.numpy(), head.numpy(), step

    *expected, _ = train(one_device())
    *results, step = train(make())
    for one, other in zip(results, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    kinds = {(True, 6): {"sharded_variables", "cpu_forms"}, (True, 8): {"sharded_variables"}, (False, 6): {"cpu_forms"}}
    assert applied(step) >= kinds.get((make is sharded, rows), set())


def test_parts_are_gathered_whole_if_replicas_of_other_shapes_need_them_in_another_way():
    """Lookups send as many rows as a replica has ids: replicas with other numbers of ids would send other arrays."""

    def train(strategy):
        with strategy.scope():
            table = rx.Variable(np.arange(256 * 32, dtype=np.float32).reshape(256, 32) / 100)

        def replica(ids):
            gradient = jax.grad(lambda t: jnp.sum(t[ids] ** 2) / 2)(table.value())
            table.assign_sub(0.5 * ctx().all_reduce(SUM, gradient))
            return ctx().all_reduce(SUM, jnp.sum(table.value()[ids]))

        step = rx.function(lambda ids: strategy.run(replica, args=(ids,)))
        ids = np.array([3, 250, 3, 7, 90, 41])
        (batch,) = strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensor_slices(ids).batch(6))
        step(batch)
        assert step.experimental_get_tracing_count() == 1  # it was compiled
        return table.numpy()

    expected = np.arange(256 * 32, dtype=np.float32).reshape(256, 32) / 100
    for i in [250, 7, 90, 41]:
        expected[i] *= 0.5
    expected[3] *= 0.0  # looked up twice
    np.testing.assert_allclose(train(sharded()), expected, rtol=1e-6)
    np.testing.assert_allclose(train(copies()), expected, rtol=1e-6)


def test_the_printed_passes_are_in_the_order_in_which_they_run():
    step = rx.function(lambda x: x * 2)
    assert step.pretty_printed_passes() == ""
    concrete = step.get_concrete_function(rx.TensorSpec([2]))
    label, *lines = step.pretty_printed_passes().splitlines()
    assert label.startswith("function(float32[2]") and len(lines) == sum(len(one.stages) for one in pipeline.PASSES)
    assert [line.split()[-1] for line in lines][-2:] == ["call", "call"]  # chosen by the first call
    concrete(jnp.ones(2))
    assert all(line.endswith("not needed") for line in step.pretty_printed_passes().splitlines()[1:])


def test_only_passes_that_a_program_needs_apply_without_optimizations():
    rx.config.optimize_programs(False)
    try:
        loss, weights, counts, step = train(sharded(), EVEN)
    finally:
        rx.config.optimize_programs(True)
    np.testing.assert_allclose(weights, by_hand(EVEN)[1], rtol=1e-5, atol=1e-6)
    assert "applied" in step.pretty_printed_passes() and applied(step) == {"sharded_variables"}


def test_forms_for_cpus_name_the_versions_of_xla_that_need_them(monkeypatch):
    product = jax.make_jaxpr(lambda g, x: jnp.einsum("ni,nj->ij", g, x))(jnp.ones((512, 64)), jnp.ones((512, 64)))
    facts = cpu_forms.Facts(Stage.REPLICA, "cpu", optimizes=True)
    with_form = dataclasses.replace(cpu_forms.PRODUCTS, until="99")
    for form, is_needed in [(with_form, True), (dataclasses.replace(with_form, until="0.10.2"), False)]:
        monkeypatch.setattr(cpu_forms, "PRODUCTS", form)
        assert cpu_forms.applies(product, facts) == is_needed
