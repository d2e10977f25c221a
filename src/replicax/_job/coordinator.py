"""The monitor of process 0, which compares what all processes say of themselves and decides when a job ends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from replicax._job import process_exit
from replicax._job.agree_on_step import GATE, Agreement
from replicax._job.call_log import CallLog, Made
from replicax._job.channel import Channel, wait
from replicax._job.diagnosis import Diagnosis, Peer, broken, diverged, failure, left, standing, stuck
from replicax._job.monitor import LINGER, Monitor
from replicax._job.reach import SECONDS

_SETTLE = 0.3  # seconds in which failures count as being of the same time
_COMPILES = 10  # deadlines of a step that compiling may take


class Coordinator(Monitor):
    """The monitor of process 0."""

    def __init__(self, peers: dict[int, Peer], calls: CallLog, heartbeat: float, members: dict[int, Channel]):
        super().__init__(0, peers, calls, heartbeat)
        self._members = members
        self._agreement = Agreement()
        self._told = 0.0
        self._trouble: float | None = None  # when the first failure was heard of
        self._broken: float | None = None
        self._late_one: tuple[int, float] | None = None  # who has waited too long, and the deadline it had
        self._asked: float | None = None  # when all were asked where they stand
        self._leaving: float | None = None
        self._compile_watch = _CompileWatch(self._looked)

    def patience(self, now: float) -> float:
        due, usual = self._agreement.due(), super().patience(now)
        return usual if due is None else min(usual, max(0.01, due - now))

    def _channels(self) -> list[Channel]:
        return list(self._members.values())

    def _tell(self, message: dict[str, Any]) -> None:
        for channel in self._channels():
            if not channel.closed:
                channel.send(message)

    def _take_posted(self, kind: str, report: dict[str, Any], now: float) -> None:
        if kind in ("failed", "broken"):
            self.me.note(kind, report, now)
            return
        if kind in ("noticed", "saved"):
            self._agreement.take(0, kind, report, now)
            return
        if kind == "leaving":
            self._leaving, self._soon, self.me.left = now, True, True
        self._tell({"tell": True})

    def _listen(self, now: float) -> None:
        for index, channel in self._members.items():
            peer = self.peers[index]
            try:
                for message in channel.receive():
                    peer.heard = now
                    self._take(index, message, now)
            except (KeyError, TypeError, ValueError, AttributeError):
                channel.closed = True
                peer.lost = "has sent what no process of a job sends"
            channel.flush()
            if channel.closed and peer.may_end:
                peer.left = True
            elif channel.closed and not peer.gone:
                peer.lost = "has ended without a word: it was killed, or it crashed"
            elif now - peer.heard > self.heartbeat and not peer.gone:
                peer.lose_silent(now - peer.heard)
        working = [peer for peer in self.peers.values() if peer.compiling and not peer.gone]
        if compiling := self._compile_watch.holds(working, self.own.step_timeout, now):
            self.calls.hold()
        if now - self._told >= self._interval:
            self._told = now
            self._tell({"beat": True, "compiling": compiling, "made": [self.me.count, self.me.digest]})

    def _take(self, index: int, message: dict[str, Any], now: float) -> None:
        peer = self.peers[index]
        for kind in ("failed", "broken"):
            if kind in message:
                peer.note(kind, message[kind], now)
        for kind in ("noticed", "passed", "saved"):
            if kind in message:
                self._agreement.take(index, kind, message[kind], now)
        if "out_of_reach" in message:
            peer.out_of_reach = {int(i): str(why) for i, why in message["out_of_reach"].items() if int(i) in self.peers}
        for kind in ("beat", "left", "detail"):
            if kind in message:
                self._heard(index, kind, message[kind])

    def _heard(self, index: int, kind: str, record: dict[str, Any]) -> None:
        peer = self.peers[index]
        peer.count, peer.digest, peer.waits = record["count"], record["digest"], record["waits"]
        peer.compiling, peer.order = record["compiling"], record["order"]
        self.own.differs = self.own.differs or record["differs"]
        peer.oldest = tuple(record["oldest"]) if record["oldest"] else None
        peer.left = peer.left or kind == "left"
        peer.ended, peer.stack = record["ended"], record["stack"] or peer.stack
        if record["late"] is not None and self._late_one is None:
            self._late_one = (index, record["late"])
        if kind != "beat":
            peer.stack = record["stack"]
            peer.made = {made[0]: Made(*made) for made in record["made"]}
            peer.detailed = True

    def _agree(self, now: float) -> None:
        """Gives the orders that are due in the agreement on a step at which all save their state."""
        there = {index for index, peer in self.peers.items() if not peer.gone}
        while (order := self._agreement.next_order(there, now)) is not None:
            self._tell({"order": order})
            if order.get("final") and order["order"] == "go":
                for peer in self.peers.values():
                    peer.may_end = True
            if (answer := GATE.obey(order)) is not None:
                self._agreement.take(0, "passed", answer, now)

    def _decide(self, now: float) -> None:
        if any(peer.failed or peer.lost is not None for peer in self.peers.values()):
            self._trouble = self._trouble or now
            self._soon = True
            if now - self._trouble >= _SETTLE:
                self._deal(failure(self.peers))
            return
        self._agree(now)
        self.own.differs = self.own.differs or _is_diverged(self.peers, self.me.count, self.calls)
        if any(peer.broken for peer in self.peers.values()):
            if self._broken is None:
                self._broken = now
                self._tell({"reach": True})
            if diagnosis := left(self.peers, now):
                self._deal(diagnosis)
            elif now - self._broken > self.heartbeat + 2 * self._interval:
                self._deal(broken(self.peers))
            return
        if self._late_one is None and (timeout := self.own.late()) is not None:
            self._late_one = (0, timeout)
        if self._asked is not None:
            late = None if self.own.differs else self._late_one
            here = [peer for peer in self.peers.values() if not peer.gone]
            detailed = all(peer.detailed for peer in here)
            tried = late is None or all(peer.out_of_reach is not None for peer in here)
            if (detailed and tried) or now - self._asked > LINGER + (SECONDS if detailed else 0.0):
                self._deal(stuck(self.peers, *late, now) if late else diverged(self.peers, now))
        elif diagnosis := left(self.peers, now):
            self._deal(diagnosis)
        elif self.own.differs or self._late_one is not None:
            self._asked, self._soon = now, True
            self.own.record_details()
            self.me.out_of_reach = {}  # it hears of all
            self._tell({"detail": True} if self.own.differs else {"detail": True, "reach": True})
        elif self._leaving is not None and (now - self._leaving > LINGER or _all_agree(self.peers, self.me.count)):
            self._tell({"left": self.own.record()})
            _drain(self._reachable(), 0.5, until_sent=True)
            self.over.set()

    def _reachable(self) -> list[Channel]:
        return [channel for index, channel in self._members.items() if self.peers[index].lost is None]

    def _deal(self, diagnosis: Diagnosis) -> None:
        self._tell({"diagnosis": diagnosis._asdict()})
        _drain(self._reachable(), LINGER, until_sent=self._leaving is not None)
        self._obey(diagnosis)


class _CompileWatch:
    """Suspends the deadlines of steps while some process compiles; not for ever, since processes may wait there too."""

    def __init__(self, now: float):
        self._since = now
        self._reported = 0  # deadlines of a step after which it was last reported

    def holds(self, compiling: Sequence[Peer], timeout: float | None, now: float) -> bool:
        """Return True if deadlines are suspended, and print the compiling processes from time to time."""
        if not compiling or timeout is None:
            self._since, self._reported = now, 0
            return False
        times = int((now - self._since) / timeout)
        if times >= _COMPILES:
            return False
        if times > self._reported:
            self._reported = times
            process_exit.say("\n".join(f"{standing(peer, now)}, for {times * timeout:g} s now" for peer in compiling))
        return True


def _is_diverged(peers: Mapping[int, Peer], count: int, calls: CallLog) -> bool:
    """Return True if two processes have made different calls; `count` is the number of calls made here."""
    seen: dict[int, int] = {}
    for peer in peers.values():
        own = calls.digest_at(peer.count) if peer.count <= count else None
        if seen.setdefault(peer.count, peer.digest) != peer.digest or (own is not None and own != peer.digest):
            return True
    return False


def _all_agree(peers: Mapping[int, Peer], count: int) -> bool:
    """Return True if every other process has made as many calls as this one and waits in none."""
    return all(peer.count == count and (peer.left or peer.oldest is None) for peer in peers.values())


def _drain(channels: Sequence[Channel], seconds: float, until_sent: bool) -> None:
    """Wait until other processes have closed their channels, or until they have taken what was sent; not for longer."""
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        there = [channel for channel in channels if not channel.closed]
        if not there or (until_sent and not any(channel.unsent for channel in there)):
            return
        wait(there, [], end - now)
        for channel in there:
            channel.flush()
            channel.receive()
