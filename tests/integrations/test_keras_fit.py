"""`fit` of Keras models over several replicas gives the weights and logs of one device, whatever the loss is."""

from __future__ import annotations

import contextlib

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from strategies import central, compiled, mirrored, one_device, ways

import replicax as rx
from replicax._base import foreign_state

foreign_state.join()

X = np.random.default_rng(1).normal(size=(16, 3)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5]], np.float32)) + 0.25
WEIGHT = np.linspace(0.0, 2.0, 16, dtype=np.float32)
ROWS = {"mirrored": lambda: mirrored(2), "four": lambda: mirrored(4), "central": central}


def dense(units=1, **options) -> keras.layers.Layer:
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed=3), **options)


def sequential(*layers, **options) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), *layers, dense(**options)])
    return model


def recurrent() -> keras.Model:
    seeds = {
        "kernel_initializer": keras.initializers.GlorotUniform(seed=1),
        "recurrent_initializer": keras.initializers.Orthogonal(seed=2),
    }
    layers = keras.layers.SimpleRNN(2, return_sequences=True, **seeds), keras.layers.LSTM(2, **seeds)
    return sequential(keras.layers.Reshape((3, 1)), *layers)


def squared(y, p):
    return jnp.mean((y - p) ** 2, axis=-1)


class AddsLosses(keras.layers.Layer):
    """Adds a loss of its weight, and the mean of one of its input."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        self.add_loss(0.1 * keras.ops.sum(self.w**2))
        self.add_loss(0.05 * keras.ops.mean(x**2))
        return x * self.w


class OwnStep(keras.Model):
    """A step of its own with `compute_loss`, in the form of TensorFlow's guides."""

    def __init__(self):
        super().__init__()
        self.dense = dense(kernel_regularizer="l2")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with rx.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"own": keras.ops.sum(y)}


def two_outputs() -> keras.Model:
    x = keras.Input((3,))
    return keras.Model(x, {"a": dense(name="a")(x), "b": dense(2, name="b")(x)})


def sgd(rate=0.05, **options):
    return keras.optimizers.SGD(rate, **options)


BOTH = {"a": Y, "b": np.concatenate([Y, -Y], axis=1)}
# The model, what `compile` takes, what `fit` takes.
CASES = {
    "per_example": (sequential, {"loss": squared, "metrics": ["mae"]}, {}),
    "scalar": (sequential, {"loss": lambda y, p: jnp.mean((y - p) ** 2), "metrics": ["mae"]}, {}),
    "scalar_weighted": (sequential, {"loss": lambda y, p: jnp.mean((y - p) ** 2)}, {"sample_weight": 0 * WEIGHT + 1.5}),
    "scalar_and_regularized": (
        lambda: sequential(kernel_regularizer="l2", bias_regularizer="l1"),
        {"loss": lambda y, p: jnp.mean(jnp.abs(y - p))},
        {},
    ),
    "scalar_of_two": (two_outputs, {"loss": {"a": lambda y, p: jnp.mean((y - p) ** 2), "b": "mae"}}, {"y": BOTH}),
    "weights_of_losses": (
        two_outputs,
        {"loss": {"a": "mse", "b": lambda y, p: jnp.mean((y - p) ** 2)}, "loss_weights": {"a": 0.25, "b": 2.0}},
        {"y": BOTH},
    ),
    "sum": (sequential, {"loss": keras.losses.MeanSquaredError("sum"), "optimizer": lambda: sgd(0.01)}, {}),
    "sample_weight": (sequential, {"loss": "mse", "weighted_metrics": ["mae"]}, {"sample_weight": WEIGHT}),
    "class_weight": (
        lambda: sequential(activation="sigmoid"),
        {"loss": "binary_crossentropy"},
        {"y": (Y > 0).astype(np.int32), "class_weight": {0: 0.5, 1: 3.0}},
    ),
    "activity": (lambda: sequential(activity_regularizer=keras.regularizers.L2(0.1)), {"loss": "mse"}, {}),
    "added_losses": (lambda: sequential(AddsLosses()), {"loss": "mse"}, {}),
    "clipped": (sequential, {"loss": "mse", "optimizer": lambda: sgd(clipnorm=0.3)}, {}),
    "clipped_together": (sequential, {"loss": "mse", "optimizer": lambda: sgd(global_clipnorm=0.3)}, {}),
    "clipped_values": (sequential, {"loss": "mse", "optimizer": lambda: sgd(clipvalue=0.2)}, {}),
    "accumulated": (
        sequential,
        {"loss": lambda y, p: jnp.mean((y - p) ** 2), "optimizer": lambda: sgd(gradient_accumulation_steps=2)},
        {},
    ),
    "scaled": (
        sequential,
        {"loss": lambda y, p: jnp.mean((y - p) ** 2), "optimizer": lambda: keras.optimizers.LossScaleOptimizer(sgd())},
        {},
    ),
    "recurrent": (recurrent, {"loss": "mse"}, {}),
    "own_step": (OwnStep, {"loss": lambda y, p: jnp.mean((y - p) ** 2)}, {}),
}


def trained(case, strategy, **compile_options):
    """The weights and the logs after two epochs of two batches of eight."""
    make, options, given = CASES[case]
    options = {"optimizer": sgd, **options}
    given = {"y": Y, **given}
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = make()
        options["optimizer"] = options["optimizer"]()
        model.compile(**options, **compile_options)
    fitted = model.fit(X, given.pop("y"), batch_size=8, epochs=2, shuffle=False, verbose=0, **given)
    return {**{str(i): w for i, w in enumerate(model.get_weights())}, **fitted.history}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_fit_on_replicas_is_fit_on_one_device(case):
    expected = trained(case, mirrored(1) if case == "own_step" else None)
    for name in ROWS if case in ("scalar", "accumulated", "clipped_together") else ["mirrored"]:
        found = trained(case, ROWS[name]())
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if key != "own":
                np.testing.assert_allclose(found[key], value, rtol=2e-4, atol=2e-5, err_msg=f"{name}: {key}")


def test_accumulated_gradients_are_taken_over_by_another_number_of_replicas():
    """After the first of two batches the state goes from two replicas to four; the weights become one device's."""

    def made(strategy):
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            model = sequential()
            model.compile(sgd(gradient_accumulation_steps=2, momentum=0.5), "mse")
            model.optimizer.build(model.trainable_variables)
        return model

    first, second, one = made(mirrored(2)), made(mirrored(4)), made(None)
    one.train_on_batch(X[:8], Y[:8])
    first.train_on_batch(X[:8], Y[:8])
    for old, new, expected in zip(first.optimizer.variables, second.optimizer.variables, one.optimizer.variables):
        np.testing.assert_allclose(old.numpy(), expected.numpy(), rtol=1e-4, atol=1e-5)
        new.assign(old.numpy())
    for model in (one, second):
        model.train_on_batch(X[8:], Y[8:])
    for weight, expected in zip(second.get_weights(), one.get_weights()):
        np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-5)


def test_an_error_of_a_step_is_not_taken_for_the_end_of_the_data():
    """OutOfRangeError is also what a TensorArray raises, and Keras ends an epoch where StopIteration says so."""

    class Fails(OwnStep):
        def train_step(self, data):
            raise rx.OutOfRangeError("of the step")

    with mirrored(2).scope():
        model = Fails()
    model.compile("sgd", "mse", steps_per_execution=2)
    with pytest.raises(rx.OutOfRangeError, match="of the step"):
        model.fit(np.ones((8, 3), np.float32), np.ones((8, 1), np.float32), batch_size=2, verbose=0)


def test_a_loss_for_each_row_is_summed_and_its_log_is_the_mean():
    """Keras refuses `reduction=None` on JAX; under a strategy it is as in TensorFlow: a sum, logged as a mean."""

    def fitted(reduction):
        with mirrored(2).scope():
            model = sequential()
            model.compile(sgd(0.01), keras.losses.MeanSquaredError(reduction))
        loss = model.fit(X[:8], Y[:8], batch_size=8, verbose=0, shuffle=False).history["loss"]
        return [*loss, *np.concatenate(model.get_weights(), axis=None)]

    (loss, *weights), (total, *expected) = fitted(None), fitted("sum")
    np.testing.assert_allclose([loss, *weights], [total / 8, *expected], rtol=1e-5)


# Three rows in batches of two: the last one leaves the second replica, or all but the first one, without rows.


@pytest.mark.sampled(3)
@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize("name", ROWS)
def test_a_replica_without_rows_has_its_part_in_the_regularization(name, eagerly):
    """The bias goes down by 1/8 in each of two steps, as |bias| does; its logged loss is (2 * 1 + 1 * 7/8) / 3."""
    with ROWS[name]().scope():
        bias = {"bias_initializer": "ones", "bias_regularizer": keras.regularizers.L1(1.0)}
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros", **bias)])
        model.compile(keras.optimizers.SGD(0.125), lambda y, p: 0.0 * p, run_eagerly=eagerly)
    fitted = model.fit(np.zeros((3, 1)), np.zeros((3, 1)), batch_size=2, shuffle=False, verbose=0)
    assert model.layers[-1].bias.numpy().tolist() == [0.75]
    np.testing.assert_allclose(fitted.history["loss"], [(2 + 7 / 8) / 3], rtol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize("name", ["mirrored", "central"])
def test_a_last_batch_that_leaves_a_replica_without_rows_trains_and_counts_its_rows_alone(name, eagerly):
    """By hand: y = b, the loss (b - t)^2 with t = 0, 0 and then 2; each replica's mean counts one half.

    Batch 1: b = 1, gradient 2, b = 1 - 2/8 = 3/4. Batch 2, one row on one of two replicas: gradient (3/4 - 2) * 2 / 2,
    b = 3/4 + 5/32. Normalization, dropout and metrics see the rows that there are.
    """
    with ROWS[name]().scope():
        layers = [
            keras.Input((1,)),
            keras.layers.BatchNormalization(momentum=0.5, scale=False, center=False),
            keras.layers.Dropout(0.5, seed=1),
            keras.layers.Dense(1, kernel_initializer="zeros", bias_initializer="ones"),
        ]
        model = keras.Sequential(layers)
        model.layers[-1].kernel.trainable = False
        model.compile(keras.optimizers.SGD(0.125), "mse", metrics=["mae"], run_eagerly=eagerly)
    x, y = np.array([[4.0], [4.0], [8.0]]), np.array([[0.0], [0.0], [2.0]])
    fitted = model.fit(x, y, batch_size=2, shuffle=False, verbose=0).history
    np.testing.assert_allclose(model.layers[-1].bias.numpy(), [3 / 4 + 5 / 32], rtol=1e-6)
    np.testing.assert_allclose(fitted["loss"], [(1 + 1 + 25 / 16) / 3], rtol=1e-6)
    np.testing.assert_allclose(fitted["mae"], [(1 + 1 + 5 / 4) / 3], rtol=1e-6)
    # The first replica's mean goes from 0 to 2 and 5, the second's from 0 to 2.
    np.testing.assert_allclose(model.layers[0].moving_mean.numpy(), [(5 + 2) / 2], rtol=1e-6)
    found = model.evaluate(x, y, batch_size=2, verbose=0)
    b = 3 / 4 + 5 / 32
    np.testing.assert_allclose(found, [(2 * b**2 + (2 - b) ** 2) / 3, (2 * b + 2 - b) / 3], rtol=1e-6)


# Variables that live once.


@ways
def test_metrics_under_central_storage_are_those_of_all_replicas_together(way):
    """The mean of 0 to 9 is 4.5; `fit` of weights that stay 1 has the losses of one device, in many steps too."""
    strategy = central()
    with strategy.scope():
        mean, accuracy = keras.metrics.Mean(), keras.metrics.BinaryAccuracy()

    def update(x):
        mean.update_state(x)
        accuracy.update_state(x % 2, keras.ops.ones_like(x))

    step = way(lambda x: strategy.run(update, args=(x,)))
    for batch in strategy.experimental_distribute_dataset(rx.data.Dataset.range(10).batch(2)):
        step(batch)
    assert float(mean.result()) == 4.5 and float(accuracy.result()) == 0.5
    mean.reset_state()
    assert float(mean.result()) == 0.0


def test_logs_of_long_fits_under_central_storage_are_numbers():
    """The weights stay 1 and 0: of x = 0 to 7 the squares' mean is 17.5 and the mean is 3.5, however often."""
    with central().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    x = np.tile(np.arange(8, dtype=np.float32), 40)[:, None]
    fitted = model.fit(x, 0 * x, batch_size=2, verbose=0).history
    np.testing.assert_allclose([fitted["loss"][0], fitted["mae"][0]], [17.5, 3.5], rtol=1e-5)
    np.testing.assert_allclose(model.evaluate(x, 0 * x, batch_size=4, verbose=0), [17.5, 3.5], rtol=1e-5)


def test_a_replica_without_rows_keeps_the_statistics_of_a_normalization():
    strategy = mirrored(2)
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 1))
    data = rx.data.Dataset.from_tensor_slices(np.array([[4.0], [4.0], [8.0]], np.float32)).batch(2)
    for batch in strategy.experimental_distribute_dataset(data):
        compiled(lambda x: strategy.run(lambda x: layer(x, training=True), args=(x,)))(batch)
    np.testing.assert_allclose(layer.moving_mean.numpy(), [(5 + 2) / 2], rtol=1e-6)


@pytest.mark.parametrize("make", [one_device, lambda: mirrored(2), central], ids=["one_device", "mirrored", "central"])
def test_each_epoch_validates_on_all_of_a_finite_distributed_dataset(make):
    """With `validation_steps` that take all of it: x = 0 to 7 and weights that stay 1 give 17.5 in every epoch."""
    strategy = make()
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.arange(8, dtype=np.float32)[:, None]
    source = rx.data.Dataset.from_tensor_slices((x, 0 * x)).batch(4)

    def unknown():
        return source.filter(lambda x, y: jnp.all(x >= 0))  # which has no cardinality

    for each in (lambda: source, unknown):
        spread = [strategy.experimental_distribute_dataset(each()) for _ in range(2)]
        options = {"steps_per_epoch": 1, "epochs": 2, "validation_steps": 2, "verbose": 0}
        fitted = model.fit(spread[0], validation_data=spread[1], **options).history
        np.testing.assert_allclose(fitted["val_loss"], [17.5, 17.5], rtol=1e-6)
        np.testing.assert_allclose(fitted["loss"], [3.5, 31.5], rtol=1e-6)


# Plain variables, and where gradients are applied.


@pytest.mark.sampled(2)
@ways
@pytest.mark.parametrize("name", ["SGD", "Momentum", "AdamW", "RMSprop"])
def test_keras_optimizers_take_plain_variables_that_live_once(name, way):
    """Two replicas' gradients of 1/2 sum to 1, so that a step of SGD takes 1/10; all is as with mirrored variables."""

    def trained(strategy):
        with strategy.scope():
            v = rx.Variable([1.0])
            if name == "Momentum":
                optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            else:
                optimizer = getattr(keras.optimizers, name)(0.1)

        def replica():
            with rx.GradientTape() as tape:
                loss = jnp.sum(v.value()) / 2
            optimizer.apply_gradients([(tape.gradient(loss, v), v)])

        step, found = way(lambda: strategy.run(replica)), []
        for _ in range(2):
            step()
            found.append(float(v.numpy()[0]))
        assert int(optimizer.iterations.value) == 2
        return found

    found = trained(central())
    np.testing.assert_allclose(found, trained(mirrored(2)), rtol=1e-6)
    if name in ("SGD", "Momentum"):
        np.testing.assert_allclose(found, [0.9, 0.8 if name == "SGD" else 0.71], rtol=1e-6)


@pytest.mark.parametrize("make", [one_device, lambda: mirrored(2), central], ids=["one_device", "mirrored", "central"])
def test_keras_optimizers_refuse_gradients_outside_of_replicas(make):
    """As TensorFlow does; nothing is assigned, and nothing made. Without a strategy's scope they are applied."""
    with make().scope():
        w, optimizer = keras.Variable([1.0]), keras.optimizers.SGD(0.5)
        with pytest.raises(RuntimeError, match="cannot be called in cross-replica context.*`strategy.run`"):
            optimizer.apply_gradients([(jnp.ones(1), w)])
        assert not optimizer.built and w.numpy().tolist() == [1.0]
    plain, optimizer = keras.Variable([1.0]), keras.optimizers.SGD(0.5)
    optimizer.apply_gradients([(jnp.ones(1), plain)])
    assert plain.numpy().tolist() == [0.5]


@ways
@pytest.mark.parametrize("make", [one_device, lambda: mirrored(2)], ids=["one_device", "mirrored"])
@pytest.mark.parametrize("in_scope", [True, False])
def test_the_loops_of_keras_are_refused_in_replica_functions(make, in_scope, way):
    strategy = make()
    with strategy.scope() if in_scope else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    loops = {"fit": 2, "evaluate": 2, "predict": 1, "train_on_batch": 2, "test_on_batch": 2, "predict_on_batch": 1}
    for name, count in loops.items():
        loop = getattr(model, name)
        words = f"being in cross-replica context.* call model.{name} outside of strategy.run"
        with pytest.raises(RuntimeError, match=words):
            way(lambda loop=loop, count=count: strategy.run(loop, args=(X[:8], Y[:8])[:count]))()
