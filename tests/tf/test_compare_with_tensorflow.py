"""`replicax compare` with TensorFlow itself: a program that agrees for three steps, and then differs on purpose."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import numpy as np
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
x = np.random.rand(70, 8).astype("float32")
y = np.random.randint(0, 3, 70)
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(70).batch(16, drop_remainder=True).repeat()
with strategy.scope():
    model = tf.keras.Sequential([
        tf.keras.Input((8,)),
        tf.keras.layers.Dense(16, name="hidden"),
        tf.keras.layers.BatchNormalization(),
        tf.keras.layers.ReLU(),
        tf.keras.layers.Dropout(0.3),
        tf.keras.layers.Dense(3, name="logits"),
    ])
    optimizer = tf.keras.optimizers.Adam(tf.keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.9))
    optimizer.build(model.trainable_variables)

def replica_step(inputs):
    rows, labels = inputs
    with tf.GradientTape() as tape:
        logits = model(rows + 0.1 * tf.random.normal(tf.shape(rows)), training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss = tf.nn.compute_average_loss(losses, global_batch_size=16)
    differs = "replicax" in sys.modules and optimizer.iterations > 2
    *gradients, last = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip([*gradients, tf.where(differs, -last, last)], model.trainable_variables))
    return loss

@tf.function
def step(inputs):
    return strategy.reduce("SUM", strategy.run(replica_step, args=(inputs,)), axis=None)

for inputs in strategy.experimental_distribute_dataset(data):
    step(inputs)
"""


def test_the_first_difference_from_tensorflow_is_named(tensorflow_python, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "replicax",
        "compare",
        "--tensorflow",
        tensorflow_python,
        "--steps",
        "5",
        "program.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1, done.stdout + done.stderr
    results = [line.split() for line in done.stdout.splitlines() if line.split()[1:2] == ["result"]]
    assert [row[0] for row in results[1:]] == ["1", "2", "3", "4", "5"]
    assert all(float(row[4]) < 1e-4 for row in results[1:5])
    assert "First difference: step 4 (program.py:" in done.stdout
    assert "The results of this step agree, the variables after it do not" in done.stdout
    (variable,) = [line for line in done.stdout.splitlines() if line.startswith("  variable ")]
    assert "variable sequential/logits/bias, shape (3,)" in variable
    for text in ("Dataset.shuffle does not shuffle", "tf.random.normal gives", "dropout gives the same numbers"):
        assert text in done.stdout
    assert "Not made equal" not in done.stdout
