"""Notices that this process is to end soon: SIGTERM, and functions that are asked once a second."""

from __future__ import annotations

import os
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from replicax._job.agree_on_step import GATE

_INTERVAL = 1.0  # seconds between two questions


class Notice(NamedTuple):
    """A notice that this process is to end soon."""

    what: str  # has happened to it, such as "has received SIGTERM"
    grace: float | None = None  # seconds until the end; None for those of the watch


Look = Callable[[], Notice | None]


class Watch:
    """Has notices of this process told to all, for as long as it is referred to.

    Args:
        looks: functions that return a notice once there is one. They are called in a thread.
        grace: seconds from a notice to the end of the process.
        signals: whether SIGTERM is a notice, in place of what it does otherwise.
    """

    def __init__(self, looks: Sequence[Look], grace: float = 0.0, signals: bool = True):
        self.grace = grace
        self.problems: list[Exception] = []  # of `looks`, which are no longer called then
        if signals:
            GATE.goes_on()
            _watches.append(weakref.ref(self, _watches.remove))
            _take_sigterm()
        if looks:
            stopped = threading.Event()
            weakref.finalize(self, stopped.set)
            arguments = (tuple(looks), grace, stopped, self.problems)
            threading.Thread(target=_poll, args=arguments, name="replicax-preemption-notice", daemon=True).start()


def _poll(looks: tuple[Look, ...], grace: float, stopped: threading.Event, problems: list[Exception]) -> None:
    while True:
        for look in looks:
            try:
                notice = look()
            except Exception as error:
                problems.append(error)
                return
            if notice is not None:
                GATE.notice(notice.what, grace if notice.grace is None else notice.grace)
                return
        if stopped.wait(_INTERVAL):
            return


# SIGTERM. Python calls its handler in the main thread, which a collective may block; the thread of a job's monitor
# reads the signal's number from a socket, unless other code has taken that over. Both count, and who is ahead tells.

_watches: list[weakref.ref[Watch]] = []  # the newest last
_before: object = signal.SIG_DFL  # the handler that stood there before
_counting = threading.RLock()  # a signal may come while its thread counts one
_heard = [0, 0]  # signals, as counted by the handler and by the monitor
_told = 0
_ends = -1  # `GATE.ends` at the latest signal


def _take_sigterm() -> None:
    global _before
    handler = signal.getsignal(signal.SIGTERM)
    if handler is on_sigterm:
        return
    if threading.current_thread() is not threading.main_thread():
        warnings.warn(
            "SIGTERM is no notice of a preemption here: a PreemptionCheckpointHandler takes it over only if it is made "
            "in the main thread.",
            stacklevel=4,
        )
        return
    _before = handler
    signal.signal(signal.SIGTERM, on_sigterm)


def _forget() -> None:
    """Forgets everything in a forked child, which a signal ends; no other thread holds the gate there."""
    global _counting
    _watches.clear()
    _counting = threading.RLock()
    if signal.getsignal(signal.SIGTERM) is on_sigterm:
        signal.signal(signal.SIGTERM, _before)  # type: ignore[arg-type]
    GATE.reset()


os.register_at_fork(after_in_child=_forget)  # before a job's own hook, which puts back what it finds there


def sigterm_handler() -> object:
    """Returns the handler that is in force: where nobody watches any more, the one from before."""
    handler = signal.getsignal(signal.SIGTERM)
    return _before if handler is on_sigterm and not _watches else handler


def on_sigterm(number: int, frame: object) -> None:
    """Takes the signal for a notice; where nobody watches any more, does as before."""
    handler = sigterm_handler()
    if handler is on_sigterm:
        heard_sigterm(0)
    elif callable(handler):
        handler(number, frame)
    else:
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        signal.raise_signal(number)


def heard_sigterm(by: int) -> None:
    """Counts a signal, by its handler (0) or by the monitor (1). A second one ends the grace period of the first."""
    global _told, _ends
    with _counting:
        _heard[by] += 1
        if _heard[by] <= _told:
            return
        _told = _heard[by]
        if GATE.ending:
            return
        again, _ends = _ends == GATE.ends, GATE.ends
    newest = _watches[-1]() if _watches else None
    GATE.notice("has received SIGTERM", 0.0 if again or newest is None else newest.grace)
