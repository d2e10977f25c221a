"""One line for each compile of a function that takes long, with the shapes that it is for."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from replicax._base.thread_state import current
from replicax._job import state
from replicax._report.progress import progress

_VARIABLE = "REPLICAX_LOG_COMPILES"
_MOST = 8  # shapes that are listed


def _from_environment() -> float:
    text = os.environ.get(_VARIABLE, "").strip().lower()
    if text in ("off", "none"):
        return math.inf
    try:
        return float(text or 1.0)
    except ValueError:
        raise ValueError(f"{_VARIABLE} is a number of seconds, or 'off'; got {text!r}.") from None


_limit: float | None = None  # seconds; None as long as nobody has asked for it


def log_compiles(seconds: float | None = 1.0) -> None:
    """Says for how long a compile of a function has to take to be told in a line on the standard error stream.

    The line names the function, the shapes and dtypes of its inputs and, where it was traced before, what differs from
    the time before. Only the first worker of a job prints it. `REPLICAX_LOG_COMPILES` in the environment, a number of
    seconds or `off`, says the same.

    Args:
        seconds: 1 by default; 0 for all compiles, None for none.

    Raises:
        ValueError: a number below 0.

    >>> import replicax as rx
    >>> rx.config.log_compiles(None)
    """
    global _limit
    if seconds is not None and not seconds >= 0:
        raise ValueError(f"`seconds` is a number that is not below 0, or None; got {seconds!r}.")
    _limit = math.inf if seconds is None else float(seconds)


class CompileNote(NamedTuple):
    """The parts of the line for a program that is compiled.

    Args:
        traced: how many seconds it took to trace it before.
        inputs: what it is for, such as "float32[8,3]".
        cause: what differs from the program before, a sentence.
    """

    traced: float = 0.0
    inputs: Sequence[str] = ()
    cause: str = ""


class _Compiling:
    """A program that is being compiled: the seconds so far, and what shows it."""

    def __init__(self, name: str):
        self.name, self.seconds, self.shown = name, 0.0, progress(f"compiling {name}")


_COMPILED = "/jax/core/compile/backend_compile_duration"
_EVENTS = {"/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration", _COMPILED}


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    compiling: _Compiling | None = current.compiling
    if compiling is not None and event in _EVENTS:
        compiling.seconds += duration_secs
        if event == _COMPILED:
            compiling.shown.description = f"running {compiling.name} for the first time"


jax.monitoring.register_event_duration_secs_listener(_listen)


def begin(name: str) -> progress:
    """Notes that this thread is about to compile a program, and returns a context that shows it if it takes long."""
    current.compiling = compiling = _Compiling(name)
    return compiling.shown


def end(name: str, note: CompileNote) -> None:
    """Tells of a program that was compiled, if it took long."""
    global _limit
    traced, inputs, cause = note
    compiling, current.compiling = current.compiling, None
    seconds = traced if compiling is None else traced + compiling.seconds
    if _limit is None:
        _limit = _from_environment()
    if seconds < _limit:
        return
    job = state.current()
    if job is not None and job.process_id != 0:
        return
    more = [f"{len(inputs) - _MOST} more"] if len(inputs) > _MOST else []
    listed = ", ".join([*inputs[:_MOST], *more])
    line = f"replicax: compiled {name} in {seconds:.1f} s for ({listed})"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream that is closed, or none
        sys.stderr.write(f"{line}. {cause.strip()}\n" if cause else f"{line}\n")


EACH = " per replica"


def described(shape: Sequence[int], dtype: Any) -> str:
    """Returns the words for an array in the line.

    >>> described((8, 3), "float32")
    'float32[8,3]'
    """
    return f"{dtype}[{','.join(map(str, shape))}]"


def of_value(shape: Sequence[int], dtype: Any, stacked: bool) -> str:
    """Returns the words for an array that has, if `stacked`, the replicas along its first axis.

    >>> of_value((2, 8, 3), "float32", stacked=True)
    'float32[8,3] per replica'
    """
    return described(shape[1:], dtype) + EACH if stacked else described(shape, dtype)
