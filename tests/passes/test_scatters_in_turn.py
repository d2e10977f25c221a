"""The order of messages for GPUs: the same numbers as without it, and gradients sent as they become ready."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from strategies import compiled, ways

import replicax as rx
from replicax._base.jaxprs import equations
from replicax._collectives import all_reduce
from replicax._passes import pipeline
from replicax._passes.facts import Facts, Stage
from replicax._values import AXIS

LAYERS, WIDTH = 12, 128  # the names of twelve layers do not sort by number


@pytest.fixture
def order_of_gpus(monkeypatch):
    """Return a function after which programs for CPU devices send messages as for GPUs, with so many bytes in turn."""

    def use(size):
        monkeypatch.setattr(all_reduce, "_CPU", all_reduce._GPU._replace(ahead=size))

    return use


def start():
    random = np.random.default_rng(0)
    return {
        f"{name}{i}": (random.normal(size=shape) * 0.1).astype("f4")
        for i in range(LAYERS)
        for name, shape in (("w", (WIDTH, WIDTH)), ("b", (WIDTH,)))
    }


def step_of(way, **options):
    strategy = rx.MirroredStrategy([f"GPU:{i}" for i in range(4)], **options)
    with strategy.scope():
        parameters = rx.Variable(start())
        optimizer = rx.Optimizer(optax.adam(1e-2), parameters)

    def loss_of(values, x):
        for i in range(LAYERS):
            x = x + jnp.tanh(x @ values[f"w{i}"] + values[f"b{i}"])
        return jnp.mean(x**2)

    def replica(x):
        loss, gradients = jax.value_and_grad(loss_of)(parameters.value(), x)
        optimizer.apply_gradients(gradients)
        return loss

    x = np.random.default_rng(1).normal(size=(4, 8, WIDTH)).astype("f4")
    batch = strategy.experimental_distribute_values_from_function(lambda c: jnp.asarray(x[c.replica_id_in_sync_group]))
    step = way(lambda x: strategy.reduce("MEAN", strategy.run(replica, args=(x,)), axis=None))
    return step, batch, (parameters, optimizer.state)


def results(way, **options):
    step, batch, state = step_of(way, **options)
    losses = [np.asarray(step(batch)) for _ in range(3)]
    return losses, [jax.tree.map(np.asarray, variable.numpy()) for variable in state]


@ways
@pytest.mark.parametrize("option", ["shard_variables", "shard_optimizer_state"])
def test_the_order_of_messages_changes_no_number(way, option, order_of_gpus):
    order_of_gpus(0)
    plain = results(way, **{option: True})
    order_of_gpus(1 << 17)  # two of the matrices
    jax.tree.map(np.testing.assert_array_equal, results(way, **{option: True}), plain)


@pytest.mark.parametrize("option", ["shard_variables", "shard_optimizer_state"])
def test_messages_go_in_turn_where_the_platform_wants_it(option, order_of_gpus):
    def barriers():
        step, batch, _ = step_of(compiled, **{option: True})
        return step.lower(batch).as_text().count("optimization_barrier")

    order_of_gpus(0)
    before = barriers()
    order_of_gpus(1 << 17)
    assert barriers() - before >= LAYERS // 2 - 1


def in_turn(closed, message_size):
    packing = all_reduce.Packing(all_reduce._GPU._replace(ahead=message_size), 1, 0, False)
    return pipeline.rewrite(closed, Facts(Stage.FUNCTION, "gpu", optimizes=True, packing=packing))


def scatters(gradients_of, shapes, least):
    """Return the shapes of the reduce-scatters of a program in its order, and how many others each waits for."""
    mesh = jax.sharding.AbstractMesh((4,), (AXIS,))

    def replica(*args):
        gradients = gradients_of(*args)
        return {name: lax.psum_scatter(gradients[name], AXIS, tiled=True) for name in sorted(gradients)}

    mapped = jax.shard_map(replica, mesh=mesh, in_specs=P(), out_specs=P(AXIS), check_vma=False)
    closed = in_turn(jax.make_jaxpr(mapped)(*(jnp.zeros(shape) for shape in shapes)), least)
    eqns = [*equations(closed)]
    waits = {eqn.outvars[0]: len(eqn.invars) - 1 for eqn in eqns if eqn.primitive.name == "optimization_barrier"}
    sent = [eqn.invars[0] for eqn in eqns if eqn.primitive.name == "reduce_scatter"]
    return [(var.aval.shape, waits.get(var, 0)) for var in sent]


def backward(w, x):
    """Return gradients of three layers; the last layer's is ready first, and the cast to float32 comes last."""
    gradients = {}
    for i, columns in ((2, 8), (10, 16), (1, 32)):
        x = x @ w
        gradients[f"w{i}"] = (x[:, :columns].T @ x).astype(jnp.bfloat16)
    return {name: gradients[name].astype(jnp.float32) for name in sorted(gradients)}


def test_gradients_are_sent_in_the_order_in_which_they_are_ready():
    size = 4 * 32  # bytes of a row
    assert scatters(backward, [(32, 32), (64, 32)], least=1) == [((8, 32), 0), ((16, 32), 1), ((32, 32), 1)]
    # The first two together are one message.
    sent = scatters(backward, [(32, 32), (64, 32)], least=9 * size)
    assert sent == [((8, 32), 0), ((16, 32), 0), ((32, 32), 2)]


def test_a_program_with_one_message_stays_as_it_is():
    sent = scatters(backward, [(32, 32), (64, 32)], least=1 << 20)
    assert sent == [((32, 32), 0), ((16, 32), 0), ((8, 32), 0)]  # by the names of the variables


def test_a_sum_that_needs_an_earlier_one_waits_for_it_alone():
    def replica(x):
        first = lax.psum_scatter(x @ x, AXIS, tiled=True)
        again = lax.psum_scatter(jnp.tile(first, (4, 1)) @ x, AXIS, tiled=True)
        return again, first

    mesh = jax.sharding.AbstractMesh((4,), (AXIS,))
    mapped = jax.shard_map(replica, mesh=mesh, in_specs=P(), out_specs=P(AXIS), check_vma=False)
    closed = in_turn(jax.make_jaxpr(mapped)(jnp.zeros((16, 16))), 1)
    assert [eqn.primitive.name for eqn in equations(closed)].count("reduce_scatter") == 2
