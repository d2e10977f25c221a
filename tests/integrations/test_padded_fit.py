"""`fit` of Keras models on padded batches has the numbers that it has without padding, in one program."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from strategies import central, mirrored

import replicax as rx
from replicax._base import foreign_state
from replicax._engine import function

foreign_state.join()

RANDOM = np.random.default_rng(2)
ROWS, BATCH = 11, 4  # the last batch has 3 rows: parts of 2 and 1; or of 1, 1, 1 and none
X = RANDOM.normal(size=(ROWS, 6, 6, 1)).astype(np.float32)
Y = RANDOM.integers(0, 3, size=(ROWS, 1)).astype(np.int32)
WEIGHT = np.linspace(0.5, 2.0, ROWS, dtype=np.float32)
STRATEGIES = {"two": lambda: mirrored(2), "four": lambda: mirrored(4), "central": central}


def seeded(kind, *args, **options):
    return kind(*args, kernel_initializer=keras.initializers.GlorotUniform(seed=3), **options)


def convolutional(synchronized=False):
    layers = [
        keras.Input((6, 6, 1)),
        seeded(keras.layers.Conv2D, 4, 3, activation="relu"),
        keras.layers.BatchNormalization(momentum=0.5, synchronized=synchronized),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.5, seed=1),
        seeded(keras.layers.Dense, 3, kernel_regularizer="l2", activity_regularizer="l2"),
    ]
    return keras.Sequential(layers)


def recurrent():
    seeds = {"recurrent_initializer": keras.initializers.Orthogonal(seed=2)}
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            keras.layers.Reshape((6, 6)),
            seeded(keras.layers.LSTM, 4, **seeds),
            seeded(keras.layers.Dense, 3),
        ]
    )


def dense():
    layers = keras.layers.Flatten(), keras.layers.BatchNormalization(momentum=0.5), seeded(keras.layers.Dense, 3)
    return keras.Sequential([keras.Input((6, 6, 1)), *layers])


def trained(strategy, make, pad, weighted=False, **options):
    """Weights, logs, evaluation and predictions of two epochs, and how many programs there were of a step."""
    rows = (X, Y, WEIGHT) if weighted else (X, Y)

    def batches(rows):
        dataset = rx.data.Dataset.from_tensor_slices(rows).batch(BATCH)
        return strategy.experimental_distribute_dataset(dataset, rx.InputOptions(pad_last_batch=pad))

    with strategy.scope():
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]
        model.compile(keras.optimizers.Adam(0.01), loss, **{"metrics": metrics, **options})
    history = model.fit(batches(rows), epochs=2, verbose=0).history
    evaluated = model.evaluate(batches(rows), verbose=0)
    predicted = model.predict(batches((X,)), verbose=0)
    return [*model.get_weights(), *map(np.asarray, history.values()), np.asarray(evaluated), predicted]


def check(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.fixture
def programs(monkeypatch):
    """The functions that are made."""
    made, make = [], function.function

    def noted(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(function, "function", noted)
    return made


def mark_cases(names, numbers):
    """Return cases for `parametrize`, those in `numbers` with that mark and the others with `thorough`."""
    return [pytest.param(n, marks=pytest.mark.numbers if n in numbers else pytest.mark.thorough) for n in names]


@pytest.mark.parametrize("name", mark_cases(["two", "four", "central"], ["two"]))
def test_an_epoch_of_a_convolutional_model_is_one_program(name, programs):
    strategy = STRATEGIES[name]()
    expected = trained(strategy, convolutional, pad=False)
    programs.clear()
    check(trained(strategy, convolutional, pad=True), expected)
    traces = [program.experimental_get_tracing_count() for program in programs]
    assert [count for count in traces if count] == [1, 1, 1]  # fit, evaluate and predict


CASES = {
    "synchronized": (lambda: convolutional(synchronized=True), {}),
    "weighted": (convolutional, {"weighted": True, "weighted_metrics": ["accuracy"]}),
    "recurrent": (recurrent, {}),
    "eager": (dense, {"run_eagerly": True}),
    "several steps": (dense, {"steps_per_execution": 2}),
}


@pytest.mark.parametrize("case", mark_cases(CASES, ["synchronized", "weighted"]))
def test_a_fit_has_the_numbers_without_padding(case):
    make, options = CASES[case]
    # On four replicas each would normalize a single row, whose gradients are nothing but rounding.
    check(*(trained(mirrored(2), make, pad, **options) for pad in (True, False)))
