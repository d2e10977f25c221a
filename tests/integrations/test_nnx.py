"""Flax NNX on the strategies: training, state that differs between replicas, checkpoints, and what stays NNX's own."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError
from strategies import SUM, carried, central, compiled, eager, mirrored, one_device, tpu, ways

import replicax as rx
from replicax._base import foreign_state

foreign_state.join()

STEPS, BATCH = 5, 8
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(STEPS, BATCH, 4)).astype(np.float32)
Y = RANDOM.integers(0, 3, size=(STEPS, BATCH)).astype(np.int32)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, norm: bool = False):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(0.5 if norm else 0.0, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = self.hidden(x)
        return self.out(self.dropout(nnx.relu(x if self.norm is None else self.norm(x))))


def made(seed: int = 0, norm: bool = False):
    model = Model(nnx.Rngs(seed), norm)
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def loss_of(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).sum() / BATCH


def gradients_by_nnx(model, x, y):
    return nnx.value_and_grad(loss_of)(model, x, y)


def gradients_by_tape(model, x, y):
    with rx.GradientTape() as tape:
        loss = loss_of(model, x, y)
    return loss, tape.gradient(loss, nnx.state(model, nnx.Param))


def summed(gradients):
    return rx.get_replica_context().all_reduce(SUM, gradients)


def stepping(strategy, way, model, optimizer, gradients_of=gradients_by_nnx):
    def replica(x, y):
        loss, gradients = gradients_of(model, x, y)
        optimizer.update(model, summed(gradients))
        return loss

    return way(lambda x, y: strategy.reduce(SUM, strategy.run(replica, args=(x, y)), axis=None))


def batches(strategy):
    rows = X.reshape(-1, 4), Y.reshape(-1)
    return strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensor_slices(rows).batch(BATCH))


def divided(strategy, array):
    size = len(array) // strategy.num_replicas_in_sync
    return strategy.experimental_distribute_values_from_function(
        lambda c: jnp.asarray(array[c.replica_id_in_sync_group * size :][:size])
    )


@pytest.fixture(scope="module")
def alone():
    """The losses of NNX alone on whole batches, and its model."""
    model, optimizer = made()

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, gradients = nnx.value_and_grad(loss_of)(model, x, y)
        optimizer.update(model, gradients)
        return loss

    return [float(step(model, optimizer, x, y)) for x, y in zip(X, Y)], model


CASES = [
    (lambda: mirrored(1), compiled, gradients_by_nnx),
    (lambda: mirrored(2), compiled, gradients_by_tape),
    (lambda: mirrored(2), eager, gradients_by_nnx),  # on few devices, for each of which every operation is compiled
    (lambda: mirrored(2), eager, gradients_by_tape),
    (lambda: mirrored(4), compiled, gradients_by_nnx),
    (one_device, compiled, gradients_by_nnx),
    (central, compiled, gradients_by_nnx),
    (lambda: tpu(2, 4), compiled, gradients_by_nnx),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("make, way, gradients_of", CASES)
def test_training_gives_what_nnx_alone_gives_on_whole_batches(make, way, gradients_of, alone):
    strategy = make()
    with strategy.scope():
        model, optimizer = made()
    step = stepping(strategy, way, model, optimizer, gradients_of)
    losses = [float(step(*batch)) for batch in batches(strategy)]
    np.testing.assert_allclose(losses, alone[0], atol=1e-5)
    np.testing.assert_allclose(model.out.kernel[...], alone[1].out.kernel[...], atol=1e-5)
    assert int(optimizer.step[...]) == STEPS
    assert way is eager or step.experimental_get_tracing_count() == 1


def test_the_gradients_and_the_loss_travel_in_one_message_and_objects_may_be_arguments():
    strategy = mirrored(4)
    with strategy.scope():
        model, optimizer = made(norm=True)

    def replica(model, optimizer, x, y):
        loss, gradients = gradients_by_nnx(model, x, y)
        optimizer.update(model, summed(gradients))
        return loss

    @rx.function
    def step(model, optimizer, x, y):
        return strategy.reduce(SUM, strategy.run(replica, args=(model, optimizer, x, y)), axis=None)

    batch = divided(strategy, X[0]), divided(strategy, Y[0])
    for _ in range(3):
        step(model, optimizer, *batch)
    assert int(optimizer.step[...]) == 3 and step.experimental_get_tracing_count() == 1
    assert carried(step, model, optimizer, *batch) == [1]


@pytest.mark.parametrize("n, way", [(2, eager), (4, compiled)])
def test_statistics_are_each_replicas_own_and_their_mean_outside(n, way):
    strategy = mirrored(n)
    with strategy.scope():
        norm = nnx.BatchNorm(4, momentum=0.5, rngs=nnx.Rngs(0))
    step = way(lambda x: strategy.run(lambda x: (norm(x), norm.mean[...])[1], args=(x,)))
    own = strategy.experimental_local_results(step(divided(strategy, X[0])))
    parts = X[0].reshape(n, -1, 4)
    np.testing.assert_allclose(own, 0.5 * parts.mean(axis=1), atol=1e-6)
    np.testing.assert_allclose(norm.mean[...], 0.5 * parts.mean(axis=(0, 1)), atol=1e-6)


@pytest.mark.parametrize("way, gradients_of", [(eager, gradients_by_tape), (compiled, gradients_by_nnx)])
def test_replica_without_rows_keeps_its_statistics_and_has_gradients_of_zero(way, gradients_of):
    strategy = mirrored(2)
    with strategy.scope():
        model, _ = made(norm=True)
    model.norm.mean[...] = jnp.ones(8)
    parts = X[0][:3], X[0][:0]

    def replica(x):
        _, gradients = gradients_of(model, x, jnp.zeros(len(x), jnp.int32))
        return gradients["norm"], model.norm.mean[...]

    x = strategy.experimental_distribute_values_from_function(lambda c: parts[c.replica_id_in_sync_group])
    with_rows, without = strategy.experimental_local_results(way(lambda x: strategy.run(replica, args=(x,)))(x))
    assert jax.tree.structure(with_rows) == jax.tree.structure(without)
    assert not any(jax.tree.leaves(jax.tree.map(jnp.any, without[0])))  # NaN is true
    np.testing.assert_array_equal(without[1], jnp.ones(8))
    assert with_rows[1].dtype == without[1].dtype
    np.testing.assert_allclose(model.norm.mean[...], (with_rows[1] + 1) / 2, atol=1e-6)  # the mean, as with rows


@ways
def test_dropout_draws_other_numbers_on_each_replica_and_the_same_again(way):
    def masks(strategy, steps=2):
        with strategy.scope():
            dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(3))
        step = way(lambda: strategy.run(lambda: dropout(jnp.ones(32))))
        drawn = [np.stack(strategy.experimental_local_results(step())) for _ in range(steps)]
        assert int(dropout.rngs.count[...]) == steps
        return np.stack(drawn)

    two = masks(mirrored(2))
    np.testing.assert_array_equal(two, masks(mirrored(2)))
    assert len({row.tobytes() for row in two.reshape(4, 32)}) == 4
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(3))
    np.testing.assert_array_equal(two[:, 0], [dropout(jnp.ones(32)) for _ in range(2)])


@pytest.mark.parametrize(
    "make, way", [(lambda: mirrored(2), eager), (lambda: mirrored(2), compiled), (central, compiled)]
)
def test_metrics_count_what_all_replicas_and_the_program_outside_saw(make, way):
    strategy = make()
    with strategy.scope():
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())

    def update(x, y):
        metrics.update(loss=x[:, 0], logits=x[:, :3], labels=y)

    step = way(lambda x, y: strategy.run(update, args=(x, y)))
    for i in range(2):
        step(divided(strategy, X[i]), divided(strategy, Y[i]))
    update(jnp.asarray(X[2][:5]), jnp.asarray(Y[2][:5]))
    x, y = X[:3].reshape(-1, 4)[:21], Y[:3].reshape(-1)[:21]
    found = metrics.compute()
    np.testing.assert_allclose(found["loss"], x[:, 0].mean(), atol=1e-6)
    np.testing.assert_allclose(found["accuracy"], (x[:, :3].argmax(1) == y).mean(), atol=1e-6)
    assert int(metrics.loss.count[...]) == 21
    metrics.reset()
    assert np.isnan(metrics.compute()["loss"])


def test_welford_is_refused_in_replicas():
    with mirrored(2).scope():
        metric = nnx.metrics.Welford()
    with pytest.raises(NotImplementedError, match="cannot be added up"):
        mirrored(2).run(lambda: metric.update(values=jnp.ones(2)))
    metric.update(values=jnp.asarray([1.0, 3.0]))
    assert float(metric.compute().mean) == 2.0


def equal(a, b):
    def bits(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    leaves = [jax.tree.map(bits, jax.tree.leaves(nnx.state(x))) for x in (a, b)]
    return len(leaves[0]) > 10 and all(np.array_equal(x, y) for x, y in zip(*leaves, strict=True))


@pytest.mark.numbers
def test_a_checkpoint_goes_to_another_number_of_replicas_and_to_no_strategy(tmp_path):
    with mirrored(2).scope():
        model, optimizer = made(norm=True)
    step = stepping(mirrored(2), compiled, model, optimizer)
    for batch in list(batches(mirrored(2)))[:2]:
        step(*batch)
    path = rx.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "ckpt"))

    with mirrored(4).scope():
        on_four = made(seed=1, norm=True)
    for others in (on_four, made(seed=2, norm=True)):
        assert not equal(others, (model, optimizer))
        rx.train.Checkpoint(model=others[0], optimizer=others[1]).restore(path).assert_consumed()
        assert equal(others, (model, optimizer))
    # A state has the names of the model whose state it is.
    rx.train.Checkpoint(model=nnx.state(on_four[0], nnx.Param)).restore(path).assert_existing_objects_matched()
    # Each replica's stream goes on as it would: the keys are told apart anew.
    masks = mirrored(4).run(lambda: on_four[0].dropout(jnp.ones(32)))
    assert len({np.asarray(mask).tobytes() for mask in mirrored(4).experimental_local_results(masks)}) == 4
    step = stepping(mirrored(4), compiled, *on_four)
    assert np.isfinite(float(step(divided(mirrored(4), X[0]), divided(mirrored(4), Y[0]))))


def test_a_pending_checkpoint_is_restored_in_the_first_step_of_a_model(run_python, tmp_path):
    """In a process of its own: making the one and looking for the other must not wait for each other."""
    program = f"""
        import jax.numpy as jnp, numpy as np
        import replicax as rx
        from flax import nnx

        strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])

        class Model(nnx.Module):
            def __init__(self, seed):
                rngs = nnx.Rngs(seed)
                self.linear, self.dropout = nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def made(seed):
            with strategy.scope():
                return Model(seed)

        first, second = made(0), made(1)
        path = rx.train.Checkpoint(model=first, other=rx.Variable(1.0)).save({str(tmp_path / "ckpt")!r})
        waiting = rx.train.Checkpoint(model=second)
        waiting.restore(path)
        third = made(2)
        step = rx.function(lambda x: strategy.run(lambda: third.dropout(third.linear(x))))
        assert step(jnp.ones((4, 3))).values[0].shape == (4, 2)
        waiting.other = rx.Variable(0.0)
        assert float(waiting.other) == 1.0
        assert np.array_equal(second.linear.kernel[...], first.linear.kernel[...])
    """
    done = run_python(program, timeout=60, env={"REPLICAX_VIRTUAL_DEVICES": "GPU:2"})
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_gradients_that_were_not_summed_are_an_error():
    strategy = mirrored(2)
    with strategy.scope():
        model, optimizer = made(norm=True)

    def replica(x, y, means):
        _, gradients = gradients_by_nnx(model, x, y)
        optimizer.update(model, rx.get_replica_context().all_reduce("MEAN", gradients) if means else gradients)

    @rx.function
    def step(x, y, means):
        strategy.run(replica, args=(x, y, means))

    batch = divided(strategy, X[0]), divided(strategy, Y[0])
    with pytest.raises(
        ValueError, match=r"different values to Param:0 of shape \(8,\).*all_reduce\('SUM', gradients\)"
    ):
        step(*batch, False)
    assert int(optimizer.step[...]) == 0
    step(*batch, True)
    assert int(optimizer.step[...]) == 1


@pytest.mark.sampled(2)
@ways
@pytest.mark.parametrize("what", ["nnx.grad", "statistics", "optimizer", "attribute"])
def test_a_step_must_not_write_nnx_variables_from_outside_of_every_scope(what, way):
    (model, optimizer), strategy = made(norm=True), mirrored(2)

    def replica():
        if what == "nnx.grad":
            nnx.grad(loss_of)(model, X[0], Y[0])
        elif what == "statistics":
            model.norm(jnp.ones((2, 8)))
        elif what == "optimizer":
            optimizer.update(model, nnx.state(model, nnx.Param))
        else:
            model.extra = 1

    with pytest.raises(TraceContextError, match="sets the attribute 'extra'|under `with strategy.scope\\(\\):`"):
        way(lambda: strategy.run(replica))()
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(model)))
    model.eval()
    assert equal((model, optimizer), made(norm=True))
    read = strategy.run(lambda: model.hidden(jnp.ones((1, 4))))  # which it may
    np.testing.assert_array_equal(strategy.experimental_local_results(read)[1], model.hidden(jnp.ones((1, 4))))


@ways
def test_nnx_objects_created_in_a_step_are_plain(way):
    strategy = mirrored(2)

    def replica(x):
        model = nnx.Linear(4, 1, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
        model.name = "mine"
        with rx.GradientTape():
            model.bias[...] = model.bias[...] + 1.0
        optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
        optimizer.update(model, nnx.grad(lambda model: model(x).sum())(model))
        return model(x)

    step = way(lambda x: strategy.run(replica, args=(x,)))
    for _ in range(2):
        found = np.concatenate(strategy.experimental_local_results(step(divided(strategy, X[0]))))
    parts = X[0].reshape(2, -1, 4)
    expected = [part @ (1 - part.sum(axis=0)) + 1 - len(part) for part in parts]
    np.testing.assert_allclose(found[:, 0], np.concatenate(expected), rtol=1e-4, atol=1e-4)


def test_a_model_can_be_used_and_changed_outside_of_steps():
    strategy = mirrored(2)
    with strategy.scope():
        model, optimizer = made(norm=True)
        nnx.update(model, jax.tree.map(lambda x: x, nnx.state(model)))
    step = stepping(strategy, compiled, model, optimizer)
    batch = divided(strategy, X[0]), divided(strategy, Y[0])
    step(*batch)
    model.eval()
    x = jnp.asarray(X[1])
    expected = model(x)
    np.testing.assert_allclose(nnx.jit(lambda model, x: model(x))(model, x), expected, atol=1e-6)
    np.testing.assert_allclose(nnx.merge(*nnx.split(model))(x), expected)
    np.testing.assert_allclose(nnx.clone(model)(x), expected)
    model.train()

    # For a step, a view is another object with the same variables.
    def evaluate(x):
        return nnx.view(model, deterministic=True, use_running_average=True)(x)

    found = rx.function(lambda x: strategy.run(evaluate, args=(x,)))(x)
    np.testing.assert_allclose(strategy.experimental_local_results(found)[0], expected, atol=0.5)
    before = model.out.bias[...]
    model.out.bias[...] = before + 1
    step(*batch)
    np.testing.assert_allclose(model.out.bias[...], before + 1, atol=0.1)
    with pytest.raises(ValueError, match="Shape mismatch"):
        model.out.bias.set_value(jnp.zeros(5))


def test_a_step_captures_intermediates_and_keeps_nothing_that_was_traced():
    class Sowing(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, x):
            self.sow(nnx.Intermediate, "sum", x.sum())
            return self.inner(x)

    def new_tracers():
        gc.collect()
        return sum(isinstance(x, jax.core.Tracer) for x in gc.get_objects() if type(x).__name__.endswith("Tracer"))

    strategy = mirrored(2)
    with strategy.scope():
        model = Sowing(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def replica(x):
        _, captured = nnx.capture(model, nnx.Intermediate)(x)
        optimizer.update(model, nnx.state(model, nnx.Param))
        return captured["sum"].get_value()[0]

    gc.freeze()  # what there is by now is in none of the lists of `gc.get_objects`
    step = rx.function(lambda x: strategy.run(replica, args=(x,)))
    found = strategy.experimental_local_results(step(divided(strategy, X[0])))
    np.testing.assert_allclose(found, X[0].reshape(2, -1).sum(axis=1), rtol=1e-5)
    assert new_tracers() == 0 and not hasattr(model, "sum")


def test_layers_made_by_vmap_are_scanned_and_trained():
    strategy = mirrored(2)

    @nnx.vmap(in_axes=0, out_axes=0)
    def layers_of(rngs):
        return nnx.Linear(4, 4, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, x):
        return nnx.tanh(layer(x))

    def gradients(layers, x):
        return nnx.grad(lambda layers: forward(layers, x).sum())(layers)

    with strategy.scope():
        layers = layers_of(nnx.Rngs(0).split(3))
        optimizer = nnx.Optimizer(layers, optax.sgd(0.1), wrt=nnx.Param)

    @rx.function
    def step(x):
        strategy.run(lambda x: optimizer.update(layers, summed(gradients(layers, x))), args=(x,))

    step(divided(strategy, X[0]))
    alone = layers_of(nnx.Rngs(0).split(3))
    expected = alone.kernel[...] - 0.1 * gradients(alone, jnp.asarray(X[0])).kernel[...]
    np.testing.assert_allclose(layers.kernel[...], expected, atol=1e-5)


def test_variables_of_any_value_are_read_and_written_above_the_replicas_and_in_them():
    strategy = mirrored(2)
    with strategy.scope():
        pair = nnx.Variable({"a": jnp.ones(2), "b": jnp.zeros(())})
        count = nnx.Variable(3)
        rngs = nnx.Rngs(0)
        own = nnx.Param(
            jnp.zeros(()),
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    @rx.function
    def step():
        pair["a"] = pair["a"] + 1
        rngs.default.key[...] = jax.random.key(5)

        def replica():
            pair["b"] = pair["b"] + 2.0
            count.set_value(count.get_value() + 1)
            own[...] = own[...] + rx.get_replica_context().replica_id_in_sync_group + 1
            return jax.random.key_data(rngs())

        return strategy.run(replica)

    first, second = strategy.experimental_local_results(step())
    np.testing.assert_array_equal(first, jax.random.key_data(nnx.Rngs(5)()))
    assert first.tolist() != second.tolist()
    assert (
        pair["a"].tolist() == [2.0, 2.0] and float(pair["b"]) == 2.0 and int(count[...]) == 4 and float(own[...]) == 3.0
    )


def test_nothing_changes_without_a_strategy():
    model, optimizer = made(norm=True)

    @nnx.jit
    def train(model, optimizer, x, y):
        loss, gradients = nnx.value_and_grad(loss_of)(model, x, y)
        optimizer.update(model, gradients)
        return loss

    assert np.isfinite(train(model, optimizer, X[0], Y[0])) and int(optimizer.step[...]) == 1
    assert type(model.out.kernel.get_raw_value()) is type(jnp.ones(1))
    assert model.out.kernel.__replicax_variable__ is None

    @jax.jit
    def closes_over(x):
        model.out.bias[...] = model.out.bias[...] + x
        return x

    with pytest.raises(TraceContextError, match="Cannot mutate Param from a different trace level"):
        closes_over(1.0)


def test_eager_replicas_of_central_storage_say_that_they_cannot_write():
    strategy = central()
    with strategy.scope():
        model, optimizer = made()
    with pytest.raises(NotImplementedError, match="Put the step into a replicax.function"):
        stepping(strategy, eager, model, optimizer)(divided(strategy, X[0]), divided(strategy, Y[0]))
    assert model(jnp.asarray(X[0])).shape == (BATCH, 3)
