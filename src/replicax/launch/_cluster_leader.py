"""The leader of a job with parameter servers: the chief decides how it ends, and machines with workers come and go."""

from __future__ import annotations

import signal

from replicax._base.errors import listed
from replicax._job.channel import Message
from replicax.launch._environment import Task
from replicax.launch._leader import Leader, Link, numbers
from replicax.launch._outcome import Outcome, exit_status, tell


class ClusterLeader(Leader):
    """Brings the members together; the first one, the leader's own, has the chief and the evaluator.

    The job goes on without workers, and without members that have workers alone, as long as there is one worker. A new
    launcher may take the place of such a member. What a lost server held is in the last checkpoint at best, from which
    all are to begin again.

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
        self._leaving: set[Link] = set()  # members that have been asked to end, and the job goes on
        super()._start()

    def _placed(self, links: list[Link]) -> dict[str, list[str]]:
        # The servers are dealt to the members in turn; the first member has the chief.
        self._servers = {link: list(range(place, self._ps, len(links))) for place, link in enumerate(links)}
        offered = [self._joined[link]["offered"] for link in links]
        servers = [offered[index % len(links)][index] for index in range(self._ps)]
        return {"chief": offered[0][-1:], **super()._placed(links), "ps": servers}

    def _servers_of(self, link: Link) -> list[int]:
        return self._servers[link]

    def _tasks_of(self, link: Link) -> list[Task]:
        beside = [Task("ps", index) for index in self._servers[link]]
        first = [Task("chief", 0), *[Task("evaluator", 0)] * self._evaluator]
        return [*(first if self._joined[link]["first"] == 0 else []), *super()._tasks_of(link), *beside]

    def _note_down(self, tasks: list[Task]) -> None:
        self._down.update(tasks)
        workers = sum(task.kind == "worker" for task in self._down)
        if workers >= self.workers or any(task.kind in ("chief", "ps") for task in self._down):
            self._stop()

    # Members that leave, and those that come instead.

    def _signalled(self, link: Link, number: int) -> None:
        # A machine that is to be shut down gets SIGTERM.
        if link not in self._leaving and number == signal.SIGTERM and self._may_go(link) and not self._stopped:
            self._leaving.add(link)
        elif link not in self._leaving:
            super()._signalled(link, number)

    def _may_go(self, link: Link) -> bool:
        return all(task.kind == "worker" for task in self._tasks_of(link))

    def _done(self, link: Link, outcomes: list[Outcome]) -> None:
        if link in self._leaving:
            self._note_down(self._tasks_of(link))
        lost = outcomes[0].lost
        if (lost or link in self._leaving) and not self._stopped:
            names = f"{listed([task.name for task in self._tasks_of(link)])} on {self._host(link)}"
            self._tell_all({"op": "note", "text": f"{names} left{': ' * bool(lost)}{lost}. The job goes on."})
            if not lost:
                text = f"interrupted by SIGTERM; {names} left. The job goes on."
                status = exit_status(-signal.SIGTERM)
                link.send({"op": "outcome", "status": status, "text": text, "again": False, "restart": ""})
        super()._done(link, outcomes)

    def left(self, link: Link) -> None:
        if not (self._running and link in self._leaving and link in self._outcomes):
            super().left(link)

    def _problem(self, message: Message) -> str | None:
        gone = self._gone(message)
        if gone is None:
            return super()._problem(message)
        if (host := self._host(gone)) != message["host"]:
            return (
                f"The workers whose place it takes were at {host}, where the others look for them, and it is at "
                f"{message['host']} (--host)."
            )
        return self._difference(message)

    def _gone(self, message: Message) -> Link | None:
        """Returns the member that has gone, and had the workers that this one wants to have."""
        if not self._running or self._stopped:
            return None
        gone = [link for link in self._joined if link in self._outcomes and self._may_go(link)]
        return next((link for link in gone if numbers(self._joined[link]) == numbers(message)), None)

    def _admit(self, link: Link, message: Message) -> None:
        gone = self._gone(message)
        if gone is None:
            super()._admit(link, message)
            return
        gone.send({"op": "stop", "interrupt": None})  # it was taken for lost, and may still be there
        gone.send({"op": "outcome", "status": 1, "text": "another one has its place.", "again": False, "restart": ""})
        before = self._joined.pop(gone)
        self._joined[link] = {**message, "addresses": before["addresses"]}
        self._servers[link] = self._servers.pop(gone)
        del self._outcomes[gone]
        self._leaving.discard(gone)
        tasks = self._tasks_of(link)
        self._down.difference_update(tasks)
        self._send_start(link)
        names = listed([task.name for task in tasks])
        self._tell_all({"op": "note", "text": f"{names} on {self._host(link)} came back."})

    # The end.

    def _verdict(self, everyone: list[Outcome]) -> tuple[int, str, bool]:
        (chief,) = (outcome for outcome in everyone if outcome.kind == "chief")
        if chief.preempted:
            return chief.status or 0, f"preempted: {chief.name} ended with exit status {chief.status}.", True
        if not chief.ended:
            return exit_status(chief.status or 0), tell(chief, chief, everyone) if chief.status else "", False
        # Others went down: a server, or the last of the workers.
        down = [outcome for outcome in everyone if outcome.failed and (outcome.kind, outcome.worker) in self._down]
        cause = max(down, key=lambda outcome: (outcome.kind == "ps", outcome.failed_at), default=None)
        if cause is None:
            return 1, "There is no worker left.", False
        return exit_status(cause.status) if cause.status else 1, tell(cause, cause, everyone), False
