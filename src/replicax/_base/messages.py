"""Functions, classes and objects as messages name them, without addresses in memory."""

from __future__ import annotations

import functools
import inspect
import os
import types

LONGEST = 200  # characters of a value's `repr` in a message


def shown(value: object) -> str:
    """Returns a value as a message shows it: a function by its name and line, others by a `repr` of limited length."""
    if isinstance(value, functools.partial):
        return f"functools.partial of {shown(value.func)}"
    if isinstance(value, type):
        return f"the class `{_short(value.__qualname__)}`"
    if inspect.isroutine(value) or hasattr(value, "__wrapped__"):
        return _function(value)
    if type(value).__repr__ is object.__repr__:
        return f"an object of type {_short(type(value).__qualname__)}"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def received(value: object) -> str:
    """Returns `shown` for a wrong argument, with the type if the value is shown by its `repr`."""
    text = shown(value)
    named = not repr(value).startswith(text.removesuffix("..."))
    return text if named else f"{text} of type {type(value).__name__}"


def _function(function: object) -> str:
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or type(function).__qualname__
    name = _short(str(name))
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    place = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else ""
    if name == "<lambda>":
        return f"the lambda at {place}" if place else "a lambda"
    return f"`{name}` ({place})" if place else f"`{name}`"


def _short(name: str) -> str:
    """Returns a qualified name without the functions in which it was defined."""
    return name.rpartition("<locals>.")[2]
