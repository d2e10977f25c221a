"""What every test stands on: virtual devices, programs with a deadline, and a check that nothing is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cpu_times import CpuTimes
from warm_start import start

# The environment is set before JAX is imported, here and in each process of pytest-xdist.
# The suite always has the same devices, whatever the machine has.
os.environ["JAX_PLATFORMS"] = "cpu"
# The shared tests also run in each worker of a job of several (see test_multi_worker_suite.py), which says what it has.
os.environ["REPLICAX_VIRTUAL_DEVICES"] = os.environ.get("REPLICAX_SUITE_DEVICES", "GPU:8,CPU:4")
os.environ["REPLICAX_JOB_SECRET"] = "the secret of the tests"  # none is made in the user's home
os.environ["MPLBACKEND"] = "Agg"
os.environ["REPLICAX_HINT_SHORT_STEPS"] = "off"
os.environ["REPLICAX_LOG_COMPILES"] = "off"  # what is printed would depend on how busy the machine is
os.environ["KERAS_BACKEND"] = "jax"  # as replicax sets it, also where Keras is imported first
if "jax" in sys.modules and "REPLICAX_SUITE_WORKERS" not in os.environ:
    raise RuntimeError(
        "JAX was imported before tests/conftest.py: run pytest on the folder `tests`, or without a path."
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", action="store_true", help="print the CPU time of each test file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("cpu_times"):
        config.pluginmanager.register(CpuTimes(), "replicax-cpu-times")
    # What runs in the background of a script or under nohup ignores these signals, and so would what the tests start.
    for number, handler in [(signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)]:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    # Registered by hand, because a fixture of this file would not reach the doctests in `src`.
    config.pluginmanager.register(_Everywhere(), "replicax-everywhere")
    if "REPLICAX_SUITE_WORKERS" not in os.environ:
        _keep_programs(config.rootpath / ".jax_cache")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"run_python", "run_tf"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("processes")


def pytest_collection_finish() -> None:
    if "replicax.tf" in sys.modules:
        raise pytest.UsageError(
            "A test file imports replicax.tf, which changes settings of JAX and how arrays are shown for all tests of "
            "its process: do it in a program of its own (`run_python`)."
        )
    _freeze()


_tests = itertools.count(1)


def pytest_runtest_setup() -> None:
    if next(_tests) % 100 == 0:
        _freeze()  # what tests left behind in caches


def _freeze() -> None:
    """Has the collector leave alone what is there by now and stays: looking at it again and again takes its time."""
    gc.collect()
    gc.freeze()


def _keep_programs(folder: Path) -> None:
    """Has JAX keep what the tests compile, since many of them compile the same; programs of users keep nothing."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class _Everywhere:
    @pytest.fixture(autouse=True)
    def tasks_of_examples(
        self, nothing_left_behind: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        """Gives examples of parameter servers their `coordinator`, and stops the servers that they start."""
        if not isinstance(request.node, pytest.DoctestItem) or "parameter_server" not in request.node.dtest.name:
            yield
            return
        from ps_clusters import Cluster

        from replicax._parameter_server.server import Server

        servers: list[Server] = []
        start = Server.start
        monkeypatch.setattr(Server, "start", lambda server: (servers.append(server), start(server))[1])
        text = "".join(example.source for example in request.node.dtest.examples)
        with contextlib.ExitStack() as stack:
            if re.search(r"(?<![.\w])coordinator\.", text) and "coordinator = " not in text:
                cluster = stack.enter_context(Cluster(workers=1, servers=1))
                request.node.dtest.globs["coordinator"] = cluster.coordinator
            yield
        for server in servers:
            server._service.stop()

    @pytest.fixture(autouse=True)
    def nothing_left_behind(self) -> Iterator[None]:
        """Fails a test after which a thread of replicax lives on or a strategy's scope is still open."""
        before = set(threading.enumerate())
        devices = sys.modules.get("replicax._base.devices")
        virtual = dict(devices._virtual) if devices is not None else None
        yield
        if devices is not None and devices._virtual != virtual:  # a test may give the CPU devices other names
            devices.set_virtual_devices(virtual)
        left = _threads_left(before, patience=20.0)
        if left:
            names = ", ".join(sorted(thread.name for thread in left))
            pytest.fail(f"The test left threads of replicax running: {names}", pytrace=False)
        replicax = sys.modules.get("replicax")
        if replicax is not None and replicax.has_strategy():
            pytest.fail(f"The test left the scope of {replicax.get_strategy()} open", pytrace=False)


def _threads_left(before: set[threading.Thread], patience: float) -> list[threading.Thread]:
    """The threads of replicax that were not there before and do not end within `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        left = [t for t in threading.enumerate() if t.name.startswith("replicax") and t not in before]
        if not left or time.monotonic() > deadline:
            return left
        gc.collect()  # an iterator in a reference cycle ends its thread when it is collected
        time.sleep(0.02)


class Finished(NamedTuple):
    """How a program ended."""

    returncode: int
    stdout: str
    stderr: str


# Runs the program as `__main__`, so that its functions can be sent to other processes, and shows where each
# thread stands shortly before the deadline.
_BOOT = """\
import faulthandler, os, sys
faulthandler.enable()
faulthandler.dump_traceback_later(float(sys.argv.pop(1)))
del sys.argv[0]
sys.path[0] = ""
__file__ = sys.argv[0]
exec(compile(open(__file__, encoding="utf-8").read(), __file__, "exec"))
"""


@pytest.fixture(scope="session")
def once(tmp_path_factory, request):
    """`once(name, make)`: what `make` returns, made in one process of pytest-xdist and read by the others."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent

    def made(name: str, make: Callable[[], Any]) -> Any:
        path = folder / name
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_bytes(pickle.dumps(make()))
            return pickle.loads(path.read_bytes())

    return made


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., Finished]:
    """`run_python(code, *, timeout=60, env=None, python=sys.executable, fresh=False)` runs a program as a process.

    Returns its exit status and output. `env` is laid over the environment of the tests; None removes a
    variable; `fresh` starts a new interpreter (see warm_start.py).

    A program that is not done after `timeout` seconds is ended with all its children, and the
    test fails with its output, in which faulthandler shows where its threads stood.
    """
    number = 0

    def run(
        code: str,
        *,
        timeout: float = 60.0,
        env: Mapping[str, str | None] | None = None,
        python: str | os.PathLike[str] = sys.executable,
        fresh: bool = False,
    ) -> Finished:
        nonlocal number
        number += 1
        folder = tmp_path / f"program{number}"
        folder.mkdir()
        program = folder / "program.py"
        program.write_text(textwrap.dedent(code), encoding="utf-8")
        boot = folder.with_suffix(".py")
        boot.write_text(_BOOT, encoding="utf-8")
        changed = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8", **(env or {})}
        arguments = [str(max(timeout - 3.0, timeout * 0.7)), str(program)]
        # Files, not pipes: a grandchild that lives on would keep a pipe open.
        with open(folder / "stdout", "w+b") as stdout, open(folder / "stderr", "w+b") as stderr:
            process = start(
                boot,
                arguments,
                env={name: value for name, value in changed.items() if value is not None},
                cwd=folder,
                stdout=stdout,
                stderr=stderr,
                python=str(python),
                fresh=fresh,
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

    return run


@pytest.fixture
def run_well(run_python: Callable[..., Finished]) -> Callable[..., Finished]:
    """`run_well(code, *, head="", timeout=180, env=None)` runs a program, behind `head`, that is to end well."""

    def run(
        code: str, *, head: str = "", timeout: float = 180.0, env: Mapping[str, str | None] | None = None
    ) -> Finished:
        done = run_python(textwrap.dedent(head) + textwrap.dedent(code), timeout=timeout, env=env)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture
def run_here(tmp_path: Path) -> Callable[..., None]:
    """`run_here(code, *, head="")` runs a program in this process, which is quicker where it cannot do any harm."""

    def run(code: str, *, head: str = "") -> None:
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(head) + textwrap.dedent(code), encoding="utf-8")
        names: dict[str, object] = {"__name__": "program", "__file__": str(program)}
        exec(compile(program.read_text(encoding="utf-8"), str(program), "exec"), names)

    return run


_TENSORFLOW_START = """\
import copy, os, pickle, sys, tempfile
import numpy as np
import replicax.tf as tf
def raises(kind, function, *words):
    try:
        function()
    except kind as error:
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
"""


@pytest.fixture
def run_tf(run_well: Callable[..., Finished]) -> Callable[..., Finished]:
    """`run_tf(code, timeout=120)` runs a program of `replicax.tf`, on two devices, that is to end well.

    The program has `tf`, `np` and `raises(kind, function, *words)`, which asserts that a call raises that error.
    """
    # Compiling takes much of the time, so XLA leaves its slow passes out.
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    env = {"REPLICAX_VIRTUAL_DEVICES": "CPU:2", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}

    def run(code: str, timeout: float = 120.0) -> Finished:
        return run_well(code, head=_TENSORFLOW_START, timeout=timeout, env=env)

    return run


@pytest.fixture(scope="session")
def tensorflow_python() -> str:
    """The path of a Python that has TensorFlow, to compare with; skips where there is none."""
    path = os.environ.get("REPLICAX_TENSORFLOW_PYTHON")
    if not path:
        pytest.skip("REPLICAX_TENSORFLOW_PYTHON does not name a Python that has TensorFlow (`make test` sets one up)")
    if not os.access(path, os.X_OK):
        pytest.fail(f"REPLICAX_TENSORFLOW_PYTHON names {path}, which cannot be run")
    return path
