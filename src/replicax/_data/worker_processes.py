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
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from replicax._base import progress
from replicax._base.types import Leaf, Tree
from replicax._data import by_value, process_link
from replicax._data.by_value import CannotShip, pickled
from replicax._data.process_link import Lost
from replicax._data.shared_memory import Place, Reader, new_file

# How many processes AUTOTUNE stands for, also for functions of `tf.data` that ask for none; 0 is for none at all.
VARIABLE = "REPLICAX_INPUT_PROCESSES"
_MOST = 16  # of those that AUTOTUNE asks for; each takes some 300 MB
# Seconds of the processor after which a function of `tf.data` is worth the start of processes.
WORTHWHILE = 3.0
_CALLS = 4  # between two looks at what a function changes
_START_LIMIT = 300.0  # seconds that processes may take to start
# The most elements that a process takes at a time, and about how many bytes their results may have.
_TOGETHER, _TOGETHER_BYTES = 32, 1 << 21
# What computes other numbers, or refuses to.
_CONFIGURATION = (
    "jax_enable_x64", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_default_matmul_precision",
    "jax_default_prng_impl", "jax_threefry_partitionable", "jax_debug_nans", "jax_debug_infs",
)  # fmt: skip
_NOT_HANDED_ON = ("JAX_NUM_CPU_DEVICES", "REPLICAX_VIRTUAL_DEVICES", "TF_CONFIG")

# Elements with their numbers, and what they become: a tree and how many rows it has, None for an element by itself.
_Group: TypeAlias = Sequence[tuple[int, Tree]]
_Result: TypeAlias = tuple[Tree, int | None]

_log = logging.getLogger("replicax.data")


class _Failed(Exception):
    """A process cannot make a function of its job, or this one has no use for its results: it says why."""


class _Job:
    """A function as it is sent to processes."""

    _numbers = itertools.count()

    def __init__(self, data: bytes):
        self.number, self.data = next(self._numbers), data
        weakref.finalize(self, _ended_jobs.add, self.number).atexit = False


_ended_jobs: set[int] = set()  # the numbers of those that nobody needs any more


class _Process:
    """A process and the link to it, which one thread uses at a time."""

    def __init__(self) -> None:
        self.link, theirs = process_link.pair()
        memory = new_file()
        with theirs:
            try:
                self.process = _started(theirs.fileno(), memory)
            except BaseException:
                os.close(memory)
                raise
        self._reader = Reader(memory)
        self._known: set[int] = set()  # the numbers of the jobs that it has

    def call(self, job: _Job, reading: int | None, group: _Group, words: Callable[[Any], Any]) -> list[_Result | None]:
        """Returns the results for a group; None in place of what it could not do.

        Raises:
            Lost: the process has ended.
            CannotShip: the elements cannot be sent.
            _Failed: it cannot make the function.
        """
        request = pickled(list(group))
        ended = self._known & _ended_jobs
        self._known -= ended
        data = None if job.number in self._known else job.data
        head = pickle.dumps((job.number, data, ended, reading, self._reader.unused()))
        self._known.add(job.number)
        self.link.send(head)
        self.link.send(request)
        while True:
            message = self.link.receive()
            try:
                answer = pickle.loads(message)
            except Exception as error:  # such as a class that this process does not have
                raise _Failed(f"its results cannot be read: {error}") from error
            if isinstance(answer, list):
                break
            if answer[0] == "failed":
                self._known.discard(job.number)
                raise _Failed(answer[1])
            self.link.send(pickle.dumps(words(answer[1])))
        return [None if found is None else (self._whole(found[0]), found[1]) for found in answer]

    def _whole(self, tree: Tree) -> Tree:
        def array(leaf: Leaf) -> Leaf:
            return self._reader.array(leaf) if isinstance(leaf, Place) else leaf

        return jax.tree.map(array, tree, is_leaf=lambda leaf: isinstance(leaf, Place))


def _started(link: int, memory: int) -> subprocess.Popen[bytes]:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "  # Ctrl-C is for the program
        f"import sys; sys.path[:] = {ascii([*map(str, sys.path)])}; "
        f"from replicax._data.worker_main import main; main({link}, {memory})"
    )
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    environment = {key: value for key, value in os.environ.items() if key not in _NOT_HANDED_ON}
    environment |= {"JAX_PLATFORMS": "cpu", VARIABLE: "0", progress.VARIABLE: "0"}
    return subprocess.Popen(
        [sys.executable, *flags, "-c", code],
        env=environment, stdin=subprocess.DEVNULL, pass_fds=[link, memory],
    )  # fmt: skip


class _Pool:
    """The processes of this program."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[_Process] = []
        self._starting: list[_Process] = []
        self._idle: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()  # None: they are lost
        self.is_lost = False

    def start(self, count: int) -> None:
        """Starts processes until there are as many."""
        with self._lock:
            while len(self._all) < count:
                process = _Process()
                self._all.append(process)
                self._starting.append(process)

    def are_ready(self, seconds: float = 0.0) -> bool:
        """Returns whether all that were started take calls; waits for each so long. Raises `Lost` if one has ended."""
        with self._lock:
            for process in list(self._starting):
                if process.link.has_message(seconds):
                    process.link.receive()
                    self._starting.remove(process)
                    self._idle.put(process)
            return not self._starting

    def call(self, job: _Job, reading: int | None, group: _Group, words: Callable[[Any], Any]) -> list[_Result | None]:
        """Has an idle process compute a group, see `_Process.call`. Once one is lost, all are."""
        process = self._idle.get()
        try:
            if process is None:
                raise Lost
            found = process.call(job, reading, group, words)
        except (CannotShip, _Failed):
            self._idle.put(process)
            raise
        except BaseException:  # also an interrupt: an answer is still on its way
            self.is_lost = True
            self._idle.put(None)
            raise
        self._idle.put(process)
        return found

    def close(self, patience: float | None = None) -> None:
        """Has all processes end, each after the call at which it is; waits for them."""
        self.is_lost = True
        self._idle.put(None)
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
        self._lock = threading.RLock()
        self._pool: _Pool | None = None
        self._job: _Job | None = None
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
                self._job = _Job(data)
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
                self._job = _Job(now[0])
                self._start()

    def give_up(self, why: str) -> None:
        """Has the function called here from now on."""
        with self._lock:
            if not self._is_over:
                self._is_over, self._pool, self._seen, self._job = True, None, None, None
                level = logging.WARNING if self._at_once else logging.INFO
                _log.log(level, "%s is called in this process, and in no other: %s.", self._role, why)

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

    def call(self, draws: Any, group: _Group) -> list[_Result | None]:
        """Returns the results of a group; None in place of those that are to be computed here."""
        pool, job = self._pool, self._job
        here: list[_Result | None] = [None] * len(group)
        if pool is None or job is None or _is_fork:
            return here
        reading = None if draws is None else _number_of(draws)
        try:
            found = pool.call(job, reading, group, lambda tag: draws.words(tag))
        except Lost:
            self.give_up("a process has ended")
            return here
        except (CannotShip, _Failed) as error:
            self.give_up(str(error))
            return here
        size = sum(leaf.nbytes for result in found if result is not None for leaf in jax.tree.leaves(result[0]))
        self.together = max(1, min(_TOGETHER, _TOGETHER_BYTES * len(group) // max(size, 1)))
        return found


_numbers = itertools.count()
_readings: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_readings_lock = threading.Lock()


def _number_of(draws: Any) -> int:
    """Returns a number for what a reading's functions draw with."""
    with _readings_lock:
        if draws not in _readings:
            _readings[draws] = next(_numbers)
        return _readings[draws]


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
