"""`strategy.run` compiled by itself: which of the functions that were made for it runs a replica function again.

Replica functions are often made anew for each step, as a lambda or an inner function is. So programs are kept for what
a function does: its code, and what it closes over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from replicax._base.types import Tree
from replicax._engine.closure_key import closure_key
from replicax._engine.function import Function, is_function
from replicax._engine.modes import of_thread
from replicax._tracing.context import StrategyLike


def run_compiled(
    strategy: StrategyLike, fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
) -> Tree:
    """Runs `strategy.run(fn, ...)` as a `function`, one for all functions of the same code and closure.

    It belongs to `fn` where that is a compiled function, and else to the function that is driven from the host, and
    keeps nothing alive that it knows by its id.
    """
    code = fn._code if is_function(fn) else of_thread.driven
    assert code is not None
    runs = code.runs
    keep: list[object] = []
    autograph = fn._code.autograph if is_function(fn) else of_thread.host_driven and of_thread.host_converts
    key = strategy, autograph, closure_key(fn, keep)
    if key not in runs:

        def run(args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
            return strategy.run(of_thread.running, args=args, kwargs=kwargs)

        run.__name__ = getattr(fn, "__name__", "run")
        objects = [weakly(value, lambda _: runs.pop(key, None)) for value in keep]
        runs.setdefault(key, (Function(run, None, autograph, compiled_only=True), objects))
    before, of_thread.running = of_thread.running, fn.python_function if is_function(fn) else fn
    try:
        return runs[key][0](args, kwargs)
    finally:
        of_thread.running = before


def weakly(value: object, end: Callable[[object], object]) -> object:
    """Returns a reference that calls `end` when its object is gone; where there can be none, the object itself."""
    try:
        return weakref.ref(value, end)
    except TypeError:
        return value
