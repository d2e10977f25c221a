"""The leader of a job with parameter servers: the chief decides how it ends."""

from __future__ import annotations

from replicax.launch._environment import Task
from replicax.launch._leader import Leader, Link
from replicax.launch._outcome import Outcome, exit_status, tell


class ClusterLeader(Leader):
    """Brings the members together; the first one, the leader's own, has the chief and the evaluator.

    The job goes on without workers and machines that are lost, as long as there are one worker and all parameter
    servers: what a server held is in the last checkpoint at best, from which all are to begin again.

    Args:
        workers, max_restarts, start_timeout, ps, secret: as of `Leader`.
        evaluator: whether there is one.
    """

    def __init__(
        self, workers: int, max_restarts: int, start_timeout: float, ps: int, secret: str = "", evaluator: bool = False
    ):
        self._evaluator = evaluator
        super().__init__(workers, max_restarts, start_timeout, ps, secret)

    def _start(self) -> None:
        self._down: set[Task] = set()
        super()._start()

    def _tasks_of(self, link: Link) -> list[Task]:
        beside = [Task("ps", index) for index in self._servers[link]]
        first = [Task("chief", 0), *[Task("evaluator", 0)] * self._evaluator]
        return [*(first if self._joined[link]["first"] == 0 else []), *super()._tasks_of(link), *beside]

    def _note_down(self, tasks: list[Task]) -> None:
        self._down.update(tasks)
        workers = sum(task.kind == "worker" for task in self._down)
        if workers >= self.workers or any(task.kind in ("chief", "ps") for task in self._down):
            self._stop()

    def _verdict(self, everyone: list[Outcome]) -> tuple[int, str, bool]:
        (chief,) = (outcome for outcome in everyone if outcome.kind == "chief")
        if chief.preempted:
            return chief.status or 0, f"preempted: {chief.name} ended with exit status {chief.status}.", True
        cause = chief
        if chief.ended:  # since others went down: a server, or the last of the workers
            down = [outcome for outcome in everyone if outcome.failed and (outcome.kind, outcome.worker) in self._down]
            cause = max(down, key=lambda outcome: (outcome.kind == "ps", outcome.failed_at), default=chief)
        elif chief.status == 0:
            return 0, "", False
        return exit_status(cause.status) if cause.status else 1, tell(cause, cause, everyone), False
