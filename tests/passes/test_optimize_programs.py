"""`rx.config.optimize_programs(False)`: the same results to rounding, of programs that nothing rewrites."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import SUM, carried, central, ctx, mirrored, over, replica_id

import replicax as rx

SIZES = [6, 16, 16, 3]
DATA = np.random.default_rng(0).normal(size=(22, 6)).astype(np.float32)


@pytest.fixture
def optimize():
    yield rx.config.optimize_programs
    rx.config.optimize_programs(True)


def training(strategy):
    """An MLP with Adam: its variables, and a step that gives the loss."""
    random = np.random.default_rng(1)
    with strategy.scope():
        layers = [
            (rx.Variable(random.normal(size=(m, n)).astype(np.float32) / m), rx.Variable(jnp.zeros(n)))
            for m, n in zip(SIZES, SIZES[1:])
        ]
        variables = [variable for layer in layers for variable in layer]
        optimizer = rx.Optimizer(optax.adam(0.01), variables)

    def replica(x):
        def loss(weights):
            hidden = x
            for weight, bias in zip(weights[::2], weights[1::2]):
                hidden = jnp.tanh(hidden @ weight + bias)
            return jnp.sum((hidden - x[:, :3]) ** 2) / 8

        value, gradients = jax.value_and_grad(loss)([variable.value() for variable in variables])
        optimizer.apply_gradients(gradients)
        return value

    @rx.function
    def step(x):
        return strategy.reduce(SUM, strategy.run(replica, args=(x,)), axis=None)

    return variables, step


def trained(strategy, data=DATA, epochs=2):
    """The losses of all steps, and what the variables are then."""
    variables, step = training(strategy)
    batches = strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensor_slices(data).batch(8))
    losses = [float(step(x)) for _ in range(epochs) for x in batches]
    return losses, [np.asarray(variable.numpy()) for variable in variables]


def check_the_same(strategy, optimize, data):
    losses, weights = trained(strategy, data)
    optimize(False)
    plain_losses, plain_weights = trained(strategy, data)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    for one, other in zip(weights, plain_weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@over(at_least=2, processes=1)
def test_training_is_the_same(make, n, optimize):
    check_the_same(make(), optimize, DATA[:16])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [functools.partial(mirrored, 4), central])
def test_training_with_uneven_batches_is_the_same(make, optimize):
    check_the_same(make(), optimize, DATA[:21])  # the last batch has 5 rows


def parameters(step, x) -> int:
    """How many arrays go into the compiled program."""
    text = step.lower(x).compile().as_text()
    return len(re.findall(r" parameter\(", text[text.index("ENTRY") :]))


def test_optimize_programs_off_leaves_separate_all_reduces_and_variables(optimize):
    """Six variables with two moments each, their gradients, and the loss."""
    strategy = mirrored(4)
    (x,) = strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensor_slices(DATA[:8]).batch(8))
    _, step = training(strategy)
    step(x)
    assert carried(step, x) == [1]
    packed = parameters(step, x)
    optimize(False)
    _, step = training(strategy)
    step(x)
    assert sum(carried(step, x)) == 7  # XLA may put them into one all-reduce, not into one vector
    assert parameters(step, x) >= packed + 15


def test_functions_follow_the_switch(optimize):
    """What was compiled before is compiled anew, and as it was where the switch is back."""
    strategy, traces = mirrored(2), []

    @rx.function
    def both():
        traces.append(rx.config.optimizes_programs())
        return strategy.run(lambda: ctx().all_reduce(SUM, [replica_id() * jnp.ones(3), replica_id() * jnp.ones(2)]))

    for on in (True, False, True, False):
        optimize(on)
        both()
        assert sum(carried(both)) == 2 - on
    assert traces == [True, False]


def test_bytes_per_pack_holds_without_optimizations(optimize):
    options = rx.CommunicationOptions(bytes_per_pack=8)
    optimize(False)

    @rx.function
    def sums():
        def replica():
            return ctx().all_reduce(SUM, [replica_id() * jnp.ones(size) for size in (1, 1, 2)], options)

        return mirrored(2).run(replica)

    assert carried(sums) == [1, 1]


def test_uneven_batches_run_eagerly(optimize):
    strategy, calls = mirrored(2), []
    batches = strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensor_slices(DATA[:3]).batch(3))

    @rx.function
    def step(x):
        calls.append(x)
        return strategy.reduce(SUM, strategy.run(lambda x: x.sum(), args=(x,)), axis=None)

    (x,) = batches
    optimize(False)
    found = [float(step(x)) for _ in range(3)]
    assert len(calls) == 3
    optimize(True)
    found += [float(step(x)) for _ in range(3)]
    assert len(calls) == 4
    np.testing.assert_allclose(found, DATA[:3].sum(), rtol=1e-5)
