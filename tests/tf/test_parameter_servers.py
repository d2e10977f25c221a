"""Programs of TensorFlow on parameter servers."""

from __future__ import annotations

from ps_clusters import ENVIRONMENT, HEAD


def test_an_assertion_that_fails_updates_nothing_and_prints_come_out_here(run_well):
    done = run_well(
        """
        with Cluster(workers=2, servers=1, processes=True) as there, Cluster(workers=2, servers=1) as here:
            import replicax.tf as tf
            for cluster, two in (there, 2.0), (here, 20.0):
                co = cluster.coordinator
                with cluster.strategy.scope():
                    v = tf.Variable(1.0)
                @tf.function
                def step(x):
                    tf.debugging.assert_positive(x, message="must be positive")
                    v.assign_add(x)
                    tf.print("x is", x)
                    return x
                assert co.schedule(step, args=(tf.constant(two),)).fetch() == two
                failing = co.schedule(step, args=(tf.constant(-5.0),))
                assert raised(failing.fetch)[0] == "InvalidArgumentError", raised(failing.fetch)
                assert raised(co.join)[0] == "InvalidArgumentError"
                co.join()
                assert v.numpy() == 1 + two, v.numpy()
        """,
        head=HEAD,
        env=ENVIRONMENT,
    )
    assert {"x is 2", "x is 20"} <= set((done.stdout + done.stderr).splitlines()), done


def test_types_of_64_bits_keys_random_numbers_and_ids_are_kept_whatever_the_tasks_have(run_well):
    """The tasks run a program of replicax itself, whose types have 32 bits, the coordinator one of replicax.tf."""
    run_well(
        """
        def check(cluster):
            co = cluster.coordinator
            with cluster.strategy.scope():
                many, small = tf.Variable(2**40, dtype=tf.int64), tf.Variable(1e-300, dtype=tf.float64)
                generator = tf.random.Generator.from_seed(3)
                key = rx.Variable(jax.random.key(3))
                table = tf.Variable(tf.zeros([100, 8]))
            assert many.numpy() == 2**40 and small.numpy() == 1e-300
            @tf.function
            def step(iterator):
                x = next(iterator)
                many.assign_add(x)
                small.assign(small * 2)
                key.assign(jax.random.split(key.value(), 1)[0])
                return many.read_value(), generator.uniform([2]), tf.random.uniform([2]), tf.cast(x, tf.float64) / 3
            iterator = iter(co.create_per_worker_dataset(tf.data.Dataset.range(2, 5)))
            results = co.fetch([co.schedule(step, args=(iterator,)) for _ in range(3)])
            assert [r[0] for r in results] == [2**40 + 2, 2**40 + 5, 2**40 + 9]
            assert results[2][3] == np.float64(4) / 3
            assert small.numpy() == 8e-300
            expected = tf.random.Generator.from_seed(3)
            for _, drawn, _, _ in results:
                assert (drawn == expected.uniform([2]).numpy()).all()
            assert len({tuple(r[2].tolist()) for r in results}) == 3
            found = jax.random.key(3)
            for _ in range(3):
                found = jax.random.split(found, 1)[0]
            assert (jax.random.key_data(key.value()) == jax.random.key_data(found)).all()

            assert type(table).__name__ == "ShardedVariable", type(table)
            @tf.function
            def step(ids):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids))
                table.assign_sub(tape.gradient(loss, table))
                return loss
            for kind in (tf.int32, tf.int64):
                co.schedule(step, args=(tf.constant([[1, 2], [3, 99]], dtype=kind),)).fetch()
            rows = np.flatnonzero(table.numpy()[:, 0])
            assert rows.tolist() == [1, 2, 3, 99] and (table.numpy()[rows] == -2).all(), table.numpy()[rows]

        partitioner = rx.experimental.partitioners.MinSizePartitioner(1 << 10, 2)  # divides the table alone
        options = {"workers": 1, "servers": 2, "partitioner": partitioner}
        with Cluster(**options, processes=True) as cluster:
            import replicax.tf as tf
            check(cluster)
        with Cluster(**options) as cluster:
            check(cluster)
        """,
        head=HEAD,
        env=ENVIRONMENT,
    )


def test_tensorflows_prints_and_assertions_become_outputs(run_well):
    run_well(
        """
        import numpy as np
        import replicax.tf as tf
        import replicax as rx
        from cut_simulator import simulate

        rx.config.optimize_programs(False)
        v = tf.Variable(1.0)

        @tf.function
        def step(x):
            tf.print("x", x)
            tf.debugging.assert_positive(x, message="x has to be positive")
            v.assign_add(x)
            return v

        outcome = simulate(step, (tf.constant(2.0),), exported=True)
        parts = outcome.cut
        assert [callback.shows for callback in parts.callbacks] == [True, False], parts.callbacks
        assert not parts.has_callbacks
        for callback, operands in zip(parts.callbacks, outcome.operands):
            callback.function(*map(np.asarray, operands))
        """,
        env=ENVIRONMENT,
    )
