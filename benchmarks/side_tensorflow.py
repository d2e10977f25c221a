"""TensorFlow's contender: MirroredStrategy and tf.function. Run by step.py with an interpreter that has TensorFlow."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import models
import numpy as np
import serving
import tensorflow as tf

OPS = models.tensorflow_ops(tf)


def strategy_over(device: str, replicas: int) -> Any:
    """`MultiWorkerMirroredStrategy` where this is one of several workers, else `MirroredStrategy`."""
    if serving.task()[1]:
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tf.distribute.MirroredStrategy([f"{device.upper()}:{i}" for i in range(replicas)])


def set_devices(device: str, replicas: int) -> None:
    """As many logical CPU devices as this process has replicas."""
    if device == "cpu":
        tf.config.set_visible_devices([], "GPU")
        cpu = tf.config.list_physical_devices("CPU")[0]
        own = replicas // (len(serving.task()[1]) or 1)
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * own)


class Mirrored:
    """The step with such a strategy, all gradients reduced in one batch, the update written with raw operations."""

    def __init__(self, model: Any, device: str, replicas: int):
        strategy = strategy_over(device, replicas)
        kind, rate = model.optimizer
        with strategy.scope():
            parameters = {name: tf.Variable(value) for name, value in model.parameters().items()}
            slots = {"sgd": 0, "momentum": 1, "adam": 2}[kind]
            state = [[tf.Variable(tf.zeros_like(v)) for v in parameters.values()] for _ in range(slots)]
            count = tf.Variable(0.0)
        flat = list(parameters.values())
        self.strategy, self.parameters = strategy, parameters

        def sgd(v, g):
            v.assign_sub(rate * g)

        def momentum(v, g, trace):
            v.assign_sub(rate * trace.assign(0.9 * trace + g))

        def adam(v, g, m, s, t):
            mean, square = m.assign(0.9 * m + 0.1 * g), s.assign(0.999 * s + 0.001 * g * g)
            v.assign_sub(rate * (mean / (1 - 0.9**t)) / (tf.sqrt(square / (1 - 0.999**t)) + 1e-8))

        def apply(strategy, gradients):
            extended = strategy.extended
            total = extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, list(zip(gradients, flat)))
            if kind == "adam":
                extended.update(count, lambda c: c.assign_add(1.0), group=False)
            for i, (v, g) in enumerate(zip(flat, total)):
                extra = (count,) if kind == "adam" else ()
                arguments = (g, *(slot[i] for slot in state), *extra)
                extended.update(v, {"sgd": sgd, "momentum": momentum, "adam": adam}[kind], args=arguments, group=False)

        def replica(x, y):
            with tf.GradientTape() as tape:
                loss = models.loss(OPS, model, parameters, x, y, replicas)
            gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, flat)]  # those of lookups are slices
            tf.distribute.get_replica_context().merge_call(apply, args=(gradients,))
            return loss

        @tf.function
        def step(x, y):
            return strategy.reduce("SUM", strategy.run(replica, args=(x, y)), axis=None)

        parts = [np.split(part, replicas) for part in models.batch(model, replicas)]
        self.batch = [
            strategy.experimental_distribute_values_from_function(
                lambda c, p=p: tf.constant(p[c.replica_id_in_sync_group])
            )
            for p in parts
        ]
        self.step = step

    def run(self, steps: int) -> tuple[float, float]:
        start = time.perf_counter()
        for _ in range(steps):
            loss = self.step(*self.batch)
        loss = float(loss)
        return time.perf_counter() - start, loss


def answering(device: str, replicas: int) -> serving.Answering:
    """What answers step.py's requests."""
    set_devices(device, replicas)
    contender: Any = None

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal contender
        if request["do"] == "version":
            return {"version": tf.__version__}
        if request["do"] == "first":
            contender = Mirrored(models.MODELS[request["model"]], device, replicas)
            tf.function(lambda x: x + 1)(tf.ones(2))
            return dict(zip(("first", "loss"), contender.run(1)), later_loss=contender.run(4)[1])
        return {"seconds": contender.run(request.get("steps", 1))[0]}

    return answer


if __name__ == "__main__":
    serving.serve(lambda: answering(sys.argv[2], int(sys.argv[3])))
