"""The leader, by which the launchers of several machines act as one.

Worker 0's launcher has the leader. Each launcher, that one included, is a member, and they exchange messages, over TCP
as lines of JSON:

    member to leader                                    leader to members
    join    my workers, and their addresses             start    the addresses of all workers
    failed  a worker of mine has failed, or a signal    stop     end your workers
            has come that asks to end
    down    with parameter servers: a task of mine      note     with parameter servers: what to tell, while
            has ended, and is not started again                  the job goes on
    stands  a worker of mine waits in the start of      outcome  what to tell, and whether to begin again
            its job, has joined it, or has ended before
    done    how my workers have ended
                                                        refused  why there will be no start

Over TCP both sides also send a heartbeat every second. After an outcome to begin again every member joins anew, with
new ports. A launcher on a single machine is a leader with one member. Nothing that comes over a connection is ever run.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from typing import Any, Protocol

from replicax._base.errors import listed
from replicax._job.channel import Message, parse
from replicax._launch._environment import Task
from replicax._launch._outcome import Outcome, exit_status, job_outcome, signal_name, was_preempted

STARTED = "All workers of this job have been started already."
_NAMED = 50  # missing workers that are named one by one

# What messages consist of, by who sends them: names of fields, and their types.
FROM_MEMBER: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "join": {
        "workers": (int,), "first": (int,), "host": (str,), "addresses": (list,), "job": (str,),
        # With parameter servers: their number, addresses here that tasks beside the workers may get, and what shows
        # that the job's secret is the same.
        "ps": (int,), "offered": (list,), "secret": (str,),
    },
    "failed": {"interrupt": (int, type(None))},
    "down": {"kind": (str,), "index": (int,)},
    "stands": {"worker": (int,), "how": (str,), "addresses": (list,)},
    "done": {"outcomes": (list,)},
}  # fmt: skip
FROM_LEADER: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "start": {"cluster": (dict,), "attempt": (int,), "ps": (list,)},
    "stop": {"interrupt": (int, type(None))},
    "outcome": {"status": (int,), "text": (str,), "again": (bool,), "restart": (str,)},
    "note": {"text": (str,)},
    "refused": {"message": (str,)},
}


def checked(message: Message, kinds: Mapping[str, Mapping[str, tuple[type, ...]]]) -> Message:
    """Returns the message if it is of these kinds; ValueError for what no launcher sends."""
    op = message.get("op")
    fields = kinds.get(op) if isinstance(op, str) else None
    if fields is None or any(type(message.get(name, ...)) not in types for name, types in fields.items()):
        raise ValueError("no message of a launcher")
    return message


class Link(Protocol):
    """The leader's way to a member, or to who wants to become one."""

    def send(self, message: Message) -> None:
        """Sends a message, without waiting."""


class Leader:
    """Brings the members together, and decides.

    Args:
        workers: how many there are on all machines.
        max_restarts: of all workers, after a failure.
        start_timeout: seconds for the members to come.
        ps: how many parameter servers there are.
        secret: what shows that the members have the job's secret.
        job: the name of the job.
    """

    def __init__(
        self, workers: int, max_restarts: int, start_timeout: float, ps: int = 0, secret: str = "", job: str = ""
    ):
        self.workers, self._ps, self._secret, self._job = workers, ps, secret, job
        self._max_restarts = max_restarts
        self._start_timeout = start_timeout
        self._attempt = 0
        self._failures = 0  # attempts that ended with a failure, which a preemption is not
        self._finished = False
        self._gather()

    def _gather(self) -> None:
        self._running = False
        self._stopped = False
        self._interrupt: tuple[int, str] | None = None
        self._joined: dict[Link, Message] = {}
        self._outcomes: dict[Link, list[Outcome]] = {}
        self._stands: dict[int, tuple[str, frozenset[str]]] = {}  # of workers: how, and with which addresses
        self._deadline = asyncio.get_running_loop().call_later(self._start_timeout, self._give_up)

    def receive(self, link: Link, message: Message) -> bool:
        """Acts on a message, and returns whether it came from a member. ValueError for what no member sends."""
        checked(message, FROM_MEMBER)
        if message["op"] == "join":
            return self._join(link, message)
        if link in self._joined and self._running:
            if message["op"] == "stands":
                self._stands[message["worker"]] = message["how"], frozenset(map(str, message["addresses"]))
                ended = frozenset().union(*(addresses for how, addresses in self._stands.values() if how == "ended"))
                if any(how == "waits" and ended & of for how, of in self._stands.values()):
                    self._stop()  # it would wait for one that will never come
            elif message["op"] == "done":
                self._done(link, self._outcomes_of(link, message["outcomes"]))
            elif message["op"] == "down":
                self._note_down(Task(message["kind"], message["index"]))
            elif message["interrupt"] is None:
                self._stop()
            else:
                self._signalled(link, int(message["interrupt"]))
        return link in self._joined

    def _signalled(self, link: Link, number: int) -> None:
        """Acts on a signal that asks a member to end."""
        if self._interrupt is None:
            self._interrupt = number, self._host(link)
            self._stop(number)

    def left(self, link: Link) -> None:
        """Forgets a member whose connection has ended; its workers are lost if they still ran."""
        if not self._running:
            self._joined.pop(link, None)
            return
        outcomes = self._outcomes.get(link, [])
        if any(outcome.ended for outcome in outcomes) and not any(outcome.failed for outcome in outcomes):
            del self._outcomes[link]  # it has ended its workers by itself, since it took this leader for lost
        self.lost(link, "its launcher was lost")

    def lost(self, link: Link, how: str) -> None:
        """Counts the workers of a member that is not heard of any more as lost, if they still ran."""
        if self._running and link in self._joined and link not in self._outcomes:
            host, now, tasks = self._host(link), time.time(), self._tasks_of(link)
            outcomes = [Outcome(index, host, None, now, lost=how, kind=kind) for kind, index in tasks]
            self._outcomes[link] = outcomes
            self._note_down()
            self._done(link, outcomes)

    def heard(self, link: Link) -> None:
        """Acts on a sign of life of a member, which may have been counted as lost."""

    def _note_down(self, *tasks: Task) -> None:
        """Acts on tasks, and on those of members with outcomes, that have gone and do not come back."""
        self._stop()

    def _tasks_of(self, link: Link) -> list[Task]:
        """Returns the tasks of a member."""
        return [Task("worker", number) for number in numbers(self._joined[link])]

    def close(self) -> None:
        """Cancels the deadline for members to join."""
        self._deadline.cancel()

    def _outcomes_of(self, link: Link, messages: list[Any]) -> list[Outcome]:
        now = time.time()
        outcomes = [Outcome.from_message(message, now) for message in messages]
        if [(outcome.kind, outcome.worker) for outcome in outcomes] != self._tasks_of(link):
            raise ValueError("no outcomes of this member's workers")
        return outcomes

    def _host(self, link: Link) -> str:
        host: str = self._joined[link]["host"]
        return host

    def _join(self, link: Link, message: Message) -> bool:
        first, addresses, offered = message["first"], message["addresses"], message["offered"]
        known = all(map(_is_address, [*addresses, *offered])) and len(offered) == offers(message["ps"])
        if not (0 <= first < first + len(addresses) <= message["workers"] and known):
            raise ValueError("no workers of a job")
        if problem := self._problem(message):
            link.send({"op": "refused", "message": problem})
        else:
            self._admit(link, message)
        return True

    def _problem(self, message: Message) -> str | None:
        """Returns why a launcher cannot join; None if it can."""
        taken = {number: other for other in self._joined for number in numbers(self._joined[other])}
        if self._running or self._finished:
            return STARTED
        if problem := self._difference(message):
            return problem
        if both := sorted(set(numbers(message)) & set(taken)):
            other = self._host(taken[both[0]])
            names = listed([f"worker {number}" for number in both])
            return (
                f"Two launchers claim {names}: the one on {other} was first. Each machine has its own --worker-rank, "
                f"the number of the first worker that runs on it."
            )
        return None

    def _difference(self, message: Message) -> str | None:
        """Returns in what the job that a launcher wants to join is another one."""
        if message["job"] != self._job:
            return (
                f"It is of the job {message['job'][:200]!r}, but the launcher of worker 0 is of the job {self._job!r}. "
                "If both are of one job, start them with the same --job-id. By default the program and its arguments "
                "are the name."
            )
        if message["workers"] != self.workers:
            return f"It has --workers {message['workers']}, but the launcher of worker 0 has {self.workers}."
        if message["ps"] != self._ps:
            return f"It has --ps {message['ps']}, but the launcher of worker 0 has {self._ps}."
        if message["secret"] != self._secret:
            return "Its job has another secret (REPLICAX_JOB_SECRET, REPLICAX_JOB_SECRET_FILE) than worker 0's."
        return None

    def _admit(self, link: Link, message: Message) -> None:
        self._joined[link] = message
        if sum(len(numbers(member)) for member in self._joined.values()) == self.workers:
            self._deadline.cancel()
            self._running = True
            self._start()

    def _start(self) -> None:
        """Tells the members the addresses of all tasks, and which of those beside the workers are theirs."""
        links = sorted(self._joined, key=lambda link: int(self._joined[link]["first"]))
        self._cluster = self._placed(links)
        for link in links:
            self._send_start(link)

    def _placed(self, links: list[Link]) -> dict[str, list[str]]:
        """Returns the addresses of all tasks, by their kinds. `links` are the members in the order of their workers."""
        return {"worker": [address for link in links for address in self._joined[link]["addresses"]]}

    def _servers_of(self, link: Link) -> list[int]:
        """Returns which parameter servers run on the machine of a member."""
        return []

    def _send_start(self, link: Link) -> None:
        servers = self._servers_of(link)
        link.send({"op": "start", "cluster": self._cluster, "attempt": self._attempt, "ps": servers})

    def _give_up(self) -> None:
        came = {number: self._host(link) for link in self._joined for number in numbers(self._joined[link])}
        absent = (f"worker {number}" for number in range(self.workers) if number not in came)
        missing = list(itertools.islice(absent, _NAMED))
        if (more := self.workers - len(came) - len(missing)) > 0:
            missing.append(f"{more} more")
        there = [f"worker {number} ({came[number]})" for number in sorted(came)]
        self._finished = True
        self._tell_all(
            {
                "op": "refused",
                "message": f"After {self._start_timeout:g} s nobody has come for {listed(missing)}. Here are: "
                f"{listed(there) or 'none'}. Start `replicax launch` on every machine with the same --workers and "
                f"--coordinator, and its own --worker-rank.",
            }
        )

    def _stop(self, interrupt: int | None = None) -> None:
        if not self._stopped or interrupt is not None:
            self._stopped = True
            self._tell_all({"op": "stop", "interrupt": interrupt})

    def _done(self, link: Link, outcomes: list[Outcome]) -> None:
        self._outcomes[link] = outcomes
        if len(self._outcomes) < len(self._joined):
            return
        if self._interrupt is not None:
            number, host = self._interrupt
            where = f" on {host}" if len(self._joined) > 1 else ""
            who = "tasks" if self._ps else "workers"
            status, text = exit_status(-number), f"interrupted by {signal_name(number)}{where}; all {who} have ended."
            again, restart = False, ""
        else:
            everyone = sorted((o for some in self._outcomes.values() for o in some), key=lambda o: (o.kind, o.worker))
            status, text, preempted = self._verdict(everyone)
            if preempted:
                again, restart = self._max_restarts > 0, "restart after a preemption"
            else:
                again = status != 0 and self._failures < self._max_restarts
                self._failures += 1
                restart = f"restart {self._failures} of at most {self._max_restarts}"
        message = {"op": "outcome", "status": status, "text": text, "again": again, "restart": restart}
        members = list(self._joined)
        self._finished = not again
        if again:
            self._attempt += 1
            self._begin_again()
        for member in members:
            member.send(message)

    def _begin_again(self) -> None:
        """Has all members join anew."""
        self._gather()

    def _verdict(self, everyone: list[Outcome]) -> tuple[int, str, bool]:
        """Returns the launcher's exit status, what to tell, and whether the job was preempted."""
        return *job_outcome(everyone), was_preempted(everyone)

    def _tell_all(self, message: Message) -> None:
        for link in list(self._joined):
            link.send(message)


def offers(ps: int) -> int:
    """Returns how many addresses a launcher offers for tasks beside its workers: all servers, and the chief."""
    return ps + 1 if ps else 0


def numbers(join: Message) -> range:
    """Returns the numbers of the workers of a launcher that has sent this message."""
    return range(join["first"], join["first"] + len(join["addresses"]))


def _is_address(address: object) -> bool:
    try:
        return isinstance(address, str) and bool(parse(address))
    except ValueError:
        return False


class LocalLink:
    """A member's way to a leader in its own process, and the leader's way to the member's inbox."""

    def __init__(self, leader: Leader, inbox: asyncio.Queue[Message]):
        self._leader = leader
        self._inbox = inbox

    def send_to_leader(self, message: Message) -> None:
        """Gives the leader a message."""
        self._leader.receive(self, message)

    def send(self, message: Message) -> None:
        """Gives the member a message."""
        self._inbox.put_nowait(message)
