"""One thread at a time traces a function; others that call it meanwhile wait, and then use what was made.

A thread that would wait for itself, directly or through what other threads wait for, traces on its own: so functions
that call themselves or each other never deadlock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator

_condition = threading.Condition()
_owners: dict[Hashable, int] = {}  # of each function that is being traced, the thread
_waits: dict[int, Hashable] = {}  # what a thread waits for


def _waits_for_itself(function: Hashable, thread: int) -> bool:
    awaited: Hashable | None = function
    while awaited is not None and awaited in _owners:
        if _owners[awaited] == thread:
            return True
        awaited = _waits.get(_owners[awaited])
    return False


@contextlib.contextmanager
def turn(function: Hashable) -> Iterator[bool]:
    """Returns a context in which no other thread traces this function, and whether it had to wait for one."""
    thread, waited = threading.get_ident(), False
    with _condition:
        try:
            while function in _owners and not _waits_for_itself(function, thread):
                _waits[thread], waited = function, True
                _condition.wait()
        finally:
            _waits.pop(thread, None)
        mine = function not in _owners
        if mine:
            _owners[function] = thread
    try:
        yield waited
    finally:
        if mine:
            with _condition:
                del _owners[function]
                _condition.notify_all()
