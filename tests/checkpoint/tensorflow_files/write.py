"""Writes checkpoints of TensorFlow, and beside them the losses of the steps that follow: `write.py FOLDER [NAMES]`.

It runs under TensorFlow. Those of Keras 2 are written where `tf_keras` is installed:

    python -m pip install --target /tmp/keras2 --no-deps tf_keras
    PYTHONPATH=/tmp/keras2 .venv-tensorflow/bin/python tests/checkpoint/tensorflow_files/write.py FOLDER
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["KERAS_BACKEND"] = "tensorflow"

import numpy as np
import tensorflow as tf
from programs import PROGRAMS

STEPS = 5


def train(name, keras, folder):
    """Trains, saves by a manager after 2 and 4 steps, and returns the losses of the steps after that."""
    training = PROGRAMS[name](tf, keras, 0)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(**training.objects), folder, max_to_keep=5)
    for _ in range(2):
        training.step(), training.step()
        manager.save()
    return [float(training.step()) for _ in range(STEPS)]


def weights(folder):
    """Saves a model's weights in Keras's own file."""
    training = PROGRAMS["functional"](tf, tf.keras, 0)
    training.step()
    training.objects["model"].save_weights(os.path.join(folder, "model.weights.h5"))
    return float(training.step())


def values(folder):
    """Saves values of several dtypes, in several files; those of a divided variable; and by names."""
    from tensorflow.python.distribute.sharded_variable import ShardedVariable

    rng = np.random.default_rng(1)
    table = rng.normal(size=(70, 3)).astype(np.float32)
    parts = [tf.Variable(table[:66], name="part_0"), tf.Variable(table[66:], name="part_1")]
    root = tf.train.Checkpoint(
        table=ShardedVariable(parts, name="table"),
        half=tf.Variable(tf.cast(table[0], tf.bfloat16)),
        texts=tf.Variable(["a", "", "longer than the others"]),
        flag=tf.Variable([True, False]),
        wide=tf.Variable(2**40, dtype=tf.int64),
        double=tf.Variable(1 / 3, dtype=tf.float64),
        generator=tf.random.Generator.from_seed(1),
        iterator=iter(tf.data.Dataset.range(3)),
    )
    policy = tf.train.experimental.MaxShardSizePolicy(300)
    options = tf.train.CheckpointOptions(experimental_sharding_callback=policy)
    root.write(os.path.join(folder, "values"))
    whole = tf.train.Checkpoint(a=tf.Variable(table), b=tf.Variable(table[:2]), c=tf.Variable(table[0]))
    whole.write(os.path.join(folder, "sharded"), options)
    named = [tf.Variable(table, name="net/table"), tf.Variable(7, dtype=tf.int64, name="global_step")]
    tf.compat.v1.train.Saver(named).save(None, os.path.join(folder, "named"), global_step=7)
    return table.tolist()


def main():
    folder, told = sys.argv[1], {}
    for name in PROGRAMS:
        told[name] = train(name, tf.keras, os.path.join(folder, name))
    told["weights"] = weights(folder)
    told["table"] = values(folder)
    if importlib.util.find_spec("tf_keras") is not None:
        import tf_keras

        for name, optimizers in {"keras2": tf_keras.optimizers, "legacy": tf_keras.optimizers.legacy}.items():
            PROGRAMS[name] = lambda tf, keras, seed, optimizers=optimizers: of_keras2(optimizers)
            told[name] = train(name, tf_keras, os.path.join(folder, name))
    with open(os.path.join(folder, "told.json"), "w", encoding="utf-8") as file:
        json.dump(told, file)


def of_keras2(optimizers):
    """The program `sequential`, with Adam."""
    import tf_keras
    from programs import of_keras

    layers = [tf_keras.layers.Dense(5, activation="relu"), tf_keras.layers.BatchNormalization()]
    model = tf_keras.Sequential([*layers, tf_keras.layers.Dense(1)])
    return of_keras(tf, tf_keras, model, optimizers.Adam(0.05))


if __name__ == "__main__":
    main()
