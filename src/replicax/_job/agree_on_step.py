"""The agreement of a job's processes on the step at which all save their state, because one of them is to end soon.

Every process counts its steps at a *gate*. All processes take the same steps, so a count is the same place in the
program everywhere; but some are ahead of others, and a step may need all of them. Process 0 therefore asks:

    noticed  to process 0    this process is to end soon
    hold     to all          say how many steps you have begun, and begin no further one
    passed   to process 0    the answer; the monitor's thread gives it, whatever the main thread waits for
    stop     to all          begin this many steps (one more than anybody has begun), and save in place of the next one
    saved    to process 0    it has been saved here
    go       to all          all have saved: end or, with a grace period, go on until it is nearly over, and save again

A step that one process has begun is so begun by all, and no process waits at its gate for one that waits in a step.
Thanks to the one extra step, every process knows, when its last step ends, that it was the last: it keeps what the
program may change before it comes to the gate again. A process that ends or is frozen in between is found by the
monitor, as at any other time.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Set
from typing import Literal

from replicax._job import process_exit
from replicax._job.channel import Message


class Gate:
    """The gate of this process, through which each of its steps goes."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begins anew, alone; also in a forked child, which is no process of the job."""
        self.name = "this process"
        self.passed = 0  # steps begun
        self.ends = 0  # times at which all had saved, and were to end
        self.notices: list[str] = []  # the notices that this process knows of, its own and those of others
        self._known_before = 0  # of the notices, those that have led to an end
        self._changed = threading.Condition()
        self._held = False
        self._stop_at: int | None = None
        self._saves = 0  # times at which all had saved
        self._final = False  # and whether they were to end the latest time
        self.ending = False  # all have saved and are to end; no step has begun since
        self._alone = _Alone(self)
        self._tell: Callable[[str, Message], None] = self._alone.post
        self._turn: Callable[[], None] | None = self._alone.turn

    def connect(self, tell: Callable[[str, Message], None], name: str) -> None:
        """Joins the gates of a job's other processes: `tell` reaches process 0, whose orders come to `obey`.

        Notices that came before, to this process alone, are told there.
        """
        before, self._tell, self._turn, self.name = self.name, tell, None, name
        self.notices[:] = [name + reason.removeprefix(before) for reason in self.notices]
        for kind, message in self._alone.taken():
            tell(kind, {**message, "reason": name + message["reason"].removeprefix(before)})

    def notice(self, what: str, grace: float) -> None:
        """Tells all that this process is to end in `grace` seconds; `what` has happened to it.

        A process that is ending already has nothing to tell.
        """
        if self.ending:
            return
        self._know(f"{self.name} {what}")
        self._tell("noticed", {"reason": f"{self.name} {what}", "grace": grace, "ends": self.ends})

    def goes_on(self) -> None:
        """Has notices count again after an end, because the program goes on nevertheless."""
        self.ending = False

    def _know(self, reason: str) -> None:
        if reason not in self.notices[self._known_before :]:
            self.notices.append(reason)

    def passes(self) -> bool:
        """Counts a step, once it may begin, and returns True; False where the state is to be saved first."""
        if self._turn is not None:
            self._turn()
        with self._changed:
            while self._held:
                self._changed.wait()
            if self._stop_at is not None and self.passed >= self._stop_at:
                return False
            self.passed += 1
            self.goes_on()
            return True

    def is_next_closed(self) -> bool:
        """Returns whether `passes` will return False the next time; known when the step before has begun."""
        return self._stop_at is not None and self.passed >= self._stop_at

    def saved(self, seconds: float) -> bool:
        """Tells that the state is saved, waits until all have done so, and returns whether all end now.

        Args:
            seconds: before the end of a grace period at which to stop for the last save.
        """
        before = self._saves
        self._tell("saved", {"answer": seconds})
        if self._turn is not None:
            self._turn()
        with self._changed:
            while self._saves == before:  # the orders for the next save may follow at once
                self._changed.wait()
            return self._final

    def let_go(self) -> None:
        """Ends the wait for an order that does not come any more: process 0 has ended its program."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def obey(self, order: Message) -> Message | None:
        """Does what process 0 has told all to do, and returns the answer for it."""
        with self._changed:
            if order["order"] == "hold":
                self._held = True
                self._know(order["reason"])
                return {"answer": self.passed}
            if order["order"] == "stop":
                self._held, self._stop_at = False, order["at"]
            else:
                self._stop_at, self._final = None, order["final"]
                self._saves += 1
                if self._final:
                    self.ends, self.ending = self.ends + 1, True
                    self._known_before = len(self.notices)
            self._changed.notify_all()
            return None


class Agreement:
    """The part of process 0: turns notices and answers into orders."""

    def __init__(self) -> None:
        self._phase: Literal["quiet", "counting", "saving"] = "quiet"
        self._answers: dict[int, float] = {}
        self._final = False
        self._ends = 0  # times at which all had saved, and were to end
        self._reason = ""
        self._end: float | None = None  # the end of the first of those that are to end
        self._last_call: float | None = None  # seconds before that at which to stop again, once all have saved

    def take(self, process_id: int, kind: str, message: Message, now: float) -> None:
        """Takes a notice ("noticed"), or the answer of a process to the latest order."""
        if kind == "noticed":
            if message["ends"] < self._ends:
                return  # sent before its process knew that all end
            end = now + float(message["grace"])
            self._end = end if self._end is None else min(self._end, end)
            self._reason = self._reason or str(message["reason"])
        else:
            self._answers[process_id] = message["answer"]

    def due(self) -> float | None:
        """Returns from when on there is an order to give though no process says anything; None where there is none."""
        if self._phase != "quiet" or self._end is None:
            return None
        return -math.inf if self._last_call is None else self._end - self._last_call

    def next_order(self, there: Set[int], now: float) -> Message | None:
        """Returns the next order to all, if it is time for one; `there` are the processes that have not ended."""
        if self._phase == "quiet":
            if (due := self.due()) is None or now < due:
                return None
            self._phase, self._answers = "counting", {}
            return {"order": "hold", "reason": self._reason}
        if not there <= self._answers.keys():
            return None
        answers, self._answers = [self._answers[index] for index in there], {}
        if self._phase == "counting":
            assert self._end is not None
            self._phase, self._final = "saving", self._end - (self._last_call or 0.0) <= now
            begun = int(max(answers, default=0))
            self._say(begun > 0)
            return {"order": "stop", "at": begun + 1, "final": self._final}
        self._phase = "quiet"
        if self._final:
            self._end = self._last_call = None
            self._reason = ""
            self._ends += 1
        else:
            self._last_call = max(answers, default=0.0)
        return {"order": "go", "final": self._final}

    def _say(self, begun: bool) -> None:
        """Says what will be done; before any step has begun, nobody knows that there are gates in the program."""
        then = "end" if self._final else "go on, to save again when the grace period is nearly over"
        if self._last_call is not None:
            process_exit.say("The grace period is nearly over. The state is saved again at the next step.")
        elif not begun:
            process_exit.say(f"{self._reason}. It is to end soon.")
        else:
            process_exit.say(f"{self._reason}. All processes save their state at the same step, and {then}.")


class _Alone:
    """Agreement where there is one process: its main thread does what is due whenever it is at the gate."""

    def __init__(self, gate: Gate):
        self._gate = gate
        self._agreement = Agreement()
        self._posted: queue.SimpleQueue[tuple[str, Message]] = queue.SimpleQueue()

    def post(self, kind: str, message: Message) -> None:
        """Leaves a message, from any thread and from a signal's handler."""
        self._posted.put((kind, message))

    def taken(self) -> Iterator[tuple[str, Message]]:
        """Yields what was left, and leaves it no longer."""
        while not self._posted.empty():
            yield self._posted.get()

    def turn(self) -> None:
        """Takes what was left, and gives the orders that are due."""
        now = time.monotonic()
        for kind, message in self.taken():
            self._agreement.take(0, kind, message, now)
        while (order := self._agreement.next_order({0}, now)) is not None:
            if (answer := self._gate.obey(order)) is not None:
                self._agreement.take(0, "answer", answer, now)


GATE = Gate()
