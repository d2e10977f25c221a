"""The data of an epoch, which epoch.py's contenders train on, and what tells that they have trained alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import models
import numpy as np

STEPS = 200
MODEL = models.MODELS["mlp"]
ROWS = STEPS * MODEL.batch
BY_HAND, THREADED, SCANNED = "by hand", "by hand, thread", "by hand, several"  # what the loops by hand are called


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Rows of inputs, and labels as one-hot rows that a linear model could learn."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((ROWS, MODEL.inputs), np.float32)
    classes = np.argmax(x @ rng.standard_normal((MODEL.inputs, models.CLASSES), np.float32), axis=1)
    return x, np.eye(models.CLASSES, dtype=np.float32)[classes]


def loss(parameters: dict[str, Any]) -> np.ndarray:
    """The mean loss over all rows, worked out by numpy."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x - x.max(axis=1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    ops = SimpleNamespace(relu=lambda x: np.maximum(x, 0), log_softmax=log_softmax, sum=np.sum, rows=len)
    parameters = {name: np.asarray(value) for name, value in parameters.items()}
    return np.array([models.loss(ops, MODEL, parameters, *arrays(), 1)])
