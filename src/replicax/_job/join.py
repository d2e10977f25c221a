"""Joining a job of several processes, and leaving it by the end of the program or by its failure."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from replicax._base import doc_pages, jax_internals, suppress_output
from replicax._base.errors import JobError
from replicax._job import background, process_exit, state
from replicax._job import preflight as _preflight
from replicax._job.agree_on_step import GATE
from replicax._job.call_log import CallLog
from replicax._job.channel import Channel, Relay, interface, is_own, join_address, listen, parse
from replicax._job.coordinator import Coordinator
from replicax._job.diagnosis import Peer
from replicax._job.monitor import Member, Monitor
from replicax._job.state import Job
from replicax._report import terminal

_EVERY_INTERFACE = ("0.0.0.0", "::")
_PORT = "REPLICAX_COORDINATION_PORT"
_JAX_TIMEOUT = 30 * 86400  # seconds; JAX's own detection ends processes without a name, so the monitor comes first
_LONGEST = 100_000  # characters of a traceback that are told to others

_lock = threading.RLock()
_hooks: process_exit.Hooks | None = None


def start(tasks: Sequence[tuple[str, int]], addresses: Sequence[str], process_id: int) -> Job:
    """Joins a job, once; with the same arguments again, returns the job that runs.

    Process 0 listens at its address and the others go there. When all are there and fit together, JAX is started
    across them, on a port that process 0 chooses (`REPLICAX_COORDINATION_PORT` fixes it). A job of one process
    starts nothing.

    Args:
        tasks: task type and task id of every process, by process id.
        addresses: `"host:port"` of every process, by process id.
        process_id: which of them this is.

    Raises:
        RuntimeError: JAX has begun to compute already, or the process belongs to another job.
        ValueError: an address is none, or there is not one for each task.
        JobError: who is missing within the deadline, or what does not fit together.
    """
    job = Job(tuple((str(kind), int(index)) for kind, index in tasks), tuple(addresses), int(process_id))
    if len(job.tasks) != len(job.addresses) or not 0 <= job.process_id < len(job.tasks):
        raise ValueError(
            f"A job has one address for each task, and this process is one of them; got {len(job.tasks)} tasks, "
            f"{len(job.addresses)} addresses and process id {job.process_id}."
        )
    with _lock:
        if len(job.tasks) == 1:
            return job
        for i, address in enumerate(job.addresses):
            try:
                parse(address)
            except ValueError as error:
                raise ValueError(f"{job.name(i)}: {error}") from None
        running = state.current()
        if running is not None and running != job:
            raise RuntimeError(
                f"This process is {running.name(running.process_id)} of a job of {len(running.tasks)} processes "
                f"already; it cannot become {job.name(job.process_id)} of a job of {len(job.tasks)}."
            )
        if running is None:
            try:
                join(job)
            except JobError as error:
                name, text = job.name(job.process_id), traceback.format_exc()
                process_exit.write_report(job.process_id, name, "start", str(error), text)
                raise
            state.joined(job)
        return job


def join(job: Job) -> None:
    """Joins the others of a job, and JAX across all of them; raises as `start` does."""
    _refuse_started_jax()
    preflight = _preflight.mode()
    limits = state.timeouts()
    heartbeat, limit = limits["heartbeat"] or 30.0, limits["start"] or 300.0
    calls = CallLog()
    said: dict[int, dict[str, Any]] = {}
    peers = {i: Peer(job.name(i), job.addresses[i]) for i in range(len(job.tasks))}
    process_exit.mark_waiting(job.process_id, job.addresses)
    if job.process_id != 0:
        terminal.keep_quiet()
    if job.process_id == 0:
        gathering = _preflight.Gathering(job, limit)
        gathering.run()
        if preflight != "off":
            gathering.compare()
        said = gathering.said
        own = _own_address(job.addresses[0], gathering.channels.values())
        held, bind, address = _coordination(job.addresses[0], own)
        if own in _EVERY_INTERFACE and preflight == "on":
            process_exit.say(
                f"{job.name(0)}: JAX's coordination service listens on every interface of this machine, port "
                f"{parse(address)[1]}: none of its addresses is {job.addresses[0]}, or several are."
            )
        for channel in gathering.channels.values():
            channel.send({"start": {"jax": address, "heartbeat": heartbeat}})
        monitor: Monitor = Coordinator(peers, calls, heartbeat, gathering.channels)
    else:
        channel, answer = _preflight.reach(job, limit)
        own = _own_address(job.addresses[job.process_id], [channel])
        held, bind, heartbeat = None, None, answer["heartbeat"]
        address = Relay(parse(answer["jax"])).address
        both = {0: peers[0], job.process_id: peers[job.process_id]}
        monitor = Member(job.process_id, both, calls, heartbeat, channel, job.addresses)
    process_exit.mark_joined(job.process_id)
    monitor.own.step_timeout = limits["step"]
    _watch(monitor, calls)
    wait = calls.begin_wait("the start of JAX on all processes")
    with held or contextlib.nullcontext():
        _start_jax(job, address, bind, limit)
    with contextlib.nullcontext() if own in _EVERY_INTERFACE else jax_internals.gloo_at(own):
        found = _preflight.devices()
    if preflight != "off":
        _preflight.compare_devices(found, job.name)
    with suppress_output.without_greetings():
        _first_collective()
    calls.end_wait(wait)
    if job.process_id == 0 and preflight == "on":
        process_exit.say(_preflight.table(said, found, job))


def _refuse_started_jax() -> None:
    """Raise `RuntimeError` if the program has started JAX already."""
    if jax.distributed.is_initialized():
        raise RuntimeError(
            "jax.distributed has been initialized by the program itself. Leave that to replicax, which starts it when "
            "MultiWorkerMirroredStrategy is made, or on TPU hosts in experimental_connect_to_cluster. "
            f"See {doc_pages.page('how-to/launch#several-machines')}."
        )
    if jax_internals.backend_started():
        raise RuntimeError(
            "Collective ops must be configured at program startup: make the strategy (on TPU hosts call "
            "experimental_connect_to_cluster) before the first computation, and before jax.devices() and "
            "tf.config.list_logical_devices(). JAX has started for this process alone, and cannot be joined with "
            "others any more. "
            f"See {doc_pages.page('explanation/jobs#the-start')}."
        )


def _watch(monitor: Monitor, calls: CallLog) -> None:
    """Begins to watch over this process, also over how it ends."""
    global _hooks
    state.watched_by(monitor, calls)
    _hooks = process_exit.Hooks(_failed)
    GATE.connect(monitor.post, monitor.me.name)
    monitor.start()
    _hooks.watch_signals(monitor.waker.fileno())
    os.register_at_fork(after_in_child=_forget)
    atexit.register(_leave)


def _own_address(published: str, channels: Iterable[Channel]) -> str:
    """Returns the address of this machine by which the others reach this process, or that of every interface.

    Where its published address does not say it (a name that stands for the loopback here, an address that a router
    translates), it is the one that the connections between this process and process 0 have here.
    """
    at = interface(parse(published)[0])
    if at in _EVERY_INTERFACE:
        used = {channel.socket.getsockname()[0] for channel in channels}
        if len(used) == 1 and is_own(*used):
            return str(*used)
    return at


def _coordination(published: str, at: str) -> tuple[socket.socket, str, str]:
    """Returns a socket that holds the port of JAX's coordination service, and its addresses here and for others.

    JAX ends the process where another program takes the port first. The socket does not listen, and lets only the
    service beside it, which asks for SO_REUSEPORT as every server of gRPC does on Linux.
    """
    host, _ = parse(published)
    text = os.environ.get(_PORT, "0")
    if not text.isdigit() or int(text) > 65535:
        raise JobError(f"{_PORT} is the number of a port; got {text!r}.")
    port = int(text)
    held = socket.socket(socket.AF_INET6 if ":" in at else socket.AF_INET)
    if port:
        listen(at, port).close()  # fails where somebody listens already
    else:
        held.bind((at, 0))
        port = held.getsockname()[1]
        if sys.platform == "linux":
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        else:
            held.close()
    return held, join_address(at, port), join_address(host, port)


def _start_jax(job: Job, address: str, bind: str | None, limit: float) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    devices = max(jax.config.jax_num_cpu_devices, 1)  # type: ignore[attr-defined]
    # JAX 0.10 runs the devices' parts of a call on NPROC threads, and deadlocks if these are too few.
    os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 2 * devices)))
    if bind is not None:
        address = bind.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
    # JAX's client connects to this machine alone, to the service or to the relay, and needs no proxy for that.
    jax.config.update("jax_check_proxy_envs", False)
    excepted = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy")  # noqa: SIM112
    os.environ["no_grpc_proxy"] = ",".join(filter(None, [excepted, parse(address)[0]]))  # noqa: SIM112
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
    """Tells the others that the main thread has ended in an exception, and ends the process; called by the hook."""
    monitor, hooks = state.monitor(), _hooks
    assert hooks is not None
    if monitor is None or monitor.over.is_set():
        hooks.show(error)
        return
    report = _report(error)
    if process_exit.caused_by_another(error):
        last, oldest = monitor.calls.last, monitor.calls.oldest()
        number, label = (oldest.number, oldest.label) if oldest is not None else (last.number, last.label)
        monitor.post("broken", {**report, "count": last.number if number is None else number, "label": label})
        # The monitor ends this process as soon as it knows who is at fault.
        monitor.over.wait(monitor.heartbeat + 6.0)
        hooks.show(error)
    else:
        hooks.show(error)
        try:
            background.wait()  # while the other workers are there, which it may need
        except BaseException as late:
            hooks.show(late)
        monitor.post("failed", report)
    _end(monitor, error, report)


def _report(error: BaseException) -> dict[str, Any]:
    """Returns the report on a failure here, for the others."""
    text = "".join(traceback.format_exception(error))
    return {"message": process_exit.one_line(error)[:1000], "traceback": text[-_LONGEST:]}


def _end(monitor: Monitor, error: BaseException, report: dict[str, Any]) -> NoReturn:
    """Leaves the report of an own failure, stays until the others know, and ends the process."""
    monitor.own.write_report("exception", report["message"], report["traceback"])
    monitor.over.wait(4.0)
    if isinstance(error, KeyboardInterrupt):
        process_exit.finish_by_signal(2)
    process_exit.finish(1)


def _leave() -> None:
    """Waits, at the end of the program, for the calls of this process, tells the others, and leaves the job."""
    monitor = state.monitor()
    if monitor is None or monitor.over.is_set():
        jax_internals.leave_distributed()
        return
    if (error := process_exit.uncaught()) is not None:
        report = _report(error)
        monitor.post("failed", report)
        _end(monitor, error, report)
    while monitor.calls.oldest(waits=False) is not None:  # the monitor sees to it that this ends
        time.sleep(0.01)
    monitor.post("leaving", {})
    monitor.over.wait(5.0)
    if _hooks is not None:
        _hooks.remove()
    jax_internals.leave_distributed()


def _forget() -> None:
    """Forgets the job in a forked child, which is no process of it."""
    monitor = state.monitor()
    if monitor is not None:
        monitor.forget()
        atexit.unregister(_leave)
        if _hooks is not None:
            _hooks.remove()
        jax_internals.leave_distributed()
    state.forget()
