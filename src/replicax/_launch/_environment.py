"""The environment of a worker: its cluster, its devices, and settings that make JAX safe and fast."""

from __future__ import annotations

import json
import os
import platform
import random
import re
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Of a worker: its output, its errors, and the connection to its guard. Beside them: connections of other launchers.
_FILES_PER_WORKER = 3
_FILES_BESIDE = 64


class LaunchError(Exception):
    """Something that the user has to change; its text is all that is shown."""


class Task(NamedTuple):
    """One process of a job.

    >>> Task("ps", 1).name
    'ps 1'
    """

    kind: str  # "worker"; with parameter servers "chief", "ps" and "evaluator" as well
    number: int

    @property
    def name(self) -> str:
        """Its name in messages and in front of its output."""
        return f"{self.kind} {self.number}"


class Ports:
    """Ports of this machine that nobody uses, held until `release`; `LaunchError` if there are not so many.

    They are outside of the range from which the system takes ports for outgoing connections, so that none of those
    takes them in the meantime.
    """

    def __init__(self, count: int):
        self._sockets: list[socket.socket] = []
        candidates = _ports_to_try()
        while len(self._sockets) < count:
            if not candidates:
                self.release()
                raise LaunchError(f"This machine has no {count} free ports for the workers.")
            _hold(candidates.pop(), self._sockets)
        self.numbers = tuple(held.getsockname()[1] for held in self._sockets)

    def release(self) -> None:
        """Lets the ports go, for the workers to take them."""
        for held in self._sockets:
            held.close()
        self._sockets.clear()


def _ports_to_try() -> list[int]:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            lowest, highest = map(int, file.read().split())
    except (OSError, ValueError):
        lowest, highest = 32768, 60999
    # From 10000 on: many services have their ports below.
    ports = [port for port in range(10000, 65536) if not lowest <= port <= highest] or list(range(1024, 65536))
    random.SystemRandom().shuffle(ports)
    return ports


def _hold(port: int, held: list[socket.socket]) -> None:
    """Binds the port on every address of this machine, without listening; does nothing where somebody has it."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    candidate = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            candidate.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        candidate.bind(("", port))
        held.append(candidate)
    except OSError:
        candidate.close()


def check_open_files(workers: int) -> None:
    """Raises LaunchError where this process may not open as many files as so many workers on this machine need."""
    import resource  # not on Windows, where the command says so

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_PER_WORKER * workers + _FILES_BESIDE
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise LaunchError(
            f"{workers} workers on one machine need {needed} open files, and the limit is {limit} (`ulimit -n`), which "
            f"suffices for {max(0, limit - _FILES_BESIDE) // _FILES_PER_WORKER}. Give fewer --workers (with "
            f"--coordinator: --workers-here), or raise the limit."
        )


def visible_gpus(environment: Mapping[str, str], device_folder: str = "/dev") -> list[str]:
    """Returns the NVIDIA GPUs that a program with this environment uses, as CUDA_VISIBLE_DEVICES names them.

    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "2,3"})
    ['2', '3']
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.lower().split(",")):
        return []
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        names = os.listdir(device_folder) if os.path.isdir(device_folder) else []
        return [str(index) for index in range(sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in names))]
    gpus = []
    for name in map(str.strip, listed.split(",")):
        if not name or name.startswith("-"):  # CUDA reads up to the first name that is none
            break
        gpus.append(name)
    return gpus


def share_gpus(gpus: Sequence[str], workers: int, per_worker: int | None) -> list[list[str]] | None:
    """Returns the GPUs of each worker on this machine; None if there are none to share.

    Without `per_worker` each gets an even share; LaunchError if there is none, or if the GPUs do not suffice.
    """
    if not gpus or (workers == 1 and per_worker is None):
        return None
    there = f"this machine has {len(gpus)} GPU{'s' * (len(gpus) > 1)} ({', '.join(gpus)}) for {workers} workers"
    cpu = "To train on CPU devices, set JAX_PLATFORMS=cpu."
    if per_worker is None:
        per_worker, rest = divmod(len(gpus), workers)
        if rest or not per_worker:
            raise LaunchError(
                f"The GPUs cannot be shared evenly: {there}. Give --devices-per-worker, or other --workers. {cpu}"
            )
    if per_worker * workers > len(gpus):
        raise LaunchError(f"--devices-per-worker {per_worker} asks for more GPUs than there are: {there}. {cpu}")
    return [list(gpus[first * per_worker :][:per_worker]) for first in range(workers)]


def worker_environment(
    base: Mapping[str, str],
    *,
    cluster: Mapping[str, Sequence[str]],
    task: Task,
    devices: int | None,
    gpus: Sequence[str] | None,
    report_folder: str,
    attempt: int,
    tuning: bool,
) -> dict[str, str]:
    """Returns the environment of one task, made of the launcher's own.

    `cluster` has the addresses of the tasks of each kind, `devices` is None where nobody said, and `gpus` are its own
    as CUDA names them, None to leave that as it is.
    """
    environment = dict(base)
    environment["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": task.kind, "index": task.number}})
    environment["REPLICAX_REPORT_DIR"] = report_folder
    environment["REPLICAX_RESTART_COUNT"] = str(attempt)
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in native code shows where Python stood
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if not gpus:
            environment["JAX_PLATFORMS"] = "cpu"
    elif devices is not None:
        environment["JAX_NUM_CPU_DEVICES"] = str(devices)
    if tuning:
        # JAX 0.10 runs collectives on a pool of NPROC threads, and deadlocks if these are too few.
        environment.setdefault("NPROC", str(max(os.cpu_count() or 1, 2 * (devices or 1))))
        environment = with_large_pages(environment)
    return environment


# Large pages for large buffers, which the C library keeps when they are freed, in place of giving them back to the
# system and asking for them again in each step: a fault for each page, and all of it zeroed.
_LARGE_PAGES = {"hugetlb": "1", "mmap_threshold": "4294967296", "trim_threshold": "4294967296"}


def with_large_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns this environment for a process to be started, in which Linux's C library keeps large buffers.

    What the user has set in `GLIBC_TUNABLES` stays. Other C libraries do not know the variable.
    """
    if platform.libc_ver()[0] != "glibc":
        return dict(environment)
    given = environment.get("GLIBC_TUNABLES", "")
    added = [f"glibc.malloc.{name}={value}" for name, value in _LARGE_PAGES.items() if f"malloc.{name}=" not in given]
    return {**environment, "GLIBC_TUNABLES": ":".join(filter(None, [given, *added]))}
