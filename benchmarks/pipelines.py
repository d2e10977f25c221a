"""The datasets of which input.py times a pass, written once: what differs is the module that `tf` is."""

from __future__ import annotations

from typing import Any

import numpy as np

ROWS, PIXELS, BATCH = 60_000, 28 * 28, 256
PIPELINES = ("batch", "shuffle 1000", "shuffle all", "shuffle all, map")


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Images and labels."""
    images = np.random.default_rng(0).random((ROWS, 28, 28, 1), np.float32)
    return images, np.arange(ROWS, dtype=np.int32) % 10


def dataset(tf: Any, name: str) -> Any:
    """The dataset of global batches."""
    made = tf.data.Dataset.from_tensor_slices(arrays())
    if name != "batch":
        made = made.shuffle(1000 if name == "shuffle 1000" else ROWS)
    made = made.batch(BATCH)
    if name.endswith("map"):
        made = made.map(lambda x, y: (x * 2.0 - 1.0, y), num_parallel_calls=2)
    return made
