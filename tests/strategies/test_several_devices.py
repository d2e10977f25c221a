"""Replicas of several devices under MirroredStrategy: the devices, layouts, what is where, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import (
    SHAPES,
    check_refused,
    compiled,
    ctx,
    grouped,
    mirrored,
    one_device,
    per_replica,
    replica_id,
    virtual_tpus,
    ways,
)

import replicax as rx
from replicax._benchmark import hlo
from replicax._values import global_array

MEAN, SUM = rx.VariableAggregation.MEAN, rx.VariableAggregation.SUM


def shards(array: jax.Array) -> set[tuple[int, ...]]:
    """The shapes that the devices hold of an array."""
    return {shard.data.shape for shard in array.addressable_shards}


def bytes_on_devices(variable: rx.Variable) -> set[int]:
    """The bytes that each device holds of all leaves of a variable."""
    held: dict[jax.Device, int] = {}
    for leaf in variable._storage.read():
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return set(held.values())


# --- the devices -----------------------------------------------------------------------------------------------------


def test_a_replica_has_consecutive_devices_and_is_called_after_the_first():
    strategy = rx.MirroredStrategy(["GPU:3", "GPU:2", "GPU:0", "GPU:1"], devices_per_replica=2)
    assert strategy.num_replicas_in_sync == 2
    assert [name[-5:] for name in strategy.extended.worker_devices] == ["GPU:3", "GPU:0"]
    assert repr(strategy) == "MirroredStrategy([['GPU:3', 'GPU:2'], ['GPU:0', 'GPU:1']])"
    assert strategy.extended.experimental_require_static_shapes
    assert not rx.MirroredStrategy(["GPU:0"], devices_per_replica=1).extended.experimental_require_static_shapes


def test_all_devices_are_grouped_by_default():
    assert rx.MirroredStrategy(devices_per_replica={"expert": 2, "model": 2}).num_replicas_in_sync == 2
    assert rx.MirroredStrategy(["CPU:0", "CPU:1"], devices_per_replica=2).num_replicas_in_sync == 1


def test_axes_are_named():
    strategy = grouped(2, expert=2, model=2)
    x = strategy.split_to_devices(np.arange(64.0, dtype=np.float32).reshape(8, 8), ("expert", "model"))
    assert shards(x) == {(4, 4)}
    assert shards(strategy.split_to_devices(x, (("expert", "model"),))) == {(2, 8)}
    assert shards(strategy.split_to_devices(x, [None, ["model"]])) == {(8, 4)}
    assert shards(strategy.split_to_devices(x, jax.sharding.PartitionSpec(None, "expert"))) == {(8, 4)}
    assert shards(strategy.split_to_devices(x, ())) == {(8, 8)}


@pytest.mark.parametrize(
    ("error", "match", "devices_per_replica"),
    [
        (rx.DeviceError, "A replica has 3 devices .* does not divide the 8 devices that there are", 3),
        (TypeError, "is a number of devices, or a mapping .* got '2' of type str", "2"),
        (TypeError, "got True", True),
        (TypeError, "got {'model': 2.0}", {"model": 2.0}),
        (ValueError, "numbers from 1 on, and one at least; got 0", 0),
        (ValueError, "one at least; got {}", {}),
        (ValueError, "called by an identifier that is not 'replica'.*got 'replica'", {"replica": 2}),
        (ValueError, "got 'my axis'", {"my axis": 2}),
    ],
)
def test_devices_that_cannot_be_a_replica(error, match, devices_per_replica):
    with pytest.raises(error, match=match):
        rx.MirroredStrategy(devices_per_replica=devices_per_replica)


def test_options_for_replicas_of_one_device_are_refused():
    with pytest.raises(ValueError, match="replicas of one device each, and here each replica has 2"):
        rx.MirroredStrategy(devices_per_replica=2, shard_optimizer_state=True)
    with pytest.raises(ValueError, match="`cross_device_ops` combines values of replicas of one device each"):
        rx.MirroredStrategy(cross_device_ops=rx.NcclAllReduce(), devices_per_replica=2)


def test_a_multi_worker_strategy_of_one_worker_has_them_too():
    strategy = rx.MultiWorkerMirroredStrategy(devices_per_replica={"model": 4})
    assert strategy.num_replicas_in_sync == 2
    assert shards(strategy.split_to_devices(np.ones((4, 4)), (None, "model"))) == {(4, 1)}


def test_a_tpu_strategy_names_the_axes_of_its_logical_devices():
    virtual_tpus()
    assert rx.TPUStrategy(devices_per_replica={"model": 4}).num_replicas_in_sync == 2
    shape = SHAPES[4]
    quads = rx.tpu.DeviceAssignment.build(rx.tpu.initialize_tpu_system(), computation_shape=shape, num_replicas=2)
    strategy = rx.TPUStrategy(experimental_device_assignment=quads, devices_per_replica={"expert": 2, "model": 2})
    assert shards(strategy.split_to_devices(np.ones((4, 4)), (None, "model"))) == {(4, 2)}
    assert shards(strategy.experimental_split_to_logical_devices(np.ones((4, 4)), [1, 4])) == {(4, 1)}
    with pytest.raises(ValueError, match="is 2, and the device assignment gives each replica 4"):
        rx.TPUStrategy(experimental_device_assignment=quads, devices_per_replica=2)
    strategy = rx.TPUStrategy(experimental_device_assignment=quads, devices_per_replica=4)
    with pytest.raises(ValueError, match=r"axes {'model': 4}, which do not split dimensions in \[2, 2\] parts"):
        strategy.experimental_split_to_logical_devices(np.ones((4, 4)), [2, 2])


# --- layouts ---------------------------------------------------------------------------------------------------------


@ways
def test_what_layouts_refuse(way):
    strategy = grouped(2, expert=2, model=2)
    x = jnp.ones((4, 6))
    refused = functools.partial(check_refused, strategy, way)
    split = strategy.split_to_devices
    known = r"have these axes: 'expert' \(of 2\), 'model' \(of 2\)"
    refused(ValueError, f"names the axis 'modl' for dimension 1, .* {known}", lambda: split(x, (None, "modl")))
    refused(ValueError, "names the axis 'replica'", lambda: split(x, ("replica",)))
    refused(ValueError, "names the axis 'model' twice", lambda: split(x, ("model", "model")))
    refused(ValueError, "got 3 entries.* for the shape", lambda: split(x, (None, None, "model")))
    refused(
        ValueError, "Dimension 1 .* is 6, which cannot be divided in 4", lambda: split(x, (None, ("expert", "model")))
    )
    refused(TypeError, "None or the name of an axis .* got 'model' of type str", lambda: split(x, "model"))
    refused(TypeError, "a tuple of names; got 2 of type int", lambda: split(x, (None, 2)))
    refused(ValueError, "lower than .* which is 4; got 4", lambda: strategy.assign_to_device(x, 4))


@pytest.mark.parametrize("make", [one_device, lambda: mirrored(2), rx.get_strategy])
@ways
def test_where_a_replica_has_one_device_nothing_is_split(make, way):
    """One model runs under all strategies."""
    strategy = make()

    def replica():
        x = strategy.split_to_devices(jnp.arange(3.0), ("model",))
        return strategy.assign_to_device(strategy.replicate_to_devices(x), 0)

    result = way(lambda: strategy.run(replica))()
    assert [part.tolist() for part in strategy.experimental_local_results(result)][0] == [0, 1, 2]
    assert strategy.split_to_devices(np.arange(3.0), ("model",)).tolist() == [0, 1, 2]


def test_an_axis_of_one_device_is_known_by_its_name():
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"], devices_per_replica={"model": 1})
    assert strategy.split_to_devices(jnp.arange(3.0), ("model",)).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"these axes: 'model' \(of 1\)"):
        strategy.split_to_devices(jnp.arange(3.0), ("modl",))


def test_uneven_batches_are_refused_with_the_way_out():
    strategy = grouped(2, model=2)
    uneven = per_replica(strategy, [np.ones(2), np.ones(3)])
    with pytest.raises(rx.InvalidArgumentError, match=r"replica 0: \(2,\), replica 1: \(3,\).*drop_remainder=True"):
        strategy.run(lambda x: x, args=(uneven,))


# --- training --------------------------------------------------------------------------------------------------------

WIDTH, HEADS, LENGTH = 16, 4, 4


def block_parameters() -> dict[str, Any]:
    random = np.random.default_rng(0)

    def kernel(*shape):
        return (random.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    return {
        **{name: kernel(WIDTH, WIDTH) for name in ("query", "key", "value", "out")},
        "up": kernel(WIDTH, 4 * WIDTH),
        "up_bias": np.zeros(4 * WIDTH, np.float32),
        "down": kernel(4 * WIDTH, WIDTH),
    }


COLUMNS, ROWS = (None, "model"), ("model", None)
LAYOUTS = dict.fromkeys(("query", "key", "value", "up"), COLUMNS) | {
    "up_bias": ("model",),
    "out": ROWS,
    "down": ROWS,
}


def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A transformer's block, [batch, length, width] each way."""

    def normal(x):
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)

    heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
    q, k, v = (jnp.reshape(normal(x) @ p[name], heads) for name in ("query", "key", "value"))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(normal(x) @ p["up"] + p["up_bias"]) @ p["down"]


def block_under(strategy: rx.Strategy) -> tuple[rx.Variable, rx.Optimizer, Any]:
    """A block's parameters, split, their optimizer, and the batches of two replicas."""
    laid_out = {name: strategy.split_to_devices(x, LAYOUTS[name]) for name, x in block_parameters().items()}
    with strategy.scope():
        parameters = rx.Variable(laid_out)
        optimizer = rx.Optimizer(optax.trace(0.9), parameters, "MEAN")
    x = np.random.default_rng(1).normal(size=(2, 2, LENGTH, WIDTH)).astype(np.float32)
    return parameters, optimizer, per_replica(strategy, x)


def trained(strategy: rx.Strategy, way: Any) -> tuple[Any, Any, Any]:
    """The losses of two steps, and the parameters and state after them."""
    parameters, optimizer, x = block_under(strategy)

    def replica(x):
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean(block(p, x) ** 2))(parameters.value())
        optimizer.apply_gradients(jax.tree.map(lambda g: -0.1 * g, gradients))
        return loss

    step = way(lambda x: strategy.run(replica, args=(x,)))
    losses = [[float(part) for part in step(x).values] for _ in range(2)]
    return losses, parameters, optimizer.state


@pytest.mark.numbers
@ways
@pytest.mark.parametrize("size", [2, 4])
def test_a_block_trains_as_on_one_device_a_replica(way, size):
    losses, parameters, state = trained(grouped(2, model=size), way)
    expected_losses, expected, expected_state = trained(mirrored(2), compiled)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    for mine, theirs in ((parameters, expected), (state, expected_state)):
        for one, other in zip(jax.tree.leaves(mine.numpy()), jax.tree.leaves(theirs.numpy())):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    # Each device has its part of all that is split, of the optimizer's state too.
    whole = sum(x.nbytes for x in block_parameters().values())
    for variable in (parameters, state):
        assert bytes_on_devices(variable) == {whole // size}


def collectives(function: Any, *args: Any) -> list[tuple[str, int]]:
    """The collectives of a function's program, and how many arrays each carries."""
    found = hlo.collectives(function.lower(*args).compile().as_text())
    return [(one.kind, len(one.arrays)) for one in found]


def test_a_forward_pass_has_one_all_reduce_for_each_half_of_a_block():
    strategy = grouped(2, model=2)
    parameters, _, x = block_under(strategy)
    forward = rx.function(lambda x: strategy.run(lambda x: block(parameters.value(), x), args=(x,)))
    assert collectives(forward, x) == [("all-reduce", 1)] * 2


def test_gradients_travel_in_parts_between_the_replicas():
    """No device brings the parts of a gradient together, and none sends more than its part."""
    strategy = grouped(2, model=2)
    parameters, optimizer, x = block_under(strategy)

    def replica(x):
        optimizer.apply_gradients(jax.grad(lambda p: jnp.mean(block(p, x) ** 2))(parameters.value()))

    step = rx.function(lambda x: strategy.run(replica, args=(x,)))
    found = hlo.collectives(step.lower(x).compile().as_text())
    assert {one.kind for one in found} == {"all-reduce"}
    activations = {(2, LENGTH, WIDTH)}
    carried = [shape for one in found for _, shape in one.arrays if shape not in activations]
    parts = [x.size // 2 for x in block_parameters().values()]
    assert sorted(int(np.prod(shape)) for shape in carried) == sorted(parts)


def test_values_of_eager_replicas_meet_whole():
    strategy = grouped(2, model=2)
    w = strategy.split_to_devices(np.arange(8.0, dtype=np.float32), ("model",))
    with strategy.scope():
        v = rx.Variable(w, aggregation=SUM)
    results = strategy.run(lambda: ctx().all_reduce("SUM", v.assign(v * (replica_id() + 1))))
    assert results.values[0].tolist() == (2 * 3 * np.arange(8.0)).tolist()
    assert shards(v.value()) == {(4,)} and shards(global_array(strategy.run(lambda: v.value() + 0))) == {(1, 8)}


def test_a_step_of_jax_jit_is_split_too():
    strategy = grouped(2, model=2)
    x = per_replica(strategy, [np.ones((2, 4), np.float32)] * 2)
    step = jax.jit(lambda x: strategy.run(lambda x: strategy.split_to_devices(x * 2, (None, "model")), args=(x,)))
    assert shards(global_array(step(x))) == {(1, 2, 2)}


def test_two_strategies_split_the_same_devices_each_in_its_way():
    pairs, quads = grouped(2, model=2), grouped(2, model=4)
    with pairs.scope():
        v = rx.Variable(pairs.split_to_devices(jnp.ones((4, 4)), (None, "model")))
    with quads.scope():
        w = rx.Variable(quads.split_to_devices(v.value(), (None, "model")))
    assert shards(v.value()) == {(4, 2)} and shards(w.value()) == {(4, 1)}


def test_a_checkpoint_is_restored_under_other_layouts(tmp_path):
    """A checkpoint holds whole values, which any layout takes."""
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)

    def variable(strategy, layout):
        with strategy.scope():
            return rx.Variable(strategy.split_to_devices(np.zeros((8, 8), np.float32), layout))

    split = variable(grouped(2, model=2), (None, "model"))
    split.assign(values)
    path = rx.train.Checkpoint(w=split).save(str(tmp_path / "a"))
    for strategy, layout, part in (
        (grouped(2, model=4), ("model", None), (2, 8)),
        (grouped(2, expert=2, model=2), ("model", "expert"), (4, 4)),
        (grouped(4, model=2), (), (8, 8)),
        (mirrored(2), (), (8, 8)),
    ):
        other = variable(strategy, layout)
        rx.train.Checkpoint(w=other).restore(path)
        np.testing.assert_array_equal(other.numpy(), values)
        assert shards(other._storage.read()[0]) == {part}


# --- rules -----------------------------------------------------------------------------------------------------------

RULES = {"(query|key|value|up)$": COLUMNS, "up_bias": ("model",), "(out|down)$": ROWS}


def ruled(rules: Any, replicas: int = 2, **axes: int) -> rx.MirroredStrategy:
    """A strategy with rules, whose replicas have two devices if nothing else is given."""
    axes = axes or {"model": 2}
    names = [f"GPU:{i}" for i in range(replicas * int(np.prod(list(axes.values()))))]
    return rx.MirroredStrategy(names, devices_per_replica=axes, sharding_rules=rules)


def layouts(variable: rx.Variable) -> dict[str, Any]:
    """The layouts of a variable's leaves by their paths."""
    leaves = jax.tree.leaves_with_path(variable.value())
    return {jax.tree_util.keystr(path, simple=True): tuple(leaf.sharding.spec) for path, leaf in leaves}


@pytest.mark.parametrize("make", [block_parameters, lambda: block_parameters], ids=["arrays", "a function"])
def test_a_pytree_is_split_by_rules_and_its_optimizers_state_as_it_is(make):
    strategy = ruled(RULES)
    with strategy.scope():
        parameters = rx.Variable(make(), name="block")
        optimizer = rx.Optimizer(optax.adam(1e-3), parameters)
        state = optimizer.state.value()
    assert layouts(parameters) == LAYOUTS
    for moments in (state[0].mu, state[0].nu):
        assert {name: tuple(leaf.sharding.spec) for name, leaf in moments.items()} == LAYOUTS
    whole = sum(x.nbytes for x in block_parameters().values())
    assert bytes_on_devices(parameters) == {whole // 2} and bytes_on_devices(optimizer.state) == {whole + 4}


def test_state_that_is_no_copy_of_a_variable_is_whole():
    """Adafactor's factored moments have other shapes; a state may also be made without looking at the arrays."""
    strategy = ruled({"w": (None, "model")})
    with strategy.scope():
        w = rx.Variable(np.ones((256, 128), np.float32), name="w")
        factored = rx.Optimizer(optax.adafactor(1e-3), w)

        def init(parameters):
            return {"first": jnp.zeros(parameters.shape), "count": np.zeros((), np.int32)}

        made = rx.Optimizer(optax.GradientTransformation(init, lambda updates, state, _: (updates, state)), w)
    assert {leaf.sharding.spec for leaf in factored.state._storage.read()} == {jax.sharding.PartitionSpec()}
    assert layouts(made.state) == {"first": COLUMNS, "count": ()}

    def replica():
        factored.apply_gradients(w.value() * 1.0)
        made.apply_gradients(w.value() * 1.0)

    rx.function(lambda: strategy.run(replica))()
    assert layouts(w) == {"": COLUMNS} and layouts(made.state) == {"first": COLUMNS, "count": ()}


def test_the_first_rule_that_is_found_counts():
    strategy = ruled({"a/w": ("model",), "w$": (None, "model"), "": ()})
    with strategy.scope():
        v = rx.Variable({"a": {"w": np.ones((4, 4))}, "b": {"w": np.ones((4, 4)), "c": np.ones(3)}})
    assert layouts(v) == {"aw": ROWS[:1], "bw": COLUMNS, "bc": ()}


def test_what_is_split_by_hand_stays_so():
    strategy = ruled({"w": (None, "model")})
    with strategy.scope():
        w = rx.Variable(strategy.split_to_devices(np.ones((4, 4), np.float32), ("model",)), name="w")
    assert layouts(w) == {"": ("model",)}


def test_values_of_each_replica_are_not_split():
    strategy = ruled({"w": ("model",)})
    with strategy.scope():
        w = rx.Variable(np.ones(3), name="w", synchronization=rx.VariableSynchronization.ON_READ, aggregation=SUM)
        rx.Variable(np.ones(4), name="w")
    assert strategy.run(lambda: w.assign_add(np.ones(3))).values[0].tolist() == [2] * 3


@ways
def test_a_pattern_that_counts_for_no_variable_is_an_error_when_the_model_is_there(way):
    strategy = ruled({"atention/w": ("model",), "w": ("model",), "attention/b": ("model",), "tention/w": ()})
    way(lambda: strategy.run(lambda: jnp.ones(())))()  # there is no model yet
    with strategy.scope():
        v = rx.Variable({"w": np.ones(4), "b": np.ones(4)}, name="attention")
    match = (
        r"count for no variable: 'atention/w', 'tention/w'. The variables .* are: attention/b, attention/w. Every name "
        r"in which 'tention/w' is found belongs to an earlier rule, 'w': put the more particular rule first."
    )
    with pytest.raises(ValueError, match=match):
        way(lambda: strategy.run(lambda: v.value()["w"] * 1))()
    way(lambda: strategy.run(lambda: v.value()["w"] * 1))()  # said once


@pytest.mark.parametrize(
    ("error", "match", "rules"),
    [
        (TypeError, "mapping from regular expressions to dimensions.*got 'w' of type str", "w"),
        (TypeError, "mapping from regular expressions", {1: ("model",)}),
        (TypeError, r"`sharding_rules`\['w'\] is a tuple with None or the name .*got 'model'", {"w": "model"}),
        (TypeError, r"of `sharding_rules`\['w'\] a dimension has None.*got 2 of type int", {"w": (2,)}),
        (ValueError, r"the pattern '\(' is no regular expression: ", {"(": ("model",)}),
        (ValueError, r"of `sharding_rules`\['w'\] names the axis 'modl' .* axes: 'model' \(of 2\)", {"w": ("modl",)}),
        (ValueError, "names the axis 'model' twice", {"w": ("model", "model")}),
    ],
)
def test_rules_that_cannot_be(error, match, rules):
    with pytest.raises(error, match=match):
        ruled(rules)


def test_rules_that_do_not_fit_a_variable():
    strategy = ruled({"w": (None, "model")})
    with strategy.scope():
        with pytest.raises(
            ValueError, match=r"Dimension 1 of the variable 'a/w' \(`sharding_rules`\['w'\]\), of shape"
        ):
            rx.Variable({"w": np.ones((4, 3))}, name="a")
        with pytest.raises(
            ValueError, match=r"the variable 'w' .* at the most; got 2 entries, .* for the shape \(4,\)"
        ):
            rx.Variable(np.ones(4), name="w")


@pytest.mark.parametrize("axes", [{}, {"devices_per_replica": {"model": 1}}])
def test_rules_have_no_effect_where_a_replica_has_one_device(axes):
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"], sharding_rules={"w": ("model",)}, **axes)
    with strategy.scope():
        w = rx.Variable(np.ones(3), name="w")
    assert strategy.run(lambda: w * 1).values[1].tolist() == [1, 1, 1]


def test_checkpoints_go_from_rules_to_others(tmp_path):
    values = block_parameters()

    def model(strategy, initial):
        with strategy.scope():
            parameters = rx.Variable(initial)
            optimizer = rx.Optimizer(optax.adam(1e-3), parameters)
        return parameters, rx.train.Checkpoint(parameters=parameters, optimizer=optimizer)

    _, saved = model(ruled(RULES), values)
    path = saved.save(str(tmp_path / "a"))
    other, checkpoint = model(ruled({"up$": ROWS}, model=4), jax.tree.map(np.zeros_like, values))
    checkpoint.restore(path)
    assert layouts(other)["up"] == ROWS and layouts(other)["down"] == ()
    for name, value in other.numpy().items():
        np.testing.assert_array_equal(value, values[name])
