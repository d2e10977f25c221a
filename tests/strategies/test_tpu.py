"""TPUStrategy on virtual TPUs: replicas of one or several logical devices, topologies, and what is refused."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import check_refused, compiled, ctx, eager, mirrored, per_replica, replica_id, tpu, virtual_tpus, ways

import replicax as rx
from replicax._base import devices as _devices
from replicax._values import global_array

MEAN, SUM = rx.VariableAggregation.MEAN, rx.VariableAggregation.SUM

spread = pytest.mark.parametrize(("n", "logical"), [(4, 2), (2, 4)])


def bytes_of(array: jax.Array) -> set[int]:
    """The bytes that each device holds of an array."""
    return {shard.data.nbytes for shard in array.addressable_shards}


def shards(array: jax.Array) -> set[tuple[int, ...]]:
    """The shapes that the devices hold of an array."""
    return {shard.data.shape for shard in array.addressable_shards}


def arguments(program: Any, *args: Any) -> int:
    """The bytes of a compiled program's inputs on each device."""
    return program.lower(*args).compile().memory_analysis().argument_size_in_bytes


# --- strategies ------------------------------------------------------------------------------------------------------


def test_each_core_is_a_replica_by_default():
    virtual_tpus()
    strategy = rx.TPUStrategy()
    assert strategy.num_replicas_in_sync == 8
    assert strategy.extended.worker_devices == tuple(
        f"/job:localhost/replica:0/task:0/device:TPU:{i}" for i in range(8)
    )
    assert strategy.extended.parameter_devices == strategy.extended.worker_devices
    assert strategy.extended.experimental_require_static_shapes
    assert (strategy.extended.num_hosts, strategy.extended.num_replicas_per_host) == (1, 8)
    assert strategy.cluster_resolver is None
    assert repr(strategy).startswith("TPUStrategy(['TPU:0', 'TPU:1',")


def test_a_replica_is_called_after_its_first_logical_device():
    virtual_tpus()
    strategy = tpu(2, 4)
    assert [name[-5:] for name in strategy.extended.worker_devices] == ["TPU:0", "TPU:4"]
    assert repr(strategy).endswith("([['TPU:0', 'TPU:1', 'TPU:2', 'TPU:3'], ['TPU:4', 'TPU:5', 'TPU:6', 'TPU:7']])")


def train(strategy: rx.Strategy, way: Any, split: list[int] | None) -> tuple[list[Any], Any]:
    """Losses and state of two training steps of a linear layer, its weights split where that is asked for."""
    weights = np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16)
    with strategy.scope():
        initial = weights if split is None else strategy.experimental_split_to_logical_devices(weights, split)
        w = rx.Variable(initial, aggregation=MEAN)
        b = rx.Variable(jnp.zeros(16), aggregation=MEAN)
        total = rx.Variable(0.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation=SUM)

    def replica(x):
        with rx.GradientTape() as tape:
            y = x @ w + b
            if split is not None:
                y = strategy.experimental_split_to_logical_devices(y, [1, y.shape[1] and np.prod(split).item()])
            loss = jnp.mean(y**2)
        gradients = ctx().all_reduce("MEAN", tape.gradient(loss, [w, b]))
        for variable, gradient in zip((w, b), gradients):
            variable.assign_sub(0.1 * gradient)
        total.assign_add(loss)
        return loss

    step = way(lambda x: strategy.run(replica, args=(x,)))
    n = strategy.num_replicas_in_sync
    losses = []
    for _ in range(2):
        x = per_replica(strategy, [np.full((4, 8), i + 1, np.float32) for i in range(n)])
        losses.append([float(part) for part in strategy.experimental_local_results(step(x))])
    return losses, [np.asarray(v.value()) for v in (w, b, total)]


@functools.cache
def trained_without_logical_devices(n: int) -> tuple[list[Any], Any]:
    return train(mirrored(n), compiled, None)


# Eagerly, where each operation is compiled for each device, fewer replicas of one device each show the same.
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("n", "logical", "way"),
    [
        *((n, logical, compiled) for n, logical in [(8, 1), (4, 2), (2, 4), (1, 8), (2, 2)]),
        *((n, logical, eager) for n, logical in [(2, 1), (4, 2), (2, 4), (1, 8), (2, 2)]),
    ],
)
def test_training_is_the_same_however_many_logical_devices(n, logical, way):
    """Facts 12, 16: as with MirroredStrategy, eagerly and compiled."""
    expected_losses, expected = trained_without_logical_devices(n)
    for split in (None, *([[1, logical], [logical, 1]] if logical > 1 else [[1, 1]])):
        losses, state = train(tpu(n, logical), way, split)
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
        for mine, theirs in zip(state, expected):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


# --- memory ----------------------------------------------------------------------------------------------------------


@spread
def test_a_split_product_takes_its_part_of_the_memory_on_each_device(n, logical):
    strategy = tpu(n, logical)
    rows, inner, columns = 32, 64, 1024
    with strategy.scope():
        whole = rx.Variable(jnp.ones((inner, columns)))
        split = rx.Variable(
            strategy.experimental_split_to_logical_devices(np.ones((inner, columns), np.float32), [1, logical])
        )

    def program(w):
        def replica(x):
            y = strategy.experimental_split_to_logical_devices(x @ w, [1, logical])
            w.assign_add(0.0 * w)
            return y

        return rx.function(lambda x: strategy.run(replica, args=(x,)))

    x = per_replica(strategy, [np.full((rows, inner), i, np.float32) for i in range(n)])
    result = program(split)(x)
    # The variable's and the activations' shards.
    assert shards(split._storage.read()[0]) == {(inner, columns // logical)}
    assert shards(global_array(result)) == {(1, rows, columns // logical)}
    assert bytes_of(split._storage.read()[0]) == {4 * inner * columns // logical}
    # What the compiler says of a device's memory: the inputs are x and w, the outputs w and y.
    x_bytes, w_bytes, y_bytes = 4 * rows * inner, 4 * inner * columns, 4 * rows * columns
    assert arguments(program(whole), x) == x_bytes + w_bytes
    assert arguments(program(split), x) == x_bytes + w_bytes // logical
    memory = program(split).lower(x).compile().memory_analysis()
    assert memory.output_size_in_bytes < (w_bytes + y_bytes) // logical + 200
    assert memory.temp_size_in_bytes < (w_bytes + y_bytes) // logical + x_bytes
    for i, part in enumerate(result.values):
        np.testing.assert_array_equal(part, np.full((rows, columns), i * inner))


@spread
def test_the_program_shows_the_split(n, logical):
    strategy = tpu(n, logical)

    def lowered(constrain):
        step = rx.function(lambda x: strategy.run(lambda x: constrain(x * 2.0) + 1, args=(x,)))
        return step.lower(per_replica(strategy, [np.ones((8, 4), np.float32)] * n)).as_text()

    name = "logical" if logical == 2 else r"logical_0\", \"logical_1"
    split = lowered(lambda y: strategy.experimental_split_to_logical_devices(y, [logical, 1]))
    assert re.search(r'sdy.sharding_constraint .*\[\{"' + name.replace("\\", "") + r'"\}, \{\}\]', split), split
    for constrain in (
        strategy.experimental_replicate_to_logical_devices,
        lambda y: strategy.experimental_assign_to_logical_device(y, logical - 1),
    ):
        assert re.search(r"sdy.sharding_constraint .*\[\{\}, \{\}\]", lowered(constrain))


def test_two_dimensions_are_split():
    strategy = tpu(2, 4)
    x = strategy.experimental_split_to_logical_devices(np.arange(64.0, dtype=np.float32).reshape(8, 8), [2, 2])
    assert shards(x) == {(4, 4)}
    result = rx.function(
        lambda: strategy.run(lambda: strategy.experimental_split_to_logical_devices(x + replica_id(), [2, 2]))
    )()
    assert shards(global_array(result)) == {(1, 4, 4)}
    np.testing.assert_array_equal(result.values[1], np.arange(64.0).reshape(8, 8) + 1)


def test_collectives_over_replicas_leave_values_split():
    """No device holds more than its part of the sum, and none gathers the parts."""
    strategy = tpu(2, 4)
    x = strategy.experimental_split_to_logical_devices(np.ones((16, 64), np.float32), [1, 4])

    def replica():
        total = ctx().all_reduce("SUM", x * (replica_id() + 1))
        return strategy.experimental_split_to_logical_devices(total, [1, 4])

    step = rx.function(lambda: strategy.run(replica))
    text = step.lower().compile().as_text()
    assert "f32[16,16]{1,0} all-reduce" in text and "all-gather" not in text
    np.testing.assert_array_equal(step().values[0], np.full((16, 64), 3))


@ways
@spread
def test_values_of_each_dtype_are_reduced(n, logical, way):
    strategy = tpu(n, logical)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.int8):
        total = way(lambda d=dtype: strategy.run(lambda: ctx().all_reduce("SUM", (replica_id() + 1).astype(d))))()
        part = strategy.experimental_local_results(total)[0]
        assert (float(part), part.dtype) == (n * (n + 1) / 2, dtype)


# --- variables -------------------------------------------------------------------------------------------------------


def split_variable(strategy: rx.TPUStrategy, parts: list[int]) -> Any:
    with strategy.scope():
        return rx.Variable(
            strategy.experimental_split_to_logical_devices(np.arange(64.0, dtype=np.float32).reshape(8, 8), parts),
            aggregation=MEAN,
        )


@spread
def test_a_variable_keeps_its_layout_however_it_is_assigned(n, logical):
    strategy = tpu(n, logical)
    w = split_variable(strategy, [1, logical])
    part = {(8, 8 // logical)}

    def check(expected):
        assert shards(w.value()) == part and shards(w._storage.read()[0]) == part
        np.testing.assert_array_equal(w.numpy(), expected)

    start = np.arange(64.0).reshape(8, 8)
    check(start)
    w.assign(np.ones((8, 8), np.float32))
    check(np.ones((8, 8)))
    w.assign_add(jnp.ones((8, 8)))
    check(np.full((8, 8), 2))
    strategy.run(lambda: w.assign_add(jnp.full((8, 8), replica_id())))  # eager replicas
    check(np.full((8, 8), 2 + (n - 1) / 2))
    rx.function(lambda: strategy.run(lambda: w.assign(w * 2)))()
    check(np.full((8, 8), 4 + n - 1))
    rx.function(lambda: w.assign_add(jnp.ones((8, 8))))()
    check(np.full((8, 8), 5 + n - 1))
    for component in w.values:
        np.testing.assert_array_equal(component.numpy(), np.full((8, 8), 5 + n - 1))
    assert shards(copy.deepcopy(w).value()) == part


def test_a_variable_may_be_split_and_made_whole_later():
    strategy = tpu(4, 2)
    with strategy.scope():
        w = rx.Variable(jnp.ones((4, 8)))
    assert strategy.experimental_split_to_logical_devices(w, [1, 2]) is w
    assert shards(w._storage.read()[0]) == {(4, 4)}
    strategy.run(lambda: w.assign(jnp.full((4, 8), 3.0)))
    assert strategy.experimental_replicate_to_logical_devices(w) is w
    assert shards(w._storage.read()[0]) == {(4, 8)}
    np.testing.assert_array_equal(w.numpy(), np.full((4, 8), 3))


def test_a_variable_that_was_read_is_not_overwritten():
    strategy = tpu(4, 2)
    w = split_variable(strategy, [1, 2])
    before = w.value()
    rx.function(lambda: strategy.run(lambda: w.assign(w * 0)))()
    np.testing.assert_array_equal(before, np.arange(64.0).reshape(8, 8))
    assert float(jnp.sum(w.value())) == 0


def test_a_pytree_may_be_split_in_part_and_an_optimizers_state_is_split_as_the_variables_are():
    strategy = tpu(4, 2)
    with strategy.scope():
        split = strategy.experimental_split_to_logical_devices(jnp.ones((8, 8)), [1, 2])
        parameters = rx.Variable({"w": split, "b": jnp.zeros(8)})
        optimizer = rx.Optimizer(optax.adam(0.1), parameters)

    def replica():
        p = parameters.value()
        optimizer.apply_gradients(jax.grad(lambda p: jnp.sum(p["w"] * 2 + p["b"]))(p))

    rx.function(lambda: strategy.run(replica))()
    assert [shards(leaf) for leaf in parameters._storage.read()] == [{(8,)}, {(8, 4)}]
    moments = [leaf for leaf in optimizer.state._storage.read() if leaf.ndim == 2]
    assert len(moments) == 2 and all(shards(leaf) == {(8, 4)} for leaf in moments)
    np.testing.assert_allclose(parameters.numpy()["w"], np.full((8, 8), 0.9), rtol=1e-4)


def test_an_optimizers_state_is_divided_among_replicas_of_one_device_each():
    def trained(sharded):
        strategy = tpu(2, 1, shard_optimizer_state=sharded)
        with strategy.scope():
            w = rx.Variable(np.arange(6000, dtype=np.float32))
            optimizer = rx.Optimizer(optax.adam(0.1), w)
        step = rx.function(lambda: strategy.run(lambda: optimizer.apply_gradients(w * (replica_id() + 1.0))))
        step()
        step()
        return w.numpy(), optimizer.state

    (got, state), (expected, _) = trained(True), trained(False)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert shards(state._storage.read()[1]) == {(1, 3000)}
    with pytest.raises(ValueError, match="replicas of one device each.* each replica has 2"):
        tpu(2, 2, shard_optimizer_state=True)


# --- where the methods may be called ---------------------------------------------------------------------------------


def test_per_replica_values_are_split_outside_of_replicas():
    strategy = tpu(2, 4)
    value = per_replica(strategy, [np.full((8,), i, np.float32) for i in range(2)])
    split = strategy.experimental_split_to_logical_devices(value, [4])
    assert shards(global_array(split)) == {(1, 2)}
    assert [part.tolist() for part in split.values] == [[0] * 8, [1] * 8]
    assert float(strategy.reduce("SUM", split, axis=0)) == 8


def test_in_cross_replica_code_and_under_transformations():
    strategy = tpu(4, 2)
    split = lambda x: strategy.experimental_split_to_logical_devices(x, [2])  # noqa: E731
    assert shards(rx.function(lambda: split(jnp.arange(4.0)))()) == {(2,)}

    def loss(x):
        parts = strategy.run(lambda: ctx().all_reduce("SUM", jnp.sum(split(x * x)) * (replica_id() + 1)))
        return global_array(parts)[0]

    x = jnp.arange(4.0)
    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss)), rx.function(jax.grad(loss))):
        np.testing.assert_allclose(gradient(x), (1 + 2 + 3 + 4) * 2 * np.arange(4.0))

    def replica():
        mapped = jax.vmap(lambda row: strategy.experimental_split_to_logical_devices(row, [2]))(jnp.ones((3, 4)))
        total, _ = jax.lax.scan(lambda c, x: (c + split(x), None), jnp.zeros(4), mapped)
        return total

    for way in (eager, compiled):
        assert way(lambda: strategy.run(replica))().values[3].tolist() == [3] * 4


@ways
def test_one_logical_device_changes_nothing(way):
    strategy = tpu(8, 1)

    def replica():
        x = strategy.experimental_split_to_logical_devices(jnp.ones((2, 3)) * replica_id(), [1, 1])
        x = strategy.experimental_replicate_to_logical_devices(x)
        return strategy.experimental_assign_to_logical_device(x, 0)

    assert way(lambda: strategy.run(replica))().values[5].tolist() == [[5] * 3] * 2


@ways
def test_what_the_methods_refuse(way):
    strategy = tpu(4, 2)
    x = jnp.ones((4, 6))
    refused = functools.partial(check_refused, strategy, way)
    split = strategy.experimental_split_to_logical_devices
    refused(ValueError, "one number for each dimension of the tensor; got 1 numbers", lambda: split(x, [2]))
    refused(ValueError, r"logical devices of a replica, 2; got \[2, 2\], whose product is 4", lambda: split(x, [2, 2]))
    refused(ValueError, "whose product is 2", lambda: split(x, [-1, -2]))
    refused(ValueError, "Dimension 0 .* is 3, which cannot be divided in 2", lambda: split(jnp.ones((3, 2)), [2, 1]))
    refused(TypeError, "list of integers", lambda: split(x, [1.0, 2.0]))
    refused(TypeError, "list of integers", lambda: split(x, 2))
    for number in (2, -1):
        refused(
            ValueError,
            f"from 0 on, lower than .* which is 2; got {number}",
            lambda number=number: strategy.experimental_assign_to_logical_device(x, number),
        )


def test_spmd_partitioning_refuses_an_assignment_to_one_device():
    strategy = tpu(4, 2, experimental_spmd_xla_partitioning=True)
    with pytest.raises(ValueError, match="experimental_spmd_xla_partitioning=True no tensor is assigned"):
        strategy.experimental_assign_to_logical_device(jnp.ones(2), 0)
    assert shards(strategy.experimental_split_to_logical_devices(jnp.ones(4), [2])) == {(2,)}


# --- shapes ----------------------------------------------------------------------------------------------------------


def test_uneven_batches_are_refused_with_the_way_out():
    strategy = tpu(4, 2)
    rows = rx.data.Dataset.from_tensor_slices(np.arange(22.0, dtype=np.float32))
    batches = iter(strategy.experimental_distribute_dataset(rows.batch(8)))
    assert [next(batches).values[3].tolist() for _ in range(2)] == [[6, 7], [14, 15]]
    with pytest.raises(rx.InvalidArgumentError, match=r"replica 3: \(0,\).*drop_remainder=True.*that 4 \(the number"):
        next(batches)
    even = strategy.experimental_distribute_dataset(rows.batch(8, drop_remainder=True))
    assert len(list(even)) == 2
    with pytest.raises(rx.InvalidArgumentError, match="drop_remainder=True"):
        list(strategy.experimental_distribute_dataset([{"x": np.ones((6, 2)), "y": np.ones(6)}]))
    with pytest.raises(rx.InvalidArgumentError, match="drop_remainder=True"):
        list(strategy.distribute_datasets_from_function(lambda context: rows.batch(8)))


@ways
def test_shapes_that_differ_are_refused_in_and_out_of_replicas(way):
    strategy = tpu(2, 4)
    uneven = per_replica(strategy, [np.ones(2), np.ones(3)])
    with pytest.raises(rx.InvalidArgumentError, match=r"replica 0: \(2,\), replica 1: \(3,\)"):
        way(lambda x: strategy.run(lambda x: x, args=(x,)))(uneven)
    with pytest.raises(rx.InvalidArgumentError, match=r"replica 0: \(1,\), replica 1: \(2,\)"):
        strategy.run(lambda: jnp.ones(int(ctx().replica_id_in_sync_group) + 1))


# --- systems ---------------------------------------------------------------------------------------------------------


class Resolver:
    """What TPUStrategy and the functions for TPU systems ask of a resolver."""

    task_type = "worker"

    def __init__(self, *workers: str):
        self.workers, self.topology = list(workers), b""

    def cluster_spec(self) -> Any:
        class Spec:
            as_dict = staticmethod(lambda: {"worker": self.workers} if self.workers else {})

        return Spec()

    def master(self, task_type: Any = None, task_id: Any = None, rpc_layer: Any = None) -> str:
        return ""

    def set_tpu_topology(self, serialized: bytes) -> None:
        self.topology = serialized


def test_the_program_of_a_tpu_machine_runs_on_virtual_tpus():
    virtual_tpus()
    resolver = Resolver()
    rx.config.experimental_connect_to_cluster(resolver)
    topology = rx.tpu.initialize_tpu_system(resolver)
    strategy = rx.TPUStrategy(resolver)
    assert strategy.cluster_resolver is resolver
    assert rx.tpu.Topology(serialized=resolver.topology).mesh_shape.tolist() == topology.mesh_shape.tolist()
    assert len(strategy.run(replica_id).values) == 8
    rx.tpu.shutdown_tpu_system(resolver)


@pytest.mark.parametrize(
    ("count", "mesh"),
    [(1, [1, 1, 1, 1]), (2, [1, 1, 1, 2]), (3, [3, 1, 1, 1]), (4, [2, 1, 1, 2]), (6, [3, 1, 1, 2]), (8, [2, 2, 1, 2])],
)
def test_virtual_tpus_are_laid_out_as_a_small_tpu(count, mesh):
    rx.config.set_virtual_devices({"TPU": count, "CPU": 1})
    topology = rx.tpu.initialize_tpu_system()
    assert topology.mesh_shape.tolist() == mesh
    assert (topology.num_tasks, topology.num_tpus_per_task) == (1, count)
    assert topology.missing_devices.tolist() == []
    for i, place in enumerate(topology.device_coordinates[0]):
        assert topology.tpu_device_name_at_coordinates(place, job="worker") == f"/job:worker/task:0/device:TPU:{i}"


def test_without_tpus_the_error_says_how_to_get_virtual_ones():
    """Fact 128."""
    for call in (rx.TPUStrategy, rx.tpu.initialize_tpu_system, rx.tpu.shutdown_tpu_system):
        with pytest.raises(rx.DeviceError, match=r"TPUs not found in the cluster.*REPLICAX_VIRTUAL_DEVICES=TPU:8"):
            call()


def test_a_cluster_of_several_hosts_needs_the_program_on_each(monkeypatch):
    virtual_tpus()
    with pytest.raises(RuntimeError, match=r"2 TPU hosts, and this program runs on one of them.*start it on all hosts"):
        rx.tpu.initialize_tpu_system(Resolver("10.0.0.1:8470", "10.0.0.2:8470"))
    with pytest.raises(RuntimeError, match="2 TPU hosts"):
        rx.TPUStrategy(Resolver("10.0.0.1:8470", "10.0.0.2:8470"))
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b,c")
    for call in (rx.tpu.initialize_tpu_system, rx.TPUStrategy):
        with pytest.raises(RuntimeError, match=r"3 TPU hosts.*of this host alone, give TPUClusterResolver\('local'\)"):
            call()
        call(rx.cluster_resolver.TPUClusterResolver("local"))


def test_objects_that_are_not_resolvers_or_assignments_are_refused():
    virtual_tpus()
    with pytest.raises(TypeError, match=r"TPUClusterResolver\('local'\), or None; got 'local' of type str"):
        rx.TPUStrategy("local")
    with pytest.raises(TypeError, match="is a DeviceAssignment, such as"):
        rx.TPUStrategy(experimental_device_assignment=[[0, 1]])
    with pytest.raises(ValueError, match="must be a `ClusterSpec` or a `ClusterResolver`"):
        rx.config.experimental_connect_to_cluster("local")
    with pytest.raises(ValueError, match="at least one remote_host"):
        rx.config.experimental_connect_to_host()
    rx.config.experimental_connect_to_host("10.0.0.1:8470")


def test_an_assignment_of_devices_that_are_not_there_or_twice():
    virtual_tpus()
    cores = [[x, y, 0, core] for y in range(2) for x in range(4) for core in range(2)]
    larger = rx.tpu.Topology(mesh_shape=[4, 2, 1, 2], device_coordinates=[cores])
    with pytest.raises(rx.DeviceError, match="device 8 of task 0 for replica 8, but there are 1 tasks with 8 TPU"):
        rx.TPUStrategy(experimental_device_assignment=rx.tpu.DeviceAssignment.build(larger, num_replicas=16))
    twice = rx.tpu.DeviceAssignment(rx.tpu.initialize_tpu_system(), [[[0, 0, 0, 0]], [[0, 0, 0, 0]]])
    with pytest.raises(rx.DeviceError, match="gives each core to one replica"):
        rx.TPUStrategy(experimental_device_assignment=twice)


def test_an_assignment_in_an_order_of_its_own():
    """Each replica's values are its own, wherever its devices are."""
    virtual_tpus()
    order = [[[1, 1, 0, 1], [0, 0, 0, 0]], [[0, 1, 0, 0], [1, 0, 0, 1]], [[0, 0, 0, 1], [1, 1, 0, 0]]]
    assignment = rx.tpu.DeviceAssignment(rx.tpu.initialize_tpu_system(), order)
    strategy = rx.TPUStrategy(experimental_device_assignment=assignment)
    assert [name[-5:] for name in strategy.extended.worker_devices] == ["TPU:7", "TPU:4", "TPU:1"]
    devices = rx.config.list_devices()
    for way in (eager, compiled):
        result = way(lambda: strategy.run(lambda: jnp.arange(4.0) + replica_id()))()
        assert [part[0].item() for part in result.values] == [0, 1, 2]
        assert [next(iter(p.devices())) for p in result.values] == [
            _devices.find_device(devices[devices.index(name)]) for name in ("TPU:7", "TPU:4", "TPU:1")
        ]
    with strategy.scope():
        w = rx.Variable(strategy.experimental_split_to_logical_devices(jnp.arange(4.0), [2]), aggregation=SUM)
    strategy.run(lambda: w.assign(jnp.arange(4.0) * replica_id()))
    assert w.numpy().tolist() == [0, 3, 6, 9]


# --- topologies ------------------------------------------------------------------------------------------------------


def board() -> rx.tpu.Topology:
    cores = [[x, y, 0, core] for y in range(2) for x in range(2) for core in range(2)]
    return rx.tpu.Topology(mesh_shape=[2, 2, 1, 2], device_coordinates=[cores])


def test_a_topology_is_written_and_read():
    two_tasks = rx.tpu.Topology(
        mesh_shape=[2, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]], [[1, 0, 0, 0], [-1, -1, -1, -1]]]
    )
    again = rx.tpu.Topology(serialized=two_tasks.serialized())
    assert again.device_coordinates.tolist() == two_tasks.device_coordinates.tolist()
    assert again.missing_devices.tolist() == [[1, 0, 0, 1]]
    assert (again.num_tasks, again.num_tpus_per_task, again.mesh_rank) == (2, 2, 4)
    assert again.task_ordinal_at_coordinates([1, 0, 0, 0]) == 1
    assert repr(again) == "Topology(mesh_shape=[2, 1, 1, 2], 2 tasks of 2)"


@pytest.mark.parametrize("serialized", [b"abc", b"\x0a\x02\x01", b"{}", b"[]", b"\xff\xff"])
def test_bytes_that_are_not_a_topology_are_refused(serialized):
    with pytest.raises(ValueError, match="no serialized topology"):
        rx.tpu.Topology(serialized=serialized)


def test_impossible_topologies_are_refused():
    place = [[[0, 0, 0, 0]]]
    for match, arguments in {
        "is made of `mesh_shape` and": {},
        "sequence of 4 positive entries": {"mesh_shape": [2, 2], "device_coordinates": place},
        r"shape \[tasks, devices of a task, 4\]": {"mesh_shape": [1, 1, 1, 1], "device_coordinates": place[0]},
        "lie outside of the mesh": {"mesh_shape": [1, 1, 1, 1], "device_coordinates": [[[0, 0, 0, 1]]]},
        "of device 0 of task 0": {"mesh_shape": [1, 1, 1, 1], "device_coordinates": place * 2},
    }.items():
        with pytest.raises(ValueError, match=match):
            rx.tpu.Topology(**arguments)
    with pytest.raises(TypeError, match="got str"):
        rx.tpu.Topology(serialized="abc")
    with pytest.raises(ValueError, match=r"no TPU device at the coordinates \[5, 0, 0, 0\]"):
        board().tpu_device_ordinal_at_coordinates([5, 0, 0, 0])


def neighbours(first: Any, second: Any) -> bool:
    return int(np.abs(np.asarray(first) - np.asarray(second)).sum()) == 1


@pytest.mark.parametrize("sides", [(4, 4, 1), (2, 4, 2), (4, 4, 4), (6, 2, 1), (1, 4, 2)])
def test_a_ring_goes_from_neighbour_to_neighbour(sides):
    chips = [[x, y, z, 0] for z in range(sides[2]) for y in range(sides[1]) for x in range(sides[0])]
    topology = rx.tpu.Topology(mesh_shape=[*sides, 1], device_coordinates=[chips])
    ring = rx.tpu.DeviceAssignment.build(
        topology, num_replicas=len(chips), device_order_mode=rx.tpu.DeviceOrderMode.RING
    ).core_assignment[:, 0]
    assert sorted(ring.tolist()) == sorted(chips)
    assert all(neighbours(ring[i - 1], ring[i]) for i in range(len(ring)))


def test_assignments_that_cannot_be():
    build = functools.partial(rx.tpu.DeviceAssignment.build, board())
    for match, arguments in {
        "requested 9 replicas but only 8": {"num_replicas": 9},
        r"footprint \[3 1 1 1\] does not fit": {"computation_shape": [3, 1, 1, 1]},
        r"must have shape \[4\]; got \(3,\)": {"computation_shape": [1, 1, 2]},
        "computation_stride must be positive": {"computation_stride": [0, 1, 1, 1]},
        "Try setting device_order_mode=DeviceOrderMode.AUTO": {"device_order_mode": rx.tpu.DeviceOrderMode.RING},
    }.items():
        with pytest.raises(ValueError, match=match):
            build(**arguments)
    missing = rx.tpu.Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0]]])
    with pytest.raises(ValueError, match="no TPU device at the coordinates"):
        rx.tpu.DeviceAssignment.build(missing, num_replicas=2)
    with pytest.raises(ValueError, match="must be a Topology object"):
        rx.tpu.DeviceAssignment("topology", [[[0, 0, 0, 0]]])
    with pytest.raises(ValueError, match="rank 3"):
        rx.tpu.DeviceAssignment(board(), [[0, 0, 0, 0]])
    with pytest.raises(ValueError, match="contains logical_core: 2"):
        build().lookup_replicas(0, 2)


# Prints what a module's topologies and assignments are: of TensorFlow, or of replicax.
_ASSIGNMENTS = """
import importlib, itertools, json, sys
import numpy as np

module = importlib.import_module(sys.argv[1])
X = module.tpu.experimental if sys.argv[1] == "tensorflow" else module
Order = X.DeviceOrderMode

def show(*call):
    try:
        result = call[0](*call[1:])
        print(call[1:], result.tolist() if isinstance(result, np.ndarray) else result)
    except (ValueError, AssertionError):
        print(call[1:], "refused")

def build(shape, stride, count, order):
    return X.DeviceAssignment.build(topology, shape, stride, count, Order[order]).core_assignment

for x, y, z, cores in [
    (2, 2, 1, 2), (4, 2, 1, 2), (3, 2, 1, 2), (4, 4, 2, 1), (2, 2, 2, 2), (1, 1, 1, 1), (2, 1, 4, 1)
]:
    places = [[i, j, k, c] for k in range(z) for j in range(y) for i in range(x) for c in range(cores)]
    tasks = np.reshape(places, (z, -1, 4))
    topology = X.Topology(mesh_shape=[x, y, z, cores], device_coordinates=tasks)
    print(topology.mesh_shape.tolist(), topology.num_tasks, topology.num_tpus_per_task)
    print(topology.missing_devices.tolist())
    for place in places:
        show(topology.tpu_device_name_at_coordinates, place, "worker")
        show(topology.cpu_device_name_at_coordinates, place)
    for shape in itertools.product([1, 2, 4], [1, 2, 4], [1, 2], [1, 2]):
        most = len(places) // int(np.prod(shape))
        for stride, count, order in itertools.product([None, [2, 1, 1, 1]], {1, most // 2, most}, Order.__members__):
            show(build, shape, stride, count, order)
    one = X.DeviceAssignment.build(topology, num_replicas=len(places))
    show(one.lookup_replicas, z - 1, 0)
    show(one.tpu_device, len(places) - 1, 0, "worker")
    show(one.host_device, 0, 0)
"""


def test_topologies_and_assignments_are_tensorflows(run_python, tensorflow_python, tmp_path):
    program = tmp_path / "assignments.py"
    program.write_text(_ASSIGNMENTS)
    run = f"import runpy, sys; sys.argv[1:] = ['%s']; runpy.run_path({str(program)!r}, run_name='__main__')"
    theirs = run_python(run % "tensorflow", python=tensorflow_python, env={"TF_CPP_MIN_LOG_LEVEL": "3"})
    ours = run_python(run % "replicax.tpu")
    assert (theirs.returncode, ours.returncode) == (0, 0), theirs.stderr + ours.stderr
    assert ours.stdout.splitlines() == theirs.stdout.splitlines()
    assert len(ours.stdout.splitlines()) > 1000


# --- under TensorFlow's names ----------------------------------------------------------------------------------------
