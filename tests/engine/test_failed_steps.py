"""Steps that fail while they run: their error comes out of them alone, and what they assign keeps its value."""

from __future__ import annotations

import functools
import itertools
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback
from processes import Workers
from strategies import MEAN, SUM, ctx, mirrored, one_device, per_replica

import replicax as rx

SUM_UP = rx.VariableAggregation.SUM


def out_of_memory(x):
    """A zero of the dtype of `x`, for which the device needs more memory than there is."""
    many = x + jnp.arange(1 << 46, dtype=jnp.int8).astype(x.dtype)
    return 0 * jnp.sort(many)[7]


def test_the_error_of_a_failed_step_does_not_come_out_of_later_calls():
    strategy = mirrored(2)

    @rx.function
    def fails(x):
        return strategy.run(lambda x: ctx().all_reduce(SUM, x + out_of_memory(x)), args=(x,))

    @rx.function
    def total(x):
        return strategy.reduce(MEAN, strategy.run(lambda x: ctx().all_reduce(SUM, x + 1), args=(x,)), axis=None)

    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        np.asarray(fails(jnp.float32(1)).values[0])
    # More calls than are in flight at once, after which older ones are waited for.
    assert [float(total(jnp.float32(k))) for k in range(40)] == [2.0 * k + 2 for k in range(40)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        np.asarray(fails(jnp.float32(1)).values[0])
    for _ in range(40):  # eager ones
        assert [float(x) for x in strategy.run(lambda: ctx().all_reduce(SUM, jnp.float32(3))).values] == [6.0, 6.0]


@functools.cache
def sharding(n):
    return rx.MirroredStrategy([f"GPU:{i}" for i in range(n)], shard_optimizer_state=True)


class Boom(Exception):
    pass


ONE = jax.ShapeDtypeStruct((), np.float32)


def called_back(kind, function, x):
    """A number of `x` that goes through a function of Python, if that is how this kind of callback works."""
    if kind == "pure_callback":
        return jax.pure_callback(function, ONE, x)
    if kind == "io_callback":
        return io_callback(function, ONE, x)
    jax.debug.callback(function, x)
    return x


class Everything:
    """Variables of every kind, and a step that changes all of them and calls a function of Python."""

    def __init__(self, n, kind, steps=1):
        self.fails = False
        self.strategy = strategy = sharding(n) if n else one_device()
        with strategy.scope():
            self.small = [rx.Variable(jnp.full(3, float(i))) for i in range(4)]  # of which a pack is made
            self.large = rx.Variable(jnp.ones((200, 200)))
            self.tree = rx.Variable({"a": jnp.zeros(2), "b": [jnp.ones(())]})
            self.on_read = rx.Variable(0.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation=SUM_UP)
            self.model = nnx.Linear(2, 1, rngs=nnx.Rngs(dropout=0, params=1))
            self.parameter = rx.Variable(jnp.ones(5))
            self.optimizer = rx.Optimizer(optax.adam(0.1), self.parameter)

        def record(x):
            if self.fails:
                raise Boom(f"record {x:g} is bad")
            return x

        def replica(x):
            x = called_back(kind, record, x + 1)
            total = ctx().all_reduce(MEAN, x)
            for variable in [*self.small, self.large]:
                variable.assign_add(jnp.ones(variable.shape) * total, read_value=False)
            self.tree.assign(jax.tree.map(lambda leaf: leaf + total, self.tree.value()))
            self.on_read.assign_add(x)
            self.model.kernel[...] += total
            self.optimizer.apply_gradients([(jnp.ones(5) * x, self.parameter)])
            return total

        self.step = rx.function(lambda x: strategy.run(replica, args=(x,)), steps_per_call=steps)
        self.plain = rx.function(lambda: [v.assign_add(jnp.ones(v.shape)) for v in self.small][:0])

    def state(self):
        """All values, as numpy arrays."""
        values = [v.numpy() for v in [*self.small, self.large, self.tree, self.on_read, self.parameter]]
        values += [self.optimizer.state.numpy(), np.asarray(self.model.kernel[...])]
        return jax.tree.leaves(values)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "n, kind, steps",
    [
        *itertools.product([0, 2], ["pure_callback", "io_callback", "debug_callback"], [1]),
        (2, "pure_callback", 3),  # as one program
        (0, "io_callback", 3),  # one step after the other
    ],
)
def test_assigned_variables_keep_their_values_if_a_callback_raises(n, kind, steps):
    both = [Everything(n, kind, steps) for _ in range(2)]  # the second one never fails
    for each in both:
        each.plain()
        each.step(jnp.float32(1))
    tried, other = both
    before = tried.state()
    for _ in range(2):
        tried.fails = True
        with pytest.raises(Boom, match="record 2 is bad") as caught:
            tried.step(jnp.float32(1))
        assert any("calls back, whose variables keep the values" in note for note in caught.value.__notes__)
        tried.fails = False
        for after, value in zip(tried.state(), before, strict=True):
            np.testing.assert_array_equal(after, value)
    for each in both:
        each.step(jnp.float32(1))
    for one, another in zip(tried.state(), other.state(), strict=True):
        np.testing.assert_array_equal(one, another)


def line_of(text):
    """Where a line of this file stands, as messages have it."""
    lines = [line.strip() for line in Path(__file__).read_text().splitlines()]
    number = lines.index(text) + 1
    return f"{__file__}:{number} ({text})"


@pytest.mark.parametrize("n", [1, 2])
def test_a_nan_names_its_operation_line_and_replicas_and_changes_nothing(n):
    strategy = mirrored(n)
    with strategy.scope():
        v = rx.Variable(jnp.ones(3), name="v")
        small = [rx.Variable(jnp.ones(2)) for _ in range(4)]

    @rx.function
    def step(x):
        def replica(x):
            y = jnp.log(x)
            total = ctx().all_reduce(SUM, y)  # which takes the NaN to all replicas
            for variable in [v, *small]:
                variable.assign_add(total * jnp.ones(variable.shape))
            return jax.lax.cond(total > 1000, lambda: jnp.sqrt(y), lambda: y)  # of which one branch is NaN

        total = strategy.reduce(SUM, strategy.run(replica, args=(x,)), axis=None)
        root = jnp.sqrt(total)
        v.assign_add(root * jnp.ones(3))
        return root

    every = functools.partial(per_replica, strategy)
    float(step(every([2.0] * n)))
    before = [v.numpy(), *(variable.numpy() for variable in small)]
    cases = [
        ([2.0] * (n - 1) + [-2.0], "log", f"replica {n - 1}", "y = jnp.log(x)"),
        ([-2.0] * n, "log", "all replicas" if n > 1 else "replica 0", "y = jnp.log(x)"),
        ([0.5] * n, "sqrt", None, "root = jnp.sqrt(total)"),
    ]
    with jax.debug_nans(True):  # the program was compiled before
        for values, operation, replicas, line in cases:
            with pytest.raises(FloatingPointError) as caught:
                step(every(values))
            gives = f"the operation {operation} gives NaN" + (f" on {replicas}" if replicas else "")
            assert str(caught.value) == (
                f"In step, {gives}, at {line_of(line)}. The variables keep the values that they had before."
            )
            for value, variable in zip(before, [v, *small], strict=True):
                np.testing.assert_array_equal(variable.numpy(), value)
        np.testing.assert_allclose(float(step(every([2.0] * n))), np.sqrt(n * np.log(2)), rtol=1e-6)
    assert np.isnan(float(step(every([-2.0] * n))))  # with the flag off, it is as it was
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"There was a NaN before the call in .*v:0"):
        step(every([2.0] * n))


def test_a_nan_in_one_of_several_steps_a_call_is_found():
    v = rx.Variable(3.0)
    iterator = iter(rx.data.Dataset.range(6))

    @rx.function(steps_per_call=3)
    def step():
        v.assign_sub(jnp.float32(next(iterator)))
        return jnp.sqrt(v.value())

    np.testing.assert_allclose(step(), np.sqrt([3.0, 2.0, 0.0]), rtol=1e-6)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="In step, the operation sqrt gives NaN, at "):
        step()
    assert float(v) == 0
    broken = jnp.array([1.0, np.nan])
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"NaN before the call in an argument\."):
        rx.function(lambda x: x * 2)(broken)


JOB = """
import jax, jax.numpy as jnp, numpy as np
import replicax as rx

strategy = rx.MultiWorkerMirroredStrategy()
me = jax.process_index()
with strategy.scope():
    v = rx.Variable(jnp.ones(3))
bad = False

def check(x):
    if bad and me == 1:
        raise ValueError("record 57 is bad")
    return x

@rx.function
def step(x):
    def replica(x):
        y = jax.pure_callback(check, jax.ShapeDtypeStruct((), jnp.float32), x + 1)
        total = rx.get_replica_context().all_reduce("SUM", y)
        v.assign_add(total * jnp.ones(3))
        return jnp.log(y)

    return strategy.run(replica, args=(x,))

step(jnp.float32(1))
bad = True
try:
    step(jnp.float32(1))
except Exception as error:
    print(type(error).__name__, str(error)[:90], v.values[0].numpy().tolist(), sep="|", flush=True)
bad = False
step(jnp.float32(1))
print(v.values[0].numpy().tolist(), flush=True)
jax.config.update("jax_debug_nans", True)
try:
    step(jnp.float32(-3))
except FloatingPointError as error:
    print("log gives NaN on" in str(error), "keep" in str(error), v.values[0].numpy().tolist(), sep="|", flush=True)
jax.config.update("jax_debug_nans", False)
with strategy.scope():
    a, b = rx.Variable(0.0, name="a"), rx.Variable(jnp.zeros(2), name="b")

def of_other_variables():
    (b if me else a).assign(jnp.ones((2,) if me else ()))

def of_one_variable_more():
    a.assign(1.0)
    if me:
        b.assign(jnp.ones(2))

def of_other_values():
    a.assign(1.0)
    b.assign(jnp.full(2, float(me)))

def in_another_order():
    for variable in (b, a) if me else (a, b):
        variable.assign(jnp.full(variable.shape, -0.0 if me else 0.0))

for assign in (of_other_variables, of_one_variable_more, of_other_values, in_another_order):
    try:
        strategy.run(assign)
    except ValueError as error:
        print(assign.__name__, str(error)[:45], float(a.values[0]), b.values[0].numpy().tolist(), sep="|", flush=True)
bad = True
step(jnp.float32(1))
"""


def test_a_step_that_fails_on_one_worker_counts_on_none_and_its_error_is_the_cause(tmp_path):
    """Nor does an eager one whose replicas assign other variables or values than those of the other worker."""
    with Workers(tmp_path, 2, JOB, env={"REPLICAX_STEP_TIMEOUT": "120", "REPLICAX_HEARTBEAT_TIMEOUT": "60"}) as workers:
        done = workers.join(timeout=240)
    caught = {index: ended.stdout.splitlines() for index, ended in done.items()}
    told = "A function that the compiled step calls back raised an error on another worker, which tells it. The "
    assert caught[0][0] == f"FailedElsewhere|{told[:90]}|[5.0, 5.0, 5.0]", workers.output()
    assert caught[1][0] == "ValueError|record 57 is bad|[5.0, 5.0, 5.0]", workers.output()
    for index in (0, 1):
        assert caught[index][1:] == [
            "[9.0, 9.0, 9.0]",
            "True|True|[9.0, 9.0, 9.0]",
            "of_other_variables|The replicas of one worker assign other varia|0.0|[0.0, 0.0]",
            "of_one_variable_more|The replicas of one worker assign other varia|0.0|[0.0, 0.0]",
            "of_other_values|The replicas assign different values to b:0 o|0.0|[0.0, 0.0]",
        ], workers.output()
        assert done[index].returncode != 0
        assert "worker 1 failed: ValueError: record 57 is bad" in done[index].stderr or index == 1, workers.output()
    assert "ValueError: record 57 is bad" in done[1].stderr


def test_a_variable_of_a_step_that_ran_out_of_memory_raises_until_assigned():
    strategy = mirrored(2)
    with strategy.scope():
        v = rx.Variable(jnp.ones(3), name="v")

    @rx.function
    def train_step(x):
        strategy.run(lambda: v.assign_add(jnp.ones(3) * out_of_memory(x)))

    with pytest.raises((rx.StepError, jax.errors.JaxRuntimeError), match="Out of memory|train_step"):
        train_step(jnp.float32(1))
        v.numpy()
    for read in (lambda: v.numpy(), lambda: float(v.values[1][0]), lambda: repr(v)):
        with pytest.raises((rx.StepError, jax.errors.JaxRuntimeError)) as caught:
            read()
        assert "Out of memory" in f"{caught.value} {caught.value.__cause__}"
    with pytest.raises(rx.StepError, match="v:0 has no value: train_step, which assigns it, failed .* assign all"):
        v.numpy()
    v.assign(jnp.full(3, 2.0))
    strategy.run(lambda: v.assign_add(jnp.ones(3)))
    assert v.numpy().tolist() == [3.0] * 3


def test_assignments_of_other_threads_during_a_callback_are_kept():
    v = rx.Variable(0.0)
    entered, leave = threading.Event(), threading.Event()

    def wait(x):
        entered.set()
        assert leave.wait(60)
        return x

    @rx.function
    def slow(x):
        v.assign_add(jax.pure_callback(wait, ONE, x))

    add = rx.function(lambda: v.assign_add(10.0, read_value=False))
    add()
    slow_thread = threading.Thread(target=lambda: slow(jnp.float32(1)))
    others = [threading.Thread(target=add), threading.Thread(target=lambda: v.assign_add(100.0))]
    slow_thread.start()
    assert entered.wait(60)
    for thread in others:
        thread.start()
    leave.set()
    for thread in [slow_thread, *others]:
        thread.join(60)
    assert float(v) == 121
