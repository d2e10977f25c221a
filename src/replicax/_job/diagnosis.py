"""Diagnoses of jobs that end before their time: pure functions of what is known of each process."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from replicax._base import doc_pages
from replicax._base.errors import listed
from replicax._job.call_log import Made

_PATIENCE = 5.0  # seconds of a wait, which may be over without those that have ended their programs
_THREAD_PATIENCE = 10.0  # seconds for a thread that outlives its program to make its first call


@dataclass
class Peer:
    """The knowledge that one process has of another one, or of itself."""

    name: str
    address: str
    heard: float = 0.0  # when it was last heard of
    count: int = 0  # calls made
    digest: int = 0  # of their labels
    oldest: tuple[int | None, str, float] | None = None  # number, label and age of the oldest call that is not done
    compiling: bool = False  # `oldest` is being compiled
    waits: int = 0  # waits begun
    order: int = 0  # which of them `oldest` is, where that has no number
    left: bool = False  # its program has ended as it should
    may_end: bool = False  # and may do so without a word: all have saved their state after a preemption
    ended: str = ""  # it has, but these threads of it still run
    failed: Mapping[str, Any] | None = None  # message and traceback of its own failure, and the time
    broken: Mapping[str, Any] | None = None  # an exception that another process's end may have caused
    lost: str | None = None  # it ended or stopped without a word: how that showed
    silent: bool = False  # it is lost because it did not answer
    stack: str = ""  # where its main thread stands
    made: dict[int, Made] = field(default_factory=dict)
    detailed: bool = False  # stack and calls have been asked for and have come
    out_of_reach: Mapping[int, str] | None = None  # the processes that it cannot reach, and why; None if not known

    @property
    def gone(self) -> bool:
        """True if nothing more is to be expected of it."""
        return self.left or self.lost is not None or self.failed is not None

    def lose_silent(self, seconds: float) -> None:
        """Note that it is lost, since it has not answered for so many seconds."""
        self.lost, self.silent = f"has not answered for {seconds:.0f} s", True

    def note(self, kind: str, report: Mapping[str, Any], now: float) -> None:
        """Notes an exception, "failed" or "broken"."""
        if kind == "failed":
            self.failed, self.broken = {**report, "time": now}, None
        else:
            self.broken = report


class Diagnosis(NamedTuple):
    """The reason why the job ends."""

    kind: str  # "exception", "lost", "stuck", "diverged", "left"
    cause: tuple[int, ...]  # the processes at fault, where that is known
    message: str  # one line
    traceback: str = ""
    details: str = ""  # further lines

    @property
    def text(self) -> str:
        """All of it, the message first."""
        return "\n".join(filter(None, [self.message, self.traceback.rstrip(), self.details.rstrip()]))


def call_name(number: int | None, label: str) -> str:
    """Returns what messages call a call.

    >>> call_name(13, "step"), call_name(None, "the end of the data")
    ('call 13, "step"', '"the end of the data"')
    """
    return f'"{label}"' if number is None else f'call {number}, "{label}"'


def _calls(count: int) -> str:
    return f"{count} call" if count == 1 else f"{count} calls"


def names(peers: Mapping[int, Peer], which: list[int] | tuple[int, ...]) -> str:
    """Returns the names of these processes, as one text."""
    return listed([peers[i].name for i in which])


def standing(peer: Peer, now: float) -> str:
    """Returns one line on where a process stands."""
    calls = f"after {_calls(peer.count)}"
    if peer.left:
        return f"{peer.name}: has ended its program {calls}"
    if peer.lost is not None:
        return f"{peer.name}: {peer.lost}"
    if peer.ended:
        return f"{peer.name}: has ended its program {calls}, but its thread {peer.ended} still runs"
    silent = f"; has not answered for {now - peer.heard:.1f} s" if now - peer.heard > 2.5 else ""
    if peer.oldest is None:
        return f"{peer.name}: waits for no other worker, {calls}{silent}"
    number, label, age = peer.oldest
    if peer.compiling:
        return f"{peer.name}: compiles {call_name(number, label)}{silent}"
    if age < 0.1:
        return f"{peer.name}: is in {call_name(number, label)}{silent}"
    return f"{peer.name}: has waited {age:.1f} s in {call_name(number, label)}{silent}"


def table(peers: Mapping[int, Peer], now: float, stacks: tuple[int, ...] = ()) -> str:
    """Returns where each process stands, and the stacks of some of them."""
    lines = []
    for index, peer in peers.items():
        lines.append(f"  {standing(peer, now)}")
        if index in stacks and peer.stack and not peer.left:
            lines.append(f"    its main thread:\n{textwrap.indent(peer.stack.rstrip(), ' ' * 4)}")
    return "\n".join(lines)


def failure(peers: Mapping[int, Peer]) -> Diagnosis:
    """Diagnoses processes that failed or are lost: the cause is the first that failed, else those that are lost."""
    failed = {i: p.failed for i, p in peers.items() if p.failed}
    order = sorted(failed, key=lambda i: failed[i]["time"])
    lost = [i for i, p in peers.items() if p.lost is not None]
    if order:
        first, *others = order
        report = failed[first]
        more = [f"{peers[i].name} failed too: {failed[i]['message']}" for i in others]
        more += [f"{peers[i].name} {peers[i].lost}" for i in lost]
        message = f"{peers[first].name} failed: {report['message']}"
        return Diagnosis("exception", (first,), message, report["traceback"], "\n".join(more))
    message = "; ".join(f"{peers[i].name} ({peers[i].address}) {peers[i].lost}" for i in lost)
    cause = tuple(lost)
    if len(lost) == len(peers) - 1 > 1 and all(peers[i].silent for i in lost):
        (alone,) = peers.keys() - set(lost)
        message = f"{peers[alone].name} has lost contact with all other processes: {message}"
        cause = ()  # rather this machine's network is cut than all others stopped
    if any(peers[i].silent for i in lost):
        advice = (
            "A process that does not answer is stopped (by SIGSTOP or a debugger), holds Python's lock, or cannot be "
            "reached: its machine is gone, or the network is cut."
        )
    else:
        advice = "Look at its own output. Where that says nothing the process was killed, perhaps for want of memory."
    details = (
        f"{advice}\n{table({i: p for i, p in peers.items() if i not in lost}, max(p.heard for p in peers.values()))}"
    )
    return Diagnosis("lost", cause, message, "", details)


def broken(peers: Mapping[int, Peer]) -> Diagnosis:
    """Diagnoses calls that failed as they do when another process ends, where none has."""
    which = tuple(i for i, p in peers.items() if p.broken)
    report = peers[which[0]].broken or {}
    message = f"{names(peers, which)} could not go on: {report['message']}{_out_of_reach(peers)}"
    return Diagnosis("exception", which, message, report["traceback"], "No process of the job is known to have ended.")


def _out_of_reach(peers: Mapping[int, Peer]) -> str:
    """Return which processes cannot reach each other, to end a message."""
    return "".join(
        f"; {peer.name} cannot reach {peers[i].name} at {peers[i].address} ({why})"
        for peer in peers.values()
        for i, why in (peer.out_of_reach or {}).items()
    )


def left(peers: Mapping[int, Peer], now: float) -> Diagnosis | None:
    """Diagnoses processes that ended their programs while others are in calls that these have not made."""
    for i, peer in peers.items():
        if peer.gone or peer.ended:
            continue
        number, label = waits_for(peer)
        if number is not None:
            behind = [j for j, p in peers.items() if p.count < number]
        elif peer.oldest and peer.oldest[2] > _PATIENCE:
            behind = [j for j, p in peers.items() if p.waits < peer.order]
        else:
            behind = []
        if absent := [j for j in behind if _will_not_come(peers[j], peer, now)]:
            message = (
                f"{names(peers, absent)} {'has' if len(absent) == 1 else 'have'} ended the program after "
                f"{_calls(peers[absent[0]].count)}, while {peer.name} waits in {call_name(number, label)}"
            )
            running = [j for j in absent if peers[j].ended]
            message += "".join(f"; its thread {peers[j].ended} still runs" for j in running[:1])
            return Diagnosis("left", tuple(absent), message, "", table(peers, now, (i, *running)))
    return None


def _will_not_come(late: Peer, peer: Peer, now: float) -> bool:
    """Returns whether a process has ended its program, and no thread of it will join a call in which another waits.

    A thread has some time for that, and what the process said before the other began to wait does not count.
    """
    age = peer.oldest[2] if peer.oldest else 0.0
    in_vain = peer.broken is not None or (age > _THREAD_PATIENCE and now - late.heard < age)
    return late.left or (bool(late.ended) and in_vain)


def waits_for(peer: Peer) -> tuple[int | None, str]:
    """Returns the call that a process waits in, or in which it has failed."""
    if peer.broken:
        return peer.broken["count"], peer.broken["label"]
    return (peer.oldest[0], peer.oldest[1]) if peer.oldest else (None, "")


def diverged(peers: Mapping[int, Peer], now: float) -> Diagnosis:
    """Diagnoses processes that made different calls, by the first one that differs."""
    known = {i: p for i, p in peers.items() if p.made}
    common = set.intersection(*(set(p.made) for p in known.values())) if known else set()
    differ = sorted(n for n in common if len({p.made[n].digest for p in known.values()}) > 1)
    if not differ:
        return Diagnosis("diverged", (), "the processes have made different calls", "", table(peers, now))
    number = differ[0]
    labels = {i: p.made[number].label for i, p in known.items()}
    by_label: dict[str, list[int]] = {}
    for i, label in labels.items():
        by_label.setdefault(label, []).append(i)
    odd = tuple(odd_ones(labels))
    odd = () if len(odd) == len(labels) else odd  # who is right cannot be told
    before = number - 1 not in common and number > 1
    parts = "; ".join(
        f'{names(peers, which)} {"makes" if len(which) == 1 else "make"} "{label}"' for label, which in by_label.items()
    )
    message = f"the processes go different ways: in call {number}{' or before' if before else ''}, {parts}"
    details = table(peers, now, tuple(peers)[:8])
    return Diagnosis("diverged", odd, message, "", details)


def stuck(peers: Mapping[int, Peer], late: int, timeout: float, now: float) -> Diagnosis:
    """Diagnoses a call that did not end within the deadline of a step."""
    peer = peers[late]
    number, label, age = peer.oldest or (None, "", timeout)
    absent = tuple(
        i for i, p in peers.items() if i != late and (p.count < number if number is not None else p.oldest is None)
    )
    silent = tuple(i for i in absent if peers[i].lost is None and now - peers[i].heard > 2.5)
    message = f"the job is stuck: {peer.name} has waited {age:.1f} s in {call_name(number, label)}"
    if absent:
        message += f", which {names(peers, absent)} {'has' if len(absent) == 1 else 'have'} not reached"
    else:
        message += f", which every process has reached{_out_of_reach(peers)}"
    details = (
        f"{table(peers, now, absent[:8])}\n"
        f"The deadline of a step is {timeout:g} s (REPLICAX_STEP_TIMEOUT, or CommunicationOptions.timeout_seconds). "
        f"See {doc_pages.page('explanation/jobs#settings')}."
    )
    return Diagnosis("stuck", silent or absent, message, "", details)


def odd_ones(values: Mapping[int, Any]) -> dict[int, Any]:
    """Returns those whose value is not the most common one; all of them if no value is.

    >>> odd_ones({0: "a", 1: "b", 2: "a"}), odd_ones({0: "a", 1: "b"}), odd_ones({0: "a", 1: "a"})
    ({1: 'b'}, {0: 'a', 1: 'b'}, {})
    """
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return {}
    usual = counts[0][0] if counts[0][1] > counts[1][1] else None
    return {i: value for i, value in values.items() if value != usual or usual is None}
