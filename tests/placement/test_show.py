"""`rx.show`: the inputs and variables of a step on the devices, and the collectives of its compiled program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import grouped, mirrored, one_device, over, sharded

import replicax as rx

ROWS, INPUTS, OUTPUTS = 8, 6, 4
WEIGHTS = 4 * INPUTS * OUTPUTS  # bytes
MEAN = rx.VariableAggregation.MEAN


class Training:
    """A step that sums gradients over the replicas, and counts its calls."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.w = rx.Variable(jnp.ones((INPUTS, OUTPUTS)), name="w", aggregation=MEAN)
        self.calls = 0

        def replica_step(x):
            self.calls += 1
            gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(self.w.value())
            self.w.assign_sub(0.1 * gradient, read_value=False)

        self.step = lambda x: strategy.run(replica_step, args=(x,))
        self.function = rx.function(self.step)

    def batches(self, rows=ROWS):
        dataset = rx.data.Dataset.from_tensor_slices(np.ones((2 * rows, INPUTS), np.float32)).batch(rows)
        return self.strategy.experimental_distribute_dataset(dataset)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_inputs_variables_and_the_all_reduce_of_a_step(n):
    training = Training(mirrored(n))
    shown = rx.show(training.function, next(iter(training.batches())))
    rows = ROWS // n
    assert [shown["x"].text(f"GPU:{i}") for i in range(n)] == [f"[{rows * i}:{rows * (i + 1)}]" for i in range(n)]
    assert [shown["w"].text(f"GPU:{i}") for i in range(n)] == ["whole"] * n
    assert shown.bytes_of("input") == {f"GPU:{i}": 4 * rows * INPUTS for i in range(n)}
    assert shown.bytes_of("variable") == {f"GPU:{i}": WEIGHTS for i in range(n)}
    (reduce,) = shown.collectives
    assert (reduce.kind, reduce.arrays, reduce.bytes, reduce.times) == ("all-reduce", ("float32[6, 4]",), WEIGHTS, 1)
    assert reduce.groups == (tuple(f"GPU:{i}" for i in range(n)),)
    assert shown.memory["arguments"] == 4 * rows * INPUTS + WEIGHTS


@over(plain=True)
def test_nothing_runs_and_nothing_changes(make):
    training = Training(make())
    batch = next(iter(training.batches()))
    before = training.w.numpy().tolist()
    shown = rx.show(training.function, batch)
    assert training.w.numpy().tolist() == before
    assert shown["w"].group == "variable" and shown["x"].group == "input"
    traced = training.calls
    training.function(batch)  # which takes the program that was traced for the picture
    assert training.calls == traced and training.function.experimental_get_tracing_count() == 1
    assert training.w.numpy().tolist() != before


@over(plain=True)
def test_bytes_of_arguments_are_those_that_xla_counts(make):
    training = Training(make())
    shown = rx.show(training.function, next(iter(training.batches())))
    if "host" in shown.bytes:  # of which XLA counts what each device fetches
        return
    for count in shown.bytes.values():
        assert count in (0, shown.memory["arguments"])


def test_the_optimizer_and_random_numbers_stay_as_they_are():
    nnx = pytest.importorskip("flax.nnx")
    strategy = mirrored(2)
    with strategy.scope():
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        w = rx.Variable(jnp.ones((INPUTS, OUTPUTS)), name="w")
        optimizer = rx.Optimizer(optax.adam(0.1), w)

    @rx.function
    def step(x):
        def replica(x):
            x = dropout(x)
            optimizer.apply_gradients(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w.value()))

        strategy.run(replica, args=(x,))

    def state():
        return jax.tree.map(np.asarray, (optimizer.state.numpy(), dropout.rngs.count[...], w.numpy()))

    before = state()
    x = np.ones((4, INPUTS), np.float32)
    batch = strategy.experimental_distribute_values_from_function(lambda context: x)
    shown = rx.show(step, batch)
    jax.tree.map(np.testing.assert_array_equal, state(), before)
    # w, both averages and the count of Adam, the count and the key of random numbers
    assert sum(array.group == "variable" for array in shown.arrays) == 6
    step(batch)
    assert int(state()[1]) == int(before[1]) + 1


def test_an_iterator_keeps_its_next_element():
    training = Training(mirrored(2))
    iterator = iter(training.batches())

    @rx.function
    def step(iterator):
        training.step(next(iterator))

    shown = rx.show(step, iterator)
    assert shown["element"].shape == (ROWS, INPUTS)
    step(iterator)
    step(iterator)
    with pytest.raises(rx.OutOfRangeError):
        step(iterator)


def test_a_plain_function_and_keyword_arguments():
    strategy = mirrored(2)
    shown = rx.show(lambda a, *rest, **others: a + rest[0] + others["b"]["c"], jnp.ones(3), jnp.ones(3), b={"c": 1.0})
    assert [array.name for array in shown.arrays] == ["a", "rest/0"]
    assert shown.collectives == () and "The program has no collectives." in str(shown)
    training = Training(strategy)
    assert len(rx.show(training.step, next(iter(training.batches()))).collectives) == 1


def test_uneven_batches_show_what_each_replica_has():
    training = Training(mirrored(4))
    shown = rx.show(training.function, next(iter(training.batches(7))))
    assert [shown["x"].text(f"GPU:{i}") for i in range(4)] == ["[0:2]", "[2:4]", "[4:6]", "[6:7]"]
    assert shown["x"].shape == (7, INPUTS)


def test_parts_are_gathered_and_summed_in_order():
    training = Training(sharded(2))
    shown = rx.show(training.function, next(iter(training.batches())))
    assert [shown["w"].text(f"GPU:{i}") for i in range(2)] == ["[0:3]", "[3:6]"]
    kinds = [one.kind for one in shown.collectives]
    assert kinds[0] == "all-gather" and kinds[-1] in ("all-reduce", "reduce-scatter")
    assert shown.collectives[0].arrays == ("float32[6, 4]",) and shown.collectives[0].bytes == WEIGHTS


def test_devices_of_a_replica_are_not_those_that_sum_gradients():
    strategy = grouped(2, model=2)
    with strategy.scope():
        split = strategy.split_to_devices(jnp.ones((INPUTS, OUTPUTS)), (None, "model"))
        w = rx.Variable(split, name="w", aggregation=MEAN)

    @rx.function
    def step(x):
        def replica(x):
            gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w.value())
            w.assign_sub(gradient, read_value=False)

        strategy.run(replica, args=(x,))

    x = np.ones((4, INPUTS), np.float32)
    shown = rx.show(step, strategy.experimental_distribute_values_from_function(lambda context: x))
    assert [shown["w"].text(place.name) for place in shown.devices] == ["[:, 0:2]", "[:, 2:4]"] * 2
    groups = {one.groups for one in shown.collectives if "float32[6, 2]" in one.arrays}
    assert groups == {(("GPU:0", "GPU:2"), ("GPU:1", "GPU:3"))}


def test_loops_say_how_often_their_collectives_run():
    strategy = mirrored(2)

    @rx.function
    def step(x):
        def replica(x):
            def body(total, _):
                return rx.get_replica_context().all_reduce("SUM", total + x), None

            return jax.lax.scan(body, jnp.zeros_like(x), None, length=5)[0]

        return strategy.run(replica, args=(x,))

    batch = strategy.experimental_distribute_values_from_function(lambda context: np.ones(3, np.float32))
    shown = rx.show(step, batch)
    assert [(one.kind, one.times) for one in shown.collectives] == [("all-reduce", 5)]
    assert "5 × all-reduce" in str(shown)


def test_a_program_of_plain_jax_is_shown_without_a_strategy():
    mesh = jax.sharding.Mesh(np.array(mirrored(4).extended._mesh.devices), ("data",))
    divided, whole = jax.P("data"), jax.P()
    summed = jax.shard_map(lambda x: jax.lax.psum(x.sum(), "data"), mesh=mesh, in_specs=divided, out_specs=whole)
    shown = rx.show(jax.jit(summed), jax.device_put(jnp.ones((8, 2)), jax.NamedSharding(mesh, divided)))
    assert shown.title.endswith(", 4 devices")
    assert [shown.arrays[0].text(place.name) for place in shown.devices] == ["[0:2]", "[2:4]", "[4:6]", "[6:8]"]
    (collective,) = shown.collectives
    assert (collective.kind, collective.arrays) == ("all-reduce", ("float32[]",))
    assert collective.groups == (tuple(place.name for place in shown.devices),)


def test_memory_at_the_peak_is_not_less_than_what_is_there_all_the_time():
    def step(x):
        return jnp.sort(x @ x, axis=0).sum()

    memory = rx.show(step, jnp.ones((300, 300))).memory
    assert memory["temporaries"] > 0
    assert memory.get("peak", jnp.inf) >= memory["arguments"] + memory["temporaries"]


def test_one_device_has_no_collectives():
    training = Training(one_device())
    shown = rx.show(training.function, next(iter(training.batches())))
    assert [place.name for place in shown.devices] == ["GPU:1"] and shown.collectives == ()


def test_what_cannot_be_shown_is_refused():
    strategy = mirrored(2)
    training = Training(strategy)
    batch = next(iter(training.batches()))
    with pytest.raises(TypeError, match="`show` takes a function, the step"):
        rx.show(batch, training.function)
    with pytest.raises(RuntimeError, match="while another function is traced"):
        rx.function(lambda: rx.show(training.function, batch))()
    rx.config.run_functions_eagerly(True)
    try:
        with pytest.raises(RuntimeError, match="run_functions_eagerly"):
            rx.show(training.function, batch)
    finally:
        rx.config.run_functions_eagerly(False)

    @rx.function
    def epoch(dataset):
        for batch in dataset:
            training.step(batch)

    with pytest.raises(RuntimeError, match="loops over a distributed dataset"):
        rx.show(epoch, training.batches())
