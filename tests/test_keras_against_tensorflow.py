"""The same program with Keras under TensorFlow's MirroredStrategy and under replicax's: the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

PROGRAM = """
import importlib, json, sys
import numpy as np
tf = importlib.import_module(sys.argv[1])
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
keras = tf.keras
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
rng = np.random.RandomState(0)
x, y = rng.rand(70, 8).astype("float32"), rng.randint(0, 3, 70).astype("int32")
weights = [(rng.randn(8, 16) * 0.3).astype("float32"), (rng.randn(16, 3) * 0.3).astype("float32")]
out = {}

def classifier():
    dense = [keras.layers.Dense(16, activation="relu", kernel_regularizer=keras.regularizers.L2(0.01)),
             keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((8,)), *dense])
    for layer, kernel in zip(dense, weights):
        layer.kernel.assign(kernel)
    return model

def loss_of(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)

# compile and fit; 70 rows in batches of 16 leave one of 6
with strategy.scope():
    model = classifier()
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss_of(), metrics=["accuracy"])
history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, validation_data=(x[:20], y[:20]))
out["fit"] = history.history
out["evaluate"] = [float(v) for v in model.evaluate(x, y, batch_size=20, verbose=0)]
out["predict"] = model.predict(x[:7], batch_size=4, verbose=0).tolist()
out["fit weights"] = [w.numpy().tolist() for w in model.weights]

# a custom loop: 20 steps, a learning rate that changes, a clipped gradient, two metrics
with strategy.scope():
    model = classifier()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.9)
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True, clipnorm=0.5)
    optimizer.build(model.trainable_variables)  # where it is left to the first traced step, TensorFlow fails
    loss_object = loss_of(reduction=None)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    mean_loss = keras.metrics.Mean()
dataset = tf.data.Dataset.from_tensor_slices((x[:64], y[:64])).batch(16).repeat(5)

def step(batch):
    rows, labels = batch
    with tf.GradientTape() as tape:
        logits = model(rows, training=True)
        each = loss_object(labels, logits)
        loss = tf.reduce_sum(each) / 16
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    accuracy.update_state(labels, logits)
    mean_loss.update_state(loss * 2)
    return loss

@tf.function
def train(batch):
    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step, args=(batch,)), axis=None)

out["losses"] = [float(train(batch)) for batch in strategy.experimental_distribute_dataset(dataset)]
out["metrics"] = [float(accuracy.result()), float(mean_loss.result())]
out["loop weights"] = [w.numpy().tolist() for w in model.weights]

print("RESULT" + json.dumps(out))
"""


def ran(python: str, module: str, folder: Path, **env: str) -> dict:
    path = folder / "program.py"
    path.write_text(PROGRAM)
    ended = subprocess.run(
        [python, str(path), module],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "REPLICAX_VIRTUAL_DEVICES": "", **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.split("RESULT")[1])


def test_the_numbers_are_tensorflows(tensorflow_python, tmp_path):
    theirs = ran(tensorflow_python, "tensorflow", tmp_path, KERAS_BACKEND="tensorflow", PYTHONPATH="")
    ours = ran(sys.executable, "replicax.tf", tmp_path)
    assert list(ours) == list(theirs) and sorted(ours["fit"]) == sorted(theirs["fit"])
    for name, values in theirs.items():
        if name == "fit":
            for metric in values:
                np.testing.assert_allclose(ours["fit"][metric], values[metric], rtol=1e-4, err_msg=metric)
        elif name.endswith("weights"):
            for one, other in zip(ours[name], values):
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4, err_msg=name)
        else:
            np.testing.assert_allclose(ours[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
    assert len(ours["losses"]) == 20
