"""TensorFlow's contender: `all_reduce` in a `tf.function`. Run by collectives.py with an interpreter that has it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import payloads
import serving
import tensorflow as tf
from side_tensorflow import set_devices, strategy_over


def answering(replicas: int) -> serving.Answering:
    set_devices("cpu", replicas)
    strategy = strategy_over("cpu", replicas)

    def contender(payload: str) -> Callable[[], Any]:
        values = strategy.experimental_distribute_values_from_function(
            lambda context: [tf.constant(x) for x in payloads.arrays(payload, context.replica_id_in_sync_group)]
        )

        def replica(values):
            values = [tf.identity(value) for value in values]  # an argument is on no device, which is an error
            return tf.distribute.get_replica_context().all_reduce("SUM", values)

        @tf.function
        def all_reduce(values):
            return strategy.run(replica, args=(values,))

        return lambda: all_reduce(values)  # returns when the sums are there

    def sums(found: Any) -> list[np.ndarray]:
        return [strategy.experimental_local_results(part)[0].numpy() for part in found]

    return payloads.Caller({"TensorFlow": contender}, sums, tf.__version__)


if __name__ == "__main__":
    serving.serve(lambda: answering(int(sys.argv[1])))
