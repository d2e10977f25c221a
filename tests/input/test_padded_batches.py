"""Datasets whose last batch is padded: one program for an epoch, with the results of the rows that there are."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import MEAN, SUM, central, compiled, ctx, eager, mirrored, one_device, over, ways

import replicax as rx
from replicax._benchmark import hlo
from replicax._values import counted_form

RANDOM = np.random.default_rng(0)
ROWS, BATCH, RATE = 18, 8, 0.1  # batches of 8, 8 and 2 rows
X = RANDOM.normal(size=(ROWS, 3)).astype(np.float32)
Y = RANDOM.normal(size=(ROWS, 2)).astype(np.float32)
PADDED = rx.InputOptions(pad_last_batch=True)
S, A = rx.VariableSynchronization, rx.VariableAggregation


def batches(strategy, options=PADDED, rows=ROWS, batch=BATCH):
    dataset = rx.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(batch)
    return strategy.experimental_distribute_dataset(dataset, options)


def by_hand(epochs, rows=ROWS, batch=BATCH):
    """The kernel, the losses and the errors of each row, of gradient descent on the global batches."""
    kernel, losses, errors = np.full((3, 2), 0.1), [], []
    for _ in range(epochs):
        for start in range(0, rows, batch):
            x, y = X[start : min(start + batch, rows)], Y[start : min(start + batch, rows)]
            difference = x @ kernel - y
            errors.append(np.mean(difference**2, 1))
            losses.append(np.mean(errors[-1]))
            kernel = kernel - RATE * (x.T @ difference) / len(x)
    return kernel, losses, errors


def stepping(strategy, way):
    """A step of gradient descent on the mean of the global batch, whose size the replicas tell each other."""
    with strategy.scope():
        more = {"aggregation": A.ONLY_FIRST_REPLICA} if strategy.extended._variables_live_once else {}
        kernel = rx.Variable(jnp.full((3, 2), 0.1), **more)
        seen = rx.Variable(0.0, synchronization=S.ON_READ, aggregation=A.SUM)

    def replica(x, y):
        with rx.GradientTape() as tape:
            errors = jnp.mean((x @ kernel.value() - y) ** 2, axis=-1)
            loss = jnp.sum(errors)
        gradient = tape.gradient(loss, kernel)
        loss, gradient, rows = ctx().all_reduce(SUM, (loss, gradient, jnp.full((), x.shape[0], jnp.float32)))
        kernel.assign_sub(RATE * gradient / rows)
        seen.assign_add(jnp.float32(x.shape[0]))
        return loss / rows, errors

    def step(x, y):
        loss, errors = strategy.run(replica, args=(x, y))
        return strategy.reduce(MEAN, loss, axis=None), errors, strategy.reduce(MEAN, errors, axis=0)

    return way(step), kernel, seen


@pytest.mark.filterwarnings("ignore:.* gives every replica the same weight")
@ways
@pytest.mark.across_processes
@over()
def test_an_epoch_has_the_results_of_its_rows(make, way):
    strategy = make()
    if way is eager and strategy.extended._placement._check is not None:
        pytest.skip("eager replicas of TPUStrategy need parts of one shape")
    step, kernel, seen = stepping(strategy, way)
    expected, losses, errors = by_hand(2)
    found = [step(x, y) for _ in range(2) for x, y in batches(strategy)]
    for (loss, of_rows, mean), expected_loss, expected_errors in zip(found, losses, errors, strict=True):
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        np.testing.assert_allclose(mean, expected_loss, rtol=1e-5)
        # Which replica has which rows depends on how the batch is divided among workers.
        np.testing.assert_allclose(np.sort(strategy.gather(of_rows, axis=0)), np.sort(expected_errors), rtol=1e-5)
    np.testing.assert_allclose(kernel.numpy(), expected, rtol=1e-5)
    assert float(seen.read_value()) == 2 * ROWS
    if way is compiled:
        assert step.experimental_get_tracing_count() == 1


@pytest.mark.filterwarnings("ignore:.* gives every replica the same weight")
@pytest.mark.across_processes
@over(logical=False)
def test_the_numbers_are_those_without_padding(make):
    strategy, results = make(), []
    for options in (None, PADDED):
        step, kernel, _ = stepping(strategy, compiled)
        losses = [float(step(x, y)[0]) for x, y in batches(strategy, options, rows=13)]
        results.append([*losses, *kernel.numpy().ravel()])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6, atol=1e-6)


@ways
def test_components_are_the_rows_that_there_are(way):
    strategy = mirrored(4)
    *_, last = batches(strategy)
    assert [part.shape for part in last[0].values] == [(1, 3), (1, 3), (0, 3), (0, 3)]
    np.testing.assert_array_equal(strategy.gather(last[0], axis=0), X[16:])
    doubled = way(lambda x: strategy.run(lambda x: 2 * x, args=(x,)))(last[0])
    assert [part.shape for part in doubled.values] == [(1, 3), (1, 3), (0, 3), (0, 3)]
    np.testing.assert_allclose(strategy.reduce(SUM, doubled, axis=0), 2 * X[16:].sum(0), rtol=1e-5)


def test_a_function_that_takes_elements_is_one_program():
    strategy = mirrored(2)
    iterator = iter(batches(strategy))

    @rx.function
    def step():
        x, _ = next(iterator)
        return strategy.reduce(SUM, strategy.run(lambda x: jnp.sum(x), args=(x,)), axis=None)

    found = [float(step()) for _ in range(3)]
    np.testing.assert_allclose(found, [X[:8].sum(), X[8:16].sum(), X[16:].sum()], rtol=1e-5)
    assert step.experimental_get_tracing_count() == 1
    with pytest.raises(rx.OutOfRangeError):
        step()


@pytest.mark.across_processes
@over(at_least=2, logical=False)
def test_an_optimizer_and_random_numbers(make):
    """Dropout drops the same elements of the rows that there are."""
    strategy, results = make(), []
    for options in (None, PADDED):
        with strategy.scope():
            more = {"aggregation": A.SUM} if strategy is central() else {}
            kernel = rx.Variable(jnp.full((3, 2), 0.1), **more)
            optimizer = rx.Optimizer(optax.adam(0.1), [kernel])

        def replica(x, y, kernel=kernel, optimizer=optimizer):
            def loss(kernel):
                kept = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
                return jnp.sum((jnp.where(kept, x, 0) @ kernel - y) ** 2) / BATCH

            optimizer.apply_gradients([jax.grad(loss)(kernel.value())])

        step = rx.function(lambda x, y, replica=replica: strategy.run(replica, args=(x, y)))
        for x, y in batches(strategy, options):
            step(x, y)
        results.append(kernel.numpy())
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_a_dataset_of_each_worker_is_padded():
    strategy = mirrored(2)
    datasets = strategy.distribute_datasets_from_function(
        lambda c: rx.data.Dataset.from_tensor_slices(X[:7]).batch(c.get_per_replica_batch_size(6)), PADDED
    )
    step = rx.function(lambda x: strategy.reduce(SUM, strategy.run(lambda x: jnp.sum(x, 0), args=(x,)), axis=None))
    np.testing.assert_allclose([step(x) for x in datasets], [X[:6].sum(0), X[6:7].sum(0)], rtol=1e-5)
    assert step.experimental_get_tracing_count() == 1


def test_several_steps_in_a_call():
    strategy = mirrored(2)
    iterator = iter(batches(strategy))
    reduced = lambda x: strategy.reduce(SUM, strategy.run(lambda x: jnp.sum(x), args=(x,)), axis=None)  # noqa: E731
    steps = rx.function(lambda: reduced(next(iterator)[0]), steps_per_call=2)
    np.testing.assert_allclose([*steps(), *steps()], [X[:8].sum(), X[8:16].sum(), X[16:].sum()], rtol=1e-5)


def test_a_strategy_of_one_device_pads_nothing():
    strategy = one_device()
    assert [x.shape[0] for x, _ in batches(strategy)] == [8, 8, 2]


REFUSED = {
    "three rows at most": (lambda x: jnp.sum(x) * min(x.shape[0], 3), "a constant is 3.0 with 4 rows and 2.0 with 2"),
    "sorted": (lambda x: jnp.sort(x, 0), "'sort' combines or reorders rows.*test_padded_batches.py"),
    "a number": (lambda x: x.shape[0], "returns 4, and 3 with another number of rows"),
    "rows of all": (lambda x: jnp.sum(ctx().all_gather(x, 0)), "exchange rows by themselves"),
    "in pairs": (lambda x: jnp.sum(x.reshape(-1, 2, 3)), "raises TypeError with 3, by which it is found out"),
    "transposed": (lambda x: x.T, "not one row, along axis 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_be_exact_is_refused(name):
    strategy = mirrored(2)
    replica, message = REFUSED[name]
    step = rx.function(lambda x: strategy.run(replica, args=(x,)))
    x, _ = next(iter(batches(strategy)))
    with pytest.raises(ValueError, match=f"(?s)cannot take padded batches.*pad_last_batch.*{message}"):
        step(x)


def test_two_batches_at_once_are_refused():
    strategy = mirrored(2)
    (x, _), (other, _), _ = batches(strategy)
    step = rx.function(lambda x, y: strategy.run(lambda x, y: jnp.sum(x) + jnp.sum(y), args=(x, y)))
    with pytest.raises(ValueError, match="rows of several padded batches"):
        step(x, other)


@pytest.mark.parametrize(
    "use",
    [
        lambda strategy, x: strategy.gather(x, axis=0),
        lambda strategy, x: x.values,
        lambda strategy, x: strategy.reduce(SUM, x, axis=None),
        lambda strategy, x: strategy.reduce(SUM, x, axis=1),
    ],
    ids=["gather", "values", "reduce", "reduce along another axis"],
)
def test_in_a_function_nobody_asks_for_the_number_of_rows(use):
    strategy = mirrored(2)
    x, _ = next(iter(batches(strategy)))
    with pytest.raises(ValueError, match="pad_last_batch=True"):
        rx.function(lambda x: use(strategy, x))(x)


def test_options_are_shown_as_tensorflows_unless_they_ask_for_padding():
    assert repr(rx.InputOptions()).endswith("experimental_per_replica_buffer_size=1)")
    assert repr(PADDED).endswith("experimental_per_replica_buffer_size=1, pad_last_batch=True)")


def test_options_without_padding_in_them_pad_nothing():
    """TensorFlow's own options have no such field."""
    options = types.SimpleNamespace(**{k: v for k, v in rx.InputOptions()._asdict().items() if k != "pad_last_batch"})
    strategy = mirrored(2)
    *_, (last, _) = batches(strategy, options)
    assert [part.shape for part in last.values] == [(1, 3), (1, 3)]
    assert rx.function(lambda x: x)(last).values[0].shape == (1, 3)


def test_a_function_that_reads_another_variable_for_few_rows_is_refused():
    strategy = mirrored(2)
    with strategy.scope():
        one, other = rx.Variable(1.0), rx.Variable(2.0)
    (x, _), *_ = batches(strategy)
    for least in (4, 2):
        replica = lambda x, least=least: jnp.sum(x) * (one if x.shape[0] >= least else other).value()  # noqa: E731
        step = rx.function(lambda x, replica=replica: strategy.run(replica, args=(x,)))
        with pytest.raises(ValueError, match="cannot take padded batches"):
            step(x)


@pytest.mark.parametrize(
    "function", [lambda x: jnp.round(x), lambda x: jnp.log(jnp.abs(x))], ids=["custom", "NaN of zero"]
)
def test_a_derivative_of_a_padded_run_is_refused(function):
    """Of what is not counted nothing must come into it; inside of the replica function it is exact."""
    strategy = mirrored(2)
    straight = jax.custom_vjp(function)
    straight.defvjp(lambda x: (function(x), None), lambda _, g: (g,))
    with strategy.scope():
        scale = rx.Variable(2.0)

    @rx.function
    def step(x):
        with rx.GradientTape() as tape:
            loss = strategy.reduce(SUM, strategy.run(lambda x: jnp.sum(straight(scale * x)), args=(x,)), axis=None)
        return tape.gradient(loss, scale)

    (x, _), *_ = batches(strategy)
    with pytest.raises(ValueError, match="cannot be differentiated outside of it: open the GradientTape"):
        step(x)


def test_custom_derivatives_in_the_replica_function_are_the_users():
    strategy = mirrored(2)
    straight = jax.custom_vjp(lambda x: jnp.round(x))
    straight.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))
    step = rx.function(
        lambda x: strategy.reduce(
            SUM, strategy.run(lambda x: jax.grad(lambda s: jnp.sum(straight(s * x)))(2.0), args=(x,)), axis=None
        )
    )
    found = [step(x) for x, _ in batches(strategy)]
    np.testing.assert_allclose(found, [X[:8].sum(), X[8:16].sum(), X[16:].sum()], rtol=1e-5)


def test_elements_without_rows_are_as_they_are():
    strategy = mirrored(2)
    dataset = strategy.distribute_datasets_from_function(lambda _: rx.data.Dataset.range(4), PADDED)
    assert [[int(part) for part in value.values] for value in dataset] == [[0, 1], [2, 3]]


def test_padding_is_of_rows_that_there_are():
    """So that nothing unusual, such as NaN or division by zero, is computed of it."""
    strategy = mirrored(4)
    *_, (last, _) = batches(strategy)
    form = counted_form(last)
    np.testing.assert_array_equal(np.asarray(form.array), X[[[16, 16], [17, 17], [17, 17], [17, 17]]])


def test_collectives_of_variables_in_parts_are_those_without_padding():
    """Rows of the table are shipped, and the kernel is gathered again for the gradient, in both."""
    strategy, found = rx.MirroredStrategy([f"GPU:{i}" for i in range(4)], shard_variables=True), []
    tokens = RANDOM.integers(0, 4096, (16, 8)).astype(np.int32)
    for options in (None, PADDED):
        with strategy.scope():
            table = {"table": jnp.full((4096, 64), 0.1), "kernel": jnp.full((64, 512), 0.01)}
            parameters = rx.Variable(table)
            optimizer = rx.Optimizer(optax.sgd(0.1), parameters)

        def replica(x, parameters=parameters, optimizer=optimizer):
            def loss(p):
                hidden = jax.checkpoint(lambda h, kernel: jnp.tanh(h @ kernel))(p["table"][x].mean(1), p["kernel"])
                return jnp.sum(hidden**2) / 16

            optimizer.apply_gradients(jax.grad(loss)(parameters.value()))

        step = rx.function(lambda x, replica=replica: strategy.run(replica, args=(x,)))
        (batch,) = strategy.experimental_distribute_dataset(
            rx.data.Dataset.from_tensor_slices(tokens).batch(16), options
        )
        collectives = hlo.collectives(step.lower(batch).compile().as_text())
        found.append(sorted((each.kind, each.bytes) for each in collectives))
    assert found[0] == found[1]
    assert ("all-gather", 64 * 512 * 4) in found[0]
    assert all(size < 4096 * 64 for _, size in found[0])
