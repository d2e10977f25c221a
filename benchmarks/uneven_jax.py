"""A step that takes batches of even and of uneven parts. Run by uneven.py and padding.py."""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import serving
from side_jax import OPS, join, set_devices, strategy_of, transformation, warm_up, workers

import replicax as rx

UNEVEN = 2 / 3  # of the rows of an even batch; one less for replicas that could share them evenly


class Uneven:
    """The step as users write it who mind the last batch: losses are divided by the rows that there are.

    Args:
        pad: pad the uneven batch, so that both have the same program.
    """

    def __init__(self, model: Any, replicas: int, pad: bool):
        strategy = strategy_of(replicas)
        with strategy.scope():
            parameters = rx.Variable(model.parameters())
            optimizer = rx.Optimizer(transformation(model), parameters)

        def replica(x, y):
            rows = rx.get_replica_context().all_reduce("SUM", jnp.float32(len(x)))

            def loss_of(p):
                return -jnp.sum(OPS.log_softmax(model.logits(OPS, p, x)) * y) / rows

            loss, gradients = jax.value_and_grad(loss_of)(parameters.value())
            optimizer.apply_gradients(gradients)
            return loss

        @rx.function
        def step(x, y):
            return strategy.reduce("SUM", strategy.run(replica, args=(x, y)), axis=None)

        whole = models.batch(model, replicas)
        rows = int(len(whole[0]) * UNEVEN)
        rows = rows if rows % replicas else rows - 1
        cut = tuple(part[:rows] for part in whole)
        self.by_hand = float(models.loss(OPS, model, model.parameters(), *cut, 1))
        dataset = strategy.experimental_distribute_dataset([whole, cut], rx.InputOptions(pad_last_batch=pad))
        self.batches = dict(zip(("even", "uneven"), dataset))
        self.parameters, self.step = parameters, step

    def first(self) -> dict[str, Any]:
        """The seconds of the first calls, also of the processor, and the uneven loss with the first parameters."""
        seconds, losses, before = {}, {}, jax.tree.map(np.asarray, self.parameters.value())
        for name in self.batches:
            start, on_cpu = time.perf_counter(), time.process_time()
            losses[name] = float(self(name))
            seconds[name], seconds[f"{name}, CPU"] = time.perf_counter() - start, time.process_time() - on_cpu
            self.parameters.assign(before)
        traces = self.step.experimental_get_tracing_count()
        return {**seconds, "loss of the parts": losses["uneven"], "loss by hand": self.by_hand, "traces": traces}

    def __call__(self, name: str) -> jax.Array:
        return self.step(*self.batches[name])


def answering(replicas: int) -> serving.Answering:
    if workers() > 1:
        join(alone=False)
    else:
        set_devices("cpu", replicas)
    warm_up()
    made: dict[str, Uneven] = {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "build":
            jax.clear_caches()
            pad = request.get("pad", False)
            made["padded" if pad else "apart"] = step = Uneven(models.MODELS[request["model"]], replicas, pad)
            return step.first()
        name, _, way = request["contender"].partition(", ")
        start = time.perf_counter()
        for _ in range(request["steps"]):
            loss = made[way or "apart"](name)
        loss.block_until_ready()
        return {"seconds": time.perf_counter() - start}

    return answer


if __name__ == "__main__":
    serving.serve(lambda: answering(int(sys.argv[1])))
