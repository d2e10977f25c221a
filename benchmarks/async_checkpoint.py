"""Measure how long an asynchronous save holds up training; the bar is 1.2 times the copy of the values to the host.

    python benchmarks/async_checkpoint.py [MEGABYTES] [ROUNDS]

Saves take turns with plain copies (`np.array`) of the same variables. A round waits for the end of the writing before
the next save, and so does not measure what training and writing take from each other.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

import replicax as rx

SHAPE = (1024, 256)  # 1 MiB in float32
BAR = 1.2


def main() -> None:
    megabytes, rounds = (*map(int, sys.argv[1:]), *(200, 15)[len(sys.argv) - 1 :])
    variables = [rx.Variable(jnp.full(SHAPE, float(number))) for number in range(megabytes)]
    checkpoint = rx.train.Checkpoint(variables=variables)
    options = rx.train.CheckpointOptions(enable_async=True)

    def measure(act: Callable[[], object]) -> float:
        start = time.perf_counter()
        result = act()
        seconds = time.perf_counter() - start
        del result
        return seconds

    def copy() -> list[np.ndarray]:
        return [np.array(variable.value()) for variable in variables]

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ckpt")
        measure(lambda: checkpoint.write(path, options))  # imports Orbax
        checkpoint.sync()
        copies, saves, writes = [], [], []
        for _ in range(rounds):
            copies.append(measure(copy))
            saves.append(measure(lambda: checkpoint.write(path, options)))
            writes.append(measure(checkpoint.sync))
    for name, seconds in (("the copy", copies), ("the save", saves), ("the writing after it", writes)):
        low, median, high = statistics.quantiles(seconds, n=4)
        print(f"{megabytes} MiB: {name} takes {1e3 * median:.0f} ms (quartiles {1e3 * low:.0f} and {1e3 * high:.0f}).")
    low, ratio, high = statistics.quantiles([save / plain for save, plain in zip(saves, copies)], n=4)
    print(f"The save takes {ratio:.2f} of the copy (quartiles {low:.2f} and {high:.2f}); the bar is {BAR}.")


if __name__ == "__main__":
    main()
