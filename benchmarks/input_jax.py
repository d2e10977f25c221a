"""The contenders on JAX: replicax, and numpy and `device_put` by hand; and the steps of both with and without input.

Run by input.py.
"""

from __future__ import annotations

import collections
import functools
import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pipelines
import serving
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from side_jax import IN_FLIGHT

import replicax.tf as tf

Step = Callable[[Any, Any], Any]


def multiplying(products: int, x: Any, y: Any, w: Any, before: Any) -> Any:
    """A replica's step that keeps its core busy."""
    x = jnp.reshape(x, (len(x), -1))
    x = jax.lax.fori_loop(0, products, lambda _, x: jnp.tanh(x @ w), x)
    return jnp.sum(x) + jnp.sum(y) + jnp.tanh(before)


def waiting(seconds: float, x: Any, y: Any, w: Any, before: Any) -> Any:
    """A replica's step that reads its batch and then waits, as a host does for an accelerator."""

    def wait(result: Any) -> Any:
        time.sleep(seconds)
        return result

    result = jnp.sum(x) + jnp.sum(y) + jnp.tanh(before)
    return jax.pure_callback(wait, jax.ShapeDtypeStruct(result.shape, result.dtype), result)


def answering(replicas: int) -> serving.Answering:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])

    def replicax(name: str) -> Callable[[], Any]:
        dataset = strategy.experimental_distribute_dataset(pipelines.dataset(tf, name))

        def one_pass() -> Any:
            rows = 0
            for element in dataset:
                jax.block_until_ready(element)
                rows += sum(images.size for images in jax.tree.leaves(element[0])) // pipelines.PIXELS
            return [np.array([rows])]

        return one_pass

    def by_hand(name: str) -> Callable[[], Any]:
        images, labels = pipelines.arrays()
        devices = jax.devices()[:replicas]
        rng = np.random.default_rng(1)

        def one_pass() -> Any:
            order, rows = rng.permutation(len(images)) if name != "batch" else None, 0
            for start in range(0, len(images), pipelines.BATCH):
                cut = slice(start, start + pipelines.BATCH)
                x, y = (images[cut], labels[cut]) if order is None else (images[order[cut]], labels[order[cut]])
                if name.endswith("map"):
                    x = x * np.float32(2) - np.float32(1)
                parts = jax.device_put(list(zip(np.split(x, replicas), np.split(y, replicas))), devices)
                jax.block_until_ready(parts)
                rows += sum(len(part) for part, _ in parts)
            return [np.array([rows])]

        return one_pass

    weights = np.random.default_rng(0).standard_normal((pipelines.PIXELS, pipelines.PIXELS), np.float32) / 28
    with strategy.scope():
        w, before = tf.Variable(weights), tf.Variable(0.0)

    def stepped(work: Callable[..., Any]) -> Step:
        """The step on replicax. One comes after the other, as each takes what the one before gave."""

        def step(x: Any, y: Any) -> Any:
            results = strategy.run(lambda x, y: work(x, y, w.value(), before.value()), args=(x, y))
            before.assign(strategy.reduce("SUM", results, axis=None))
            return before.value()

        return tf.function(step)

    def stepped_by_hand(work: Callable[..., Any]) -> Step:
        """The same in plain JAX."""
        mesh = jax.make_mesh((replicas,), ("replica",), devices=jax.devices()[:replicas])
        kept = jax.device_put((weights, np.float32(0)), NamedSharding(mesh, P()))
        mapped = jax.shard_map(
            lambda w, before, x, y: jax.lax.psum(work(x, y, w, before), "replica"),
            mesh=mesh, in_specs=(P(), P(), P("replica"), P("replica")), out_specs=P(), check_vma=False,
        )  # fmt: skip
        compiled, state = jax.jit(mapped), list(kept)
        in_flight: collections.deque[Any] = collections.deque()

        def step(x: Any, y: Any) -> Any:
            state[1] = compiled(*state, x, y)
            in_flight.append(state[1])
            if len(in_flight) > IN_FLIGHT:
                in_flight.popleft().block_until_ready()
            return state[1]

        return step

    def by_thread() -> Iterator[Any]:
        """Shuffled batches without end by hand, put on the devices by a thread that is two batches ahead."""
        images, labels = pipelines.arrays()
        mesh = jax.make_mesh((replicas,), ("replica",), devices=jax.devices()[:replicas])
        split, rng = NamedSharding(mesh, P("replica")), np.random.default_rng(1)
        ready: queue.Queue[Any] = queue.Queue(2)

        def fill() -> None:
            while True:
                order = rng.permutation(len(images))
                for start in range(0, len(images) - pipelines.BATCH + 1, pipelines.BATCH):
                    rows = order[start : start + pipelines.BATCH]
                    ready.put(jax.device_put((images[rows], labels[rows]), split))

        threading.Thread(target=fill, daemon=True).start()
        return iter(ready.get, None)

    def steps(step: Step, batches: Iterator[Any]) -> None:
        for element in itertools.islice(batches, pipelines.STEPS):
            result = step(*element)
        jax.block_until_ready(result)

    @functools.cache
    def work_of(kind: str, milliseconds: float) -> Callable[..., Any]:
        """A step that takes about so long on a batch that is there."""
        if kind == pipelines.ELSEWHERE:
            return functools.partial(waiting, 1e-3 * milliseconds)
        element = next(iter(dataset))
        products, took = 1, 0.0
        while took < 1e-3 * milliseconds:
            products = max(products + 1, int(products * 1e-3 * milliseconds / took)) if took else 1
            work = functools.partial(multiplying, products)
            step = stepped(work)
            steps(step, itertools.repeat(element))
            times = []
            for _ in range(3):
                start = time.perf_counter()
                steps(step, itertools.repeat(element))
                times.append((time.perf_counter() - start) / pipelines.STEPS)
            took = min(times)
        return work

    dataset = strategy.experimental_distribute_dataset(pipelines.dataset(tf, "shuffle all").repeat())

    def stepping(make: Callable[..., Step], batches: Callable[[], Iterator[Any]], with_input: bool) -> Any:
        def contender(payload: str) -> Callable[[], Any]:
            kind, milliseconds = payload.rsplit(" ", 1)
            step, elements = make(work_of(kind, float(milliseconds))), batches()
            given = elements if with_input else itertools.repeat(next(elements))
            return lambda: steps(step, given) or [np.zeros(1)]

        return contender

    made = {"replicax": replicax, "by hand": by_hand}
    for name, make, batches in (
        ("replicax", stepped, lambda: iter(dataset)),
        ("by hand", stepped_by_hand, by_thread),
    ):
        made[f"{name}, batch at hand"] = stepping(make, batches, False)
        made[f"{name}, with input"] = stepping(make, batches, True)
    return pipelines.Passes(made, lambda rows: rows, jax.__version__)


if __name__ == "__main__":
    serving.serve(lambda: answering(int(sys.argv[1])))
