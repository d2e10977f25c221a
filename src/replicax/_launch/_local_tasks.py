"""The tasks of a cluster with parameter servers on this machine: each is started again by itself, until the chief ends.

Nothing joins these tasks but the calls that they make to each other: the end of one ends no other. The chief tells the
workers what to compute, and gives what a lost worker had to do to another one, so that workers may come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Collection, Sequence

from replicax._job.channel import Message
from replicax._launch._environment import Task
from replicax._launch._local_workers import LocalProcesses, Worker
from replicax._launch._outcome import Outcome, describe, readable

# Seconds from the end of a task to its next start: one that cannot start does not do so all the time, and one that ends
# because the chief has just ended is not started at all.
_PAUSE = 1.0


class LocalTasks(LocalProcesses):
    """The tasks of this machine.

    Args:
        tasks: which ones.
        start: starts a task, which has been started again so many times.
        host: the address of this machine.
        tell: sends the leader what is known of the tasks before all have ended.
        say: tells the user.
        max_restarts: so many times each task but the chief is started again.
        preempt_codes: exit statuses of a chief that was preempted.
    """

    settle = 0.0

    def __init__(
        self,
        tasks: Sequence[Task],
        start: Callable[[Task, int], Worker],
        host: str,
        tell: Callable[[Message], None],
        say: Callable[[str], None],
        max_restarts: int,
        preempt_codes: Collection[int],
    ):
        self._start, self._host, self._tell, self._say = start, host, tell, say
        self._max_restarts, self._preempt_codes = max_restarts, preempt_codes
        self._processes: dict[Task, Worker] = {}  # those that run
        self._ending = asyncio.Event()
        self._running = [asyncio.create_task(self._attend(task)) for task in tasks]

    async def end(self, number: int, *, settle: float, grace: float) -> None:
        self._ending.set()
        await super().end(number, settle=settle, grace=grace)

    def _alive(self) -> list[Worker]:
        return list(self._processes.values())

    async def _attend(self, task: Task) -> Outcome:
        """Runs a task, again and again where it fails; returns how it ended the last time."""
        for restarts in itertools.count():
            outcome = await self._run(task, restarts)
            if task.kind == "chief" and not outcome.ended:
                self._tell({"op": "failed", "interrupt": None})  # or done: the others are ended in both cases
                return outcome
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), _PAUSE)
            if self._ending.is_set() or outcome.ended:
                return outcome
            if outcome.status == 0:
                self._say(f"{task.name} {describe(outcome)}, before the chief; it is not restarted.")
                self._tell_down(task)
                return outcome
            if restarts == self._max_restarts:
                limit = f"--max-task-restarts {restarts}"
                self._say(f"{task.name} failed: {describe(outcome)}. It is not restarted any more ({limit}).")
                self._tell_down(task)
                return outcome
            again = f"restart {restarts + 1} of at most {self._max_restarts}"
            self._say(f"{task.name} failed: {describe(outcome)}. It alone is restarted ({again}).")
        raise AssertionError("there is no end of numbers")

    def _tell_down(self, task: Task) -> None:
        self._tell({"op": "down", "kind": task.kind, "index": task.number})

    async def _run(self, task: Task, restarts: int) -> Outcome:
        process = self._processes[task] = self._start(task, restarts)
        try:
            status, when, asked = await process.wait()
        finally:
            del self._processes[task]
        return Outcome(
            task.number, self._host, status, when, asked is not None, None, readable(process.tail),
            address=process.address, kind=task.kind,
            preempted=task.kind == "chief" and status in self._preempt_codes and asked is None,
            stopped=process.was_stopped,
        )  # fmt: skip
