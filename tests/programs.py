"""Programs of tests: each runs in a process of its own, with a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from warm_start import start

# Runs the program as `__main__`, so that its functions can be sent to other processes, and shows where each
# thread stands shortly before the deadline.
_BOOT = """\
import faulthandler, os, sys
faulthandler.enable()
faulthandler.dump_traceback_later(float(sys.argv.pop(1)))
del sys.argv[0]
sys.path[0] = os.environ.pop("REPLICAX_TEST_PATH")
__file__ = sys.argv[0]
exec(compile(open(__file__, encoding="utf-8").read(), __file__, "exec"))
"""


class Finished(NamedTuple):
    """How a program ended."""

    returncode: int
    stdout: str
    stderr: str


def run(
    program: Path,
    arguments: Sequence[object] = (),
    *,
    folder: Path,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    python: str | os.PathLike[str] = sys.executable,
    fresh: bool = False,
    imports: str = "replicax",
    path: str = "",
) -> Finished:
    """Run a program, and return its exit status and its output.

    A program that is not done after `timeout` seconds is ended with all its children, and the test fails with its
    output, in which faulthandler shows where its threads stood.

    Args:
        program: the file of the program.
        arguments: `sys.argv[1:]`.
        folder: the folder in which the program runs, and which gets its output.
        timeout: in seconds.
        env: changes to the environment of the tests; None removes a variable.
        python: the interpreter.
        fresh: whether the program starts in a new interpreter (see warm_start.py).
        imports: "replicax" or "replicax.tf", which has been imported unless the program starts in a new interpreter.
        path: the first entry of `sys.path`.
    """
    boot = folder / "boot.py"
    boot.write_text(_BOOT, encoding="utf-8")
    changed = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8", **(env or {})}
    changed["REPLICAX_TEST_PATH"] = path
    # Files, not pipes: a grandchild that lives on would keep a pipe open.
    with open(folder / "stdout", "w+b") as stdout, open(folder / "stderr", "w+b") as stderr:
        process = start(
            boot,
            [str(max(timeout - 3.0, timeout * 0.7)), str(program), *map(str, arguments)],
            env={name: value for name, value in changed.items() if value is not None},
            cwd=folder,
            stdout=stdout,
            stderr=stderr,
            python=str(python),
            fresh=fresh,
            imports=imports,
        )
        try:
            process.ended(timeout)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.reap()
    out, err = ((folder / name).read_text(encoding="utf-8", errors="replace") for name in ("stdout", "stderr"))
    if late:
        pytest.fail(
            f"The program was not done after {timeout:g} s and was ended.\n"
            f"--- stdout ---\n{out}\n--- stderr ---\n{err}",
            pytrace=False,
        )
    assert process.returncode is not None
    return Finished(process.returncode, out, err)


def run_well(program: Path, arguments: Sequence[object] = (), **options: object) -> Finished:
    """Run a program, as `run` does, that must end with exit status 0."""
    done = run(program, arguments, **options)  # type: ignore[arg-type]
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done
