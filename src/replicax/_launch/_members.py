"""The launchers of a job, as its leader knows them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from replicax._base.errors import listed
from replicax._job.channel import Message
from replicax._launch._environment import Task
from replicax._launch._outcome import Outcome

_NAMED = 50  # missing workers that are named one by one


class Link(Protocol):
    """The leader's way to a member, or to a launcher that wants to become one."""

    def send(self, message: Message) -> None:
        """Sends a message, without waiting."""


class Terms(NamedTuple):
    """The arguments that the launchers of a job have in common."""

    workers: int
    ps: int
    secret: str
    job: str

    def find_difference(self, message: Message) -> str | None:
        """Return how the job that a launcher wants to join differs from this one."""
        if message["job"] != self.job:
            return (
                f"It is of the job {message['job'][:200]!r}, but the launcher of worker 0 is of the job {self.job!r}. "
                "If both are of one job, start them with the same --job-id. By default the program and its arguments "
                "are the name."
            )
        if message["workers"] != self.workers:
            return f"It has --workers {message['workers']}, but the launcher of worker 0 has {self.workers}."
        if message["ps"] != self.ps:
            return f"It has --ps {message['ps']}, but the launcher of worker 0 has {self.ps}."
        if message["secret"] != self.secret:
            return "Its job has another secret (REPLICAX_JOB_SECRET, REPLICAX_JOB_SECRET_FILE) than worker 0's."
        return None


class Members:
    """The launchers that have joined an attempt, with their tasks and outcomes.

    Args:
        workers: the number of workers on all machines.
        first_tasks: the tasks of the first member beside its workers and servers.

    Attributes:
        joined: for each member the message with which it joined.
        outcomes: for each member that is done, how its tasks have ended.
        servers: for each member the numbers of its parameter servers.
        leaving: members that have been asked to end while the job goes on.
        down: tasks that have ended and do not come back, of members that are still there.
    """

    def __init__(self, workers: int, first_tasks: Sequence[Task] = ()):
        self._workers, self._first_tasks = workers, first_tasks
        self.joined: dict[Link, Message] = {}
        self.outcomes: dict[Link, list[Outcome]] = {}
        self.servers: dict[Link, list[int]] = {}
        self.leaving: set[Link] = set()
        self.down: set[Task] = set()

    def host(self, link: Link) -> str:
        """Return the host of a member."""
        host: str = self.joined[link]["host"]
        return host

    def tasks(self, link: Link) -> list[Task]:
        """Return the tasks of a member."""
        workers = numbers(self.joined[link])
        first = self._first_tasks if workers.start == 0 else ()
        servers = (Task("ps", index) for index in self.servers.get(link, ()))
        return [*first, *(Task("worker", number) for number in workers), *servers]

    def has_only_workers(self, link: Link) -> bool:
        """Return True if no task of a member is the chief, an evaluator or a parameter server."""
        return all(task.kind == "worker" for task in self.tasks(link))

    def names(self, links: Iterable[Link]) -> str:
        """Return the tasks of members and their hosts as text."""
        return listed([f"{listed([task.name for task in self.tasks(link)])} on {self.host(link)}" for link in links])

    def describe_workers(self) -> tuple[str, str]:
        """Return the workers that are missing, and those that have come with their hosts, as texts."""
        hosts = self._hosts()
        absent = (f"worker {number}" for number in range(self._workers) if number not in hosts)
        missing = list(itertools.islice(absent, _NAMED))
        if (more := self._workers - len(hosts) - len(missing)) > 0:
            missing.append(f"{more} more")
        return listed(missing), listed([f"worker {number} ({hosts[number]})" for number in sorted(hosts)])

    def find_claim(self, message: Message) -> str | None:
        """Return the error for a launcher that claims workers of a member."""
        hosts = self._hosts()
        both = sorted(hosts.keys() & set(numbers(message)))
        if not both:
            return None
        names = listed([f"worker {number}" for number in both])
        return (
            f"Two launchers claim {names}: the one on {hosts[both[0]]} was first. Each machine has its own "
            "--worker-rank, the number of the first worker that runs on it."
        )

    def _hosts(self) -> dict[int, str]:
        """Return the host of each worker that has come."""
        return {number: self.host(link) for link in self.joined for number in numbers(self.joined[link])}

    def lose(self, link: Link, how: str) -> list[Outcome]:
        """Record that the tasks of a member are lost, and return their outcomes."""
        host, now = self.host(link), time.time()
        self.outcomes[link] = [Outcome(i, host, None, now, lost=how, kind=kind) for kind, i in self.tasks(link)]
        return self.outcomes[link]

    def all_outcomes(self) -> list[Outcome]:
        """Return the outcomes of all members in the order of their tasks."""
        outcomes = (outcome for outcomes in self.outcomes.values() for outcome in outcomes)
        return sorted(outcomes, key=lambda outcome: (outcome.kind, outcome.worker))

    def are_complete(self) -> bool:
        """Return True if all workers have come."""
        return sum(len(numbers(member)) for member in self.joined.values()) == self._workers

    def in_order(self) -> list[Link]:
        """Return the members in the order of their workers."""
        return sorted(self.joined, key=lambda link: int(self.joined[link]["first"]))

    def parse_outcomes(self, link: Link, messages: list[Any]) -> list[Outcome]:
        """Return the outcomes that a member has sent; raise `ValueError` if they are not of its tasks."""
        now = time.time()
        outcomes = [Outcome.from_message(message, now) for message in messages]
        if [(outcome.kind, outcome.worker) for outcome in outcomes] != self.tasks(link):
            raise ValueError("no outcomes of this member's workers")
        return outcomes

    def send_all(self, message: Message) -> None:
        """Send a message to every member."""
        for link in list(self.joined):
            link.send(message)


def numbers(join: Message) -> range:
    """Return the numbers of the workers of a launcher that has sent this message."""
    return range(join["first"], join["first"] + len(join["addresses"]))
