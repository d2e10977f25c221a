"""Tasks of a cluster for programs of tests (`run_python`): each is a forked process with a service of its own.

A program that uses this runs with `ENVIRONMENT`. gRPC is imported by none but the processes that use it, so that they
can be forked first; whoever forks after a call must start a new interpreter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

SECRET = "0123456789abcdef of the tests"
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parent), "REPLICAX_JOB_SECRET": SECRET}


class Task:
    """A process with a service. `address` is where it listens."""

    def __init__(self, methods: Mapping[str, Callable[[Any], Any]], address: str, env: Mapping[str, str], name: str):
        from replicax._transport.service import Service

        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX's and Python's, about threads
            self.pid = os.fork()
        if not self.pid:
            try:
                os.environ.update(env)
                service = Service(address, methods, name=name)
                service.start()
                os.write(writing, service.address.encode())
                os.close(writing)
                service.wait()
            except BaseException as error:
                print(f"the task failed: {error!r}", flush=True)
            finally:
                os._exit(1)
        os.close(writing)
        with open(reading) as pipe:
            self.address = pipe.read()
        assert self.address, "the task did not start"

    def send(self, number: int) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kills the process, if it is still there."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


@contextlib.contextmanager
def task(
    methods: Mapping[str, Callable[[Any], Any]],
    *,
    address: str = "127.0.0.1:0",
    env: Mapping[str, str] | None = None,
    name: str = "",
) -> Iterator[Task]:
    """Starts a task, which ends with the `with`."""
    started = Task(methods, address, env or {}, name)
    try:
        yield started
    finally:
        started.end()


def echo(request: Any) -> Any:
    """Answers what was sent."""
    return dict(request.head), request.arrays


def raised(call: Callable[[], Any]) -> Exception:
    """Returns the exception that a call raises."""
    try:
        found = call()
    except Exception as error:
        return error
    raise AssertionError(f"nothing was raised, but {found!r} was returned")
