"""Programs of the kinds that TensorFlow's tutorials are, under TensorFlow and under replicax: the same numbers.

One process runs all the programs of one machine, two run that of several workers. What TensorFlow gives is recorded
(see recorded.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
from processes import Workers
from recorded import from_tensorflow

# What all the programs have: data, weights to begin with, and a model.
START = """
import importlib, json, os, sys, tempfile
import numpy as np
tf = importlib.import_module(os.environ["MODULE"])
SUM = tf.distribute.ReduceOp.SUM
rng = np.random.RandomState(0)
x, y = rng.rand(70, 8).astype("float32"), rng.randint(0, 3, 70)
weights = [(rng.randn(8, 16) * 0.3).astype("float32"), (rng.randn(16, 3) * 0.3).astype("float32")]
out = {}

def classifier():
    dense = [tf.keras.layers.Dense(16, activation="relu", kernel_regularizer=tf.keras.regularizers.L2(0.01)),
             tf.keras.layers.Dense(3)]
    model = tf.keras.Sequential([tf.keras.Input((8,)), *dense])
    for layer, kernel in zip(dense, weights):
        layer.kernel.assign(kernel)
    return model

def batches(size, rows=64):
    return tf.data.Dataset.from_tensor_slices((x[:rows], y[:rows])).batch(size)

def values(variables):
    return [variable.numpy().tolist() for variable in variables]

class Trainer:
    '''A loop of one's own: the loss of each row scaled by the global batch, regularization by the replicas.'''

    def __init__(self, strategy, optimizer):
        self.strategy = strategy
        with strategy.scope():
            self.model = classifier()
            self.optimizer = optimizer()
            # Where it is left to the first traced step, TensorFlow fails.
            self.optimizer.build(self.model.trainable_variables)
            self.loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction=tf.keras.losses.Reduction.NONE)
            self.accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
            self.mean_loss = tf.keras.metrics.Mean()
            self.steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer, steps=self.steps)

    def replica_step(self, inputs):
        rows, labels = inputs
        with tf.GradientTape() as tape:
            logits = self.model(rows, training=True)
            loss = tf.nn.compute_average_loss(self.loss_object(labels, logits), global_batch_size=16)
            loss += tf.nn.scale_regularization_loss(tf.add_n(self.model.losses))
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))
        self.accuracy.update_state(labels, logits)
        self.mean_loss.update_state(loss * self.strategy.num_replicas_in_sync)
        return loss

    @tf.function
    def step(self, inputs):
        losses = self.strategy.run(self.replica_step, args=(inputs,))
        self.steps.assign_add(1)
        return self.strategy.reduce(SUM, losses, axis=None)

    @tf.function
    def several_steps(self, iterator, count):
        for _ in tf.range(count):
            self.strategy.run(self.replica_step, args=(next(iterator),))

    def metrics(self):
        found = [float(self.accuracy.result()), float(self.mean_loss.result())]
        self.accuracy.reset_state()
        self.mean_loss.reset_state()
        return found
"""

ONE_MACHINE = """
keras = tf.keras
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
folder = tempfile.mkdtemp()

def momentum():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.9)
    return keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True)

def compile_and_fit():  # 70 rows in batches of 16 leave one of 6
    with mirrored.scope():
        model = classifier()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"])
    options = {"batch_size": 16, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, epochs=3, validation_data=(x[:20], y[:20]), **options).history
    evaluated = [float(v) for v in model.evaluate(x, y, batch_size=20, verbose=0)]
    predicted = model.predict(x[:7], batch_size=4, verbose=0).tolist()
    trained = values(model.weights)
    model.save(folder + "/model.keras")
    with tf.distribute.OneDeviceStrategy("CPU:1").scope():  # as it was compiled, and with its optimizer's state
        loaded = keras.models.load_model(folder + "/model.keras")
    return [history, evaluated, predicted, trained, loaded.fit(x, y, epochs=2, **options).history]

def custom_training():
    trainer = Trainer(mirrored, momentum)
    spread = mirrored.experimental_distribute_dataset(batches(16))
    manager = tf.train.CheckpointManager(trainer.checkpoint, folder + "/manager", max_to_keep=2)
    losses, metrics = [], []
    for epoch in range(5):
        for batch in spread:
            losses.append(float(trainer.step(batch)))
        metrics.append(trainer.metrics())
        manager.save()
    end = values(trainer.model.weights)
    saved = [os.path.basename(path) for path in manager.checkpoints]
    trainer.checkpoint.restore(manager.checkpoints[0])  # and the last epoch once more
    again = [float(trainer.step(batch)) for batch in spread]
    return [losses, metrics, end, saved, again, int(trainer.steps.numpy())]

def save_and_load():
    first = Trainer(mirrored, lambda: keras.optimizers.Adam(0.02))
    spread = iter(mirrored.experimental_distribute_dataset(batches(16).repeat()))
    for _ in range(10):
        first.step(next(spread))
    path = first.checkpoint.save(folder + "/from_two")
    found = [[float(first.step(next(spread))) for _ in range(10)], values(first.model.weights)]
    for strategy in [tf.distribute.OneDeviceStrategy("CPU:1"), tf.distribute.get_strategy()]:
        other = Trainer(strategy, lambda: keras.optimizers.Adam(0.5))
        other.checkpoint.restore(path).assert_existing_objects_matched()
        restored = values([*other.model.weights, *other.optimizer.variables, other.steps])
        rest = list(batches(16).repeat().skip(10).take(10))
        found.append([restored, [float(other.step(batch)) for batch in rest], values(other.model.weights)])
    reader = tf.train.load_checkpoint(path)
    found.append(reader.get_tensor("steps/.ATTRIBUTES/VARIABLE_VALUE").tolist())
    return found

def distributed_input():
    local = mirrored.experimental_local_results
    rows = np.arange(22).reshape(11, 2).astype("float32") / 10
    pairs = tf.data.Dataset.from_tensor_slices((rows, rows.sum(axis=1))).batch(4)
    spread = mirrored.experimental_distribute_dataset(pairs)
    found = [str(spread.element_spec), [[part.numpy().tolist() for part in local(batch[0])] for batch in spread]]
    with mirrored.scope():
        slope = tf.Variable([0.5, -0.5], aggregation=tf.VariableAggregation.SUM)

    def replica_step(rows, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.linalg.matvec(rows, slope) - targets) ** 2)
        slope.assign_sub(0.01 * tape.gradient(loss, slope))
        return loss

    def step(batch):
        return mirrored.reduce(SUM, mirrored.run(replica_step, args=batch), axis=None)

    @tf.function
    def epoch(source):
        total = 0.0
        for batch in source:
            total += step(batch)
        return total

    @tf.function
    def of_an_iterator(iterator, count):
        total = 0.0
        for _ in tf.range(count):
            total += step(next(iterator))
        return total

    found.append([float(epoch(spread)) for _ in range(4)])
    found.append([float(of_an_iterator(iter(spread), tf.constant(n))) for n in (2, 3)])
    with_signature = tf.function(step, input_signature=[spread.element_spec])
    found.append([float(with_signature(batch)) for batch in spread] + slope.numpy().tolist())

    def dataset_of(context):
        numbers = tf.data.Dataset.range(14).shard(context.num_input_pipelines, context.input_pipeline_id)
        return numbers.batch(context.get_per_replica_batch_size(8))

    spread = mirrored.distribute_datasets_from_function(dataset_of)  # parts of 4, 4, 4 and 2
    found.append([str(spread.element_spec), [[part.numpy().tolist() for part in local(b)] for b in spread]])

    @tf.function
    def until_it_ends(iterator):
        for _ in tf.range(5):
            optional = iterator.get_next_as_optional()
            if not optional.has_value():
                break
            doubled = mirrored.run(lambda numbers: 2 * numbers, args=(optional.get_value(),))
            tf.print("doubled", local(doubled), output_stream=sys.stdout)

    until_it_ends(iter(spread))

    def value_of(context):
        return tf.constant([context.replica_id_in_sync_group, context.num_replicas_in_sync])

    made = mirrored.experimental_distribute_values_from_function(value_of)
    found.append([part.numpy().tolist() for part in local(mirrored.run(lambda v: v + 1, args=(made,)))])

    def numbers():
        for i in range(3):
            yield np.full(4, i)

    generated = tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec([4], tf.float32))
    iterator = iter(mirrored.experimental_distribute_dataset(generated.batch(2)))
    found.append([[part.numpy().tolist() for part in local(iterator.get_next())] for _ in range(2)])
    for get, error in [(iterator.get_next, tf.errors.OutOfRangeError), (lambda: next(iterator), StopIteration)]:
        try:
            get()
        except error:
            found.append(error.__name__)
    return found

def tpu():  # on virtual TPUs; TensorFlow has no TPU here, and mirrors
    strategy = mirrored
    if tf.__name__ != "tensorflow":
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="")
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        strategy = tf.distribute.TPUStrategy(resolver)
    trainer = Trainer(strategy, lambda: keras.optimizers.Adam(0.01))
    spread = strategy.distribute_datasets_from_function(lambda context: batches(
        context.get_per_replica_batch_size(16)).repeat())
    iterator, found = iter(spread), [strategy.num_replicas_in_sync]
    for count in (5, 15):  # each in one call
        trainer.several_steps(iterator, tf.convert_to_tensor(count))
        found.append([trainer.metrics(), int(trainer.optimizer.iterations.numpy())])
    return found + values(trainer.model.weights)

for program in (compile_and_fit, custom_training, save_and_load, distributed_input, tpu):
    out[program.__name__] = program()
print("RESULT" + json.dumps(out))
"""

WORKERS = """
strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before any operation
resolver = strategy.cluster_resolver
index, folder = resolver.task_id, os.environ["FOLDER"]
spec = resolver.cluster_spec()
out["cluster"] = [resolver.task_type, index, len(spec.as_dict()["worker"]), strategy.num_replicas_in_sync]

def dataset_of(context):
    part = tf.data.Dataset.from_tensor_slices((x[:64], y[:64])).shard(
        context.num_input_pipelines, context.input_pipeline_id)
    return part.batch(context.get_per_replica_batch_size(16)).repeat()

def own(path):  # the chief's is the one that counts
    return path if index == 0 else os.path.join(folder, f"worker{index}", os.path.basename(path))

def training(until):
    '''As a program that is started again: it goes on from the newest checkpoint.'''
    trainer = Trainer(strategy, lambda: tf.keras.optimizers.RMSprop(0.01))
    manager = tf.train.CheckpointManager(trainer.checkpoint, own(folder + "/checkpoints"), max_to_keep=1)
    newest = tf.train.latest_checkpoint(folder + "/checkpoints")
    if newest:
        trainer.checkpoint.restore(newest)
    begun = int(trainer.steps.numpy())
    iterator = iter(strategy.distribute_datasets_from_function(dataset_of))
    for _ in range(begun):
        next(iterator)
    losses = []
    while int(trainer.steps.numpy()) < until:
        losses.append(float(trainer.step(next(iterator))))
        if len(losses) % 5 == 0:
            manager.save()
            if index:
                tf.io.gfile.rmtree(own(folder + "/checkpoints"))
    return [begun, losses, trainer.metrics(), values(trainer.model.weights)]

out["first"] = training(12)  # of which the last two are lost
out["second"] = training(20)

options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
spread = strategy.experimental_distribute_dataset(tf.data.Dataset.range(11).batch(4).with_options(options))
out["input"] = [np.asarray(strategy.experimental_local_results(batch)[0]).tolist() for batch in spread]

def fitted(epochs, **options):
    '''With callbacks that all workers tell the same paths.'''
    with strategy.scope():
        model = tf.keras.Sequential([classifier(), tf.keras.layers.BatchNormalization()])
        model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.build((None, 8))
    callbacks = [tf.keras.callbacks.BackupAndRestore(folder + "/backup", **options),
                 tf.keras.callbacks.ModelCheckpoint(folder + "/{epoch}.keras")]
    losses = model.fit(batches(16), epochs=epochs, callbacks=callbacks, verbose=0).history["loss"]
    saved = tf.keras.models.load_model(f"{folder}/{epochs}.keras")
    assert all(np.allclose(a.numpy(), b.numpy()) for a, b in zip(saved.weights, model.weights, strict=True))
    return losses

if tf.__name__ != "tensorflow":  # where Keras 3 has no `fit` in several workers
    out["fit"] = [fitted(4), fitted(2, delete_checkpoint=False), fitted(4), sorted(os.listdir(folder))]
print("RESULT" + json.dumps(out))
"""


def environment(module: str, **more: str) -> dict[str, str]:
    theirs = module == "tensorflow"
    own = {"KERAS_BACKEND": "tensorflow", "PYTHONPATH": "", "TF_CPP_MIN_LOG_LEVEL": "3"} if theirs else {}
    return {"MODULE": module, **own, **more}


def on_one_machine(python: str, module: str, folder: Path) -> tuple[str, Any]:
    """What the program of one machine prints, and what it finds."""
    path = folder / f"in_{module}.py"  # `tensorflow.py` would be found as TensorFlow
    path.write_text(START + ONE_MACHINE)
    env = {"REPLICAX_VIRTUAL_DEVICES": "TPU:2", **environment(module)}
    done = programs.run_well(path, folder=folder, timeout=240.0, env=env, python=python, imports="replicax.tf")
    return result(done.stdout)


def on_two_workers(python: str, module: str, folder: Path) -> tuple[list[Any], str]:
    """What each of two workers finds, and what they say of errors."""
    env = environment(module, FOLDER=str(folder / "saved"))
    (folder / "saved").mkdir(parents=True)
    with Workers(folder, 2, START + WORKERS, env=env, python=python, imports="replicax.tf") as workers:
        done = workers.join(timeout=200)
    assert all(worker.returncode == 0 for worker in done.values()), workers.output()[-6000:]
    return [result(done[i].stdout)[1] for i in done], "".join(done[i].stderr for i in done)


def result(stdout: str) -> tuple[str, Any]:
    """What a program printed, and what it found."""
    printed, _, found = stdout.partition("RESULT")
    return printed, json.loads(found)


def assert_alike(ours: Any, theirs: Any, where: str) -> None:
    if isinstance(theirs, dict):
        assert sorted(ours) == sorted(theirs), where
        for key in theirs:
            assert_alike(ours[key], theirs[key], f"{where} {key}")
    elif isinstance(theirs, list) and not all(isinstance(x, (int, float)) for x in theirs):
        assert len(ours) == len(theirs), where
        for i, (one, other) in enumerate(zip(ours, theirs)):
            assert_alike(one, other, f"{where} {i}")
    elif isinstance(theirs, str):
        assert ours == theirs, where
    else:
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4, err_msg=where)


@pytest.mark.numbers
def test_the_programs_of_one_machine(request, tmp_path):
    def live(names: list[str]) -> dict[str, Any]:
        return dict.fromkeys(
            names, on_one_machine(request.getfixturevalue("tensorflow_python"), "tensorflow", tmp_path)
        )

    expected_print, expected = from_tensorflow("one_machine", {"all": START + ONE_MACHINE}, live)["all"]
    printed, results = on_one_machine(sys.executable, "replicax.tf", tmp_path)
    assert printed == expected_print
    assert_alike(results, expected, "")
    losses, _, _, _, again, steps = results["custom_training"]
    assert len(losses) == 20 and losses[-1] < losses[0] and steps == 20
    np.testing.assert_allclose(again, losses[16:], rtol=1e-5)  # what was restored goes on alike


@pytest.mark.numbers
def test_the_program_of_several_workers(request, tmp_path):
    def live(names: list[str]) -> dict[str, Any]:
        python = request.getfixturevalue("tensorflow_python")
        return dict.fromkeys(names, on_two_workers(python, "tensorflow", tmp_path / "theirs")[0])

    theirs = from_tensorflow("two_workers", {"all": START + WORKERS}, live)["all"]
    ours, said = on_two_workers(sys.executable, "replicax.tf", tmp_path / "ours")
    whole, first, rest, files = ours[0].pop("fit")
    assert [len(whole), len(first), len(rest)] == [4, 2, 2] and ours[1].pop("fit")[0] == whole
    np.testing.assert_allclose(first + rest, whole, rtol=1e-5)  # the third one goes on where the second has ended
    assert [name for name in files if "worker" not in name] == [*(f"{i}.keras" for i in range(1, 5)), "checkpoints"]
    assert_alike(ours, theirs, "worker")
    assert "WARNING" not in said
    begun, losses, _, _ = ours[0]["second"]
    assert begun == 10 and len(losses) == 10  # the last two of the first go, once more
    np.testing.assert_allclose(losses[:2], ours[0]["first"][1][10:], rtol=1e-5)
