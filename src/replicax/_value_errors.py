"""Errors for values of replicas that are used as if they were plain tensors or numbers."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from replicax import _errors, _nest

# Set by the contexts: tells whether a replica function of a strategy runs here.
in_replica_function: Callable[[], bool] = bool

_LIBRARIES = ("replicax", "jax", "jaxlib", "numpy")


def not_a_tensor(value: Any) -> ValueError:
    """The error for a PerReplica value in an operation."""
    return ValueError(_captured(value) if in_replica_function() else _errors.NOT_A_TENSOR)


def not_a_number(value: Any, wanted: str) -> TypeError:
    """The error for a PerReplica value in the place of a number; `wanted` says what was to be made."""
    if in_replica_function():
        return TypeError(_captured(value))
    return TypeError(
        f"{wanted} cannot be made of a PerReplica value, which has a component for each replica{_if_equal(value)}. "
        'Combine them, `strategy.reduce("MEAN", value, axis=None)`, or take one of them, '
        "`strategy.experimental_local_results(value)[0]`."
    )


def _captured(value: Any) -> str:
    captures = list(_captures(type(value)))
    # JAX rebuilds the arguments of its functions, and then any captured one may be the value.
    same = [capture for capture in captures if capture[2] is value]
    name, where = "value", "a replica function that did not get it as an argument"
    if captures:
        name, function, _ = (same or captures)[0]
        where = f"the replica function {function!r}, which takes `{name}` from outside"
    return (
        f"A PerReplica value is used in {where}. It has a component for each replica, and a replica function gets its "
        f"own component of what it is passed: pass it in args= of strategy.run, as in run(fn, args=({name},))."
    )


def _captures(kind: type) -> Iterator[tuple[str, str, Any]]:
    """What the functions that run here, the innermost first, took from outside and is or holds values of this kind.

    For each, its name, that of the function, and the value.
    """
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _LIBRARIES:
            for names, scope in ((code.co_freevars, frame.f_locals), (code.co_names, frame.f_globals)):
                for name in names:
                    held = scope.get(name)
                    for leaf in _nest.leaves(held) if isinstance(held, dict | list | tuple) else [held]:
                        if isinstance(leaf, kind):
                            yield name, re.sub("^(ag__|tf__)", "", code.co_name), leaf
        frame = frame.f_back


def _if_equal(value: Any) -> str:
    """That all components here are one number, where they are."""
    try:
        components = [component.item() for component in value.values]
    except Exception:  # they are traced, no scalars, or lost
        return ""
    return f", here {components[0]!r} each" if len(set(components)) == 1 else ""
