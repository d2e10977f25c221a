"""What the programs of this folder have in common: the data, the sizes, and the clock that run.py reads.

The programs import nothing else that is not their tool's. `record(loss)` waits for the loss of a step and notes the
time, so that all programs are measured alike; in a program of your own you would not wait in every step.
"""

import atexit
import json
import os
import time

import numpy as np

ROWS, FEATURES, WIDTH, CLASSES = 4096, 784, 256, 10
BATCH, EPOCHS, LEARNING_RATE = 256, 6, 1e-3

steps: list[dict[str, float]] = []


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of noise around a center for each class, and the classes."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, ROWS).astype(np.int32)
    centers = rng.normal(size=(CLASSES, FEATURES))
    x = 0.06 * centers[y] + rng.normal(size=(ROWS, FEATURES))
    return x.astype(np.float32), y


def record(loss: object) -> None:
    """Waits for the loss of a step, and notes it, the time and the CPU time. Only one process calls it."""
    value = float(loss)  # type: ignore[arg-type]
    steps.append({"loss": value, "time": time.time(), "cpu": time.process_time()})


def _write() -> None:
    if steps:
        with open(os.environ["WHICH_TOOL_RESULT"], "w", encoding="utf-8") as file:
            json.dump(steps, file)


if "WHICH_TOOL_RESULT" in os.environ:
    atexit.register(_write)
