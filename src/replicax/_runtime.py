"""A job of several processes: joining it, and saying which calls wait for the others.

Every process of a job runs the same program. `start` joins the job and must come before JAX's first computation.
From then on a monitor thread exchanges a few bytes a second with the other processes, so that none of them ever
waits in silence: what fails, stops, leaves early or goes another way is named on every process, which then ends.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from replicax import _ending, _preflight, _private, _quiet
from replicax._calls import Call, Calls
from replicax._channel import Relay, interface, join_address, listen, parse
from replicax._errors import JobError
from replicax._monitor import Hub, Member, Monitor
from replicax._verdict import Peer

_HEARTBEAT, _START, _STEP = "REPLICAX_HEARTBEAT_TIMEOUT", "REPLICAX_START_TIMEOUT", "REPLICAX_STEP_TIMEOUT"
_PORT = "REPLICAX_COORDINATION_PORT"
_JAX_TIMEOUT = 30 * 86400  # seconds; JAX's own detection ends processes without a name, so the monitor comes first

_LONGEST = 100_000  # characters of a traceback that are told to others

_lock = threading.RLock()
_job: Job | None = None
_monitor: Monitor | None = None
_hooks: _ending.Hooks | None = None
_calls: Calls | None = None  # None in a process that is alone
_step_timeout: float | None = None
_own: dict[str, float | None] = {}  # settings made by the program, which go before the environment


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
        """How messages call a process: its task type and task id."""
        return "{} {}".format(*self.tasks[process_id])


def timeouts() -> dict[str, float | None]:
    """The time limits in force, in seconds: "heartbeat", "start" and "step", None where there is no limit.

    They come from the environment (`REPLICAX_HEARTBEAT_TIMEOUT`, `REPLICAX_START_TIMEOUT`, `REPLICAX_STEP_TIMEOUT`),
    unless the program has set them.

    Raises:
        JobError: a variable of the environment is not a number of seconds.

    >>> timeouts()
    {'heartbeat': 30.0, 'start': 300.0, 'step': 300.0}
    """
    return {
        "heartbeat": _own.get("heartbeat", _from_environment(_HEARTBEAT, 30.0)),
        "start": _own.get("start", _from_environment(_START, 300.0)),
        "step": _own.get("step", _from_environment(_STEP, 300.0)),
    }


def _from_environment(name: str, default: float) -> float | None:
    text = os.environ.get(name, "").strip().lower()
    if not text:
        return default
    if text == "none" and name == _STEP:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        none = ", or 'none' for no limit" if name == _STEP else ""
        raise JobError(f"{name} is a number of seconds above 0{none}; got {text!r}.")
    return seconds


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
        _own[name] = None if math.isinf(seconds) else float(seconds)
        if name == "step":
            set_step_timeout(_own[name])


def current() -> Job | None:
    """The job of several processes that this process has joined, if any."""
    return _job


def start(
    tasks: Sequence[tuple[str, int]], addresses: Sequence[str], process_id: int, *, step_timeout: float | None = None
) -> Job:
    """Joins a job, once; with the same arguments again, returns the job that runs.

    Process 0 listens at its address and the others go there. When all are there and fit together, JAX is started
    across them, on a port that process 0 chooses (`REPLICAX_COORDINATION_PORT` fixes it). A job of one process
    starts nothing.

    Args:
        tasks: task type and task id of every process, by process id.
        addresses: `"host:port"` of every process, by process id.
        process_id: which of them this is.
        step_timeout: as for `set_step_timeout`; None leaves it as it is.

    Raises:
        RuntimeError: JAX has begun to compute already, or the process belongs to another job.
        JobError: who is missing within the deadline, or what does not fit together.
    """
    global _job
    job = Job(tuple((str(kind), int(index)) for kind, index in tasks), tuple(addresses), int(process_id))
    if len(job.tasks) != len(job.addresses) or not 0 <= job.process_id < len(job.tasks):
        raise ValueError(
            f"A job has one address for each task, and this process is one of them; got {len(job.tasks)} tasks, "
            f"{len(job.addresses)} addresses and process id {job.process_id}."
        )
    with _lock:
        if len(job.tasks) == 1:
            return job
        if _job is not None and _job != job:
            raise RuntimeError(
                f"This process is {_job.name(_job.process_id)} of a job of {len(_job.tasks)} processes already; it "
                f"cannot become {job.name(job.process_id)} of a job of {len(job.tasks)}."
            )
        if _job is None:
            try:
                _start(job)
            except JobError as error:
                _ending.write_report(
                    job.process_id, job.name(job.process_id), "start", str(error), traceback.format_exc(), None, None
                )
                raise
            _job = job
        if step_timeout is not None:
            set_step_timeout(step_timeout)
        return _job


def _start(job: Job) -> None:
    if jax.distributed.is_initialized():
        raise RuntimeError(
            "jax.distributed has been initialized by the program itself. Leave that to replicax, which starts it when "
            "MultiWorkerMirroredStrategy is made, or on TPU hosts in experimental_connect_to_cluster."
        )
    if _private.backend_started():
        raise RuntimeError(
            "Collective ops must be configured at program startup: make the strategy (on TPU hosts call "
            "experimental_connect_to_cluster) before the first computation and before jax.devices(). JAX has started "
            "for this process alone, and cannot be joined with others any more."
        )
    global _calls, _monitor, _hooks
    preflight = _preflight.mode()
    limits = timeouts()
    heartbeat, limit = limits["heartbeat"] or 30.0, limits["start"] or 300.0
    calls = Calls()
    said: dict[int, dict[str, Any]] = {}
    peers = {i: Peer(job.name(i), job.addresses[i]) for i in range(len(job.tasks))}
    if job.process_id == 0:
        gathering = _preflight.Gathering(job, limit)
        gathering.run()
        if preflight != "off":
            gathering.compare()
        said = gathering.said
        bind, address = _coordination(job.addresses[0])
        for channel in gathering.channels.values():
            channel.send({"start": {"jax": address, "heartbeat": heartbeat}})
        monitor: Monitor = Hub(peers, calls, heartbeat, gathering.channels)
    else:
        channel, answer = _preflight.reach(job, limit)
        bind, heartbeat = None, answer["heartbeat"]
        address = Relay(parse(answer["jax"])).address
        both = {0: peers[0], job.process_id: peers[job.process_id]}
        monitor = Member(job.process_id, both, calls, heartbeat, channel)
    monitor.step_timeout = limits["step"] if _step_timeout is None else _step_timeout
    _monitor, _calls = monitor, calls
    _hooks = _ending.Hooks(_failed)
    monitor.start()
    _hooks.watch_signals(monitor.waker.fileno())
    os.register_at_fork(after_in_child=_forget)
    atexit.register(_leave)
    wait = calls.begin_wait("the start of JAX on all processes")
    _start_jax(job, address, bind, limit)
    host = _reached_at(job.addresses[job.process_id])
    with contextlib.nullcontext() if host is None else _private.gloo_at(host):
        found = _preflight.devices()
    if preflight != "off":
        _preflight.compare_devices(found, job.name)
    with _quiet.without_greetings():
        _first_collective()
    calls.end_wait(wait)
    if job.process_id == 0 and preflight == "on":
        _ending.say(_preflight.table(said, found, job))


def _reached_at(address: str) -> str | None:
    """The host of this process's address, if it is one of this machine's own."""
    host, _ = parse(address)
    try:
        with socket.create_server((host, 0)):
            return host
    except OSError:  # it stands for this machine only as others see it
        return None


def _coordination(published: str) -> tuple[str, str]:
    """Where JAX's coordination service listens on process 0, and where the others find it."""
    host, _ = parse(published)
    text = os.environ.get(_PORT, "0")
    if not text.isdigit() or int(text) > 65535:
        raise JobError(f"{_PORT} is the number of a port; got {text!r}.")
    at = interface(host)
    with listen(at, int(text)) as probe:
        port = probe.getsockname()[1]
    return join_address(at, port), join_address(host, port)


def _start_jax(job: Job, address: str, bind: str | None, limit: float) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX would take SIGTERM for itself. And its connections stay on this host, where no proxy is wanted.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)
    excepted = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy")  # noqa: SIM112
    os.environ["no_grpc_proxy"] = ",".join(filter(None, [excepted, "127.0.0.1,localhost"]))  # noqa: SIM112
    devices = max(jax.config.jax_num_cpu_devices, 1)  # type: ignore[attr-defined]
    # JAX 0.10 runs the devices' parts of a call on so many threads, and deadlocks where they do not suffice.
    os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 2 * devices)))
    if bind is not None:
        address = bind.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
    jax.distributed.initialize(
        address,
        len(job.tasks),
        job.process_id,
        coordinator_bind_address=bind,
        initialization_timeout=max(1, round(limit)),
        heartbeat_timeout_seconds=_JAX_TIMEOUT,
        shutdown_timeout_seconds=0,
        cluster_detection_method="deactivate",
    )


def _first_collective() -> None:
    """Connects all devices while all processes are here: Gloo gives up on one that comes 30 s later."""
    mesh = jax.sharding.Mesh(jax.devices(), ("job",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("job"))
    count = len(jax.devices())
    ones = jax.make_array_from_callback((count,), split, lambda index: np.ones(1))
    whole = jax.jit(lambda x: x.sum(), out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    assert float(whole(ones)) == count


# How this process ends.


def _failed(error: BaseException) -> None:
    """The main thread has ended in an exception: the others are told, and the process ends. Called by the hook."""
    monitor, hooks = _monitor, _hooks
    assert hooks is not None
    if monitor is None or monitor.over.is_set():
        hooks.show(error)
        return
    report = _report(error, "exception")
    if _ending.caused_by_another(error):
        last, oldest = monitor.calls.last, monitor.calls.oldest()
        number, label = (oldest.number, oldest.label) if oldest is not None else (last.number, last.label)
        monitor.post("broken", {**report, "count": last.number if number is None else number, "label": label})
        # The monitor ends this process as soon as it knows who is at fault.
        monitor.over.wait(monitor.heartbeat + 6.0)
        hooks.show(error)
    else:
        hooks.show(error)
        monitor.post("failed", report)
    _end(monitor, report)
    if isinstance(error, KeyboardInterrupt):
        _ending.finish_by_signal(2)
    _ending.finish(1)


def _report(error: BaseException | None, message: str) -> dict[str, Any]:
    """What the others are told of a failure here; of an exit status alone, another failure may be the cause."""
    text = ""
    if error is not None:
        message, text = _ending.one_line(error), "".join(traceback.format_exception(error))
    return {"kind": "exception", "message": message[:1000], "traceback": text[-_LONGEST:], "status_only": error is None}


def _end(monitor: Monitor, report: dict[str, Any]) -> None:
    """Leaves the report of an own failure, and stays until the others know."""
    name, step = monitor.me.name, monitor.calls.step()
    _ending.write_report(monitor.process_id, name, "exception", report["message"], report["traceback"], step, None)
    monitor.over.wait(4.0)


def _leave() -> None:
    """At the end of the program: waits for what this process has begun itself, tells the others, and goes."""
    monitor, calls = _monitor, _calls
    if monitor is None or calls is None or monitor.over.is_set():
        _private.leave_distributed()
        return
    if status := _ending.status_of_exit():
        report = _report(getattr(sys, "last_value", None), f"it ended with exit status {status}")
        monitor.post("failed", report)
        _end(monitor, report)
        _ending.finish(status)
    while calls.oldest(waits=False) is not None:  # the monitor sees to it that this ends
        time.sleep(0.01)
    monitor.post("leaving", {})
    monitor.over.wait(5.0)
    if _hooks is not None:
        _hooks.remove()
    _private.leave_distributed()


def _forget() -> None:
    """In a forked child, which is no process of the job."""
    global _job, _monitor, _calls
    if _monitor is not None:
        _monitor.forget()
        atexit.unregister(_leave)
        if _hooks is not None:
            _hooks.remove()
        _private.leave_distributed()
    _job = _monitor = _calls = None


# What the engine says.


def begin(label: str) -> Call | None:
    """Says that a program whose collectives span processes is about to be dispatched; see `calling`.

    What it returns is to be told when the program has been dispatched. None where the process is alone.
    """
    return None if _calls is None else _calls.begin(label)


def compare_now() -> None:
    """Has the processes compare their calls at once: one that compiles anew may go another way."""
    if _monitor is not None:
        _monitor.post("compiled", {})


class calling:
    """Around the dispatch of a program whose collectives span processes.

    Every process makes the same calls with the same labels in the same order; one that does not is found by it.

    Args:
        label: short text, the same on every process, such as "step (all_reduce float32[1024])".

    >>> import jax.numpy as jnp
    >>> with calling("step") as call:
    ...     call.output = jnp.ones(2)  # one output of the program: the call is done when it is ready
    """

    __slots__ = ("_call", "_label", "output")

    def __init__(self, label: str):
        self._label = label
        self.output: jax.Array | None = None
        self._call: Call | None = None

    def __enter__(self) -> calling:
        self._call = begin(self._label)
        return self

    def __exit__(self, *_: object) -> None:
        if self._call is not None:
            self._call.dispatched(self.output)


class waiting:
    """Around a place where the calling thread itself blocks for the other processes. Not counted as a call.

    Args:
        label: what it waits for.

    >>> with waiting("the end of the data"):
    ...     pass
    """

    __slots__ = ("_call", "_label")

    def __init__(self, label: str):
        self._label = label
        self._call: Call | None = None

    def __enter__(self) -> None:
        if _calls is not None:
            self._call = _calls.begin_wait(self._label)

    def __exit__(self, *_: object) -> None:
        if self._call is not None and _calls is not None:
            _calls.end_wait(self._call)


def set_step_timeout(seconds: float | None) -> None:
    """How long a call may wait for the other processes before the job is ended; None for ever."""
    global _step_timeout
    if seconds is not None and not seconds > 0:
        raise ValueError(f"`timeout_seconds` is a number of seconds above 0, or None for no limit; got {seconds!r}.")
    _step_timeout = seconds
    if _monitor is not None:
        _monitor.step_timeout = seconds
