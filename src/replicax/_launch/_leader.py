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
from collections.abc import Mapping, Sequence

from replicax._job.channel import Message, parse
from replicax._launch._environment import Task
from replicax._launch._members import Link, Members, Terms
from replicax._launch._outcome import Outcome, exit_status, job_outcome, signal_name, was_preempted

STARTED = "All workers of this job have been started already."

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

    _first_tasks: Sequence[Task] = ()  # tasks of the first member beside its workers and servers

    def __init__(
        self, workers: int, max_restarts: int, start_timeout: float, ps: int = 0, secret: str = "", job: str = ""
    ):
        self.workers, self._ps = workers, ps
        self._terms = Terms(workers, ps, secret, job)
        self._max_restarts, self._start_timeout = max_restarts, start_timeout
        self._attempt = 0
        self._failures = 0  # attempts that ended with a failure, which a preemption is not
        self._finished = False
        self._gather()

    def _gather(self) -> None:
        self._running = self._stopped = False
        self._interrupt: tuple[int, str] | None = None
        self._members = Members(self.workers, self._first_tasks)
        self._stands: dict[int, tuple[str, frozenset[str]]] = {}  # of workers: how, and with which addresses
        self._deadline = asyncio.get_running_loop().call_later(self._start_timeout, self._give_up)

    def receive(self, link: Link, message: Message) -> bool:
        """Acts on a message, and returns whether it came from a member. ValueError for what no member sends."""
        checked(message, FROM_MEMBER)
        if message["op"] == "join":
            return self._join(link, message)
        if link in self._members.joined and self._running:
            if message["op"] == "stands":
                self._stands[message["worker"]] = message["how"], frozenset(map(str, message["addresses"]))
                ended = frozenset().union(*(addresses for how, addresses in self._stands.values() if how == "ended"))
                if any(how == "waits" and ended & of for how, of in self._stands.values()):
                    self._stop()  # it would wait for one that will never come
            elif message["op"] == "done":
                self.take_outcomes(link, self._members.parse_outcomes(link, message["outcomes"]))
            elif message["op"] == "down":
                self._note_down(Task(message["kind"], message["index"]))
            elif message["interrupt"] is None:
                self._stop()
            else:
                self.take_signal(link, int(message["interrupt"]))
        return link in self._members.joined

    def take_signal(self, link: Link, number: int) -> None:
        """Acts on a signal that asks a member to end."""
        if self._interrupt is None:
            self._interrupt = number, self._members.host(link)
            self._stop(number)

    def left(self, link: Link) -> None:
        """Forgets a member whose connection has ended; its workers are lost if they still ran."""
        if not self._running:
            self._members.joined.pop(link, None)
            return
        outcomes = self._members.outcomes.get(link, [])
        if any(outcome.ended for outcome in outcomes) and not any(outcome.failed for outcome in outcomes):
            del self._members.outcomes[link]  # it has ended its workers by itself, since it took this leader for lost
        self.lost(link, "its launcher was lost")

    def lost(self, link: Link, how: str) -> None:
        """Counts the workers of a member that is not heard of any more as lost, if they still ran."""
        if self._running and link in self._members.joined and link not in self._members.outcomes:
            outcomes = self._members.lose(link, how)
            self._note_down()
            self.take_outcomes(link, outcomes)

    def heard(self, link: Link) -> None:
        """Acts on a sign of life of a member, which may have been counted as lost."""

    def _note_down(self, *tasks: Task) -> None:
        """Acts on tasks, and on those of members with outcomes, that have gone and do not come back."""
        self._stop()

    def close(self) -> None:
        """Cancels the deadline for members to join."""
        self._deadline.cancel()

    def _join(self, link: Link, message: Message) -> bool:
        first, addresses, offered = message["first"], message["addresses"], message["offered"]
        known = all(map(_is_address, [*addresses, *offered])) and len(offered) == offers(message["ps"])
        if not (0 <= first < first + len(addresses) <= message["workers"] and known):
            raise ValueError("no workers of a job")
        if problem := self.find_problem(message):
            link.send({"op": "refused", "message": problem})
        else:
            self.admit(link, message)
        return True

    def find_problem(self, message: Message) -> str | None:
        """Returns why a launcher cannot join; None if it can."""
        if self._running or self._finished:
            return STARTED
        return self._terms.find_difference(message) or self._members.find_claim(message)

    def admit(self, link: Link, message: Message) -> None:
        self._members.joined[link] = message
        if self._members.are_complete():
            self._deadline.cancel()
            self._running = True
            self.start()

    def start(self) -> None:
        """Tells the members the addresses of all tasks, and which of those beside the workers are theirs."""
        self._cluster = self.place_tasks()
        for link in self._members.in_order():
            self._send_start(link)

    def place_tasks(self) -> dict[str, list[str]]:
        """Return the addresses of all tasks by their kinds."""
        members = self._members
        return {"worker": [address for link in members.in_order() for address in members.joined[link]["addresses"]]}

    def _send_start(self, link: Link) -> None:
        servers = self._members.servers.get(link, [])
        link.send({"op": "start", "cluster": self._cluster, "attempt": self._attempt, "ps": servers})

    def _give_up(self) -> None:
        missing, there = self._members.describe_workers()
        self._finished = True
        self._members.send_all(
            {
                "op": "refused",
                "message": f"After {self._start_timeout:g} s nobody has come for {missing}. Here are: "
                f"{there or 'none'}. Start `replicax launch` on every machine with the same --workers and "
                f"--coordinator, and its own --worker-rank.",
            }
        )

    def _stop(self, interrupt: int | None = None) -> None:
        if not self._stopped or interrupt is not None:
            self._stopped = True
            self._members.send_all({"op": "stop", "interrupt": interrupt})

    def take_outcomes(self, link: Link, outcomes: list[Outcome]) -> None:
        self._members.outcomes[link] = outcomes
        if len(self._members.outcomes) < len(self._members.joined):
            return
        if self._interrupt is not None:
            number, host = self._interrupt
            where = f" on {host}" if len(self._members.joined) > 1 else ""
            who = "tasks" if self._ps else "workers"
            status, text = exit_status(-number), f"interrupted by {signal_name(number)}{where}; all {who} have ended."
            again, restart = False, ""
        else:
            status, text, preempted = self._verdict(self._members.all_outcomes())
            if preempted:
                again, restart = self._max_restarts > 0, "restart after a preemption"
            else:
                again = status != 0 and self._failures < self._max_restarts
                self._failures += 1
                restart = f"restart {self._failures} of at most {self._max_restarts}"
        message = {"op": "outcome", "status": status, "text": text, "again": again, "restart": restart}
        members = list(self._members.joined)
        self._finished = not again
        if again:
            self._attempt += 1
            self.begin_again()
        for member in members:
            member.send(message)

    def begin_again(self) -> None:
        """Has all members join anew."""
        self._gather()

    def _verdict(self, everyone: list[Outcome]) -> tuple[int, str, bool]:
        """Returns the launcher's exit status, what to tell, and whether the job was preempted."""
        return *job_outcome(everyone), was_preempted(everyone)


def offers(ps: int) -> int:
    """Returns how many addresses a launcher offers for tasks beside its workers: all servers, and the chief."""
    return ps + 1 if ps else 0


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
