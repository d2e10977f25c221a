"""Jobs of several processes in tests: workers that run one program, each with its own devices, under one deadline.

In a test:

    def test_a_killed_worker(tmp_path):
        with Workers(tmp_path, 2, '''
            from processes import join, mark, step
            join()
            mark("ready")
            while True:
                step()
        ''') as workers:
            workers.wait_for("ready")            # all have come to mark("ready"); or wait_for("ready", 1)
            workers.send(1, signal.SIGKILL)
            done = workers.join(timeout=20)      # every worker: returncode, stdout, stderr, ended (time.monotonic())
        assert "worker 1" in done[0].stderr

The workers have `TF_CONFIG` (see `config=` for other forms) and short time limits. Whatever happens, none of them, and
nothing they have started, lives on after the `with`; a worker that has ended and left a process behind fails the test.
`wait_for` and `join` fail with the output of all workers when the deadline passes.

The functions below the class are for the programs themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from warm_start import Process, start

_MARKS = "REPLICAX_TEST_MARKS"

# Shorter limits than a user's, and one computing thread for each process where several share few cores.
SHORT = {
    "REPLICAX_HEARTBEAT_TIMEOUT": "3",
    "REPLICAX_START_TIMEOUT": "60",
    "REPLICAX_STEP_TIMEOUT": "60",
}


class Ended(NamedTuple):
    """How a worker ended, and when, as `time.monotonic()`."""

    returncode: int
    stdout: str
    stderr: str
    ended: float


class Workers:
    """Workers under way. To be used in a `with`.

    Args:
        folder: where the program and its output go.
        count: how many workers.
        code: the program of all, or one for each.
        env: environment for all; None removes a variable.
        each: further environment, one for each worker.
        devices: CPU devices of each worker.
        absent: workers that are not started.
        config: makes the cluster's variables of a worker from the addresses and its number; `TF_CONFIG` if not given.
        python: the interpreter.
        imports: what the workers have imported before they start (see warm_start.py).
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        code: str | Sequence[str],
        *,
        env: Mapping[str, str | None] | None = None,
        each: Sequence[Mapping[str, str | None]] | None = None,
        devices: int = 1,
        absent: Sequence[int] = (),
        config: Any = None,
        python: str | os.PathLike[str] = sys.executable,
        imports: str = "replicax",
    ):
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self._folder = folder
        self._codes = [code] * count if isinstance(code, str) else list(code)
        self._env = env or {}
        self._each = each or [{}] * count
        self._devices = devices
        self._python, self._imports = str(python), imports
        self._config = config or tf_config
        self._processes: dict[int, Process] = {}
        self._waits: dict[int, threading.Thread] = {}
        self._ends: dict[int, float] = {}
        self._status: dict[int, int] = {}
        self._marks: dict[int, int] = {}  # the reading end of each worker's pipe
        self._seen: dict[int, list[str]] = {}
        self._stopped: set[int] = set()
        self.started = [index for index in range(count) if index not in absent]

    def __enter__(self) -> Workers:
        self._folder.mkdir(parents=True, exist_ok=True)
        for index, code in enumerate(self._codes):
            if self._codes.index(code) == index:
                self._program(index).write_text(textwrap.dedent(code), encoding="utf-8")
        try:
            for index in self.started:
                self._start(index)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        left = [] if kind else [i for i in self._ends if _group_lives(self._processes[i].pid)]
        self._end()
        assert not left, f"workers {left} have ended and left processes behind\n{self.output()}"

    def _program(self, index: int) -> Path:
        """One file for all workers of one program: they compare it."""
        return self._folder / f"program{self._codes.index(self._codes[index])}.py"

    def start(self, index: int) -> None:
        """Starts a worker that was absent."""
        self._start(index)
        self.started.append(index)

    def _start(self, index: int) -> None:
        reader, writer = os.pipe()
        tests = str(Path(__file__).parent)
        environment: dict[str, str | None] = {
            **{name: value for name, value in os.environ.items() if name != "REPLICAX_VIRTUAL_DEVICES"},
            "PYTHONPATH": os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(self._devices),
            _MARKS: str(writer),
            **SHORT,
            **self._config(self.addresses, index),
            **self._env,
            **self._each[index],
        }
        with open(self._folder / f"out{index}", "wb") as out, open(self._folder / f"err{index}", "wb") as err:
            process = start(
                self._program(index),
                env={name: value for name, value in environment.items() if value is not None},
                cwd=self._folder,
                stdout=out,
                stderr=err,
                pass_fds=[writer],
                python=self._python,
                server=index % 2,
                imports=self._imports,
            )
        os.close(writer)
        self._processes[index], self._marks[index], self._seen[index] = process, reader, []
        self._waits[index] = threading.Thread(target=self._wait, args=(index, process), daemon=True)
        self._waits[index].start()

    def _wait(self, index: int, process: Process) -> None:
        # Not reaped before its group is killed: the system could give its number to a stranger meanwhile.
        self._status[index] = process.ended()
        self._ends[index] = time.monotonic()

    def wait_for(self, mark: str, *which: int, timeout: float = 60.0) -> None:
        """Waits until these workers (all, where none are named) have come to `mark(...)` of that name."""
        deadline = time.monotonic() + timeout
        for index in which or self.started:
            while mark not in self._seen[index]:
                ready, _, _ = select.select([self._marks[index]], [], [], max(0.0, deadline - time.monotonic()))
                read = os.read(self._marks[index], 4096) if ready else b""
                assert read, f"worker {index} did not come to {mark!r}\n{self.output()}"
                self._seen[index] += read.decode().split()

    def send(self, index: int, number: int) -> float:
        """Sends a signal to a worker, and returns when."""
        (self._stopped.add if number == signal.SIGSTOP else self._stopped.discard)(index)
        os.kill(self._processes[index].pid, number)
        return time.monotonic()

    def join(self, timeout: float = 60.0) -> dict[int, Ended]:
        """Waits until all workers but the stopped ones have ended."""
        deadline = time.monotonic() + timeout
        running = [index for index in self.started if index not in self._stopped]
        for index in running:
            self._waits[index].join(max(0.0, deadline - time.monotonic()))
        late = [index for index in running if index not in self._ends]
        assert not late, f"workers {late} have not ended after {timeout:g} s\n{self.output()}"
        return {i: Ended(self._status[i], *self._files(i), self._ends[i]) for i in running}

    def _files(self, index: int) -> tuple[str, str]:
        out, err = (self._folder / f"{name}{index}" for name in ("out", "err"))
        return out.read_text(encoding="utf-8", errors="replace"), err.read_text(encoding="utf-8", errors="replace")

    def output(self) -> str:
        """What all workers have printed so far."""
        texts = []
        for index in self._processes:
            out, err = self._files(index)
            status = self._status.get(index)
            title = f"worker {index}, " + ("which runs" if status is None else f"which ended with status {status}")
            texts.append(f"--- {title}, stdout ---\n{out}\n--- stderr ---\n{err}")
        return "\n".join(texts)

    def _end(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for index, thread in self._waits.items():
            thread.join(10.0)
            self._processes[index].reap()
            os.close(self._marks[index])


def _group_lives(leader: int) -> bool:
    """Whether a process that a worker has started is still there, a moment after the worker's end."""
    deadline = time.monotonic() + 2.0
    while any(_lives_in(stat, leader) for stat in Path("/proc").glob("[0-9]*/stat")):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.02)
    return False


def _lives_in(stat: Path, group: int) -> bool:
    try:
        state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return False
    return int(its_group) == group and state != "Z"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at just now, of those that no connection is given on its own."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(10000, 32768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            if port not in ports:
                ports.append(port)
    return ports


def tf_config(addresses: Sequence[str], index: int) -> dict[str, str]:
    """The `TF_CONFIG` of a worker."""
    config = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}}
    return {"TF_CONFIG": json.dumps(config)}


def told_by(done: Mapping[int, Any]) -> dict[str, list[dict[str, Any]]]:
    """Reads what the workers told in lines of `told` and JSON `[program, name, value]`; each must have ended well.

    Returns:
        For each program a list with a dict for each worker, of its values by their names.
    """
    assert all(worker.returncode == 0 for worker in done.values()), done
    found: dict[str, list[dict[str, Any]]] = {}
    for rank, worker in done.items():
        for line in worker.stdout.splitlines():
            if line.startswith("told "):
                program, name, value = json.loads(line[5:])
                found.setdefault(program, [{} for _ in done])[rank][name] = value
    return found


# For the programs.


def mark(name: str) -> None:
    """Tells the test that the program has come to this point."""
    os.write(int(os.environ[_MARKS]), f"{name}\n".encode())


def join() -> Any:
    """Joins the job of `TF_CONFIG`."""
    from replicax._job import join as _join

    config = json.loads(os.environ["TF_CONFIG"])
    tasks = [(kind, i) for kind, addresses in config["cluster"].items() for i in range(len(addresses))]
    addresses = [address for some in config["cluster"].values() for address in some]
    task = config["task"]
    return _join.start(tasks, addresses, tasks.index((task["type"], task["index"])))


_programs: dict[int, Any] = {}


def step(label: str = "step", size: int = 8) -> Any:
    """A call that sums over all devices of the job: `size` numbers, each the number of devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from replicax._job import state as _state

    if size not in _programs:
        mesh = jax.sharding.Mesh(jax.devices(), ("replica",))
        split = PartitionSpec("replica")
        summed = jax.shard_map(
            lambda x: jax.lax.psum(x, "replica"), mesh=mesh, in_specs=split, out_specs=PartitionSpec()
        )
        ones = jnp.ones((jax.local_device_count() * size,))
        _programs[size] = jax.jit(summed), jax.make_array_from_process_local_data(NamedSharding(mesh, split), ones)
    program, ones = _programs[size]
    call = _state.begin(label)
    output = program(ones)
    if call is not None:
        call.dispatched(output)
    return output
