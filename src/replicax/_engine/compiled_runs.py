"""`strategy.run` compiled by itself: which of the functions that were made for it runs a replica function again.

Replica functions are often made anew for each step, as a lambda or an inner function is. So programs are kept for what
a function does: its code, and what it closes over.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable

import numpy as np

from replicax._base.thread_state import current, entered
from replicax._base.types import Tree
from replicax._engine.function import Function, is_function
from replicax._tracing.context import StrategyLike


def run_compiled(
    strategy: StrategyLike, fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
) -> Tree:
    """Runs `strategy.run(fn, ...)` as a `function`, one for all functions of the same code and closure.

    It belongs to `fn` where that is a compiled function, and else to the function that is driven from the host, and
    keeps nothing alive that it knows by its id.
    """
    code = fn._code if is_function(fn) else current.driven
    assert code is not None
    runs = code.runs
    keep: list[object] = []
    key = strategy, code.autograph, closure_key(fn, keep)
    if key not in runs:

        def run(args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
            return strategy.run(current.replica_function, args=args, kwargs=kwargs)

        run.__name__ = getattr(fn, "__name__", "run")
        objects = [weakly(value, lambda _: runs.pop(key, None)) for value in keep]
        runs.setdefault(key, (Function(run, None, code.autograph, compiled_only=True), objects))
    with entered(replica_function=fn.python_function if is_function(fn) else fn):
        return runs[key][0](args, kwargs)


def weakly(value: object, end: Callable[[object], object]) -> object:
    """Returns a reference that calls `end` when its object is gone; where there can be none, the object itself."""
    try:
        return weakref.ref(value, end)
    except TypeError:
        return value


def closure_key(value: object, keep: list[object], inside: tuple[int, ...] = ()) -> Hashable:
    """Returns what a function's program depends on: its code, and what it closes over.

    Objects count by their identity, and are added to `keep`.
    """
    if id(value) in inside:  # a function that closes over itself
        return inside.index(id(value))
    inside = (*inside, id(value))

    def keys(values: Iterable[object]) -> tuple[Hashable, ...]:
        return tuple(closure_key(x, keep, inside) for x in values)

    if is_function(value):
        return (Function, *keys([value.python_function]))
    if isinstance(value, types.FunctionType):
        cells = [_cell(cell) for cell in value.__closure__ or ()]
        defaults = (value.__kwdefaults__ or {}).items()
        return (
            value.__code__,
            keys(cells),
            keys(value.__defaults__ or ()),
            tuple((k, *keys([v])) for k, v in defaults),
        )
    if isinstance(value, types.MethodType):
        return (types.MethodType, keys([value.__func__, value.__self__]))
    if isinstance(value, functools.partial):
        named = tuple((k, *keys([v])) for k, v in value.keywords.items())
        return (functools.partial, keys([value.func]), keys(value.args), named)
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return (type(value), repr(value))
    if isinstance(value, np.generic):
        return (type(value), repr(value))
    key: Hashable = getattr(type(value), "_replicax_key", None)
    if key is not None:  # one is as good as another
        return key
    keep.append(value)
    return (type(value), id(value))


def _cell(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return cell
