"""The background task of this process: an asynchronous save, which goes on while the program trains.

There is at most one. `wait` waits for its end and raises its error; every call that needs its result begins with that.
In a job, all workers start the same tasks in the same order. A task exchanges messages with the other workers
(`_job.exchange`), under separate topics. It runs no collectives: the main thread alone decides their order.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
from collections.abc import Callable

from replicax._base.errors import CheckpointError
from replicax._job import process_exit

THREAD = "replicax-background"
FAILED = 1  # the exit status of a program whose task failed, if no call has raised the error

_lock = threading.Lock()  # held while a task takes the place of the last one
_task: _Task | None = None
_is_over = False  # whether the end of the program has waited for the last task
_has_failed_at_exit = False


class _Task(threading.Thread):
    """A thread that runs a function and keeps its error. A daemon, since `_finish` waits for it at exit.

    Attributes:
        has_ended: set at the end. `wait` does not join the thread: before Python 3.13, a join that is interrupted by
            Ctrl-C marks a running thread as ended.
    """

    def __init__(self, label: str, work: Callable[[], object]):
        super().__init__(name=THREAD, daemon=True)
        self.label = label
        self.error: BaseException | None = None
        self.has_ended = threading.Event()
        self._work: Callable[[], object] | None = work

    def run(self) -> None:
        work, self._work = self._work, None  # the memory is freed at the end of the work
        assert work is not None
        try:
            work()
        except BaseException as error:
            error.add_note(f"This is the error of {self.label}. It is raised by the first call that waited for it.")
            self.error = error
        finally:
            self.has_ended.set()


def is_current_thread() -> bool:
    """Return whether the calling thread runs the background task."""
    return isinstance(threading.current_thread(), _Task)


def start(label: str, work: Callable[[], object]) -> None:
    """Wait for the last background task, raise its error if it failed, and start a new one.

    In the task itself, as in a callback of a save, do the work at once.

    Args:
        label: the name of the task in messages, for example "the asynchronous save of ckpt-1".
        work: the function to be called.

    Raises:
        CheckpointError: the main thread has ended, and with it the time in which threads start.
    """
    global _task
    if is_current_thread():
        work()
        return
    _register_at_exit()
    with _lock:
        wait()
        if _is_over:
            raise CheckpointError(f"The main thread ended before {label}. Let it join the threads that save.")
        task = _Task(label, work)
        task.start()
        _task = task


def wait() -> None:
    """Wait for the background task, and raise its error, once. In the task itself, return at once."""
    task = _task
    if task is None or is_current_thread():
        return
    task.has_ended.wait()
    error, task.error = task.error, None
    if error is not None:
        raise error


@functools.cache
def _register_at_exit() -> None:
    """Have the end of the program wait, however the main thread ends.

    `atexit` would be too late for a task that submits work to an executor: the exit hook of concurrent.futures, which
    runs before, makes that raise. Python runs these hooks last registered first, and documents no way to add one.
    (Python 3.12.0 and 3.12.1 start no threads any more then, so that the task fails, with an error.)
    """
    import concurrent.futures.thread  # noqa: F401  # registers its hook

    getattr(threading, "_register_atexit", atexit.register)(_finish)


def _finish() -> None:
    """Wait at the end of the program, and show an error that no call has raised. The exit status is FAILED then."""
    global _has_failed_at_exit, _is_over
    _is_over = True
    try:
        wait()
    except BaseException as error:
        _has_failed_at_exit = True
        sys.excepthook(type(error), error, error.__traceback__)  # in a job, tells the other workers and ends


@atexit.register  # by one of the first imports of replicax, so that it runs after the program's own exit hooks
def _end_as_failed() -> None:
    if _has_failed_at_exit:
        process_exit.finish(FAILED)
