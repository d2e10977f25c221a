"""Runs one worker, and sees to it that nothing of it is left behind.

The launcher starts this file as a program of its own, one for each worker, in a session of its own:

    python -I -S _guard.py CONTROL COMMAND...

CONTROL is the number of an open socket. Each byte that comes over it is the number of a signal for the worker; SIGKILL
goes to the worker and everything below it. When the worker has ended, the guard ends what the worker left, and answers
with one line: the exit status (negative for a signal), when that was, and 1 if the worker was stopped, as by SIGSTOP,
when the launcher first asked it to end, else 0. When the socket closes, the launcher is gone, however it died: the
guard ends the worker and everything below it, and removes the folder of the reports.

On Linux orphans below the guard become its children, so that it finds a worker's data loaders and daemons even where
they have left their parents or their session; and a worker gets SIGKILL when its guard dies. Elsewhere the worker's
process group is all that is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Collection

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINUX = sys.platform == "linux"


def adopt_orphans() -> None:
    """Makes this process the parent of every process below it whose own parent ends. Only on Linux."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(ancestor: int, spare: Collection[int] = ()) -> list[int]:
    """Returns the processes below a process, nearest first, but `spare` and all below these. Empty without /proc."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # "pid (name) state parent ...", where the name may hold anything, parentheses too.
                children.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    found = [ancestor]
    for pid in found:
        found += [child for child in children.get(pid, []) if child not in spare]
    return found[1:]


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or by a debugger. False without /proc."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    return False


def end_descendants(spare: Collection[int] = ()) -> None:
    """Kills every process below this one, but `spare` and all below these, and waits until there is none."""
    out_of_reach = set(spare)
    while pids := descendants(os.getpid(), out_of_reach):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:  # it runs as somebody else
                out_of_reach.add(pid)
            except ProcessLookupError:
                pass
        for pid in set(pids) - out_of_reach:
            with contextlib.suppress(ChildProcessError):  # it is the child of one that has just been killed
                os.waitpid(pid, 0)


def _end_everything(worker: int) -> None:
    """Ends the worker, if it still runs, and everything below it."""
    if not _LINUX:
        with contextlib.suppress(OSError):
            os.killpg(worker, signal.SIGKILL)
    end_descendants()


def _start(command: list[str]) -> int:
    """Starts the worker, which leads a process group."""
    guard = os.getpid()
    libc = ctypes.CDLL(None) if _LINUX else None
    # Blocked until the child has default handlers: with the guard's, which do nothing, it would lose a signal.
    handled = {signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    if pid := os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    try:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.setpgid(0, 0)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard:  # it died before it could be watched
                os._exit(1)
        # Python ignores these, and what is ignored stays so in the program that is started.
        for name in ("SIGPIPE", "SIGXFSZ"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"replicax launch: cannot start {command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _ended(worker: int) -> int | None:
    """Reaps whatever has ended, and returns the worker's exit status if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == worker:
                status = os.waitstatus_to_exitcode(found[1])
    return status


def _guard(control: socket.socket, command: list[str]) -> None:
    adopt_orphans()
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    # A signal to the guard itself only wakes it: it ends when the worker does, or the launcher. (A handler that does
    # nothing, and not SIG_IGN, which the worker would inherit.)
    for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    worker = _start(command)
    # The pipes of the worker's output close when the worker and what it started have closed them.
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    stopped: bool | None = None  # whether the worker was, when it was first asked to end
    while True:
        ready = select.select([control.fileno(), wake], [], [])[0]
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
        if (status := _ended(worker)) is not None:
            when = time.time()
            _end_everything(worker)
            with contextlib.suppress(OSError):
                control.sendall(f"{status} {when} {stopped or 0:d}\n".encode())
            return
        if control.fileno() in ready:
            numbers = control.recv(64)
            if not numbers:
                break
            if stopped is None:
                stopped = is_stopped(worker)
            for asked in numbers:
                everything = descendants(os.getpid()) if asked == signal.SIGKILL else []
                for pid in everything or [worker]:
                    with contextlib.suppress(OSError):
                        os.kill(pid, asked)
    _end_everything(worker)
    # The launcher could not remove it. Each guard tries, and the last one succeeds.
    shutil.rmtree(os.environ["REPLICAX_REPORT_DIR"], ignore_errors=True)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _given:
        _socket = _given.dup()  # a small number, for `select`, and not inherited
    _guard(_socket, sys.argv[2:])
