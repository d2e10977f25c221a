"""Steps that fail, of batches that divide evenly over the replicas or not: they change nothing."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from strategies import MEAN, STRATEGIES, SUM, WORKERS, ctx, mirrored, over, parts, per_replica

import replicax as rx
from replicax._base.errors import FailedElsewhere

ONE = jax.ShapeDtypeStruct((), np.float32)
FAULTS = ["python", "pure_callback", "debug_callback", "value"]


class Boom(Exception):
    pass


class Model:
    """Variables of every kind, and a step that assigns all of them and fails in the last replica if it is told to."""

    def __init__(self, strategy, fault):
        self.strategy, self.fault, self.fails = strategy, fault, False
        self.calls = {"step": 0, "replica": 0}
        self.steps = rx.Variable(0)  # outside of the scope, and assigned outside of replicas
        with strategy.scope():
            self.small = [rx.Variable(jnp.full(3, float(i)), aggregation=rx.VariableAggregation.MEAN) for i in range(4)]
            self.large = rx.Variable(jnp.ones((40, 4)), aggregation=rx.VariableAggregation.MEAN)
            self.on_read = rx.Variable(
                0.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation=rx.VariableAggregation.SUM
            )
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
            self.parameter = rx.Variable(jnp.ones(8))
            self.optimizer = rx.Optimizer(optax.adam(0.1), self.parameter)
        self.count = rx.function(lambda: self.steps.assign_add(1, read_value=False))
        self.step = rx.function(self._step)

    def _check(self, x):
        if self.fails and x == self.last:
            raise Boom(f"example {x:g} is bad")
        return x

    def _replica(self, x):
        self.calls["replica"] += 1
        context = ctx()
        largest = jnp.max(x, initial=0.0)
        if self.fault == "pure_callback":
            largest = jax.pure_callback(self._check, ONE, largest)
        if self.fault == "debug_callback":
            jax.debug.callback(self._check, largest)
        total = context.all_reduce(SUM, jnp.sum(x) + largest)
        for variable in [*self.small, self.large]:
            variable.assign_add(jnp.ones(variable.shape) * total, read_value=False)
        self.on_read.assign_add(largest)
        if not self.strategy.extended._variables_live_once:
            x = self.dropout(x)
        self.optimizer.apply_gradients([(jnp.ones(8) * jnp.sum(x), self.parameter)])
        if self.fault == "python" and self.fails:
            raise Boom("a mistake")
        if self.fault == "value" and self.fails and float(largest) == self.last:
            raise Boom("a bad value")
        return total

    def _step(self, x):
        self.calls["step"] += 1
        self.count()  # a compiled function, where this runs eagerly
        total = self.strategy.run(self._replica, args=(x,))
        return self.strategy.reduce(MEAN, total, axis=None)

    def batches(self, rows, pads):
        """Two batches of so many rows, of which the last row alone makes a step fail."""
        self.last = rows
        data = rx.data.Dataset.from_tensor_slices(np.tile(np.arange(1, rows + 1, dtype=np.float32), 2)).batch(rows)
        options = rx.InputOptions(pad_last_batch=True) if pads else None
        return list(self.strategy.experimental_distribute_dataset(data, options))

    def state(self):
        """All values, as numpy arrays, and the copies of a variable."""
        values = [v.numpy() for v in [self.steps, *self.small, self.large, self.on_read, self.parameter]]
        values += [part.numpy() for part in getattr(self.large, "values", ())]
        values += [self.optimizer.state.numpy(), np.asarray(self.dropout.rngs.count[...])]
        return jax.tree.leaves(values)


@functools.cache
def sharded_optimizer():
    return rx.MirroredStrategy(["GPU:0", "GPU:1", "GPU:2"], shard_optimizer_state=True)


several = pytest.mark.parametrize(
    "make, n",
    [
        *(
            pytest.param(kind.make, kind.replicas, id=name, marks=pytest.mark.strategy(name))
            for name, kind in STRATEGIES.items()
            if kind.replicas > 1 and not kind.logical
        ),
        pytest.param(sharded_optimizer, 3, id="sharded_optimizer", marks=pytest.mark.strategy("sharded_optimizer")),
    ],
)
BATCHES = {"even": (0, False), "uneven": (1, False), "padded": (1, True)}
if WORKERS > 1:  # an uneven batch may run eagerly, where the failure of one worker ends the job
    del BATCHES["uneven"]
batches = pytest.mark.parametrize("missing, pads", BATCHES.values(), ids=BATCHES)


@pytest.mark.filterwarnings("ignore:.* gives every replica the same weight")
@several
@batches
@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_fails_changes_nothing(make, n, missing, pads, fault):
    """Uneven batches of some faults cannot be compiled and run eagerly. The next step is as if there was no failure."""
    model = Model(make(), fault)
    first, second = model.batches(2 * n - missing, pads)
    steps = 1 if fault.endswith("callback") else 0  # before the one that fails; other faults need a new trace
    if steps:
        model.step(first)
    before = model.state()
    model.fails = True
    for _ in range(2):
        model.calls.update(step=0, replica=0)
        with pytest.raises((Boom, jax.errors.ConcretizationTypeError, FailedElsewhere)):  # the latter of other workers
            model.step(second)
        for after, value in zip(model.state(), before, strict=True):
            np.testing.assert_array_equal(after, value)
        if fault == "python":
            assert model.calls == {"step": 1, "replica": 1}
    model.fails = False
    model.step(second)
    shares = [range(2 * i + 1, min(2 * i + 2, model.last) + 1) for i in range(n)]
    total = (steps + 1) * sum(sum(share) + share[-1] for share in shares)
    assert int(model.steps) == steps + 1
    for start, variable in enumerate(model.small):
        assert variable.numpy().tolist() == [start + total] * 3
    copies = [part.numpy() for part in getattr(model.large, "values", [model.large])]
    assert [float(copy[-1, -1]) for copy in copies] == [1 + total] * len(copies)


@over(plain=True, logical=False)
@pytest.mark.parametrize("eagerly", [False, True], ids=["first_call", "run_functions_eagerly"])
def test_a_call_that_runs_eagerly_and_fails_changes_nothing(make, n, eagerly):
    strategy, made = make(), []
    with strategy.scope():
        total = rx.Variable(1.0, aggregation=rx.VariableAggregation.SUM)
    steps = rx.Variable(0)
    generator = rx.Variable(7)

    @rx.function
    def step(fails):
        steps.assign_add(1)
        if not made:
            made.append(rx.Variable(5.0))
        made[0].assign_add(1.0)
        strategy.run(lambda: total.assign_add(jnp.float32(2)))
        generator.assign(generator * 2)
        if fails:
            raise Boom("at the end")

    def values():
        return int(steps), float(made[0]), total.numpy().tolist(), int(generator)

    rx.config.run_functions_eagerly(eagerly)
    try:
        with pytest.raises(Boom):
            step(True)
        assert values() == (0, 5.0, 1.0, 7)
        step(False)
        assert values() == (1, 6.0, 1.0 + 2.0 * n, 14)
        with pytest.raises(Boom):
            step(True)
        assert values() == (1, 6.0, 1.0 + 2.0 * n, 14)
    finally:
        rx.config.run_functions_eagerly(False)


@over(at_least=2, processes=1)
def test_an_eager_run_of_which_one_replica_fails_changes_nothing(make, n):
    strategy = make()
    with strategy.scope():
        variable = rx.Variable(jnp.ones(8), aggregation=rx.VariableAggregation.MEAN)
        on_read = rx.Variable(
            0.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation=rx.VariableAggregation.SUM
        )

    def replica(fails):
        variable.assign_add(jnp.ones(8))
        on_read.assign_add(jnp.float32(1))
        if fails and int(ctx().replica_id_in_sync_group) == 1:
            raise Boom("in one replica")

    with pytest.raises(Boom):
        strategy.run(replica, args=(True,))
    assert variable.numpy().tolist() == [1.0] * 8 and float(on_read) == 0
    strategy.run(replica, args=(False,))
    assert variable.numpy().tolist() == [2.0] * 8 and float(on_read) == n


def test_the_end_of_the_data_leaves_what_was_done_before_it():
    strategy = mirrored(2)
    with strategy.scope():
        total = rx.Variable(0.0)
    data = rx.data.Dataset.from_tensor_slices(np.float32([1, 2, 3])).batch(3)
    iterator = iter(strategy.experimental_distribute_dataset(data))

    def replica(x):
        jax.debug.callback(lambda: None)
        total.assign_add(ctx().all_reduce(SUM, jnp.sum(x)))

    @rx.function
    def both():
        for _ in range(2):
            strategy.run(replica, args=(next(iterator),))

    with pytest.raises((StopIteration, rx.OutOfRangeError)):
        both()
    assert float(total) == 6


def test_elements_of_a_step_that_cannot_be_traced_come_again():
    """Also of uneven batches."""
    strategy, fails = mirrored(2), [True]
    iterator = iter(strategy.experimental_distribute_dataset(rx.data.Dataset.range(6).batch(3)))

    @rx.function
    def step():
        if fails[0]:
            next(iterator)
            raise Boom("a mistake")
        return strategy.run(lambda x: x, args=(next(iterator),))

    with pytest.raises(Boom):
        step()
    fails[0] = False
    assert parts(strategy, step()) == [[0, 1], [2]]


def test_what_replicas_gather_may_make_a_function_fail_while_sizes_are_supposed():
    """The replicas run eagerly then, and the call is right."""
    strategy = mirrored(2)
    x = per_replica(strategy, [np.ones(3, np.float32), np.ones(2, np.float32)])
    sizes = []

    def replica(x):
        gathered = ctx().all_gather(x, axis=0)
        sizes.append(gathered.shape[0])
        if gathered.shape[0] != 5:
            raise Boom("not five")
        return gathered.sum()

    step = rx.function(lambda x: strategy.run(replica, args=(x,)))
    assert parts(strategy, step(x)) == [5.0, 5.0]
    assert sizes == [6, 5, 5]
