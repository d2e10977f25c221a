"""Small variables in one vector: nobody notices, but that calls have fewer arrays and one operation does for many."""

from __future__ import annotations

import _thread
import copy
import gc
import pickle
import threading
import time
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import mirrored, one_device

import replicax as rx
from replicax._passes import vectorize
from replicax._variables import homes, packed_storage, vector_homes

SHAPES = [(3, 2), (4,), (2, 2), (1,), (5,), (1, 3)]


@pytest.fixture(params=["packed", "shelved", "apart"])
def packed(request, monkeypatch) -> bool:
    """Whether variables are packed, or on a shelf, or each by itself: what follows holds either way."""
    monkeypatch.setattr(packed_storage, "FEWEST", 2 if request.param == "packed" else 10**9)
    monkeypatch.setattr(packed_storage, "FEWEST_IN_LIST", 10**9 if request.param == "apart" else 1)
    return request.param == "packed"


def strategy_of(n: int) -> Any:
    return mirrored(n) if n else one_device()


def counting(n: int) -> tuple[Any, list[Any], Any]:
    """A strategy, variables full of their numbers, and a function that adds 1 to each."""
    strategy = strategy_of(n)
    with strategy.scope():
        variables = [rx.Variable(jnp.full(shape, float(i))) for i, shape in enumerate(SHAPES)]

    @rx.function
    def step():
        for variable in variables:
            variable.assign_add(jnp.ones(variable.shape), read_value=False)

    return strategy, variables, step


def numbers(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


class Training:
    """Variables of several shapes that Adam fits to numbers, the replicas' gradients added up."""

    def __init__(self, strategy: Any):
        self.strategy, self.goals = strategy, numbers(1)
        with strategy.scope():
            self.variables = [rx.Variable(value) for value in numbers(0)]
            self.optimizer = rx.Optimizer(optax.adamw(0.1), self.variables)
        self.step = rx.function(self.whole_step)

    def loss(self, values: Any, scale: Any) -> Any:
        return sum(jnp.sum((v - goal) ** 2) * scale for v, goal in zip(values, self.goals))

    def replica(self, scale: Any) -> Any:
        loss, gradients = jax.value_and_grad(self.loss)([v.value() for v in self.variables], scale)
        self.optimizer.apply_gradients(gradients)
        return loss

    def whole_step(self, scale: Any) -> Any:
        return self.strategy.reduce("SUM", self.strategy.run(self.replica, args=(scale,)), axis=None)

    def by_hand(self, steps: int) -> list[Any]:
        """The same with Optax alone; with n replicas the gradients are n times as large."""
        adam, values = optax.adamw(0.1), [jnp.asarray(x) for x in numbers(0)]
        n = self.strategy.num_replicas_in_sync

        @jax.jit
        def step(values: Any, state: Any) -> Any:
            updates, state = adam.update(jax.grad(self.loss)(values, 0.5 * n), state, values)
            return optax.apply_updates(values, updates), state

        state = jax.jit(adam.init)(values)
        for _ in range(steps):
            values, state = step(values, state)
        return values


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [0, 1, 2, 4])
def test_a_step_computes_what_it_computes_by_hand(n, packed):
    training = Training(strategy_of(n))
    for _ in range(3):
        training.step(jnp.float32(0.5))
    for variable, value in zip(training.variables, training.by_hand(3)):
        np.testing.assert_allclose(variable.numpy(), value, rtol=2e-5, atol=1e-6)
    assert training.step.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("n", [0, 2])
def test_a_packed_step_has_few_arrays_and_few_operations(n, packed):
    """18 small arrays and a counter are three vectors and the counter; one square root does for all variables."""
    training = Training(strategy_of(n))
    training.step(jnp.float32(0.5))
    lowered = training.step.lower(jnp.float32(0.5))
    inputs = len(jax.tree.leaves(lowered.in_avals))
    roots = lowered.as_text().count("stablehlo.sqrt")
    assert (inputs, roots) == ((5, 1) if packed else (20, 6))
    assert lowered.compile().as_text().count(" all-reduce(") <= 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", [0, 2])
def test_reading_and_assigning_between_calls(n, packed):
    strategy, variables, step = counting(n)
    step()
    before = [variable.value() for variable in variables]
    same = variables[1].value()
    variables[0].assign(jnp.full((3, 2), 10.0))
    assert variables[0].numpy().tolist() == [[10.0] * 2] * 3
    step()
    variables[5].assign_sub(jnp.full((1, 3), 7.0))
    clone = copy.deepcopy(variables[4])
    step()
    assert [float(np.max(value)) for value in before] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert same.tolist() == [2.0] * 4
    assert [float(np.max(v.numpy())) for v in variables] == [12.0, 4.0, 5.0, 6.0, 7.0, 1.0]
    assert clone.numpy().tolist() == [6.0] * 5
    clone.assign(jnp.zeros(5))
    step()
    assert variables[4].numpy().tolist() == [8.0] * 5


def test_values_read_are_on_the_devices_of_their_replicas(packed):
    strategy, variables, step = counting(2)
    step()
    devices = [v.device for v in strategy.run(lambda: jnp.zeros(())).values]
    for again in range(2):
        assert variables[1].value().devices() == {devices[0]}
        components = [variables[1].values[i].value() for i in (1, 0)]
        assert [component.devices() for component in components] == [{devices[1]}, {devices[0]}]
        everywhere = strategy.run(lambda: variables[1] * 1.0).values
        assert [float(part.sum()) for part in (*components, *everywhere)] == [4 * (2.0 + again)] * 4
        assert float(jnp.sum(components[0] + jnp.ones(4))) == 4 * (3.0 + again)  # free to move
        step()


@pytest.mark.parametrize("n", [0, 2])
def test_programs_that_know_of_some_of_the_variables(n, packed):
    """One that reads them, compiled before they are packed, one that replaces a few, and one with other variables."""
    strategy = strategy_of(n)
    with strategy.scope():
        variables = [rx.Variable(jnp.full(shape, float(i))) for i, shape in enumerate(SHAPES)]
        others = [rx.Variable(jnp.zeros(2)) for _ in range(3)]

    @rx.function
    def total():
        return sum(jnp.sum(variable) / variable.value().size for variable in variables)

    @rx.function
    def step(some):
        for variable in [*variables[:2], *variables[2 if some else 6 :], *others]:
            variable.assign_add(jnp.ones(variable.shape), read_value=False)

    assert float(total()) == 15.0
    step(True)
    assert float(total()) == 21.0
    step(False)
    assert float(total()) == 23.0
    step(True)
    assert float(total()) == 29.0
    assert [v.numpy().tolist() for v in others] == [[3.0, 3.0]] * 3
    assert total.experimental_get_tracing_count() == 1 and step.experimental_get_tracing_count() == 2


def test_a_component_that_is_assigned(packed):
    strategy = mirrored(2)
    with strategy.scope():
        variables = [rx.Variable(jnp.zeros(3)) for _ in range(4)]

    @rx.function
    def step():
        for variable in variables:
            variable.assign_add(jnp.ones(3), read_value=False)

    step()
    for component in variables[1].values:
        component.assign(jnp.full(3, 5.0))
    step()
    assert [v.numpy()[0] for v in variables] == [2.0, 6.0, 2.0, 2.0]
    assert [component.numpy().tolist() for component in variables[1].values] == [[6.0] * 3] * 2


@pytest.mark.parametrize("most", [0, 10**9])
def test_replicas_whose_copies_differ(most, packed, monkeypatch):
    """Without an aggregation each replica assigns its own copy."""
    monkeypatch.setattr(vector_homes, "MOST_COPIES", most)
    strategy = mirrored(2)
    with strategy.scope():
        variables = [rx.Variable(jnp.zeros(3)) for _ in range(4)]

    @rx.function
    def step():
        strategy.run(lambda: [variable.assign_add(jnp.ones(3), read_value=False) for variable in variables] and None)

    def assign(variable, tens):
        for number, component in enumerate(variable.values):
            component.assign(jnp.full(3, tens * 10.0 + number))

    for tens, variable in enumerate(variables):
        assign(variable, tens)
    step()
    assert [[c.numpy()[0] for c in v.values] for v in variables] == [[1, 2], [11, 12], [21, 22], [31, 32]]
    assign(variables[1], 5)
    variables[2].assign(jnp.zeros(3))
    step()
    assert [[c.numpy()[0] for c in v.values] for v in variables] == [[2, 3], [51, 52], [1, 1], [32, 33]]


def test_a_gradient_tape_around_the_call_sees_the_variables(packed):
    variables = [rx.Variable(jnp.full(2, float(i + 1))) for i in range(4)]

    @rx.function
    def step(x):
        loss = sum(jnp.sum(v.value() ** 2) * x for v in variables)
        for variable in variables:
            variable.assign_add(jnp.ones(2), read_value=False)
        return loss

    step(2.0)
    with rx.GradientTape() as tape:
        loss = step(3.0)
    assert [g.tolist() for g in tape.gradient(loss, variables)] == [[6.0 * (i + 2)] * 2 for i in range(4)]
    step(2.0)
    assert [v.numpy().tolist() for v in variables] == [[i + 4.0] * 2 for i in range(4)]


def test_each_variable_computed_from_the_one_before(packed):
    """All additions are alike, but none can wait for the others."""
    variables = [rx.Variable(jnp.full(2, float(i))) for i in range(4)]

    @rx.function
    def step():
        last = jnp.ones(2)
        for variable in variables:
            last = variable.assign_add(last)

    step()
    assert [v.numpy()[0] for v in variables] == [1.0, 2.0, 4.0, 7.0]
    step()
    assert [v.numpy()[0] for v in variables] == [2.0, 4.0, 8.0, 15.0]


def test_a_scalar_of_its_own_for_each_variable(packed):
    rates = [rx.Variable(0.1 * (i + 1)) for i in range(4)]
    variables = [rx.Variable(jnp.ones(shape)) for shape in [(2,), (3, 1), (), (4,)]]

    @rx.function
    def step():
        for rate, variable in zip(rates, variables):
            norm = jnp.sqrt(jnp.sum(variable.value() ** 2))
            variable.assign_sub(rate.value() * variable.value() / norm, read_value=False)

    step()
    for i, variable in enumerate(variables):
        size = variable.numpy().size
        np.testing.assert_allclose(variable.numpy(), 1 - 0.1 * (i + 1) / np.sqrt(size), rtol=1e-6)


def test_dtypes_and_large_arrays_are_packed_separately(packed):
    large = packed_storage.LARGEST // 2 + 1
    variables = [rx.Variable(jnp.zeros(n, dtype)) for dtype in (jnp.float32, jnp.bfloat16) for n in (2, 3, 4, large)]

    @rx.function
    def step():
        for variable in variables:
            variable.assign_add(jnp.ones(variable.shape, variable.dtype), read_value=False)

    step()
    step()
    assert all((variable.numpy() == 2).all() for variable in variables)
    assert len(jax.tree.leaves(step.lower().in_avals)) == (4 if packed else 8)


@pytest.mark.parametrize("n", [0, 2])
def test_types_of_64_bits_stay(n, packed, tmp_path):
    """Through packing, assigning and a checkpoint, where JAX has them only on demand."""
    before = jax.config.jax_explicit_x64_dtypes
    jax.config.update("jax_explicit_x64_dtypes", "allow")
    try:
        strategy = strategy_of(n)
        with strategy.scope():
            first = rx.VariableAggregation.ONLY_FIRST_REPLICA
            counters = [rx.Variable(np.array([i, 2**40]), aggregation=first) for i in range(4)]

        @rx.function
        def step():
            strategy.run(lambda: [counter.assign_add(np.array([1, 1])) for counter in counters] and None)

        step()
        counters[0].assign(np.array([7, 2**41]))
        step()
        checkpoint = rx.train.Checkpoint(**{f"counter{i}": counter for i, counter in enumerate(counters)})
        path = checkpoint.save(str(tmp_path / "saved"))
        counters[1].assign(np.array([0, 0]))
        checkpoint.restore(path)
        step()
        assert [counter.numpy().tolist() for counter in counters] == [
            [9, 2**41 + 2], [4, 2**40 + 3], [5, 2**40 + 3], [6, 2**40 + 3]
        ]  # fmt: skip
    finally:
        jax.config.update("jax_explicit_x64_dtypes", before.name.lower())


def test_a_pytree_in_one_variable(packed):
    """A variable's small leaves are packed and the others are not; the value stays one pytree."""
    large = packed_storage.LARGEST // 4 + 1
    variable = rx.Variable({"a": jnp.zeros(3), "b": jnp.zeros(large), "c": jnp.zeros((2, 2)), "n": jnp.int32(0)})

    @rx.function
    def step():
        return variable.assign(jax.tree.map(lambda x: x + 1, variable.value()), read_value=False)

    for expected in (1, 2):
        step()
        value = variable.value()
        assert {k: int(jnp.max(x)) for k, x in value.items()} == dict.fromkeys("abcn", expected)
    variable.assign(jax.tree.map(jnp.zeros_like, value))
    step()
    assert {k: int(jnp.max(x)) for k, x in variable.value().items()} == dict.fromkeys("abcn", 1)


def test_programs_may_share_a_packed_vector_or_use_a_part_of_it(packed):
    """One function with two batch sizes, and another one with some of its variables."""
    strategy = mirrored(2)
    with strategy.scope():
        weights = [rx.Variable(jnp.zeros(3)) for _ in range(3)]
        seen = rx.Variable(
            0.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation=rx.VariableAggregation.SUM
        )

    @rx.function
    def step(x):
        def replica():
            for weight in weights:
                weight.assign_add(jnp.full(3, x.sum()), read_value=False)
            seen.assign_add(1.0)

        strategy.run(replica)

    @rx.function
    def reset():
        weights[1].assign(jnp.zeros(3))
        seen.assign(0.0)

    for size in (2, 5, 2):
        step(jnp.ones(size))
    kept = weights[1].value()
    assert [w.numpy()[0] for w in weights] == [9.0] * 3 and float(seen) == 6.0
    reset()
    step(jnp.ones(2))
    assert [w.numpy()[0] for w in weights] == [11.0, 2.0, 11.0] and float(seen) == 2.0
    assert kept.tolist() == [9.0] * 3


def stepping(n: int) -> tuple[list[Any], Any]:
    """Small and large variables, and a function that adds 1 to each."""
    strategy = strategy_of(n)
    with strategy.scope():
        variables = [rx.Variable(jnp.zeros(shape)) for shape in [(2,), (3,), (4,), (2, 2), (300, 300)]]

    def replica():
        product = variables[-1].value()
        for _ in range(3):
            product = product @ product  # which takes most of the time
        for variable in variables:
            variable.assign_add(jnp.ones(variable.shape) + 0 * product[0, 0], read_value=False)

    return variables, rx.function(lambda: strategy.run(replica))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", [0, 2])
def test_after_an_interrupt_the_variables_are_all_of_one_step(n, packed):
    variables, step = stepping(n)
    step()
    seen = 0
    for _ in range(4):
        steps = threading.Event()

        def interrupt(steps=steps):
            steps.wait()
            time.sleep(0.01)
            _thread.interrupt_main()

        thread = threading.Thread(target=interrupt)
        thread.start()  # which is not what is interrupted
        try:
            steps.set()
            while thread.is_alive():
                step()
            for _ in range(3):
                step()
        except KeyboardInterrupt:  # it is lost where it comes while Python lets go of an object
            seen += 1
        thread.join()
        values = [np.unique(variable.numpy()) for variable in variables]
        assert len(np.unique(np.concatenate(values))) == 1
    assert seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", [0, 2])
def test_variables_are_used_while_another_thread_takes_steps(n, packed):
    variables, step = stepping(n)
    step()
    stopped, failures = threading.Event(), []

    def use():
        try:
            while not stopped.is_set():
                for variable in variables:
                    variable.assign_add(jnp.ones(variable.shape))
                    variable.assign_sub(jnp.ones(variable.shape))
                    repr(variable)
                    assert len(np.unique(copy.deepcopy(variable).numpy())) == 1
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        step()
    stopped.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert [np.unique(variable.numpy()).tolist() for variable in variables] == [[61.0]] * len(variables)


def test_after_a_callback_that_failed_the_variables_have_the_values_that_they_had(packed):
    variables = [rx.Variable(jnp.zeros(3)) for _ in range(4)]

    def fail(x):
        if failing:
            raise ValueError("as it is told to")
        return x

    @rx.function
    def plain():
        for variable in variables:
            variable.assign_add(jnp.ones(3), read_value=False)

    @rx.function
    def step():
        one = jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(1))
        for variable in variables:
            variable.assign_add(jnp.ones(3) * one, read_value=False)

    plain()
    failing = False
    step()
    failing = True
    with pytest.raises(ValueError, match="as it is told to") as caught:
        step()
    assert any("the compiled step calls back" in note for note in caught.value.__notes__)
    assert [variable.numpy().tolist() for variable in variables] == [[2.0] * 3] * 4
    failing = False
    variables[0].assign(jnp.full(3, 7.0))
    step()
    plain()
    assert [variable.numpy()[0] for variable in variables] == [9.0, 4.0, 4.0, 4.0]


def test_variables_donated_to_a_failed_program_raise_until_assigned(packed, tmp_path, monkeypatch):
    variables = [rx.Variable(jnp.zeros(3), name=f"v{i}") for i in range(4)]

    @rx.function
    def step():
        for variable in variables:
            variable.assign_add(jnp.ones(3), read_value=False)

    step()
    ((program,),) = step._programs.entries.values()
    executable = program.executable.for_steps(1)
    compiled = executable.function

    def fail(*args):
        compiled(*args)  # which takes over the variables' arrays
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: as on a device that is full")

    monkeypatch.setattr(executable, "function", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        step()
    assert any("step failed" in note and "They are lost" in note for note in caught.value.__notes__)
    monkeypatch.setattr(executable, "function", compiled)
    variables[0].assign(jnp.full(3, 5.0))  # that one is whole again
    assert variables[0].numpy().tolist() == [5.0] * 3
    reads = [
        lambda v: v.numpy(), lambda v: v.value(), lambda v: v + 1, float, repr, copy.deepcopy, pickle.dumps,
        lambda v: v.assign_add(jnp.ones(3)), lambda v: step(), lambda v: rx.function(lambda: v + 1)(),
        lambda v: rx.train.Checkpoint(v=v).write(str(tmp_path / "checkpoint")),
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(rx.StepError, match=r"v\d:0 has no value: step, .*assign all of the value") as refused:
            read(variables[1])
        assert "RESOURCE_EXHAUSTED" in str(refused.value.__cause__)
    for number, variable in enumerate(variables):
        variable.assign(jnp.full(3, float(number)))
    step()
    assert [variable.numpy()[0] for variable in variables] == [1.0, 2.0, 3.0, 4.0]


def test_reading_different_variables_compiles_no_new_program():
    variables = [rx.Variable(jnp.zeros((3, 7))) for _ in range(8)]

    @rx.function
    def step():
        for number, variable in enumerate(variables):
            variable.assign(jnp.roll(variable.value(), number), read_value=False)

    step()
    step()
    before = homes._copied._cache_size()
    for chosen in range(8):
        kept = [variable.value() for variable in variables[: chosen + 1]]
        step()
        assert len(kept) == chosen + 1
    assert homes._copied._cache_size() - before <= 2  # one array, and all of them


def test_shallow_copies_are_the_variable_and_pickles_have_its_value(packed):
    """A shallow one is the variable itself, and what is pickled has its value, wherever that stands."""
    variables = [rx.Variable(jnp.zeros(2)) for _ in range(4)]

    @rx.function
    def step():
        for variable in variables:
            variable.assign_add(jnp.ones(2), read_value=False)

    step()
    read = pickle.loads(pickle.dumps(variables))
    step()
    assert copy.copy(variables[0]) is variables[0]
    assert [v.numpy()[0] for v in variables] == [2.0] * 4 and [v.numpy()[0] for v in read] == [1.0] * 4
    read[0].assign(jnp.zeros(2))
    step()
    assert variables[0].numpy()[0] == 3.0 and read[0].numpy()[0] == 0.0


@pytest.mark.parametrize("n", [0, 2])
def test_unused_packed_variables_are_freed(n, packed):
    gc.collect()
    gc.freeze()  # so that the next collection looks at what is made here alone
    variables, step = stepping(n)
    step()
    left = [weakref.ref(variable) for variable in variables]
    del variables, step
    gc.collect()
    assert [variable() for variable in left] == [None] * len(left)


def test_pieces_are_joined_in_any_order():
    vector = jnp.arange(40.0)
    parts = vectorize.pieces(vector, [(2,)] * 20)
    assert vectorize.joined(parts) is vector
    assert vectorize.joined(parts[3:5]).tolist() == [6.0, 7.0, 8.0, 9.0]
    assert vectorize.joined(parts[::-1]).tolist() == np.arange(40.0).reshape(20, 2)[::-1].ravel().tolist()
    assert vectorize.joined([parts[1], jnp.ones((1, 2)), parts[0]]).tolist() == [2.0, 3.0, 1.0, 1.0, 0.0, 1.0]


def test_more_cpu_devices_than_xla_has_threads(run_python):
    """Are warned of; and nothing is packed there, as taking vectors apart beside a collective may stand still."""
    done = run_python("""
        import warnings
        import jax
        import replicax as rx

        rx.config.set_virtual_devices({"GPU": 260})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rx.MirroredStrategy([f"GPU:{i}" for i in range(256)])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy = rx.MirroredStrategy()
        print(caught[0].filename.endswith("program.py"), caught[0].message)
        with strategy.scope():
            variables = [rx.Variable(float(i), aggregation=rx.VariableAggregation.MEAN) for i in range(20)]

        @rx.function
        def step():
            def one():
                for variable in variables:
                    variable.assign_add(1.0)
            strategy.run(one)

        step()
        print([float(v) for v in variables] == [1.0 + i for i in range(20)])
        print(step.lower().as_text().count("tensor<20xf32>"))
    """)
    assert done.returncode == 0, done
    said, right, packed = done.stdout.splitlines()
    assert said.startswith("True 260 CPU devices of one process are more than the 256 threads")
    assert right == "True" and packed == "0"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("rows", "widths", "shared"),
    [(2, [64] * 9, True), (8192, [64] * 9, False), (8192, range(64, 46, -2), True)],
    ids=["short", "long", "long, of many shapes"],
)
def test_alike_layers_of_a_step_that_takes_long_keep_arrays_of_their_own(rows, widths, shared):
    """So that XLA compiles them once, where a vector would gain nothing that counts."""
    rng = np.random.default_rng(0)
    layers = [rx.Variable(rng.normal(size=shape, scale=0.1).astype(np.float32)) for shape in zip(widths, widths[1:])]

    def loss(values, x):
        for value in values:
            x = jnp.tanh(x @ value)
        return jnp.sum(x)

    @rx.function
    def step(x):
        for layer, gradient in zip(layers, jax.grad(loss)([layer.value() for layer in layers], x)):
            layer.assign_sub(0.1 * gradient)

    before = [layer.numpy() for layer in layers]
    x = np.ones([rows, widths[0]], np.float32) / rows
    step(x)
    stores = [slot.store for layer in layers for slot in layer._storage.slots.values()]
    assert any(isinstance(store, packed_storage.SharedVector) for store in stores) == shared
    for layer, value, gradient in zip(layers, before, jax.grad(loss)(before, x)):
        np.testing.assert_allclose(layer.numpy(), value - 0.1 * gradient, rtol=1e-4, atol=1e-5)
