"""The job of several processes that this one belongs to, and which of its calls wait for the others.

Every process of a job runs the same program. `_job.join.start` joins the job, before JAX's first computation. From
then on a monitor thread exchanges a few bytes a second with the other processes, so that none of them ever waits in
silence: what fails, stops, leaves early or goes another way is named on every process, which then ends.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from replicax._job.call_log import CallLog, CollectiveCall
from replicax._job.channel import HEARTBEAT, HEARTBEAT_SECONDS, seconds_from_environment

if TYPE_CHECKING:
    from replicax._job.monitor import Monitor

_START, _STEP = "REPLICAX_START_TIMEOUT", "REPLICAX_STEP_TIMEOUT"

_job: Job | None = None
_monitor: Monitor | None = None
_calls: CallLog | None = None  # None in a process that is alone
_settings: dict[str, float | None] = {}  # settings made by the program, which go before the environment


class Job(NamedTuple):
    """The processes of a job, and which of them this one is.

    >>> job = Job((("chief", 0), ("worker", 0)), ("10.0.0.1:2222", "10.0.0.2:2222"), 1)
    >>> job.name(0), job.name(1)
    ('chief 0', 'worker 0')
    """

    tasks: tuple[tuple[str, int], ...]
    addresses: tuple[str, ...]
    process_id: int

    def name(self, process_id: int) -> str:
        """Returns the name of a process in messages: its task type and task id."""
        return "{} {}".format(*self.tasks[process_id])


def timeouts() -> dict[str, float | None]:
    """Returns the time limits in force, in seconds: "heartbeat", "start" and "step", None where there is no limit.

    They come from the environment (`REPLICAX_HEARTBEAT_TIMEOUT`, `REPLICAX_START_TIMEOUT`, `REPLICAX_STEP_TIMEOUT`),
    unless the program has set them.

    Raises:
        JobError: a variable of the environment is not a number of seconds.

    >>> timeouts()
    {'heartbeat': 30.0, 'start': 300.0, 'step': 300.0}
    """
    return {
        "heartbeat": _settings.get("heartbeat", seconds_from_environment(HEARTBEAT, HEARTBEAT_SECONDS)),
        "start": _settings.get("start", seconds_from_environment(_START, 300.0)),
        "step": _settings.get("step", seconds_from_environment(_STEP, 300.0, or_none=True)),
    }


def set_timeouts(*, heartbeat: float | None = None, start: float | None = None, step: float | None = None) -> None:
    """Sets time limits of jobs of several processes, in seconds; what is None stays as it is.

    Args:
        heartbeat: after which a process that does not answer is given up. Process 0's holds for all. Set before the
            job starts.
        start: for all processes to be there. Set before the job starts.
        step: for a call to wait for the other processes; `math.inf` for no limit.

    Raises:
        ValueError: a limit that is not above 0.

    >>> set_timeouts(start=300.0)
    """
    for name, seconds in (("heartbeat", heartbeat), ("start", start), ("step", step)):
        if seconds is None:
            continue
        if not seconds > 0 or (math.isinf(seconds) and name != "step"):
            raise ValueError(f"`{name}` is a number of seconds above 0; got {seconds!r}.")
        if name == "step":
            set_step_timeout(None if math.isinf(seconds) else float(seconds))
        else:
            _settings[name] = float(seconds)


def current() -> Job | None:
    """Returns the job of several processes that this process has joined, if any."""
    return _job


def joined(job: Job) -> None:
    """Records the job that this process has joined."""
    global _job
    _job = job


def watched_by(monitor: Monitor, calls: CallLog) -> None:
    """Begins to watch over the calls of this process."""
    global _monitor, _calls
    _monitor, _calls = monitor, calls


def monitor() -> Monitor | None:
    """Returns the monitor of this process, if it has joined a job."""
    return _monitor


def forget() -> None:
    """Forgets the job."""
    global _job, _monitor, _calls
    _job = _monitor = _calls = None


def begin(label: str) -> CollectiveCall | None:
    """Records that a program whose collectives span processes is about to be dispatched; None in a process alone.

    Once it has been dispatched, `dispatched` of the result is to be called with one output of the program. Every
    process makes the same calls with the same labels in the same order; one that does not is found by that.

    Args:
        label: short text, the same on every process, such as "step (all_reduce float32[1024])".
    """
    return None if _calls is None else _calls.begin(label)


def compare_now() -> None:
    """Makes the processes compare their calls at once: one that compiles anew may have made another call."""
    if _monitor is not None:
        _monitor.post("compiled", {})


@contextlib.contextmanager
def waiting(label: str, counted: bool = True) -> Iterator[None]:
    """Mark a place where the calling thread itself blocks for the other processes. It does not count as a call.

    Args:
        label: what it waits for.
        counted: whether every process comes to this place after the same number of waits. A background thread does not.

    >>> with waiting("the end of the data"):
    ...     pass
    """
    calls = _calls
    if calls is None:
        yield
        return
    wait = calls.begin_wait(label, counted)
    try:
        yield
    finally:
        calls.end_wait(wait)


def set_step_timeout(seconds: float | None) -> None:
    """Sets how long a call may wait for the other processes before the job is ended; None for no limit."""
    if seconds is not None and not seconds > 0:
        raise ValueError(f"`timeout_seconds` is a number of seconds above 0, or None for no limit; got {seconds!r}.")
    _settings["step"] = seconds
    if _monitor is not None:
        _monitor.own.step_timeout = seconds
