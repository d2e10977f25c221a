"""Steps of the benchmarks' models compiled by XLA for TPUs that are not there: their memory and their collectives.

They need `REPLICAX_PLAN_PYTHON` (see docs/how-to/planning.md); `make check` has it.
"""

import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilers import needs_compiler
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax._collectives.sharding import cut_axis
from replicax._plan import apart
from replicax._plan.chips import parse
from replicax._plan.exports import Lowered
from replicax._plan.report import Inputs, report

pytestmark = [
    pytest.mark.thorough,
    needs_compiler("tpu"),
]


def _benchmarks_models():
    path = Path(__file__).parents[2] / "benchmarks" / "models.py"
    spec = importlib.util.spec_from_file_location("benchmarks_models", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


models = _benchmarks_models()
OPS = models.jax_ops()
ROWS = 8  # of each replica


def size_of(parameters):
    return sum(part.size * part.itemsize for part in parameters.values())


def transformation(model):
    kind, rate = model.optimizer
    return {"sgd": optax.sgd(rate), "momentum": optax.sgd(rate, momentum=0.9), "adam": optax.adam(rate)}[kind]


def batch_of(model):
    x, y = models.batch(model, 1)
    return [jax.ShapeDtypeStruct((ROWS, *part.shape[1:]), part.dtype) for part in (x, y)]


def planned(name, topology, split=(), **options):
    """Returns the plan of a model's step, written as users write it; some parameters may be split over "model"."""
    model = models.MODELS[name]
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"], **options)
    with strategy.scope():
        initial = model.parameters()
        for part in split:
            initial[part] = strategy.split_to_devices(jnp.asarray(initial[part]), (None, "model"))
        parameters = rx.Variable(initial, name=name)
        optimizer = rx.Optimizer(transformation(model), parameters)

    def replica_step(x, y):
        replicas = rx.get_strategy().num_replicas_in_sync
        of = lambda p: models.loss(OPS, model, p, x, y, replicas)  # noqa: E731
        loss, gradients = jax.value_and_grad(of)(parameters.value())
        optimizer.apply_gradients(gradients)
        return loss

    @rx.function
    def step(x, y):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    with strategy.scope():
        batch = [rx.PerReplicaSpec(rx.TensorSpec(x.shape, x.dtype)) for x in batch_of(model)]
        (plan,) = rx.plan(step, tuple(batch), topology=topology)
    return plan, model.parameters()


def by_hand(name, topology, sharded=False):
    """Returns the plan of the step that a user of JAX writes: `jax.jit`, and shardings of its arguments."""
    model, devices = models.MODELS[name], parse(topology)
    mesh = AbstractMesh((devices.size,), ("replica",), (AxisType.Auto,))
    update, parameters = transformation(model), model.parameters()

    def step(leaves, x, y):
        parameters, inner = jax.tree.unflatten(tree, leaves)
        loss, gradients = jax.value_and_grad(lambda p: models.loss(OPS, model, p, x, y, 1))(parameters)
        updates, inner = update.update(gradients, inner, parameters)
        return jax.tree.leaves((optax.apply_updates(parameters, updates), inner)), loss

    def kind(x, spec, rows=1):
        shape = (rows * x.shape[0], *x.shape[1:]) if rows > 1 else x.shape
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec))

    def spec(x):
        axis = cut_axis(x, devices.size) if sharded else None
        return P() if axis is None else P(*[None] * axis, "replica")

    state = jax.eval_shape(lambda: (jax.tree.map(jnp.asarray, parameters), update.init(parameters)))
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda x: kind(x, spec(x)), state))
    batch = [kind(x, P("replica"), devices.size) for x in batch_of(model)]
    exported = export.export(jax.jit(step, donate_argnums=0), platforms=["tpu"])(leaves, *batch)
    specs = [list(leaf.sharding.spec) for leaf in leaves] + [["replica"] for _ in batch]
    lowered = Lowered(
        bytes(exported.serialize()), {"replica": devices.size}, specs, list(range(len(leaves))), devices.size, Inputs()
    )
    return report(devices, devices.size, Inputs(), apart.compile_apart(lowered, devices))


@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x4"])
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_a_mirrored_step_needs_no_more_than_one_by_hand(name, topology):
    plan, parameters = planned(name, topology)
    best = by_hand(name, topology)
    whole = size_of(parameters)
    assert plan.fits and plan.replicas == parse(topology).size
    assert (plan.memory.variables, plan.memory.state // whole) == (whole, 2 if name == "transformer" else 0)
    assert plan.memory.arguments <= best.memory.arguments
    assert plan.memory.temporaries <= 1.02 * best.memory.temporaries
    assert {each.kind for each in plan.collectives} == {"all-reduce"}
    assert sum(each.bytes for each in plan.collectives) == whole + 4  # the gradients, and the loss
    assert len(plan.collectives) <= len(best.collectives)
    assert max(plan.bounds.values()) > 0


def total(plan, kind):
    return sum(each.bytes for each in plan.collectives if each.kind == kind)


def cut_bytes(parameters, devices):
    """Returns the bytes of the parameters that are divided among so many devices."""
    return size_of({name: part for name, part in parameters.items() if cut_axis(part, devices) is not None})


@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x4"])
def test_sharded_variables_take_a_part_on_each_device(topology):
    devices = parse(topology).size
    plan, parameters = planned("transformer", topology, shard_variables=True)
    cut, whole = cut_bytes(parameters, devices), size_of(parameters)
    parts = whole - cut + cut // devices
    assert (plan.memory.variables, plan.memory.state) == (parts, 2 * parts + 4)  # Adam's moments, and its count
    # In bfloat16, of which matrix products are: each once for its use, and some again for the gradients.
    assert cut / 2 <= total(plan, "all-gather") <= cut
    small = whole - cut + 4  # with the loss
    if topology == "v5e:2x4":
        assert (total(plan, "reduce-scatter"), total(plan, "all-reduce")) == (cut, small)
        assert any(each.overlaps for each in plan.collectives)
        return
    # For so few bytes XLA reduces all, and each device keeps its part; what is written by hand is compiled so too.
    assert (total(plan, "reduce-scatter"), total(plan, "all-reduce")) == (0, cut + small)
    best = by_hand("transformer", topology, sharded=True)
    assert plan.memory.arguments == best.memory.arguments
    assert plan.memory.temporaries <= 1.02 * best.memory.temporaries
    assert len(plan.collectives) <= len(best.collectives)


def test_sharded_state_takes_a_part_on_each_device():
    plan, parameters = planned("transformer", "v5e:2x4", shard_optimizer_state=True)
    cut, whole = cut_bytes(parameters, 8), size_of(parameters)
    assert plan.memory.variables == whole
    assert plan.memory.state == 2 * (whole - cut + cut // 8) + 4
    assert cut <= total(plan, "all-gather") <= 1.01 * cut  # the new parameters


@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x4"])
def test_weights_are_divided_among_the_devices_of_a_replica(topology):
    devices = parse(topology).size
    plan, parameters = planned("mlp", topology, split=("w0", "w1"), devices_per_replica=2)
    split = parameters["w0"].nbytes + parameters["w1"].nbytes
    assert plan.replicas == devices // 2 and plan.memory.variables == size_of(parameters) - split // 2
    assert {each.devices for each in plan.collectives} <= {2, devices // 2, devices}
    assert any(each.devices == devices // 2 and each.kind == "all-reduce" for each in plan.collectives)


def test_a_step_that_is_too_large_says_what_it_needs():
    with rx.experimental.abstract_variables():
        table = rx.Variable(lambda: jnp.zeros((1 << 16, 1 << 16)), name="table")  # 16 GiB

    @rx.function
    def step(x):
        return jnp.tanh(table.value() @ table.value()).sum() + x

    (plan,) = rx.plan(step, np.float32(1), topology="v5e:1x1")
    assert not plan.fits and "available HBM" in plan.error
    assert plan.needed > plan.available > 15 * 2**30


def test_the_tables_that_the_tutorial_has_recorded_are_those_of_the_compiler():
    page = (Path(__file__).parents[2] / "docs" / "tutorials" / "planning.md").read_text()
    names = {}
    (definitions,) = re.findall(r"```{code-cell}\n(import jax\n.*?def training.*?)```", page, re.DOTALL)
    exec(definitions, names)
    exec("\n".join(re.findall(r"^(?:LARGE|large_step|sharded_large_step).*", page, re.MULTILINE)), names)
    calls = re.findall(r"^print\((rx\.plan\(\w*large_step, .*\))\)$", page, re.MULTILINE)
    recorded = re.findall(r"```text\n(plan of .*?)```", page, re.DOTALL)
    assert len(calls) == len(recorded) == 2
    for call, table in zip(calls, recorded):
        assert _without_times(str(eval(call, names))) == _without_times(table)


def _without_times(table):
    return [line.rstrip() for line in table.strip().splitlines() if not line.startswith("compiled in")]
