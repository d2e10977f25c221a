"""One process that calls functions of elements, as `worker_processes.py` starts several of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from replicax._base.types import Leaf, Tree
from replicax._data import process_link
from replicax._data.by_value import pickled
from replicax._data.process_link import Lost
from replicax._data.shared_memory import Place, Reader, new_file
from replicax._report import terminal

# How many processes AUTOTUNE stands for, also for functions of `tf.data` that ask for none; 0 is for none at all.
VARIABLE = "REPLICAX_INPUT_PROCESSES"
_NOT_HANDED_ON = ("JAX_NUM_CPU_DEVICES", "REPLICAX_VIRTUAL_DEVICES", "TF_CONFIG")

# Elements with their numbers, and what they become: a tree and how many rows it has, None for an element by itself.
Group: TypeAlias = Sequence[tuple[int, Tree]]
Result: TypeAlias = tuple[Tree, int | None]


class Failed(Exception):
    """A process cannot make a function of its job, or this one has no use for its results: it says why."""


class Job:
    """A function as it is sent to processes."""

    _numbers = itertools.count()

    def __init__(self, data: bytes):
        self.number, self.data = next(self._numbers), data
        weakref.finalize(self, _ended_jobs.add, self.number).atexit = False


_ended_jobs: set[int] = set()  # the numbers of those that nobody needs any more


class Process:
    """A process and the link to it, which one thread uses at a time.

    Attributes:
        is_ready: whether the process takes calls.
    """

    def __init__(self) -> None:
        self.is_ready = self._was_stopped = False
        self.link, theirs = process_link.pair(self._check)
        memory = new_file()
        with theirs:
            try:
                self.process = _started(theirs.fileno(), memory)
            except BaseException:
                os.close(memory)
                raise
        self._reader = Reader(memory)
        self._known: set[int] = set()  # the numbers of the jobs that it has

    def _check(self) -> None:
        """Raise Lost if the process has ended, or is stopped at two looks in a row."""
        if self.process.poll() is not None:
            raise Lost
        is_stopped = _is_stopped(self.process.pid)
        if is_stopped and self._was_stopped:  # Ctrl-Z stops all processes of the program, which continue together
            raise Lost
        self._was_stopped = is_stopped

    def end(self) -> str:
        """End a lost process, and return a report about it."""
        is_stopped = _is_stopped(self.process.pid)
        self.link.close()
        self.process.kill()  # changes nothing for a process that is ending
        status = self.process.wait()
        cause = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        return f"process {self.process.pid} {'was stopped' if is_stopped else f'has ended ({cause})'}"

    def wait_until_ready(self) -> None:
        """Wait for the process to start: its first message says that it takes calls."""
        if not self.is_ready:
            self.link.receive()
            self.is_ready = True

    def call(self, job: Job, reading: int | None, group: Group, words: Callable[[Any], Any]) -> list[Result | None]:
        """Returns the results for a group; None in place of what it could not do.

        Raises:
            Lost: the process has ended, or is stopped.
            CannotShip: the elements cannot be sent.
            Failed: it cannot make the function.
        """
        request = pickled(list(group))
        self.wait_until_ready()
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
                raise Failed(f"its results cannot be read: {error}") from error
            if isinstance(answer, list):
                break
            if answer[0] == "failed":
                self._known.discard(job.number)
                raise Failed(answer[1])
            self.link.send(pickle.dumps(words(answer[1])))
        return [None if found is None else (self._whole(found[0]), found[1]) for found in answer]

    def _whole(self, tree: Tree) -> Tree:
        def array(leaf: Leaf) -> Leaf:
            return self._reader.array(leaf) if isinstance(leaf, Place) else leaf

        return jax.tree.map(array, tree, is_leaf=lambda leaf: isinstance(leaf, Place))


def _is_stopped(process: int) -> bool:
    """Return whether a signal has stopped a child process."""
    if not hasattr(os, "waitid"):
        return False
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, process, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _started(link: int, memory: int) -> subprocess.Popen[bytes]:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "  # Ctrl-C is for the program
        f"import sys; sys.path[:] = {ascii([*map(str, sys.path)])}; "
        f"from replicax._data.worker_main import main; main({link}, {memory})"
    )
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    environment = {key: value for key, value in os.environ.items() if key not in _NOT_HANDED_ON}
    environment |= {"JAX_PLATFORMS": "cpu", VARIABLE: "0", terminal.VARIABLE: "0"}
    return subprocess.Popen(
        [sys.executable, *flags, "-c", code],
        env=environment, stdin=subprocess.DEVNULL, pass_fds=[link, memory],
    )  # fmt: skip
