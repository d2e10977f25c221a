"""Keras on parameter servers: variables, optimizers and loops of one's own; `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import os

import pytest
from ps_clusters import ENVIRONMENT, HEAD, in_turn

KERAS = """
    import keras
    import replicax.tf as tf
    from replicax.experimental import partitioners
"""


@pytest.fixture
def run(run_well):
    # Compiling takes much of the time, so XLA leaves its slow passes out.
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    env = {**ENVIRONMENT, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
    return lambda code: run_well(code, env=env, timeout=240)


# An embedding over two servers, dropout, BatchNorm and a metric: all as on one device, with one worker, and gradients
# and rows alone travel.
LOOP_OF_ONES_OWN = """
    def parts(variable):
        (place,) = variable.__replicax_variable__._storage.places
        return place.parts

    def made(strategy):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            layers = keras.layers
            model = keras.Sequential(
                [layers.Input((5,), dtype="int32"), layers.Embedding(1000, 16), layers.Flatten()]
                + [layers.Dense(8, "relu"), layers.Dropout(0.3), layers.BatchNormalization(), layers.Dense(1)]
            )
            optimizer = keras.optimizers.Adam(0.01)
            metric = keras.metrics.MeanSquaredError()

        @tf.function
        def step(iterator):
            def replica(x, y):
                with tf.GradientTape() as tape:
                    predicted = model(x, training=True)
                    loss = keras.ops.mean(keras.losses.mean_squared_error(y, predicted))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables))
                metric.update_state(y, predicted)
                return loss
            return strategy.run(replica, args=next(iterator))
        return model, optimizer, metric, step

    def data():
        rng = np.random.default_rng(1)
        arrays = rng.integers(0, 1000, (72, 5)).astype("i4"), rng.normal(size=(72, 1)).astype("f4")
        return tf.data.Dataset.from_tensor_slices(arrays).batch(32).repeat(3)  # the last of each has 8 rows

    partitioner = partitioners.MinSizePartitioner(1 << 10, 2)
    with Cluster(workers=1, servers=2, partitioner=partitioner) as cluster:
        coordinator = cluster.coordinator
        model, optimizer, metric, step = made(cluster.strategy)
        iterator = iter(coordinator.create_per_worker_dataset(data))
        losses = coordinator.fetch([coordinator.schedule(step, args=(iterator,)) for _ in range(6)])
        coordinator.join()

        (table,) = model.layers[0].weights
        assert type(table.__replicax_variable__).__name__ == "ShardedVariable"
        assert [part.numpy().shape for part in table.__replicax_variable__.variables] == [(500, 16)] * 2
        slots = {slot.path: slot for slot in optimizer.variables}
        for weight in model.trainable_variables:
            for name in ("momentum", "velocity"):
                slot = slots[f"adam/{weight.path.replace('/', '_')}_{name}"]
                assert parts(slot) == parts(weight), (slot.path, parts(slot), parts(weight))
        served = losses, float(metric.result()), [w.numpy() for w in model.weights]

        for rows in (32, 32, 8):  # with their ids and the weights; a slot of 80 * 8 has 2560 bytes
            found = moved(cluster, lambda: coordinator.schedule(step, args=(iterator,)).fetch())
            once = 4 * (rows * 5 * 16 + rows * 5 + 80 * 8)
            assert 2 * once <= found <= 2 * once + 2000, (found, once)

    model, optimizer, metric, step = made(rx.OneDeviceStrategy("CPU:0"))
    iterator = iter(data())
    losses = [step(iterator) for _ in range(6)]
    np.testing.assert_allclose(served[0], losses, rtol=1e-4)
    np.testing.assert_allclose(served[1], float(metric.result()), rtol=1e-4)
    for one, other in zip(served[2], model.weights):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-3, atol=1e-5)
"""

# Without `steps_per_epoch` each row counts once an epoch, as the coordinator's process reads the data.
AS_ON_ONE_DEVICE = """
    x = np.random.default_rng(0).normal(size=(70, 3)).astype("f4")
    y = x @ np.array([[1.0], [-2.0], [0.5]], "f4")
    dataset = rx.data.Dataset.from_tensor_slices((x, y))

    def trained(one_batch=True, **options):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.02, momentum=0.5), "mse", metrics=["mae"], **options)
        logs = {}
        if one_batch:
            logs |= model.fit(x, y, batch_size=70, epochs=2, verbose=0, validation_data=(x, y)).history
            logs |= {f"more {k}": v for k, v in model.fit(dataset.batch(70), verbose=0).history.items()}
        before = int(model.optimizer.iterations.numpy())
        model.fit(x, y, batch_size=16, verbose=0)  # in any order
        assert model.optimizer.iterations.numpy() == before + 5
        model.set_weights([np.full(weight.shape, 0.25) for weight in model.weights])
        return logs, model.evaluate(x, y, batch_size=16, verbose=0), model.predict(x, batch_size=16, verbose=0)

    with Cluster(workers=2, servers=2) as cluster:
        with cluster.strategy.scope():
            served, several = trained(), trained(one_batch=False, steps_per_execution=5)
    with rx.OneDeviceStrategy("CPU:0").scope():
        expected = trained()
    for found, other in (served, expected), (several, ({}, *expected[1:])):
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
"""

# Each worker has its own dataset where the steps of an epoch are given.
OWN_DATASETS = """
    x = np.random.default_rng(0).normal(size=(64, 3)).astype("f4")
    y = x @ np.array([[1.0], [-2.0], [0.5]], "f4")

    def dataset_fn(context):
        assert context.num_input_pipelines == 1
        batch = context.get_per_replica_batch_size(16)
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64, seed=1).repeat().batch(batch)

    ends = []
    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            ends.append((batch, sorted(logs)))

    with Cluster(workers=2, servers=2) as cluster:
        with cluster.strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.2), "mse", steps_per_execution=2)
        path = "{epoch}.weights.h5"
        stop = keras.callbacks.EarlyStopping("val_loss", min_delta=1e-6, patience=1)
        save = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
        history = model.fit(
            dataset_fn, epochs=30, steps_per_epoch=6, verbose=0, callbacks=[Ends(), stop, save],
            validation_data=(x, y),
        ).history
        loss = history["val_loss"]
        assert len(loss) < 30 and min(loss) < 1e-4, loss
        assert ends[:3] == [(1, ["loss"]), (3, ["loss"]), (5, ["loss"])] and len(ends) == 3 * len(loss)
        assert model.optimizer.iterations.numpy() == 6 * len(loss)
        assert cluster.coordinator.done()
        values = [weight.numpy() for weight in model.weights]

        endless = lambda: tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(16)
        assert model.evaluate(endless, steps=4, verbose=0, return_dict=True)["loss"] < 1e-4
        assert model.predict(lambda: endless().map(lambda x, y: x), steps=2, verbose=0).shape == (32, 1)
        kind, text, _ = raised(model.fit, endless, verbose=0)
        assert kind == "ValueError" and "steps_per_epoch" in text, text

    keras.backend.clear_session()
    other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    other.load_weights(path.format(epoch=len(loss)))
    for one, weight in zip(values, other.weights):
        assert (one == weight.numpy()).all()
"""

# What a worker raises comes out of `fit`, and another `fit` works.
RAISES = """
    def broken():
        def generate():
            yield np.ones((4, 3), "f4"), np.ones((4, 1), "f4")
            yield np.ones((4, 3), "f4"), np.ones((4, 1), "f4")
            raise KeyError("no such word")
        specs = tf.TensorSpec([4, 3]), tf.TensorSpec([4, 1])
        return tf.data.Dataset.from_generator(generate, output_signature=specs)

    def short():
        return tf.data.Dataset.from_tensor_slices((np.ones((12, 3), "f4"), np.ones((12, 1), "f4"))).batch(4)

    with Cluster(workers=2, servers=1) as cluster:
        with cluster.strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        kind, text, _ = raised(model.fit, broken, steps_per_epoch=50, epochs=2, verbose=0)
        assert "no such word" in text, (kind, text)
        assert cluster.coordinator.done()
        steps = int(model.optimizer.iterations.numpy())
        import warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(short, steps_per_epoch=50, epochs=1, verbose=0)
        assert any("ran out of data" in str(w.message) for w in caught), caught
        model.fit(short, epochs=2, verbose=0)
        assert 6 < int(model.optimizer.iterations.numpy()) - steps <= 12
"""

# `fit` goes on when a worker is lost, and after an interrupt: with a dataset for each worker, with rows that the
# coordinator reads, and from what `BackupAndRestore` saved.
LOST = """
    x = np.random.default_rng(0).normal(size=(64, 3)).astype("f4")
    y = x @ np.array([[1.0], [-2.0], [0.5]], "f4")
    def data():
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64).repeat().batch(16)
    class At(keras.callbacks.Callback):
        def __init__(self, batch, what):
            super().__init__()
            self.at, self.what = batch, what
        def on_train_batch_end(self, batch, logs=None):
            if batch == self.at:
                self.what()
    def interrupt():
        raise KeyboardInterrupt
    with Cluster(workers=2, servers=2) as cluster:
        def made():
            with cluster.strategy.scope():
                keras.utils.set_random_seed(1)
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
                model.compile(keras.optimizers.Adam(0.05), "mse")
            return model
        def steps(model):
            return int(model.optimizer.iterations.numpy())
        model = made()
        kill = At(10, lambda: cluster.kill("worker", 0))
        model.fit(data, epochs=2, steps_per_epoch=20, verbose=0, callbacks=[kill])
        assert steps(model) == 40
        cluster.start("worker", 0)
        cluster.wait_until_up("worker", 0)
        kill = At(10, lambda: cluster.kill("worker", 1))
        model.fit(np.tile(x, (5, 1)), np.tile(y, (5, 1)), batch_size=16, verbose=0, callbacks=[kill])
        assert steps(model) == 40 + 20
        folder = "backup"
        def fit(model, *callbacks):
            backup = keras.callbacks.BackupAndRestore(folder)
            model.fit(data, epochs=4, steps_per_epoch=10, verbose=0, callbacks=[backup, *callbacks])
        first, epochs = made(), []
        stop = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epoch == 2 and interrupt())
        try:
            fit(first, stop)
        except KeyboardInterrupt:
            epochs.append("interrupted")
        assert cluster.coordinator.done() and steps(first) == 20
        again = made()
        fit(again, keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch)))
        assert epochs == ["interrupted", 2, 3] and steps(again) == 40, (epochs, steps(again))
"""


@pytest.mark.thorough
def test_in_one_process(run):
    programs = {"a loop of one's own": LOOP_OF_ONES_OWN, "as on one device": AS_ON_ONE_DEVICE}
    run(in_turn({**programs, "own datasets": OWN_DATASETS}, HEAD + KERAS))


@pytest.mark.thorough
def test_over_processes(run):
    programs = {"own datasets": OWN_DATASETS, "raises": RAISES, "lost": LOST}
    run(in_turn(programs, HEAD + KERAS, workers=2, servers=2))
