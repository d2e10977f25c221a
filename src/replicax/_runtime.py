"""A job of several processes: joining it, and saying which calls wait for the others.

Every process of a job runs the same program. `start` joins the job and must come before JAX's first computation.
From then on a monitor thread exchanges a few bytes a second with the other processes, so that none of them ever
waits in silence: what fails, stops, leaves early or goes another way is named on every process, which then ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import jax

_lock = threading.Lock()
_job: Job | None = None


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


def start(tasks: Sequence[tuple[str, int]], addresses: Sequence[str], process_id: int) -> Job:
    """Joins the job, once; with the same arguments again, returns the job that runs."""
    global _job
    job = Job(tuple((str(kind), int(index)) for kind, index in tasks), tuple(addresses), int(process_id))
    with _lock:
        if len(job.tasks) == 1:
            return job
        if _job is None:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            os.environ.setdefault(
                "NPROC", str(max(os.cpu_count() or 1, 2 * int(os.environ.get("JAX_NUM_CPU_DEVICES", 1))))
            )
            jax.distributed.initialize(job.addresses[0], len(job.tasks), job.process_id)
            _job = job
        elif _job != job:
            raise RuntimeError(f"This process is {_job.name(_job.process_id)} of another job already")
        return _job


def current() -> Job | None:
    """The job of several processes that this process has joined, if any."""
    return _job


def launched(label: str, output: jax.Array) -> None:
    """Says that a program whose collectives span processes has been dispatched."""


class _Call:
    output: jax.Array | None = None


@contextmanager
def calling(label: str) -> Iterator[_Call]:
    """Around the dispatch of a program whose collectives span processes; `.output` is set to one of its outputs.

    To be used in place of `launched`, since on one CPU device JAX runs small programs within their dispatch.
    """
    yield _Call()


@contextmanager
def waiting(label: str) -> Iterator[None]:
    """Around a place where the calling thread itself blocks for the other processes."""
    yield


def set_step_timeout(seconds: float | None) -> None:
    """How long a call may wait for the other processes before it is reported; None for ever."""
