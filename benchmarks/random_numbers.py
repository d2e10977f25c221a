"""What an eager call of `tf.random` costs beside `jax.random`, in one process, call by call in turns.

python benchmarks/random_numbers.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

import replicax.tf as tf

CALLS, WARM_UP = 2000, 20


def medians(*functions: Callable[[], Any]) -> list[float]:
    """The median time of a call of each function, in microseconds."""
    times: list[list[float]] = [[] for _ in functions]
    for call in range(CALLS + WARM_UP):
        for function, own in zip(functions, times):
            start = time.perf_counter()
            result = function()
            if call >= WARM_UP:
                own.append(time.perf_counter() - start)
            jax.block_until_ready(result)
    return [1e6 * statistics.median(own) for own in times]


def main() -> None:
    key, generator, rows = jax.random.key(0), tf.random.Generator.from_seed(1), tf.range(10)
    uniform = lambda: jax.random.uniform(key, (3,))  # noqa: E731
    pairs = {
        "uniform([])": (lambda: tf.random.uniform([]), lambda: jax.random.uniform(key, ())),
        "uniform([3])": (lambda: tf.random.uniform([3]), uniform),
        "normal([3])": (lambda: tf.random.normal([3]), lambda: jax.random.normal(key, (3,))),
        "normal([3], seed=1)": (lambda: tf.random.normal([3], seed=1), lambda: jax.random.normal(key, (3,))),
        "stateless_uniform([3])": (lambda: tf.random.stateless_uniform([3], [1, 2]), uniform),
        "Generator.uniform([3])": (lambda: generator.uniform([3]), uniform),
        "shuffle of 10": (lambda: tf.random.shuffle(rows), lambda: jax.random.permutation(key, rows)),
    }
    print(f"{'µs':24}{'tf.random':>12}{'jax.random':>12}{'ratio':>8}")
    for name, functions in pairs.items():
        ours, theirs = medians(*functions)
        print(f"{name:24}{ours:12.1f}{theirs:12.1f}{ours / theirs:8.2f}")


if __name__ == "__main__":
    main()
