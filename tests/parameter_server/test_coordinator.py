"""Scheduled functions, with tasks in one process and over processes."""

from __future__ import annotations

import textwrap

import pytest
from ps_clusters import ENVIRONMENT, HEAD, in_turn

# Programs that do the same wherever the tasks are; `processes` says it.
ANYWHERE = {
    "updates of many closures add up": """
        with Cluster(workers=3, servers=2) as cluster:
            co = cluster.coordinator
            with cluster.strategy.scope():
                count, total = rx.Variable(0), rx.Variable(jnp.zeros((4, 3)))
            @rx.function
            def step(x):
                count.assign_add(1)
                total.assign_add(x)
                return count.read_value(), {"twice": [x * 2]}
            values = [co.schedule(step, args=(jnp.full((4, 3), float(i)),)) for i in range(200)]
            co.join()
            results = co.fetch(values)
            assert sorted(int(r[0]) for r in results) == list(range(1, 201)), "each answer is the server's own"
            assert results[7][1]["twice"][0].tolist() == [[14.0] * 3] * 4
            assert count.numpy() == 200 and total.numpy().tolist() == [[float(sum(range(200)))] * 3] * 4
            assert co.done()
            step(jnp.ones((4, 3)))  # in this process
            assert count.numpy() == 201
    """,
    "a report passes over variables whose servers are gone": """
        with Cluster(workers=1, servers=1) as cluster:
            with cluster.strategy.scope():
                gone = rx.Variable(3.0, name="gone")
            gone.assign_add(1.0)
            checkpoint = rx.train.Checkpoint(v=rx.Variable(0.0))
            checkpoint.report()
        kept = rx.Variable(0.0, name="kept")
        kept.assign_add(1.0)
        found = [entry.what for entry in checkpoint.report().entries]
        assert any("'kept" in what for what in found) and not any("'gone" in what for what in found), found
    """,
    # A running product of matrices: no slice of the update goes element by element.
    "a value computed of all of the old one loses no update": """
        with Cluster(workers=3, servers=1) as cluster:
            co = cluster.coordinator
            with cluster.strategy.scope():
                ring = rx.Variable(jnp.arange(1000.0))
                matrix = rx.Variable(jnp.eye(20))
            @rx.function
            def turn():
                ring.assign(jnp.roll(ring.value(), 1))
                matrix.assign(matrix.value() @ jnp.roll(jnp.eye(20), 1, axis=0))
            for _ in range(61):
                co.schedule(turn)
            co.join()
            assert ring.numpy()[:3].tolist() == [939.0, 940.0, 941.0], ring.numpy()[:3]
            assert np.argmax(matrix.numpy()[0]) in (1, 19)
            assert (np.linalg.matrix_power(np.roll(np.eye(20), 1, axis=0), 61) == matrix.numpy()).all()
    """,
    "an embedding trains as on one device with one worker": """
        import optax
        rng = np.random.default_rng(0)
        table0, weights0 = rng.normal(size=(500, 8)).astype("f4"), rng.normal(size=(8, 1)).astype("f4")
        def make(strategy):
            with strategy.scope():
                table, weights = rx.Variable(table0), rx.Variable(weights0)
                optimizer = rx.Optimizer(optax.adam(1e-2), [table, weights])
            @rx.function
            def step(iterator):
                ids, y = next(iterator)
                with rx.GradientTape() as tape:
                    loss = jnp.mean(((table.value()[ids] @ weights.value())[:, 0] - y) ** 2)
                optimizer.apply_gradients(tape.gradient(loss, [table, weights]))
                return loss
            return table, weights, step
        def data():
            rng = np.random.default_rng(1)
            arrays = rng.integers(0, 500, 100).astype("i4"), rng.normal(size=100).astype("f4")
            return rx.data.Dataset.from_tensor_slices(arrays).batch(32).repeat(3)  # the last of each has 4 rows
        table, weights, step = make(rx.OneDeviceStrategy("CPU:0"))
        iterator = iter(data())
        expected = [step(iterator) for _ in range(12)]
        halves = rx.experimental.partitioners.FixedShardsPartitioner(2)
        for partitioner, kind in (None, "ServedVariable"), (halves, "ShardedVariable"):
            with Cluster(workers=1, servers=2, partitioner=partitioner) as cluster:
                served, others, step = make(cluster.strategy)
                assert type(served).__name__ == kind
                iterator = iter(cluster.coordinator.create_per_worker_dataset(data))
                losses = [cluster.coordinator.schedule(step, args=(iterator,)) for _ in range(12)]
                np.testing.assert_allclose(cluster.coordinator.fetch(losses), expected, rtol=1e-5)
                np.testing.assert_allclose(served.numpy(), table.numpy(), rtol=1e-4, atol=1e-6)
                np.testing.assert_allclose(others.numpy(), weights.numpy(), rtol=1e-4, atol=1e-6)
    """,
    "an error of a dataset is the closures with the workers traceback": """
        def data():
            def generate():
                yield np.float32(1)
                raise KeyError("no such word")
            return rx.data.Dataset.from_generator(generate, output_signature=rx.TensorSpec([]))
        with Cluster(workers=1, servers=1) as cluster:
            co = cluster.coordinator
            iterator = iter(co.create_per_worker_dataset(data))
            step = rx.function(lambda it: next(it))
            assert co.schedule(step, args=(iterator,)).fetch() == 1.0
            kind, text, notes = raised(co.schedule(step, args=(iterator,)).fetch)
            assert "no such word" in text, (kind, text)
            if processes:
                assert "generate" in notes and "worker 0" in notes, notes
    """,
    "each worker has its own of a per worker value": """
        from replicax.coordinator import PerWorkerValue
        index = experimental_get_current_worker_index
        with Cluster(workers=2) as cluster:
            co = cluster.coordinator
            value = co.create_per_worker_value(lambda: {"index": index(), "many": np.arange(3.0) + int(index())})
            assert isinstance(value, PerWorkerValue)
            step = rx.function(lambda value, x: (index(), value["index"], value["many"] * x))
            results = co.fetch([co.schedule(step, args=(value, jnp.float32(2))) for _ in range(20)])
            for here, own, many in results:
                assert here == own and many.tolist() == [2.0 * (i + here) for i in range(3)]
            assert raised(co.create_per_worker_value, 5)[0] == "TypeError"
            assert raised(co.create_per_worker_value, lambda: "text")[0] == "TypeError"
    """,
    "per worker datasets are made of all kinds of datasets": """
        with Cluster(workers=1) as cluster:
            strategy, co = cluster.strategy, cluster.coordinator
            data = rx.data.Dataset.range(6)
            def contexts(context):
                return data.batch(2).map(lambda x: x + context.input_pipeline_id + context.num_replicas_in_sync)
            step = rx.function(lambda iterator: next(iterator))
            for made, first in [
                (data.batch(2), [0, 1]),
                (lambda: data.batch(3), [0, 1, 2]),
                (strategy.experimental_distribute_dataset(data.batch(2)), [0, 1]),
                (strategy.distribute_datasets_from_function(contexts), [1, 2]),
                (lambda: strategy.distribute_datasets_from_function(contexts), [1, 2]),
                (rx.function(lambda: data.batch(4)), [0, 1, 2, 3]),
            ]:
                dataset = co.create_per_worker_dataset(made)
                assert dataset.element_spec.dtype == np.int32
                assert co.schedule(step, args=(iter(dataset),)).fetch().tolist() == first
    """,
    # Messages of 12 MB are taken over as they are; values stay what they were when somebody has them.
    "large values are nobody elses": """
        with Cluster(workers=1, servers=1) as cluster:
            with cluster.strategy.scope():
                v = rx.Variable(jnp.zeros(3_000_000))
            ones = np.ones(3_000_000, "float32")
            v.assign(ones)
            ones[:] = 7
            before, array = v.value(), v.numpy()
            @rx.function
            def add():
                v.assign_add(jnp.ones(3_000_000))
            cluster.coordinator.schedule(add).fetch()
            v.assign_add(np.ones(3_000_000, "float32"))
            after = jax.jit(lambda x: x + 1, donate_argnums=0)(v.value())
            v.assign_sub(after)
            for value, expected in (before, 1.0), (array, 1.0), (after, 4.0), (v.numpy(), -1.0):
                assert (np.asarray(value) == expected).all(), (value[:3], expected)
    """,
    # Fact 148.
    "functions of datasets know their worker in all threads": """
        def index(x):
            return x * 0 + int(experimental_get_current_worker_index())
        with Cluster(workers=2) as cluster:
            co = cluster.coordinator
            step = rx.function(lambda iterator: (next(iterator), experimental_get_current_worker_index()))
            numbers = rx.data.Dataset.range(100)
            for made in (
                numbers.map(index).prefetch(2),
                numbers.map(index, num_parallel_calls=2),
                numbers.map(index, num_parallel_calls=2).prefetch(2),
                numbers.interleave(lambda x: rx.data.Dataset.from_tensors(x).map(index), num_parallel_calls=2),
            ):
                iterator = iter(co.create_per_worker_dataset(lambda: made))
                for element, worker in co.fetch([co.schedule(step, args=(iterator,)) for _ in range(20)]):
                    assert element == worker
    """,
}


@pytest.fixture
def run(run_here):
    return lambda code: run_here(code, head=HEAD)


@pytest.mark.parametrize("name", ANYWHERE)
def test_in_one_process(run, name):
    run("processes = False\n" + textwrap.dedent(ANYWHERE[name]))


@pytest.mark.thorough
def test_over_processes(run_well):
    run_well(in_turn(ANYWHERE, workers=3, servers=2), env=ENVIRONMENT)


def test_variables_that_are_gone_are_dropped_by_their_servers(run):
    run("""
        with Cluster(workers=1, servers=1) as cluster:
            with cluster.strategy.scope():
                one = rx.Variable(jnp.zeros(3))
                other = rx.Variable(jnp.zeros(3))
            owners = cluster.local("ps")[0]._owners
            (owner,) = owners.values()
            assert len(owner.leaves) == 2
            del other
            gc.collect()
            with cluster.strategy.scope():
                third = rx.Variable(0)
            assert len(owner.leaves) == 2
        assert not owners
    """)


def test_variables_of_another_place_are_read_and_not_assigned(run):
    run("""
        with Cluster() as cluster:
            co = cluster.coordinator
            here = rx.Variable(2.0)
            with cluster.strategy.scope():
                there = rx.Variable(1.0)
            multiply = rx.function(lambda: there.assign(there * here))
            co.schedule(multiply)
            co.join()
            here.assign(5.0)
            co.schedule(multiply)
            co.join()
            assert there.numpy() == 10.0
            kind, text, _ = raised(co.schedule, rx.function(lambda: here.assign_add(there)))
            assert kind == "ValueError" and "scope" in text, text
            assert rx.function(lambda: (here.assign_add(there), there.assign_add(here)))
            both = rx.function(lambda: [here.assign_add(there), there.assign_add(here)])
            both()
            assert (here.numpy(), there.numpy()) == (15.0, 25.0)
    """)


def test_variables_of_another_cluster_are_read_and_assigned_there(run):
    run("""
        with Cluster(workers=1, servers=2) as one, Cluster(workers=1, servers=2) as other:
            with one.strategy.scope():
                a = rx.Variable(jnp.full(4, 1.0))
            with other.strategy.scope():
                b = rx.Variable(jnp.full(4, 10.0))
            add = rx.function(lambda: a.assign_add(b))
            add()
            one.coordinator.schedule(add).fetch()
            assert a.numpy().tolist() == [21.0] * 4 and b.numpy().tolist() == [10.0] * 4
            both = rx.function(lambda: [a.assign_add(b), b.assign_add(a)])
            kind, text, _ = raised(one.coordinator.schedule, both)
            assert kind == "ValueError" and "scope" in text, text
            both()
            assert a.numpy().tolist() == [31.0] * 4 and b.numpy().tolist() == [41.0] * 4
    """)


@pytest.mark.parametrize("sharded", [False, True])
def test_rows_computed_from_those_that_were_looked_up_replace_them(run, sharded):
    """The worker computes the new rows (a server does not sort), so that their versions are compared."""
    partitioner = "rx.experimental.partitioners.FixedShardsPartitioner(2)" if sharded else "None"
    run(f"""
        with Cluster(workers=2, servers=2, partitioner={partitioner}) as cluster:
            with cluster.strategy.scope():
                table = rx.Variable(jnp.arange(64.0).reshape(16, 4))
            @rx.function
            def step(ids):
                rows = jnp.sort(-table.value()[ids], axis=1)
                table.assign(table.value().at[ids].set(rows))
            expected = np.arange(64.0).reshape(16, 4)
            def scheduled(ids):
                cluster.coordinator.schedule(step, args=(ids,)).fetch()
            for call, ids in (scheduled, [1, 3]), (scheduled, [3, 9]), (step, [9, 15]), (step, [0, 1]):
                call(jnp.array(ids))
                expected[ids] = np.sort(-expected[ids], axis=1)
            np.testing.assert_array_equal(table.numpy(), expected)
    """)


def test_several_steps_of_a_call_are_several_closures(run):
    run("""
        with Cluster(workers=1) as cluster:
            co = cluster.coordinator
            with cluster.strategy.scope():
                total = rx.Variable(0)
            @rx.function(steps_per_call=3)
            def step(iterator):
                element = next(iterator)
                total.assign_add(jnp.sum(element))
                return element
            iterator = iter(co.create_per_worker_dataset(rx.data.Dataset.range(9).batch(2)))
            first, second = [co.schedule(step, args=(iterator,)) for _ in range(2)]
            assert first.fetch().tolist() == [[0, 1], [2, 3], [4, 5]]
            assert [part.tolist() for part in second.fetch()] == [[6, 7], [8]]
            co.join()
            assert total.numpy() == 36
            assert raised(co.schedule(step, args=(iterator,)).fetch)[0] == "OutOfRangeError"
    """)


def test_one_worker_runs_closures_in_the_order_in_which_they_were_scheduled(run):
    run("""
        with Cluster(workers=1) as cluster:
            co = cluster.coordinator
            with cluster.strategy.scope():
                last, inversions = rx.Variable(-1), rx.Variable(0)
            @rx.function
            def step(number):
                inversions.assign_add((number < last.value()).astype(int))
                last.assign(number)
            for number in range(500):
                co.schedule(step, args=(jnp.asarray(number),))
            co.join()
            assert last.numpy() == 499 and inversions.numpy() == 0, (last.numpy(), inversions.numpy())
    """)


def test_closures_read_variables_of_this_process_while_it_assigns_them(run):
    run("""
        with Cluster(workers=2, servers=1) as cluster:
            co = cluster.coordinator
            with cluster.strategy.scope():
                v = rx.Variable(0.0)
            for shape in ((3,), (5000,)):
                w = rx.Variable(jnp.zeros(shape))
                @rx.function
                def bump():
                    w.assign_add(jnp.ones(shape))
                @rx.function
                def spread():
                    x = w.value()
                    v.assign_add(x[0] * 0)
                    return jnp.max(x) - jnp.min(x)
                values = []
                for _ in range(150):
                    values.append(co.schedule(spread))
                    bump()
                co.join()
                assert max(co.fetch(values)) == 0 and w.numpy()[0] == 150
    """)


def test_leaves_that_a_program_asks_for_are_read_alone(run):
    run("""
        with Cluster(workers=1, servers=2) as cluster:
            with cluster.strategy.scope():
                v = rx.Variable({"a": jnp.zeros(1000), "b": jnp.ones(2)})
            storage, servers, asked = v._storage, v._cluster.servers, []
            real = servers.read
            servers.read = lambda places: asked.append(list(places)) or real(places)
            for leaves in (storage.kept([1]), storage.taken([1])):
                assert [leaf.tolist() for leaf in leaves] == [[1, 1]]
            assert asked == [[storage.places[1]]] * 2
    """)


def test_parts_of_a_sharded_variable_are_the_same_objects_each_time(run):
    run("""
        partitioner = rx.experimental.partitioners.FixedShardsPartitioner(2)
        with Cluster(workers=1, servers=2, partitioner=partitioner) as cluster:
            with cluster.strategy.scope():
                table = rx.Variable(jnp.arange(8.0).reshape(4, 2))
            assert all(one is other for one, other in zip(table.variables, table.variables))
            with rx.GradientTape() as tape:
                loss = sum(jnp.sum(part.value() ** 2) for part in table.variables)
            found = tape.gradient(loss, table.variables)
            assert np.concatenate(found).tolist() == (2 * table.numpy()).tolist(), found
    """)


def test_values_of_workers_are_told_apart_from_other_arrays_and_fit_signatures(run):
    run("""
        index = experimental_get_current_worker_index
        with Cluster(workers=2, servers=1) as cluster:
            co = cluster.coordinator
            five = jnp.float32(5)
            value = co.create_per_worker_value(lambda: (five, five) if int(index()) == 0 else (five, -five))
            @rx.function
            def pair(values, x):
                return *values, x, index()
            found = {tuple(map(float, co.schedule(pair, args=(value, five)).fetch())) for _ in range(40)}
            assert found <= {(5.0, 5.0, 5.0, 0.0), (5.0, -5.0, 5.0, 1.0)}, found
            one = co.create_per_worker_value(lambda: jnp.float32(3))
            add = lambda x: x + 1
            declared = rx.function(add, input_signature=[rx.TensorSpec((), "float32")])
            concrete = rx.function(add).get_concrete_function(rx.TensorSpec((), "float32"))
            assert [co.schedule(f, args=(one,)).fetch() for f in (declared, concrete)] == [4.0, 4.0]
    """)


@pytest.mark.parametrize("shards", [1, 2])
def test_keys_are_looked_up_read_and_returned(run, shards):
    run(f"""
        parts = rx.experimental.partitioners.FixedShardsPartitioner({shards})
        with Cluster(workers=1, servers=2, partitioner=parts) as cluster:
            keys = jax.random.split(jax.random.key(0), 2000)
            with cluster.strategy.scope():
                table = rx.Variable(keys)
            def drawn():
                rows = table.value()
                return jax.random.normal(rows[7], (2,)), rows[jnp.array([3, 1999])], rows[5:7]
            number, two, slice_ = cluster.coordinator.schedule(rx.function(drawn)).fetch()
            np.testing.assert_array_equal(number, jax.random.normal(keys[7], (2,)))
            for got, expected in (two, keys[jnp.array([3, 1999])]), (slice_, keys[5:7]), (table.value(), keys):
                assert (jax.random.key_data(got) == jax.random.key_data(expected)).all()
    """)


PARTITIONS = [
    ([3, 1], [1, 1]),
    ([2], [1, 1]),
    ((2,), [1, 1]),
    ([1, 1, 1, 1], None),
    (None, "got: None"),
    ([], "got: []"),
    ([0, 1], "got: [0, 1]"),
    ([-1, 1], "got: [-1, 1]"),
    ([1, 2], "got: [1, 2]"),
    (5, "got: 5"),
    ("ab", "got: 'ab'"),
    ([1.5, 1], "got: [1.5, 1]"),
]


def test_results_of_partitioners(run):
    """As in TensorFlow, which raises errors of Python's for the last ones, and for negative numbers."""
    run(f"""
        for counts, expected in {PARTITIONS!r}:
            with Cluster(workers=1, servers=2, partitioner=lambda shape, dtype: counts) as cluster:
                with cluster.strategy.scope():
                    if isinstance(expected, str):
                        kind, text, _ = raised(lambda: rx.Variable(jnp.ones((2, 2))))
                        assert kind == "ValueError" and "must return a list/tuple" in text and expected in text, text
                    else:
                        v = rx.Variable(jnp.ones((2, 2)))
                        rows = [part.shape[0] for part in v.variables] if hasattr(v, "variables") else None
                        assert rows == expected and v.numpy().tolist() == [[1, 1]] * 2, (counts, rows)
    """)


def test_initial_values_are_made_for_each_part(run):
    """As in TensorFlow, which calls `plain` and `full` for each part too."""
    run("""
        calls = []
        def init(**kwargs):
            calls.append({name: tuple(value) for name, value in kwargs.items()})
            return jnp.full(kwargs["partition_shape"], len(calls), jnp.float32)
        def plain():
            calls.append("plain")
            return jnp.ones((5, 2))
        def full(**kwargs):
            calls.append(sorted(kwargs))
            return jnp.arange(10.0).reshape(5, 2)
        def fails(**kwargs):
            raise KeyError("its own")
        known = dict(shape=(5, 2), dtype=jnp.float32)
        partitioner = rx.experimental.partitioners.FixedShardsPartitioner(2)
        with Cluster(workers=1, servers=2, partitioner=partitioner) as cluster, cluster.strategy.scope():
            v = rx.Variable(init, **known)
            assert [part.numpy().tolist() for part in v.variables] == [[[1, 1]] * 3, [[2, 2]] * 2]
            assert calls == [
                {"partition_shape": (3, 2), "partition_offset": (0, 0)},
                {"partition_shape": (2, 2), "partition_offset": (3, 0)},
            ]
            for function, options, expected in (
                (plain, known, ["plain"]),
                (plain, {}, ["plain"]),
                (full, known, [["partition_offset", "partition_shape"]]),
                (full, {}, [[]]),
            ):
                calls.clear()
                v = rx.Variable(function, **options)
                assert calls == expected and [part.shape[0] for part in v.variables] == [3, 2]
                assert np.array_equal(v.numpy(), jnp.ones((5, 2)) if function is plain else full())
            assert raised(lambda: rx.Variable(fails, **known))[:2] == ("KeyError", "'its own'")
            assert raised(lambda: rx.Variable(init))[0] == "KeyError"  # the shape is not known before the call
            cluster.use(rx.experimental.partitioners.FixedShardsPartitioner(1))
        with cluster.strategy.scope():
            assert raised(lambda: rx.Variable(init, **known))[0] == "KeyError"  # there is one part
    """)


def test_the_coordinator_cannot_iterate_over_a_distributed_dataset(run):
    run("""
        with Cluster(workers=1, servers=1) as cluster:
            strategy, data = cluster.strategy, rx.data.Dataset.range(4).batch(2)
            for dataset in (
                strategy.experimental_distribute_dataset(data),
                strategy.distribute_datasets_from_function(lambda context: data),
            ):
                for call in (lambda: iter(dataset), lambda: list(dataset)):
                    kind, text, _ = raised(call)
                    assert kind == "ValueError", (kind, text)
                    assert "pass this dataset to ClusterCoordinator.create_per_worker_dataset" in text
                iterator = iter(cluster.coordinator.create_per_worker_dataset(dataset))
                first = cluster.coordinator.schedule(rx.function(lambda it: next(it)), args=(iterator,))
                assert first.fetch().tolist() == [0, 1]
    """)
