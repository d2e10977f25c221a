"""Runs `replicax launch` for tests: with a deadline, and a check that no process is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

_MARKER = "REPLICAX_TEST_LAUNCH"

# What the programs of the workers begin with.
HEAD = """\
import json, os, signal, subprocess, sys, threading, time
from pathlib import Path
task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
attempt = int(os.environ["REPLICAX_RESTART_COUNT"])

def report(**fields):
    fields = {"time": time.time(), "process_id": task, "worker": f"worker {task}", "kind": "exception",
              "message": "", "traceback": "", "step": None, "caused_by": None, **fields}
    path = Path(os.environ["REPLICAX_REPORT_DIR"]) / f"{task}.json"
    path.with_suffix(".new").write_text(json.dumps(fields))
    path.with_suffix(".new").rename(path)

def for_ever():
    threading.Event().wait()

def wait_for(file):
    while not os.path.exists(file):
        time.sleep(0.01)
"""


class Launch:
    """A running `replicax launch`, a context in which it ends: at its exit no process of it may be left.

    Args:
        folder: for its files.
        options: the launcher's options.
        program: the workers' program, which runs after HEAD.
        arguments: the program's.
        env: laid over the environment of the tests; None removes a variable.
        command: what is started, up to the options.
    """

    def __init__(
        self,
        folder: Path,
        options: str,
        program: str,
        *arguments: str,
        env: Mapping[str, str | None] | None = None,
        command: tuple[str, ...] = (sys.executable, "-m", "replicax.launch"),
    ):
        self._id = uuid.uuid4().hex
        self.folder = folder / self._id
        self.folder.mkdir()
        (self.folder / "program.py").write_text(HEAD + textwrap.dedent(program), encoding="utf-8")
        environment = {**os.environ, "REPLICAX_VIRTUAL_DEVICES": None, **(env or {}), _MARKER: self._id}
        with open(self.folder / "out", "wb") as out, open(self.folder / "err", "wb") as err:
            self._process = subprocess.Popen(
                [*command, *options.split(), "program.py", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.folder,
                env={name: value for name, value in environment.items() if value is not None},
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text(encoding="utf-8", errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(encoding="utf-8", errors="replace")

    @property
    def output(self) -> str:
        return f"--- stdout ---\n{self.out}\n--- stderr ---\n{self.err}"

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, timeout: float = 60.0) -> int:
        """The exit status."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"The launcher was not done after {timeout:g} s.\n{self.output}") from None

    def wait_for(self, text: str, count: int = 1) -> None:
        """Waits until the output has this text so many times."""
        self.until(lambda: (self.out + self.err).count(text) >= count, f"{count} times {text!r}")

    def processes(self) -> list[int]:
        """The processes that there are of it, itself among them: they all have inherited its marker."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if f"{_MARKER}={self._id}".encode() in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    found.append(int(name))
        return found

    def nothing_left(self) -> None:
        """Waits until no process is left."""
        self.until(lambda: not self.processes(), "no process")

    def until(self, condition: Callable[[], bool], what: str, timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"Not seen after {timeout:g} s: {what}. Processes: {self.processes()}\n{self.output}"
                )
            time.sleep(0.02)

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            if kind is None:
                self._process.wait(60.0)
                self.nothing_left()
        finally:
            while left := self.processes():
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.1)
            self._process.wait()
