"""The leader of a job with parameter servers: the chief decides how it ends, and machines with workers come and go."""

from __future__ import annotations

import signal
from collections.abc import Collection

from replicax._base.errors import listed
from replicax._job.channel import Message
from replicax._launch._environment import Task
from replicax._launch._leader import STARTED, Leader
from replicax._launch._members import Link, numbers
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
        self._first_tasks = [Task("chief", 0), *[Task("evaluator", 0)] * evaluator]
        self._held: dict[Link, Message] = {}  # who waits for the place of a member that may still be there
        super().__init__(workers, max_restarts, start_timeout, ps, secret, job)

    def begin_again(self) -> None:
        gone = [link for link in self._members.joined if self._has_gone(link)]
        before = {_Absent(): (self._members.joined[link], self._members.outcomes[link]) for link in gone}
        super().begin_again()
        for link, (member, outcomes) in before.items():
            self._members.joined[link], self._members.outcomes[link] = member, outcomes

    def _has_gone(self, link: Link) -> bool:
        lost = link in self._members.outcomes and bool(self._members.outcomes[link][0].lost)
        return (
            isinstance(link, _Absent)
            or link in self._members.leaving
            or (lost and self._members.has_only_workers(link))
        )

    def start(self) -> None:
        super().start()
        if absent := [link for link in self._members.joined if isinstance(link, _Absent)]:
            self._members.send_all(_note(f"{self._members.names(absent)} left before this attempt. The job goes on."))

    def place_tasks(self) -> dict[str, list[str]]:
        # The servers are dealt to the members in turn; the first member has the chief.
        members = self._members
        here = [link for link in members.in_order() if not isinstance(link, _Absent)]
        members.servers = {link: list(range(place, self._ps, len(here))) for place, link in enumerate(here)}
        offered = [members.joined[link]["offered"] for link in here]
        servers = [offered[index % len(here)][index] for index in range(self._ps)]
        return {"chief": offered[0][-1:], **super().place_tasks(), "ps": servers}

    def _note_down(self, *tasks: Task) -> None:
        self._members.down.update(tasks)
        down = self._members.down.union(*(self._members.tasks(link) for link in self._members.outcomes))
        workers = sum(task.kind == "worker" for task in down)
        if workers >= self.workers or any(task.kind in ("chief", "ps") for task in down):
            self._stop()

    def take_signal(self, link: Link, number: int) -> None:
        # A machine that is to be shut down gets SIGTERM.
        if link in self._members.leaving:
            return
        if number == signal.SIGTERM and self._members.has_only_workers(link) and not self._stopped:
            self._members.leaving.add(link)
        else:
            super().take_signal(link, number)

    def take_outcomes(self, link: Link, outcomes: list[Outcome]) -> None:
        self._members.outcomes[link] = outcomes
        if link in self._members.leaving:
            self._note_down()
        lost = outcomes[0].lost
        if (lost or link in self._members.leaving) and not self._stopped:
            names = self._members.names([link])
            self._members.send_all(_note(f"{names} left{': ' * bool(lost)}{lost}. The job goes on."))
            if not lost:
                text = f"interrupted by SIGTERM; {names} left. The job goes on."
                status = exit_status(-signal.SIGTERM)
                link.send({"op": "outcome", "status": status, "text": text, "again": False, "restart": ""})
        super().take_outcomes(link, outcomes)
        self._release()

    def left(self, link: Link) -> None:
        self._held.pop(link, None)
        if not (self._running and link in self._members.leaving and link in self._members.outcomes):
            super().left(link)

    def heard(self, link: Link) -> None:
        outcomes = self._members.outcomes.get(link)
        if outcomes and outcomes[0].lost and self._running and not self._stopped:
            del self._members.outcomes[link]  # its tasks have never ended
            self._members.send_all(_note(f"{self._members.names([link])} came back."))

    def find_problem(self, message: Message) -> str | None:
        before = self._before(message)
        if before is None:
            return super().find_problem(message)
        if self._running and (host := self._members.host(before)) != message["host"]:
            return (
                f"The workers whose place it takes were at {host}, where the others look for them, and it is at "
                f"{message['host']} (--host)."
            )
        return self._terms.find_difference(message)

    def _before(self, message: Message) -> Link | None:
        """Returns the member that has or had the workers that this one wants to have, and whose place it may take."""
        if self._finished or self._stopped:
            return None
        may_be_replaced = self._members.has_only_workers if self._running else self._has_gone
        same = (link for link, member in self._members.joined.items() if numbers(member) == numbers(message))
        return next(filter(may_be_replaced, same), None)

    def admit(self, link: Link, message: Message) -> None:
        before = self._before(message)
        if before is None:
            super().admit(link, message)
        elif not self._running:
            del self._members.joined[before], self._members.outcomes[before]
            super().admit(link, message)
        elif before not in self._members.outcomes:
            self._held[link] = message
            text = f"{self._members.names([before])} still runs, as far as is known. This launcher waits for its end."
            link.send(_note(text))
        else:
            self._replace(before, link, message)

    def _replace(self, gone: Link, link: Link, message: Message) -> None:
        """Gives a launcher the place of a member that has gone."""
        gone.send({"op": "stop", "interrupt": None})  # it was taken for lost, and may still be there
        gone.send({"op": "outcome", "status": 1, "text": "another one has its place.", "again": False, "restart": ""})
        member = self._members.joined.pop(gone)
        self._members.joined[link] = {**message, "addresses": member["addresses"]}
        self._members.servers[link] = []
        del self._members.outcomes[gone]
        self._members.leaving.discard(gone)
        self._members.down.difference_update(self._members.tasks(link))
        self._send_start(link)
        self._members.send_all(_note(f"{self._members.names([link])} came back."))

    def _release(self) -> None:
        """Lets those in whose place has become free, and refuses them where it does not become free any more."""
        for link, message in list(self._held.items()):
            before = self._before(message)
            if self._running and not self._finished and (self._stopped or before not in self._members.outcomes):
                continue
            del self._held[link]
            if before is None:
                link.send({"op": "refused", "message": STARTED})
            else:
                self._join(link, message)

    def _verdict(self, everyone: list[Outcome]) -> tuple[int, str, bool]:
        return _verdict(everyone, self._members.down)


def _note(text: str) -> Message:
    """Return a message that tells members something while the job goes on."""
    return {"op": "note", "text": text}


def _verdict(everyone: list[Outcome], down: Collection[Task]) -> tuple[int, str, bool]:
    """Return the exit status of the job, its text, and whether it was preempted; `down` are tasks that have gone."""
    (chief,) = (outcome for outcome in everyone if outcome.kind == "chief")
    if chief.preempted:
        return chief.status or 0, f"preempted: {chief.name} ended with exit status {chief.status}.", True
    if not chief.ended:
        return exit_status(chief.status or 0), tell(chief, chief, everyone) if chief.status else "", False
    # Others went down: a server, or the last of the workers.
    gone = [outcome for outcome in everyone if outcome.lost or (outcome.kind, outcome.worker) in down]
    failed = [outcome for outcome in gone if outcome.failed]
    cause = max(failed, key=lambda outcome: (outcome.kind == "ps", outcome.failed_at), default=None)
    if cause is None:
        ended = [outcome.name for outcome in gone if outcome.status == 0 and outcome.kind != "evaluator"]
        why = f"{listed(ended)} ended with exit status 0 before the chief" if ended else "there is no worker left"
        return 1, f"The job cannot go on: {why}.", False
    return exit_status(cause.status) if cause.status else 1, tell(cause, cause, everyone), False
