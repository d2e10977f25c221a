"""Measure what the comparison of the workers' mirrored variables adds to a save; the target is 1 %.

    replicax launch --workers 2 benchmarks/checkpoint_digest.py [MEGABYTES]

At each save, a job of several workers compares a digest of every variable that the workers share. It travels in a
message that a save sends in any case. Saves with digests take turns with saves without. The times of saves vary by more
than a digest takes, so the time of the digests is measured by itself too. A step computes no digest.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time

import jax.numpy as jnp

import replicax as rx
from replicax._checkpoint import workers

ROUNDS = 25
SHAPE = (1024, 256)  # 1 MiB in float32


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    compute, seconds_of_digests = workers.checksum, [0.0]

    def timed(*arguments: object) -> int:
        start = time.perf_counter()
        digest = compute(*arguments)  # type: ignore[arg-type]
        seconds_of_digests[-1] += time.perf_counter() - start
        return digest

    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = [rx.Variable(jnp.zeros(SHAPE)) for _ in range(megabytes)]
    checkpoint = rx.train.Checkpoint(variables=variables)

    @rx.function
    def train() -> None:
        for variable in variables:
            variable.assign_add(jnp.full(SHAPE, 0.5))

    path = os.path.join(tempfile.gettempdir(), "replicax-checkpoint-digest")

    def save() -> float:
        strategy.run(train)
        start = time.perf_counter()
        checkpoint.write(path)
        return time.perf_counter() - start

    workers.checksum = timed
    strategy.run(train)
    assert seconds_of_digests == [0.0], "a step computed a digest"
    save()
    with_digests, without = [], []
    for turn in range(ROUNDS):
        for digests in (True, False) if turn % 2 else (False, True):
            workers.checksum = timed if digests else lambda arrays, turn=None: 0
            seconds_of_digests.append(0.0)
            (with_digests if digests else without).append(save())
    seconds = statistics.median(with_digests)
    computing = statistics.median(s for s in seconds_of_digests[1:] if s)
    low, ratio, high = statistics.quantiles([a / b for a, b in zip(with_digests, without)], n=4)
    print(
        f"{megabytes} MiB: a save takes {1e3 * seconds:.0f} ms, {ratio:.3f} of one without digests (quartiles "
        f"{low:.3f} and {high:.3f}). Its digests take {1e3 * computing:.2f} ms, {computing / seconds:.2%} of it."
    )


if __name__ == "__main__":
    main()
