"""Undoing assignments to variables outside of any trace, as after a step that fails."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

import jax

from replicax._base.thread_state import ThreadState, entered
from replicax._tracing.state import State

# Held while a compiled program takes variables' arrays and puts new ones in their place, and wherever else arrays that
# are not lent are taken, until they were computed with: meanwhile another thread's program would take them over.
lock = threading.RLock()


class UndoLog:
    """The variables that were written outside of any trace, each with the leaves that it had before.

    A variable without a value, which an earlier step has lost, has no leaves here.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[State, list[jax.Array] | None]] = {}

    @property
    def variables(self) -> list[State]:
        """The variables, in the order in which they were first written."""
        return [variable for variable, _ in self._before.values()]

    def add(self, variable: State) -> None:
        """Record the value of a variable before it is written for the first time."""
        if id(variable) in self._before:
            return
        storage = variable._storage
        self._before[id(variable)] = variable, None if storage.lost is not None else list(storage.read())
        storage.lent = True  # a compiled program must not take over the arrays, which may come back

    def undo(self) -> None:
        """Give the variables their former values; new variables get their initial values."""
        with lock:
            for variable, leaves in self._before.values():
                if leaves is not None:
                    variable._storage.write(leaves)


_logs = ThreadState.undo_logs


@contextlib.contextmanager
def log_writes() -> Iterator[UndoLog]:
    """Return a context that records the variables written in it, also by threads that inherit the context."""
    log = UndoLog()
    with entered(undo_logs=(*_logs.get(), log)):
        yield log


@contextlib.contextmanager
def undo_on_error(*exempt: type[BaseException]) -> Iterator[UndoLog]:
    """Return a context that undoes assignments if an exception leaves it, unless its class is one of `exempt`."""
    with log_writes() as log:
        try:
            yield log
        except exempt:
            raise
        except BaseException:
            log.undo()
            raise


def note(variables: Iterable[State]) -> None:
    """Record variables that are about to be written, before a compiled program takes over their arrays."""
    if logs := _logs.get():
        for variable in variables:
            for log in logs:
                log.add(variable)
