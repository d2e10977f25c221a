"""Runs a program and copies a folder before every system call that may change a file: what a kill there would leave.

python crash_points.py OUT PROGRAM [ARGUMENTS ...]

The program prints a line once it is ready, and goes on when it gets one. It writes to OUT/now, each time anew, which
folder to watch and whatever it wants to say of it. OUT/points/NUMBER is a copy of that folder, whenever something in it
has changed, and OUT/points.jsonl has the text of OUT/now then. All threads of the program, those that Python does not
know of as well, are stopped by ptrace while the folder is copied.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

REFUSED = 77  # the exit status where the system does not let a process trace its child

_WALL = 0x40000000
_SYSCALL, _SEIZE, _INTERRUPT, _SYSCALL_INFO = 24, 0x4206, 0x4207, 0x420E
_OPTIONS = 1 | 8 | 1 << 20  # system calls are told from signals, new threads are traced, and the program ends with us
_STOP = 128  # the event of a thread that was interrupted, or is new

# open openat openat2 creat, write and its kin, sendfile splice copy_file_range, truncate ftruncate fallocate,
# rename*, unlink*, mkdir* rmdir, link* symlink*
_CHANGES = {
    "x86_64": {2, 257, 437, 85, 1, 18, 20, 296, 328, 40, 275, 326, 76, 77, 285, 82, 264, 316, 87, 263, 83, 258, 84}
    | {86, 265, 88, 266},
    "aarch64": {56, 437, 64, 66, 68, 70, 287, 71, 76, 285, 45, 46, 47, 38, 276, 35, 34, 37, 36},
}
CAN_TRACE = sys.platform == "linux" and platform.machine() in _CHANGES

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, thread: int, address: object = None, data: object = None) -> None:
    if _libc.ptrace(request, thread, address, data) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


class Tracer:
    """All threads of a process, of which each stops at each system call."""

    def __init__(self, process: int, out: Path):
        self._process, self._out, self._threads = process, out, set[int]()
        self._changes = _CHANGES[platform.machine()]
        self._held: dict[int, int] = {}  # threads that have stopped, and how
        self._last: object = None
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
            if self._begins_a_change(thread, status):
                self._stop_others(thread)
                self._point()
            number, event = os.WSTOPSIG(status), status >> 16
            passed_on = 0 if event or number & 0x80 else number
            try:
                _ptrace(_SYSCALL, thread, None, passed_on)
            except ProcessLookupError:  # the program has come to its end
                self._threads.discard(thread)

    def _begins_a_change(self, thread: int, status: int) -> bool:
        if os.WSTOPSIG(status) != signal.SIGTRAP | 0x80:
            return False
        info = ctypes.create_string_buffer(88)
        _ptrace(_SYSCALL_INFO, thread, len(info), ctypes.addressof(info))
        (kind,) = struct.unpack_from("<B", info.raw)
        (number,) = struct.unpack_from("<Q", info.raw, 24)
        return kind == 1 and number in self._changes  # where it begins, not where it ends

    def _stop_others(self, thread: int) -> None:
        for other in self._threads - {thread} - set(self._held):
            try:
                _ptrace(_INTERRUPT, other)
            except ProcessLookupError:
                continue
            self._held[other] = os.waitpid(other, _WALL)[1]

    def _point(self) -> None:
        """Copies the folder, if it is another than at the last point."""
        try:
            now = (self._out / "now").read_text()
            folder = Path(json.loads(now)["folder"])
        except (FileNotFoundError, ValueError):  # it is just being written
            return
        seen = now, [(path, (s := path.lstat()).st_ino, s.st_size, s.st_mtime_ns) for path in sorted(folder.rglob("*"))]
        if seen == self._last:
            return
        self._last = seen
        shutil.copytree(folder, self._out / "points" / str(self.count), symlinks=True, copy_function=shutil.copyfile)
        with open(self._out / "points.jsonl", "a") as file:
            file.write(now + "\n")
        self.count += 1


def main() -> int:
    """Runs the program of the command line."""
    out, *program = sys.argv[1:]
    (Path(out) / "points").mkdir()
    child = subprocess.Popen([sys.executable, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    if not child.stdout.readline():
        return child.wait()
    try:
        tracer = Tracer(child.pid, Path(out))
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
