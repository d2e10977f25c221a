"""Programs written for TensorFlow, cut for parameter servers."""

from __future__ import annotations

from tasks import ENVIRONMENT


def test_generators_branches_and_loops_of_a_tf_function(run_well):
    run_well(
        """
        import numpy as np
        import replicax.tf as tf
        import replicax as rx
        from cut_simulator import check, simulate

        rx.config.optimize_programs(False)
        count, total = tf.Variable(0), tf.Variable(np.arange(2000.0, dtype=np.float32))
        generator = tf.random.Generator.from_seed(1)

        @tf.function
        def step(x):
            if tf.reduce_sum(x) > 0:  # goes element by element: the servers do it
                total.assign_add(x)
                count.assign_add(2)
            else:
                total.assign(-total)
            return generator.normal([3]), count.read_value()

        for scale in (1.0, -1.0):
            outcome = check(simulate(step, (tf.constant(np.full(2000, scale, np.float32)),), 2))
            assert outcome.shipped <= 8002 and outcome.read <= 40, (outcome.shipped, outcome.read)
            assert not any(update.compared for update in outcome.cut.exchange.updates)

        @tf.function
        def loop(n):
            for i in tf.range(n):
                total.assign(tf.sin(total) + tf.cast(i, tf.float32))
                count.assign_add(1)
            return count.read_value()

        outcome = check(simulate(loop, (tf.constant(3),), 2))
        assert [len(update.compared) for update in outcome.cut.exchange.updates] == [1, 1]
        """,
        env=ENVIRONMENT,
    )
