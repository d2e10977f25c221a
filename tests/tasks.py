"""Tasks of a cluster for programs of tests (`run_python`): each is a forked process that listens.

A program that uses this runs with `ENVIRONMENT`. gRPC is imported by none but the processes that use it, so that they
can be forked first; whoever forks after a call must start a new interpreter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

SECRET = "0123456789abcdef of the tests"
PYTHONPATH = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
# Stopped tasks are lost after 5 s, and not after 30 s as users have it.
ENVIRONMENT = {"PYTHONPATH": PYTHONPATH, "REPLICAX_JOB_SECRET": SECRET, "REPLICAX_HEARTBEAT_TIMEOUT": "5"}


def forked(work: Callable[[], object], env: Mapping[str, str]) -> int:
    """Returns the number of a process that does some work and ends; `env` is laid over its environment."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's and Python's, about threads
        pid = os.fork()
    if not pid:
        try:
            os.environ.update(env)
            work()
        except BaseException as error:
            print(f"the task failed: {error!r}", flush=True)
        finally:
            os._exit(1)
    return pid


class Task:
    """A process that listens at `address`.

    Args:
        start: starts it, in the process, and returns the address.
        env: its environment, beside that of the tests.
    """

    def __init__(self, start: Callable[[], str], env: Mapping[str, str]):
        reading, writing = os.pipe()

        def listen() -> None:
            os.write(writing, start().encode())
            os.close(writing)
            threading.Event().wait()

        self.pid = forked(listen, env)
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
def started(start: Callable[[], str], env: Mapping[str, str] | None = None) -> Iterator[Task]:
    """Starts a process, which ends with the `with`."""
    task = Task(start, env or {})
    try:
        yield task
    finally:
        task.end()


def task(
    methods: Mapping[str, Callable[[Any], Any]],
    *,
    address: str = "127.0.0.1:0",
    env: Mapping[str, str] | None = None,
    name: str = "",
    port: int | None = 0,
) -> contextlib.AbstractContextManager[Task]:
    """Starts a process with a service of these methods.

    `port` is where it says that it takes lanes: 0 for the truth, None where it says nothing of it.
    """

    def start() -> str:
        from replicax._transport.service import Service

        if port != 0:
            greeting = Service.greeting
            Service.greeting = lambda self: {**greeting(self), "port": port}
        service = Service(address, methods, name=name)
        service.start()
        return service.address

    return started(start, env)


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
