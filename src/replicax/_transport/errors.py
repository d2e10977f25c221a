"""Errors of calls between tasks, and how the exception of a handler comes out of the caller's `call`."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import pickle
import sys
import traceback
from typing import Any

import numpy as np

from replicax._base.errors import DeadlineExceededError, JobError, UnavailableError


class Unreachable(UnavailableError):
    """The other task is gone or does not answer."""


class TimedOut(DeadlineExceededError):
    """The other task did not answer within the time limit of the call."""


class Refused(JobError):
    """The connection was refused: another secret, another version of replicax, JAX or Python, or another task."""


class NotSent(RuntimeError):
    """An exception of the other task whose type cannot be sent."""


def text_of(error: BaseException) -> str:
    """Returns what an exception says, also of one that cannot say it.

    >>> class Broken(Exception):
    ...     __str__ = None
    >>> text_of(Broken()), text_of(KeyError("k"))
    ('<Broken, whose text cannot be had>', "'k'")
    """
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__}, whose text cannot be had>"


def described(error: BaseException, trusted: bool) -> tuple[dict[str, Any], list[Any]]:
    """Returns a header and arrays that tell the caller of a handler's exception.

    The exception itself is sent (pickled) only where both sides have authenticated each other, which `trusted` says.
    """
    tb = error.__traceback__
    tb = tb.tb_next if tb is not None else None  # without the frame that called the handler
    kind = type(error)
    head = {
        "type": kind.__name__,
        "module": kind.__module__,
        "text": text_of(error),
        "traceback": "".join(traceback.format_exception(kind, error, tb)),
    }
    pickled = _pickled(error) if trusted and isinstance(error, Exception) else []
    return head, [np.frombuffer(data, np.uint8) for data in pickled]


def _pickled(error: Exception) -> list[bytes]:
    """Returns an exception as bytes, for a program that has its class and for one that has not; none if it cannot."""
    found = []
    for library in ("pickle", "cloudpickle"):
        with contextlib.suppress(Exception):
            data: bytes = importlib.import_module(library).dumps(error)
            if type(pickle.loads(data)).__name__ == type(error).__name__:  # else it does not come back from that
                found.append(data)
    return found


def recalled(head: dict[str, Any], arrays: list[Any], where: str, trusted: bool) -> Exception:
    """Returns the exception that `described` has told of, with the other side's traceback as a note."""
    error = _by_name(head)
    for data in reversed(arrays) if trusted else ():
        with contextlib.suppress(Exception):  # such as a class of a module that is not here
            found = pickle.loads(data)
            error = found if isinstance(found, Exception) else error
    error.add_note(f"On {where}:\n{head['traceback']}".rstrip())
    return error


def _by_name(head: dict[str, Any]) -> Exception:
    """Returns an exception of a type that Python or replicax has, or one that names the type."""
    kind = None
    if head["module"] == "builtins":
        kind = getattr(builtins, head["type"], None)
    elif head["module"].startswith("replicax."):
        kind = getattr(sys.modules.get(head["module"]), head["type"], None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(head["text"])
        except TypeError:  # it wants other arguments
            pass
    return NotSent(f"{head['type']}: {head['text']}")
