"""The Python code of a compiled function, and the modes in which it runs: traced, eagerly, or driven from the host."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from replicax._base import array_conversion, jaxprs, nest
from replicax._base.errors import OutOfRangeError
from replicax._base.thread_state import ThreadState, current, entered
from replicax._base.types import Leaf, Tree
from replicax._data import calls
from replicax._tracing import autograph_switch, frames, step_failures
from replicax._tracing.dataset_reads import Abort, given_back

_run_eagerly = False
_rehearses = ThreadState.rehearses


def run_functions_eagerly(run_eagerly: bool) -> None:
    """Makes every `function` run its Python code as it is, without compiling; for debugging.

    >>> import replicax as rx
    >>> rx.config.run_functions_eagerly(True)
    >>> @rx.function
    ... def fn(x):
    ...     print("Python sees", x)
    >>> fn(3)
    Python sees 3
    >>> rx.config.run_functions_eagerly(False)
    """
    global _run_eagerly
    _run_eagerly = bool(run_eagerly)


def functions_run_eagerly() -> bool:
    """Returns whether functions run their Python code here: all of them, or those of one that is rehearsed.

    >>> import replicax as rx
    >>> rx.config.functions_run_eagerly()
    False
    """
    return _run_eagerly or _rehearses.get()


class CreatesVariables(Abort):
    """Ends the tracing of a function that makes a variable: its first call runs eagerly."""


_state_refused: list[str] = []  # why this process has none


def refuse_state(why: str) -> None:
    """Makes the use of the program's state an error in this process, for good: see `check_state`."""
    _state_refused.append(why)


def check_state() -> None:
    """Raises RuntimeError where state is refused: variables, Python functions, counters of random numbers."""
    if _state_refused:
        raise RuntimeError(_state_refused[0])


def note_creation() -> None:
    """Refuses or postpones tracing where a variable is about to be made."""
    check_state()
    if frames.is_tracing():
        if current.no_creation:
            raise ValueError(
                "tf.function only supports singleton tf.Variables created on the first call. Make sure the tf.Variable "
                "is only created once or created outside tf.function. See "
                "https://www.tensorflow.org/guide/function#creating_tfvariables for more information. The same "
                "holds for variables in a `replicax.function`. An Optimizer makes one for its state: make it once, too."
            )
        if frames.levels():
            raise CreatesVariables


def no_creation(refused: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which, if `refused`, a new variable is an error."""
    return entered(no_creation=current.no_creation or refused)


def undo_on_error() -> contextlib.AbstractContextManager[object]:
    """Return a context for the Python code of a function that undoes its assignments if it fails.

    The end of the data is no failure. In an eager replica the context does nothing: `strategy.run` undoes the
    assignments of all replicas.
    """
    if isinstance(frames.frame(), frames.ReplicaFrame):
        return contextlib.nullcontext()
    return step_failures.undo_on_error(StopIteration, OutOfRangeError)


class Running:
    """Python code that is being traced, or runs as it is."""

    def __init__(self, code: PythonCode):
        self.code = code
        self._numbers: collections.Counter[Hashable] = collections.Counter()

    def number(self, what: Hashable) -> int:
        """Returns how often this was asked for the same thing before."""
        self._numbers[what] += 1
        return self._numbers[what] - 1


_running = ThreadState.running


def running() -> Running | None:
    """Return the function whose Python code is being traced, or runs as it is: the innermost of its own accord."""
    innermost: Running | None = _running.get()
    return innermost


class _Entered(contextlib.AbstractContextManager[None]):
    """The context of `PythonCode.entered`: a class, since functions of datasets enter it for each element."""

    def __init__(self, code: PythonCode, inside: bool):
        self._code, self._inside = code, inside

    def __enter__(self) -> None:
        self._token = _running.set((_running.get() if self._inside else None) or Running(self._code))

    def __exit__(self, *error: object) -> None:
        _running.reset(self._token)


class PythonCode:
    """The Python function of a compiled function, and how it runs without a program.

    Attributes:
        function: the Python function.
        autograph: whether it is converted for tensors in its control flow.
        returned: makes the result of a call of what the function returned, but where functions run eagerly.
        runs: the functions by which `strategy.run` compiles replica functions in it (see `compiled_runs`).
        random_numbers: the counters of random numbers that a front end keeps for it.
        hinted: whether the hint of `step_hints` was printed.
    """

    def __init__(self, function: Callable[..., Tree], autograph: bool, returned: Callable[[Tree], Tree] | None = None):
        self.function, self.autograph, self.returned = function, autograph, returned
        self.runs: dict[Hashable, Any] = {}
        self.random_numbers: Any = None
        self.hinted = False

    @property
    def name(self) -> str:
        """The Python function's name, by which programs and steps go."""
        return jaxprs.identifier(self.function)

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The Python function's signature."""
        return inspect.signature(self.function)

    def call(self, args: tuple[Tree, ...], kwargs: dict[str, Tree], converts: bool = True) -> Tree:
        """Calls the Python function; with `converts`, converted for tensors if it was declared so, and else not.

        Raises:
            RuntimeError: it raised StopIteration, and no dataset has ended.
        """
        try:
            if converts and self.autograph:
                return self.result_of(autograph_switch.call(self.function, args, kwargs))
            if converts and current.autograph:
                with entered(autograph=False):
                    return self.result_of(self.function(*args, **kwargs))
            return self.result_of(self.function(*args, **kwargs))
        except StopIteration as error:
            calls.refuse_stop(error, "The compiled function", self.function)
            raise

    def call_eagerly(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        """Call the Python function, which changes nothing if it fails."""
        with undo_on_error():
            return self.call(args, kwargs, converts=False)

    def result_of(self, returned: Tree) -> Tree:
        """Returns the result of a call in which the Python function returned this."""
        return returned if self.returned is None or functions_run_eagerly() else self.returned(returned)

    def entered(self, inside: bool = False) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which this code is `running()`; with `inside`, only if no other is."""
        return _Entered(self, inside)

    def run(self, args: tuple[Tree, ...], kwargs: dict[str, Tree], host: bool) -> Tree:
        """Runs as it is: with `host` each `strategy.run` in it is compiled, otherwise all is eager.

        If it runs eagerly and fails, it changes nothing, as a compiled call.
        """
        try:
            with entered(driven=self if host else None), self.entered():
                return self.call(args, kwargs) if host else self.call_eagerly(args, kwargs)
        except StopIteration as error:  # of a `next(iterator)` in it
            raise calls.ending(OutOfRangeError("End of sequence")) from error

    def rehearse(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> None:
        """Runs eagerly for the variables that are made on the way, and takes back what is assigned."""
        args, kwargs = nest.map_structure(_as_tensor, (args, kwargs))
        numbers = self.random_numbers
        try:
            # A compiled function in it would take over the arrays that are to come back.
            with entered(rehearses=True), step_failures.log_writes() as log, given_back():
                try:
                    self.run(args, kwargs, host=False)
                finally:
                    log.undo()
        finally:
            self.random_numbers = numbers


def _as_tensor(leaf: Leaf) -> Leaf:
    """Returns an array of NumPy as a traced function would see it: with what a front end adds to JAX's arrays."""
    return array_conversion.as_array(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufcV" else leaf
