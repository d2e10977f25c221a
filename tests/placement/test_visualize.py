"""`Strategy.visualize`: which part of which array lies on which device, and its bytes."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from processes import Workers, told_by
from ps_clusters import HEAD
from strategies import central, grouped, mirrored, one_device, over, per_replica, sharded, tpu

import replicax as rx
from replicax._base.devices import short_names

SUM, ON_READ = rx.VariableAggregation.SUM, rx.VariableSynchronization.ON_READ
SIZES = {"kernel": 4 * 16 * 8, "bias": 4 * 8, "metric": 4}


def made(strategy):
    """A matrix, a vector and a number of which each replica has its own."""
    with strategy.scope():
        kernel = rx.Variable(jnp.zeros((16, 8)), name="kernel")
        bias = rx.Variable(jnp.zeros(8), name="bias")
        metric = rx.Variable(0.0, name="metric", synchronization=ON_READ, aggregation=SUM)
    return {"kernel": kernel, "bias": bias, "metric": metric}


def texts(placement, name):
    return [placement[name].text(place.name) for place in placement.devices]


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_every_replica_has_a_copy_of_a_mirrored_variable_and_a_value_of_its_own_of_an_on_read_one(n):
    strategy = mirrored(n)
    placement = strategy.visualize(made(strategy))
    assert [(place.name, place.replica) for place in placement.devices] == [(f"GPU:{i}", i) for i in range(n)]
    assert texts(placement, "kernel") == texts(placement, "bias") == ["whole"] * n
    assert texts(placement, "metric") == ["own"] * n
    assert placement.bytes == {f"GPU:{i}": 512 + 32 + 4 for i in range(n)}
    assert placement.total_bytes == n * 548
    assert placement.title == f"MirroredStrategy, {n} replica{'s' * (n > 1)}"


@over(plain=True)
def test_bytes_are_those_of_the_buffers_of_jax(make):
    strategy = make()
    variables = made(strategy)
    placement = strategy.visualize(variables)
    held: dict[str, int] = {}
    for variable in variables.values():
        for array in variable._storage.stored():
            on_host = array.sharding.memory_kind == "pinned_host"
            for shard in array.addressable_shards:
                name = "host" if on_host else short_names([shard.device])[0]
                held[name] = held.get(name, 0) + shard.data.nbytes
    assert {name: count for name, count in placement.bytes.items() if count} == held


def test_replicas_have_parts_of_a_sharded_variable():
    strategy = sharded(2)
    placement = strategy.visualize(made(strategy))
    assert texts(placement, "kernel") == ["[0:8]", "[8:16]"] and texts(placement, "bias") == ["[0:4]", "[4:8]"]
    assert placement["kernel"].parts["GPU:1"].index == (slice(8, 16), slice(0, 8))
    assert placement.bytes == {"GPU:0": 256 + 16 + 4, "GPU:1": 256 + 16 + 4}


def test_devices_of_a_replica_have_parts_along_their_axis():
    strategy = grouped(2, model=2)
    with strategy.scope():
        split = rx.Variable(strategy.split_to_devices(jnp.zeros((4, 6)), (None, "model")), name="split")
    placement = strategy.visualize(split)
    assert [place.replica for place in placement.devices] == [0, 0, 1, 1]
    assert texts(placement, "split") == ["[:, 0:3]", "[:, 3:6]"] * 2
    assert set(placement.bytes.values()) == {4 * 4 * 3}


def test_devices_of_a_tpu_replica_have_parts_of_its_part(monkeypatch):
    strategy = tpu(2, 4, shard_variables=lambda shape, dtype: [2] * len(shape))
    with strategy.scope():
        w = rx.Variable(strategy.experimental_split_to_logical_devices(jnp.zeros((8, 8)), [1, 4]), name="w")
    placement = strategy.visualize(w)
    rows, columns = ["0:4", "4:8"], ["0:2", "2:4", "4:6", "6:8"]
    assert texts(placement, "w") == [f"[{row}, {column}]" for row, column in itertools.product(rows, columns)]
    assert set(placement.bytes.values()) == {4 * 4 * 2}


def test_variables_of_central_storage_are_in_the_memory_of_the_host():
    strategy = central()
    placement = strategy.visualize(made(strategy)["kernel"])
    assert texts(placement, "kernel") == ["-", "-", "whole"]
    assert placement.devices[2] == type(placement.devices[2])("host")
    assert placement.bytes == {"GPU:0": 0, "GPU:1": 0, "host": 512}


def test_one_device_has_everything():
    strategy = one_device()
    assert strategy.visualize(made(strategy)).bytes == {"GPU:1": sum(SIZES.values())}


def test_state_of_a_sharded_optimizer_is_in_flat_parts():
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1", "GPU:2", "GPU:3"], shard_optimizer_state=True)
    with strategy.scope():
        w = rx.Variable(jnp.zeros((73, 57)), name="w")
        optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.9), w)
    placement = strategy.visualize(optimizer)
    (state,) = placement.arrays
    assert state.shape == (73, 57) and state.name.startswith("optimizer_state")
    # 4,161 elements in 4 parts of 1,041, of which the last is padded
    ends = [(0, 1041), (1041, 2082), (2082, 3123), (3123, 4161)]
    assert [state.text(place.name) for place in placement.devices] == [f"flat[{a}:{b}]" for a, b in ends]
    assert set(placement.bytes.values()) == {4 * 1041}


def test_uneven_batches_show_the_rows_of_each_replica_and_the_memory_with_its_padding():
    strategy = mirrored(4)
    dataset = rx.data.Dataset.from_tensor_slices(np.ones((7, 3), np.float32)).batch(7)
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    placement = strategy.visualize(batch)
    assert texts(placement, "PerReplica") == ["[0:2]", "[2:4]", "[4:6]", "[6:7]"]
    assert placement["PerReplica"].shape == (7, 3)
    assert set(placement.bytes.values()) == {4 * 2 * 3}


def test_numbers_of_each_replica_are_its_own():
    strategy = mirrored(2)
    losses = rx.function(lambda x: strategy.run(lambda x: x.sum(), args=(x,)))(per_replica(strategy, [[1.0], [2.0]]))
    placement = strategy.visualize({"loss": losses})
    assert texts(placement, "loss") == ["own", "own"] and placement.bytes == {"GPU:0": 4, "GPU:1": 4}


def test_components_that_users_made_are_where_they_are():
    strategy = mirrored(2)
    here = jax.device_put(jnp.ones((2, 5)), strategy.extended._mesh.devices[1])
    placement = strategy.visualize(rx.PerReplica([here, here]))
    assert placement.bytes == {"GPU:0": 0, "GPU:1": 2 * 40} and texts(placement, "PerReplica") == ["-", "whole"]


def test_arrays_of_jax_and_numpy_and_keys_stand_beside_variables():
    strategy = mirrored(2)
    mesh = strategy.extended._mesh.mesh
    halves = jax.device_put(jnp.zeros((6, 2)), jax.NamedSharding(mesh, jax.P("replica")))
    value = {"a": halves, "b": [np.zeros(3, np.int16), jax.random.key(0)], "c": "text", "d": None}
    placement = strategy.visualize(value)
    assert [array.name for array in placement.arrays] == ["a", "b/0", "b/1"]
    assert texts(placement, "a") == ["[0:3]", "[3:6]", "-"]
    assert placement.bytes == {"GPU:0": 24 + 8, "GPU:1": 24, "host": 6}


def test_variables_of_pytrees_have_names_of_their_leaves():
    strategy = mirrored(2)
    with strategy.scope():
        v = rx.Variable({"w": jnp.zeros(2), "b": (jnp.zeros(3),)}, name="model")
    assert [array.name for array in strategy.visualize([v, v]).arrays] == ["model/b/0", "model/w"]


def test_models_and_optimizers_of_flax_and_keras():
    nnx, keras = pytest.importorskip("flax.nnx"), pytest.importorskip("keras")
    strategy = mirrored(2)
    with strategy.scope():
        model = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        layers = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    placement = strategy.visualize({"model": model, "optimizer": optimizer})
    assert texts(placement, "model/layers/0/kernel") == ["whole", "whole"]
    assert texts(placement, "model/layers/1/mean") == ["own", "own"]
    assert sum("trace" in array.name for array in placement.arrays) == 4
    placement = strategy.visualize(layers)
    assert [array.shape for array in placement.arrays] == [(4, 3), (3,)]
    assert placement.bytes == {"GPU:0": 4 * 15, "GPU:1": 4 * 15}


def test_nothing_is_read_copied_or_changed():
    strategy = mirrored(2)
    variables = made(strategy)
    arrays = [variable._storage.arrays for variable in variables.values()]
    str(strategy.visualize(variables))
    assert all(a is b._storage.arrays for a, b in zip(arrays, variables.values()))
    assert not any(variable._storage.lent for variable in variables.values() if variable.name == "metric:0")


@pytest.mark.parametrize("value", [3, "text", [], None], ids=["number", "text", "list", "none"])
def test_a_value_without_arrays_is_refused(value):
    with pytest.raises(rx.InvalidArgumentError, match="There is no array in .*Pass an array"):
        mirrored(2).visualize(value)


def test_deleted_and_traced_arrays_are_refused():
    strategy = mirrored(2)
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(rx.InvalidArgumentError, match=r"\['?x'?\]|x has been deleted.*Pass the array"):
        strategy.visualize({"x": gone})
    with pytest.raises(rx.InvalidArgumentError, match="has no place yet.*outside of"):
        jax.jit(lambda x: strategy.visualize(x))(jnp.ones(3))
    with pytest.raises(RuntimeError, match="cross-replica"):
        strategy.run(lambda: strategy.visualize(jnp.ones(3)))


def test_variables_on_parameter_servers_show_their_rows_on_each_server(run_here):
    run_here(
        """
        import pytest
        partitioner = rx.experimental.partitioners.MinSizePartitioner(1 << 8, 4)
        with Cluster(workers=1, servers=2, partitioner=partitioner) as cluster:
            strategy = cluster.strategy
            with strategy.scope():
                table = rx.Variable(jnp.zeros((100, 4)), name="table")
                bias = rx.Variable(jnp.zeros(3), name="bias")
            placement = strategy.visualize([table, bias])
            parts = [array for array in placement.arrays if array.name.startswith("table")]
            rows = sorted(part.index[0].indices(100)[:2] for a in parts for part in a.parts.values())
            assert rows == [(0, 25), (25, 50), (50, 75), (75, 100)], rows
            assert sum(a.bytes for a in parts) == 1600 and placement["bias"].bytes == 12
            assert {place.name for place in placement.devices} == {"server 0", "server 1"}
            assert sum(placement.bytes.values()) == 1612

            @rx.function
            def step():
                return table.value().sum()

            with pytest.raises(rx.InvalidArgumentError, match="parameter servers.*strategy.visualize"):
                rx.show(step)
        """,
        head=HEAD,
    )


JOB = """
import json
import jax, jax.numpy as jnp, numpy as np, replicax as rx

strategy = rx.MultiWorkerMirroredStrategy(shard_variables=lambda shape, dtype: [2] * len(shape))
worker = strategy.cluster_resolver.task_id
with strategy.scope():
    w = rx.Variable(jnp.zeros((8, 4)), name="w", aggregation=rx.VariableAggregation.SUM)
batch = strategy.experimental_distribute_values_from_function(lambda context: np.ones((2, 4), np.float32))

@rx.function
def step(x):
    strategy.run(lambda x: w.assign_add(x.sum() + w.value(), read_value=False), args=(x,))

def told(name, placement):
    parts = {place.name: [array.text(place.name) for array in placement.arrays] for place in placement.devices}
    groups = [[*one.groups] for one in placement.collectives]
    value = [parts, placement.bytes, placement.total_bytes, placement.other_devices, str(placement), groups]
    print("told", json.dumps(["job", name, value]), flush=True)

told("visualize", strategy.visualize(w))
told("show", rx.show(step, batch))

mesh = jax.sharding.Mesh(np.array(strategy.extended._mesh.devices).ravel(), ("data",))
divided = jax.NamedSharding(mesh, jax.P("data"))
rows = jax.make_array_from_callback((8, 2), divided, lambda index: np.ones((8, 2), np.float32)[index])
total = jax.shard_map(lambda x: jax.lax.psum(x.sum(), "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
told("plain JAX", rx.show(jax.jit(total), rows))
assert float(jnp.sum(w.value())) == 0.0
"""


@pytest.mark.processes
def test_each_worker_shows_its_own_devices_and_the_bytes_of_all(tmp_path):
    with Workers(tmp_path, 2, JOB, env={"REPLICAX_VIRTUAL_DEVICES": "GPU:2"}) as workers:
        told = told_by(workers.join(timeout=120))["job"]
    for worker, rows in enumerate([["[0:2]", "[2:4]"], ["[4:6]", "[6:8]"]]):
        parts, held, total, others, text, _ = told[worker]["visualize"]
        assert parts == {"GPU:0": rows[:1], "GPU:1": rows[1:]}
        assert (held, total, others) == ({"GPU:0": 32, "GPU:1": 32}, 4 * 32, 2)
        assert "of which 2 are here and 2 belong to other processes" in text
        parts, held, total, *_, groups = told[worker]["show"]
        assert parts == {"GPU:0": rows[:1] * 2, "GPU:1": rows[1:] * 2}  # of the batch of 8 rows, and of w
        assert (held, total) == ({"GPU:0": 64, "GPU:1": 64}, 4 * 64)
        other = f"process {1 - worker}"
        here, there = ["GPU:0", "GPU:1"], [f"{other} GPU:0", f"{other} GPU:1"]
        assert groups and all(group == [here + there if worker == 0 else there + here] for group in groups)
        parts, held, total, *_, groups = told[worker]["plain JAX"]
        assert parts == {"GPU:0": rows[:1], "GPU:1": rows[1:]}
        assert (held, total) == ({"GPU:0": 16, "GPU:1": 16}, 64)
        assert groups == [[here + there if worker == 0 else there + here]]
