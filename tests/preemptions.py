"""A job of three workers that is preempted again and again, at random moments, and starts again each time."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

from processes import Workers

# Each step depends on all before it, on the batch, and on the momentum, so that one that is lost or repeated shows.
PROGRAM = """
    import json, os
    import jax.numpy as jnp
    import replicax as rx
    from processes import mark

    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights, momentum = rx.Variable(jnp.zeros(3)), rx.Variable(jnp.zeros(3))
    data = rx.data.Dataset.range(6).shuffle(6, seed=3).repeat().batch(3)
    iterator = iter(strategy.experimental_distribute_dataset(data))
    checkpoint = rx.train.Checkpoint(weights=weights, momentum=momentum, iterator=iterator)
    handler = rx.experimental.PreemptionCheckpointHandler(strategy.cluster_resolver, checkpoint, os.environ["FOLDER"])

    def replica(x):
        gradient = rx.get_replica_context().all_reduce("MEAN", jnp.mean(x.astype(jnp.float32)) - weights.value())
        momentum.assign(0.5 * momentum.value() + gradient)
        weights.assign_add(0.25 * momentum.value())

    @rx.function
    def step(iterator):
        strategy.run(replica, args=(next(iterator),))

    @rx.function
    def step_with(batch):
        strategy.run(replica, args=(batch,))

    def say(how):
        print("told", json.dumps([how, handler.total_run_calls, [float(x).hex() for x in weights.numpy()]]), flush=True)

    say("begins")
    mark("ready")
    last = int(os.environ.get("LAST", "0"))
    try:
        while not last or handler.total_run_calls < last:
            handler.run(step, iterator) if "TAKEN" not in os.environ else handler.run(step_with, next(iterator))
    except SystemExit:
        say("stopped")
        raise
    say("done")
"""


class Seen(NamedTuple):
    """What was seen of one notice."""

    workers: tuple[int, ...]  # that got SIGTERM
    statuses: tuple[int, ...]
    begun: tuple[Any, ...]  # calls and weights of each worker at its start
    stopped: tuple[Any, ...]  # the same where it stopped
    seconds: float  # from the signal to the end of the last worker

    @property
    def at_one_step(self) -> bool:
        """True if all workers stopped at one step, with the same weights, and said that they are to be restarted."""
        return set(self.statuses) == {42} and len(set(map(str, self.stopped))) == 1


def told(done: dict[int, Any], how: str) -> tuple[Any, ...]:
    """What each worker told of its calls and weights."""
    lines = [list(map(json.loads, re.findall(r"^told (.*)", ended.stdout, re.MULTILINE))) for ended in done.values()]
    return tuple(next((line[1:] for line in own if line[0] == how), None) for own in lines)


def preempt(folder: Path, run: int, choice: random.Random) -> tuple[Seen, str]:
    """Starts the workers, sends SIGTERM to one or two of them at a random moment, and waits for the end of all."""
    taken = {"TAKEN": "1"} if choice.random() < 0.5 else {}  # batches are taken to be arguments
    env = {"FOLDER": str(folder / "checkpoints"), **taken}
    with Workers(folder / f"run{run}", 3, PROGRAM, env=env) as workers:
        workers.wait_for("ready")
        time.sleep(choice.uniform(0.0, 1.0))  # no wait for anything: the moment is what is tried
        which = tuple(choice.sample(range(3), choice.choice([1, 1, 1, 2])))
        since = [workers.send(worker, signal.SIGTERM) for worker in which][0]
        done = workers.join(timeout=60)
        seconds = max(ended.ended for ended in done.values()) - since
        statuses = tuple(ended.returncode for ended in done.values())
        return Seen(which, statuses, told(done, "begins"), told(done, "stopped"), seconds), workers.output()


def finish(folder: Path, last: int) -> tuple[Any, ...]:
    """Runs the workers undisturbed up to a step, and returns their calls and weights."""
    env = {"FOLDER": str(folder / "checkpoints"), "LAST": str(last)}
    with Workers(folder / f"to{last}", 3, PROGRAM, env=env) as workers:
        done = workers.join(timeout=120)
        assert [ended.returncode for ended in done.values()] == [0, 0, 0], workers.output()
    return told(done, "done")
