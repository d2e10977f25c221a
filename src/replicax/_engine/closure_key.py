"""The key of a function's program: the function's code, and what it closes over."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from replicax._engine.function import Function, is_function


def closure_key(value: Any, keep: list[object], inside: tuple[int, ...] = ()) -> Hashable:
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
