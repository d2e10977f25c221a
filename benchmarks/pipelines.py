"""The datasets of which input.py times a pass, written once: what differs is the module that `tf` is.

And what asks a contender for passes, and counts the pages that the system hands out meanwhile.
"""

from __future__ import annotations

import resource
from typing import Any

import numpy as np
import payloads

ROWS, PIXELS, BATCH = 60_000, 28 * 28, 256
PIPELINES = ("batch", "shuffle 1000", "shuffle all", "shuffle all, map", "shuffle all, compiled map")
STEPS = 20  # in a call of what input.py takes the steps of
KINDS = ON_CORES, ELSEWHERE = "on the cores", "elsewhere"  # where a step computes


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
        scale = lambda x, y: (x * 2.0 - 1.0, y)  # noqa: E731  AutoGraph reads lambdas well where they have a name
        made = made.map(tf.function(scale) if name.endswith("compiled map") else scale, num_parallel_calls=2)
    return made


class Passes(payloads.Caller):
    """Answers input.py: as `payloads.Caller`, with the page faults of a call."""

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        answer = super().__call__(request)
        if request["do"] == "run":
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            answer["faults"] = faults / (request["steps"] + 1)  # one call comes before the time begins
        return answer
