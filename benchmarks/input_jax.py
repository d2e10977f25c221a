"""The contenders on JAX: replicax, and numpy and `device_put` by hand; and steps with and without input.

Run by input.py.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pipelines
import serving

import replicax.tf as tf


def answering(replicas: int) -> serving.Answering:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])

    def replicax(name: str) -> Callable[[], Any]:
        dataset = strategy.experimental_distribute_dataset(pipelines.dataset(tf, name))

        def one_pass() -> Any:
            rows = 0
            for element in dataset:
                jax.block_until_ready(element)
                rows += sum(images.size for images in jax.tree.leaves(element[0])) // pipelines.PIXELS
            return [np.array([rows])]

        return one_pass

    def by_hand(name: str) -> Callable[[], Any]:
        images, labels = pipelines.arrays()
        devices = jax.devices()[:replicas]
        rng = np.random.default_rng(1)

        def one_pass() -> Any:
            order, rows = rng.permutation(len(images)) if name != "batch" else None, 0
            for start in range(0, len(images), pipelines.BATCH):
                cut = slice(start, start + pipelines.BATCH)
                x, y = (images[cut], labels[cut]) if order is None else (images[order[cut]], labels[order[cut]])
                if name.endswith("map"):
                    x = x * np.float32(2) - np.float32(1)
                parts = jax.device_put(list(zip(np.split(x, replicas), np.split(y, replicas))), devices)
                jax.block_until_ready(parts)
                rows += sum(len(part) for part, _ in parts)
            return [np.array([rows])]

        return one_pass

    with strategy.scope():
        w = tf.Variable(np.random.default_rng(0).standard_normal((pipelines.PIXELS, pipelines.PIXELS), np.float32) / 28)

    def step_of(products: int) -> Callable[[Any, Any], Any]:
        def replica_step(x: Any, y: Any) -> Any:
            x = jnp.reshape(x, (len(x), -1))
            x = jax.lax.fori_loop(0, products, lambda _, x: jnp.tanh(x @ w.value()), x)
            return jnp.sum(x) + jnp.sum(y)

        return tf.function(lambda x, y: strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None))

    def steps(step: Callable[[Any, Any], Any], batches: Iterator[Any]) -> None:
        for element in itertools.islice(batches, pipelines.STEPS):
            result = step(*element)
        jax.block_until_ready(result)

    @functools.cache
    def stepping(milliseconds: float) -> tuple[Any, Callable[[Any, Any], Any]]:
        """A dataset without end, and a step that takes about so long on a batch that is there."""
        dataset = strategy.experimental_distribute_dataset(pipelines.dataset(tf, "shuffle all").repeat())
        element = next(iter(dataset))
        products, took = 1, 0.0
        while took < 1e-3 * milliseconds:
            products = max(products + 1, int(products * 1e-3 * milliseconds / took)) if took else 1
            step = step_of(products)
            steps(step, itertools.repeat(element))
            start = time.perf_counter()
            steps(step, itertools.repeat(element))
            took = (time.perf_counter() - start) / pipelines.STEPS
        return dataset, step

    def with_input(milliseconds: str) -> Callable[[], Any]:
        dataset, step = stepping(float(milliseconds))
        batches = iter(dataset)
        return lambda: steps(step, batches) or [np.zeros(1)]

    def at_hand(milliseconds: str) -> Callable[[], Any]:
        dataset, step = stepping(float(milliseconds))
        element = next(iter(dataset))
        return lambda: steps(step, itertools.repeat(element)) or [np.zeros(1)]

    made = {"replicax": replicax, "by hand": by_hand, "with input": with_input, "batch at hand": at_hand}
    return pipelines.Passes(made, lambda rows: rows, jax.__version__)


if __name__ == "__main__":
    serving.serve(lambda: answering(int(sys.argv[1])))
