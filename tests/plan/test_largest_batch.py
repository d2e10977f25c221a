"""`Plan.largest_batch`: the largest batch with which a step fits the memory of a device."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import needs_compiler
from jax.sharding import NamedSharding, PartitionSpec

import replicax as rx
from replicax._base.planning import PlanError
from replicax._engine.function import is_function
from replicax._plan import interception, pool
from replicax._plan.chips import parse
from replicax._plan.jit_steps import JitStep, is_jitted
from replicax._plan.largest_batch import search
from replicax._plan.lowering import Step
from replicax._plan.options import Options
from replicax._plan.plans import Plan
from replicax._plan.report import TopologyPlan

TOPOLOGY = "v5e:2x2"
MEMORY = 16 * 2**30


def plan_of(needed):
    return TopologyPlan(TOPOLOGY, 4, None, needed, MEMORY, (), 0.0, 0.0, 0.0, ())


@pytest.fixture
def compiled(monkeypatch):
    """The rows that are compiled. A device needs 1 GiB, and 2^20 times the batch."""
    found = []

    def measure(lowered, topology, settings):
        needed = 2**30 + 2**20 * lowered.inputs.batch
        found.append(lowered.inputs.batch)
        return plan_of(needed)

    monkeypatch.setattr(pool, "compile_one", measure)
    return found


def plan(step, *args):
    """A plan of a step, as `rx.plan` would return it."""
    traced = JitStep(step, args) if is_jitted(step) and not is_function(step) else Step(step, args)
    return Plan(
        traced.name, (pool.compile_one(traced.lowered(parse(TOPOLOGY)), parse(TOPOLOGY), pool.Settings()),), {}, traced
    )


@pytest.mark.parametrize(
    ("fixed", "of_row", "rows", "most"),
    [
        (5, 1, 8, 95),
        (5, 1, 95, 95),
        (5, 1, 1000, 95),
        (50, 1e-3, 8, 50_000),
        (0, 16, 1, 6),
        (99, 5, 4, 0),
        (101, 5, 4, 0),
    ],
)
def test_the_search_takes_few_measurements(fixed, of_row, rows, most):
    measured = []

    def measure(rows):
        measured.append(rows)
        needed = fixed + of_row * rows
        return needed <= 100, needed

    found, refused = search(measure, rows, 100)
    assert most - max(1, most // 16) < found <= most < refused <= found + max(1, found // 16)
    assert len(measured) == len(set(measured)) <= 6


def test_memory_in_steps_and_memory_that_does_not_grow_end_the_search():
    in_tiles = {"low": 0}

    def measure(rows):
        in_tiles["low"] += 1
        needed = -(-rows // 128) * 128  # 1000 rows at most
        return needed <= 1000, needed

    assert search(measure, 1, 1000)[0] in range(896 - 896 // 16, 897) and in_tiles["low"] <= 12
    measured = []
    found, refused = search(lambda rows: (measured.append(rows) or True, 10.0), 8, 100)
    assert refused is None and found > 2**30 and len(measured) <= 6


def test_the_rows_of_a_distributed_batch_are_those_of_each_replica(compiled):
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])

    @rx.function
    def step(x, scale, weights):
        return strategy.run(lambda x: jnp.sum(x) * scale * weights.sum(), args=(x,))

    dataset = rx.data.Dataset.from_tensors(np.ones((6, 16), np.float32))
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    weights = np.ones(3, np.float32)  # as many as a part has rows, but not divided among the replicas
    found = plan(step, batch, 0.5, weights).largest_batch(TOPOLOGY)
    # Of 16 GiB one is taken, the weights take 12 MiB, and a row of 16 numbers takes 64 MiB: 239 rows fit.
    assert 239 - 14 < found.rows <= 239 < found.refused <= found.rows + 14
    assert found.plan.needed == 2**30 + (12 + found.rows * 64) * 2**20
    assert compiled[0] == 12 + 3 * 64 and found.compiled == len(compiled) - 1 <= 4
    text = f"{found.rows} rows in each of 4 parts, {4 * found.rows} in all, need"
    assert str(found).startswith(f"largest batch on {TOPOLOGY}: {text}") and str(found).endswith("rows do not fit.")


def test_the_rows_of_elements_that_the_step_takes_are_changed(compiled):
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])

    @rx.function
    def step(iterator):
        x, y = next(iterator)
        return strategy.run(lambda x, y: jnp.sum(x) + jnp.sum(y), args=(x, y))

    arrays = np.ones((8, 15), np.float32), np.ones(8, np.float32)
    iterator = iter(strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensor_slices(arrays).batch(4)))
    found = plan(step, iterator).largest_batch()
    assert 240 - 15 < found.rows <= 240 and compiled[:2] == [2 * 64, 4 * 64]
    assert step(iterator).values[0] == 2 * 16  # it has kept its elements


def test_a_lone_replica_and_a_step_without_replicas_take_whole_arrays(compiled):
    strategy = rx.MirroredStrategy(["CPU:0"])
    replicated = rx.function(lambda x: strategy.run(jnp.sum, args=(x,)))
    plain = rx.function(lambda x, table, key: jnp.sum(x) + jnp.sum(table) + jax.random.uniform(key))
    x = jax.ShapeDtypeStruct((2, 16), jnp.float32)
    assert 240 - 15 < plan(replicated, x).largest_batch().rows <= 240
    # The table of 3 rows stays: it takes 192 MiB.
    found = plan(plain, x, jnp.ones((3, 16)), jax.random.key(0)).largest_batch()
    assert 237 - 14 < found.rows <= 237


def test_the_batch_of_a_jitted_step_is_what_it_gives_no_new_values_of(compiled):
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "model"))

    def spec(shape, *axes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    @jax.jit
    def step(weights, moments, x, y, rate):
        return {"w": weights["w"] - rate * x.sum() * y.sum(), "b": weights["b"]}, moments + 1, x.sum()

    weights = {"w": spec((8, 16), None, "model"), "b": spec((4,))}
    found = plan(step, weights, spec((8, 16)), spec((8, 15), "data"), spec((8,), "data"), 0.1).largest_batch()
    # A row of each part takes 64 MiB. What the step gives back is no part of the batch.
    assert found.parts == 2 and 240 - 15 < found.rows <= 240
    assert f"{found.rows} rows in each of 2 parts, {2 * found.rows} in all," in str(found)
    forward = jax.jit(lambda weights, x: x @ weights)
    assert 236 - 14 < plan(forward, jnp.ones((16, 4)), jnp.ones((8, 16))).largest_batch().rows <= 236


def test_not_even_one_row_may_fit(compiled):
    step = rx.function(lambda x: jnp.sum(x))
    found = plan(step, jnp.ones((2, 1 << 12))).largest_batch()  # 16 GiB for a row
    assert found.rows == 0 and found.plan.needed == 17 * 2**30
    assert str(found) == f"largest batch on {TOPOLOGY}: none. One row needs 17.00 GiB of 16.00 GiB."


def test_steps_and_devices_that_have_no_largest_batch_are_named(compiled):
    step = rx.function(lambda x: jnp.sum(x))
    on_cpu = TopologyPlan("cpu:2", 2, None, 1, None, (), 0.0, 0.0, 0.0, ())
    with pytest.raises(PlanError, match="cpu:2 has no largest batch: virtual CPU devices share the memory of the host"):
        Plan("step", (on_cpu,), {}, Step(step, (1.0,))).largest_batch()
    with pytest.raises(PlanError, match="cpu:2 has no largest batch"):
        interception.Planner(Options(["cpu:2"], largest_batch=True))  # before the program runs
    restored = pickle.loads(pickle.dumps(plan(step, np.ones(4, np.float32))))
    assert restored[TOPOLOGY].needed == 2**30 + 2**24
    with pytest.raises(PlanError, match="A plan that was pickled has lost its step"):
        restored.largest_batch()
    with pytest.raises(PlanError, match="none of its inputs is a batch with rows"):
        plan(step, np.float32(1)).largest_batch()
    fixed = rx.function(lambda x: jnp.sum(x.reshape(2, 2)))
    with pytest.raises(PlanError, match=r"cannot be traced with 8 rows in place of 4: TypeError: .*from the shape of"):
        plan(fixed, np.ones(4, np.float32)).largest_batch()


@pytest.mark.thorough
@needs_compiler("gpu")
def test_the_largest_batch_fits_the_memory_of_a_gpu():
    strategy = rx.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        w = rx.Variable(jnp.zeros((1024, 1024)))

    @rx.function
    def step(x):
        strategy.run(lambda x: w.assign(rx.get_replica_context().all_reduce("SUM", x.T @ jnp.tanh(x @ w))), args=(x,))

    found = rx.plan(step, jax.ShapeDtypeStruct((128, 1024), jnp.float32), topology="l4:2").largest_batch()
    # A row of the batch takes 4 KiB, and so do a row of the product and one of its tanh.
    assert found.plan.fits and found.plan.memory.batch == found.rows * 4096
    assert found.plan.needed > 0.93 * found.plan.available
    assert found.plan.available < found.plan.needed + 3 * 4096 * (found.refused - found.rows)
