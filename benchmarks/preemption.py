"""What `PreemptionCheckpointHandler.run` adds to a call, in microseconds; at most 5.

    python benchmarks/preemption.py                                  # one process
    replicax launch --workers 2 benchmarks/preemption.py             # a job, whose monitor is asked in its own thread

Calls by themselves and through the handler take turns; the medians of the rounds are shown.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import replicax as rx

CALLS, ROUNDS = 20_000, 15


def seconds(call) -> float:
    begun = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begun) / CALLS


def main() -> None:
    strategy = rx.MultiWorkerMirroredStrategy()
    checkpoint = rx.train.Checkpoint(v=rx.Variable(0.0))
    resolver = strategy.cluster_resolver
    handler = rx.experimental.PreemptionCheckpointHandler(resolver, checkpoint, tempfile.mkdtemp())

    def step() -> None:
        pass

    rounds = [(seconds(step), seconds(lambda: step()), seconds(lambda: handler.run(step))) for _ in range(ROUNDS)]
    plain, in_a_lambda, handled = (statistics.median(column) * 1e6 for column in zip(*rounds))
    print(f"run adds {handled - in_a_lambda:.2f} us to a call ({plain:.2f}; in a lambda {in_a_lambda:.2f})")


if __name__ == "__main__":
    main()
