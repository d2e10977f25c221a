"""Functions of `map` that are simple arithmetic: the host does it by itself, and nobody sees a difference."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_ways import mirrored

import replicax as rx
from replicax._data import arithmetic

X = np.random.default_rng(0).normal(0, 50, (20, 3, 2)).astype(np.float32)
X[0, 0] = np.nan, -np.inf
BYTES, LABELS = np.abs(X[1:]).astype(np.uint8), np.arange(20)
SCALE = 0.0078125


class Settings:
    scale = 2.0


@pytest.fixture
def results(monkeypatch):
    """What numpy computed."""
    found: list = []
    result = arithmetic._Simple.result

    def noted(self, element, pool):
        found.append(result(self, element, pool))
        return found[-1]

    monkeypatch.setattr(arithmetic._Simple, "result", noted)
    return found


def elements(function, *arrays, patience, monkeypatch, size=4, **options):
    monkeypatch.setattr(arithmetic, "PATIENCE", patience)
    data = rx.data.Dataset.from_tensor_slices(arrays[0] if len(arrays) == 1 else arrays).batch(size)
    found = data.map(function, **options).as_numpy_iterator()
    return [jax.tree.map(np.array, element) for element in found]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def normalized(x, y):
    def centered(x, mean=0.1307):
        return jnp.asarray(x, jnp.float32) / 255.0 - mean

    return {"image": centered(x) / 0.3081, "label": y, "shape": jnp.reshape(x, (len(x), -1)) * 3}


SIMPLE = {
    "scale": (lambda x: x * 2.0 - 1.1, X),
    "global": (lambda x: -(x - 127.5) * SCALE, X),
    "bytes": (lambda x: x.astype(jnp.float32) / 3, BYTES),
    "wrapping": (lambda x: x * x + 200, BYTES),
    "structure": (normalized, BYTES, LABELS[1:]),
    "list": (lambda x, y: [(x / (x + 1.0))[..., None] - 1.0, y], X, LABELS),
    "64 bits": (lambda y: y * 3, LABELS + 2**33),
    "as it is": (lambda x, y: (y, x), X, LABELS),
    "shared": (lambda x: (x * 2.5, (x * 2.5 + x) * x), X),
}


@pytest.mark.parametrize("options", [{}, {"num_parallel_calls": 2}], ids=["", "threads"])
@pytest.mark.parametrize("name", SIMPLE)
def test_simple_arithmetic_is_the_same_bit_by_bit(name, options, results, monkeypatch):
    function, *arrays = SIMPLE[name]
    before = [array.copy() for array in arrays]
    expected = elements(function, *arrays, patience=1e9, monkeypatch=monkeypatch, **options)
    assert not results
    found = elements(function, *arrays, patience=-1.0, monkeypatch=monkeypatch, **options)
    assert len(results) >= (3 if not options else 0)
    assert_same(found, expected)
    assert all(a.tobytes() == b.tobytes() and a.flags.writeable for a, b in zip(arrays, before))


def test_so_is_what_a_compiled_function_makes(results, monkeypatch):
    function = rx.function(lambda x, y: (x * 2.0 - 1.0, y))
    expected = elements(function, X, LABELS, patience=1e9, monkeypatch=monkeypatch)
    assert_same(elements(function, X, LABELS, patience=-1.0, monkeypatch=monkeypatch), expected)
    assert len(results) == 4 and function.experimental_get_tracing_count() == 1
    calls = []
    noting = rx.function(lambda x: calls.append(1) or x * 2.0)
    with_calls = elements(noting, X, patience=-1.0, monkeypatch=monkeypatch)
    assert len(results) == 8 and len(calls) == 1
    rx.config.run_functions_eagerly(True)
    try:
        assert_same(elements(noting, X, patience=-1.0, monkeypatch=monkeypatch), with_calls)
    finally:
        rx.config.run_functions_eagerly(False)
    assert len(results) == 8 and len(calls) == 6


VARIABLE, ARRAY, SEEN = rx.Variable(2.0), np.full(2, 2.0, np.float32), []


def appending(x):
    SEEN.append(1)
    return x * 2.0


def printing(x):
    print("one more")
    return x * 2.0


OTHERS = {
    "appends": appending,
    "prints": printing,
    "reads a variable": lambda x: x * VARIABLE.value(),
    "assigns a variable": lambda x: x * VARIABLE.assign(2.0),
    "an array": lambda x: x * ARRAY,
    "an attribute": lambda x: x * Settings.scale,
    "numpy's random numbers": lambda x: x * np.random.random(),
    "the time": lambda x: x * jnp.float32(time.time()),
    "an exponential": lambda x: jnp.exp(x),
    "a sum": lambda x: x - jnp.sum(x),
    "a division by zero": lambda x: x / 0.0,
    "a cast to integers": lambda x: x.astype(jnp.int32),
    "a number": lambda x: (x * 2.0, 1.0),
    "a jitted function": jax.jit(lambda x: x * 2.0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_are_called_for_each_element(name, results, monkeypatch):
    found = []
    for patience in (1e9, -1.0):
        SEEN.clear()
        found.append(elements(OTHERS[name], X[4:], patience=patience, monkeypatch=monkeypatch))
        assert not results and len(SEEN) == (4 if name == "appends" else 0)
    if "time" not in name and "numpy" not in name:
        assert_same(*found)


def test_programs_that_do_something_else_are_refused():
    for function in (
        lambda x: (jax.debug.callback(print, x), x * 2)[1],
        lambda x: (x * 2, jnp.sort(x)),
        lambda x: jax.lax.reshape(x, (6, 20), (2, 1, 0)),
        lambda x: x * ARRAY,
        lambda x: (x, 1.0),
        lambda x: jax.lax.broadcast_in_dim(x[0], X.shape, (1, 2)),
        lambda x: x.astype(jnp.bfloat16),
        lambda x: x.astype(bool) + True,
    ):
        assert arithmetic.Arithmetic(jax.make_jaxpr(function)(X)).steps is None


def test_what_a_function_reads_may_change(results, monkeypatch):
    scale = 2.0
    monkeypatch.setattr(arithmetic, "PATIENCE", -1.0)
    data = rx.data.Dataset.from_tensor_slices(X[4:].copy()).batch(4).map(lambda x: x * scale)
    iterator = iter(data)
    first = [next(iterator) for _ in range(2)]
    assert len(results) == 1
    scale = 3.0
    rest = list(iterator)
    assert len(results) == 1
    for i, (x, factor) in enumerate(zip([*first, *rest], [2, 2, 3, 3])):
        np.testing.assert_array_equal(x, X[4 + 4 * i : 8 + 4 * i] * factor)


def test_errors_and_odd_elements_come_in_their_places(results, monkeypatch):
    monkeypatch.setattr(arithmetic, "PATIENCE", -1.0)

    def made():
        for i in range(12):
            yield np.full(3 if i == 9 else 2, i, np.float32)
        raise ArithmeticError("no more of these")

    data = rx.data.Dataset.from_generator(made, output_signature=rx.TensorSpec((None,), np.float32))
    iterator = iter(data.map(lambda x: x * 2.0, num_parallel_calls=2))
    found = [next(iterator).tolist() for _ in range(12)]
    assert found == [[2.0 * i] * (3 if i == 9 else 2) for i in range(12)] and results
    with pytest.raises(ArithmeticError, match="no more of these"):
        next(iterator)
    assert list(iterator) == []


def test_elements_that_are_kept_never_change(results, monkeypatch):
    monkeypatch.setattr(arithmetic, "PATIENCE", -1.0)
    strategy = mirrored(2)
    data = rx.data.Dataset.from_tensor_slices((X, LABELS)).shuffle(20, seed=1).batch(4).map(lambda x, y: (x + 1.0, y))
    kept = list(strategy.experimental_distribute_dataset(data))
    assert len(results) == 4
    for x, y in kept:
        for images, labels in zip(strategy.experimental_local_results(x), strategy.experimental_local_results(y)):
            np.testing.assert_array_equal(images, X[np.asarray(labels)] + np.float32(1))
