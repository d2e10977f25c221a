"""TensorFlow's epochs: the step in a loop of Python's, and the loop inside of a `tf.function`. Run by epoch.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import payloads
import serving
import tensorflow as tf
import training
from side_tensorflow import Mirrored, set_devices


def answering(replicas: int) -> serving.Answering:
    set_devices("cpu", replicas)

    def contender(inside: bool) -> Callable[[str], Callable[[], Any]]:
        def made(_: str) -> Callable[[], Any]:
            trained = Mirrored(training.MODEL, "cpu", replicas)
            dataset = tf.data.Dataset.from_tensor_slices(training.arrays()).shuffle(training.ROWS)
            dataset = dataset.batch(training.MODEL.batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
            batches = trained.strategy.experimental_distribute_dataset(dataset)

            @tf.function
            def whole(batches):
                loss = tf.constant(0.0)
                for x, y in batches:
                    loss = trained.step(x, y)
                return loss

            def steps(batches):
                for x, y in batches:
                    loss = trained.step(x, y)
                return loss

            def epoch() -> Any:
                float((whole if inside else steps)(batches))
                return trained

            return epoch

        return made

    made = {"TensorFlow, step": contender(inside=False), "TensorFlow, loop": contender(inside=True)}
    return payloads.Caller(made, lambda trained: [training.loss(trained.parameters)], tf.__version__)


if __name__ == "__main__":
    serving.serve(lambda: answering(int(sys.argv[1])))
