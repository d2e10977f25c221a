"""Steps that fail change nothing: callbacks of compiled programs, and assignments that are undone.

A function of Python that a program calls back (`jax.pure_callback`, `io_callback`, `jax.debug.callback`, and with them
`tf.py_function`, assertions and prints) never fails inside of the program: other devices would wait in the next
collective for the one whose callback raised, and all results would be lost. Its exception is kept, zeros stand for what
it was to return, and the later callbacks of that call are left out. The call raises the exception once the program has
ended. Until then the variables keep their arrays, which such a program does not take over.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import jax
import jax.extend.core as jex
import numpy as np
from jax.typing import ArrayLike

from replicax._base import jax_internals
from replicax._base.thread_state import ThreadState, current, entered
from replicax._base.types import Tree
from replicax._tracing.protocols import State

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Callback = Callable[..., Iterable[ArrayLike]]  # a function of Python that a program calls

# Custom calls of the user's own may fail at run time as well, where nothing of ours can catch it.
_MAY_FAIL = {"ffi_call"}


def in_callback() -> bool:
    """Returns whether this thread runs a function that a compiled program has called back, whose errors are kept."""
    return current.callbacks > 0


def only_shows(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Marks a function to be called back that does nothing but print or write: no value depends on its success."""
    function._replicax_only_shows = True  # type: ignore[attr-defined]
    return function


class Guard:
    """Keeps the errors of the functions that a program calls back.

    `keeps` tells whether the variables keep their arrays until the program has ended.
    """

    def __init__(self) -> None:
        self.keeps = False
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()  # one call at a time: whose callback it is cannot be told

    def around(
        self, function: _Callback, types: Sequence[jax.ShapeDtypeStruct], shows: bool
    ) -> Callable[..., list[np.ndarray]]:
        """Returns a function to be called in place of `function`, which returns arrays of these types."""
        self.keeps = self.keeps or not shows

        def called_back(*args: ArrayLike) -> list[np.ndarray]:
            if not self._errors:
                current.callbacks += 1
                try:
                    return _checked(function(*args), types)
                except BaseException as error:
                    self._errors.append(error)
                finally:
                    current.callbacks -= 1
            return [np.zeros(kind.shape, kind.dtype) for kind in types]

        return only_shows(called_back) if shows else called_back

    def __enter__(self) -> None:
        if not in_callback():
            self._lock.acquire()
            self._errors.clear()

    def __exit__(self, *error: object) -> None:
        if not in_callback():
            self._lock.release()

    def error(self, name: str) -> BaseException | None:
        """Returns the first error of the call that has ended, of the function that goes by this name."""
        if not self._errors:
            return None
        error, self._errors = self._errors[0], []
        if isinstance(error, StopIteration):  # a loop around the step would take it for the end of its data
            stopped = RuntimeError(f"A function that the compiled {name} calls back raised StopIteration.")
            stopped.__cause__ = error
            error = stopped
        kept = ", whose variables keep the values that they had before" if self.keeps else ""
        note = f"It was raised by a function that the compiled {name} calls back{kept}."
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        return error


def _checked(found: Iterable[ArrayLike], types: Sequence[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
    """Returns the result of a function as arrays; raises `ValueError` where they are not of these types."""
    arrays = [np.asarray(value) for value in found] if types else []
    got = [(array.shape, array.dtype) for array in arrays]
    wanted = [(tuple(kind.shape), kind.dtype) for kind in types]
    if got != wanted:
        raise ValueError(f"A function that is called back is to return arrays of {_text(wanted)}, got {_text(got)}.")
    return arrays


def _text(kinds: Iterable[tuple[tuple[int, ...], np.dtype]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in kinds) or "no type"


def guarded(closed: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, Guard | None]:
    """Returns a program whose callbacks do not fail, and the guard that keeps their errors, None if none can fail."""
    guard = Guard()
    closed, names = jax_internals.with_callbacks(closed, guard.around)
    guard.keeps = guard.keeps or not _MAY_FAIL.isdisjoint(names)
    return closed, guard if guard.keeps or "callback" in names else None


def wait_for(outputs: Tree) -> KeyboardInterrupt | None:
    """Waits until the program of these outputs has ended, whose error is raised; an interrupt is returned."""
    interrupt = None
    while True:
        try:
            jax.block_until_ready([x for x in jax.tree.leaves(outputs) if not isinstance(x, jax.core.Tracer)])
            break
        except KeyboardInterrupt as error:
            interrupt = error
    jax_internals.wait_for_effects()
    return interrupt


# Held while a compiled program takes variables' arrays and puts new ones in their place, and wherever else arrays that
# are not lent are taken, until they were computed with: meanwhile another thread's program would take them over.
lock = threading.RLock()

# The ids of variables, and of the shared stores that they stand in, whose new values a program computes that may
# fail: it is waited for without the lock. Other programs of this process that assign them wait for the end of it.
awaited: set[int] = set()
_free = threading.Condition(lock)


def wait_until_free(ids: set[int]) -> None:
    """Waits, with the lock, until no program computes new values of these."""
    while not awaited.isdisjoint(ids):
        _free.wait()


def free(ids: set[int]) -> None:
    """Ends the wait for these."""
    with lock:
        awaited.difference_update(ids)
        _free.notify_all()


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
