"""AutoGraph: `if`, `while` and `for` on tensors in a `function`, compiled as a whole.

The expected numbers are worked out by hand beside each test. tests/tf/test_tf_autograph.py compares with TensorFlow.
"""

from __future__ import annotations

import functools
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import MEAN, SUM, mirrored

import replicax as rx
from replicax._autograph import operators
from replicax._base.thread_state import current
from replicax._tracing import autograph_switch

converted = functools.partial(rx.function, autograph=True)


def traces(f):
    return f.experimental_get_tracing_count()


# Branches.


def test_a_branch_is_part_of_the_program():
    @converted
    def f(x):
        if x > 2:
            y = x * 10
        elif x > 1:
            y = x * 100
        else:
            y = -x
        return y

    assert [float(f(jnp.float32(x))) for x in (3, 2, 1)] == [30, 200, -1]
    assert traces(f) == 1
    assert "conditional" in f.lower(jnp.float32(3)).compile().as_text()


def test_conditions_of_python_run_while_tracing():
    log = []

    @converted
    def f(x, double):
        if double:
            log.append("double")
            x = x * 2
        for name, k in zip("ab", [1, 2]):
            log.append(name)
            x = x + k
        while len(log) < 5:
            log.append("more")
        return x

    assert float(f(jnp.float32(1), True)) == 5 and log == ["double", "a", "b", "more", "more"]
    assert float(f(jnp.float32(2), True)) == 7 and len(log) == 5


def test_a_number_assigned_in_both_branches_stays_a_number():
    @converted
    def f(x):
        if x > 0:
            n, x = 2, x + 1
        else:
            n, x = 2, x - 1
        return jnp.zeros(n) + x

    assert f(jnp.float32(1)).tolist() == [2, 2]


def test_branches_may_return_structures_objects_and_numbers():
    marker = object()

    @converted
    def f(x):
        if x > 0:
            out = {"a": (x, 1), "b": [marker, "same", None]}
        else:
            out = {"a": (-x, 2), "b": [marker, "same", None]}
        assert out["b"][0] is marker
        return out["a"]

    assert [float(v) for v in f(jnp.float32(-3))] == [3, 2]


@pytest.mark.parametrize("x, expected", [(0.5, 5), (1.5, 15), (3.5, -3.5)])
def test_early_returns(x, expected):
    @converted
    def f(x):
        if x < 3:
            x = x * 10
            if x < 10:
                return x
            return x
        return -x

    assert float(f(jnp.float32(x))) == expected


def test_ternaries_and_logic():
    @converted
    def f(x, y):
        small = x < 1 and y < 1
        either = x < 1 or y < 1
        between = 0 < x < 2
        return (x if x > y else y), small, either, between, not small

    assert [v.item() for v in f(jnp.float32(0.5), jnp.float32(2))] == [2, False, True, True, True]
    assert [v.item() for v in f(jnp.float32(3), jnp.float32(2))] == [3, False, False, False, True]


# Loops.


def collatz(x):
    steps = 0
    while x != 1:
        if x % 2 == 0:
            x = x // 2
        else:
            x = 3 * x + 1
        steps += 1
    return steps


def test_a_while_loop():
    f = converted(collatz)
    assert [int(f(jnp.int32(x))) for x in (1, 6, 27)] == [collatz(x) for x in (1, 6, 27)] == [0, 8, 111]
    assert traces(f) == 1


@pytest.mark.parametrize("rows", [[1.0, -2.0, 3.0, 9.0, 4.0], [1.0, 2.0], [9.0]])
def test_a_for_loop_with_break_and_continue(rows):
    def plain(rows):
        total, seen = 0.0, 0
        for x in rows:
            if x < 0:
                continue
            if x > 5:
                break
            total += x
            seen += 1
        return total, seen

    assert [float(v) for v in converted(plain)(jnp.asarray(rows))] == list(plain(rows))


@pytest.mark.parametrize("limit", [0, 3, 7])
def test_a_range_of_a_tensor(limit):
    def plain(n):
        total = 0
        for i in range(n):
            for j in range(1, i):
                if j == 3:
                    break
                total += i * j
            if i == 4:
                continue
            total += 1
        return total

    f = converted(plain)
    assert int(f(jnp.int32(limit))) == plain(limit)


@pytest.mark.parametrize("wanted, expected", [(3.0, 1), (8.0, -1)])
def test_a_return_in_a_loop(wanted, expected):
    @converted
    def find(rows, wanted):
        for i in jnp.arange(3):
            if rows[i] == wanted:
                return i
        return -1

    @converted
    def find_unrolled(rows, wanted):
        for i in range(3):
            if rows[i] == wanted:
                return i
        return -1

    rows = jnp.asarray([2.0, 3.0, 5.0])
    assert int(find(rows, jnp.float32(wanted))) == int(find_unrolled(rows, jnp.float32(wanted))) == expected


def test_a_python_loop_may_become_a_loop_on_tensors():
    @converted
    def f(x):
        while True:
            x = x * 2
            if x > 10:
                break
        for _ in range(5):
            x = x - 3
            if x < 8:
                break
        return x

    assert float(f(jnp.float32(1))) == 7  # 2, 4, 8, 16; 13, 10, 7
    assert traces(f) == 1


def test_variables_first_assigned_in_a_loop_are_available_after_it():
    @converted
    def f(rows):
        last = None
        for x in rows:
            square = x * x
            last = square
        return square, last

    assert [float(v) for v in f(jnp.asarray([1.0, 3.0]))] == [9, 9]


def test_a_loop_is_traced_once_whatever_its_length():
    log = []

    @converted
    def f(rows):
        total = jnp.zeros(())
        for x in rows:
            log.append("body")
            total += x
        return total

    assert float(f(jnp.ones(1000))) == 1000 and log == ["body"]


def test_an_endless_python_loop_with_a_break_on_a_tensor_is_refused(monkeypatch):
    monkeypatch.setattr(operators, "_MOST_GUARDED", 5)

    @converted
    def f(x):
        for i in iter(int, 1):
            x = x + i
            if x > 3:
                break
        return x

    with pytest.raises(NotImplementedError, match="does not end within 5 iterations"):
        f(jnp.float32(1))


# Variables.


def test_variables_in_branches_and_loops():
    v, never = rx.Variable(1.0), rx.Variable(5.0)

    @converted
    def branch(x):
        if x > 0:
            v.assign_add(x)
        else:
            v.assign(v * never)
        return v * 2

    assert float(branch(jnp.float32(2))) == 6 and float(v) == 3
    assert float(branch(jnp.float32(-2))) == 30 and float(v) == 15

    @converted
    def loop(x):
        while v < 100:
            v.assign(v * x)
        for y in jnp.arange(3.0):
            if y > 0:
                v.assign_sub(y)
        return v.value()

    assert float(loop(jnp.float32(3))) == 132 and float(v) == 132  # 15 * 3 * 3 - 1 - 2
    assert float(never) == 5 and traces(loop) == 1


def test_a_variable_or_a_tensor():
    v = rx.Variable(4.0)

    @converted
    def f(x):
        y = v
        if x > 0:
            y = v * x
        return y + 0

    assert [float(f(jnp.float32(x))) for x in (2, -2)] == [8, 4]


class Counter:
    def __init__(self):
        self.v, self.calls = rx.Variable(0), 0

    @converted
    def up_to(self, n):
        self.calls += 1
        while self.v < n:
            self.increase()
        return self.v.value()

    def increase(self):
        if self.v == 2:
            self.v.assign_add(10)
        else:
            self.v.assign_add(1)


def test_methods_and_what_they_call():
    first, second = Counter(), Counter()
    assert [int(first.up_to(jnp.int32(n))) for n in (2, 5)] == [2, 12]
    assert int(second.up_to(jnp.int32(1))) == 1 and (first.calls, second.calls) == (1, 1)


def clipped(x, limit=1.0):
    if x > limit:
        return x * 0 + limit
    return x


class Callable:
    def __call__(self, x):
        return clipped(x) if x > 0 else -x


def test_all_kinds_of_callables_are_converted():
    @converted
    def f(x):
        def local(x):
            return clipped(x) + 1 if x > 0 else x

        return (
            functools.partial(clipped, limit=2.0)(x),
            (lambda x: x if x > 0 else -x)(x),
            Callable()(x),
            local(x),
            clipped(*[x], **{"limit": 3.0}),
        )

    assert [float(v) for v in f(jnp.float32(5))] == [2, 5, 1, 2, 3]
    assert [float(v) for v in f(jnp.float32(-5))] == [-5, 5, 5, -5, -5]
    assert float(converted(lambda x: x if x > 0 else -x)(jnp.float32(-2))) == 2


def test_super_and_closures():
    class Base:
        def scale(self, x):
            if x > 0:
                return x * 2
            return x

    class Derived(Base):
        def scale(self, x):
            return super().scale(x) + offset

    offset = 10.0
    f = converted(lambda x: Derived().scale(x))
    assert [float(f(jnp.float32(x))) for x in (1, -1)] == [12, 9]


# Replicas.


@pytest.mark.parametrize("n", [1, 2])
def test_replica_functions_are_converted(n):
    strategy = mirrored(n)
    with strategy.scope():
        total = rx.Variable(
            0.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation=rx.VariableAggregation.SUM
        )
        mean = rx.Variable(0.0, aggregation=rx.VariableAggregation.MEAN)
    traced = []

    def fn():
        traced.append(1)
        replica = rx.get_replica_context().replica_id_in_sync_group * 1.0
        total.assign_add(replica + 1)
        if replica > 0:
            total.assign_add(100)
        while total < 50:
            total.assign_add(10)
        mean.assign(total.value())
        return total.value()

    f = converted(lambda: strategy.run(fn))
    expected = [51, 102][:n]
    assert [float(x) for x in strategy.experimental_local_results(f())] == expected
    assert float(total.read_value()) == sum(expected) and float(mean) == sum(expected) / n
    assert len(traced) == 1


def test_meetings_in_branches():
    strategy = mirrored(2)

    def fn(x, common):
        if common > 0:
            x = rx.get_replica_context().all_reduce(SUM, x)
        return x

    f = converted(lambda x, common: strategy.run(fn, args=(x, common)))
    x = strategy.experimental_distribute_values_from_function(lambda c: jnp.float32(c.replica_id_in_sync_group + 1))
    for common, expected in ((1.0, [3, 3]), (-1.0, [1, 2])):
        result = f(x, jnp.float32(common))
        assert [float(part) for part in strategy.experimental_local_results(result)] == expected

    with pytest.raises(RuntimeError, match="whose condition may differ between replicas"):
        converted(lambda x: strategy.run(fn, args=(x, x)))(x)


def test_merge_functions_and_updates_are_converted():
    strategy = mirrored(2)
    with strategy.scope():
        v = rx.Variable(1.0)

    def update(component, x):
        if x > 2:
            component.assign_add(x)

    def merge(strategy, x):
        total = strategy.reduce(SUM, x, axis=None)
        strategy.extended.update(v, update, args=(total,))
        return total if total > 2 else -total

    def fn(x):
        return rx.get_replica_context().merge_call(merge, args=(x,))

    f = converted(lambda x: strategy.run(fn, args=(x,)))
    x = strategy.experimental_distribute_values_from_function(lambda c: jnp.float32(c.replica_id_in_sync_group + 1))
    assert float(strategy.reduce(MEAN, f(x), axis=None)) == 3 and float(v) == 4


def batches(strategy, count, batch=2):
    return strategy.experimental_distribute_dataset(rx.data.Dataset.range(count).batch(batch))


def sum_of(x):
    total = jnp.sum(x)
    if total > 2:
        total = total * 10
    return total


@pytest.mark.parametrize("n", [1, 2])
def test_several_steps_in_one_call(n):
    """`for _ in tf.range(steps)` with `next(iterator)` is one loop of the program."""
    strategy, traced = mirrored(n), []

    def step(x):
        traced.append(1)
        return sum_of(x)

    @converted
    def steps(iterator, count):
        total = 0
        for _ in jnp.arange(count):
            total += strategy.reduce(SUM, strategy.run(step, args=(next(iterator),)), axis=None)
        return total

    def expected(pairs):
        values = [[sum(pair)] if n == 1 else list(pair) for pair in pairs]
        return sum(v * 10 if v > 2 else v for pair in values for v in pair)

    iterator = iter(batches(strategy, 14))
    assert int(steps(iterator, 3)) == expected([(0, 1), (2, 3), (4, 5)])
    assert int(steps(iterator, 3)) == expected([(6, 7), (8, 9), (10, 11)])
    assert traces(steps) == len(traced) == 1
    # The data end in the middle: what was done until then stays done, as in TensorFlow.
    with pytest.raises(rx.OutOfRangeError):
        steps(iterator, 3)


@pytest.mark.parametrize("batch, last", [(4, 8 + 9), (3, 9)], ids=["a smaller batch", "an uneven batch"])
def test_several_steps_with_a_last_batch_of_another_size(batch, last):
    strategy, kinds = mirrored(2), []

    @converted
    def steps(iterator, count):
        total = 0
        for _ in jnp.arange(count):
            total = strategy.reduce(SUM, strategy.run(lambda x: jnp.sum(x), args=(next(iterator),)), axis=None)
            kinds.append(isinstance(total, jax.core.Tracer))
        return total

    iterator = iter(batches(strategy, 10, batch))
    assert int(steps(iterator, 1)) == sum(range(batch))
    for _ in range(10 // batch - 2):
        steps(iterator, 1)
    assert int(steps(iterator, 2)) == last and not kinds[-1]
    assert int(steps(iter(batches(strategy, 8, 4)), 2)) == 4 + 5 + 6 + 7 and kinds[-1]  # compiled again


def test_several_elements_in_each_iteration():
    strategy = mirrored(2)

    @converted
    def f(a, b):
        out = jnp.zeros((), jnp.int32)
        for i in jnp.arange(2):
            first, second, other = next(a), next(a), next(b)
            parts = strategy.run(lambda x, y, z: jnp.sum(x + 10 * y + 100 * z), args=(first, second, other))
            out = out * (1 - i) + (i + 1) * strategy.reduce(SUM, parts, axis=None)
        return out

    # The second iteration alone is kept, twice: 4 and 5, 6 and 7 of the first, and 2 and 3 of the other.
    assert int(f(iter(batches(strategy, 8)), iter(batches(strategy, 8)))) == 2 * (9 + 130 + 500)


def test_steps_of_a_number_that_the_program_knows_are_driven_from_the_host():
    strategy = mirrored(2)

    @converted
    def f(iterator, count):
        total = 0
        for _ in range(count):
            total += strategy.reduce(SUM, strategy.run(sum_of, args=(next(iterator),)), axis=None)
        return total

    assert int(f(iter(batches(strategy, 8)), jnp.int32(2))) == 0 + 1 + 2 + 30


def test_a_loop_over_a_distributed_dataset():
    strategy, kinds = mirrored(2), []

    @converted
    def epoch(dataset):
        total = 0
        for x in dataset:
            part = strategy.reduce(SUM, strategy.run(sum_of, args=(x,)), axis=None)
            kinds.append(isinstance(part, jax.core.Tracer))
            if part > 60:
                continue
            total += part
            if total > 50:
                break
        return total

    # 0 + 1, 2 + 30, 90 is left out, 9 as an uneven last batch
    assert int(epoch(batches(strategy, 5))) == 1 + 32 + 40
    assert int(epoch(batches(strategy, 8))) == 1 + 32
    assert not any(kinds)


def test_a_loop_over_a_dataset_restarts_it_in_each_call():
    source = [1, 2, 3]

    @converted
    def f():
        total = 0
        for x in rx.data.Dataset.from_generator(lambda: iter(source), output_signature=rx.TensorSpec((), np.int32)):
            if x == 2:
                continue
            total += int(x)
        return total

    first = f()
    source.append(10)
    assert (int(first), int(f())) == (4, 14)


# Gradients.


def test_a_tape_around_branches_and_loops():
    v = rx.Variable(3.0)

    @converted
    def f(x, rows):
        with rx.GradientTape(persistent=True) as tape:
            tape.watch(x)
            if x > 0:
                y = v * v * x
            else:
                y = v + 0
            z = y
            for row in rows:
                if row > 100:
                    break
                z = z * row * v
        return tape.gradient(y, [v, x]), tape.gradient(z, v)

    rows = jnp.asarray([2.0, 5.0, 200.0])
    (by_v, by_x), of_loop = f(jnp.float32(2), rows)
    assert (float(by_v), float(by_x), float(of_loop)) == (12, 9, 10 * 2 * 4 * 27)  # of 10 * x * v ** 4
    (by_v, by_x), of_loop = f(jnp.float32(-2), rows)
    assert (float(by_v), float(by_x), float(of_loop)) == (1, 0, 10 * 27)  # of 10 * v ** 3


def test_tapes_inside_of_loops_and_variables_written_under_tapes():
    v, w = rx.Variable(1.0), rx.Variable(0.0)

    @converted
    def f(rows):
        for row in rows:
            with rx.GradientTape() as tape:
                loss = (v * row - 1) ** 2
                w.assign_add(loss)
            v.assign_sub(0.1 * tape.gradient(loss, v))
        return v.value()

    expected, losses = 1.0, 0.0
    for row in (2.0, 3.0):
        losses += (expected * row - 1) ** 2
        expected -= 0.1 * 2 * row * (expected * row - 1)
    assert np.isclose(float(f(jnp.asarray([2.0, 3.0]))), expected) and np.isclose(float(w), losses)


@pytest.mark.parametrize("n", [0, 1, 7, 150])
def test_gradients_of_a_while_loop(n):
    """Of its 150 iterations every eighth is kept."""
    v = rx.Variable(1.1)

    def unrolled(x, v):
        y = x
        for i in range(n):
            y = y * v if i % 2 == 0 else y - x
        return y

    @converted
    def f(x, n):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y, i = x, 0
            while i < n:
                if i % 2 == 0:
                    y = y * v
                else:
                    y = y - x
                i += 1
        return tape.gradient(y, [x, v])

    assert np.allclose(f(jnp.float32(2), jnp.int32(n)), jax.grad(unrolled, (0, 1))(2.0, 1.1), rtol=1e-4)


def test_gradients_through_loops_in_loops_and_variables_written_in_them():
    v = rx.Variable(1.0)

    @converted
    def f(x, n):
        with rx.GradientTape() as tape:
            tape.watch(x)
            total = 0.0
            for _ in range(n):
                z = x
                while z < 10:
                    z = z * 2
                    v.assign(v * x)
                total += z * x
            total += v
        return tape.gradient(total, x)

    # z is 8 * x after three rounds. What is read of a variable does not depend on what was assigned to it.
    assert np.isclose(f(jnp.float32(1.5), jnp.int32(2)), 2 * 2 * 8 * 1.5)
    assert np.isclose(float(v), 1.5**6)


@pytest.mark.parametrize("limit", [3, jnp.int32(3)], ids=["a number", "a tensor"])
def test_each_read_of_a_variable_in_a_loop_counts(limit):
    """Unrolled by Python, as part of the program, and in branches in it: the gradient is the same."""
    v = rx.Variable(2.0)

    @converted
    def f(x, n):
        v.assign(2.0)
        with rx.GradientTape() as tape:
            tape.watch(x)
            total = v * 1.0
            for _ in range(n):
                v.assign(v * x)
                total += v * v
                if x > 0:
                    v.assign_add(1.0)
                    total += v
        return (v, total, *tape.gradient(total, [x, v]))

    # v is 6, 7, 21, 22, 66, 67 after its assignments; what is added has the slopes 2 * v and 1.
    expected = [67, 2 + 36 + 7 + 441 + 22 + 4356 + 67, 0, 1 + 12 + 1 + 42 + 1 + 132 + 1]
    results = f(jnp.float32(3), limit)
    assert [0 if x is None else float(x) for x in results] == expected


def test_gradients_of_a_loop_with_meetings():
    strategy = mirrored(2)

    def fn(x, n):
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(n):
                y = y * rx.get_replica_context().all_reduce(SUM, x)
        return tape.gradient(y, x)

    x = strategy.experimental_distribute_values_from_function(lambda c: jnp.float32(c.replica_id_in_sync_group + 1))
    f = converted(lambda x, n: strategy.run(fn, args=(x, n)))
    of_tensor, of_number = f(x, jnp.int32(2)), f(x, 2)
    # y is x * s ** 2 with s the sum of both: s ** 2 of its own, and 2 * x * s of both replicas through the sum.
    assert [float(g) for g in of_tensor.values] == [float(g) for g in of_number.values] == [9 + 6 + 12] * 2


def test_jax_grad_of_converted_code():
    @converted
    def f(x):
        def loss(x):
            if x > 1:
                return x * x
            return x

        return jax.grad(loss)(x)

    assert [float(f(jnp.float32(x))) for x in (3, -3)] == [6, 1]


# What cannot be.


def missing_in_a_branch(x):
    if x > 0:
        y = x
    return y


def none_in_a_branch(x):
    if x > 0:
        y = None
    else:
        y = x
    return y


def two_dtypes(x):
    if x > 0:
        y = 1
    else:
        y = 2.0
    return y


def two_shapes(x):
    if x > 0:
        y = jnp.zeros(2)
    else:
        y = jnp.zeros(3)
    return y


def two_structures(x):
    if x > 0:
        y = (x, x)
    else:
        y = [x]
    return y


def two_objects(x):
    if x > 0:
        y = "positive"
    else:
        y = "negative"
    return y


def returned_in_a_branch(x):
    if x > 0:
        return x


def vector_condition(x):
    if jnp.stack([x, x]) > 0:
        return x
    return -x


def loop_of_other_dtype(x):
    y = 0
    for _ in jnp.arange(3):
        y += x
    return y


def loop_of_other_shape(x):
    y = jnp.zeros(2)
    while x > 0:
        y = jnp.concatenate([y, y])
    return y


def loop_of_other_structure(x):
    y = (x,)
    while x > 0:
        y = (*y, x)
    return y


def undefined_before_a_loop(x):
    for i in range(x.astype(int)):
        y = y + i  # noqa: F821
    return y


def no_else_value(x):
    return 1 if x > 0 else 2.0


@pytest.mark.parametrize(
    "function, kind, line, message",
    [
        (missing_in_a_branch, ValueError, 1, "'y' must also be initialized in the else branch"),
        (none_in_a_branch, ValueError, 1, "'y' is None at the end of the main branch"),
        (two_dtypes, TypeError, 1, "'y' has dtype int32 in the main branch, but dtype float32 in the else branch"),
        (two_shapes, ValueError, 1, r"'y' has shape \(2,\) in the main branch, but shape \(3,\) in the else branch"),
        (two_structures, ValueError, 1, "'y' has one structure in the main branch and another in the else branch"),
        (two_objects, TypeError, 1, "'y' is 'positive' in the main branch, but 'negative' in the else branch"),
        (returned_in_a_branch, ValueError, 1, "the other branch must also have a return statement"),
        (vector_condition, ValueError, 1, r"condition of if statement expected to be a scalar, got .* shape \(2,\)"),
        (loop_of_other_dtype, TypeError, 2, "'y' has dtype int32 before the loop, but dtype float32 after one iter"),
        (loop_of_other_shape, ValueError, 2, r"'y' has shape \(2,\) before the loop, but shape \(4,\) after one iter"),
        (loop_of_other_structure, ValueError, 2, "'y' has one structure before the loop and another after one iter"),
        (undefined_before_a_loop, ValueError, 1, "'y' must be defined before the loop"),
        (no_else_value, TypeError, 1, "'x > 0' has dtype int32 in the main branch, but dtype float32 in the else"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_errors_name_the_variable_and_the_line(function, kind, line, message):
    with pytest.raises(kind) as caught:
        converted(function)(jnp.float32(1))
    place = f"{__file__}:{function.__code__.co_firstlineno + line}: "
    assert str(caught.value).startswith(place)
    caught.match(message)


def failing(x):
    if x > 0:
        x = helper_that_fails(x)
    return x


def helper_that_fails(x):
    raise KeyError("mine")


def test_errors_of_the_users_own_point_at_their_lines():
    with pytest.raises(KeyError) as caught:
        converted(failing)(jnp.float32(1))
    assert caught.value.args == ("mine",)
    assert [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(caught.tb)[1:]] == [
        (__file__, failing.__code__.co_firstlineno + 1, "failing"),
        (__file__, failing.__code__.co_firstlineno + 2, "failing"),
        (__file__, helper_that_fails.__code__.co_firstlineno + 1, "helper_that_fails"),
    ]


def test_nothing_is_changed_by_a_function_that_cannot_be_compiled():
    v = rx.Variable(1.0)

    @converted
    def f(x):
        v.assign(2.0)
        if x > 0:
            y = 1
        return y

    with pytest.raises(ValueError, match="'y' must also be initialized"):
        f(jnp.float32(1))
    assert float(v) == 1


def test_an_assertion_on_a_tensor():
    v = rx.Variable(0.0)

    @converted
    def f(x):
        v.assign_add(x)
        if x < 10:
            assert x > 0, "must be positive"
        return x

    assert float(f(jnp.float32(1))) == 1
    with pytest.raises(AssertionError, match=rf"{__file__}:\d+: must be positive"):
        f(jnp.float32(-1))
    assert float(v) == 1  # as before the call that failed
    assert float(f(jnp.float32(2))) == 2 and float(v) == 3


# What is left as it is.


@autograph_switch.do_not_convert
def left_alone(x):
    return current.autograph, x


def test_do_not_convert():
    f = converted(lambda x: left_alone(x)[1] * (2 if not left_alone(x)[0] else 3))
    assert float(f(jnp.float32(2))) == 4

    @converted
    @autograph_switch.do_not_convert
    def g(x):
        return x if x > 0 else -x

    with pytest.warns(UserWarning, match="g needs the value of a tensor at .*test_autograph.py:"):
        assert float(g(jnp.float32(-2))) == 2


def test_autograph_is_off_by_default():
    with pytest.raises(jax.errors.TracerBoolConversionError):
        rx.function(clipped)(jnp.float32(2))
    inner = rx.function(clipped)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        rx.function(lambda x: inner(x))(jnp.float32(2))


def test_code_without_source_runs_as_it_is():
    names = {}
    exec("def f(x):\n  return x + 1\ndef g(x):\n  return x if x > 0 else -x", names)
    assert float(converted(names["f"])(jnp.float32(1))) == 2
    with pytest.warns(UserWarning, match=r"AutoGraph could not convert g \(.*source"):
        assert float(converted(names["g"])(jnp.float32(-1))) == 1
    with pytest.warns(UserWarning, match=r"AutoGraph could not convert g \(.*source"):
        assert float(converted(lambda x: names["g"](x))(jnp.float32(-1))) == 1
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        mirrored(1).run(converted(names["g"]), args=(jnp.float32(-1),))
    assert "AutoGraph could not convert g" in "".join(caught.value.__notes__)


def test_libraries_are_not_converted():
    optax = pytest.importorskip("optax")
    optimizer = optax.adam(0.1)

    @converted
    def f(x):
        state = optimizer.init(x)
        updates, _ = optimizer.update(jnp.ones_like(x), state)
        return optax.apply_updates(x, updates)

    assert np.allclose(f(jnp.ones(2)), 0.9)


def test_functions_run_on_the_host_without_the_autograph_library(monkeypatch):
    monkeypatch.setattr(autograph_switch, "available", lambda: False)
    with pytest.warns(UserWarning, match="pip install diastatic-malt"):
        assert float(converted(clipped)(jnp.float32(2))) == 1


# Under TensorFlow and under `replicax.tf`.
