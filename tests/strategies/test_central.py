"""CentralStorageStrategy: replicas on several devices, each variable once for all of them.

Over both homes of variables: the host's memory beside accelerators, and a device that computes nothing.
"""

from __future__ import annotations

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from live_memory import memory_watched
from strategies import MEAN, SUM, carried, central, ctx, mirrored, one_device, parts, per_replica, replica_id, ways

import replicax as rx

A, S = rx.VariableAggregation, rx.VariableSynchronization
NEEDED = "You must specify an aggregation method to update a AggregatingVariable in Replica Context"
SIZE = 4 * 50_000  # bytes of each variable's array


@functools.cache
def on_a_device() -> rx.experimental.CentralStorageStrategy:
    return rx.experimental.CentralStorageStrategy(["CPU:1", "CPU:2"], "CPU:0")


homes = pytest.mark.parametrize("make", [central, on_a_device], ids=["host", "device"])


def made(strategy, value=1.0, **more):
    with strategy.scope():
        return rx.Variable(value, **more)


# What a variable is.


@homes
def test_what_a_variable_is(make):
    """Fact 118."""
    strategy = make()
    v = made(strategy, aggregation=A.SUM, name="v")
    assert type(v).__name__ == "AggregatingVariable" and isinstance(v, rx.Variable)
    assert not isinstance(v, rx.DistributedValues) and not hasattr(v, "values")
    assert v.device == "/job:localhost/replica:0/task:0/device:CPU:0" and v.distribute_strategy is strategy
    assert repr(v) == "<Variable 'v:0' shape=() dtype=float32, numpy=1.0>"
    assert strategy.experimental_local_results(v) == (v,)
    extended = strategy.extended
    assert extended.variable_created_in_scope(v) and extended.value_container(v) is v
    assert extended.parameter_devices == ("CPU:0",) and len(extended.worker_devices) == 2
    assert float(v + 1) == float(jnp.sum(v) + 1) == 2.0


@homes
def test_a_value_read_in_a_replica_lies_on_its_device(make):
    strategy = make()
    v = made(strategy, [1.0, 2.0])
    places = strategy.run(lambda: v.value())
    assert [next(iter(x.devices())) for x in places.values] == list(strategy.extended._mesh.devices)
    assert parts(strategy, places) == [[1.0, 2.0]] * 2


@homes
@pytest.mark.parametrize("synchronization", [S.AUTO, S.ON_READ, S.ON_WRITE, S.NONE])
def test_the_synchronization_has_no_effect(make, synchronization):
    """Fact 118."""
    strategy = make()
    v = made(strategy, 1.0, synchronization=synchronization, aggregation=A.SUM)
    assert v.synchronization is synchronization and v.trainable is (synchronization is not S.ON_READ)
    strategy.run(lambda: v.assign_add(replica_id() + 1))
    assert float(v) == 4.0


def test_defaults():
    """Fact 119: all accelerators and the host; where there is one compute device, that is the parameter device too."""
    make = rx.experimental.CentralStorageStrategy
    assert make().num_replicas_in_sync == 8 and make().extended.parameter_devices == ("/device:CPU:0",)
    one = make(["GPU:1"])
    full = "/job:localhost/replica:0/task:0/device:GPU:1"
    assert one.extended.worker_devices == [full] and one.extended.parameter_devices == (full,)
    v = made(one, 1.0)
    assert one.run(lambda: v + 1).tolist() == 2.0 and v.device == full
    assert v.value().devices() == set(one.extended._mesh.devices)


def test_the_default_without_accelerators_is_one_device(run_python):
    """Fact 119."""
    done = run_python(
        """
        import replicax as rx
        s = rx.experimental.CentralStorageStrategy()
        print(s.extended.worker_devices, s.extended.parameter_devices, s.run(lambda: 1))
        """,
        env={"REPLICAX_VIRTUAL_DEVICES": "CPU:4"},
    )
    full = "/job:localhost/replica:0/task:0/device:CPU:0"
    assert done.stdout == f"{[full]} {(full,)} 1\n", done.stderr


def test_devices_that_are_not_there():
    make = rx.experimental.CentralStorageStrategy
    for devices in (["GPU:9"], None), (["GPU:0"], "CPU:9"), (["CPU:0"], "GPU:9"), (["GPU:0"], 7), ("GPU:0", None):
        with pytest.raises(rx.DeviceError):
            make(*devices)
    with pytest.raises(AssertionError, match="No duplicates allowed"):
        make(["GPU:1", "GPU:1"])


def test_each_strategy_has_its_class_of_variables_and_results():
    """Fact 120."""
    found = {}
    for name, strategy in {
        "default": rx.get_strategy(),
        "one device": one_device(),
        "mirrored, 1": mirrored(1),
        "mirrored, 2": mirrored(2),
        "central, 2": on_a_device(),
    }.items():
        v, result = made(strategy), strategy.run(lambda: jnp.float32(1) + 0)
        element = next(iter(strategy.experimental_distribute_dataset(rx.data.Dataset.range(4).batch(2))))
        values = (v, result, strategy.reduce(SUM, result, axis=None), element)
        found[name] = [type(value).__name__ for value in values], strategy.num_replicas_in_sync
    array = type(jnp.ones(1)).__name__
    assert found == {
        "default": (["ResourceVariable", array, array, array], 1),
        "one device": (["ResourceVariable", array, array, array], 1),
        "mirrored, 1": (["MirroredVariable", array, array, array], 1),
        "mirrored, 2": (["MirroredVariable", "PerReplica", array, "PerReplica"], 2),
        "central, 2": (["AggregatingVariable", "PerReplica", array, "PerReplica"], 2),
    }


@homes
def test_copies_of_the_strategy(make):
    """Fact 170: it is deep-copied, but not copied nor pickled; and it is experimental."""
    strategy = make()
    with pytest.raises(RuntimeError, match="Must only deepcopy DistributionStrategy"):
        copy.copy(strategy)
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(strategy)
    twin = copy.deepcopy(strategy)
    assert twin is not strategy and twin.extended.parameter_devices == strategy.extended.parameter_devices
    v = made(twin, aggregation=A.SUM)
    twin.run(lambda: v.assign_add(replica_id()))
    assert float(v) == 2.0 and v.distribute_strategy is twin and not strategy.extended.variable_created_in_scope(v)
    assert not hasattr(rx, "CentralStorageStrategy")


# Where it lies.


def assert_held_once(strategy, min_size, expected):
    """Asserts what a variable of SIZE bytes holds at rest, after each way to use it."""
    with memory_watched(min_size) as check_more_held:
        v = made(strategy, lambda: jnp.zeros(SIZE // 4), aggregation=A.MEAN)
        compiled = rx.function(lambda: strategy.run(lambda: (v.assign_add(v.value() + 1.0), None)[1]))
        uses = {
            "making it": lambda: None,
            "a read": lambda: (v.numpy(), None)[1],
            "reads in replicas": lambda: strategy.run(lambda: (v.value(), None)[1]),
            "an eager step": lambda: strategy.run(lambda: (v.assign_add(v.value() + 1.0), None)[1]),
            "a compiled step": compiled,
            "another one": compiled,
            "an assignment": lambda: (v.assign(jnp.ones(SIZE // 4)), None)[1],
            "a step after it": compiled,
        }
        for use, call in uses.items():
            call()
            check_more_held(expected, use)
    assert v.numpy().tolist() == [3.0] * (SIZE // 4)
    return v


def test_a_variable_lies_on_the_parameter_device_alone():
    """Not one copy for each compute device: none at all at rest, whatever is done with the variable."""
    home = rx.experimental.CentralStorageStrategy(["CPU:0"]).extended._mesh.devices[0]
    v = assert_held_once(on_a_device(), SIZE, {(home, "device"): SIZE})
    assert v.value().devices() == {home}


def test_beside_accelerators_a_variable_lies_in_the_hosts_memory_once():
    """Split over the devices' ways to it, so that there is one copy in all and none on the devices."""
    strategy = central()
    devices = strategy.extended._mesh.devices
    assert_held_once(strategy, SIZE // 2, {(device, "pinned_host"): SIZE // 2 for device in devices})


def test_values_that_do_not_divide_are_replicated_in_host_memory():
    strategy = central()
    for value, rows in (jnp.zeros((3, 4)), (3, 2)), (jnp.zeros((2, 3)), (1, 3)), (jnp.zeros((3, 5)), (3, 5)):
        (stored,) = made(strategy, value)._storage.arrays
        assert {shard.data.shape for shard in stored.addressable_shards} == {rows}
        assert stored.sharding.memory_kind == "pinned_host"
    (stored,) = made(strategy, 1.0)._storage.arrays
    assert len(stored.addressable_shards) == 2 and stored.sharding.memory_kind == "pinned_host"


@homes
def test_a_pytree_with_scalars_integers_empty_arrays_and_keys(make):
    strategy = make()
    value = {
        "w": jnp.ones((4, 2)),
        "n": jnp.int32(0),
        "none": jnp.zeros((0, 3)),
        "key": jax.random.key(1),
        "b": jnp.ones(3),
    }
    v = made(strategy, value, aggregation=A.ONLY_FIRST_REPLICA)

    @rx.function
    def step():
        now = v.value()
        v.assign({**now, "w": now["w"] * 2, "n": now["n"] + 1, "key": jax.random.split(now["key"])[0]})
        return jax.random.uniform(now["key"])

    draws = [float(step()) for _ in range(3)]
    key = jax.random.key(1)
    for draw in draws:
        assert draw == float(jax.random.uniform(key))
        key = jax.random.split(key)[0]
    now = v.value()
    assert int(now["n"]) == 3 and now["w"].tolist() == [[8.0, 8.0]] * 4 and now["none"].shape == (0, 3)
    assert jax.random.key_data(now["key"]).tolist() == jax.random.key_data(key).tolist()


# The compiled step.


def program_of(strategy, v, steps=1):
    @rx.function
    def step(x):
        def replica(x):
            for _ in range(steps):
                v.assign_add(jnp.mean(x) * v)

        strategy.run(replica, args=(x,))

    return step, per_replica(strategy, [[1.0, 3.0], [2.0, 4.0]])


@homes
def test_a_compiled_step_has_one_all_reduce_for_each_update(make):
    strategy = make()
    for steps in (1, 3):
        v = made(strategy, jnp.ones(4), aggregation=A.MEAN)
        step, x = program_of(strategy, v, steps)
        assert len(carried(step, x)) == steps
        step(x)
        assert v.numpy().tolist() == [3.5**steps] * 4


def test_a_compiled_step_fetches_from_the_hosts_memory_and_puts_back_by_itself():
    """The variable comes in and leaves in the host's memory, in one buffer, and nothing is moved around the call."""
    strategy = central()
    v = made(strategy, jnp.ones((4, 3)), aggregation=A.MEAN)
    step, x = program_of(strategy, v)
    main = next(line for line in step.lower(x).as_text().splitlines() if "@main" in line)
    inputs, outputs = main.split(") -> (")
    of_variable = next(text for text in inputs.split("%arg") if "tensor<4x3xf32>" in text)
    assert 'memory_kind = "pinned_host"' in of_variable
    assert 'memory_kind = "pinned_host"' in outputs and outputs.count("tensor<4x3xf32>") == 1
    step(x)
    (before,) = v._storage.arrays
    step(x)
    (after,) = v._storage.arrays
    assert before.is_deleted() and after.sharding == before.sharding and after.sharding.memory_kind == "pinned_host"


# Assigning.


@homes
@ways
def test_assignments_in_replicas_are_aggregated_and_made_once(make, way):
    """Facts 118, 119: what an assignment returns is one object for all; what replicas read later is each one's."""
    strategy = make()
    total, mean, first = (made(strategy, [1.0], aggregation=a) for a in (A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA))

    def replica():
        x = replica_id()[None] + 1
        returned = total.assign_add(x)
        mean.assign(x)
        first.assign_sub(x * 10)
        return returned, total.read_value()

    returned, read = way(lambda: strategy.run(replica))()
    assert total.numpy().tolist() == [4.0] and mean.numpy().tolist() == [1.5] and first.numpy().tolist() == [-9.0]
    assert not isinstance(returned, rx.PerReplica) and returned.tolist() == [4.0]
    assert isinstance(read, rx.PerReplica) and parts(strategy, read) == [[4.0]] * 2


@homes
@ways
def test_without_an_aggregation_replicas_may_not_assign(make, way):
    """Facts 118, 171. Outside of them there is one value anyway."""
    strategy = make()
    v = made(strategy, 1.0, name="lonely")
    for assign in (lambda: v.assign(2.0), lambda: v.assign_add(replica_id()), lambda: v.assign_sub(jnp.float32(1))):
        with pytest.raises(ValueError, match=NEEDED) as caught:
            way(lambda assign=assign: strategy.run(assign))()
        assert "lonely:0" in str(caught.value)
    assert float(v) == 1.0
    way(lambda: (v.assign_add(1.0), None)[1])()
    strategy.run(lambda: ctx().merge_call(lambda s: (v.assign_add(1.0), None)[1]))
    assert float(v) == 3.0


@homes
@ways
def test_summing_a_value_shared_by_all_replicas_is_refused(make, way):
    strategy = make()
    v, m = made(strategy, [1.0], aggregation=A.SUM), made(strategy, [1.0], aggregation=A.MEAN)
    with pytest.raises(ValueError, match="A non-DistributedValues value .* cannot be reduced"):
        way(lambda: strategy.run(lambda: v.assign_add([1.0])))()
    way(lambda: strategy.run(lambda: m.assign_add([1.0])))()
    assert v.numpy().tolist() == [1.0] and m.numpy().tolist() == [2.0]


@homes
@ways
def test_a_distributed_value_assigned_outside_gives_its_first_component(make, way):
    strategy = make()
    v, x = made(strategy, [0.0, 0.0]), per_replica(strategy, [[1.0, 2.0], [3.0, 4.0]])
    way(lambda x: (v.assign(x), None)[1])(x)
    assert v.numpy().tolist() == [1.0, 2.0]
    way(lambda x: (v.assign_add(strategy.extended.reduce_to(SUM, x, destinations=v)), None)[1])(x)
    assert v.numpy().tolist() == [5.0, 8.0]


@homes
@ways
def test_scatters_in_replicas_are_made_one_after_the_other(make, way):
    """Each replica adds its own rows, whatever the aggregation."""
    strategy = make()
    v = made(strategy, jnp.zeros(4))
    replica = lambda: v.scatter_add(rx.IndexedSlices(replica_id()[None] + 1, ctx().replica_id_in_sync_group[None] + 1))  # noqa: E731
    way(lambda: (strategy.run(replica), None)[1])()
    assert v.numpy().tolist() == [0.0, 1.0, 2.0, 0.0]
    v.scatter_update(rx.IndexedSlices(jnp.ones(1), jnp.array([3])))
    assert v.numpy().tolist() == [0.0, 1.0, 2.0, 1.0]


@homes
def test_wrong_values_are_refused(make):
    strategy = make()
    v = made(strategy, [1.0, 2.0], aggregation=A.SUM)
    with pytest.raises(ValueError, match="Shape mismatch"):
        v.assign([1.0])
    with pytest.raises(ValueError, match="Shape mismatch"):
        strategy.run(lambda: v.assign(replica_id()))
    with pytest.raises(ValueError, match="dtype"):
        v.assign(jnp.ones(2, jnp.int32))
    with pytest.raises(RuntimeError, match="Mixing different"):
        mirrored(2).run(lambda: v.assign([1.0, 1.0]))
    with mirrored(2).scope(), pytest.raises(RuntimeError, match="Mixing different"):
        v.assign([1.0, 1.0])
    assert v.numpy().tolist() == [1.0, 2.0]


# `extended`.


@homes
@ways
def test_update_calls_the_function_once_with_the_variable(make, way):
    """Fact 119."""
    strategy, seen = make(), []
    v, x = made(strategy, [1.0]), per_replica(strategy, [[10.0], [20.0]])

    def fn(w, x, *, k):
        seen.append((w, rx.in_cross_replica_context()))
        return w.assign_add(x * k)

    run = way(lambda x: strategy.extended.update(v, fn, args=(x,), kwargs={"k": 2.0}))
    assert run(x).tolist() == [21.0] and seen == [(v, True)]
    (result,) = way(lambda x: strategy.extended.update(v, fn, args=(x,), kwargs={"k": 1.0}, group=False))(x)
    assert result.tolist() == [31.0]
    inside = way(lambda x: strategy.run(lambda x: strategy.extended.update(v, fn, (x,), {"k": 1.0}), args=(x,)))
    inside(x)
    assert v.numpy().tolist() == [41.0]


@homes
def test_update_takes_any_variable_and_nothing_else(make):
    strategy, plain = make(), rx.Variable(1.0)
    strategy.extended.update(plain, lambda w: w.assign_add(1.0))
    assert float(plain) == 2.0
    with pytest.raises(ValueError, match="You can not update `var` 5. It must be a Variable."):
        strategy.extended.update(5, lambda w: w)


@homes
@ways
def test_reduced_values_are_placed_on_the_variables_device(make, way):
    """A plain array, since there is one; mirrored where the destination is a distributed value."""
    strategy = make()
    v, x = made(strategy, [1.0, 2.0]), per_replica(strategy, [[1.0, 2.0], [3.0, 4.0]])
    reduce = way(lambda x: strategy.extended.batch_reduce_to(SUM, [(x, v), (x, x)]))
    total, mirror = reduce(x)
    assert isinstance(total, jax.Array) and total.tolist() == [4.0, 6.0]
    assert isinstance(mirror, rx.Mirrored) and parts(strategy, mirror) == [[4.0, 6.0]] * 2
    with pytest.raises(ValueError, match="A non-DistributedValues value"):
        strategy.reduce(SUM, v, axis=None)
    assert strategy.reduce(MEAN, v, axis=None) is v and strategy.gather(v, axis=0) is v
    assert float(strategy.reduce(MEAN, v, axis=0)) == 1.5


@homes
def test_creators_see_the_variable_once(make):
    strategy, seen = make(), []

    def creator(following, **kwargs):
        variable = following(**kwargs)
        seen.append((kwargs["name"], type(variable).__name__))
        return variable

    with rx.variable_creator_scope(creator):
        made(strategy, name="outside")
    with strategy.scope(), rx.variable_creator_scope(creator):
        rx.Variable(1.0, name="inside")
    assert seen == [("outside", "AggregatingVariable"), ("inside", "AggregatingVariable")]


@homes
def test_a_variable_made_in_run_is_one_for_all(make):
    strategy, seen = make(), []

    def replica():
        if not seen:
            seen.append(None)
        return rx.Variable(5.0, aggregation=A.SUM)

    v = strategy.run(replica)
    assert type(v).__name__ == "AggregatingVariable" and float(v) == 5.0


# Elsewhere in the engine.


@homes
def test_a_deep_copied_central_variable_is_independent(make):
    strategy = make()
    v = made(strategy, jnp.ones(4), aggregation=A.MEAN)
    twin = copy.deepcopy(v)
    step = rx.function(lambda w: strategy.run(lambda: (w.assign_add(jnp.ones(4)), None)[1]))
    step(v), step(v)
    assert v.numpy().tolist() == [3.0] * 4 and twin.numpy().tolist() == [1.0] * 4
    step(twin)
    assert v.numpy().tolist() == [3.0] * 4 and twin.numpy().tolist() == [2.0] * 4


@homes
def test_gradients_of_compiled_steps(make):
    """A tape around the call and one inside give the same, and the variable is still there to be assigned."""
    strategy = make()
    v = made(strategy, jnp.arange(4.0), aggregation=A.MEAN)
    x = per_replica(strategy, [1.0, 3.0])

    @rx.function
    def loss(x):
        return strategy.reduce(SUM, strategy.run(lambda x: x * jnp.sum(v * v), args=(x,)), axis=None)

    @rx.function
    def changing(x):
        v.assign_add(jnp.ones(4))
        return loss(x)

    for function, expected in (loss, jnp.arange(4.0)), (changing, jnp.arange(4.0) + 1), (loss, jnp.arange(4.0) + 1):
        with rx.GradientTape() as tape:
            value = function(x)
        assert float(value) == float(4 * jnp.sum(expected**2))
        assert np.asarray(tape.gradient(value, v)).tolist() == (8 * expected).tolist()
    changing(x), changing(x)
    assert v.numpy().tolist() == [3.0, 4.0, 5.0, 6.0]


@homes
def test_under_jax_jit_its_value_is_a_constant(make):
    strategy = make()
    v = made(strategy, jnp.arange(4.0))
    x = per_replica(strategy, [1.0, 3.0])
    with pytest.warns(UserWarning, match="keeps the value that it has now as a constant"):
        total = jax.jit(lambda x: strategy.reduce(SUM, strategy.run(lambda x: x * jnp.sum(v), args=(x,)), axis=None))(x)
    assert float(total) == 24.0


@homes
@ways
def test_training_gives_what_mirrored_variables_give(make, way):
    """Fact 164, with the last batch uneven: the same losses and the same weights."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(22, 3)).astype(np.float32), rng.normal(size=(22,)).astype(np.float32)

    def train(strategy):
        with strategy.scope():
            w = rx.Variable(np.zeros(3, np.float32), aggregation=A.SUM)
            b = rx.Variable(0.0, aggregation=A.SUM)

        def replica(x, y):
            error = lambda w, b: jnp.sum((x @ w + b - y) ** 2) / 8  # noqa: E731
            loss, (dw, db) = jax.value_and_grad(error, argnums=(0, 1))(w.value(), b.value())
            w.assign_sub(0.1 * dw)
            b.assign_sub(0.1 * db)
            return loss

        step = way(lambda batch: strategy.reduce(SUM, strategy.run(replica, args=batch), axis=None))
        dataset = strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensor_slices((x, y)).batch(8))
        losses = [float(step(batch)) for _ in range(2) for batch in dataset]
        return losses, w.numpy(), b.numpy()

    for got, expected in zip(train(make()), train(mirrored(2)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
