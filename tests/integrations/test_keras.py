"""Keras 3 on the strategies: custom loops, metrics, state that differs between replicas, and `fit`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from strategies import SUM, carried, compiled, mirrored, one_device, over, parts, replica_id, ways

import replicax as rx
from replicax._base import foreign_state

foreign_state.join()

X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5]], np.float32)) + 0.25
KERNEL = np.array([[0.5], [0.25], [-0.5]], np.float32)


def linear(**options) -> keras.Model:
    layer = keras.layers.Dense(1, kernel_initializer=lambda shape, dtype: jnp.asarray(KERNEL, dtype), **options)
    return keras.Sequential([layer])


def by_hand(steps: int, rate: float, size: int, kernel=KERNEL, momentum: float = 0.0):
    """Weights and losses of so many steps of SGD on the mean squared error, in numpy."""
    kernel, bias = kernel.astype(np.float64), np.zeros(1)
    velocity, losses = [np.zeros((3, 1)), np.zeros(1)], []
    for step in range(steps):
        start = step * size % len(X)
        x, y = X[start : start + size].astype(np.float64), Y[start : start + size]
        error = x @ kernel + bias - y
        losses.append(float(np.mean(error**2)))
        gradients = [2 * x.T @ error / len(x), 2 * error.mean(axis=0)]
        velocity = [momentum * v - rate * g for v, g in zip(velocity, gradients)]
        kernel, bias = kernel + velocity[0], bias + velocity[1]
    return kernel, bias, losses


def batches(strategy, size: int):
    dataset = rx.data.Dataset.from_tensor_slices((X, Y)).batch(size)
    return strategy.experimental_distribute_dataset(dataset)


# Custom loops.


@over(one_of_each=True)
@ways
def test_a_custom_loop_gives_what_sgd_by_hand_gives(make, n, way):
    """The variables of the model and of the optimizer come into being in the first step, which is traced once."""
    strategy, traced = make(), []
    with strategy.scope():
        model = linear()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        mean = keras.metrics.Mean()

    def replica(batch):
        traced.append(1)
        x, y = batch
        with rx.GradientTape() as tape:
            loss = jnp.sum((model(x, training=True) - y) ** 2) / 8
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        mean.update_state((model(x) - y) ** 2)
        return loss

    step = way(lambda batch: strategy.reduce(SUM, strategy.run(replica, args=(batch,)), axis=None))
    losses = [float(step(batch)) for batch in batches(strategy, 8)]
    kernel, bias, expected = by_hand(3, 0.1, 8, momentum=0.9)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(model.layers[0].kernel.numpy(), kernel, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.layers[0].bias.numpy(), bias, rtol=1e-4, atol=1e-5)
    assert int(optimizer.iterations.value) == 3
    if way is compiled:
        assert len(traced) == 1
    assert float(mean.result()) > 0
    mean.reset_state()
    assert float(mean.result()) == 0.0


def test_all_gradients_and_the_loss_travel_in_one_message():
    strategy = mirrored(4)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Dense(4, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.Adam(0.01)

    @rx.function
    def step(batch):
        def replica(batch):
            x, y = batch
            with rx.GradientTape() as tape:
                loss = jnp.mean((model(x, training=True) - y) ** 2) / 4
            optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
            return loss

        return strategy.reduce(SUM, strategy.run(replica, args=(batch,)), axis=None)

    batch = next(iter(batches(strategy, 8)))
    first = float(step(batch))
    assert float(step(batch)) < first and step.experimental_get_tracing_count() == 1
    assert carried(step, batch) == [1]


@over()
@ways
def test_metrics_are_updated_in_replicas_and_read_outside(make, n, way):
    strategy = make()
    with strategy.scope():
        mean, accuracy = keras.metrics.Mean(), keras.metrics.BinaryAccuracy()

    def replica():
        r = replica_id()
        mean.update_state(r + 1.0)
        accuracy.update_state(jnp.ones((2, 1)), jnp.stack([1.0 + 0 * r, r % 2])[:, None])
        return mean.result()

    step = way(lambda: strategy.run(replica))
    own = parts(strategy, step())
    if not strategy.extended._variables_live_once:
        assert own == [r + 1.0 for r in range(n)]  # a replica sees what it has seen itself
    step()
    assert float(mean.result()) == (n + 1) / 2
    np.testing.assert_allclose(float(accuracy.result()), np.mean([(1 + r % 2) / 2 for r in range(n)]), rtol=1e-6)


# What differs between replicas.


@over(one_of_each=True)
@ways
def test_batch_normalization_keeps_the_mean_of_the_replicas_statistics(make, n, way):
    strategy = make()
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 1))

    def replica():
        layer(jnp.stack([replica_id(), replica_id() + 2.0])[:, None], training=True)

    way(lambda: strategy.run(replica))()
    # Replica r's mean is r + 1 and its variance 1, and each moves half the way from 0 and 1.
    np.testing.assert_allclose(layer.moving_mean.numpy(), [np.mean([(r + 1) / 2 for r in range(n)])], rtol=1e-6)
    np.testing.assert_allclose(layer.moving_variance.numpy(), [1.0], rtol=1e-5)


@over()
@ways
def test_dropout_draws_other_numbers_on_each_replica_and_the_same_with_the_same_seed(make, n, way):
    strategy = make()

    def drawn():
        with strategy.scope():
            layer = keras.layers.Dropout(0.5, seed=7)
        step = way(lambda: strategy.run(lambda: layer(jnp.ones((1, 64)), training=True)))
        return [np.asarray(parts(strategy, step())) for _ in range(2)]

    first, second = drawn()
    for masks in (first, second):
        assert set(np.unique(masks)) == {0.0, 2.0}
        assert len({mask.tobytes() for mask in masks}) == n
    assert (first != second).any()
    again = drawn()
    assert (again[0] == first).all() and (again[1] == second).all()
    # One replica alone draws what Keras without a strategy draws, and so does the first of several.
    alone = keras.layers.Dropout(0.5, seed=7)(jnp.ones((1, 64)), training=True)
    assert (np.asarray(alone) == first[0]).all()


# compile and fit.


@pytest.mark.sampled(2)
@pytest.mark.parametrize("n, run_eagerly", [(1, False), (2, False), (4, False), (1, True), (2, True)])
def test_fit_gives_what_sgd_by_hand_gives(n, run_eagerly):
    """Also in the last batch, whose parts differ in size: 24 rows in batches of 9."""
    strategy = mirrored(n)
    with strategy.scope():
        model = linear()
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], run_eagerly=run_eagerly)
    history = model.fit(X, Y, batch_size=9, epochs=2, shuffle=False, verbose=0).history
    kernel, bias = KERNEL, np.zeros(1)
    expected = []
    for _ in range(2):
        total = 0.0
        for start in (0, 9, 18):
            x, y = X[start : start + 9], Y[start : start + 9]
            error = x @ kernel + bias - y
            # As in TensorFlow, every replica's mean counts as much, whatever the number of its rows.
            cuts = np.array_split(np.arange(len(x)), range(-(-len(x) // n), len(x), -(-len(x) // n)))
            total += float(np.sum(error**2))
            grads = [[2 * x[c].T @ error[c] / len(c), 2 * error[c].mean(axis=0)] for c in cuts]
            kernel = kernel - 0.1 * sum(g[0] for g in grads) / n
            bias = bias - 0.1 * sum(g[1] for g in grads) / n
        expected.append(total / len(X))
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-4)
    np.testing.assert_allclose(model.layers[0].kernel.numpy(), kernel, rtol=1e-4)
    assert sorted(history) == ["loss", "mae"]


def test_shard_optimizer_state_warns_that_it_has_no_effect():
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"], shard_optimizer_state=True)
    with strategy.scope():
        model = linear()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    with pytest.warns(UserWarning, match="no effect on Keras's optimizers: all state of SGD is on each replica"):
        model.fit(X, Y, batch_size=24, shuffle=False, verbose=0)
    kernel, bias, _ = by_hand(1, 0.1, 24, momentum=0.9)
    np.testing.assert_allclose(model.get_weights()[0], kernel, atol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_data_without_a_batch_are_refused(method):
    with mirrored(2).scope():
        model = linear()
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="The data have no batch"):
        getattr(model, method)(rx.data.Dataset.from_tensor_slices((X, Y)).batch(8).take(0))


@pytest.mark.parametrize("method", ["predict", "predict_on_batch"])
def test_a_model_is_built_by_its_first_prediction(method):
    with mirrored(2).scope():
        model = linear()
    np.testing.assert_allclose(getattr(model, method)(X[:5]), X[:5] @ KERNEL, rtol=1e-5, atol=1e-6)


def test_a_layer_adapts_to_a_dataset():
    with mirrored(2).scope():
        layer = keras.layers.Normalization()
    layer.adapt(rx.data.Dataset.from_tensor_slices(X).batch(7))
    np.testing.assert_allclose(np.ravel(layer.mean), X.mean(axis=0), rtol=1e-4, atol=1e-6)


def test_evaluate_predict_and_the_methods_for_one_batch():
    strategy = mirrored(2)
    with strategy.scope():
        model = linear()
        model.compile("sgd", "mse", metrics=["mae"])
    error = X @ KERNEL - Y
    loss, mae = model.evaluate(X, Y, batch_size=8, verbose=0)
    np.testing.assert_allclose([loss, mae], [np.mean(error**2), np.mean(np.abs(error))], rtol=1e-5)
    np.testing.assert_allclose(model.predict(X[:7], batch_size=4, verbose=0), X[:7] @ KERNEL, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.predict_on_batch(X[:4]), X[:4] @ KERNEL, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.test_on_batch(X[:4], Y[:4])[0], np.mean(error[:4] ** 2), rtol=1e-5)
    np.testing.assert_allclose(model.train_on_batch(X[:4], Y[:4])[0], np.mean(error[:4] ** 2), rtol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["dataset", "distributed", "generator", "steps_per_execution", "validation"])
def test_fit_takes_each_kind_of_input(kind):
    strategy = mirrored(2)
    with strategy.scope():
        model = linear()
        model.compile(keras.optimizers.SGD(0.1), "mse", steps_per_execution=2 if kind == "steps_per_execution" else 1)
    dataset = rx.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    if kind == "dataset":
        history = model.fit(dataset, verbose=0)
    elif kind == "distributed":
        history = model.fit(strategy.experimental_distribute_dataset(dataset), steps_per_epoch=3, verbose=0)
    elif kind == "generator":
        pairs = ((X[i : i + 8], Y[i : i + 8]) for i in (0, 8, 16))
        history = model.fit(pairs, verbose=0, steps_per_epoch=3, shuffle=False)
    elif kind == "steps_per_execution":
        ends = []
        seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(batch))
        history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[seen])
        assert ends == [
            1,
            3,
        ]  # the second one finds data for one step
    else:
        history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, validation_data=(X, Y))
    kernel, bias, losses = by_hand(3, 0.1, 8)
    np.testing.assert_allclose(model.layers[0].kernel.numpy(), kernel, rtol=1e-4)
    np.testing.assert_allclose(history.history["loss"], [np.mean(losses)], rtol=1e-4)
    if kind == "validation":
        np.testing.assert_allclose(history.history["val_loss"], [np.mean((X @ kernel + bias - Y) ** 2)], rtol=1e-4)


def test_regularization_counts_once():
    def trained(strategy):
        with strategy.scope():
            model = linear(kernel_regularizer=keras.regularizers.L2(0.1))
            model.compile(keras.optimizers.SGD(0.1), "mse")
        loss = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history["loss"]
        return [*loss, *model.layers[0].kernel.numpy()[:, 0]]

    np.testing.assert_allclose(trained(mirrored(4)), trained(mirrored(1)), rtol=1e-4)


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["compiled", "eager"])
def test_loss_scaling_skips_a_step_if_one_replica_overflows(run_eagerly):
    with mirrored(2).scope():
        model = linear()
        scaled = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=4.0, dynamic_growth_steps=3
        )
        model.compile(scaled, "mse", run_eagerly=run_eagerly)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    kernel = by_hand(3, 0.1, 8)[0]
    np.testing.assert_allclose(model.layers[0].kernel.numpy(), kernel, rtol=1e-4)
    assert float(scaled.dynamic_scale.value) == 8.0  # after three steps
    y = np.where(np.arange(8)[:, None] == 7, np.inf, Y[:8])  # the second replica's last row
    model.train_on_batch(X[:8], y)
    np.testing.assert_allclose(model.layers[0].kernel.numpy(), kernel, rtol=1e-4)
    assert float(scaled.dynamic_scale.value) == 4.0


@over(one_of_each=True)
def test_accumulated_gradients_are_those_of_the_batches_together(make, n):
    strategy = make()
    with strategy.scope():
        model = linear()
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    model.fit(X[:16], Y[:16], batch_size=8, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.layers[0].kernel.numpy(), by_hand(1, 0.1, 16)[0], rtol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adafactor", "Ftrl", "Lamb", "Lion", "Muon", "RMSprop"])
def test_optimizers_make_their_slots(name):
    optimizer = getattr(keras.optimizers, name)(0.1)
    optimizer.build([keras.Variable(np.ones((2, 2), np.float32))])
    assert optimizer.built


def test_class_weights_count_for_datasets_as_they_do_for_arrays():
    def trained(**data):
        with mirrored(2).scope():
            model = linear()
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(**data, class_weight={0: 1.0, 1: 5.0}, shuffle=False, verbose=0)
        return model.layers[0].kernel.numpy()

    classes = (Y > 0).astype(np.int32)
    dataset = rx.data.Dataset.from_tensor_slices((X, classes)).batch(8)
    np.testing.assert_allclose(trained(x=dataset), trained(x=X, y=classes, batch_size=8), rtol=1e-5)
    with pytest.raises(ValueError, match="`y` is part of a dataset's elements"):
        trained(x=dataset, y=classes)
    with pytest.raises(ValueError, match="this one is distributed already"):
        trained(x=mirrored(2).experimental_distribute_dataset(dataset))
    with pytest.raises(ValueError, match="without weights of their own"):
        trained(x=dataset.map(lambda x, y: (x, y, x[:, 0])))


class Own(keras.Model):
    """A model with a step of its own, as TensorFlow's guides write it."""

    def __init__(self):
        super().__init__()
        self.dense = linear()
        self.tracker = keras.metrics.Mean(name="own")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with rx.GradientTape() as tape:
            loss = jnp.sum((self(x, training=True) - y) ** 2) / 8
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        self.tracker.update_state(loss)
        return {"own": self.tracker.result()}

    @property
    def metrics(self):
        return [self.tracker]


def test_a_model_with_a_step_of_its_own():
    with mirrored(2).scope():
        model = Own()
        model.compile(keras.optimizers.SGD(0.1))
    history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history
    kernel, _, losses = by_hand(3, 0.1, 8)
    np.testing.assert_allclose(model.dense.layers[0].kernel.numpy(), kernel, rtol=1e-4)
    np.testing.assert_allclose(history["own"], [np.mean(losses) / 2], rtol=1e-4)  # a replica has half of the loss


def test_a_step_of_its_own_may_call_keras_s():
    class Around(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    with mirrored(2).scope():
        model = Around(linear().layers)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["loss"], [np.mean(by_hand(3, 0.1, 8)[2])], rtol=1e-4)


def test_a_step_of_its_own_may_return_all_metrics_as_keras_guides_have_it():
    class Guide(Own):
        metrics = keras.Model.metrics

        def train_step(self, data):
            x, y = data
            for metric in self.metrics:
                metric.update_state(*([y, self(x)] if metric.name == "compile_metrics" else [1.0]))
            return {metric.name: metric.result() for metric in self.metrics}

    with mirrored(2).scope():
        model = Guide()
        model.compile("sgd", "mse", metrics=["mae"])
    logs = model.fit(X[:8], Y[:8], batch_size=8, verbose=0).history
    np.testing.assert_allclose(logs["mae"], np.mean(np.abs(X[:8] @ KERNEL - Y[:8])), rtol=1e-5)  # of both replicas


def test_a_step_of_its_own_may_return_some_metrics_and_what_is_none():
    class Some(Own):
        metrics = property(lambda self: [self.tracker, *self.others])
        others = (keras.metrics.Mean(name="other"),)

        def test_step(self, data):
            self.tracker.update_state(data[0][:, 0])
            return {"own": self.tracker.result(), "raw": jnp.mean(data[0][:, 0]), "rows": len(data[0])}

    with mirrored(2).scope():
        model = Some()
        model.compile(keras.optimizers.SGD(0.1))
    logs = model.evaluate(X[:9], Y[:9], batch_size=9, verbose=0, return_dict=True)  # the replicas have 5 rows and 4
    assert logs["own"] == pytest.approx(np.mean(X[:9, 0]), rel=1e-5)
    assert logs["raw"] == pytest.approx((np.mean(X[:5, 0]) + np.mean(X[5:9, 0])) / 2, rel=1e-5)


def test_a_step_in_the_form_of_keras_on_jax_is_refused_under_a_strategy():
    class Stateless(Own):
        def train_step(self, state, data):
            raise AssertionError

    with mirrored(2).scope():
        model = Stateless()
        model.compile("sgd")
    with pytest.raises(TypeError, match=r"Stateless.train_step takes the model's state.*def train_step\(self, data\)"):
        model.fit(X, Y, batch_size=8, verbose=0)


# Beside the strategies.


def test_models_without_a_strategy_train_as_before_and_in_functions():
    model = linear()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    kernel, bias, _ = by_hand(3, 0.1, 8)
    np.testing.assert_allclose(model.layers[0].kernel.numpy(), kernel, rtol=1e-4)

    @rx.function
    def step(x, y):
        with rx.GradientTape() as tape:
            loss = jnp.mean((model(x) - y) ** 2)
        model.optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    np.testing.assert_allclose(float(step(X[:8], Y[:8])), np.mean((X[:8] @ kernel + bias - Y[:8]) ** 2), rtol=1e-3)
    assert int(model.optimizer.iterations.value) == 4


def test_weights_go_from_one_strategy_to_another(tmp_path):
    path = str(tmp_path / "model.weights.h5")

    def made(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
            model.compile("adam", "mse")
        return model

    model = made(mirrored(2))
    model.fit(X, np.concatenate([Y, Y], axis=1), batch_size=8, verbose=0)
    model.save_weights(path)
    model.save(tmp_path / "model.keras")
    with mirrored(2).scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")  # compiled, with the optimizer's state
    for one, two in zip(model.variables + model.optimizer.variables, loaded.variables + loaded.optimizer.variables):
        np.testing.assert_array_equal(one.numpy(), two.numpy())
    other = made(mirrored(4))
    with mirrored(4).scope():
        other.optimizer.build(other.trainable_variables)
    other.load_weights(path)
    for one, two in zip(model.weights, other.weights):
        np.testing.assert_array_equal(one.numpy(), two.numpy())


def test_a_compiled_model_is_saved_and_goes_on_under_another_strategy(tmp_path):
    """With its optimizer's state, and without a second `compile`."""

    def trained(model, epochs):
        return model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0).history["loss"]

    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    trained(model, 1)
    model.save(tmp_path / "model.keras")
    losses = trained(model, 2)
    loaded = keras.models.load_model(tmp_path / "model.keras")  # under none
    np.testing.assert_allclose(trained(loaded, 2), losses, rtol=1e-5)
    with one_device().scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(trained(loaded, 2), losses, rtol=1e-5)


def test_tapes_take_keras_variables_among_their_sources_and_variables_begin_as_they_are():
    kernel = keras.Variable(np.array([1.0, 2.0], np.float32))
    with rx.GradientTape() as tape:
        y = jnp.sum(kernel * kernel)
    assert tape.gradient(y, kernel).tolist() == [2.0, 4.0]
    copies = [rx.Variable(kernel), rx.Variable({"kernel": kernel}).value()["kernel"], rx.Variable(lambda: kernel)]
    kernel.assign([0.0, 0.0])  # which they are not
    assert [copy.tolist() for copy in map(np.asarray, copies)] == [[1.0, 2.0]] * 3
    assert [watched is foreign_state.variable_of(kernel) for watched in tape.watched_variables()] == [True]


def test_a_keras_variable_made_before_the_integration_becomes_a_replicax_variable():
    old = keras.Variable(3.0)
    held = old.__dict__.pop("_replicax_held")
    old.__dict__["_value"] = held.value()  # as Keras itself keeps it

    @rx.function
    def add():
        old.assign_add(1.0)

    add()
    add()
    assert float(old.value) == 5.0 and not isinstance(old.value, jax.core.Tracer)


def test_a_layer_may_create_replicax_variables_in_build():
    class Scaled(keras.layers.Layer):
        def build(self, shape):
            self.scale = rx.Variable(jnp.ones(shape[-1]) * 2)  # of values that must not be traced

        def call(self, x):
            return x * self.scale.value()

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.scaled = Scaled()

        def call(self, x):
            return self.scaled(x)

    with pytest.warns(UserWarning, match="read inside of jax.jit"):  # by Keras, which looks for shapes
        assert Model()(jnp.ones((1, 2))).tolist() == [[2.0, 2.0]]
    assert rx.function(lambda model, x: model(x))(Model(), jnp.ones((1, 2))).tolist() == [[2.0, 2.0]]
