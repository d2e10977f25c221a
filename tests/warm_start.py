"""Start the programs of tests from servers that have imported replicax, since imports are most of a short program.

A server imports JAX and replicax, and starts no device. For each program it forks a process, with the session,
environment, files, arguments and `__main__` that a new interpreter would have had. There are two servers for each
process of pytest, so that workers of a job differ in where objects lie and in how strings hash, as they do in life.
Programs of `replicax.tf`, which changes settings of JAX, have servers of their own. A program that looks at what an
import does starts in a new interpreter.

A program starts in a new interpreter all the same where `fresh=True`, on another system than Linux, for another
interpreter, and where its environment differs in what is read before a program begins. REPLICAX_TEST_FRESH=1 has all of
them start so.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# What the interpreter, the C library or XLA's libraries read as they start.
_READ_EARLY = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "OPENBLAS_", "MKL_", "JAX_", "ABSL_", "TF_CPP_")
# What replicax or Keras reads as it is imported: servers have none of it, and programs apply theirs.
_READ_BY_REPLICAX = ("REPLICAX_", "KERAS_", "TF_CONFIG")
_ADOPTED = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONIOENCODING"}  # which a forked program gets in another way
_HIGH = 500  # file descriptors that are being moved are above


# What replicax imports, also as the first program is compiled. No module that imports gRPC: whoever uses it is forked
# before.
_IMPORTS = {
    "replicax": (
        "jax", "jax.numpy", "jax.experimental.shard_map", "jax.experimental.multihost_utils", "jax.extend.core",
        "jax.extend.linear_util", "jax.extend.core.primitives", "queue", "jaxlib.mlir.dialects.builtin",
        "replicax._api",
    ),
}  # fmt: skip
_IMPORTS["replicax.tf"] = (*_IMPORTS["replicax"], "replicax.tf")


class Process:
    """A process that runs a program and leads its own session; of `subprocess.Popen`, what tests need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def ended(self, timeout: float | None = None) -> int:
        """Returns the exit status once the program has ended. Its number is not given to another process yet."""
        raise NotImplementedError

    def reap(self) -> int:
        """Returns the exit status once the program has ended, and forgets the process."""
        raise NotImplementedError


class _Fresh(Process):
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(process.pid)
        self._process = process

    def ended(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            watched = os.pidfd_open(self.pid) if timeout is not None and hasattr(os, "pidfd_open") else None
            if watched is not None:
                try:
                    if not select.select([watched], [], [], timeout)[0]:
                        raise subprocess.TimeoutExpired(self._process.args, timeout)
                finally:
                    os.close(watched)
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            assert found is not None
            self.returncode = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return self.returncode

    def reap(self) -> int:
        return self._process.wait()


class _Forked(Process):
    spent = 0.0  # CPU seconds of all of them that have ended, with their children

    def __init__(self, watcher: socket.socket) -> None:
        self._watcher = watcher
        super().__init__(_received(watcher))

    def ended(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._watcher], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("program", timeout or 0.0)
            self.returncode, seconds = _received(self._watcher)
            _Forked.spent += seconds
        return self.returncode

    def reap(self) -> int:
        status = self.ended()
        self._watcher.close()
        return status


def _received(connection: socket.socket) -> Any:
    text = connection.recv(1 << 16)
    assert text, "the server of programs has ended"
    return json.loads(text)


def spent_by_programs() -> float:
    """Returns the CPU seconds of forked programs that have ended; those of other processes count as children."""
    return _Forked.spent


def start(
    program: Path,
    arguments: Sequence[str] = (),
    *,
    env: Mapping[str, str],
    cwd: Path,
    stdout: IO[bytes],
    stderr: IO[bytes],
    pass_fds: Sequence[int] = (),
    python: str = sys.executable,
    options: Sequence[str] = (),
    server: int = 0,
    fresh: bool = False,
    imports: str = "replicax",
) -> Process:
    """Starts a program as a session of its own, with nothing to read.

    Args:
        program: its file.
        arguments: `sys.argv[1:]`.
        env: its whole environment.
        cwd: the folder in which it runs.
        stdout: where its output goes.
        stderr: where its messages go.
        pass_fds: file descriptors that it has too, of the same numbers.
        python: the interpreter.
        options: of the interpreter; they have it start anew.
        server: which of the servers forks it.
        fresh: whether it starts in a new interpreter in any case.
        imports: what the server has imported: "replicax" or "replicax.tf".
    """
    fresh = fresh or bool(options) or python != sys.executable or "REPLICAX_TEST_FRESH" in os.environ
    changed = None if fresh or sys.platform != "linux" else _jax_settings(env)
    if changed is None:
        return _Fresh(
            subprocess.Popen(
                [python, *options, str(program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=cwd,
                env=env,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        request = {
            "argv": [str(program), *arguments],
            "env": dict(env),
            "cwd": str(cwd),
            "pass_fds": list(pass_fds),
            "jax": changed,
        }
        descriptors = [theirs.fileno(), stdout.fileno(), stderr.fileno(), *pass_fds]
        socket.send_fds(_server(server, imports), [json.dumps(request).encode()], descriptors)
    return _Forked(ours)


def _jax_settings(env: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns JAX's settings in which a program differs from the servers; None if it must start anew."""
    import jax

    def early(all_: Mapping[str, str]) -> dict[str, str]:
        return {k: v for k, v in all_.items() if k.startswith(_READ_EARLY) and k not in _ADOPTED}

    settings: dict[str, Any] = {}
    wanted, here = early(env), _environment_of_servers()
    if set(here) - set(wanted):
        return None
    for name, value in wanted.items():
        if here.get(name) == value:
            continue
        before = jax.config.values.get(name.lower())
        if not name.startswith("JAX_") or name.lower() not in jax.config.values:
            return None
        if isinstance(before, bool):
            settings[name.lower()] = value.lower() in ("1", "true", "t", "yes", "y", "on")
        else:
            settings[name.lower()] = type(before)(value) if isinstance(before, (int, float)) else value
    return settings


@functools.cache
def _environment_of_servers() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k.startswith(_READ_EARLY) and k not in _ADOPTED}


@functools.cache
def _server(number: int, imports: str) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    env = {
        **{k: v for k, v in os.environ.items() if k not in _ADOPTED and not k.startswith(_READ_BY_REPLICAX)},
        **_environment_of_servers(),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
    }
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno()), *_IMPORTS[imports]],
            stdin=subprocess.DEVNULL,
            env=env,
            cwd="/",
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def end() -> None:
        ours.close()
        process.wait(10.0)

    atexit.register(end)
    return ours


# In the server.


def _serve(requests: socket.socket, modules: Sequence[str]) -> None:
    """Forks a process for each request, and returns in the forked ones alone, to run the program."""
    import gc
    import importlib

    import lowering

    before = dict(os.environ)
    for name in modules:
        with contextlib.suppress(ImportError):  # not in every JAX; a program that needs the module fails by itself
            importlib.import_module(name)
    lowering.reuse_contexts()
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch over programs
    while True:
        text, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 64)
        if not text:
            os._exit(0)
        if _forked() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            watcher, *files = descriptors
            if program := _forked():
                for descriptor in files:
                    os.close(descriptor)
                requests.close()
                _watch(program, socket.socket(fileno=watcher))
            requests.detach()  # or its end would close what has its number by then
            request = json.loads(text)
            request["env"] = {**set_by_imports, **request["env"]}
            _become(request, files)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _forked() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's library has threads, which it ends before a fork by itself
        return os.fork()


def _watch(program: int, connection: socket.socket) -> None:
    """Tells how a program ends and keeps its number until that is no longer needed."""
    connection.send(json.dumps(program).encode())
    found = os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)
    fields = Path(f"/proc/{program}/stat").read_text().rpartition(")")[2].split()
    seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
    with contextlib.suppress(OSError):
        connection.send(json.dumps([status, seconds]).encode())
        connection.recv(1)  # the end of it
    os._exit(0)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Makes this process what a new one for the request would be, up to `__main__`."""
    os.setsid()
    import fcntl

    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH) for descriptor in files]
    os.closerange(3, _HIGH)
    for descriptor, number in zip(high, [1, 2, *request["pass_fds"]]):
        os.dup2(descriptor, number, inheritable=True)
    os.closerange(_HIGH, _HIGH + 64)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    import random

    import jax
    import numpy as np

    for name, value in request["jax"].items():
        jax.config.update(name, value)
    random.seed()
    np.random.seed()
    sys.argv[:] = request["argv"]
    path = [str(Path(request["argv"][0]).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[0:1] = path
    for name in [name for name in sys.modules if name in ("warm_start", "lowering", "fcntl")]:
        del sys.modules[name]
    import replicax

    replicax._configure()


def _run(file: str) -> None:
    """Runs a program as `__main__`; what it raises is shown without the lines of this file."""
    main = types.ModuleType("__main__")
    main.__file__ = file
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    try:
        exec(compile(Path(file).read_bytes(), file, "exec"), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        if not isinstance(error, KeyboardInterrupt):
            raise SystemExit(1) from None
    else:
        return
    # As Python ends after an interrupt.
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    _run(sys.argv[0])
