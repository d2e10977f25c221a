"""`rx.plan`: steps of the user's compiled for devices that are not there."""

import contextlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from replicax._base.planning import PlanError
from replicax._plan.api import arguments
from replicax._plan.chips import parse
from replicax._plan.lowering import Step

ROWS, INPUTS, HIDDEN, CLASSES = 8, 64, 128, 4


class Training:
    """A step under a strategy, and its batches."""

    def __init__(self, strategy, replicas):
        self.strategy = strategy
        with strategy.scope():
            self.hidden = rx.Variable({"w": jnp.ones((INPUTS, HIDDEN)), "b": jnp.zeros(HIDDEN)}, name="hidden")
            self.out = rx.Variable(jnp.ones((HIDDEN, CLASSES)), name="out")
            self.optimizer = rx.Optimizer(optax.adam(1e-3), [self.hidden, self.out])
        rng = np.random.default_rng(0)
        images = np.tile(rng.normal(size=(ROWS * replicas, INPUTS)).astype("float32"), (2, 1))  # the same batch twice
        labels = np.tile(rng.integers(0, CLASSES, ROWS * replicas).astype("int32"), 2)
        dataset = rx.data.Dataset.from_tensor_slices((images, labels)).batch(ROWS * replicas)
        self.batches = strategy.experimental_distribute_dataset(dataset)

        def replica_step(images, labels):
            with rx.GradientTape() as tape:
                hidden = self.hidden.value()
                logits = jnp.tanh(images @ hidden["w"] + hidden["b"]) @ self.out.value()
                loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
            self.optimizer.apply_gradients(tape.gradient(loss, [self.hidden, self.out]))
            return loss

        @rx.function
        def step(images, labels):
            return strategy.reduce("MEAN", strategy.run(replica_step, args=(images, labels)), axis=None)

        @rx.function
        def from_iterator(iterator):
            images, labels = next(iterator)
            return strategy.reduce("MEAN", strategy.run(replica_step, args=(images, labels)), axis=None)

        self.step, self.from_iterator = step, from_iterator


PARAMETERS = 4 * (INPUTS * HIDDEN + HIDDEN + HIDDEN * CLASSES)
BATCH = ROWS * (INPUTS * 4 + 4)


def test_a_step_is_planned_for_several_numbers_of_replicas(monkeypatch):
    training = Training(rx.MirroredStrategy(["CPU:0", "CPU:1"]), 2)
    before = training.hidden.numpy()
    monkeypatch.setenv("XLA_FLAGS", "--of=this-process")  # which has read them; not for the compiler's
    plan = rx.plan(training.step, training.batches, topology=[4, 1])
    assert [each.topology for each in plan] == ["cpu:4", "cpu:1"] and len(plan) == 2
    four, one = plan
    for each in plan:
        memory = each.memory
        # Adam has two moments for each parameter, and a count.
        assert (memory.variables, memory.state, memory.batch) == (PARAMETERS, 2 * PARAMETERS + 4, BATCH)
        assert memory.total == memory.arguments + memory.outputs + memory.temporaries + memory.code
    reduced = [c for c in four.collectives if c.bytes > 4]
    assert sum(c.bytes for c in reduced) in (PARAMETERS, PARAMETERS + 4) and not one.collectives  # with the loss
    # Of the weights and their moments, each replica would have a quarter. The other arrays are small.
    saved = 3 * INPUTS * HIDDEN * 4 * 3 // 4
    assert four.savings == (("hidden['w'] float32[64, 128] with 2 of its optimizer", saved),) and not one.savings
    assert plan[4] is four and plan["cpu:1"] is one
    with pytest.raises(KeyError, match="for cpu:4, cpu:1, not for 8"):
        plan[8]
    table = str(plan)
    assert "plan of step" in table and "these would save most" in table
    # Nothing has run, and the step trains as before.
    np.testing.assert_array_equal(training.hidden.numpy()["w"], before["w"])
    losses = [float(training.step(*batch)) for batch in training.batches]
    assert losses[1] < losses[0] and len(losses) == 2


def lowered(step, *args, topology="v5e:2x4"):
    return Step(step, args).lowered(parse(topology))


def test_lowering_for_tpus_needs_none():
    training = Training(rx.MirroredStrategy(["GPU:0", "GPU:1"]), 2)
    found = lowered(training.step, *next(iter(training.batches)))
    assert found.axes == {"replica": 8} and found.replicas == 8
    exported = jax.export.deserialize(bytearray(found.program))
    assert exported.platforms == ("tpu",) and exported.nr_devices == 8
    rows = [aval.shape for aval, spec in zip(exported.in_avals, found.specs) if spec == ["replica"]]
    assert rows == [(8, ROWS, INPUTS), (8, ROWS)]


def test_an_iterator_keeps_its_elements():
    training = Training(rx.MirroredStrategy(["CPU:0", "CPU:1"]), 2)
    iterator = iter(training.batches)
    assert lowered(training.from_iterator, iterator).inputs.batch == BATCH
    assert lowered(training.step, *arguments(iterator)).inputs.batch == BATCH
    losses = [float(training.from_iterator(iterator)) for _ in range(2)]
    assert losses[1] < losses[0]
    for ended in (iterator, training.strategy.experimental_distribute_dataset([])):
        with pytest.raises(PlanError, match="`batch` is a .* without a next element"):
            arguments(ended)


def test_specs_and_elements_are_planned_alike():
    training = Training(rx.MirroredStrategy(["CPU:0", "CPU:1"]), 2)
    specs = [
        rx.PerReplicaSpec(rx.TensorSpec((ROWS, INPUTS)), rx.TensorSpec((ROWS - 1, INPUTS))),
        rx.PerReplicaSpec(rx.TensorSpec((ROWS,), jnp.int32), rx.TensorSpec((ROWS,), jnp.int32)),
    ]
    with training.strategy.scope():  # which says whose replicas they are of
        found = lowered(training.step, *specs)
    assert found.inputs == lowered(training.step, *next(iter(training.batches))).inputs
    with pytest.raises(PlanError, match="leaves a size open"):
        lowered(training.step, *training.batches.element_spec)
    with pytest.raises(PlanError, match="Pass the dataset itself"):
        lowered(training.step, training.batches)


def test_the_part_of_a_lone_replica_is_that_of_each():
    training = Training(rx.MirroredStrategy(["CPU:0"]), 1)
    found = lowered(training.step, *next(iter(training.batches)))
    assert found.replicas == 8 and found.inputs.batch == BATCH
    assert float(training.step(*next(iter(training.batches)))) > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{}, {"shard_variables": True}, {"shard_optimizer_state": True}])
def test_the_memory_is_what_the_compiler_says_of_the_step_that_runs(options):
    training = Training(rx.MirroredStrategy([f"CPU:{i}" for i in range(4)], **options), 4)
    batch = next(iter(training.batches))
    found = training.step.lower(*batch).compile().memory_analysis()
    memory = rx.plan(training.step, batch, topology=4)[4].memory
    assert memory.arguments == found.argument_size_in_bytes
    assert memory.outputs == found.output_size_in_bytes - found.alias_size_in_bytes
    assert memory.code == found.generated_code_size_in_bytes
    # But for what the flags for the CPU change, which the tests may run with.
    assert memory.temporaries == pytest.approx(found.temp_size_in_bytes, rel=0.01)


@pytest.mark.parametrize("replicas", [1, 2])
def test_sharded_state_is_divided_by_the_planned_replicas(replicas):
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)], shard_optimizer_state=True)
    with strategy.scope():
        w = rx.Variable(jnp.zeros((64, 1024)), name="w")
        optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.9), [w])

    @rx.function
    def step():
        strategy.run(lambda: optimizer.apply_gradients([w.value()]))

    assert lowered(step).inputs.state == 64 * 1024 * 4 // 8
    assert lowered(step, topology="v5p:2x2x4").inputs.state == 64 * 1024 * 4 // 16
    step()
    assert w.shape == (64, 1024)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("abstract", [False, True])
def test_variables_are_sharded_over_the_planned_replicas(replicas, abstract):
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)], shard_variables=True)
    shapes = {"even": (64, 96), "odd": (99, 1024), "odder": (81, 81), "small": (64,)}
    with strategy.scope(), rx.experimental.abstract_variables() if abstract else contextlib.nullcontext():
        w = rx.Variable({name: jnp.zeros(shape) for name, shape in shapes.items()}, name="w")
        differing = rx.Variable(jnp.zeros((64, 96)), copies_may_differ=True)
        optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.9), w)

    @rx.function
    def step():
        strategy.run(lambda: (optimizer.apply_gradients(w.value()), differing.assign_add(differing.value())))

    whole = 4 * (81 * 81 + 64)  # of which no dimension can be divided, or which is small
    of_eight = whole + 4 * (64 * 96 + 99 * 1024) // 8
    copies = 4 * 64 * 96
    on_eight = lowered(step).inputs
    assert (on_eight.variables, on_eight.state) == (of_eight + copies, of_eight)
    # Of nine the other dimension of one can be divided, and both of another.
    of_nine = 4 * 64 + 4 * (64 * 96 + 0) + 4 * (99 * 1024 + 81 * 81) // 9
    assert lowered(step, topology=9).inputs.state == of_nine
    assert (w._storage.home.is_cut, w._storage.home.mesh.size) == (replicas == 2, replicas)  # as before


OWN = {"synchronization": rx.VariableSynchronization.ON_READ, "aggregation": rx.VariableAggregation.MEAN}
AGGREGATED = {"aggregation": rx.VariableAggregation.MEAN}
DIFFERING = {"copies_may_differ": True}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("replicas", [1, 8])
@pytest.mark.parametrize(
    ("first", "second", "divided"),
    [(AGGREGATED, None, 2), (DIFFERING, None, 0), (OWN | {"trainable": True}, None, 0), ({}, DIFFERING, 4)],
)
def test_state_of_any_variables_is_planned_from_any_number_of_replicas(replicas, first, second, divided):
    strategy = rx.MirroredStrategy([f"GPU:{i}" for i in range(replicas)], shard_variables=True)
    with strategy.scope():
        w = [rx.Variable(jnp.zeros((64, 1024)), **options) for options in (first, second) if options is not None]
        optimizer = rx.Optimizer(optax.adam(0.1), w)

    @rx.function
    def step():
        strategy.run(lambda: optimizer.apply_gradients([v.value() for v in w]))

    whole = 4 * 64 * 1024
    moments = divided * whole // 8 + (2 * len(w) - divided) * whole
    assert lowered(step).inputs.state == moments + 4  # with Adam's count
    step()
    assert all(np.isfinite(v.numpy()).all() for v in w)


def test_a_share_of_more_values_than_an_int32_counts_is_planned():
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])

    @rx.function
    def loss(x):
        return strategy.reduce("SUM", strategy.run(rx.share_of_mean, args=(x,)), axis=None)

    part = rx.TensorSpec((1 << 15, 1 << 16), jnp.float32)  # 2^31 values on each replica
    with strategy.scope():
        found = lowered(loss, rx.PerReplicaSpec(part, part))
    assert found.inputs.batch == 8 * 2**30


def test_what_would_save_most_can_be_sharded():
    strategy = rx.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        w = [rx.Variable(jnp.zeros((n, n)), name=f"w{n}") for n in (72, 80, 81, 88, 96)]  # 81 cannot
        optimizer = rx.Optimizer(optax.adam(0.1), w[1:])
        alone = rx.Variable(jnp.zeros((256, 64)), name="alone", trainable=False)

    @rx.function
    def step():
        strategy.run(
            lambda: (
                optimizer.apply_gradients([v.value() for v in w[1:]]),
                alone.assign(jnp.full((256, 64), w[0].value()[0, 0])),
            )
        )

    assert lowered(step).inputs.copies == {
        "w72 float32[72, 72]": 4 * 72 * 72,
        **{f"w{n} float32[{n}, {n}] with 2 of its optimizer": 12 * n * n for n in (80, 88, 96)},
        "alone float32[256, 64]": 4 * 256 * 64,
    }


def test_a_plain_function_without_a_strategy():
    v = rx.Variable(jnp.zeros((4, 4)), name="v")

    def step(x):
        v.assign_add(x @ x)

    found = lowered(rx.function(step), jax.ShapeDtypeStruct((4, 4), jnp.float32))
    assert (found.axes, found.replicas, found.inputs.variables, found.inputs.batch) == ({"replica": 1}, 1, 64, 64)
    assert not np.any(v.numpy())


def test_steps_that_have_no_program_are_refused():
    training = Training(rx.MirroredStrategy(["CPU:0", "CPU:1"]), 2)

    @rx.function
    def epoch(batches):
        for batch in batches:
            training.step(*batch)

    with pytest.raises(PlanError, match="loops over a distributed dataset"):
        lowered(epoch, iter(training.batches))
    central = rx.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])
    with central.scope():
        v = rx.Variable(0.0, aggregation=rx.VariableAggregation.ONLY_FIRST_REPLICA)
    with pytest.raises(PlanError, match="CentralStorageStrategy"):
        lowered(rx.function(lambda: central.run(lambda: v.assign_add(1.0))))


def print_sum(x):
    jax.debug.print("{}", jnp.sum(x))


def call_back(x):
    return jax.pure_callback(lambda total: total, jax.ShapeDtypeStruct((), jnp.float32), jnp.sum(x))


def call_back_in_loop(x):
    return jax.lax.fori_loop(0, 3, lambda _, total: total + call_back(x), 0.0)


@pytest.mark.parametrize("body", [print_sum, call_back, call_back_in_loop])
@pytest.mark.parametrize("replicas", [0, 2])
def test_steps_that_call_python_are_refused(body, replicas):
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)]) if replicas else None
    step = rx.function(body if strategy is None else lambda x: strategy.run(body, args=(x,)))
    with pytest.raises(
        PlanError, match=r"calls Python while it runs, by (debug_print|pure_callback) in .*test_plan.py"
    ):
        lowered(step, jnp.ones((4, 4)))


@pytest.mark.parametrize("batch", ["abc", b"abc", None])
def test_batches_without_arrays_are_refused(batch):
    with pytest.raises(PlanError, match="`batch` is the step's arguments: .* got"):
        rx.plan(rx.function(lambda x: x[0]), batch, topology=2)


def test_without_a_compiler_for_tpus_it_says_where_to_get_one(monkeypatch, tmp_path):
    monkeypatch.delenv("REPLICAX_PLAN_PYTHON", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "flatbuffers" else None)
    with pytest.raises(PlanError, match="replicax plan --install tpu.*REPLICAX_PLAN_PYTHON"):
        rx.plan(lambda: None, topology="v5e:2x4")
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without installed libraries
    bare.chmod(0o755)
    monkeypatch.setenv("REPLICAX_PLAN_PYTHON", str(bare))
    with pytest.raises(PlanError, match="it lacks jax, flatbuffers, libtpu. `replicax plan --install tpu`"):
        rx.plan(lambda: None, topology="v5e:2x4")
    monkeypatch.setenv("REPLICAX_PLAN_PYTHON", "/nowhere/python")
    with pytest.raises(PlanError, match="/nowhere/python"):
        rx.plan(lambda: None, topology="v5e:2x4")
    with pytest.raises(ValueError, match="such as 'h100:8'"):
        rx.plan(lambda: None, topology="v5e")


def test_random_keys_have_their_size():
    keys = rx.Variable(jax.random.split(jax.random.key(0), 3), trainable=False)

    def step(key):
        keys.assign(jax.random.split(key, 3))

    inputs = lowered(rx.function(step), jax.random.key(1)).inputs
    assert (inputs.state, inputs.batch) == (3 * 8, 8)  # two numbers of 32 bits each
