"""Processes that call a function of elements side by side, where Python's lock would let only one thread do so.

A process gets the function by value, then elements with their numbers, and for each pass over the dataset the words
with which its random numbers begin. So a result is the same wherever it is computed. What a process cannot do, such as
to change a variable or a list of this process, and what fails in it, is done here.

Functions of tf operations get such processes by themselves, under `AUTOTUNE`, where there are more than a few cores,
once their calls have taken long enough, and if nothing in them changes from call to call. Then nothing shows where they
run but the speed. On a few cores threads are better: to hand elements over takes a third of what small functions take.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from replicax._base.types import Leaf, Tree
from replicax._data import by_value
from replicax._data.by_value import CannotShip, pickled
from replicax._data.shared_memory import Place, Reader, new_file

# How many processes there are at most: 0 for none.
VARIABLE = "REPLICAX_INPUT_PROCESSES"
_MOST = 16  # where the variable is not set; each takes some 300 MB
_FEW = 4  # cores from which functions get processes unasked
# Seconds of the processor after which a function is worth processes of its own, whose start takes about two.
WORTHWHILE = 3.0
_START_LIMIT = 300.0  # seconds that a process may take to start
_CALLS = 4  # between two looks at what a function changes
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


class _Lost(Exception):
    """A process has ended."""


class _Process:
    """A process and the link to it, which one thread uses at a time."""

    def __init__(self, job: bytes):
        from multiprocessing.connection import Connection  # which `import replicax` does without

        ours, theirs = socket.socketpair()
        memory = new_file()
        descriptors = [theirs.fileno(), memory]
        code = (
            f"import sys; sys.path[:] = {json.dumps(sys.path)}; from replicax._data.worker_main import main; "
            f"main(*{descriptors})"
        )
        environment = {key: value for key, value in os.environ.items() if key not in _NOT_HANDED_ON}
        environment["JAX_PLATFORMS"] = "cpu"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], env=environment, stdin=subprocess.DEVNULL, pass_fds=descriptors
            )
        self._reader = Reader(memory)
        self.link = Connection(ours.detach())
        self.link.send_bytes(job)

    def is_ready(self) -> bool:
        """Returns whether it has the function; raises `_Lost` where it has ended."""
        try:
            return self.link.poll() and self.link.recv() == "ready"
        except (EOFError, OSError) as error:
            raise _Lost from error

    def call(self, reading: int | None, group: _Group, words: Callable[[Any], Any]) -> list[_Result | None]:
        """Returns the results for a group; None in place of what it could not do."""
        request = pickled((reading, self._reader.unused(), list(group)))
        try:
            self.link.send_bytes(request)
            while True:
                answer = pickle.loads(self.link.recv_bytes())
                if isinstance(answer, list):
                    break
                self.link.send(words(answer[1]))
        except (EOFError, OSError) as error:
            raise _Lost from error
        return [None if found is None else (self._whole(found[0]), found[1]) for found in answer]

    def _whole(self, tree: Tree) -> Tree:
        def array(leaf: Leaf) -> Leaf:
            return self._reader.array(leaf) if isinstance(leaf, Place) else leaf

        return jax.tree.map(array, tree, is_leaf=lambda leaf: isinstance(leaf, Place))

    def close(self) -> None:
        """Has the process end, after the call at which it is."""
        self.link.close()
        _ended.append(self._process)


# Processes that were closed, until the system has told that they have ended.
_ended: collections.deque[subprocess.Popen[bytes]] = collections.deque()


def _reap() -> None:
    for _ in range(len(_ended)):
        process = _ended.popleft()
        if process.poll() is None:
            _ended.append(process)


class _Workers:
    """Several processes with one function."""

    def __init__(self, job: bytes, count: int):
        self.count = count
        self._owner = os.getpid()
        self._all: list[_Process] = []
        self._starting: list[_Process] = []
        self._idle: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()  # None: there are no more
        self._close = weakref.finalize(self, _closed, self._all, self._owner)
        _reap()
        for _ in range(count):
            process = _Process(job)
            self._all.append(process)
            self._starting.append(process)

    def are_ready(self) -> bool:
        """Returns whether all processes have the function; raises `_Lost` where one has ended."""
        for process in list(self._starting):
            if process.is_ready():
                self._starting.remove(process)
                self._idle.put(process)
        return not self._starting

    def wait(self) -> None:
        """Waits until one more process has the function, or has ended. Raises `_Lost` if none does so."""
        from multiprocessing.connection import wait

        if not wait([process.link for process in self._starting], _START_LIMIT):
            raise _Lost

    def call(self, reading: int | None, group: _Group, words: Callable[[Any], Any]) -> list[_Result | None]:
        """Has a process compute a group: waits for an idle one. Raises `_Lost` where one has ended."""
        if os.getpid() != self._owner:
            raise _Lost  # the links are those of the process from which this one was forked
        process = self._idle.get()
        if process is None:
            self._idle.put(None)
            raise _Lost
        try:
            found = process.call(reading, group, words)
        except BaseException:  # also an interrupt: an answer is still on its way
            self._idle.put(None)
            raise
        self._idle.put(process)
        return found


def _closed(processes: list[_Process], owner: int) -> None:
    if os.getpid() == owner:
        for process in processes:
            process.close()


def default_count(unasked: bool) -> int:
    """Returns how many processes a function gets: one a core, within limits; none on a few cores if `unasked`.

    Raises:
        ValueError: the environment has something else than a number.
    """
    if most := os.environ.get(VARIABLE):
        if not most.isdecimal():
            raise ValueError(
                f"{VARIABLE} in the environment is how many processes call functions of datasets: {most!r}"
            )
        return int(most)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if unasked and cores < _FEW else min(cores, _MOST)


class Processes:
    """The processes of one function of elements: whether it gets any, and then they.

    Args:
        job: returns the function as a job for a process; raises CannotShip.
        count: how many processes.
        at_once: whether it gets them before the first call, whatever that costs. Otherwise it gets them if it turns out
            to be worth it.
    """

    def __init__(self, job: Callable[[], bytes], count: int, at_once: bool):
        self._job, self.count, self._at_once = job, count, at_once
        self.together = 1  # how many elements a process takes at a time
        self._lock = threading.RLock()
        self._workers: _Workers | None = None
        self._spent = 0.0
        self._seen: tuple[object, ...] | None = None
        self._calls = 0  # since then
        self._is_over = count < 1 or os.name != "posix"

    def note(self, seconds: float) -> None:
        """Notes that calls of the function took the processor so long, and starts the processes once it is time."""
        with self._lock:
            if self._is_over or self._workers is not None:
                return
            self._spent += seconds
            self._calls += 1
            if self._spent < WORTHWHILE or (self._seen is not None and self._calls < _CALLS):
                return
            try:
                job = self._job()
                now = job, *by_value.random_state()
                if self._seen is None:
                    self._seen, self._calls = now, 0
                elif now == self._seen:
                    self._workers = _Workers(job, self.count)
                else:
                    self.give_up()
            except (CannotShip, _Lost, OSError):
                self.give_up()

    def give_up(self) -> None:
        """Has the function called here from now on."""
        with self._lock:
            self._is_over, self._workers, self._seen = True, None, None

    def are_ready(self) -> bool:
        """Returns whether the processes take calls; waits for them if they are to be there at once.

        Raises:
            TypeError: they were asked for, and the function cannot be sent to them.
        """
        if self._is_over:
            return False
        with self._lock:
            try:
                if self._at_once and self._workers is None:
                    self._workers = _Workers(self._job(), self.count)
                return self._workers is not None and self._are_ready(self._workers)
            except CannotShip as error:
                raise TypeError(f"The function of `Dataset.map` cannot run in other processes: {error}.") from error
            except (_Lost, OSError):
                self.give_up()
                return False

    def _are_ready(self, workers: _Workers) -> bool:
        while not workers.are_ready():
            if not self._at_once:
                return False
            workers.wait()
        return True

    def call(self, draws: Any, group: _Group) -> list[_Result | None]:
        """Returns the results of a group; None in place of those that are to be computed here."""
        workers = self._workers
        if workers is None:
            return [None] * len(group)
        reading = None if draws is None else _number_of(draws)
        try:
            found = workers.call(reading, group, lambda tag: draws.words(tag))
        except _Lost:
            self.give_up()
            return [None] * len(group)
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


nothing = functools.partial(tuple)  # a preparation
