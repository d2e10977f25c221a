"""Programs are kept and used again: never for something that they were not made for, nor with values of the past."""

from __future__ import annotations

import functools
import gc
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax.data import Dataset

ctx = rx.get_replica_context


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(["GPU:0", "GPU:1"])


def numbers(strategy):
    return strategy.experimental_distribute_values_from_function(
        lambda c: np.float32([c.replica_id_in_sync_group + 1.0])
    )


class Box:
    """Something that a replica function may close over."""

    def __init__(self, content):
        self.content = content

    def scaled(self, x):
        return x * self.content


def driven_from_the_host(strategy, make_step, count=4):
    """What `strategy.run(make_step(i), ...)` gives in a function that loops over a distributed dataset."""
    batches = [np.ones(2, np.float32)] * count
    dataset = strategy.experimental_distribute_dataset(batches)

    @rx.function
    def epoch(dataset):
        results = []
        for i, x in enumerate(dataset):
            results.append(strategy.reduce("SUM", strategy.run(make_step(i), args=(x,)), axis=0))
        return results

    return [float(x) for x in epoch(dataset)]


@pytest.mark.parametrize(
    "make_step",
    [
        lambda i: functools.partial(lambda x, scale: x * scale, scale=float(i)),
        lambda i: (lambda box: lambda x: x * box.content)(Box(float(i))),
        lambda i: (lambda array: lambda x: x * array)(jnp.float32(i)),
        lambda i: Box(float(i)).scaled,
        lambda i: (lambda scale=float(i): lambda x: x * scale)(),
        lambda i: lambda x, *, scale=float(i): x * scale,
    ],
    ids=["partial", "object", "array", "method", "number", "default"],
)
def test_a_step_uses_the_captured_values_of_its_iteration(strategy, make_step):
    assert driven_from_the_host(strategy, make_step) == [0.0, 2.0, 4.0, 6.0]


def test_a_step_that_calls_itself(strategy):
    def make_step(i):
        def power(x, n=2):
            return x if n == 0 else power(x, n - 1) * 2.0

        return power

    assert driven_from_the_host(strategy, make_step, 2) == [8.0, 8.0]


def test_a_rebound_closure_cell_is_read_again(strategy):
    results = []

    @rx.function
    def epoch(dataset):
        for i, x in enumerate(dataset):
            box = Box(float(i))
            results.append(strategy.reduce("SUM", strategy.run(lambda x: x * box.content, args=(x,)), axis=0))  # noqa: B023

    epoch(strategy.experimental_distribute_dataset([np.ones(2, np.float32)] * 6))
    assert [float(x) for x in results] == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_a_method_is_traced_once(strategy):
    traces = []

    class Model:
        def step(self, x):
            traces.append(1)
            return x * 2.0

    model = Model()
    driven_from_the_host(strategy, lambda i: model.step, 5)
    assert len(traces) == 1


def test_programs_are_not_shared_between_strategies():
    """A program is for one strategy, also where another one has its address."""
    f = rx.function(lambda: rx.get_strategy().num_replicas_in_sync)
    for i in range(3):
        for n in (1, 2, 3):
            with rx.MirroredStrategy([f"GPU:{k}" for k in range(n)]).scope(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it is traced again and again
                assert int(f()) == n, i
        gc.collect()


def test_numbers_by_sign_and_slices_by_shape():
    sign = rx.function(lambda x: jnp.copysign(1.0, x))
    assert [float(sign(0.0)), float(sign(-0.0))] == [1.0, -1.0]
    dense = rx.function(lambda s: s.to_dense())
    rows, where = jnp.ones((1, 2)), jnp.array([0])
    assert [dense(rx.IndexedSlices(rows, where, (n, 2))).shape for n in (3, 5)] == [(3, 2), (5, 2)]


def test_weak_types_stay_weak():
    f = rx.function(lambda x, y: x * y)
    assert f(jnp.asarray(2.0), jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
    assert f(jnp.float32(2.0), jnp.ones(2, jnp.bfloat16)).dtype == jnp.float32


def test_a_recreated_dataset_uses_the_same_program_and_is_freed(strategy):
    step, gone = rx.function(lambda iterator: strategy.reduce("SUM", next(iterator), axis=0)), []
    for epoch in range(3):
        dataset = rx.data.Dataset.range(epoch, 4 + epoch).batch(2)
        assert float(step(iter(strategy.experimental_distribute_dataset(dataset)))) == 2 * epoch + 1
        gone.append(weakref.ref(dataset))
    del dataset
    gc.collect()
    assert step.experimental_get_tracing_count() == 1 and gone[0]() is None


def test_programs_depend_on_which_iterators_are_the_same():
    numbers = rx.data.Dataset.range(4)
    pair = rx.function(lambda a, b: next(a) + 10 * next(b))
    one = iter(numbers)
    assert [int(pair(one, one)), int(pair(iter(numbers), iter(numbers))), int(next(one))] == [10, 0, 2]

    @rx.function
    def marked(a, b):
        element = next(a)
        return element["x"] + next(b) if "y" in element else element["x"]

    one, x = iter(numbers), numbers.map(lambda x: {"x": x})
    xy = x.map(lambda element: {**element, "y": 0})
    # Without "y", nothing of the other iterator is taken.
    assert [int(marked(iter(elements), one)) for elements in (xy, x, xy, x)] == [0, 0, 1, 0]
    assert int(next(one)) == 2


def test_an_iterator_as_an_argument_is_let_go_of(strategy):
    dataset = strategy.experimental_distribute_dataset([np.full(2, i, np.float32) for i in range(3)])
    step = rx.function(lambda iterator: strategy.reduce("SUM", next(iterator), axis=0))
    gone = []
    for _ in range(3):
        iterator = iter(dataset)
        assert [float(step(iterator)) for _ in range(3)] == [0.0, 2.0, 4.0]
        gone.append(weakref.ref(iterator))
        iterator.close()
    del iterator
    gc.collect()
    assert step.experimental_get_tracing_count() == 1
    assert [reference() for reference in gone] == [None] * 3


def test_next_in_a_compiled_replica_is_refused(strategy):
    iterator = iter(Dataset.from_tensors(np.ones(2, np.float32)))
    with pytest.raises(RuntimeError, match="would become a constant"):
        rx.function(lambda: strategy.run(lambda: next(iterator)))()


def test_a_jitted_helper_reads_what_a_variable_holds_now(strategy):
    with strategy.scope():
        v = rx.Variable(1.0)
    helper = jax.jit(lambda x: x + v.value())
    one, two = rx.function(lambda x: helper(x)), rx.function(lambda x: helper(x) * 2)
    assert float(one(1.0)) == 2.0
    v.assign(5.0)
    assert [float(one(1.0)), float(two(1.0))] == [6.0, 12.0]
    with pytest.warns(UserWarning, match="is read inside of jax.jit"):
        helper(1.0)


def test_a_run_under_jit_warns_of_variables(strategy):
    with strategy.scope():
        v = rx.Variable(1.0)
    with pytest.warns(UserWarning, match="is read inside of jax.jit"):
        jax.jit(lambda x: strategy.reduce("SUM", strategy.run(lambda: v * 1.0), axis=None) + x)(1.0)


def test_keys_of_random_numbers(strategy):
    key = jax.random.key(0)
    expected = [float(jax.random.normal(jax.random.fold_in(key, i))) for i in range(2)]

    def draw(key):
        return jax.random.normal(jax.random.fold_in(key, ctx().replica_id_in_sync_group)), jax.random.split(key)

    for run in (strategy.run, rx.function(lambda fn, args: strategy.run(fn, args=args))):
        drawn, keys = run(draw, args=(key,))
        np.testing.assert_allclose([float(x) for x in drawn.values], expected, rtol=1e-6)
        assert all((jax.random.key_data(k) == jax.random.key_data(jax.random.split(key))).all() for k in keys.values)
    with strategy.scope():
        state = rx.Variable(jax.random.key(1))

    @rx.function
    def step():
        state.assign(jax.random.split(state.value())[0])

    step()
    assert (jax.random.key_data(state.value()) == jax.random.key_data(jax.random.split(jax.random.key(1))[0])).all()


@pytest.mark.parametrize("form", ["eager", "batch"])
def test_a_value_captured_by_a_function(strategy, form):
    x = strategy.run(lambda a: a * 1.0, args=(numbers(strategy),)) if form == "eager" else numbers(strategy)

    @rx.function
    def f(y):
        total = strategy.reduce("SUM", x, axis=None) + strategy.gather(x, axis=0).sum()
        return strategy.run(lambda a: a + total + y, args=(x,))

    assert [float(part[0]) for part in f(jnp.float32(1.0)).values] == [8.0, 9.0]
    assert [float(part[0]) for part in x.values] == [1.0, 2.0]


def test_settings_of_the_caller_apply_in_replicas(strategy):
    with jax.enable_x64(True):
        assert strategy.run(lambda: jnp.arange(2.0)).values[1].dtype == np.float64
    assert strategy.run(lambda: jnp.arange(2.0)).values[1].dtype == np.float32


def test_a_plain_variable_of_two_strategies(strategy):
    count = rx.Variable(0.0)
    for other in (strategy, rx.MirroredStrategy(["GPU:3", "GPU:4", "GPU:5"]), rx.OneDeviceStrategy("GPU:6")):
        rx.function(lambda other=other: other.run(lambda: count.assign_add(1.0)))()
    assert float(count) == 2 + 3 + 1


def test_assigned_values_fit(strategy):
    with strategy.scope():
        v, i = rx.Variable([0.0, 0.0]), rx.Variable(1)
    for wrong in (numbers(strategy), rx.function(lambda x: x)(numbers(strategy))):
        with pytest.raises(ValueError, match="Cannot assign"):
            v.assign(wrong)
    with pytest.raises(TypeError, match="Cannot convert 2.5"):
        i.assign(2.5)
    with pytest.raises(AttributeError, match="call variable.assign"):
        v.value = jnp.zeros(2)
    assert v.numpy().tolist() == [0.0, 0.0] and int(i) == 1


def test_values_of_a_larger_strategy_are_refused(strategy):
    other = rx.MirroredStrategy(["GPU:0", "GPU:1", "GPU:2"])
    for way in (lambda f: f, rx.function):
        with pytest.raises(ValueError, match="3 components is passed to .* which has 2 replicas"):
            way(lambda: strategy.run(lambda a: a, args=(numbers(other),)))()


def test_jax_tree_functions_work_on_per_replica_values(strategy):
    x = numbers(strategy)
    assert [part.tolist() for part in jax.device_get(x).values] == [[1.0], [2.0]]
    assert [part.tolist() for part in jax.tree.map(lambda a: a * 2, x).values] == [[2.0], [4.0]]
    assert jax.tree.map(jnp.sum, x).values == (3.0, 3.0)


def test_a_tape_uses_the_values_at_recording_time(strategy):
    with strategy.scope():
        v = rx.Variable([0.5, 1.0])
    f = rx.function(lambda: v.assign(jnp.tanh(v.value())) and None)
    out = rx.function(lambda: jnp.tanh(v.value()) ** 2)
    with rx.GradientTape() as tape:
        y = out()
    f(), f()
    x = jnp.array([0.5, 1.0])
    expected = jax.grad(lambda x: (jnp.tanh(x) ** 2).sum())(x)
    np.testing.assert_allclose(tape.gradient(y, v), expected, rtol=1e-5)


def test_threads_share_a_function(strategy):
    with strategy.scope():
        v = rx.Variable(jnp.zeros(4))
    step = rx.function(lambda: strategy.run(lambda: v.assign_add(jnp.ones(4), read_value=False)))
    step()
    errors = []

    def work():
        try:
            for _ in range(100):
                step()
                v.numpy()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and v.numpy().tolist() == [301.0] * 4
