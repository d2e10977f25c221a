"""The thread that watches over a job: every process tells process 0 how it stands, and process 0 tells all how it ends.

Process 0 is the coordinator (`coordinator`): it listens at its address, and each other process, a member, holds one
connection to it. About once a second a member says how many calls it has made, with a digest of their labels, and which
one is not done. The coordinator compares. When something is wrong it deals one diagnosis to all, and every process
prints it and ends. When the coordinator itself is gone each member says so by itself.
"""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

from replicax._job import notices, process_exit
from replicax._job.agree_on_step import GATE
from replicax._job.call_log import CallLog
from replicax._job.channel import STOOD_STILL, Channel, Message, beat_interval, send_rest, wait
from replicax._job.diagnosis import Diagnosis, Peer, call_name, failure, left, stuck
from replicax._job.own_state import OwnState
from replicax._job.reach import out_of_reach

LINGER = 2.0  # seconds for others to take what was sent to them
_MANY = 16  # processes whose messages are taken together, not each as it comes


class Monitor:
    """The common part of the coordinator's and the members' monitors."""

    def __init__(self, process_id: int, peers: dict[int, Peer], calls: CallLog, heartbeat: float):
        self.process_id = process_id
        self.peers = peers
        self.own = OwnState(process_id, peers[process_id], calls)
        self.me, self.calls = self.own.peer, calls
        self.heartbeat = heartbeat
        self.over = threading.Event()  # the job is over for this process, and the others know
        self._posted: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._woken, self.waker = socket.socketpair()
        self._woken.setblocking(False)
        self.waker.setblocking(False)
        self._looked = time.monotonic()
        self._soon = False  # something is about to be decided
        self._status: int | None = None  # the process ends with it, once the others know
        self._signal: int | None = None  # the process ends by it, once the others know
        self._interrupted: tuple[float, Any] | None = None
        for peer in peers.values():
            peer.heard = self._looked

    @property
    def _interval(self) -> float:
        """Seconds from one word to the next."""
        return max(0.05, min(beat_interval(self.heartbeat), (self.own.step_timeout or math.inf) / 4))

    def patience(self, now: float) -> float:
        """Returns the seconds after which the monitor looks again though nothing comes."""
        return 0.05 if self._soon else self._interval

    def start(self) -> None:
        """Begins to watch."""
        threading.Thread(target=self._run, name="job-monitor", daemon=True).start()

    def post(self, kind: str, report: dict[str, Any]) -> None:
        """Has something about this process told to the others.

        Args:
            kind: "failed", "broken", "leaving" or "compiled", or one of those in `agree_on_step`: "noticed" or "saved".
            report: further fields.
        """
        self._posted.put((kind, report))
        with contextlib.suppress(OSError):
            self.waker.send(b"\0")

    def forget(self) -> None:
        """Closes everything in a forked child, which is no process of the job."""
        self.over.set()
        for channel in self._channels():
            channel.close()
        self._woken.close()
        self.waker.close()

    # The loop.

    def _run(self) -> None:
        try:
            while not self.over.is_set():
                wait(self._channels(), [self._woken], self.patience(time.monotonic()))
                if len(self.peers) > _MANY:
                    time.sleep(0.05)
                self._turn(time.monotonic())
        except BaseException:
            if not self.over.is_set():
                process_exit.say(f"The monitor of the job has failed:\n{traceback.format_exc()}")
                process_exit.finish(process_exit.BECAUSE_OF_ANOTHER)

    def _turn(self, now: float) -> None:
        if (gap := now - self._looked) > self._interval + STOOD_STILL:  # this process itself stood still
            for peer in self.peers.values():
                peer.heard += gap
        self._looked = now
        self._take_signals()
        self._update(now)
        while not self._posted.empty():
            self._take_posted(*self._posted.get(), now)
        self._listen(now)
        if not self.over.is_set():
            self._decide(now)

    def _update(self, now: float) -> None:
        """Record the state of this process; report the end of its main program or an interrupt that it cannot see."""
        self.own.update(now)
        error = self.own.see_end(self._status is not None or self._signal is not None)
        if isinstance(error, KeyboardInterrupt):
            self._end_by(signal.SIGINT, process_exit.one_line(error))
        elif error is not None:
            self._status = 1
            self._fail(process_exit.one_line(error))
        if self._interrupted is not None and now > self._interrupted[0]:
            _, before = self._interrupted
            self._interrupted = None
            if (oldest := self.me.oldest) is not None and _main_position() == before:
                self._end_by(signal.SIGINT, f"was interrupted while it waited in {call_name(*oldest[:2])}")

    # Signals.

    def _take_signals(self) -> None:
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            numbers = self._woken.recv(4096)
        for number in numbers:
            if number == signal.SIGTERM:
                handler = notices.sigterm_handler()
                if handler is notices.on_sigterm:
                    notices.heard_sigterm(1)
                elif handler is process_exit.on_sigterm:
                    self._end_by(number, "was ended by SIGTERM")
            elif number == signal.SIGINT and signal.getsignal(number) is signal.default_int_handler:
                # Python raises KeyboardInterrupt once the main thread is back from JAX. It may never be.
                self._interrupted = (time.monotonic() + 2.0, _main_position())

    def _end_by(self, number: int, message: str) -> None:
        self._signal = number
        self._fail(message)

    def _fail(self, message: str) -> None:
        self.own.write_report("exception", message, "")
        self._take_posted("failed", {"message": message, "traceback": ""}, self._looked)

    # The end.

    def _obey(self, diagnosis: Diagnosis) -> None:
        """Ends this process as the diagnosis says. The main thread does it where it has an exception of its own."""
        me = self.me
        own = bool(me.failed) or (
            bool(me.broken) and diagnosis.kind == "exception" and self.process_id in diagnosis.cause
        )
        if own and self.process_id not in diagnosis.cause[:1] and diagnosis.cause:
            process_exit.say(diagnosis.message)
        if self._signal is not None:
            process_exit.finish_by_signal(self._signal)
        if self._status is not None:
            process_exit.finish(self._status)
        if own:
            self.over.set()
            return
        process_exit.flush()
        text = diagnosis.traceback
        if diagnosis.kind in ("stuck", "diverged", "left") and not me.left:
            self.own.record_details()
            where = call_name(me.oldest[0], me.oldest[1]) if me.oldest else "no call"
            text = f"Its main thread:\n{me.stack}" if me.stack else ""
            more = f"\n{me.name} waits in {where}; its main thread:\n{me.stack.rstrip()}" if me.stack else ""
        else:
            more = f"\nHere ({me.name}) this showed as {me.broken['message']}" if me.broken else ""
        process_exit.say(diagnosis.text + more)
        others = [i for i in diagnosis.cause if i != self.process_id]
        caused_by = others[0] if others and others == list(diagnosis.cause) else None
        self.own.write_report(diagnosis.kind, diagnosis.message, text, caused_by)
        process_exit.finish(process_exit.BECAUSE_OF_ANOTHER)

    # What the coordinator and the members do each in their own way.

    def _channels(self) -> list[Channel]:
        raise NotImplementedError

    def _take_posted(self, kind: str, report: dict[str, Any], now: float) -> None:
        """Tells the others what has been posted about this process."""
        raise NotImplementedError

    def _listen(self, now: float) -> None:
        raise NotImplementedError

    def _decide(self, now: float) -> None:
        raise NotImplementedError


def _main_position() -> tuple[int, int] | None:
    """Returns where the main thread is, to see whether it has moved."""
    frame = process_exit.main_frame()
    return (id(frame), frame.f_lasti) if frame is not None else None


class Member(Monitor):
    """The monitor of a process other than 0."""

    def __init__(
        self,
        process_id: int,
        peers: dict[int, Peer],
        calls: CallLog,
        heartbeat: float,
        coordinator: Channel,
        addresses: Sequence[str],
    ):
        super().__init__(process_id, peers, calls, heartbeat)
        self._coordinator = coordinator
        self._addresses = addresses  # of all processes
        self._told = 0.0  # when the coordinator was last told how this process stands

    def _channels(self) -> list[Channel]:
        return [self._coordinator]

    def _take_posted(self, kind: str, report: dict[str, Any], now: float) -> None:
        if kind == "leaving":
            self._coordinator.send({"left": self.own.record_details()})
            send_rest([self._coordinator], LINGER)
            self._coordinator.close()
            self.over.set()
        elif kind == "compiled":
            self._tell(now)
        elif kind in ("noticed", "saved", "out_of_reach"):
            self._coordinator.send({kind: report})
        else:
            self.me.note(kind, report, 0.0)
            self._coordinator.send({kind: report})

    def _listen(self, now: float) -> None:
        if self.over.is_set():
            return
        coordinator = self.peers[0]
        for message in self._coordinator.receive():
            coordinator.heard = now
            if diagnosis := message.get("diagnosis"):
                self._obey(Diagnosis(**{**diagnosis, "cause": tuple(diagnosis["cause"])}))
                return
            if message.get("compiling"):
                self.calls.hold()
            if "made" in message and not self.own.differs:
                # This process may be ahead of process 0, which then cannot tell that they differ.
                count, digest = message["made"]
                own = self.calls.digest_at(count)
                self.own.differs = own is not None and own != digest
                if self.own.differs:
                    self._tell(now)
            if "left" in message:
                coordinator.left = True
                coordinator.count, coordinator.waits = message["left"]["count"], message["left"]["waits"]
            if "tell" in message:
                self._tell(now)
            if "order" in message:
                self._follow(message["order"])
            if "detail" in message:
                self._coordinator.send({"detail": self.own.record_details()})
            if "reach" in message:
                threading.Thread(target=self._try_to_reach, name="job-reach", daemon=True).start()
        self._coordinator.flush()

    def _try_to_reach(self) -> None:
        """Tell process 0 which other processes this one cannot reach."""
        reasons = out_of_reach(self._addresses, self.process_id)
        self.post("out_of_reach", {str(process): why for process, why in reasons.items()})

    def _follow(self, order: Message) -> None:
        """Does what the agreement on a step to stop at needs."""
        if (answer := GATE.obey(order)) is not None:
            self._coordinator.send({"passed": answer})
        if order.get("final") and order["order"] == "go":
            coordinator = self.peers[0]
            coordinator.may_end, coordinator.count, coordinator.waits = True, self.calls.last.number, self.calls.waits

    def _tell(self, now: float) -> None:
        self._told = now
        self._coordinator.send({"beat": self.own.record()})

    def _decide(self, now: float) -> None:
        coordinator = self.peers[0]
        if coordinator.left:
            GATE.let_go()
            if diagnosis := left(self.peers, now):
                self._obey(diagnosis)
            elif (timeout := self.own.late()) is not None:
                self._obey(stuck(self.peers, self.process_id, timeout, now))
            elif self.me.failed or self.me.broken:
                self._obey(Diagnosis("exception", (self.process_id,), ""))
            return
        if self._coordinator.closed and coordinator.may_end:
            coordinator.left = True
        elif self._coordinator.closed:
            coordinator.lost = "has ended without a word: it was killed, or it crashed"
        elif now - coordinator.heard > self.heartbeat:
            coordinator.lose_silent(now - coordinator.heard)
        if coordinator.lost is not None:
            self._obey(failure(self.peers))
        elif now - self._told >= self._interval:
            self._tell(now)
        timeout, oldest = self.own.late(), self.me.oldest
        if timeout is not None and oldest is not None and oldest[2] > timeout + self.heartbeat:
            self._obey(stuck(self.peers, self.process_id, timeout, now))  # the coordinator has not seen to it
