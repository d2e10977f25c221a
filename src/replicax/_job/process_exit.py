"""The end of a process of a job: its last messages and its report, without ever waiting."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from replicax._base.errors import FailedElsewhere

BECAUSE_OF_ANOTHER = 70  # the exit status of a process that ends because of another one
_REPORTS = "REPLICAX_REPORT_DIR"

# What the errors of collectives say when another process has ended or does not come. JAX raises them as its own type
# or, where a program runs within its dispatch, as ValueError; they begin with the name of a status.
_STATUS = re.compile(r"(UNKNOWN|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|FAILED_PRECONDITION): ")
_OF_ANOTHER = re.compile(
    "gloo|nccl|connection (reset|closed|refused)|broken pipe|socket closed|timed out|unavailable|heartbeat|"
    "coordination",
    re.IGNORECASE,
)


def caused_by_another(error: BaseException) -> bool:
    """Returns whether an exception, or one that it came from, is what JAX raises when another process is gone."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, FailedElsewhere):
            return True
        text = _text(current)
        if _STATUS.match(text) and _OF_ANOTHER.search(text):
            return True
        current = current.__cause__ or current.__context__
    return False


def main_frame() -> FrameType | None:
    """Return the innermost frame of the main thread; None if the thread has ended."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def main_has_ended() -> bool:
    """Returns whether the main program has ended, and Python waits at most for its other threads."""
    frame = main_frame()
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    # `is_alive` alone is not enough: the threads of concurrent.futures are waited for while it still says yes.
    shutdown = frame is not None and frame.f_code.co_name == "_shutdown" and frame.f_globals["__name__"] == "threading"
    return shutdown or not threading.main_thread().is_alive()


def lasting_threads() -> list[threading.Thread]:
    """Returns the threads beside the main one that keep the process alive."""
    return [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread() and t.is_alive()]


def lasting_stacks() -> str:
    """Returns the stacks of the threads that keep the process alive."""
    frames = sys._current_frames()
    stacks = [(thread.name, frames.get(thread.ident or 0)) for thread in lasting_threads()]
    return "".join(
        f"  (it has ended, but thread {name!r} still runs)\n{''.join(traceback.format_stack(frame))}"
        for name, frame in stacks
        if frame is not None
    )


def main_stack() -> str:
    """Returns the main thread's stack or, if it has ended, those of the threads that keep the process alive.

    The text is empty while replicax's hooks end the process: nothing of the program is in the stack then.
    """
    if main_has_ended():
        return lasting_stacks() or "  (it has ended)\n"
    for _ in range(10):
        frame = main_frame()
        if frame is None:
            return "  (it has ended)\n"
        with contextlib.suppress(AttributeError):  # it runs on while its frames are followed, which then end anywhere
            stack = traceback.extract_stack(frame)
            return "" if all(map(_is_of_the_end, stack)) else "".join(stack.format())
    return "  (it runs from one function to the next)\n"


def _is_of_the_end(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame can be one of the hooks that end the process."""
    return frame.filename == threading.__file__ or os.path.dirname(frame.filename) == os.path.dirname(__file__)


def _text(error: BaseException) -> str:
    """Returns an exception's message, even if its own `__str__` raises."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"  # as Python's tracebacks say


def one_line(error: BaseException) -> str:
    """Returns an exception's type and the first line of its message."""
    kind = type(error)
    name = kind.__name__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__name__}"
    text = _text(error).strip().split("\n")[0]
    return f"{name}: {text}" if text else name


def _bounded(function: Callable[[], object], seconds: float = 1.0) -> None:
    """Runs what may block on a lock or a full pipe, for so long at most."""
    try:
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
    except RuntimeError:  # the interpreter ends and starts no threads any more
        return
    thread.join(seconds)


def say(text: str) -> None:
    """Writes lines to the standard error stream, each marked as replicax's."""
    marked = "".join(f"replicax: {line}\n" for line in text.splitlines())

    def write() -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(marked)
            sys.stderr.flush()

    _bounded(write)


def flush() -> None:
    """Writes out what the program has printed."""

    def write() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()

    _bounded(write)


def finish(status: int) -> NoReturn:
    """Ends the process at once, whatever its threads do."""
    flush()
    os._exit(status)


def finish_by_signal(number: int) -> NoReturn:
    """Ends the process as the signal would have, from any thread."""
    flush()
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        library.signal(number, None)  # signal.signal works in the main thread alone
        os.kill(os.getpid(), number)
        time.sleep(1.0)
    os._exit(128 + number)


def write_report(
    process_id: int,
    worker: str,
    kind: str,
    message: str,
    text: str,
    step: tuple[int, str] | None = None,
    caused_by: int | None = None,
) -> None:
    """Leaves a report for whoever has started this process, if it has asked for one.

    A step is so many calls of what has this name.
    """
    report: dict[str, Any] = {
        "time": time.time(),
        "process_id": process_id,
        "worker": worker,
        "kind": kind,
        "message": message.split("\n")[0],
        "traceback": text,
        "step": step and step[0],
        "call": step and step[1],
        "caused_by": caused_by,
    }
    _leave(f"{process_id}.json", report)


def mark_waiting(process_id: int, addresses: Sequence[str]) -> None:
    """Tells whoever has asked for reports that this process waits for the job at these addresses."""
    _leave(f"{process_id}.waits", list(addresses))


def _leave(name: str, content: dict[str, Any] | list[str]) -> None:
    """Writes a file to the folder of reports, if there is one, in one piece."""
    if folder := os.environ.get(_REPORTS):
        with contextlib.suppress(OSError):
            Path(folder).mkdir(parents=True, exist_ok=True)
            new = Path(folder, f"{name}.{os.getpid()}.new")
            new.write_text(json.dumps(content), encoding="utf-8")
            new.replace(Path(folder, name))


def mark_joined(process_id: int) -> None:
    """Tells that it has joined that job. A full disk does not prevent it: no other file is written."""
    if folder := os.environ.get(_REPORTS):
        with contextlib.suppress(OSError):
            Path(folder, f"{process_id}.waits").replace(Path(folder, f"{process_id}.joined"))


class Hooks:
    """Hooks for an exception that ends the main thread, which `failed` gets, and for signals."""

    def __init__(self, failed: Callable[[BaseException], None]):
        self._failed = failed
        self._previous = sys.excepthook
        self._wakeup: int | None = None
        sys.excepthook = self._hook
        _delay_abort()

    def watch_signals(self, descriptor: int) -> None:
        """Has Python write the numbers of signals to a descriptor, unless other code has asked for them.

        Python's own handler of a signal runs once the main thread is back from JAX, which may be never.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            return
        self._wakeup = descriptor
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, on_sigterm)

    def remove(self) -> None:
        """Puts Python's own hook and handlers back."""
        if sys.excepthook == self._hook:
            sys.excepthook = self._previous
        if self._wakeup is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) is on_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def show(self, error: BaseException) -> None:
        """Prints the exception as Python or the program's own hook would."""
        _bounded(lambda: self._previous(type(error), error, error.__traceback__), 5.0)

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if hasattr(sys, "ps1"):  # an interactive session goes on
            self._previous(kind, error, trace)
            return
        self._failed(error.with_traceback(trace))


def _delay_abort() -> None:
    """Delays the abort of a C++ library by some seconds, so that the monitor can say why.

    Gloo aborts at once where processes make calls of different sizes. The handler is the C function `sleep`, called
    with the number of the signal, 6, as its seconds: no Python could run there.
    """
    if faulthandler.is_enabled():  # its handler shows stacks, and there can be only one
        return
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


def on_sigterm(number: int, frame: object) -> None:
    """Does nothing: the monitor thread ends the process, whose main thread may be blocked."""


def uncaught() -> BaseException | None:
    """Returns the exception with which the main program has ended, where a hook of the program's own has shown it."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
