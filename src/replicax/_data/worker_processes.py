"""Processes that call functions of elements side by side, where Python's lock would let only one thread do so.

There are some if they are asked for: by `use_processes` of `Dataset.map`, or by an environment variable for functions
of `tf.data`. By themselves they never start, since a function in Python may depend on what it has left behind, which
another process does not see.

All functions share them. A process gets a function by value when it is first to call it, then elements with their
numbers, and for each pass over a dataset the words with which its random numbers begin. So a result is the same
wherever it is computed. What a process cannot do, such as to read a variable, and what fails in it, is done here.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import pickle
import queue
import subprocess
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from replicax._data import by_value, process_link
from replicax._data.by_value import CannotShip
from replicax._data.process_link import Lost
from replicax._data.reading import Draws
from replicax._data.worker_process import VARIABLE, Failed, Group, Job, Process, Result

_MOST = 16  # of those that AUTOTUNE asks for; each takes some 300 MB
# Seconds of the processor after which a function of `tf.data` is worth the start of processes.
WORTHWHILE = 3.0
_CALLS = 4  # between two looks at what a function changes
_MOST_LOSSES = 3  # processes that are lost one after the other, without a result between them
_START_LIMIT = 300.0  # seconds that processes may take to start
# The most elements that a process takes at a time, and about how many bytes their results may have.
_TOGETHER, _TOGETHER_BYTES = 32, 1 << 21
# What computes other numbers, or refuses to.
_CONFIGURATION = (
    "jax_enable_x64", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_default_matmul_precision",
    "jax_default_prng_impl", "jax_threefry_partitionable", "jax_debug_nans", "jax_debug_infs",
)  # fmt: skip

_log = logging.getLogger("replicax.data")


class _Pool:
    """The processes of this program."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Process] = []
        self._starting: list[Process] = []
        self._idle: queue.SimpleQueue[Process | None] = queue.SimpleQueue()  # None: they are lost
        self.is_lost = False
        self._losses = 0  # since the last result

    def start(self, count: int) -> None:
        """Starts processes until there are as many."""
        with self._lock:
            while len(self._all) < count:
                process = Process()
                self._all.append(process)
                self._starting.append(process)

    def are_ready(self, seconds: float = 0.0) -> bool:
        """Returns whether all that were started take calls; waits for each so long. Raises `Lost` if one has ended."""
        with self._lock:
            for process in list(self._starting):
                if process.link.has_message(seconds):
                    process.wait_until_ready()
                    self._starting.remove(process)
                    self._idle.put(process)
            return not self._starting

    def call(
        self, job: Job, reading: int | None, group: Group, words: Callable[[object], np.ndarray]
    ) -> list[Result | None]:
        """Has an idle process compute a group, see `Process.call`.

        Raises:
            Lost: the process was lost, which the message says. Another one replaces it, unless `is_lost` is True.
        """
        process = self._idle.get()
        if process is None:
            self._idle.put(None)
            raise Lost("a process has ended")
        try:
            found = process.call(job, reading, group, words)
        except (CannotShip, Failed):
            self._idle.put(process)
            raise
        except Lost as error:
            raise Lost(self._replace(process)) from error
        except BaseException:  # also an interrupt: an answer is still on its way
            self._give_up()
            raise
        self._losses = 0
        self._idle.put(process)
        return found

    def _replace(self, process: Process) -> str:
        """Start a process in place of a lost one, and return a report about the lost one."""
        report = process.end()
        with self._lock:
            self._losses += 1
            if self.is_lost or self._losses >= _MOST_LOSSES:
                self._give_up()
                return report
            try:
                self._all[self._all.index(process)] = new = Process()
            except Exception as error:
                self._give_up()
                return f"{report}, and no other process could be started: {error}"
        self._idle.put(new)
        return report

    def _give_up(self) -> None:
        self.is_lost = True
        self._idle.put(None)

    def close(self, patience: float | None = None) -> None:
        """Has all processes end, each after the call at which it is; waits for them."""
        self._give_up()
        for process in self._all:
            process.link.close()
        for process in self._all:
            try:
                process.process.wait(patience)
            except subprocess.TimeoutExpired:
                process.process.kill()
                process.process.wait()


class _Shared:
    """The pool of this program, while a function uses it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pool: _Pool | None = None
        self._users: set[int] = set()
        self._numbers = itertools.count()

    def joined(self, user: object, count: int) -> _Pool:
        """Returns the pool, with at least so many processes, to a user who is done with it when it is collected."""
        with self._lock:
            if self._pool is None or self._pool.is_lost:
                self._retire()
                self._pool = _Pool()
            number = next(self._numbers)
            self._users.add(number)
            weakref.finalize(user, self._left, number).atexit = False
            self._pool.start(count)
            return self._pool

    def _left(self, number: int) -> None:
        self._users.discard(number)  # without the lock, which this very thread may hold in a garbage collection
        if not self._users:
            self._retire()

    def _retire(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:  # a call may take long, and this may be a garbage collection
            threading.Thread(target=pool.close, name="replicax-processes", daemon=True).start()

    def close(self) -> None:
        """Ends the processes as the program ends."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(patience=1.0)


_shared = _Shared()
_is_fork = False  # whether this process was forked from one that may have processes: their links are that one's


def _after_fork() -> None:
    global _is_fork, _shared
    _is_fork, _shared = True, _Shared()


atexit.register(lambda: None if _is_fork else _shared.close())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def count_in_environment() -> int | None:
    """Returns how many processes the environment asks for, None where it does not say.

    Raises:
        ValueError: it has something else than a number.
    """
    count = os.environ.get(VARIABLE)
    if not count:
        return None
    if not count.isdecimal():
        raise ValueError(f"{VARIABLE} in the environment is how many processes call functions of datasets: {count!r}")
    return int(count)


def autotuned_count() -> int:
    """Returns how many processes AUTOTUNE asks for: one a core, within limits."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST)


class Processes:
    """The processes of one function of elements.

    Args:
        role: which function it is, for messages.
        job: returns the function as a job for a process; raises CannotShip.
        count: how many processes.
        at_once: whether they are there before the first call, which waits for them. Otherwise they start once the calls
            have taken long enough.
    """

    def __init__(self, role: str, job: Callable[[], bytes], count: int, at_once: bool):
        self._role, self._make_job, self.count, self._at_once = role, job, count, at_once
        self.together = 1  # how many elements a process takes at a time
        self._level = logging.WARNING if at_once else logging.INFO
        self._lock = threading.RLock()
        self._pool: _Pool | None = None
        self._job: Job | None = None
        self._spent = 0.0
        self._seen: tuple[bytes, bytes] | None = None
        self._calls = 0  # since then
        self._is_over = not process_link.is_possible()

    def begin(self) -> None:
        """Begins a pass over the dataset: processes get the function as it is now.

        Raises:
            TypeError: processes were asked for, and the function cannot be sent to them.
        """
        if self._is_over or _is_fork or (self._pool is None and not self._at_once):
            return
        with self._lock:
            try:
                data = self._make_job()
            except CannotShip as error:
                if self._at_once:
                    raise TypeError(f"{self._role} cannot run in other processes: {error}.") from error
                return self.give_up(str(error))
            if self._job is None or self._job.data != data:
                self._job = Job(data)
            if self._pool is None or self._pool.is_lost:
                self._start()

    def _start(self) -> None:
        try:
            self._pool = _shared.joined(self, self.count)
        except Exception as error:  # whatever it is, the function can be called here
            self.give_up(f"no process could be started: {error}")

    def note(self, seconds: float) -> None:
        """Notes that calls of the function took the processor so long, and starts the processes once it is time."""
        if self._is_over or _is_fork or self._pool is not None:
            return
        with self._lock:
            self._spent += seconds
            self._calls += 1
            if self._spent < WORTHWHILE or (self._seen is not None and self._calls < _CALLS):
                return
            try:
                now = self._make_job(), by_value.random_state()
            except Exception as error:
                return self.give_up(str(error))
            if self._seen is None:
                self._seen, self._calls = now, 0
            elif now != self._seen:
                self.give_up("it changes what it refers to, or draws with NumPy's or Python's random numbers")
            else:
                self._job = Job(now[0])
                self._start()

    def give_up(self, why: str) -> None:
        """Has the function called here from now on."""
        with self._lock:
            if not self._is_over:
                self._is_over, self._pool, self._seen, self._job = True, None, None, None
                _log.log(self._level, "%s is called in this process, and in no other: %s.", self._role, why)

    def are_ready(self) -> bool:
        """Returns whether the processes take calls; waits for them if they are to be there at once."""
        pool = self._pool
        if self._is_over or _is_fork or pool is None:
            return False
        try:
            if pool.are_ready(_START_LIMIT if self._at_once else 0.0):
                return True
            if self._at_once:
                self.give_up(f"no process has started within {_START_LIMIT:.0f} seconds")
        except Lost:
            self.give_up("a process has ended")
        return False

    def call(self, draws: Draws | None, group: Group) -> list[Result | None] | None:
        """Return the results of a group: None in place of what no process can do, None alone if a process was lost."""
        pool, job = self._pool, self._job
        here: list[Result | None] = [None] * len(group)
        if pool is None or job is None or _is_fork:
            return here
        reading, words = (None, _no_words) if draws is None else (draws.number, draws.words)
        try:
            found = pool.call(job, reading, group, words)
        except Lost as error:
            if pool.is_lost:
                self.give_up(str(error))
            else:
                _log.log(self._level, "%s: %s. Another one replaces it; no element is lost.", self._role, error)
            return None
        except (CannotShip, Failed) as error:
            self.give_up(str(error))
            return here
        size = sum(leaf.nbytes for result in found if result is not None for leaf in jax.tree.leaves(result[0]))
        self.together = max(1, min(_TOGETHER, _TOGETHER_BYTES * len(group) // max(size, 1)))
        return found


def _no_words(tag: object) -> np.ndarray:
    raise AssertionError("only a function with random numbers asks for words")


def job_of(function: tuple[Any, ...], prepare: Callable[[], object]) -> bytes:
    """Returns the job of processes: a class and the arguments with which it makes the function of elements.

    Args:
        function: the class and the arguments.
        prepare: a function of the library's that the process calls first.

    Raises:
        CannotShip: the function cannot be sent to another process.
    """
    configuration = {name: getattr(jax.config, name) for name in _CONFIGURATION if hasattr(jax.config, name)}
    job = {"jax": configuration, "prepare": prepare, "function": by_value.shipped(function)}
    return pickle.dumps(job, pickle.HIGHEST_PROTOCOL)


def nothing() -> None:
    """Prepares nothing."""
