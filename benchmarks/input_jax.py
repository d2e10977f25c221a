"""The contenders on JAX: replicax, and numpy and `device_put` by hand. Run by input.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import payloads
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

    made = {"replicax": replicax, "by hand": by_hand}
    return payloads.Caller(made, lambda rows: rows, jax.__version__)


if __name__ == "__main__":
    serving.serve(lambda: answering(int(sys.argv[1])))
