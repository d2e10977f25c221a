"""Small trainings that run on TensorFlow and on `replicax.tf`: one writes checkpoints, the other goes on from them.

`PROGRAMS` has for each name a function of `tf`, `keras` and a seed, which returns what is trained: a `Training`.
"""

from __future__ import annotations

import collections

import numpy as np

Training = collections.namedtuple("Training", "objects build step")
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 4)).astype(np.float32), RNG.normal(size=(16, 1)).astype(np.float32)


def stepping(tf, optimizer, loss_of, variables, counter=None):
    """A compiled step, which returns the loss before it."""

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of()
        sources = variables()
        optimizer.apply_gradients(zip(tape.gradient(loss, sources), sources))
        if counter is not None:
            counter.assign_add(1)
        return loss

    return step


def module(tf, keras, seed):
    """A loop of one's own: variables in a module, in lists and dicts, Adam of Keras, and a counter of 64 bits."""
    start = np.random.default_rng(seed)

    class Layer(tf.Module):
        def __init__(self, rows, columns):
            super().__init__()
            self.w = tf.Variable(start.normal(size=(rows, columns)).astype(np.float32), name="w")
            self.more = {"b": tf.Variable(np.zeros(columns, np.float32), name="b")}

        def __call__(self, x):
            return x @ self.w + self.more["b"]

    class Net(tf.Module):
        def __init__(self):
            super().__init__()
            self.layers = [Layer(4, 8), Layer(8, 1)]
            self.scale = (tf.Variable(float(seed + 1), name="scale"),)

        def __call__(self, x):
            return self.layers[1](tf.tanh(self.layers[0](x))) * self.scale[0]

    net, optimizer, counter = Net(), keras.optimizers.Adam(0.05), tf.Variable(0, dtype=tf.int64)
    loss = lambda: tf.reduce_mean((net(X) - Y) ** 2)  # noqa: E731
    step = stepping(tf, optimizer, loss, lambda: net.trainable_variables, counter)
    objects = {"model": net, "optimizer": optimizer, "step": counter}
    return Training(objects, lambda: optimizer.build(net.trainable_variables), step)


def of_keras(tf, keras, model, optimizer):
    def loss():
        return tf.reduce_mean((model(X, training=True) - Y) ** 2)

    def build():
        model(X)
        optimizer.build(model.trainable_variables)

    step = stepping(tf, optimizer, loss, lambda: model.trainable_variables)
    return Training({"model": model, "optimizer": optimizer}, build, step)


def sequential(tf, keras, seed):
    layers = keras.layers
    normalized = [layers.Dense(5, activation="relu"), layers.BatchNormalization(), layers.Dense(1)]
    return of_keras(tf, keras, keras.Sequential(normalized), keras.optimizers.SGD(0.05, momentum=0.9))


def functional(tf, keras, seed):
    layers = keras.layers
    x = keras.Input((4,))
    hidden = layers.Dense(4, activation="tanh", name=f"first_{seed}")(x)
    y = layers.Dense(1)(layers.LayerNormalization()(layers.Add()([x, hidden])))
    return of_keras(tf, keras, keras.Model(x, y), keras.optimizers.RMSprop(0.01))


def subclass(tf, keras, seed):
    layers = keras.layers

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.recurrent = layers.GRU(3)
            self.dense = layers.Dense(1)
            self.between = [layers.Dense(3, activation="tanh")]  # of which Keras 3 on TensorFlow does not save the name

        def call(self, x, training=False):
            return self.dense(self.between[0](self.recurrent(x[:, None])))

    return of_keras(tf, keras, Net(), keras.optimizers.Adam(0.05, amsgrad=True))


PROGRAMS = {one.__name__: one for one in (module, sequential, functional, subclass)}
