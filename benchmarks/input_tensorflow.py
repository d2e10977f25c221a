"""TensorFlow's contender: the same datasets on MirroredStrategy. Run by input.py with an interpreter that has it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pipelines
import serving
import tensorflow as tf
from side_tensorflow import set_devices, strategy_over


def answering(replicas: int) -> serving.Answering:
    set_devices("cpu", replicas)
    strategy = strategy_over("cpu", replicas)

    def contender(name: str) -> Callable[[], Any]:
        dataset = strategy.experimental_distribute_dataset(pipelines.dataset(tf, name))

        def one_pass() -> Any:
            rows = 0
            for element in dataset:
                parts = strategy.experimental_local_results(element[0])
                rows += sum(len(part) for part in parts)
            return [np.array([rows])]

        return one_pass

    return pipelines.Passes({"TensorFlow": contender}, lambda rows: rows, tf.__version__)


if __name__ == "__main__":
    serving.serve(lambda: answering(int(sys.argv[1])))
