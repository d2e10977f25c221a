"""Variables that are made after the checkpoint that has their values was restored.

A restored checkpoint *waits* while some of its values have found no object. Variables made meanwhile are late: before
one is first read or written, whoever waits is asked to look for it. That happens in a thread of its own, which stands
in no replica and in no trace, wherever the variable is used first.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import jax

from replicax._base import thread_state
from replicax._base.thread_state import has_64_bit_types


class Waiting(Protocol):
    """A restored checkpoint that has values for objects that are not there yet."""

    def settle(self) -> None:
        """Gives its values to the objects that are there by now."""


class Late(Protocol):
    """A variable that is late where `_late` is not False; None while it is looked for."""

    _late: bool | None


# A variable is late if a checkpoint waits when it is made. They are in the order in which they began to wait, so that
# the values of the last one stay.
waiting: list[weakref.ref[Waiting]] = []
_lock = threading.Lock()


def wait(who: Waiting) -> None:
    """Has late variables looked for from now on, until `who` is gone or done."""
    waiting.append(weakref.ref(who, waiting.remove))


def done(who: Waiting) -> None:
    """Ends the wait: nothing is looked for any more."""
    waiting[:] = [reference for reference in waiting if reference() is not who]


def settle(variable: Late | None = None) -> None:
    """Asks all who wait to look; for the sake of one late variable, or of something that was attached."""
    if thread_state.current.restores:
        return
    with _lock:
        if variable is not None:
            if variable._late is False:  # another replica's thread has just been here
                return
            variable._late = None  # being looked for
        try:
            checkpoints = [reference() for reference in waiting]
            _apart([checkpoint.settle for checkpoint in checkpoints if checkpoint is not None])
        finally:
            if variable is not None and variable._late is None:
                variable._late = True  # not found: it may be attached later


def apart(look: Callable[[], None]) -> None:
    """Calls this in a thread that stands in no replica, scope or trace."""
    with _lock:
        _apart([look])


def _apart(looks: Sequence[Callable[[], None]]) -> None:
    errors: list[BaseException] = []
    wide = has_64_bit_types()  # which a thread may have set for itself

    def run() -> None:
        try:
            with thread_state.entered(restores=True), jax.enable_x64(wide):
                for look in looks:
                    look()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="replicax restores")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
