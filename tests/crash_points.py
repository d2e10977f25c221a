"""Runs a program and copies a folder before every system call that may change a file: what a kill there would leave.

python crash_points.py OUT EVERY PROGRAM [ARGUMENTS ...]

The program prints a line once it is ready, waits for one, and calls `stop_at_changes`. It writes to OUT/now, each time
anew, which folder to watch and whatever it wants to say of it. OUT/points/NUMBER is a copy of that folder, taken when
the names in it or in the folders in it have changed, and at one in EVERY of the other changes. OUT/points.jsonl has the
text of OUT/now then. All threads of the program, those that Python does not know of as well, are stopped by ptrace
while the folder is copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import shutil
import struct
import subprocess
import sys
from pathlib import Path

REFUSED = 77  # the exit status where the system does not let a process trace its child

_WALL = 0x40000000
_CONTINUE, _SEIZE, _INTERRUPT = 7, 0x4206, 0x4207
_OPTIONS = 8 | 1 << 7 | 1 << 20  # new threads are traced, filters of system calls too, and the program ends with us
_FILTERED = 7  # the event of a thread that has stopped at a system call
_NO_NEW_PRIVILEGES, _FILTER, _ALL_THREADS = 38, 1, 1
_LOAD, _JUMP_IF_EQUAL, _RETURN, _ALLOW, _TRACE = 0x20, 0x15, 0x06, 0x7FFF0000, 0x7FF00000  # of filters

# open openat openat2 creat, write and its kin, sendfile splice copy_file_range, truncate ftruncate fallocate,
# rename*, unlink*, mkdir* rmdir, link* symlink*
_CHANGES = {
    "x86_64": {2, 257, 437, 85, 1, 18, 20, 296, 328, 40, 275, 326, 76, 77, 285, 82, 264, 316, 87, 263, 83, 258, 84}
    | {86, 265, 88, 266},
    "aarch64": {56, 437, 64, 66, 68, 70, 287, 71, 76, 285, 45, 46, 47, 38, 276, 35, 34, 37, 36},
}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
CAN_TRACE = sys.platform == "linux" and platform.machine() in _CHANGES

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, thread: int, address: object = None, data: object = None) -> None:
    if _libc.ptrace(request, thread, address, data) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def stop_at_changes() -> None:
    """Has all threads of this process stop for their tracer before each system call that may change a file."""
    numbers = sorted(_CHANGES[platform.machine()])
    instructions = [(_LOAD, 0, 0, 0)]
    instructions += [(_JUMP_IF_EQUAL, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    instructions += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _TRACE)]
    program = _Program(len(instructions), b"".join(struct.pack("HBBI", *one) for one in instructions))
    if _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or _libc.syscall(
        _SECCOMP[platform.machine()], _FILTER, _ALL_THREADS, ctypes.byref(program)
    ):
        raise OSError(ctypes.get_errno(), "system calls cannot be filtered")


class Tracer:
    """All threads of a process, of which each stops at the system calls of `stop_at_changes`."""

    def __init__(self, process: int, out: Path, every: int):
        self._process, self._out, self._every, self._threads = process, out, every, set[int]()
        self._held: dict[int, int] = {}  # threads that have stopped, and how
        self._last: object = None
        self._names: object = None
        self._unseen = 0  # changes since the last copy
        self.count = 0
        while found := {int(thread) for thread in os.listdir(f"/proc/{process}/task")} - self._threads:
            for thread in found:
                _ptrace(_SEIZE, thread, None, _OPTIONS)
                _ptrace(_INTERRUPT, thread)
            self._threads |= found

    def run(self) -> int:
        """Runs the process to its end, and returns its exit status."""
        while True:
            if self._held:
                thread, status = self._held.popitem()
            else:
                thread, status = os.waitpid(-1, _WALL)
            if not os.WIFSTOPPED(status):
                self._threads.discard(thread)
                if thread == self._process:
                    return os.waitstatus_to_exitcode(status)
                continue
            self._threads.add(thread)
            event = status >> 16
            if event == _FILTERED:
                self._point(thread)
            try:
                _ptrace(_CONTINUE, thread, None, 0 if event else os.WSTOPSIG(status))
            except ProcessLookupError:  # the program has come to its end
                self._threads.discard(thread)

    def _stop_others(self, thread: int) -> None:
        for other in self._threads - {thread} - set(self._held):
            try:
                _ptrace(_INTERRUPT, other)
            except ProcessLookupError:
                continue
            self._held[other] = os.waitpid(other, _WALL)[1]

    def _point(self, thread: int) -> None:
        """Copies the folder, if it has changed since the last point, and this is a change to be copied."""
        if (state := self._state()) is None or state == self._last:
            return
        self._last, (now, files) = state, state
        names = now, [file for file in files if file.count("/") < 2]
        self._unseen += 1
        if names == self._names and self._unseen < self._every:
            return
        self._names, self._unseen = names, 0
        self._stop_others(thread)
        folder, copy = json.loads(now)["folder"], self._out / "points" / str(self.count)
        shutil.copytree(folder, copy, symlinks=True, copy_function=shutil.copyfile)
        with open(self._out / "points.jsonl", "a") as file:
            file.write(now + "\n")
        self.count += 1

    def _state(self) -> tuple[str, dict[str, object]] | None:
        """What the program says, and the files and folders in the folder; None while it is just being said."""
        try:
            now = (self._out / "now").read_text()
            folder = json.loads(now)["folder"]
        except (FileNotFoundError, ValueError):
            return None
        files: dict[str, object] = {}
        for inner, folders, names in os.walk(folder):
            for name in (*folders, *names):
                path = os.path.join(inner, name)
                with contextlib.suppress(FileNotFoundError):  # other threads have not stopped yet
                    about = os.lstat(path)
                    files[os.path.relpath(path, folder)] = about.st_ino, about.st_size, about.st_mtime_ns
        return now, files


def main() -> int:
    """Runs the program of the command line."""
    out, every, *program = sys.argv[1:]
    (Path(out) / "points").mkdir()
    child = subprocess.Popen([sys.executable, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    if not child.stdout.readline():
        return child.wait()
    try:
        tracer = Tracer(child.pid, Path(out), int(every))
    except PermissionError as error:
        print(f"a process may not trace its child here: {error}", file=sys.stderr)
        child.kill()
        child.wait()
        return REFUSED
    child.stdin.write(b"\n")
    child.stdin.flush()
    return tracer.run()


if __name__ == "__main__":
    raise SystemExit(main())
