"""The models that are measured: their parameters, batches and arithmetic, written once for JAX and for TensorFlow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

CLASSES = 10


class Model:
    """What the models have in common: a class for each row of the batch."""

    batch: int

    def y(self, rng: np.random.Generator) -> np.ndarray:
        return np.eye(CLASSES, dtype=np.float32)[rng.integers(0, CLASSES, self.batch)]


class MLP(Model):
    """Small layers: what a step costs is getting it started, and one all-reduce."""

    batch, inputs, width, layers = 64, 64, 64, 3
    optimizer = ("sgd", 0.05)

    def parameters(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        sizes = [self.inputs] + [self.width] * (self.layers - 1) + [CLASSES]
        parameters = {}
        for i, (rows, columns) in enumerate(zip(sizes, sizes[1:])):
            parameters[f"w{i}"] = _weights(rng, rows, columns)
            parameters[f"b{i}"] = np.zeros(columns, np.float32)
        return parameters

    def x(self, rng: np.random.Generator) -> np.ndarray:
        return rng.standard_normal((self.batch, self.inputs), np.float32)

    def logits(self, ops: Any, p: dict[str, Any], x: Any) -> Any:
        for i in range(self.layers):
            x = x @ p[f"w{i}"] + p[f"b{i}"]
            x = ops.relu(x) if i < self.layers - 1 else x
        return x


class WideMLP(MLP):
    """Large layers and an Adam state of twice their size: what counts is memory."""

    inputs, width, layers = 1024, 2048, 4
    optimizer = ("adam", 1e-4)


class CNN(Model):
    """Two convolutions: bound by arithmetic, with few and small gradients."""

    batch, side, channels = 64, 16, (16, 32)
    optimizer = ("momentum", 0.02)

    def parameters(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        one, two = self.channels
        flat = (self.side // 4) ** 2 * two
        return {
            "w0": _weights(rng, 3, 3, 1, one),
            "b0": np.zeros(one, np.float32),
            "w1": _weights(rng, 3, 3, one, two),
            "b1": np.zeros(two, np.float32),
            "w2": _weights(rng, flat, CLASSES),
            "b2": np.zeros(CLASSES, np.float32),
        }

    def x(self, rng: np.random.Generator) -> np.ndarray:
        return rng.standard_normal((self.batch, self.side, self.side, 1), np.float32)

    def logits(self, ops: Any, p: dict[str, Any], x: Any) -> Any:
        x = ops.pool(ops.relu(ops.conv(x, p["w0"]) + p["b0"]))
        x = ops.pool(ops.relu(ops.conv(x, p["w1"]) + p["b1"]))
        return ops.reshape(x, (-1, p["w2"].shape[0])) @ p["w2"] + p["b2"]


class LargeCNN(CNN):
    """The same on larger images: its temporaries are more than malloc keeps from one step to the next."""

    batch, side, channels = 256, 32, (32, 64)


class Transformer(Model):
    """Two blocks of attention: 28 gradients, and an Adam state of twice as many arrays."""

    batch, length, inputs, width, heads, blocks = 16, 32, 32, 64, 4, 2
    optimizer = ("adam", 1e-3)

    def parameters(self) -> dict[str, np.ndarray]:
        rng, d = np.random.default_rng(0), self.width
        parameters = {"in": _weights(rng, self.inputs, d), "place": 0.02 * _weights(rng, self.length, d)}
        for i in range(self.blocks):
            for name, rows, columns in [*((name, d, d) for name in "qkvo"), ("up", d, 4 * d), ("down", 4 * d, d)]:
                parameters[f"{i}_{name}"] = _weights(rng, rows, columns)
            for name, size in (("bias1", d), ("bias2", d), ("b_up", 4 * d), ("b_down", d)):
                parameters[f"{i}_{name}"] = np.zeros(size, np.float32)
            for name in ("scale1", "scale2"):
                parameters[f"{i}_{name}"] = np.ones(d, np.float32)
        return {**parameters, "out": _weights(rng, d, CLASSES), "b_out": np.zeros(CLASSES, np.float32)}

    def x(self, rng: np.random.Generator) -> np.ndarray:
        return rng.standard_normal((self.batch, self.length, self.inputs), np.float32)

    def logits(self, ops: Any, p: dict[str, Any], x: Any) -> Any:
        x = self.after_blocks(ops, p, x @ p["in"] + p["place"])
        return ops.mean(x, 1, False) @ p["out"] + p["b_out"]

    def after_blocks(self, ops: Any, p: dict[str, Any], x: Any) -> Any:
        d, heads = self.width, self.heads

        def split(x):
            return ops.transpose(ops.reshape(x, (-1, self.length, heads, d // heads)), (0, 2, 1, 3))

        def norm(x, scale, bias):
            x = x - ops.mean(x, -1, True)
            return x * ops.rsqrt(ops.mean(x * x, -1, True) + 1e-6) * scale + bias

        for i in range(self.blocks):
            h = norm(x, p[f"{i}_scale1"], p[f"{i}_bias1"])
            q, k, v = (split(h @ p[f"{i}_{name}"]) for name in "qkv")
            weights = ops.softmax(q @ ops.transpose(k, (0, 1, 3, 2)) * (d // heads) ** -0.5)
            h = ops.reshape(ops.transpose(weights @ v, (0, 2, 1, 3)), (-1, self.length, d))
            x = x + h @ p[f"{i}_o"]
            h = norm(x, p[f"{i}_scale2"], p[f"{i}_bias2"])
            x = x + ops.relu(h @ p[f"{i}_up"] + p[f"{i}_b_up"]) @ p[f"{i}_down"] + p[f"{i}_b_down"]
        return x


class LanguageModel(Transformer):
    """Four wider blocks between embeddings of 1,024 tokens: bound by arithmetic, with 14 MB of gradients."""

    batch, length, inputs, width, heads, blocks = 16, 64, 1024, 256, 8, 4

    def parameters(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(1)
        head = {"out": _weights(rng, self.width, self.inputs), "b_out": np.zeros(self.inputs, np.float32)}
        return {**super().parameters(), **head}

    def x(self, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(0, self.inputs, (self.batch, self.length), np.int32)

    def y(self, rng: np.random.Generator) -> np.ndarray:
        return np.eye(self.inputs, dtype=np.float32)[self.x(rng)] / np.float32(self.length)

    def logits(self, ops: Any, p: dict[str, Any], x: Any) -> Any:
        x = self.after_blocks(ops, p, ops.take(p["in"], x) * self.width**0.5 + p["place"])
        return x @ p["out"] + p["b_out"]


def _weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32) * np.float32(np.prod(shape[:-1]) ** -0.5)


MODELS: dict[str, Any] = {
    "mlp": MLP(),
    "wide": WideMLP(),
    "cnn": CNN(),
    "large": LargeCNN(),
    "transformer": Transformer(),
    "language model": LanguageModel(),
}


def batch(model: Any, replicas: int) -> tuple[np.ndarray, np.ndarray]:
    """The inputs, and the labels as one-hot rows; the same for any number of replicas that has a row for each."""
    rng = np.random.default_rng(1)
    x, y = model.x(rng), model.y(rng)
    times = -(-replicas // model.batch)
    return np.concatenate([x] * times), np.concatenate([y] * times)


def loss(ops: Any, model: Any, parameters: dict[str, Any], x: Any, y: Any, replicas: int) -> Any:
    """One replica's share of the mean cross-entropy of the global batch."""
    return -ops.sum(ops.log_softmax(model.logits(ops, parameters, x)) * y) / (ops.rows(x) * replicas)


def jax_ops() -> Any:
    import jax
    import jax.numpy as jnp
    from jax import lax

    def conv(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def pool(x):  # a mean, as the gradient of a maximum is slow on CPU in XLA and fast in TensorFlow
        return lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4

    return SimpleNamespace(
        relu=lambda x: jnp.maximum(x, 0),
        conv=conv,
        pool=pool,
        reshape=jnp.reshape,
        transpose=jnp.transpose,
        rsqrt=lax.rsqrt,
        softmax=jax.nn.softmax,
        log_softmax=jax.nn.log_softmax,
        take=lambda table, rows: jnp.take(table, rows, axis=0),
        mean=lambda x, axis, keep: jnp.mean(x, axis, keepdims=keep),
        sum=jnp.sum,
        rows=len,
    )


def tensorflow_ops(tf: Any) -> Any:
    return SimpleNamespace(
        relu=tf.nn.relu,
        conv=lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"),
        pool=lambda x: tf.nn.avg_pool2d(x, 2, 2, "VALID"),
        reshape=tf.reshape,
        transpose=tf.transpose,
        rsqrt=tf.math.rsqrt,
        softmax=tf.nn.softmax,
        log_softmax=tf.nn.log_softmax,
        take=tf.gather,
        mean=lambda x, axis, keep: tf.reduce_mean(x, axis, keepdims=keep),
        sum=tf.reduce_sum,
        rows=lambda x: x.shape[0] or tf.cast(tf.shape(x)[0], tf.float32),  # not known in a loop over a dataset
    )
