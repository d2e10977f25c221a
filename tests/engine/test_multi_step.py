"""Several steps in one call: `rx.function(steps_per_call=K)`. What it gives is what K calls of one step give."""

from __future__ import annotations

import collections
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import SUM, mirrored, one_device, over

import replicax as rx
from replicax._data.multi_step import Demand
from replicax._engine import program
from replicax._input import iterator as input_iterator
from replicax._input.agreement import Iteration
from replicax._passes import pipeline
from replicax._passes.facts import Facts, Stage

A, S = rx.VariableAggregation, rx.VariableSynchronization
ROWS = np.arange(210, dtype=np.float32).reshape(70, 3) / 100


@pytest.fixture
def programs(monkeypatch):
    """How many steps each program took that was called, in order."""
    called: list[int] = []
    run = program.Program.run

    def counted(self, call, pulled, taped, steps=1):
        called.append(steps)
        return run(self, call, pulled, taped, steps)

    monkeypatch.setattr(program.Program, "run", counted)
    return called


def batches(strategy, rows=ROWS, size=8):
    return strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensor_slices(rows).batch(size))


class Training:
    """A step that reads, writes and only writes variables of several kinds."""

    def __init__(self, strategy, steps):
        with strategy.scope():
            self.w = rx.Variable(np.ones(3, np.float32), aggregation=A.MEAN)
            self.count, self.last = rx.Variable(0), rx.Variable(0.0)
            self.metric = rx.Variable(0.0, synchronization=S.ON_READ, aggregation=A.SUM)
        self.iterator = iter(batches(strategy))

        def replica(x):
            loss = jnp.sum(x * self.w.value())
            gradient = rx.get_replica_context().all_reduce(SUM, jnp.sum(x * loss, axis=0))
            self.w.assign_sub(0.0001 * gradient)
            self.metric.assign_add(loss)
            return loss, x

        @rx.function(steps_per_call=steps)
        def step():
            loss, x = strategy.run(replica, args=(next(self.iterator),))
            self.count.assign_add(1)
            total = strategy.reduce(SUM, loss, axis=None)
            self.last.assign(total)
            return {"total": total, "loss": loss, "x": x, "what": "training"}

        self.step = step

    def state(self):
        return [self.w.numpy().tolist(), int(self.count), float(self.last), float(self.metric)]

    def all(self):
        results = []
        while True:
            try:
                results.append(self.step())
            except rx.OutOfRangeError:
                return results


@pytest.mark.across_processes
@over(plain=True, one_of_each=True)
def test_several_steps_a_call_equal_single_steps(make, programs):
    strategy = make()
    single, several = Training(strategy, 1), Training(strategy, 4)
    one_each, results = single.all(), several.all()
    assert int(single.count) == 9
    np.testing.assert_allclose(np.hstack(several.state()), np.hstack(single.state()), rtol=1e-6)
    totals = np.concatenate([r["total"] for r in results])
    np.testing.assert_allclose(totals, [float(r["total"]) for r in one_each], rtol=1e-6)
    assert [r["total"].shape for r in results] == [(4,), (4,), (1,)]
    for of_one, first in enumerate(zip(*(strategy.experimental_local_results(r["x"]) for r in results[:2]))):
        each = [strategy.experimental_local_results(r["x"])[of_one] for r in one_each[:8]]
        np.testing.assert_array_equal(np.concatenate(first), np.stack(each))
    assert results[0]["what"] == "training"
    assert programs.count(4) == 2  # and the last batch is smaller
    if strategy.num_replicas_in_sync <= 2:
        assert programs == [1] * 9 + [4, 4, 1] and several.step.experimental_get_tracing_count() == 2


def test_results_of_other_sizes_are_a_list():
    strategy = mirrored(2)
    iterator = iter(batches(strategy, ROWS[:23]))  # the last batch has parts of 4 and 3 rows

    @rx.function(steps_per_call=3)
    def step(iterator):
        x = next(iterator)
        return strategy.run(lambda x: x[:, 0], args=(x,)), strategy.reduce(SUM, x, axis=0)

    rows, sums = step(iterator)
    assert [[part.shape[0] for part in x.values] for x in rows] == [[4, 4], [4, 4], [4, 3]]
    np.testing.assert_allclose(sums, [ROWS[i : i + 8][: 23 - i].sum(axis=0) for i in (0, 8, 16)], rtol=1e-6)
    for _ in range(2):
        with pytest.raises(rx.OutOfRangeError):
            step(iterator)


def test_an_error_of_a_later_step_does_not_end_the_data():
    """TensorArray and `count_up_to` raise OutOfRangeError, too."""
    counted = []

    def step(iterator):
        counted.append(next(iterator))
        if len(counted) == 2:
            raise rx.OutOfRangeError("the user's own")
        return counted[-1]

    rx.config.run_functions_eagerly(True)
    try:
        with pytest.raises(rx.OutOfRangeError, match="the user's own"):
            rx.function(step, steps_per_call=3)(iter(rx.data.Dataset.range(9)))
        iterator = iter(rx.data.Dataset.range(5))
        several = rx.function(lambda: iterator.get_next(), steps_per_call=3)
        assert [several().tolist() for _ in range(2)] == [[0, 1, 2], [3, 4]]  # at the end there are fewer
    finally:
        rx.config.run_functions_eagerly(False)


def test_none_in_an_element_is_a_part_of_its_structure():
    strategy, traces = mirrored(2), []
    data = [(np.full(4, i, np.float32), None) for i in range(9)]
    iterator = iter(strategy.experimental_distribute_dataset(data))

    def step():
        x, mask = next(iterator)
        traces.append(mask)
        return strategy.reduce(SUM, x, axis=0)

    single, several = rx.function(step), rx.function(step, steps_per_call=3)
    found = [float(single()), float(single()), *several().tolist()]
    x, mask = next(iterator)  # one of the next three
    found += [float(strategy.reduce(SUM, x, axis=0)), *several().tolist()]
    assert found == [4.0 * i for i in range(9)]
    assert mask is None and traces == [None, None]


def test_an_exception_in_the_data_comes_after_the_steps_before_it(programs):
    def made():
        yield from np.arange(12, dtype=np.float32).reshape(6, 2)
        raise ArithmeticError("no more of these")

    strategy = mirrored(2)
    total = rx.Variable(0.0)
    data = rx.data.Dataset.from_generator(made, output_signature=rx.TensorSpec((2,), np.float32))
    iterator = iter(strategy.experimental_distribute_dataset(data))
    step = rx.function(lambda: total.assign_add(strategy.reduce(SUM, next(iterator), axis=0)), steps_per_call=4)
    step()
    assert float(total) == 28.0
    with pytest.raises(ArithmeticError, match="no more of these"):
        step()
    assert float(total) == 66.0 and programs == [4, 1, 1]


def test_the_iterator_continues_after_the_elements_of_the_call(programs):
    strategy = mirrored(2)
    distributed = batches(strategy, np.arange(64, dtype=np.float32), 2)
    iterator = iter(distributed)

    @rx.function(steps_per_call=4)
    def step(iterator):
        return strategy.reduce(SUM, next(iterator), axis=0)

    assert step(iterator).tolist() == [1.0, 5.0, 9.0, 13.0]
    state = iterator.save_state()
    # Elements that were made four at a time also come one by one, and calls then take what is in between.
    assert [part.tolist() for part in next(iterator).values] == [[8.0], [9.0]]
    for first in (10, 18, 26, 34, 42):
        assert step(iterator).tolist() == [2.0 * first + 1 + 4 * i for i in range(4)]
    assert step(iterator).tolist() == [101.0, 105.0, 109.0, 113.0]
    assert step(iterator).tolist() == [117.0, 121.0, 125.0]
    assert programs == [4] * 7 + [1] * 3
    other = iter(distributed)
    other.restore_state(state)
    assert step(other).tolist() == [17.0, 21.0, 25.0, 29.0]
    assert step.experimental_get_tracing_count() == 1


def test_elements_of_several_iterators_and_of_none():
    numbers = rx.data.Dataset.range(10)
    v = rx.Variable(0)

    @rx.function(steps_per_call=3)
    def step(first, second, scale):
        v.assign_add(next(first) * scale + next(second))
        return v.value()

    first, second = iter(numbers), iter(numbers.skip(5))
    assert step(first, second, jnp.int32(10)).tolist() == [5, 21, 48]
    assert step(first, second, 10).tolist() == [86, 135]  # the second one ends
    assert int(next(first)) == 5  # from which no element was taken in vain
    assert step(iter(numbers), iter(numbers), 0).tolist() == [135, 136, 138]

    one = iter(numbers)
    twice = rx.function(lambda: (next(one), next(one)), steps_per_call=2)
    assert [x.tolist() for x in twice()] == [[0, 2], [1, 3]]
    assert rx.function(lambda x: v.assign_add(x), steps_per_call=3)(2).tolist() == [140, 142, 144]


def test_an_interrupted_call_gives_the_elements_back(monkeypatch):
    iterator, calls = iter(rx.data.Dataset.range(6)), []
    following = iterator._next_element

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return following()

    monkeypatch.setattr(iterator, "_next_element", interrupted)
    step = rx.function(lambda: next(iterator), steps_per_call=4)
    with pytest.raises(KeyboardInterrupt):
        step()
    assert step().tolist() == [0, 1, 2, 3]


def test_input_of_a_dropped_iterator_ends():
    asked = []

    def stopped():
        asked.append(1)
        assert len(asked) < 100
        return True

    dataset = batches(mirrored(2))
    rounds = input_iterator.rounds_of(dataset)
    assert list(rounds.placed(Iteration("", stopped), rounds.readings(), 0, Demand())) == []


def test_a_batch_given_to_all_steps_warns():
    strategy = mirrored(2)
    step = rx.function(lambda x: strategy.reduce(SUM, x, axis=0), steps_per_call=2)
    with pytest.warns(UserWarning, match=r"2 steps a call, all of them with the batch.*next\(iterator\)") as caught:
        assert step(next(iter(batches(strategy, np.ones(4, np.float32))))).tolist() == [4.0, 4.0]
    assert len(caught) == 1 and caught[0].filename == __file__


def test_steps_per_call_runs_inside_of_functions_and_eagerly():
    v = rx.Variable(0)
    traces = collections.Counter()

    @rx.function(steps_per_call=3)
    def step(x):
        traces["step"] += 1
        v.assign_add(x)
        return v.value()

    assert rx.function(lambda x: step(x) * 2)(1).tolist() == [2, 4, 6]
    rx.config.run_functions_eagerly(True)
    try:
        assert step(1).tolist() == [4, 5, 6]
        texts = iter([["a", "b"], ["a", "b"], ["a", "b"], ["a", "c"]])
        text = rx.function(lambda: np.array(next(texts)), steps_per_call=2)
        assert text().tolist() == ["a", "b"] and [x.tolist() for x in text()] == [["a", "b"], ["a", "c"]]
    finally:
        rx.config.run_functions_eagerly(False)
    assert jax.grad(lambda x: rx.function(lambda x: x**2, steps_per_call=2)(x).sum())(3.0) == 12.0

    class Model:
        @rx.function(steps_per_call=2)
        def step(self):
            return v.assign_add(1) * 1

    assert Model().step().tolist() == [7, 8]
    printed = []
    shown = rx.function(lambda x: jax.debug.callback(printed.append, v.assign_add(x)), steps_per_call=2)
    shown(1)  # what is seen from outside is seen after each step
    assert [int(x) for x in printed] == [9, 10]


def test_variables_are_made_in_the_first_step():
    made = []

    @rx.function(steps_per_call=3)
    def step():
        if not made:
            made.append(rx.Variable(0))
        return made[0].assign_add(1, read_value=True) * 1

    assert [step().tolist() for _ in range(2)] == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("steps, error", [(0, ValueError), (-1, ValueError), (1.5, TypeError), (None, TypeError)])
def test_wrong_numbers_of_steps(steps, error):
    with pytest.raises(error, match=f"`steps_per_call`.*got {steps}"):
        rx.function(lambda: 0, steps_per_call=steps)


# Loops over distributed datasets, which the host drives.


SLICES = rx.data.Dataset.from_tensor_slices
IN_MEMORY = {
    "in order": SLICES((ROWS, ROWS[:, 0])).batch(8),
    "shuffled": SLICES({"x": ROWS, "y": np.arange(70)}).shuffle(50).batch(8),
    "repeated": SLICES(ROWS).shuffle(70).repeat(2).batch(8),
    "cached": SLICES(ROWS).shuffle(70).cache().repeat(2).batch(8, drop_remainder=True),
    "prefetched": SLICES(ROWS).shuffle(70).batch(8).prefetch(rx.data.AUTOTUNE),
    "numbers": rx.data.Dataset.range(3, 143, 2).shard(3, 1).batch(2),
    "strings": SLICES((ROWS, np.array([b"a", b"bc"] * 35, object))).shuffle(70).batch(8),
    "uneven": SLICES(ROWS).shuffle(70).batch(9),
    "few": SLICES(ROWS).batch(36),
}


@pytest.mark.parametrize("strategy", [lambda: mirrored(2), one_device], ids=["mirrored", "one device"])
@pytest.mark.parametrize("what", IN_MEMORY)
def test_rows_of_several_batches_are_taken_together_and_are_the_same(what, strategy, monkeypatch):
    strategy, joined = strategy(), []
    on_host = input_iterator.stack_on_host
    monkeypatch.setattr(input_iterator, "stack_on_host", lambda parts: joined.append(on_host(parts)) or joined[-1])
    iterator = iter(strategy.experimental_distribute_dataset(IN_MEMORY[what]))
    state, expected = iterator.save_state(), list(iterator)
    iterator.restore_state(state)
    found = [next(iterator)]
    while (three := iterator._pull_block(3)) is not None:
        found += three.elements()
        if len(found) == 7:
            iterator.restore_state(iterator.save_state())
    found += iterator

    def parts(element):
        return [np.asarray(part) for part in jax.tree.leaves(strategy.experimental_local_results(element))]

    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        for a, b in zip(parts(one), parts(other), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape) and (a == b).all()
    uneven = what == "uneven" and strategy.num_replicas_in_sync == 2
    assert [x is None for x in joined] == ([True] * len(joined) if what == "strings" or uneven else [])


def numbers(strategy, count=21, size=2):
    return strategy.experimental_distribute_dataset(
        rx.data.Dataset.from_tensor_slices(np.arange(count, dtype=np.float32)).batch(size)
    )


@pytest.mark.parametrize("strategy", [lambda: mirrored(2), one_device], ids=["mirrored", "one device"])
def test_a_loop_that_the_host_drives_takes_one_program_a_step(strategy, programs):
    strategy, traces = strategy(), []
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=A.SUM)

    def replica(x):
        traces.append(1)
        v.assign_add(jnp.sum(x) / 3)
        return jnp.sum(x)

    @rx.function(autograph=True)
    def epoch(dataset):
        total, count, last = 0.0, 10, None
        for x in dataset:
            last = strategy.reduce(SUM, strategy.run(replica, args=(x,)), axis=None)
            total += last
            if last > 20:
                total += 100
            count += 2
        return total, count, last

    dataset, found = numbers(strategy, 100), []
    for _ in range(3):
        v.assign(0.0)
        total, count, last = epoch(dataset)
        assert (count, type(count), float(last)) == (110, int, 197.0)
        assert float(total) == 4950 + 100 * 45
        found.append(v.numpy().tobytes())
    assert len(set(found)) == 1 and programs == [1] * 150 and len(traces) == 1


def test_the_body_of_a_loop_runs_each_time(capsys):
    strategy, seen = mirrored(2), []

    class Trainer:
        rate = 1.0

        @rx.function(autograph=True)
        def epoch(self, dataset):
            for x in dataset:
                seen.append(float(strategy.reduce(SUM, x, axis=0) * self.rate))
                self.rate += 1
                print("one more")

    Trainer().epoch(numbers(strategy, 24))
    assert seen == [(i + 1) * (4.0 * i + 1) for i in range(12)]
    assert capsys.readouterr().out == "one more\n" * 12


def test_a_loop_and_its_body_may_take_elements_of_one_iterator():
    strategy = mirrored(2)
    iterator = iter(numbers(strategy, 24))
    following = rx.function(lambda: strategy.reduce(SUM, next(iterator), axis=0))

    @rx.function(autograph=True)
    def epoch(iterator):
        total = jnp.zeros(())
        for x in iterator:
            total += strategy.reduce(SUM, x, axis=0) * 10 + following()
        return total

    assert float(epoch(iterator)) == sum(10 * (i + i + 1) + (i + 2 + i + 3) for i in range(0, 24, 4))


def test_a_loop_keeps_no_variables_alive():
    strategy = mirrored(2)
    distributed = numbers(strategy, 24)

    class Trainer:
        def __init__(self):
            self.v = rx.Variable(0.0)

        @rx.function(autograph=True)
        def epoch(self):
            for x in distributed:
                self.v.assign_add(strategy.reduce(SUM, x, axis=0))

    def trained():
        with strategy.scope():
            v = rx.Variable(0.0, aggregation=A.SUM)

        @rx.function(autograph=True)
        def epoch():
            for x in distributed:
                strategy.run(lambda x: v.assign_add(x.sum()), args=(x,))

        return v, epoch

    gone = []
    for k in range(4):
        trainer = Trainer() if k % 2 else None
        v, epoch = (trainer.v, trainer.epoch) if trainer else trained()
        for _ in range(2):
            epoch()
        assert float(v) == 552.0
        gone.append(weakref.ref(v))
    del trainer, v, epoch
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)


def test_an_exception_in_a_loop_is_raised_at_its_iteration():
    def made():
        yield from np.arange(36, dtype=np.float32).reshape(18, 2)
        raise ArithmeticError("no more of these")

    strategy, v = mirrored(2), rx.Variable(0.0)
    data = rx.data.Dataset.from_generator(made, output_signature=rx.TensorSpec((2,), np.float32))
    distributed = strategy.experimental_distribute_dataset(data)

    @rx.function(autograph=True)
    def epoch():
        for x in distributed:
            v.assign_add(strategy.reduce(SUM, x, axis=0))

    for k in (1, 2):
        with pytest.raises(ArithmeticError, match="no more of these"):
            epoch()
        assert float(v) == 630 * k


@pytest.mark.parametrize("strategy", [one_device, lambda: mirrored(2)], ids=["one_device", "mirrored"])
def test_convolutions_in_several_steps(strategy):
    strategy, images = strategy(), np.random.default_rng(0).normal(size=(12, 5, 5, 2)).astype(np.float32)

    def trained(steps):
        with strategy.scope():
            kernel = rx.Variable(np.full((3, 3, 2, 4), 0.1, np.float32), aggregation=A.SUM)

        def replica(x):
            def loss(k):
                dimensions = ("NHWC", "HWIO", "NHWC")
                return jnp.sum(jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dimensions) ** 2)

            kernel.assign_sub(1e-4 * jax.jit(jax.grad(loss))(kernel.value()))

        @rx.function(steps_per_call=steps)
        def step(iterator):
            strategy.run(replica, args=(next(iterator),))

        iterator = iter(batches(strategy, images, 4))
        for _ in range(3 // steps):
            step(iterator)
        return kernel.numpy()

    np.testing.assert_allclose(trained(3), trained(1), rtol=1e-5)


def test_convolutions_get_the_fast_dimension_order():
    def gradient(x, k):
        def loss(k):
            return jnp.sum(
                jax.lax.conv_general_dilated(x, k, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )

        return jax.jit(jax.grad(loss))(k)

    arrays = jnp.arange(96.0).reshape(2, 6, 4, 2), jnp.ones((3, 3, 2, 5))
    traced, facts = jax.make_jaxpr(gradient)(*arrays), Facts(Stage.PROGRAM, "cpu", optimizes=True, is_loop=True)
    np.testing.assert_allclose(pipeline.evaluate(traced, facts, arrays)[0], gradient(*arrays))
    jaxpr = jax.make_jaxpr(lambda *args: pipeline.evaluate(traced, facts, args))(*arrays)
    numbers = [e.params["dimension_numbers"] for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    assert len(numbers) == 2  # one is that of the gradient
    assert {(n.lhs_spec, n.rhs_spec, n.out_spec) for n in numbers} == {((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))}
