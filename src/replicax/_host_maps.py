"""What functions of `map` compute, where that is simple: the host does it by itself (see `_data.arithmetic`).

Of a compiled function its program tells. A Python function is traced, and that counts only if it does nothing but
compute (see `_pure`), and as long as all that it reads of the Python objects around it stays as it was.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from replicax import _conversion, _function, _pure
from replicax._arguments import Call
from replicax._data import arithmetic
from replicax._data.arithmetic import Computed
from replicax._pulls import Abort
from replicax._pure import Impure

_LIBRARIES = {"jax", "jaxlib", "numpy", "ml_dtypes", "replicax", "math", "operator", "builtins"}
_CONSTANT = bool, int, float, complex, str, bytes, type(None), np.generic, np.dtype


class _Result:
    """Stands for a result of a program, by its place among them."""

    is_fully_addressable = True

    def __init__(self, place: int):
        self.place = place


def computed(function: Any, *arguments: Any) -> Computed | None:
    """What `function` computes of such arguments; None where that is not known, or more than a matter of the host."""
    if not _function.short_steps_join() or _function.functions_run_eagerly():
        return None
    call = Call(arguments, {})
    if call.statics or len(call.dynamic) != len(jax.tree.leaves(arguments)):
        return None
    program, reads = None, None
    if isinstance(function, _function.Function):
        program = function.program_of(call)
    elif type(function) is types.FunctionType and _conversion.available():
        program, reads = _traced(function, call, arguments)
    if program is None or program.pulls or program.level.variables or program.jaxpr.consts:
        return None
    if not program.results.stackable or any(value is not None for value in program.results.values):
        return None  # more than plain arrays
    results = program.results.rebuilt([_Result(place) for place in range(len(program.jaxpr.out_avals))])
    results = tuple(results) if isinstance(results, list) else results
    leaves, structure = jax.tree.flatten(results, is_leaf=lambda value: isinstance(value, list))
    if not all(isinstance(leaf, _Result) for leaf in leaves):
        return None

    def holds() -> bool:
        return not _function.functions_run_eagerly() and (reads is None or reads.hold())

    return Computed(program.jaxpr, structure, [leaf.place for leaf in leaves], holds)


def _traced(function: Any, call: Call, arguments: tuple[Any, ...]) -> tuple[Any, _Reads | None]:
    """The program of a function that does nothing but compute, and what it reads; None where it may do more."""
    try:
        watch, other = _pure.Watch(), _pure.Watch()
        program, again = (_program(function, call, arguments, each) for each in (watch, other))
        if watch.refused or other.refused or str(program.jaxpr) != str(again.jaxpr):  # such as the time of day
            return None, None
        return program, _Reads([function, *watch.functions])
    except (Exception, Abort):  # what is wrong comes up where the function runs as it is
        return None, None


def _program(function: Any, call: Call, arguments: tuple[Any, ...], watch: _pure.Watch) -> Any:
    with _pure.watching(watch):
        return _function.Function(function, None, autograph=True, compiled_only=True)._trace(call, arguments, {}, [])[0]


class _Reads:
    """What functions read of the Python objects around them: plain values, and what libraries export.

    Raises:
        Impure: it is something else, which may change unnoticed.
    """

    def __init__(self, functions: Sequence[types.FunctionType]):
        # Functions that stand in converted code are made anew in each call, and read what the one around them does.
        self._functions = [f for f in functions if "ag__" not in (*f.__code__.co_freevars, *f.__code__.co_names)]
        self._values = self._now()

    def hold(self) -> bool:
        """Whether all of it is as it was."""
        try:
            return self._values == self._now()
        except Impure:
            return False

    def _now(self) -> Any:
        return _pure.depends_on([(function, set()) for function in self._functions], self._key)

    def _key(self, value: Any) -> Any:
        if isinstance(value, _CONSTANT):
            return type(value), repr(value)
        name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", "")
        library = str(name).partition(".")[0] in _LIBRARIES and not isinstance(value, _function.Function)
        if library and (callable(value) or isinstance(value, types.ModuleType)):
            return id(value)
        raise Impure


arithmetic.computed = computed
