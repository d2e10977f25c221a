"""`rx.function`: variables lifted, values never invalidated, retracing, iterators, creation, nesting, and errors."""

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
from strategies import SUM, ctx, mirrored, one_device, over, parts, per_replica, replica_id

import replicax as rx
from replicax._base.errors import InvalidArgumentError

A, S = rx.VariableAggregation, rx.VariableSynchronization


def made(strategy, value=1.0, **more):
    with strategy.scope():
        return rx.Variable(value, **more)


def dataset(batch=4, count=16):
    x = np.arange(count, dtype=np.float32)
    return [x[i : i + batch] for i in range(0, count, batch)]


# Variables.


@over(plain=True)
def test_variables_are_read_and_written_anew_by_each_call(make):
    strategy = make()
    v, w = made(strategy), made(strategy, jnp.zeros(3))
    plain = rx.Variable(10)

    @rx.function
    def step(x):
        v.assign_add(x)
        plain.assign_add(1)
        w.assign(w * 2 + v)
        return v + 0.0, plain.value() * 2

    expected = np.zeros(3)
    total = 1.0
    for k in range(1, 5):
        a, b = step(jnp.float32(k))
        total += k
        expected = expected * 2 + total
        assert float(a) == float(v) == total and int(b) == 2 * int(plain) == 2 * (10 + k)
        np.testing.assert_allclose(w.numpy(), expected)
    v.assign(100.0)  # a change from outside is seen
    assert float(step(jnp.float32(1))[0]) == 101.0
    assert step.experimental_get_tracing_count() == 1


@over(plain=True)
def test_a_value_that_the_user_holds_stays_valid(make):
    """Donation never invalidates a value, component or distributed value that was read out before."""
    strategy = make()
    alike = {"aggregation": A.ONLY_FIRST_REPLICA} if strategy.extended._variables_live_once else {}  # takes one value
    v = made(strategy, jnp.arange(4.0), **alike)
    on_read = made(strategy, jnp.arange(4.0), synchronization=S.ON_READ, aggregation=A.MEAN)
    tree = made(strategy, {"a": jnp.arange(4.0)}, **alike)

    @rx.function
    def step():
        def replica():
            v.assign_add(jnp.ones(4))
            on_read.assign_add(jnp.ones(4))
            tree.assign({"a": tree.value()["a"] + 1})

        strategy.run(replica)

    held = []
    for k in range(4):
        now = [
            v.value(), v.read_value(), v.numpy(), jnp.asarray(v), np.asarray(v), v[:], jax.tree.leaves(v)[0],
            on_read.value(), tree.value()["a"], strategy.experimental_local_results(v)[0].value(),
            strategy.experimental_local_results(v)[-1].numpy(),
            *(c.value() for c in getattr(v, "values", ())), *(c.value() for c in getattr(on_read, "values", ())),
            v.assign(v.value()), v.assign_add(jnp.zeros(4)),
        ]  # fmt: skip
        held.append((k, now))
        step()
        if k % 2:
            step()
            v.assign(v - 1)
            tree.assign(jax.tree.map(lambda x: x - 1, tree.value()))
            strategy.run(lambda: on_read.assign_sub(jnp.ones(4)))
        for then, values in held:
            for value in values:
                array = value.values[0] if isinstance(value, rx.DistributedValues) else value
                assert np.asarray(array).tolist() == [then + i for i in range(4)]
    assert v.numpy().tolist() == [4.0, 5.0, 6.0, 7.0]


@over(plain=True)
def test_results_of_a_function_stay_valid(make):
    strategy = make()
    v = made(strategy, jnp.zeros(2))

    @rx.function
    def step():
        result = v.assign_add(jnp.ones(2))
        return v.value(), v.read_value(), result, strategy.run(lambda: v.value())

    results = [step() for _ in range(4)]
    for k, (value, read, assigned, per) in enumerate(results, start=1):
        assert value.tolist() == read.tolist() == [k, k]
        assert parts(strategy, per)[0] == [k, k] and parts(strategy, assigned)[0] == [k, k]


@over(plain=True)
def test_one_array_assigned_to_two_variables(make):
    strategy = make()
    v, w, x = made(strategy, jnp.zeros(2)), made(strategy, jnp.zeros(2)), jnp.asarray([1.0, 2.0])

    @rx.function
    def step():
        v.assign_add(jnp.ones(2))
        w.assign_add(jnp.ones(2))

    @rx.function
    def both(x):
        v.assign(x)
        w.assign(x)

    @rx.function
    def swap():
        a, b = v.value(), w.value()
        v.assign(b)
        w.assign(a)

    v.assign(x)
    w.assign(x)
    step()
    step()
    assert v.numpy().tolist() == w.numpy().tolist() == [3.0, 4.0] and x.tolist() == [1.0, 2.0]
    w.assign(v)
    step()
    assert v.numpy().tolist() == w.numpy().tolist() == [4.0, 5.0]
    both(x)
    both(x)
    step()
    assert v.numpy().tolist() == w.numpy().tolist() == [2.0, 3.0] and x.tolist() == [1.0, 2.0]
    v.assign([0.0, 0.0])
    swap()
    swap()
    swap()
    assert v.numpy().tolist() == [2.0, 3.0] and w.numpy().tolist() == [0.0, 0.0]


def test_a_variables_array_passed_as_an_argument_is_not_donated_away():
    v = rx.Variable(jnp.zeros(2))

    @rx.function
    def step(x):
        v.assign_add(x + 1)
        return x

    for _ in range(3):
        x = v.value()
        y = step(x)
        assert x.tolist() == y.tolist()
    assert v.numpy().tolist() == [7.0, 7.0]


@over(copies=True)
def test_two_functions_share_variables(make, n):
    strategy = make()
    v = made(strategy, aggregation=A.SUM)
    add = rx.function(lambda: strategy.run(lambda: v.assign_add(replica_id() + 1)))
    double = rx.function(lambda: v.assign(v * 2))
    read = rx.function(lambda: v.read_value())
    total, expected = n * (n + 1) / 2, 1.0
    for _ in range(3):
        add()
        double()
        expected = (expected + total) * 2
        assert float(read()) == float(v) == expected and parts(strategy, v) == [expected] * n


@over(copies=True)
def test_a_variable_that_is_only_read_is_not_copied_or_moved(make, n):
    v = made(make(), jnp.ones(3))
    read = rx.function(lambda: v * 2)
    before = v.value()
    read()
    assert v.value() is before or v.value().unsafe_buffer_pointer() == before.unsafe_buffer_pointer()


def test_a_function_does_not_keep_its_variables_values_alive():
    v = rx.Variable(jnp.zeros(4))
    step = rx.function(lambda: v.assign_add(jnp.ones(4), read_value=False))
    step()
    old = weakref.ref(v.value())
    step()
    step()
    gc.collect()
    assert old() is None


def test_assigning_inside_of_a_jax_transformation_is_refused():
    v = rx.Variable(1.0)

    def body(x):
        v.assign(x)
        return x

    with pytest.raises(RuntimeError, match="assigned"):
        jax.jit(body)(jnp.float32(2))
    with pytest.raises(RuntimeError, match="assigned"):
        rx.function(lambda x: jax.grad(body)(x))(jnp.float32(2))
    with pytest.raises(RuntimeError, match="assigned"):
        rx.function(lambda x: jax.lax.fori_loop(0, 3, lambda i, y: body(y), x))(jnp.float32(2))
    assert float(v) == 1.0 and float(v + 0) == 1.0
    assert float(rx.function(lambda: v.assign(3.0))().tolist()) == 3.0


# Tracing.


@pytest.mark.filterwarnings("ignore:.*triggered retracing")
def test_a_function_is_retraced_for_each_signature():
    traces = []

    @rx.function
    def f(x, k=1, *, name="a"):
        traces.append(1)
        return jax.tree.map(lambda a: a * k, x)

    def traced(*args, **kwargs):
        before = len(traces)
        f(*args, **kwargs)
        return len(traces) - before

    assert traced(jnp.ones(2)) == 1 and traced(jnp.zeros(2)) == 0 and traced(np.ones(2, np.float32)) == 0
    assert traced(jnp.ones(3)) == 1 and traced(jnp.ones(2, jnp.int32)) == 1 and traced({"a": jnp.ones(2)}) == 1
    assert traced(jnp.ones(2), 2) == 1 and traced(jnp.ones(2), 2) == 0 and traced(jnp.ones(2), 2.0) == 1
    assert traced(jnp.ones(2), True) == 1 and traced(jnp.ones(2), name="b") == 1 and traced(jnp.ones(2), name="b") == 0
    assert traced(jnp.ones(2), jnp.int32(3)) == 1 and traced(jnp.ones(2), jnp.int32(4)) == 0
    assert f.experimental_get_tracing_count() == len(traces)


def test_python_numbers_are_constants_of_the_program():
    @rx.function
    def f(x, n):
        for _ in range(n):  # needs a number
            x = x * 2
        return x

    assert [float(f(jnp.float32(1), n)) for n in (0, 1, 3)] == [1.0, 2.0, 8.0]
    assert [float(rx.function(lambda k: jnp.float32(k))(k)) for k in (True, 1, 1.0, 2)] == [1.0, 1.0, 1.0, 2.0]


@pytest.mark.filterwarnings("ignore:.*triggered retracing")
def test_objects_are_constants_by_identity():
    class Settings:
        def __init__(self, scale):
            self.scale = scale

    f = rx.function(lambda x, s: x * s.scale)
    a, b = Settings(2.0), Settings(3.0)
    assert float(f(jnp.float32(1), a)) == 2.0 and float(f(jnp.float32(1), b)) == 3.0
    del a, b
    gc.collect()
    for scale in range(20):  # the ids of objects that are gone must not be taken for new ones
        assert float(f(jnp.float32(1), Settings(float(scale)))) == scale


@over()
def test_per_replica_arguments_and_results(make, n):
    """Fact 23."""
    strategy, traces = make(), []

    @rx.function
    def f(x):
        traces.append(type(x).__name__)
        return x, strategy.run(lambda a: a * 10, args=(x,))

    same, scaled = f(per_replica(strategy, [float(r) for r in range(n)]))
    assert isinstance(same, rx.PerReplica) and parts(strategy, same) == [float(r) for r in range(n)]
    assert parts(strategy, scaled) == [10.0 * r for r in range(n)]
    f(per_replica(strategy, [3.0] * n))
    f(per_replica(strategy, [[1.0]] * n))
    assert traces == ["PerReplica"] * 2
    three = rx.function(lambda: strategy.run(lambda: 3))()
    assert isinstance(three, jax.Array) and int(three) == 3
    assert rx.function(lambda: strategy.run(lambda: None))() is None
    assert rx.function(lambda: strategy.run(lambda: ("x",)))() == ("x",)


def test_results_of_every_kind():
    v = rx.Variable(1.0)
    f = rx.function(lambda x: {"b": (x, [v, None, "t"]), "a": 3, "c": np.arange(2), "d": (), "e": x > 1, "f": 2.5})
    result = f(jnp.float32(2))
    assert (
        list(result) == ["b", "a", "c", "d", "e", "f"] and result["b"][1][0] is v and result["b"][1][1:] == [None, "t"]
    )
    assert int(result["a"]) == 3 and result["c"].tolist() == [0, 1] and result["d"] == () and bool(result["e"])
    assert float(result["f"]) == 2.5


def test_input_signature():
    """Fact 36."""
    traces = []

    @rx.function(input_signature=[rx.TensorSpec([None, 2], np.float32), {"a": rx.TensorSpec([], np.int32)}])
    def f(x, d):
        traces.append(x.shape)
        return x.sum() + d["a"]

    assert float(f(jnp.ones((3, 2)), {"a": jnp.int32(1)})) == 7.0
    assert float(f(np.ones((3, 2), np.float32), {"a": 2})) == 8.0
    assert len(traces) == 1
    for wrong in (
        (jnp.ones((3, 3)), {"a": jnp.int32(1)}),
        (jnp.ones((3, 2), jnp.int32), {"a": jnp.int32(1)}),
        (jnp.ones((3, 2)), {"b": jnp.int32(1)}),
        (jnp.ones((3, 2)),),
        (jnp.ones((3, 2)), {"a": jnp.int32(1)}, 3),
    ):
        with pytest.raises(TypeError, match="Binding inputs to tf.function failed due to `"):
            f(*wrong)
    with pytest.raises(TypeError, match=r"a list or tuple with a spec for each argument, got TensorSpec\(.*\[spec\]"):
        rx.function(f, input_signature=rx.TensorSpec([None, 2], np.float32))


def test_a_per_replica_spec_as_input_signature():
    """Fact 36."""
    strategy = mirrored(2)
    distributed = strategy.experimental_distribute_dataset(dataset())
    iterator = iter(distributed)
    spec = iterator.element_spec
    assert type(spec).__name__ == "PerReplicaSpec"
    f = rx.function(lambda x: strategy.reduce(SUM, x, axis=0), input_signature=[spec])
    first = next(iterator)
    for concrete in (f.get_concrete_function(), f.get_concrete_function(spec), f.get_concrete_function(first)):
        assert float(concrete(first)) == 6.0
        with pytest.raises(InvalidArgumentError, match="does not fit"):
            concrete(jnp.ones(2))
    with pytest.raises(AttributeError, match="takes PerReplica values"):
        concrete.structured_outputs  # noqa: B018  of no known strategy
    assert [float(f(x)) for x in iterator] == [22.0, 38.0, 54.0]
    for wrong in (jnp.ones(2), per_replica(strategy, [[1], [2]])):
        with pytest.raises(TypeError, match="Binding inputs to tf.function failed due to `"):
            f(wrong)


def test_the_warning_about_retracing_names_the_cause():
    f = rx.function(lambda x, k: x * k)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(8):
            f(jnp.float32(1), k)
    messages = [str(w.message) for w in caught]
    assert len(messages) == 1 and "triggered retracing" in messages[0]
    assert "argument 1" in messages[0] and "changed from 3 to 4" in messages[0]
    assert caught[0].filename == __file__

    g = rx.function(lambda x: x.sum())
    with pytest.warns(
        UserWarning, match=r"argument 0.*array of shape \(5,\).* to an array of shape \(6,\)|\(4,\).*\(5,\)"
    ):
        for k in range(2, 10):
            g(jnp.ones(k))


def test_the_warning_about_retracing_counts_calls_that_traced():
    """As in TensorFlow, what is traced without a call, as for `get_concrete_function`, does not count."""

    def messages_of(*steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in steps:
                step()
        return [str(w.message).partition(" calls")[0] for w in caught]

    f = rx.function(lambda x: x.sum())
    spec = lambda n: lambda: f.get_concrete_function(rx.TensorSpec([n]))  # noqa: E731
    called = lambda n: lambda: f(jnp.ones(n))  # noqa: E731
    assert messages_of(*map(spec, range(1, 9)), *map(called, (1, 2))) == []
    assert messages_of(*map(called, range(9, 14))) == ["5 out of the last 7"]

    made = []

    @rx.function
    def makes_variables(x):  # is traced twice in its first call
        made.append(made[0] if made else rx.Variable(0.0))
        return made[0] + x

    assert messages_of(*(lambda n=n: makes_variables(jnp.ones(n)) for n in range(1, 6))) == ["5 out of the last 5"]

    of_elements = lambda n: lambda: several(iter(rx.data.Dataset.range(2).map(lambda x: jnp.ones(n))))  # noqa: E731
    several = rx.function(lambda iterator: next(iterator).sum(), steps_per_call=2)
    assert messages_of(*map(of_elements, range(1, 6))) == ["5 out of the last 5"]


def test_the_cause_of_retracing_is_told_of_values_made_of_components():
    f = rx.function(lambda value: value)
    for count in (1, 2):
        with pytest.warns(UserWarning, match=r"argument 0 changed from a PerReplica value of shapes \(\d+,\)"):
            for n in range(1, 6):
                f(rx.PerReplica([jnp.ones(n + 10 * count)] * count))


def test_variables_made_for_concrete_functions_in_two_threads_leave_functions_compiled():
    first_begins, second_begins, first_ends = threading.Event(), threading.Event(), threading.Event()
    variables = {}

    def function_of(name, meet):
        @rx.function
        def function(x):
            if name not in variables:
                variables[name] = rx.Variable(1.0)
                meet()
            return variables[name] + x

        return function

    def in_the_first():
        first_begins.set()
        assert second_begins.wait(60)

    def in_the_second():
        second_begins.set()
        assert first_ends.wait(60)

    def make_first():
        function_of("first", in_the_first).get_concrete_function(rx.TensorSpec([]))
        first_ends.set()

    def make_second():
        assert first_begins.wait(60)
        function_of("second", in_the_second).get_concrete_function(rx.TensorSpec([]))

    threads = [threading.Thread(target=make) for make in (make_first, make_second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(variables) == 2 and not rx.config.functions_run_eagerly()


@over()
def test_a_dataset_may_be_passed_to_a_replica_function_that_the_host_drives(make, n):
    strategy = make()
    distributed = strategy.experimental_distribute_dataset(dataset())

    @rx.function
    def epoch(replica_step):
        for x in distributed:
            last = strategy.run(replica_step, args=(x, distributed))
        return strategy.reduce(SUM, last, axis=None)

    assert float(epoch(lambda x, data: x.sum() if data is distributed else 0.0)) == 54.0
    with pytest.raises(RuntimeError, match="A loop over a dataset cannot be part of a compiled program"):
        epoch(lambda x, data: sum(y.sum() for y in data))


def test_no_warning_where_tracing_pays():
    f = rx.function(lambda x, k: x * k)  # warnings are errors here
    for k in range(6):
        for _ in range(5):
            f(jnp.float32(1), k)
    assert f.experimental_get_tracing_count() == 6


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_the_replica_function_is_traced_once_whatever_the_number_of_replicas(n):
    strategy, calls = mirrored(n), []
    v = made(strategy, aggregation=A.SUM)

    def replica(x):
        calls.append(1)
        g = jax.grad(lambda w: (w * x) ** 2)(v.value())
        v.assign_add(ctx().all_reduce("MEAN", g) + 0 * x)
        return v + x

    step = rx.function(lambda x: strategy.run(replica, args=(x,)))
    for _ in range(3):
        step(per_replica(strategy, [1.0] * n))
    assert len(calls) == 1 and step.experimental_get_tracing_count() == 1


# Variables made in it.


@over(copies=True)
def test_variables_are_made_on_the_first_call_only(make, n):
    """Fact 167."""
    strategy, variables = make(), []

    @rx.function
    def f():
        if not variables:
            variables.append(rx.Variable(1.0, aggregation=A.SUM))
        return variables[0].assign_add(1.0)

    with strategy.scope():
        for k in range(3):
            f()
            assert parts(strategy, variables[0]) == [2.0 + k] * n
    assert type(variables[0]).__name__ == "MirroredVariable"


@over(at_least=2, copies=True)
def test_variables_are_made_in_replicas_on_the_first_call(make, n):
    """Facts 24, 167."""
    strategy, variables = make(), {}

    @rx.function
    def f():
        def replica():
            if "v" not in variables:
                variables["v"] = rx.Variable(5.0, aggregation=A.MEAN)
            variables["v"].assign_add(replica_id() * 2)
            return variables["v"].read_value() * 1.0

        return strategy.run(replica)

    for k in (1, 2, 3):
        result = f()
        assert parts(strategy, result) == [5.0 + k * (n - 1)] * n == parts(strategy, variables["v"])


@over()
def test_making_a_variable_on_every_call_is_refused(make, n):
    """Fact 24."""
    strategy = make()
    message = "tf.function only supports singleton tf.Variables created on the first call"
    for program in (lambda: rx.Variable(1.0) + 1.0, lambda: strategy.run(lambda: rx.Variable(1.0) + 1.0)):
        f = rx.function(program)
        with pytest.raises(ValueError, match=message):
            f()
    assert not rx.has_strategy()


# Iterators.


@pytest.mark.across_processes
@over()
def test_next_of_an_iterator_is_pulled_by_each_call(make, n):
    strategy, traces = make(), []
    iterator = iter(strategy.experimental_distribute_dataset(dataset()))

    @rx.function
    def step():
        traces.append(1)
        return strategy.reduce(SUM, strategy.run(lambda x: x.sum(), args=(next(iterator),)), axis=None)

    assert [float(step()) for _ in range(4)] == [6.0, 22.0, 38.0, 54.0]
    assert len(traces) == 1
    for _ in range(2):
        with pytest.raises(rx.OutOfRangeError):
            step()


@over(at_least=2, logical=False)
def test_an_iterator_as_an_argument(make, n):
    """Fact 166."""
    strategy = make()
    v = made(strategy, 0.0, aggregation=A.SUM)
    distributed = strategy.experimental_distribute_dataset(dataset(2, 16))

    @rx.function
    def steps(iterator, count):
        for _ in range(count):
            strategy.run(lambda x: v.assign_add(x.sum()), args=(next(iterator),))

    iterator = iter(distributed)
    steps(iterator, 2)
    assert float(v) == 6.0
    steps(iterator, 2)
    assert float(v) == 28.0
    with pytest.raises(rx.OutOfRangeError):  # the data end in the middle: the updates made until then stay
        steps(iterator, 9)
    assert float(v) == 120.0
    v.assign(0.0)
    steps(iter(distributed), 2)  # another iterator over the same
    assert float(v) == 6.0


def test_an_iterator_of_a_dataset_that_is_not_distributed():
    """Each call takes the next element, also of another iterator; what makes an iterator itself starts anew."""
    numbers = rx.data.Dataset.range(5)
    step = rx.function(lambda iterator: next(iterator) + next(iterator))
    first, second = iter(numbers), iter(numbers)
    assert [int(step(x)) for x in (first, first, second)] == [1, 5, 1]
    assert step.experimental_get_tracing_count() == 1
    with pytest.raises(rx.OutOfRangeError):
        step(first)

    own = rx.function(lambda: next(iter(numbers)) + sum(numbers))
    assert [int(own()) for _ in range(2)] == [10, 10]

    function, short = rx.function(lambda iterator: next(iterator, -1)), numbers.take(1)
    last, more = iter(short), iter(short)
    assert [int(function(x)) for x in (last, last, last, more)] == [0, -1, -1, 0]

    strategy = mirrored(2)
    for code in (lambda: next(second), lambda: sum(numbers)):
        with pytest.raises(RuntimeError, match="stands inside of a"):
            rx.function(lambda code=code: strategy.run(code))()


def test_an_iterator_of_python_is_a_constant_and_warns(recwarn):
    step = rx.function(lambda iterator, scale: next(iterator) * scale)
    iterator = iter([1.0, 2.0])
    assert [float(step(iterator, jnp.float32(scale))) for scale in (1, 2)] == [1.0, 2.0]
    assert [
        ("is given a Python iterator, an object of type list_iterator" in str(w.message), w.filename) for w in recwarn
    ] == [(True, __file__)]


@pytest.mark.across_processes
@over(at_least=2, copies=True, logical=False)
def test_an_uneven_last_element(make, n):
    strategy = make()
    v = made(strategy, 0.0, aggregation=A.SUM)
    batches = dataset(n, 2 * n + 1)  # the last has one element: one replica has it, the others nothing
    iterator = iter(strategy.experimental_distribute_dataset(batches))

    @rx.function
    def step():
        x = next(iterator)
        strategy.run(lambda x: v.assign_add(x.sum()), args=(x,))
        return strategy.reduce("MEAN", x, axis=0)

    means = [float(step()) for _ in range(3)]
    assert means == [float(np.mean(b)) for b in batches] and float(v) == sum(range(2 * n + 1))
    with pytest.raises(rx.OutOfRangeError):
        step()


@over()
def test_a_loop_over_a_dataset_is_driven_from_the_host(make, n):
    """Fact 164."""
    strategy, traces = make(), []
    v = made(strategy, 0.0, aggregation=A.SUM)

    @rx.function
    def epoch(d):
        total = 0.0
        for x in d:

            def replica(x):
                traces.append(1)
                v.assign_add(x.sum())
                return x.sum()

            total += strategy.reduce(SUM, strategy.run(replica, args=(x,)), axis=None)
        return total

    distributed = strategy.experimental_distribute_dataset(dataset())
    for k in (1, 2):
        assert float(epoch(distributed)) == 120.0 and float(v) == 120.0 * k
    assert len(traces) == 1


@pytest.mark.across_processes
@over(at_least=2, copies=True, logical=False)
def test_a_loop_over_a_dataset_with_an_uneven_end_and_no_data(make, n):
    strategy = make()

    @rx.function
    def count(d):
        total = 0
        for x in d:
            total += strategy.reduce(SUM, strategy.run(lambda x: jnp.ones_like(x).sum(), args=(x,)), axis=None)
        return total

    assert float(count(strategy.experimental_distribute_dataset(dataset(4, 13)))) == 13
    assert float(count(strategy.experimental_distribute_dataset(dataset(4, 3)))) == 3


def test_a_captured_dataset_is_looped_over():
    strategy = mirrored(2)
    distributed = strategy.experimental_distribute_dataset(dataset())

    @rx.function
    def epoch(scale):
        total = jnp.zeros(())
        for x in distributed:
            total += strategy.reduce(SUM, x, axis=0)
        return total * scale

    assert float(epoch(2.0)) == 240.0 and float(epoch(1.0)) == 120.0


# Nesting, methods, and other ways to call.


@over()
def test_nested_functions_are_part_of_the_outer_one(make, n):
    strategy, traces = make(), []
    v = made(strategy, aggregation=A.SUM)

    @rx.function
    def inner(x):
        traces.append("inner")
        v.assign_add(x)
        return ctx().all_reduce(SUM, x)

    @rx.function
    def outer(x):
        traces.append("outer")
        return strategy.run(lambda a: inner(a * 1.0) + inner(a * 2.0), args=(x,))

    for _ in range(2):
        v.assign(0.0)
        result = outer(per_replica(strategy, [r + 1.0 for r in range(n)]))
        total = n * (n + 1) / 2
        assert parts(strategy, result) == [3 * total] * n and float(v) == 3 * total
    assert traces.count("outer") == 1 and traces.count("inner") <= 2


@over(at_least=2, copies=True)
def test_a_function_with_a_meeting_point_inside_of_an_eager_replica_is_refused(make, n):
    """Fact 25."""
    f = rx.function(lambda: ctx().all_reduce(SUM, replica_id()))
    with pytest.raises(RuntimeError, match="`merge_call` called while defining a new graph or a tf.function"):
        make().run(lambda: f())
    assert parts(make(), make().run(f)) == [n * (n - 1) / 2] * n


@over(at_least=2, copies=True)
def test_a_function_without_meeting_points_inside_of_an_eager_replica(make, n):
    strategy = make()
    v = made(strategy, 0.0, copies_may_differ=True)
    f = rx.function(lambda x: v.assign_add(x) * 2.0)
    for k in (1, 2):
        result = strategy.run(lambda: f(replica_id() + 1))
        assert parts(strategy, v) == [k * (r + 1.0) for r in range(n)]
        assert parts(strategy, result) == [2 * k * (r + 1.0) for r in range(n)]


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_jitted_code_in_a_function_is_retraced_after_an_assignment(wrap):
    """JAX keeps what it traced of `times`, in which the variable's value and what tapes follow are constants."""
    v = rx.Variable([1.0, 2.0])
    times = wrap(lambda x: x * v)

    @rx.function
    def f(x):
        first = times(x)
        v.assign_add([4.0, 4.0])
        gradients = []
        for _ in range(2):
            with rx.GradientTape() as tape:
                y = times(x) + times(x)
            gradients.append(tape.gradient(y, v))
        return first, y, *gradients

    for offset in (0.0, 4.0):
        assert [x.tolist() for x in f(jnp.ones(2))] == [
            [1.0 + offset, 2.0 + offset],
            [10.0 + 2 * offset, 12.0 + 2 * offset],
            [2.0, 2.0],
            [2.0, 2.0],
        ]
    assert f.experimental_get_tracing_count() == 1


def test_methods_have_a_cache_for_each_instance():
    traces = []

    class Model:
        def __init__(self, scale):
            self.w = rx.Variable(scale)

        @rx.function
        def step(self, x, k=1):
            traces.append(1)
            self.w.assign_add(1.0)
            return self.w * x * k

        @rx.function(input_signature=[rx.TensorSpec([], np.float32)])
        def signed(self, x):
            return self.w + x

    a, b = Model(1.0), Model(10.0)
    assert float(a.step(jnp.float32(1))) == 2.0 and float(b.step(jnp.float32(1))) == 11.0
    assert float(a.step(jnp.float32(2), k=1)) == 6.0 and float(b.step(jnp.float32(2))) == 24.0
    assert len(traces) <= 4 and float(a.signed(jnp.float32(1))) == 4.0 and float(b.signed(1)) == 13.0
    assert a.step is a.step and a.step == a.step and a.step != b.step and {a.step: 1}[a.step] == 1
    dead = weakref.ref(a)
    del a
    gc.collect()
    assert dead() is None


def test_a_function_has_the_attributes_of_the_wrapped_function():
    def g(x):
        return x

    class Scale:
        def __init__(self):
            self.w = 5

        def __call__(self, x):
            return x * self.w

    class Model:
        @rx.function
        def f(self, x):
            return x

    g.tag, scale, model = 1, Scale(), Model()
    f, scaled = rx.function(g), rx.function(scale)
    assert (f.tag, scaled.w, float(scaled(jnp.float32(2)))) == (1, 5, 10.0)
    f.tag = f.new = 3  # of the compiled function alone
    assert (f.tag, f.new, g.tag, hasattr(g, "new")) == (3, 3, 1, False)
    with pytest.raises(AttributeError):
        _ = f.absent
    g.lower = 7  # not in place of its own
    assert rx.function(g).lower(jnp.ones(2)) is not None
    assert isinstance(model.f, type(f)) and isinstance(Model.f, type(f)) and model.f is model.f
    assert Model().f != model.f and float(Model().f(jnp.float32(2))) == 2.0
    model.f.tag = 4
    assert model.f.tag == 4 and model.f(jnp.ones(2)).tolist() == model.f(jnp.ones(2)).tolist() == [1.0, 1.0]
    assert model.f.experimental_get_tracing_count() == 1 and f.input_signature is None
    assert rx.function(g, input_signature=[rx.TensorSpec([])]).input_signature == (rx.TensorSpec([]),)


def test_a_function_keeps_name_and_docstring():
    @rx.function
    def named(x):
        """Doc."""
        return x

    assert named.__name__ == "named" and named.__doc__ == "Doc." and float(named.python_function(2.0)) == 2.0
    assert "named" in named.lower(jnp.ones(2)).as_text()
    assert isinstance(named, rx.Function)
    assert float(rx.function(functools.partial(lambda a, b: a - b, jnp.float32(5)))(jnp.float32(2))) == 3.0


def test_run_functions_eagerly():
    seen = []

    @rx.function
    def f(x):
        seen.append(isinstance(x, jax.core.Tracer))
        return x + 1

    try:
        rx.config.run_functions_eagerly(True)
        f(jnp.float32(1))
    finally:
        rx.config.run_functions_eagerly(False)
    f(jnp.float32(1))
    assert seen == [False, True]


def test_under_a_gradient():
    v = rx.Variable(3.0)
    f = rx.function(lambda x: v * x * x)
    assert float(jax.grad(lambda x: f(x))(jnp.float32(2))) == 12.0
    with rx.GradientTape() as tape:
        x = jnp.float32(2)
        tape.watch(x)
        y = f(x)
    assert [float(g) for g in tape.gradient(y, [x, v])] == [12.0, 4.0]


@over(copies=True)
def test_a_step_that_computes_its_gradients_inside(make, n):
    """Facts 68, 164."""
    strategy = make()
    w = made(strategy, [[1.0], [1.0]])
    x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [0.0, 1.0]], np.float32)
    y = np.array([[1.0], [2.0], [3.0], [0.0]], np.float32)

    def replica(inputs):
        a, b = inputs
        with rx.GradientTape() as tape:
            loss = jnp.sum((a @ w.value() - b) ** 2) / 4.0
        w.assign_sub(0.01 * ctx().all_reduce(SUM, tape.gradient(loss, w)))
        return loss

    step = rx.function(lambda inputs: strategy.reduce(SUM, strategy.run(replica, args=(inputs,)), axis=None))
    single = np.ones((2, 1))
    for batch in strategy.experimental_distribute_dataset([(x, y)] * 3):
        residual = x @ single - y
        np.testing.assert_allclose(step(batch), (residual**2).sum() / 4, rtol=1e-5)
        single = single - 0.01 * 2 * (x.T @ residual) / 4
        np.testing.assert_allclose(w.numpy(), single, rtol=1e-5)
    assert len({str(p) for p in parts(strategy, w)}) == 1


# Errors leave things usable.


@over(copies=True)
def test_an_exception_while_tracing_leaves_things_usable(make, n):
    strategy = make()
    v = made(strategy, aggregation=A.SUM)
    fail = [True]

    @rx.function
    def step():
        def replica():
            v.assign_add(replica_id() + 1)
            if fail[0]:
                raise KeyError("while tracing")
            return v + 0.0

        return strategy.run(replica)

    for _ in range(2):
        with pytest.raises(KeyError, match="while tracing"):
            step()
        assert parts(strategy, v) == [1.0] * n and not rx.has_strategy()
    fail[0] = False
    total = n * (n + 1) / 2
    for k in (1, 2):
        assert parts(strategy, step()) == [1.0 + k * total] * n
    strategy.run(lambda: v.assign_add(replica_id() + 1))
    assert float(v) == 1.0 + 3 * total


def test_an_iterator_that_fails_leaves_things_usable():
    strategy = mirrored(2)
    v = made(strategy, 0.0, aggregation=A.SUM)

    def source():
        yield np.ones(2, np.float32)
        yield np.ones(2, np.float32)
        raise OSError("disk")

    class Source:
        def __iter__(self):
            return source()

    iterator = iter(strategy.experimental_distribute_dataset(Source()))
    step = rx.function(lambda: strategy.run(lambda x: v.assign_add(x.sum()), args=(next(iterator),)))
    step()
    step()
    with pytest.raises(OSError, match="disk"):
        step()
    assert float(v) == 4.0
    v.assign(1.0)
    assert float(rx.function(lambda: v + 1)()) == 2.0


def test_wrong_calls():
    f = rx.function(lambda x: x)
    with pytest.raises(TypeError):
        f()
    with pytest.raises(TypeError):
        f(1, 2)
    assert float(f(jnp.float32(3))) == 3.0


def test_concrete_functions_keep_arguments_that_are_not_tensors():
    w = rx.Variable(2.0)

    class Model:
        @rx.function
        def scaled(self, x, n, by=w):
            return x * by * n

    made = Model().scaled.get_concrete_function(rx.TensorSpec([None]), 3)
    assert made(jnp.ones(2), w).tolist() == [6.0, 6.0] and made(x=jnp.ones(1), by=w, n=3).tolist() == [6.0]
    w.assign(1.0)
    assert made(jnp.ones(3), w).tolist() == [3.0] * 3
    assert [getattr(part, "name", part) for part in made.structured_input_signature[0]] == ["x", 3, "by"]
    with pytest.raises(InvalidArgumentError, match="'x'"):
        made(jnp.ones((1, 2)), w)
    for wrong in (lambda: made(), lambda: made(jnp.ones(1), w, 4), lambda: made(jnp.ones(1), w, n=4)):
        with pytest.raises(TypeError, match="scaled"):
            wrong()
    with pytest.raises(AttributeError, match="no graphs"):
        made.graph  # noqa: B018
    declared = rx.function(lambda x: x * 2, input_signature=[rx.TensorSpec([None])])
    assert declared.get_concrete_function()(jnp.ones(1)).tolist() == [2.0]
    assert declared.pretty_printed_concrete_signatures().count("float32[1]") == 1


def test_a_concrete_function_is_traced_when_it_is_asked_for():
    """Also one that makes variables: what it assigns then is taken back."""
    calls, total = [], made(mirrored(2), 5.0, aggregation=A.SUM)

    class Model:
        w = None

        @rx.function
        def f(self, x, k=2):
            calls.append(x.shape)
            if self.w is None:
                self.w = rx.Variable(3.0)
            total.assign_add(jnp.sum(x))
            rx.function(lambda: self.w.assign_add(1.0))()
            return x * self.w * k

    model = Model()
    concrete = model.f.get_concrete_function(rx.TensorSpec([2]))
    assert float(model.w) == 3.0 and float(total) == 5.0  # made, and nothing was run
    before = len(calls)
    assert concrete(jnp.ones(2)).tolist() == [8.0, 8.0] and len(calls) == before
    assert float(model.w) == 4.0 and float(total) == 7.0
    assert set(map(id, concrete.variables)) == {id(total), id(model.w)} and len(concrete.inputs) == 3
    assert list(map(id, concrete.trainable_variables)) == list(map(id, concrete.captured_inputs))

    iterator, kept = iter(rx.data.Dataset.range(3)), []

    @rx.function
    def reads(x):
        element = next(iterator)
        if not kept:
            kept.append(rx.Variable(1.0))
        return x + element

    pulls = reads.get_concrete_function(rx.TensorSpec([], jnp.int32))
    assert [int(pulls(jnp.int32(0))) for _ in range(3)] == [0, 1, 2]  # none was lost

    @rx.function
    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails.get_concrete_function(rx.TensorSpec([None]))
    calls.clear()
    traced = rx.function(lambda x: calls.append(1) or x)
    traced.get_concrete_function(rx.TensorSpec([2]))
    traced(jnp.ones(2)), traced.get_concrete_function(jnp.ones(2))(jnp.zeros(2))
    assert calls == [1]


def test_a_concrete_function_takes_what_the_function_takes():
    spec, one = rx.TensorSpec([2]), jnp.ones(2)
    some = rx.function(lambda *a, b=1, **k: a[0] + sum(a[1:]) * b + k.get("c", 0))
    for given, named, calls in [
        ((rx.TensorSpec([None]),), {}, [((one,), {})]),
        ((spec, spec), {}, [((one, one), {}), ((one,), {"a_1": one})]),
        ((spec, spec), {"b": 3}, [((one, one), {}), ((one, one), {"b": 3})]),
        ((spec, rx.TensorSpec([2], name="y")), {"c": spec}, [((one, one, one), {}), ((one,), {"y": one, "c": one})]),
    ]:
        concrete = some.get_concrete_function(*given, **named)
        expected = 1.0 + (len(given) - 1) * named.get("b", 1) + ("c" in named)
        for args, kwargs in calls:
            assert concrete(*args, **kwargs).tolist() == [expected, expected]
    by_position, by_name = concrete.structured_input_signature
    assert [x.name for x in by_position] == ["a_0", "y"] and by_name["c"].name == "c" and by_name["b"] == 1
    nested = rx.function(lambda d, more: d["a"] * d["n"] + more[0]).get_concrete_function({"a": spec, "n": 3}, [spec])
    assert nested({"a": one, "n": 3}, [one]).tolist() == [4.0, 4.0]
    for wrong, error in [
        (({"a": jnp.ones(3), "n": 3}, [one]), InvalidArgumentError),
        (({"a": jnp.ones(2, jnp.int32), "n": 3}, [one]), InvalidArgumentError),
        (({"b": one, "n": 3}, [one]), TypeError),
        (({"a": one, "n": 4}, [one]), TypeError),
        (({"a": one, "n": 3},), TypeError),
        (({"a": one, "n": 3}, [one], one), TypeError),
    ]:
        with pytest.raises(error):
            nested(*wrong)
    declared = rx.function(lambda x: x, input_signature=[rx.TensorSpec([None, 3])])
    assert declared.get_concrete_function(rx.TensorSpec([2, 3])).inputs[0].shape == (None, 3)
    with pytest.raises(TypeError, match="Binding inputs"):
        declared.get_concrete_function(rx.TensorSpec([2, 4]))


def test_a_concrete_function_knows_what_it_returns():
    strategy = mirrored(2)

    def f(x, n):
        rows = jnp.concatenate([x, x], 0)
        return {"rows": rows[1:], "part": (jnp.sum(x), n, None)}, strategy.run(lambda: x[:, 0] * replica_id())

    concrete = rx.function(f).get_concrete_function(rx.TensorSpec([None, 3]), 4)
    found, parts_of = concrete.structured_outputs
    assert found["rows"] == rx.TensorSpec([None, 3]) and found["part"][2] is None
    assert [spec.shape for spec in parts_of.value_specs] == [(None,), (None,)]
    shapes, dtypes = concrete.output_shapes[0], concrete.output_dtypes[0]
    assert (
        shapes["rows"] == (None, 3)
        and shapes["part"][:2] == ((), ())
        and dtypes["part"] == (np.float32, np.int32, None)
    )
    fixed = rx.function(lambda x: (x, x.sum())).get_concrete_function(rx.TensorSpec([2, 3], jnp.int32))
    assert [(spec.shape, spec.dtype) for spec in fixed.outputs] == [((2, 3), np.int32), ((), np.int32)]
    # Rows so short are refused by the function itself.
    long = rx.function(lambda x: jnp.ones([x.shape[0] - 9])).get_concrete_function(rx.TensorSpec([None]))
    assert long.output_shapes == (None,)
    unknown = rx.function(lambda x: x + 1).get_concrete_function(rx.TensorSpec(None))
    assert unknown(jnp.ones((1, 1))).tolist() == [[2.0]] and not hasattr(unknown, "outputs")
    with pytest.raises(AttributeError, match="without a rank"):
        unknown.output_shapes  # noqa: B018


def test_lower_shows_the_program_and_runs_nothing():
    strategy = mirrored(2)
    v = made(strategy, aggregation=A.SUM)
    step = rx.function(lambda x: strategy.run(lambda a: v.assign_add(a), args=(x,)))
    x = per_replica(strategy, [1.0, 2.0])
    text = step.lower(x).compile().as_text()
    assert text.startswith("HloModule") and "all-reduce" in text and float(v) == 1.0
    step(x)
    assert float(v) == 4.0 and step.experimental_get_tracing_count() == 1


def test_one_device_functions_run_on_their_device():
    """Fact 115."""
    one = one_device()
    x = rx.function(lambda: one.run(lambda: jnp.ones(3) * 2))()
    assert x.devices() == mirrored(2).run(lambda: jnp.ones(2) + 1).values[1].devices()


@pytest.mark.parametrize("make", [one_device, rx.get_strategy], ids=["one device", "default"])
def test_run_in_a_host_loop_is_compiled_on_one_replica_too(make):
    strategy, traces = make(), []
    with strategy.scope():
        total = rx.Variable(0.0)

    def replica(x):
        traces.append(x.dtype)
        if x.dtype != np.dtype(object):
            total.assign_add(x.sum())
        return x

    @rx.function
    def epoch(dataset):
        for x in dataset:
            x = strategy.run(replica, args=(x,))
        return x

    data = rx.data.Dataset.range(12).map(float).batch(3)
    last = epoch(strategy.experimental_distribute_dataset(data))
    assert last.tolist() == [9.0, 10.0, 11.0] and float(total) == 66.0 and len(traces) == 1
    if strategy is one_device():
        assert last.devices() == total.value().devices() == {jax.devices()[1]}
    words = rx.data.Dataset.from_tensor_slices(np.array([b"one", b"two"], object)).batch(1)
    assert epoch(strategy.experimental_distribute_dataset(words)).tolist() == [b"two"]


# Threads.


def in_threads(call, count):
    """What `call(i)` returns or raises in so many threads, which begin at once."""
    begin, results = threading.Barrier(count), [None] * count

    def body(i):
        begin.wait()
        try:
            results[i] = call(i)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread waits for ever"
    return results


@pytest.mark.parametrize("signature", [None, [rx.TensorSpec([], jnp.float32)]])
def test_threads_that_call_a_function_first_trace_it_once(signature):
    made, entered, another = [], [], threading.Event()

    @functools.partial(rx.function, input_signature=signature)
    def step(x):
        if not made:
            entered.append(threading.get_ident())
            if len(set(entered)) > 1:
                another.set()
            another.wait(0.3)  # in which another thread would come in
            made.append(rx.Variable(1.0))
        return made[0] + x

    class Model:
        traces = 0

        @rx.function
        def method(self, x):
            Model.traces += 1
            return x * 2

    assert in_threads(lambda i: float(step(jnp.float32(i))), 8) == [1.0 + i for i in range(8)]
    assert len(made) == 1 and step.experimental_get_tracing_count() <= 2  # with the variable, and then without
    model = Model()
    assert in_threads(lambda i: float(model.method(jnp.float32(i))), 8) == [2.0 * i for i in range(8)]
    assert Model.traces == 1


def test_functions_that_call_each_other_in_their_first_calls_from_two_threads_end():
    inside, variables = threading.Barrier(2), []

    def entered(n):
        if len(variables) < 2:  # the first call of each, which runs the Python code to make the variable
            variables.append(rx.Variable(0.0))
            inside.wait(30)

    @rx.function
    def one(n):
        entered(n)
        return other(n - 1) + 1 if n else jnp.float32(0)

    @rx.function
    def other(n):
        entered(n)
        return one(n - 1) + 1 if n else jnp.float32(0)

    assert [float(x) for x in in_threads(lambda i: (one, other)[i](4), 2)] == [4.0, 4.0]


@pytest.mark.parametrize("make", [one_device, functools.partial(mirrored, 2)], ids=["one device", "two replicas"])
def test_a_method_that_replicas_ran_keeps_no_instance_alive(make):
    class Model:
        @rx.function
        def step(self, x):
            return x + 1

    model = Model()
    known = weakref.ref(model)
    make().run(model.step, args=(jnp.ones(2),))
    del model
    gc.collect()
    assert known() is None
