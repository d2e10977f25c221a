"""The functions that a coordinator has scheduled: which of them wait, run, or have failed."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from replicax._base import tracebacks
from replicax._base.errors import CancelledError, UnavailableError
from replicax._base.types import Tree
from replicax._parameter_server.numbers import Numbers
from replicax._parameter_server.remote_value import RemoteValueImpl

LIMIT = 1 << 18  # closures that wait; `schedule` waits while there are as many
_REMINDER = 30.0  # seconds, after which a wait without any worker says so


class Closure:
    """A scheduled function with its arguments, as far as the queue knows it.

    Attributes:
        number: by which parameter servers know it.
        value: its result, once it has ended.
        failures: how many closures had failed when it was scheduled; it is left out after another.
        lost: how many workers were lost while they ran it.
        may_have_run: whether one of them may have updated something: it is not left out then.
    """

    def __init__(self, number: int, value: RemoteValueImpl):
        self.number, self.value = number, value
        self.failures = self.lost = 0
        self.may_have_run = False


class Link(Protocol):
    """A worker, as far as the queue knows it.

    Attributes:
        running: how many closures it has.
    """

    running: int


class _Workers:
    """The workers that are there, and why others cannot be used.

    Args:
        timeout: seconds without any worker after which a wait for closures is an error; None for no limit.

    Attributes:
        there: the workers that can take closures.
    """

    def __init__(self, timeout: float | None):
        self.timeout = timeout
        self.there: list[Link] = []
        self._empty_since = time.monotonic()  # when the last of them left
        self._reminders = 0  # how often it was said since then that there is none
        self._refusals: dict[Link, str] = {}

    def enter(self, link: Link) -> None:
        """Add a worker."""
        if link not in self.there:
            self.there.append(link)
        self._refusals.pop(link, None)

    def leave(self, link: Link) -> None:
        """Remove a worker."""
        if link in self.there:
            self.there.remove(link)
            if not self.there:
                self._empty_since, self._reminders = time.monotonic(), 0

    def refuse(self, link: Link, why: str) -> bool:
        """Note why a worker that answers cannot be used. Return whether that is new."""
        before, self._refusals[link] = self._refusals.get(link), why
        return before != why

    def patience(self, began: float, waiting: int) -> float | None:
        """Return for how many seconds to wait for a change; None for any time, if a worker is there.

        Warn now and then that none is there.

        Args:
            began: when the wait began.
            waiting: the number of closures that wait.

        Raises:
            UnavailableError: no worker has come within the timeout.
        """
        if self.there:
            return None
        now = time.monotonic()
        waited = now - max(began, self._empty_since)
        why = "".join(f" The coordinator cannot use {link!r}: {why}" for link, why in self._refusals.items())
        if self.timeout is not None and waited >= self.timeout:
            raise UnavailableError(
                f"No worker was there for {waited:.3g} s (REPLICAX_START_TIMEOUT); {waiting} scheduled functions "
                f"wait. Start workers at the addresses of the cluster.{why}"
            )
        reminder = self._empty_since + (self._reminders + 1) * _REMINDER
        if now >= reminder:
            self._reminders = int((now - self._empty_since) / _REMINDER)
            alone = f"No worker is there, for {now - self._empty_since:.3g} s"
            tracebacks.warn(f"{alone}: scheduled functions wait for one.{why}")
            return 0.0
        return reminder - now if self.timeout is None else min(reminder - now, self.timeout - waited)


class ClosureQueue:
    """The closures of one coordinator.

    Args:
        numbers: the numbers of closures that have not ended.
        timeout: seconds without any worker, after which waiting for closures is an error.
    """

    def __init__(self, numbers: Numbers, timeout: float | None):
        self._numbers, self._workers = numbers, _Workers(timeout)
        self._lock = threading.RLock()
        self._for_workers = threading.Condition(self._lock)  # there may be something to do
        self._for_callers = threading.Condition(self._lock)  # what the coordinator's program waits for may be there
        self._awaited = 0  # how many of its threads wait for something else than the end of all closures
        self._waiting: deque[Closure] = deque()
        self._running: set[Closure] = set()
        self._back: list[Closure] = []  # those that wait to run again, since their worker was lost
        self._lonely: list[Closure] = []  # that run alone, or wait for that, or are to do so again
        self._error: BaseException | None = None  # of a closure, to be raised by the next call
        self._lost: UnavailableError | None = None  # a parameter server is gone
        self._stopped = False
        self._failures = 0  # counts the errors, so that workers leave out what was scheduled before

    # For the coordinator.

    def put(self, closures: Sequence[Closure]) -> None:
        """Adds closures; raises the error of an earlier one, once, in place of that."""
        began = time.monotonic()
        with self._lock:
            self._raise(began)
            while len(self._waiting) >= LIMIT:
                self._wait(began)
                self._raise(began)
            for closure in closures:
                closure.failures = self._failures
            self._waiting += closures
            self._for_workers.notify_all()

    def join(self) -> None:
        """Waits until all closures have ended; raises the error of one, once."""
        began = time.monotonic()
        with self._lock:
            while self._is_busy() and not self.stopped:
                self._wait(began, for_all=True)
            self._raise(began)

    def is_done(self) -> bool:
        """Returns whether all closures have ended; raises the error of one, once, when nothing runs any more."""
        with self._lock:
            if self._error is not None and self._is_busy() and not self.stopped:
                return False
            self._raise(time.monotonic())
            return not self._is_busy()

    def wait_for(self, event: threading.Event) -> None:
        """Waits for the end of one closure."""
        began = time.monotonic()
        with self._lock:
            while not event.is_set():
                self._wait(began)

    def _raise(self, began: float) -> None:
        if self._error is not None and self._lost is None:
            while self._is_busy() and not self.stopped:  # when the error comes out, nothing is under way any more
                self._wait(began)
        if self._lost is not None:
            raise self._lost.with_traceback(None)  # else that of each call before would be part of it
        if self._stopped:
            raise CancelledError("The coordinator was closed.")
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _is_busy(self) -> bool:
        return bool(self._waiting or self._running)

    def _wait(self, began: float, for_all: bool = False) -> None:
        """Waits for a change. Where there are no workers, says so now and then, and raises when that takes too long.

        Args:
            began: when what waits began to do so.
            for_all: whether it waits for the end of all closures, and the end of one means nothing to it.
        """
        self._awaited += not for_all
        try:
            self._for_callers.wait(self._workers.patience(began, len(self._waiting)))
        finally:
            self._awaited -= not for_all

    def fail_all(self, error: UnavailableError) -> None:
        """Notes that a parameter server is gone: nothing can run any more."""
        with self._lock:
            self._lost = self._lost or error
            self._end_all(error)

    def stop(self) -> None:
        """Lets the workers' threads end; nothing runs any more."""
        with self._lock:
            self._stopped = True
            self._end_all(CancelledError("The coordinator was closed before the function ended."))

    # For the threads that hand closures to workers.

    @property
    def stopped(self) -> bool:
        """Whether nothing runs any more: the coordinator was closed, or a parameter server is gone."""
        return self._stopped or self._lost is not None

    def joined(self, link: Link) -> None:
        """Notes that a worker is there."""
        with self._lock:
            self._workers.enter(link)
            self._wake(all_threads=True)

    def refuses(self, link: Link, why: str) -> None:
        """Notes that a worker answers and cannot be used; says so, the first time."""
        with self._lock:
            if self.stopped:  # the connection was being made when the coordinator was closed
                return
            is_new = self._workers.refuse(link, why)
        if is_new:
            # Printed, since a warning that is turned into an error would end this thread, and with it the link.
            print(f"replicax: the coordinator cannot use {link!r}: {why}", file=sys.stderr, flush=True)

    def left(self, link: Link) -> None:
        """Notes that a worker is gone."""
        with self._lock:
            self._workers.leave(link)
            self._wake(all_threads=True)

    def any_link(self) -> Link:
        """Returns a worker that is there, waiting for one."""
        began = time.monotonic()
        with self._lock:
            while not self._workers.there and not self.stopped:
                self._wait(began)
            if self.stopped:
                self._raise(began)
            return self._workers.there[0]

    def take(self, link: Link) -> Closure | None:
        """Returns the next closure for a worker, waiting for it; None when it is gone, or there will be none."""
        with self._lock:
            while not self.stopped and link in self._workers.there:
                if (closure := self._next_for(link)) is not None:
                    self._waiting.remove(closure)  # the first, or one of those that were put back before it
                    self._running.add(closure)
                    if closure in self._back:
                        self._back.remove(closure)
                    if closure.may_have_run:
                        closure.failures = self._failures
                    link.running += 1
                    return closure
                self._for_workers.wait()
            return None

    def _next_for(self, link: Link) -> Closure | None:
        if not self._waiting:
            return None
        if self._lonely:
            return self._back[0] if self._back else None
        # A second one, to have it at hand when the first ends, only where no other worker has nothing to do.
        is_free = not link.running or all(other.running for other in self._workers.there)
        return self._waiting[0] if is_free else None

    @contextlib.contextmanager
    def alone(self, closure: Closure | None = None) -> Iterator[None]:
        """Returns a context in which no other closure runs but such as wait for the same; it waits for that.

        It waits, too, for those that were put back, which may have updated some servers and not others. Where the
        closure itself has been put back at the end of the context, no new one runs until it has run again. Without a
        closure, the coordinator's program is alone, and the wait says so where no worker is there.
        """
        began = time.monotonic()
        wait = self._for_workers.wait if closure is not None else functools.partial(self._wait, began)
        closure = closure or Closure(-1, RemoteValueImpl(self.wait_for))
        try:
            with self._lock:
                if closure not in self._lonely:
                    self._lonely.append(closure)
                self._for_workers.notify_all()  # it may be the last that another one has waited for
                while not self.stopped and (
                    self._lonely[0] is not closure or not {*self._running, *self._back} <= {*self._lonely}
                ):
                    wait()
            yield
        finally:
            with self._lock:
                if closure not in self._back and closure in self._lonely:
                    self._lonely.remove(closure)
                self._wake(all_threads=True)

    def put_back(self, closure: Closure, link: Link) -> None:
        """Has a closure run again, before those that were scheduled after it.

        After an error, it is cancelled only if no worker has begun it: else it may have updated something, and runs
        again to its end, which servers notice.
        """
        with self._lock:
            if self.stopped or (self._error is not None and not closure.may_have_run):
                self._end(closure, link, _cancellation())
            else:
                self._running.discard(closure)
                link.running -= 1
                for closures in (self._waiting, self._back):
                    later = (place for place, other in enumerate(closures) if other.number > closure.number)
                    closures.insert(next(later, len(closures)), closure)
            self._wake()

    def ended(self, closure: Closure, link: Link, result: Callable[[], Tree]) -> None:
        """Notes that a closure has ended, and what makes its result."""
        with self._lock:
            self._end(closure, link)
            closure.value.set_result(result)
            self._wake()

    def failed(self, closure: Closure, link: Link, error: BaseException) -> None:
        """Notes that a closure has raised an error: those that wait are cancelled."""
        with self._lock:
            self._end(closure, link, error)
            self._error = self._error or error
            self._failures += 1
            waiting, self._waiting = self._waiting, deque(each for each in self._waiting if each.may_have_run)
            for other in waiting:
                if not other.may_have_run:
                    self._end(other, error=_cancellation())
            self._wake(all_threads=True)

    def left_out(self, closure: Closure, link: Link) -> None:
        """Notes that a worker has left a closure out, since one before it failed.

        It runs again where that failure is not known here: it may be on its way, or lost with the worker, and what
        failed there may end well elsewhere.
        """
        with self._lock:
            if closure.may_have_run or self._failures == closure.failures:
                return self.put_back(closure, link)
            self._end(closure, link, _cancellation())
            self._wake()

    def _wake(self, all_threads: bool = False) -> None:
        """Wakes the threads to which the end of one closure may mean something, or all."""
        if all_threads or self._waiting or self._lonely:
            self._for_workers.notify_all()
        if all_threads or self._awaited or not self._is_busy():
            self._for_callers.notify_all()

    def _end_all(self, error: BaseException) -> None:
        for closure in [*self._waiting, *self._running]:
            self._end(closure, error=error)
        self._waiting.clear()
        self._wake(all_threads=True)

    def _end(self, closure: Closure, link: Link | None = None, error: BaseException | None = None) -> None:
        """Remove a closure, which `link` may have run, and which failed if there is an error."""
        if link is not None:
            self._running.discard(closure)
            link.running -= 1
        self._numbers.close(closure.number)
        for closures in (self._back, self._lonely):
            if closure in closures:
                closures.remove(closure)
        if error is not None:
            closure.value.set_error(error)


def _cancellation() -> CancelledError:
    return CancelledError("The function was cancelled before it ran, since one that was scheduled with it failed.")
