"""`launch`: runs a function in the workers of a job, from a notebook or a script.

The job is that of `replicax launch`, in a process of its own, since a notebook has an event loop and signals of its
own. That process runs below a guard, which ends it and all workers if this process dies. The processes exchange
files in a folder; see `_function_job.py`.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import linecache
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from replicax._base import tracebacks
from replicax._base.errors import JobError
from replicax._base.messages import received
from replicax._job.command_lines import JOB_ID
from replicax._launch import _function_job, _guard
from replicax._report.terminal import has_colours, is_terminal
from replicax._transport.errors import recalled

_Result = TypeVar("_Result")


@tracebacks.boundary
def launch(
    fn: Callable[..., _Result],
    *,
    workers: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    devices_per_worker: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[_Result]:
    """Run a function in several worker processes of one job on this machine, and return the workers' results.

    It is `replicax launch` for notebooks and scripts. Each worker calls `fn`, which makes its own
    `MultiWorkerMirroredStrategy`, datasets and variables. Output is shown here with the worker's number in front. An
    error in one worker ends all of them within seconds and is raised here. Ctrl-C (in a notebook, *Interrupt*) ends
    them too; a second one kills them. If this process dies, the workers end. Needs cloudpickle (the extra `ps`), and
    Linux or macOS.

    Args:
        fn: the function. It may be defined in a notebook's cell or in the script itself, and may use modules and
            global variables; each worker gets a copy of these. JAX arrays arrive as NumPy arrays. Strategies,
            `Variable`s and distributed datasets cannot be sent: create them in `fn`.
        workers: the number of workers.
        args: positional arguments of `fn`, equal for all workers.
        kwargs: keyword arguments of `fn`.
        devices_per_worker: devices of each worker: this machine's GPUs or, where there are none, virtual CPU devices.
            By default the workers share the GPUs evenly, or have one CPU device each; or they have the virtual devices
            of `REPLICAX_VIRTUAL_DEVICES` in the environment.
        environment: variables to set for the workers, in addition to this process's own.

    Returns:
        The results of `fn`, by worker. Arrays come back as NumPy arrays.

    Raises:
        Exception: `fn` raised it in a worker. A note has the worker's traceback. If several workers failed, it is the
            first one's.
        JobError: a worker ended without an exception (it was killed, or called `sys.exit`), or nothing could be
            started.
        TypeError: `fn`, its arguments or a result cannot be pickled, or `fn` is not callable.
        ValueError: `workers` or `devices_per_worker` is less than 1.
        ImportError: cloudpickle is not installed.

    >>> import replicax as rx
    >>> rx.launch(lambda x: 2 * x, workers=2, args=(5,))
    [10, 10]
    """
    if not callable(fn):
        raise TypeError(f"launch takes a function, got {received(fn)}.")
    for name, count in (("workers", workers), ("devices_per_worker", devices_per_worker or 1)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {received(count)}.")
    variables = dict(os.environ)
    if devices_per_worker is not None:
        variables.pop("REPLICAX_VIRTUAL_DEVICES", None)  # of this process
    variables |= environment or {}
    with tempfile.TemporaryDirectory(prefix="replicax-launch-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        call = _function_job.pickle_by_value((fn, tuple(args), dict(kwargs or {})), f"{received(fn)} or its arguments")
        (folder / "call").write_bytes(call)
        options = ["--workers", f"{workers}", "--color", "always" if _has_colours() else "never"]
        options += [] if devices_per_worker is None else ["--devices-per-worker", f"{devices_per_worker}"]
        options += ["--job-id", os.environ.get(JOB_ID) or str(getattr(fn, "__qualname__", "launch"))]
        start = {"path": sys.path, "options": options, "sources": _sources()}
        (folder / "start.json").write_text(json.dumps(start), encoding="utf-8")
        interrupts = _run(folder, variables | {"REPLICAX_REPORT_DIR": name})
        if interrupts:
            raise KeyboardInterrupt("The workers have ended.")
        return _results(folder, workers)


def _has_colours() -> bool:
    return has_colours(is_terminal(sys.stdout))


def _sources() -> dict[str, list[str]]:
    """Return the lines of programs that are in no file, such as cells, for tracebacks and AutoGraph in the workers."""
    entries = [(name, entry) for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None]
    return {name: entry[2] for name, entry in entries}  # type: ignore[misc]


def _run(folder: Path, environment: Mapping[str, str]) -> int:
    """Run the launcher until it has ended, and show its output. Return the number of interrupts meanwhile."""
    control, theirs = socket.socketpair()
    guard = [sys.executable, "-I", "-S", _guard.__file__, f"{theirs.fileno()}"]
    interrupts = 0
    with control, theirs:
        process = subprocess.Popen(
            [*guard, sys.executable, _function_job.__file__, "launch", f"{folder}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C on a terminal reaches the launcher once, from here
        )
        theirs.close()
        output = _Output(process, control)
        try:
            while output.is_open:
                try:
                    output.show_next()
                except KeyboardInterrupt:
                    interrupts += 1
                    with contextlib.suppress(OSError):  # it has just ended
                        control.send(bytes([signal.SIGINT if interrupts == 1 else signal.SIGKILL]))
        finally:
            control.close()  # if it still runs, its guard ends it now
            output.close()
            process.wait()
    return interrupts


class _Output:
    """The launcher's output, which is written to `sys.stdout` and `sys.stderr`: in a notebook they are no files.

    Args:
        process: the guard's, with pipes.
        control: the connection to the guard, which ends last.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket):
        self.is_open = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, None)
        self._pipes = [process.stdout, process.stderr]
        for pipe, name in zip(self._pipes, ("stdout", "stderr")):
            assert pipe is not None
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self._selector.register(pipe, selectors.EVENT_READ, (name, decoder))

    def show_next(self) -> None:
        """Wait for output, and write it; close when the guard has ended."""
        ready = self._selector.select()
        for key, _ in ready:
            if key.data is None and not os.read(key.fd, 4096) and len(ready) == 1:
                self.is_open = False  # and everything has been read
            elif key.data is not None:
                self._show(key)

    def _show(self, key: selectors.SelectorKey) -> None:
        name, decoder = key.data
        data = os.read(key.fd, 1 << 16)
        stream = getattr(sys, name)
        if text := decoder.decode(data, not data):
            stream.write(text)
            stream.flush()
        if not data:
            self._selector.unregister(key.fileobj)

    def close(self) -> None:
        """Close the pipes."""
        self._selector.close()
        for pipe in self._pipes:
            if pipe is not None:
                pipe.close()


def _results(folder: Path, workers: int) -> list[Any]:
    """Return the workers' results, by worker; raise the first error of a worker."""
    errors = [_read(path) for path in folder.glob("*.error")]
    if errors:
        first = min(errors, key=lambda error: error["time"])
        raise recalled(first["head"], first["arrays"], f"worker {first['worker']}", trusted=True)
    try:
        outcome = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    except OSError:
        raise JobError("The process that started the workers was killed, and they have ended with it.") from None
    if outcome["status"]:
        raise JobError(outcome["text"])
    missing = [index for index in range(workers) if not (folder / f"{index}.result").exists()]
    if missing:
        raise JobError(f"worker {missing[0]} ended with exit status 0 before the function returned, as by sys.exit().")
    return [_read(folder / f"{index}.result") for index in range(workers)]


def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes())
