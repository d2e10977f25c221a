"""Keras models on parameter servers: checkpoints from the coordinator, and evaluators beside it and in line."""

from __future__ import annotations

import pytest
from ps_clusters import ENVIRONMENT, HEAD, in_turn

OWN = """
    import keras
    import replicax.tf as tf
    from replicax.experimental import partitioners

    X = np.random.default_rng(0).integers(0, 60, (64, 3)).astype("i4")
    Y = (X.sum(axis=1, keepdims=True) / 60).astype("f4")

    class Model(keras.Model):  # its variables are made when it is called
        def __init__(self):
            super().__init__()
            self.table, self.out = keras.layers.Embedding(60, 4), keras.layers.Dense(1)

        def call(self, x):
            return self.out(keras.ops.mean(self.table(x), axis=1))
"""
PROGRAMS = {
    # TensorFlow's sidecar: a task that is in no cluster evaluates each checkpoint that `fit` saves.
    "an evaluator beside the cluster follows the checkpoints": """
        from tasks import forked
        folder = os.path.abspath("followed")
        reading, writing = os.pipe()

        def evaluate():
            model = Model()
            model.compile("adam", "mse")
            steps = tf.Variable(0, dtype=tf.int64)
            checkpoint = tf.train.Checkpoint(model=model, steps=steps)
            for path in tf.train.checkpoints_iterator(folder, timeout=100):
                checkpoint.restore(path)
                os.write(writing, f"{int(steps.numpy())} {model.evaluate(X, Y, verbose=0)};".encode())
                if steps.numpy() == 6:
                    break

        evaluator = forked(evaluate, {})
        os.close(writing)
        with Cluster(workers=1, servers=2, partitioner=partitioners.FixedShardsPartitioner(2)) as cluster:
            with cluster.strategy.scope():
                model = Model()
                model.compile("adam", "mse")
                steps = tf.Variable(0, dtype=tf.int64)
            manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model, steps=steps), folder, 3)

            class Save(keras.callbacks.Callback):
                def on_epoch_end(self, epoch, logs=None):
                    steps.assign(self.model.optimizer.iterations.numpy())
                    manager.save()

            model.fit(X, Y, batch_size=32, epochs=3, verbose=0, callbacks=[Save()])
            expected = model.evaluate(X, Y, verbose=0)
        with open(reading) as output:
            *_, last, _ = output.read().split(";")  # when the evaluator has ended
        os.waitpid(evaluator, 0)
        step, loss = last.split()
        assert step == "6" and abs(float(loss) - expected) < 1e-6, (last, expected)
    """,
    # Also by other strategies and without one, before the variables are made, and back.
    "a checkpoint is restored with other servers and other parts": """
        from contextlib import nullcontext
        folder = os.path.abspath("checkpoints")

        def made(strategy):
            with strategy.scope() if strategy else nullcontext():
                model, optimizer = Model(), keras.optimizers.Adam(0.01)
            return model, optimizer, tf.train.Checkpoint(model=model, optimizer=optimizer)

        def values(model, optimizer):
            return [w.numpy() for w in model.weights], [slot.numpy() for slot in optimizer.variables]

        def build(model, optimizer, strategy):
            with strategy.scope() if strategy else nullcontext():
                model(X[:1])
                optimizer.build(model.trainable_variables)

        def same(found):
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                assert np.asarray(one).dtype == np.asarray(other).dtype and (one == other).all()

        with Cluster(workers=1, servers=2, partitioner=partitioners.FixedShardsPartitioner(2)) as cluster:
            strategy = cluster.strategy
            model, optimizer, checkpoint = made(strategy)
            build(model, optimizer, strategy)

            @tf.function
            def step(x, y):
                def replica(x, y):
                    with tf.GradientTape() as tape:
                        loss = keras.ops.mean((model(x) - y) ** 2)
                    gradients = tape.gradient(loss, model.trainable_variables)
                    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
                strategy.run(replica, args=(x, y))

            for _ in range(3):
                cluster.coordinator.schedule(step, args=(jnp.asarray(X), jnp.asarray(Y)))
            cluster.coordinator.join()
            manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
            path = manager.save()
            weights = folder + "/model.weights.h5"
            model.save_weights(weights)
            expected = values(model, optimizer)
            assert expected[1][0] == 3

        with Cluster(workers=1, servers=3, partitioner=partitioners.FixedShardsPartitioner(3)) as cluster:
            strategy = cluster.strategy
            for deferred in (False, True):
                model, optimizer, checkpoint = made(strategy)
                if not deferred:
                    build(model, optimizer, strategy)
                status = checkpoint.restore(path)
                if deferred:
                    build(model, optimizer, strategy)
                status.assert_consumed()
                same(values(model, optimizer))
                (table,) = model.table.weights
                assert [part.numpy().shape for part in table.variables] == [(20, 4)] * 3
            back = checkpoint.save(folder + "/back")
            model.load_weights(weights)
            same((model.get_weights(), expected[1]))

        for strategy in (rx.MirroredStrategy(["GPU:0", "GPU:1"]), None):
            for saved in (path, back):
                model, optimizer, checkpoint = made(strategy)
                status = checkpoint.restore(saved)
                build(model, optimizer, strategy)
                same(values(model, optimizer))
    """,
    # As the tutorial has it: each worker evaluates batches of its own dataset, between two epochs.
    "workers evaluate in line": """
        def eval_dataset():
            return tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).repeat()

        with Cluster(workers=2, servers=2, partitioner=partitioners.FixedShardsPartitioner(2)) as cluster:
            strategy, coordinator = cluster.strategy, cluster.coordinator
            with strategy.scope():
                model, mean = Model(), keras.metrics.MeanSquaredError()
                model(X[:1])

            @tf.function
            def eval_step(iterator):
                def replica(x, y):
                    mean.update_state(y, model(x, training=False))
                strategy.run(replica, args=next(iterator))

            iterator = iter(coordinator.create_per_worker_dataset(eval_dataset))
            for _ in range(8):
                coordinator.schedule(eval_step, args=(iterator,))
            coordinator.join()
            assert mean.count.numpy() == 8 * 16
            direct = float(np.mean((model(X) - Y) ** 2))  # in the coordinator's process
            assert 0.5 * direct < float(mean.result()) < 2 * direct
            coordinator.join()
    """,
}


@pytest.mark.thorough
def test_evaluators_and_checkpoints(run_well):
    run_well(in_turn(PROGRAMS, HEAD + OWN), env=ENVIRONMENT, timeout=240)
