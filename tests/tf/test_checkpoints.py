"""Checkpoints of programs of TensorFlow, and of those that TensorFlow wrote."""

from __future__ import annotations

import tensorflow_files
from tensorflow_files import HERE, RECORDED

written = tensorflow_files.written


def test_a_program_for_tensorflow(run_python):
    """As TensorFlow 2.21 prints it."""
    done = run_python(
        """
        import os, tempfile
        import replicax.tf as tf

        class Layer(tf.Module):
            def __init__(self, units):
                super().__init__()
                self.units, self.scale = units, tf.constant(2.0)

            def __call__(self, x):
                if not hasattr(self, "w"):
                    self.w = tf.Variable(tf.zeros([x.shape[-1], self.units]))
                return x @ self.w

        class Model(tf.Module):
            def __init__(self):
                super().__init__()
                self.layers = [Layer(3), Layer(1)]

            def __call__(self, x):
                for layer in self.layers:
                    x = layer(x)
                return x

        def model_under(strategy):
            with strategy.scope():
                model = Model()
            return model, tf.train.Checkpoint(model=model, step=tf.Variable(0, dtype=tf.int64))

        folder = tempfile.mkdtemp()
        model, checkpoint = model_under(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
        model(tf.ones([2, 4]))
        for v in model.variables:
            v.assign(v + 1.0)
        checkpoint.step.assign_add(7)
        path = checkpoint.save(os.path.join(folder, "ckpt"))
        print(sorted(tf.train.load_checkpoint(path).get_variable_to_shape_map()))

        strategy = tf.distribute.MirroredStrategy(["CPU:2"])
        model, checkpoint = model_under(strategy)
        status = checkpoint.restore(tf.train.latest_checkpoint(folder))
        print(checkpoint.step.numpy(), checkpoint.save_counter)
        with strategy.scope():
            step = tf.function(lambda x: strategy.run(model, args=(x,)))
            print(step(tf.ones([2, 4])).numpy().tolist())
        status.assert_consumed()
    """,
        env={"REPLICAX_VIRTUAL_DEVICES": "CPU:3"},
    )
    assert done.returncode == 0, done.stderr
    keys = ["model/layers/0/w", "model/layers/1/w", "save_counter", "step"]
    assert done.stdout.splitlines() == [
        str(["_CHECKPOINTABLE_OBJECT_GRAPH", *(f"{key}/.ATTRIBUTES/VARIABLE_VALUE" for key in keys)]),
        "7 <tf.Variable 'save_counter:0' shape=() dtype=int64, numpy=1>",
        "[[12.0], [12.0]]",
    ]


_TRAINING = """
import json, sys, warnings
sys.path.insert(0, {here!r})
from programs import PROGRAMS, of_keras
from replicax.tf import keras
warnings.simplefilter("error")
folder = {folder!r}
with open(folder + "/told.json") as file:
    told = json.load(file)

def of_keras2(tf, keras, seed):
    layers = [keras.layers.Dense(5, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return of_keras(tf, keras, keras.Sequential(layers), keras.optimizers.Adam(0.05))

PROGRAMS |= {{name: of_keras2 for name in ("keras2", "legacy")}}

def goes_on(name, build=False, strategy=None, exact=True):
    training = PROGRAMS[name](tf, keras, 1)
    if build:
        training.build()
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(**training.objects), f"{{folder}}/{{name}}", max_to_keep=5)
    assert manager.restore_or_initialize() == f"{{folder}}/{{name}}/ckpt-2"
    status = manager.checkpoint.restore(manager.latest_checkpoint)
    losses = [float(training.step()) for _ in told[name]]
    assert np.allclose(losses, told[name], rtol=1e-5, atol=1e-6), (name, losses, told[name])
    (status.assert_consumed if exact else status.assert_existing_objects_matched)()
    status.expect_partial()
    assert int(manager.checkpoint.save_counter) == 2
    return training
"""


def test_trainings_go_on_with_the_losses_of_tensorflow(written, run_tf):
    """Variables, models and optimizers that exist, and those that are made after `restore`."""
    run_tf(
        _TRAINING.format(here=str(HERE), folder=str(written))
        + """
assert int(goes_on("module").objects["step"]) == 9
goes_on("functional", build=True)
goes_on("sequential")
goes_on("subclass", build=True)  # whose layers in a list are found by the optimizer
if "legacy" in told:  # of Keras 2
    goes_on("module", build=True)
    goes_on("keras2")
    goes_on("legacy", exact=False)  # Keras 3 has no variables for beta_1, beta_2 and decay
    goes_on("legacy", build=True, exact=False)

# Keras's own file, and Keras 2's way to load weights.
training = PROGRAMS["functional"](tf, keras, 1)
training.objects["model"].load_weights(folder + "/model.weights.h5")
assert np.isclose(float(training.step()), told["weights"], rtol=1e-5)
if "legacy" in told:
    model = keras.Sequential([keras.layers.Dense(1)])
    raises(ValueError, lambda: model.load_weights(folder + "/legacy/ckpt-2", skip_mismatch=True), "skip_mismatch")
    raises(AssertionError, lambda: model.load_weights(folder + "/legacy/ckpt-2").expect_partial(), "Nothing except")
"""
    )


def test_a_training_goes_on_under_a_strategy(run_tf):
    run_tf(
        _TRAINING.format(here=str(HERE), folder=str(RECORDED))
        + """
for shard in (False, True):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], shard_variables=shard)
    with strategy.scope():
        training = PROGRAMS["functional"](tf, keras, 1)
    model, optimizer = training.objects["model"], training.objects["optimizer"]
    tf.train.Checkpoint(model=model, optimizer=optimizer).restore(folder + "/functional/ckpt-2")
    from programs import X, Y

    @tf.function
    def step():
        def replica_step():
            rows = tf.range(8) + 8 * tf.distribute.get_replica_context().replica_id_in_sync_group
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(tf.gather(X, rows), training=True) - tf.gather(Y, rows)) ** 2) / 16
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return loss
        return strategy.reduce("SUM", strategy.run(replica_step), axis=None)

    losses = [float(step()) for _ in range(5)]
    assert np.allclose(losses, told["functional"], rtol=1e-5), (losses, told["functional"])
"""
    )


_REPORT = """
import sys, tempfile
import replicax as rx

def here():
    return f"program.py:{sys._getframe(1).f_lineno}"

def check(checkpoint, *expected):
    checkpoint.save(tempfile.mkdtemp() + "/ckpt")
    found = [(entry.kind, entry.what, entry.place.rpartition("/")[2]) for entry in checkpoint.report().entries]
    assert found == [*expected], found

generator, place = tf.random.Generator.from_seed(1), here()
state = "the state of a tf.random.Generator"
"""


def test_random_numbers_that_are_not_saved_are_reported(run_tf):
    run_tf(
        _REPORT
        + """
checkpoint = tf.train.Checkpoint(w=tf.Variable(1.0))
generator.normal([2])
tf.random.normal([2])
counters = "the counters of functions of tf.random that take no generator, which was drawn from"
check(checkpoint, ("variable", state, place), ("random", counters, ""))
"""
    )


def test_random_numbers_of_functions_of_datasets_are_reported(run_tf):
    run_tf(
        _REPORT
        + """
draw = lambda x: tf.random.normal([1]) + generator.normal([1]); drawn = here()
iterator = iter(rx.data.Dataset.range(40).map(draw))
checkpoint = tf.train.Checkpoint(generator=generator, iterator=iterator, random=rx.train.RandomState())
next(iterator)
state += " is assigned by a function of a dataset, which runs ahead of the position that is saved"
ahead = "random numbers that a function of a dataset draws with tf.random, ahead of the saved position"
check(checkpoint, ("variable", state, place), ("random", ahead, drawn))
"""
    )


def test_counters_are_restored_before_their_first_use(run_tf):
    run_tf("""
import os, subprocess, sys, tempfile
import replicax as rx

path = os.path.join(tempfile.mkdtemp(), "ckpt")
checkpoint = tf.train.Checkpoint(random=rx.train.RandomState())
tf.random.set_seed(5)
tf.random.normal([2])
checkpoint.write(path)
expected = tf.random.normal([2]).numpy().tolist()
program = f'''
import replicax as rx, replicax.tf as tf
tf.train.Checkpoint(random=rx.train.RandomState()).restore({path!r})
assert tf.random.normal([2]).numpy().tolist() == {expected}
'''
subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
""")
