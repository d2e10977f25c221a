"""The epochs on JAX: replicax's, and loops by hand. Run by epoch.py."""

from __future__ import annotations

import collections
import inspect
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import payloads
import serving
import training
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from side_jax import IN_FLIGHT, ByHand, Replicax, set_devices
from sides import BY_HAND

import replicax as rx

BATCH = training.MODEL.batch


class OnReplicax:
    """An epoch as users of replicax write it, in one of several ways."""

    def __init__(self, replicas: int, way: str, steps_per_call: int):
        made = Replicax(training.MODEL, replicas)
        self.parameters, strategy = made.parameters, made.strategy
        dataset = rx.data.Dataset.from_tensor_slices(training.arrays()).shuffle(training.ROWS).batch(BATCH)
        self.batches = strategy.experimental_distribute_dataset(dataset)
        self.step = made.step
        self.calls = training.STEPS
        several = {"steps_per_call": steps_per_call} if way == "several" else {}
        if several:
            self.calls = -(-training.STEPS // steps_per_call)

        @rx.function(**several)
        def next_step(iterator):
            return made.unfunctioned(*next(iterator))

        @rx.function(autograph=True)
        def whole(batches):
            loss = 0.0
            for x, y in batches:
                loss = made.unfunctioned(x, y)
            return loss

        self.next_step, self.whole = next_step, whole
        self.epoch = {"replicax": self._steps, "next": self._nexts, "several": self._nexts, "loop": self._whole}[way]

    def _steps(self) -> Any:
        for x, y in self.batches:
            loss = self.step(x, y)
        return loss

    def _nexts(self) -> Any:
        iterator = iter(self.batches)
        for _ in range(self.calls):
            loss = self.next_step(iterator)
        return loss

    def _whole(self) -> Any:
        return self.whole(self.batches)

    def values(self) -> dict[str, Any]:
        return self.parameters.value()


class LoopByHand:
    """The step of step.py's packed form, in a loop over rows that are taken by a permutation's numbers.

    A batch is taken and put on its way before the step before it is waited for, so that one is always ahead. With
    `threaded` a thread does that, two batches ahead. With `several` so many batches are stacked, moved at once and
    scanned in one program.
    """

    def __init__(self, replicas: int, threaded: bool = False, several: int = 1):
        contender = ByHand(BY_HAND[0], training.MODEL, replicas)
        self.state, self.step = contender.state, contender.step
        self.x, self.y = training.arrays()
        self.rng = np.random.default_rng(3)
        self.size = several * BATCH
        self.threaded, self.stacked = threaded, several > 1
        self.split = NamedSharding(contender.mesh, P(None, "replica") if self.stacked else P("replica"))
        if self.stacked:

            def scan_steps(state, x, y):
                state, losses = lax.scan(lambda state, batch: contender.step(state, *batch), state, (x, y))
                return state, losses[-1]

            self.step = jax.jit(scan_steps, donate_argnums=0)

    def batches(self) -> Iterator[Any]:
        order = self.rng.permutation(len(self.x))
        for start in range(0, len(order), self.size):
            rows = order[start : start + self.size]
            batch = self.x[rows], self.y[rows]
            if self.stacked:
                batch = tuple(part.reshape(-1, BATCH, part.shape[1]) for part in batch)
            yield jax.device_put(batch, self.split)

    def ahead(self) -> Iterator[Any]:
        ready: queue.Queue[Any] = queue.Queue(2)

        def fill() -> None:
            for batch in self.batches():
                ready.put(batch)
            ready.put(None)

        threading.Thread(target=fill, daemon=True).start()
        return iter(ready.get, None)

    def epoch(self) -> Any:
        in_flight: collections.deque[Any] = collections.deque()
        for batch in self.ahead() if self.threaded else self.batches():
            self.state, loss = self.step(self.state, *batch)
            in_flight.append(loss)
            if len(in_flight) > IN_FLIGHT:  # JAX 0.10 deadlocks on many more on several CPU devices
                in_flight.popleft().block_until_ready()
        return loss

    def values(self) -> dict[str, Any]:
        return self.state[0]


def contenders(replicas: int, steps_per_call: int) -> dict[str, Callable[[], Any]]:
    made: dict[str, Callable[[], Any]] = {}
    for way in ("replicax", "next", "several", "loop"):
        if way != "several" or "steps_per_call" in inspect.signature(rx.function).parameters:
            made[way] = lambda way=way: OnReplicax(replicas, way, steps_per_call)
    made[training.BY_HAND] = lambda: LoopByHand(replicas)
    made[training.THREADED] = lambda: LoopByHand(replicas, threaded=True)
    made[training.SCANNED] = lambda: LoopByHand(replicas, several=steps_per_call)
    return made


def answering(replicas: int, steps_per_call: int) -> serving.Answering:
    set_devices("cpu", replicas)
    made = contenders(replicas, steps_per_call)

    def epoch(name: str) -> Callable[[], Any]:
        contender = made[name]()

        def one() -> Any:
            jax.block_until_ready(contender.epoch())
            return contender

        return one

    calls = {name: (lambda payload, name=name: epoch(name)) for name in made}
    caller = payloads.Caller(calls, lambda contender: [training.loss(contender.values())], jax.__version__)
    return lambda request: {"contenders": list(made)} if request["do"] == "contenders" else caller(request)


if __name__ == "__main__":
    serving.serve(lambda: answering(int(sys.argv[1]), int(sys.argv[2])))
