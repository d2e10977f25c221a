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
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lowering
import programs
import pytest
import selection
from cpu_times import CpuTimes
from programs import Finished
from progress import Progress

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
        "JAX was imported before conftest.py, which sets up its devices: start pytest in the folder of the repository."
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", action="store_true", help="print the CPU time of each test file")
    parser.addoption("--progress", action="store_true", help="print the time that is left, and the slowest files")
    selection.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("cpu_times"):
        config.pluginmanager.register(CpuTimes(), "replicax-cpu-times")
    if config.getoption("progress"):
        config.pluginmanager.register(Progress(config), "replicax-progress")
    # What runs in the background of a script or under nohup ignores these signals, and so would what the tests start.
    for number, handler in [(signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)]:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    # Registered by hand, because a fixture of this file would not reach the doctests in `src`.
    config.pluginmanager.register(_Everywhere(), "replicax-everywhere")
    lowering.reuse_contexts()
    if "REPLICAX_SUITE_WORKERS" not in os.environ:
        _keep_programs(config.rootpath / ".jax_cache")


@pytest.hookimpl(tryfirst=True)  # before -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if {"run_python", "run_tf"} & fixtures:
            item.add_marker("processes")
        if "tensorflow_python" in fixtures:
            item.add_marker("tensorflow")
    selection.excuse(items)
    selection.deal(config, items)
    selection.leave_out(config, items)


def pytest_collection_finish() -> None:
    if "replicax.tf" in sys.modules:
        raise pytest.UsageError(
            "A test file imports replicax.tf, which changes settings of JAX and how arrays are shown for all tests of "
            "its process: do it in a program of its own (`run_python`)."
        )
    _freeze()
    gc.set_threshold(100_000, 50, 100)  # tests drop little of what they make, and looking for it takes a twentieth


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


@pytest.fixture(scope="session")
def once(tmp_path_factory, request):
    """`once(name, make)`: what `make` returns or raises, made in one process of pytest-xdist and read by the others."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent

    def made(name: str, make: Callable[[], Any]) -> Any:
        path = folder / name
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                try:
                    path.write_bytes(pickle.dumps((make(), None)))
                except (Exception, pytest.fail.Exception) as error:
                    path.write_bytes(pickle.dumps((None, f"{type(error).__name__}: {error}")))
                    raise
            result, failure = pickle.loads(path.read_bytes())
            if failure is not None:
                pytest.fail(f"{name} could not be made: {failure}", pytrace=False)
            return result

    return made


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., Finished]:
    """`run_python(code, *, timeout=60, env=None, python=sys.executable, fresh=False)` runs a program as a process.

    See `programs.run`.
    """
    number = 0

    def run(code: str, **options: Any) -> Finished:
        nonlocal number
        number += 1
        folder = tmp_path / f"program{number}"
        folder.mkdir()
        program = folder / "program.py"
        program.write_text(textwrap.dedent(code), encoding="utf-8")
        return programs.run(program, folder=folder, **options)

    return run


@pytest.fixture
def run_well(run_python: Callable[..., Finished]) -> Callable[..., Finished]:
    """`run_well(code, *, head="", timeout=180, **options)` runs a program, behind `head`, that must end well."""

    def run(code: str, *, head: str = "", timeout: float = 180.0, **options: Any) -> Finished:
        done = run_python(textwrap.dedent(head) + textwrap.dedent(code), timeout=timeout, **options)
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
    """`run_tf(code, timeout=120, fresh=False)` runs a program of `replicax.tf`, on two devices, that is to end well.

    The program has `tf`, `np` and `raises(kind, function, *words)`, which asserts that a call raises that error.
    """
    env = {"REPLICAX_VIRTUAL_DEVICES": "CPU:2"}

    def run(code: str, timeout: float = 120.0, fresh: bool = False) -> Finished:
        options = {"timeout": timeout, "env": env, "fresh": fresh, "imports": "replicax.tf"}
        return run_well(code, head=_TENSORFLOW_START, **options)

    return run


@pytest.fixture(scope="session")
def tensorflow_python() -> str:
    """The path of a Python that has TensorFlow, to compare with; skips where there is none."""
    path = os.environ.get("REPLICAX_TENSORFLOW_PYTHON")
    if not path:
        pytest.skip("REPLICAX_TENSORFLOW_PYTHON does not name a Python that has TensorFlow (`make check` sets one up)")
    if not os.access(path, os.X_OK):
        pytest.fail(f"REPLICAX_TENSORFLOW_PYTHON names {path}, which cannot be run")
    return path
