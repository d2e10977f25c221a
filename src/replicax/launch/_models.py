"""Small models that `replicax bench` measures where it is given no program: plain JAX, with Optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx

CLASSES, HEADS, BLOCKS = 10, 4, 2


def _weights(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(0, np.prod(shape[:-1]) ** -0.5, shape), jnp.float32)


def _mlp(rng: np.random.Generator) -> Any:
    return [_weights(rng, *sizes) for sizes in ((64, 256), (256, 256), (256, CLASSES))]


def _mlp_logits(parameters: Any, x: Any) -> Any:
    *hidden, last = parameters
    for weights in hidden:
        x = jax.nn.relu(x @ weights)
    return x @ last


def _cnn(rng: np.random.Generator) -> Any:
    return [_weights(rng, 3, 3, 1, 16), _weights(rng, 3, 3, 16, 32), _weights(rng, 8 * 8 * 32, CLASSES)]


def _cnn_logits(parameters: Any, x: Any) -> Any:
    *kernels, last = parameters
    for kernel in kernels:
        x = jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x)
    return x.reshape(len(x), -1) @ last


def _transformer(rng: np.random.Generator) -> Any:
    shapes = {"q": (64, 64), "k": (64, 64), "v": (64, 64), "out": (64, 64), "up": (64, 256), "down": (256, 64)}
    blocks = [{name: _weights(rng, *shape) for name, shape in shapes.items()} for _ in range(BLOCKS)]
    return {"blocks": blocks, "last": _weights(rng, 64, CLASSES)}


def _transformer_logits(parameters: Any, x: Any) -> Any:
    for block in parameters["blocks"]:
        h = jax.nn.standardize(x)
        q, k, v = ((h @ block[name]).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
        x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ block["out"]
        x = x + jax.nn.relu(jax.nn.standardize(x) @ block["up"]) @ block["down"]
    return x.mean(axis=1) @ parameters["last"]


# Parameters, logits, shape of an example, and the size of a batch where none is given.
MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[int, ...], int]] = {
    "mlp": (_mlp, _mlp_logits, (64,), 256),
    "cnn": (_cnn, _cnn_logits, (32, 32, 1), 64),
    "transformer": (_transformer, _transformer_logits, (32, 64), 32),
}


def make_step(strategy: rx.Strategy, model: str, batch_size: int | None = None) -> tuple[Any, Any]:
    """A training step of a model, and a dataset of random examples for it."""
    import optax

    parameters_of, logits_of, shape, usual_size = MODELS[model]
    size = batch_size or max(usual_size, strategy.num_replicas_in_sync)
    rng = np.random.default_rng(0)
    with strategy.scope():
        parameters = rx.Variable(parameters_of(rng))
        optimizer = rx.Optimizer(optax.adam(1e-3), parameters)

    def loss_of(values: Any, x: Any, labels: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(values, x), labels)
        return losses.sum() / size

    def train_step(x: Any, labels: Any) -> Any:
        def replica_step(x: Any, labels: Any) -> Any:
            loss, gradients = jax.value_and_grad(loss_of)(parameters.value(), x, labels)
            optimizer.apply_gradients(gradients)
            return loss

        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, labels)), axis=None)

    count = size * max(1, min(8, 100_000 // size))
    examples = rng.standard_normal((count, *shape), np.float32), rng.integers(0, CLASSES, count, np.int32)
    return rx.function(train_step), rx.data.Dataset.from_tensor_slices(examples).shuffle(count).repeat().batch(size)
