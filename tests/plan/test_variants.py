"""`rx.plan(..., compare=True)`: a step under other options of its strategy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from replicax._base.planning import PlanError
from replicax._plan import pool, variants
from replicax._plan.chips import parse
from replicax._plan.lowering import Step
from replicax._plan.report import TopologyPlan

DIVIDED, SMALL = 4 * 64 * 128, 4 * 128  # bytes of the weights, which can be divided, and of the bias, which stays whole
ON_READ = {"synchronization": rx.VariableSynchronization.ON_READ, "aggregation": rx.VariableAggregation.MEAN}


def bytes_of(variables_divided, state_divided, replicas):
    """The bytes of variables and of Adam's state on a device: two moments of each variable, and a count."""
    part = DIVIDED // replicas
    variables = (part if variables_divided else DIVIDED) + SMALL
    return variables, 2 * ((part if state_divided else DIVIDED) + SMALL) + 4


def training(strategy, **options):
    """A step and its variables; `options` are those of the weights."""
    with strategy.scope():
        model = [rx.Variable(jnp.zeros((64, 128)), name="w", **options), rx.Variable(jnp.zeros(128), name="b")]
        optimizer = rx.Optimizer(optax.adam(1e-3), model)

    @rx.function
    def step():
        def replica_step():
            with rx.GradientTape() as tape:
                loss = jnp.sum(jnp.tanh(jnp.ones((4, 64)) @ model[0].value() + model[1].value()))
            optimizer.apply_gradients(tape.gradient(loss, model))

        strategy.run(replica_step)

    return step, model, optimizer


def plan_of(topology, needed, least_time=None, available=None):
    bounds = {} if least_time is None else {"computation": least_time}
    return TopologyPlan(topology, 8, None, needed, available, (), 0.0, 0.0, 0.0, (), bounds=bounds)


@pytest.fixture
def programs(monkeypatch):
    """The programs that are compiled, of which only the inputs are measured."""
    found = []

    def measure(lowered, topology, settings, *_):
        found.append(lowered)
        return plan_of(topology.name, lowered.inputs.variables + lowered.inputs.state)

    monkeypatch.setattr(pool, "compile_one", measure)
    return found


def compare(step, *topologies):
    return variants.compare(Step(step, ()), [parse(topology) for topology in topologies], pool.Settings())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("options", [{}, {"shard_variables": True}, {"shard_optimizer_state": True}])
def test_each_variant_is_the_program_with_these_options(programs, options, replicas):
    step, model, optimizer = training(rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)], **options))
    state = optimizer.state
    plans, found = compare(step, 8, 4)
    assert [plan.topology for plan in plans] == ["cpu:8", "cpu:4"] and len(programs) == 3 * 2
    divided = {
        "replicated": (False, False),
        "shard_optimizer_state": (False, True),
        "shard_variables": (True, True),
        "both": (True, True),
    }
    for name, parts in divided.items():
        for size in (8, 4):
            assert found[name][size].needed == sum(bytes_of(*parts, size)), (name, size)
    (as_it_is,) = options or ["replicated"]
    marked = [name for name, variant in found.items() if variant.change == "as it is"]
    assert marked == ["shard_variables", "both"] if as_it_is == "shard_variables" else [as_it_is]
    assert [plan.needed for plan in plans] == [found[as_it_is][size].needed for size in (8, 4)]
    # The program goes on as it is.
    assert optimizer.state is state and model[0]._storage.home.is_cut == ("shard_variables" in options and replicas > 1)
    before = model[1].numpy()
    step()
    assert np.all(model[1].numpy() < before)


def test_variants_are_compiled_and_printed_best_first():
    step, _, _ = training(rx.MirroredStrategy(["CPU:0", "CPU:1"]))
    plan = rx.plan(step, topology=8, compare=True)
    assert plan[8].memory.variables == DIVIDED + SMALL
    for name, parts in {"shard_optimizer_state": (False, True), "both": (True, True)}.items():
        memory = plan.variants[name][8].memory
        assert (memory.variables, memory.state) == bytes_of(*parts, 8)
    # What the program is compiled to with the option itself.
    changed, _, _ = training(rx.MirroredStrategy(["CPU:0", "CPU:1"], shard_variables=True))
    expected = rx.plan(changed, topology=8)[8]
    found = plan.variants["shard_variables"][8]
    assert found.memory == expected.memory and found.needed < plan[8].needed
    assert [(x.kind, x.bytes) for x in found.collectives] == [(x.kind, x.bytes) for x in expected.collectives]
    with pytest.raises(KeyError, match="for cpu:8, not for 4"):
        plan.variants["both"][4]
    table = str(plan)[str(plan).index("variants on cpu:8") :].splitlines()
    assert [line.split()[0] for line in table[2:]] == ["shard_variables", "both", "shard_optimizer_state", "replicated"]
    assert table[2].endswith("  MirroredStrategy(..., shard_variables=True)")
    assert table[3].endswith("shard_optimizer_state=True, shard_variables=True), as shard_variables")
    assert table[-1].endswith("  as it is")


def test_a_change_names_what_is_given_and_what_is_left_out(programs):
    step, _, _ = training(rx.MultiWorkerMirroredStrategy())
    _, found = compare(step, 8)
    assert found["shard_variables"].change == "MultiWorkerMirroredStrategy(..., shard_variables=True)"
    whole = rx.MirroredStrategy(["CPU:0", "CPU:1"], shard_variables=lambda shape, dtype: [1] * len(shape))
    step, _, _ = training(whole)
    plans, found = compare(step, 8)
    assert found["shard_optimizer_state"].change == (
        "MirroredStrategy(..., shard_optimizer_state=True) without shard_variables"
    )
    assert found["replicated"].change == "as it is"  # by this rule nothing is divided


def test_the_first_of_a_table_fits_and_takes_the_least_time():
    plans = {
        "replicated": plan_of("v5e:2x4", 20, 1.0, available=16),
        "shard_optimizer_state": plan_of("v5e:2x4", 12, 3.0, available=16),
        "shard_variables": plan_of("v5e:2x4", 4, 2.0, available=16),
        "both": plan_of("v5e:2x4", 3, 2.0, available=16),
    }
    found = {name: variants.Variant(name, "the change", (plan,)) for name, plan in plans.items()}
    text = variants.text([plan_of("v5e:2x4", 9, 2.5, available=16)], found)
    lines = [line.split() for line in text.splitlines()[3:]]
    assert [(line[0], line[1]) for line in lines] == [
        ("both", "yes"),
        ("shard_variables", "yes"),
        ("as", "it"),
        ("shard_optimizer_state", "yes"),
        ("replicated", "NO"),
    ]


def test_options_that_the_strategy_or_the_step_cannot_have_are_named(programs):
    pairs = rx.MirroredStrategy([f"CPU:{i}" for i in range(4)], devices_per_replica=2)
    plans, found = compare(training(pairs)[0], 8)
    refused = found["shard_optimizer_state"]
    assert not refused.topologies and "here each replica has 2" in refused.error
    assert "shard_optimizer_state is not possible: ValueError: " in variants.text(plans, found)
    assert found["shard_variables"][8].needed == sum(bytes_of(True, True, 4))
    hierarchical = rx.MirroredStrategy(["CPU:0", "CPU:1"], rx.HierarchicalCopyAllReduce())
    _, found = compare(training(hierarchical)[0], 8)
    assert "cross_device_ops is NcclAllReduce(...) or None" in found["shard_optimizer_state"].error
    _, found = compare(training(rx.MirroredStrategy(["CPU:0", "CPU:1"]), trainable=True, **ON_READ)[0], 8)
    assert "takes variables that have a copy on each replica" in found["shard_optimizer_state"].error
    assert found["replicated"].change == "as it is" and not found["shard_variables"].error


def test_a_variant_that_does_not_compile_leaves_the_others(programs, monkeypatch):
    measure = pool.compile_one

    def refuse(lowered, topology, settings, *_):
        if lowered.inputs.variables < DIVIDED:
            raise PlanError("Compiling has taken longer than 60 s.\nand more")
        return measure(lowered, topology, settings)

    monkeypatch.setattr(pool, "compile_one", refuse)
    step, _, _ = training(rx.MirroredStrategy(["CPU:0", "CPU:1"]))
    plans, found = compare(step, 8)
    assert found["both"].error == found["shard_variables"].error == "Compiling has taken longer than 60 s."
    assert found["replicated"][8] is plans[0] and not found["shard_optimizer_state"].error
    divided, _, _ = training(rx.MirroredStrategy(["CPU:0", "CPU:1"], shard_variables=True))
    with pytest.raises(PlanError, match="longer than 60 s"):
        compare(divided, 8)


def test_copies_that_may_differ_are_divided_in_no_variant(programs):
    step, _, _ = training(rx.MirroredStrategy(["CPU:0", "CPU:1"]), copies_may_differ=True)
    _, found = compare(step, 8)
    variables, state = bytes_of(False, True, 8)
    assert found["shard_variables"][8].needed == variables + state  # the state is one for all replicas


def test_a_step_without_a_strategy_has_no_variants():
    v = rx.Variable(jnp.zeros(3))
    with pytest.raises(PlanError, match="has no variants to compare.*scope of a MirroredStrategy"):
        compare(rx.function(lambda: v.assign_add(jnp.ones(3))), 8)
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(PlanError, match="has no variants to compare"):
        compare(rx.function(lambda: strategy.run(lambda: jnp.ones(3))), 8)
    with pytest.raises(PlanError, match="has no variants to compare"):
        rx.plan(jax.jit(lambda x: x + 1), jnp.ones(3), topology=1, compare=True)


def test_variables_of_keras_are_compared(programs):
    keras = pytest.importorskip("keras")
    strategy = rx.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, use_bias=False)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)

    @rx.function
    def step():
        strategy.run(lambda: optimizer.apply([jnp.ones((64, 128))]))

    _, found = compare(step, 8)
    assert len(programs) == 2
    assert found["shard_optimizer_state"].change == "as it is"  # which has no effect on Keras's optimizers
    saved = found["replicated"][8].needed - found["shard_variables"][8].needed
    assert saved == 2 * DIVIDED * 7 // 8


def test_a_tree_of_variables_and_its_optimizer_in_a_jit_are_compared(programs):
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope(), rx.experimental.abstract_variables():
        model = rx.Variable(lambda: {"w": jnp.zeros((64, 128)), "b": jnp.zeros(128)})
        optimizer = rx.Optimizer(optax.adam(1e-3), model)

    @rx.function
    def step():
        strategy.run(lambda: optimizer.apply_gradients(jax.jit(lambda m: m)(model.value())))

    _, found = compare(step, 8)
    assert found["shard_optimizer_state"][8].needed == sum(bytes_of(False, True, 8))
    assert found["both"][8].needed == sum(bytes_of(True, True, 8))
