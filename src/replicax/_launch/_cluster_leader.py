"""The leader of a job with parameter servers: the chief decides how it ends, and machines with workers come and go."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from replicax._base.errors import listed
from replicax._job.channel import Message
from replicax._launch._environment import Task
from replicax._launch._leader import STARTED, Leader, Link, numbers
from replicax._launch._outcome import Outcome, exit_status, tell


class _Absent:
    """Has the place of a member that had gone before this attempt, and may come back."""

    def send(self, message: Message) -> None:
        """Sends nothing, since nobody is there."""


class ClusterLeader(Leader):
    """Brings the members together; the first one, the leader's own, has the chief and the evaluator.

    The job goes on without workers, and without members that have workers alone, as long as there is one worker. A new
    launcher may take the place of such a member, then or in a later attempt, which does not wait for it. What a lost
    server held is in the last checkpoint at best, from which all are to begin again.

    Args:
        workers, max_restarts, start_timeout, ps, secret, job: as of `Leader`.
        evaluator: whether there is one.
    """

    def __init__(
        self,
        workers: int,
        max_restarts: int,
        start_timeout: float,
        ps: int,
        secret: str = "",
        evaluator: bool = False,
        job: str = "",
    ):
        self._evaluator = evaluator
        self._held: dict[Link, Message] = {}  # who waits for the place of a member that may still be there
        super().__init__(workers, max_restarts, start_timeout, ps, secret, job)

    def _gather(self) -> None:
        self._down: set[Task] = set()  # of members that are there
        self._leaving: set[Link] = set()  # members that have been asked to end, and the job goes on
        super()._gather()

    def _begin_again(self) -> None:
        gone = [link for link in self._joined if self._has_gone(link)]
        before = {_Absent(): (self._joined[link], self._outcomes[link]) for link in gone}
        super()._begin_again()
        for link, (member, outcomes) in before.items():
            self._joined[link], self._outcomes[link] = member, outcomes

    def _has_gone(self, link: Link) -> bool:
        lost = link in self._outcomes and bool(self._outcomes[link][0].lost)
        return isinstance(link, _Absent) or link in self._leaving or (lost and self._may_go(link))

    def _start(self) -> None:
        super()._start()
        if absent := [link for link in self._joined if isinstance(link, _Absent)]:
            self._note(f"{self._names(absent)} left before this attempt. The job goes on.")

    def _note(self, text: str) -> None:
        self._tell_all({"op": "note", "text": text})

    def _names(self, links: Iterable[Link]) -> str:
        """Returns the tasks of members and their hosts, as text."""
        return listed(
            [f"{listed([task.name for task in self._tasks_of(link)])} on {self._host(link)}" for link in links]
        )

    def _placed(self, links: list[Link]) -> dict[str, list[str]]:
        # The servers are dealt to the members in turn; the first member has the chief.
        here = [link for link in links if not isinstance(link, _Absent)]
        self._servers = {link: list(range(place, self._ps, len(here))) for place, link in enumerate(here)}
        offered = [self._joined[link]["offered"] for link in here]
        servers = [offered[index % len(here)][index] for index in range(self._ps)]
        return {"chief": offered[0][-1:], **super()._placed(links), "ps": servers}

    def _servers_of(self, link: Link) -> list[int]:
        return self._servers.get(link, [])

    def _tasks_of(self, link: Link) -> list[Task]:
        beside = [Task("ps", index) for index in self._servers_of(link)]
        first = [Task("chief", 0), *[Task("evaluator", 0)] * self._evaluator]
        return [*(first if self._joined[link]["first"] == 0 else []), *super()._tasks_of(link), *beside]

    def _note_down(self, *tasks: Task) -> None:
        self._down.update(tasks)
        down = self._down.union(*(self._tasks_of(link) for link in self._outcomes))
        workers = sum(task.kind == "worker" for task in down)
        if workers >= self.workers or any(task.kind in ("chief", "ps") for task in down):
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
        self._outcomes[link] = outcomes
        if link in self._leaving:
            self._note_down()
        lost = outcomes[0].lost
        if (lost or link in self._leaving) and not self._stopped:
            names = self._names([link])
            self._note(f"{names} left{': ' * bool(lost)}{lost}. The job goes on.")
            if not lost:
                text = f"interrupted by SIGTERM; {names} left. The job goes on."
                status = exit_status(-signal.SIGTERM)
                link.send({"op": "outcome", "status": status, "text": text, "again": False, "restart": ""})
        super()._done(link, outcomes)
        self._release()

    def left(self, link: Link) -> None:
        self._held.pop(link, None)
        if not (self._running and link in self._leaving and link in self._outcomes):
            super().left(link)

    def heard(self, link: Link) -> None:
        outcomes = self._outcomes.get(link)
        if outcomes and outcomes[0].lost and self._running and not self._stopped:
            del self._outcomes[link]  # its tasks have never ended
            self._note(f"{self._names([link])} came back.")

    def _problem(self, message: Message) -> str | None:
        before = self._before(message)
        if before is None:
            return super()._problem(message)
        if self._running and (host := self._host(before)) != message["host"]:
            return (
                f"The workers whose place it takes were at {host}, where the others look for them, and it is at "
                f"{message['host']} (--host)."
            )
        return self._difference(message)

    def _before(self, message: Message) -> Link | None:
        """Returns the member that has or had the workers that this one wants to have, and whose place it may take."""
        if self._finished or self._stopped:
            return None
        possible = [link for link in self._joined if (self._may_go(link) if self._running else self._has_gone(link))]
        return next((link for link in possible if numbers(self._joined[link]) == numbers(message)), None)

    def _admit(self, link: Link, message: Message) -> None:
        before = self._before(message)
        if before is None:
            super()._admit(link, message)
        elif not self._running:
            del self._joined[before], self._outcomes[before]
            super()._admit(link, message)
        elif before not in self._outcomes:
            self._held[link] = message
            text = f"{self._names([before])} still runs, as far as is known. This launcher waits for its end."
            link.send({"op": "note", "text": text})
        else:
            self._replace(before, link, message)

    def _replace(self, gone: Link, link: Link, message: Message) -> None:
        """Gives a launcher the place of a member that has gone."""
        gone.send({"op": "stop", "interrupt": None})  # it was taken for lost, and may still be there
        gone.send({"op": "outcome", "status": 1, "text": "another one has its place.", "again": False, "restart": ""})
        member = self._joined.pop(gone)
        self._joined[link] = {**message, "addresses": member["addresses"]}
        self._servers[link] = []
        del self._outcomes[gone]
        self._leaving.discard(gone)
        self._down.difference_update(self._tasks_of(link))
        self._send_start(link)
        self._note(f"{self._names([link])} came back.")

    def _release(self) -> None:
        """Lets those in whose place has become free, and refuses them where it does not become free any more."""
        for link, message in list(self._held.items()):
            before = self._before(message)
            if self._running and not self._finished and (self._stopped or before not in self._outcomes):
                continue
            del self._held[link]
            if before is None:
                link.send({"op": "refused", "message": STARTED})
            else:
                self._join(link, message)

    # The end.

    def _verdict(self, everyone: list[Outcome]) -> tuple[int, str, bool]:
        (chief,) = (outcome for outcome in everyone if outcome.kind == "chief")
        if chief.preempted:
            return chief.status or 0, f"preempted: {chief.name} ended with exit status {chief.status}.", True
        if not chief.ended:
            return exit_status(chief.status or 0), tell(chief, chief, everyone) if chief.status else "", False
        # Others went down: a server, or the last of the workers.
        down = [outcome for outcome in everyone if outcome.lost or (outcome.kind, outcome.worker) in self._down]
        failed = [outcome for outcome in down if outcome.failed]
        cause = max(failed, key=lambda outcome: (outcome.kind == "ps", outcome.failed_at), default=None)
        if cause is None:
            ended = [outcome.name for outcome in down if outcome.status == 0 and outcome.kind != "evaluator"]
            why = f"{listed(ended)} ended with exit status 0 before the chief" if ended else "there is no worker left"
            return 1, f"The job cannot go on: {why}.", False
        return exit_status(cause.status) if cause.status else 1, tell(cause, cause, everyone), False
