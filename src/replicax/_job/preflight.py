"""The first contact of a job's processes: who is there, who is missing, and whether they fit together."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import shlex
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from replicax._base import doc_pages
from replicax._base.errors import JobError
from replicax._base.version import __version__
from replicax._job import command_lines, process_exit
from replicax._job.channel import (
    LONGEST,
    LONGEST_OF_A_STRANGER,
    SPEAKS,
    STRANGERS,
    Channel,
    interface,
    listen,
    parse,
    send_rest,
    wait,
)
from replicax._job.diagnosis import odd_ones
from replicax._job.state import Job
from replicax._report.terminal import progress

_AT_ONCE = 64
_TEXT = 10_000  # characters of a refusal
_NAMED = 8  # strangers, or processes, that are named
_NOTE = 10.0  # seconds after which a process says whom it waits for
_RETRY = 0.2
_ASKED = 1.0  # seconds for an answer of who listens at this process's address
_MODE = "REPLICAX_PREFLIGHT"
# Fields of `about_me` that must be the same on every process, and their names in messages.
_VERSIONS = {"replicax": "replicax", "jax": "JAX", "python": "Python"}


def about_me(job: Job) -> dict[str, Any]:
    """Returns what a process says of itself at the first contact."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    program = "-"
    if path and os.path.isfile(path):
        program = f"{os.path.basename(path)} ({hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]})"
    return {
        "process_id": job.process_id,
        "tasks": [list(task) for task in job.tasks],
        "addresses": list(job.addresses),
        "replicax": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "program": program,
        "arguments": shlex.join(sys.argv[1:]),
        "job": os.environ.get(command_lines.JOB_ID, ""),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def mode() -> str:
    """Returns `REPLICAX_PREFLIGHT`: "on" compares and prints the table, "quiet" compares, "off" does neither."""
    found = os.environ.get(_MODE, "on").lower()
    if found not in ("on", "quiet", "off"):
        raise JobError(f"{_MODE} is 'on', 'quiet' or 'off'; got {found!r}.")
    return found


class Gathering:
    """Process 0 waits for all others at its address, until `timeout` seconds are over."""

    def __init__(self, job: Job, timeout: float):
        self._job = job
        self._timeout = timeout
        self._me = about_me(job)
        self.said: dict[int, dict[str, Any]] = {0: self._me}
        self.channels: dict[int, Channel] = {}
        self._unknown: list[tuple[Channel, float]] = []
        self._strangers: list[str] = []

    def run(self) -> None:
        """Fills `channels` and `said`, or raises JobError on every process that is there."""
        job = self._job
        start = time.monotonic()
        noted = False
        others = len(job.tasks) - 1
        with self._listener() as listener, progress("waiting for the other processes", others, "processes") as bar:
            listener.setblocking(False)
            while missing := [i for i in range(1, len(job.tasks)) if i not in self.channels]:
                now, bar.done = time.monotonic(), others - len(missing)
                if now - start > self._timeout:
                    raise self.refuse(self._missing(missing))
                if not noted and now - start > _NOTE:
                    noted = True
                    process_exit.say(f"{job.name(0)} waits for {self._addresses(missing)}")
                waiting = [channel for channel, _ in self._unknown] + list(self.channels.values())
                wait(waiting, [listener], min(_RETRY, self._timeout))
                self._accept(listener, now)
                self._hear(now)
        for channel, _ in self._unknown:
            channel.close()

    def _listener(self) -> socket.socket:
        address = self._job.addresses[0]
        host, port = parse(address)
        deadline = time.monotonic() + min(5.0, self._timeout)
        while True:
            try:
                return listen(interface(host), port)
            except OSError as error:
                if refused := self._refused_by_the_holder(host, port):
                    raise JobError(f"{self._job.name(0)} cannot join the job: {refused}") from error
                if time.monotonic() > deadline:
                    raise JobError(
                        f"{self._job.name(0)} cannot listen at its address {address}: {error.strerror or error}. "
                        f"Another process may use the port; give {self._job.name(0)} another one. "
                        f"See {doc_pages.page('how-to/launch#several-machines')}."
                    ) from error
                time.sleep(_RETRY)

    def _refused_by_the_holder(self, host: str, port: int) -> str | None:
        """Returns why a process that listens at this one's address refuses it, if that is one of the job."""
        end = time.monotonic() + _ASKED
        try:
            holder = Channel(socket.create_connection((host, port), timeout=_ASKED))
        except OSError:
            return None
        try:
            holder.send({"hello": self._me})
            while not holder.closed and (left := end - time.monotonic()) > 0:
                wait([holder], [], left)
                holder.flush()
                for message in holder.receive():
                    return str(message["refused"])[:_TEXT] if "refused" in message else None
            return None
        finally:
            holder.close()

    def _accept(self, listener: socket.socket, now: float) -> None:
        """Takes new connections, not too many before those that are here are heard."""
        for _ in range(_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # it has ended already, or there are too many
                break
            self._unknown.append((Channel(connection, LONGEST_OF_A_STRANGER), now))
        while len(self._unknown) > STRANGERS + len(self._job.tasks):
            self._unknown.pop(0)[0].close()

    def _hear(self, now: float) -> None:
        for index, channel in list(self.channels.items()):
            channel.receive()
            if channel.closed:  # it may come again
                del self.channels[index], self.said[index]
        for channel, since in list(self._unknown):
            messages = channel.receive()
            if messages:
                self._unknown.remove((channel, since))
                self._admit(channel, messages[0].get("hello"))
            elif channel.closed or now - since > SPEAKS:
                self._unknown.remove((channel, since))
                channel.close()

    def _admit(self, channel: Channel, hello: object) -> None:
        """Takes a process of the job, and closes the connection of whoever is none."""
        job = self._job
        kinds = {key: type(value) for key, value in self._me.items()}
        if not isinstance(hello, dict) or any(type(hello.get(key)) is not kind for key, kind in kinds.items()):
            channel.close()
            return
        index, stranger = hello["process_id"], f"{hello['host'][:100]} (process {hello['pid']})"
        of_another = hello["job"] != self._me["job"]
        cluster = ("tasks", "addresses")
        if of_another or any(hello[key] != self._me[key] for key in cluster) or not 0 <= index < len(job.tasks):
            if stranger not in self._strangers and len(self._strangers) < _NAMED:
                self._strangers.append(stranger)
            where = f"{job.name(0)} at {job.addresses[0]}"
            refusal = f"{where} belongs to another cluster: it knows {self._addresses(range(len(job.tasks)))}."
            if of_another:
                ours, theirs = (said["job"][:100] or "(no name)" for said in (self._me, hello))
                refusal = (
                    f"{where} belongs to another job: {ours!r}, and this process to {theirs!r}. Jobs are named by "
                    f"`replicax launch --job-id`, or {command_lines.JOB_ID} in the environment. "
                    f"See {doc_pages.page('how-to/launch#several-machines')}."
                )
            channel.send({"refused": refusal})
            channel.close()
            return
        if index in self.said:
            one, other = (f"{said['host']} (process {said['pid']})" for said in (self.said[index], hello))
            self.channels[-1] = channel
            raise self.refuse(
                f"Two processes say that they are {job.name(index)}: {one} and {other}. Give each its own task index. "
                f"See {doc_pages.page('how-to/launch#several-machines')}."
            )
        channel.send({"welcome": True})
        channel.incoming.longest = LONGEST
        self.channels[index] = channel
        self.said[index] = hello

    def _missing(self, missing: list[int]) -> str:
        here = [i for i in range(len(self._job.tasks)) if i not in missing]
        strangers = (
            f" Refused, since they know another cluster or belong to another job: {', '.join(self._strangers)}."
            if self._strangers
            else ""
        )
        return (
            f"{self._addresses(missing)} did not join the job within {self._timeout:g} s (REPLICAX_START_TIMEOUT). "
            f"There {'is' if len(here) == 1 else 'are'}: {self._addresses(here)}.{strangers} "
            f"Look at the output of who is missing: it did not start, it failed, or it cannot reach "
            f"{self._job.addresses[0]}. "
            f"See {doc_pages.page('how-to/launch#several-machines')}."
        )

    def _addresses(self, which: Iterable[int]) -> str:
        return ", ".join(f"{self._job.name(i)} ({self._job.addresses[i]})" for i in which)

    def refuse(self, text: str) -> JobError:
        """Tells all that are there, and returns the error to raise here."""
        for channel in self.channels.values():
            channel.send({"refused": text})
        send_rest(self.channels.values(), 2.0)
        for channel in self.channels.values():
            channel.close()
        return JobError(text)

    def compare(self) -> None:
        """Raise JobError on every process where versions, programs or their arguments differ.

        Start files of different names may call the same code. They are reported only, since the monitor compares the
        calls.
        """
        files: dict[str, dict[int, dict[str, Any]]] = {}
        for process, record in self.said.items():
            files.setdefault(record["program"].rpartition(" (")[0], {})[process] = record
        lines, different = command_lines.compare(self.said, self._job)
        arguments = {process: {"arguments": line} for process, line in lines.items()}
        name = self._job.name
        problem = disagreement(self.said, _VERSIONS, name)
        for same_file in files.values():
            problem = problem or disagreement(same_file, {"program": "the program"}, name)
        if not problem and (problem := disagreement(arguments, {"arguments": "the command line"}, name)):
            problem += (
                f" If arguments rightly differ, set {command_lines.MAY_DIFFER}={','.join(different)} in the "
                f"environment of {name(0)} (a list of options, or 'all')."
            )
        if problem:
            raise self.refuse(problem)
        if len(files) > 1:
            started = "; ".join(f"{file or 'no file'}: {_names(records, name)}" for file, records in files.items())
            process_exit.say(f"The processes have different start files, which must make the same calls. {started}.")


def _names(processes: Iterable[int], name: Callable[[int], str]) -> str:
    """Return the names of processes; of many, the first ones and a number."""
    names = [name(process) for process in processes]
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def disagreement(said: Mapping[int, Mapping[str, Any]], keys: Mapping[str, str], name: Callable[[int], str]) -> str:
    """Returns what does not agree between processes, naming the odd ones; empty if all agree.

    >>> disagreement({0: {"jax": "1"}, 1: {"jax": "2"}, 2: {"jax": "1"}}, {"jax": "JAX"}, "worker {}".format)
    "The processes of a job must run the same. worker 1 differs: JAX is '2', where the others have '1'. ..."
    """
    parts = []
    for key, words in keys.items():
        values = {i: one.get(key) for i, one in said.items()}
        odd = odd_ones(values)
        if not odd:
            continue
        if len(odd) == len(values):
            parts.append(f"{words}: " + ", ".join(f"{name(i)} has {value!r}" for i, value in odd.items()))
        else:
            usual = Counter(values.values()).most_common(1)[0][0]
            parts += [f"{name(i)} differs: {words} is {v!r}, where the others have {usual!r}" for i, v in odd.items()]
    if not parts:
        return ""
    return (
        f"The processes of a job must run the same. {'. '.join(parts)}. ({_MODE}=off skips this check.) "
        f"See {doc_pages.page('explanation/jobs#the-start')}."
    )


def reach(job: Job, timeout: float) -> tuple[Channel, dict[str, Any]]:
    """Connects to process 0, and returns the connection and its answer. JobError if that fails."""
    where = f"{job.name(0)} at {job.addresses[0]}"
    host, port = parse(job.addresses[0])
    start, noted, problem = time.monotonic(), False, "no answer"
    while (left := start + timeout - time.monotonic()) > 0:
        if not noted and timeout - left > _NOTE:
            noted = True
            process_exit.say(f"{job.name(job.process_id)} waits for {where} ({problem})")
        try:
            connection = socket.create_connection((host, port), timeout=min(left, 5.0))
        except OSError as error:
            problem = error.strerror or str(error)
            time.sleep(min(_RETRY, left))
            continue
        channel = Channel(connection)
        channel.send({"hello": about_me(job)})
        end, welcome = min(start + timeout, time.monotonic() + SPEAKS), False
        while not channel.closed and (left := end - time.monotonic()) > 0:
            if welcome and not noted and time.monotonic() - start > _NOTE:
                noted = True
                process_exit.say(f"{job.name(job.process_id)} has reached {where}, which waits for others")
            wait([channel], [], min(left, 1.0))
            channel.flush()
            for message in channel.receive():
                if "welcome" in message:
                    # The others get a little longer than process 0, which can say who is missing.
                    welcome, end = True, start + timeout + 5.0
                if "refused" in message:
                    channel.close()
                    raise JobError(f"{job.name(job.process_id)} cannot join the job: {str(message['refused'])[:_TEXT]}")
                if "start" in message:
                    if _starts(message["start"]):
                        return channel, message["start"]
                    channel.closed = True
        problem = "it has ended the connection" if channel.closed else "what listens there does not answer as one of us"
        if welcome and not channel.closed:
            problem = "it has not answered"
        channel.close()
        time.sleep(_RETRY)
    raise JobError(
        f"{job.name(job.process_id)} could not reach {where} within {timeout:g} s (REPLICAX_START_TIMEOUT): {problem}. "
        f"Is it running, is that its address, and may this host connect to it? "
        f"See {doc_pages.page('how-to/launch#several-machines')}."
    )


def _starts(start: Any) -> bool:
    """Returns whether this is what process 0 says when all are there."""
    try:
        return bool(parse(start["jax"])) and 0.0 < float(start["heartbeat"]) < math.inf
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
        return False


def devices() -> dict[int, str]:
    """Returns how many devices of which kind each process has. Starts JAX's backend."""
    found: dict[int, Counter[str]] = {}
    for device in jax.devices():
        found.setdefault(device.process_index, Counter())[device.device_kind] += 1
    return {i: ", ".join(f"{n} x {kind}" for kind, n in sorted(kinds.items())) for i, kinds in sorted(found.items())}


def compare_devices(found: Mapping[int, str], name: Callable[[int], str]) -> None:
    """Raises JobError, on every process alike, where they have different devices."""
    said = {i: {"devices": text} for i, text in found.items()}
    if text := disagreement(said, {"devices": "devices"}, name):
        raise JobError(text)


def table(said: Mapping[int, Mapping[str, Any]], found: Mapping[int, str], job: Job) -> str:
    """Returns a table of the processes of a job, one a line."""
    rows = [("process", "address", "host", "pid", "replicax", "JAX", "Python", "devices", "program")]
    for i in range(len(job.tasks)):
        one = said[i]
        program = " ".join(filter(None, [one["program"], one["arguments"]]))
        versions = (one["replicax"], one["jax"], one["python"])
        rows.append(
            (job.name(i), job.addresses[i], one["host"], str(one["pid"]), *versions, found.get(i, "-"), program)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([f"a job of {len(job.tasks)} processes", *lines])
