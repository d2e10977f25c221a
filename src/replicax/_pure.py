"""Whether the body of a loop may be traced once in place of being run each time.

In converted code (see `_autograph`) each call goes through one place, where a watch can look at it. What is called must
be known to do nothing but compute: functions of JAX and of replicax, and functions of the user's made of such. Whatever
else is called, or a place of a structure that is assigned, may be seen from outside each time.
"""

from __future__ import annotations

import dis
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax

from replicax._pulls import Abort

_PACKAGES = {"jax", "jaxlib", "replicax", "optax", "math", "operator"}
# Modules of these packages that write files or show something.
_SHOWING: tuple[str, ...] = (
    "jax._src.profiler", "jax._src.debugging", "jaxlib._profiler", "replicax._checkpoint", "replicax._files",
    "replicax.tf._summary", "replicax.tf._gfile", "replicax._data", "replicax._input",
)  # fmt: skip
_CHANGING = {"timestamp"}  # functions of these packages that give another value each time
_BUILTINS = {len, abs, min, max, sum, any, all, zip, enumerate, round, divmod, pow, tuple, list, dict, isinstance}
_IMMUTABLE = str, bytes, tuple, int, float, complex, frozenset
_READING = {"get", "keys", "values", "items", "copy", "index", "count"}  # methods of lists and dicts
_WRITES = {"STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_SUBSCR"}
_UNWATCHED = {"print", "breakpoint", "set_trace"}
_WRITES |= {"BEFORE_ASYNC_WITH", "DELETE_SLICE", "DELETE_GLOBAL", "DELETE_DEREF", "YIELD_VALUE"}


class Impure(Abort):
    """The code does something that may be seen from outside."""


class Counter:
    """Stands for a Python integer, to which others may be added, while the body of a loop is traced."""

    __slots__ = ("added",)

    def __init__(self, added: int = 0):
        self.added = added

    def __add__(self, number: Any) -> Counter:
        if type(number) is not int:
            refuse()
        return Counter(self.added + number)

    __radd__ = __add__

    def __sub__(self, number: Any) -> Counter:
        return self + -number if type(number) is int else refuse()


def refuse(*_: Any, **__: Any) -> Any:
    """Ends the tracing."""
    if _watch.on is not None:
        _watch.on.refused = True
    raise Impure


_METHODS = "eq ne lt le gt ge bool hash str repr format index int float complex len iter call getitem"
for _name in _METHODS.split():
    setattr(Counter, f"__{_name}__", refuse)


class Watch:
    """What the code that is traced turned out to call."""

    def __init__(self) -> None:
        self.refused = False
        self.functions: list[types.FunctionType] = []  # of the user's


class _Watching(threading.local):
    def __init__(self) -> None:
        self.on: Watch | None = None


_watch = _Watching()


class watching:
    """A context in which calls of converted code are watched; with None, in which they are not."""

    def __init__(self, watch: Watch | None):
        self._watch = watch

    def __enter__(self) -> Watch | None:
        self._before, _watch.on = _watch.on, self._watch
        return self._watch

    def __exit__(self, *_: object) -> None:
        _watch.on = self._before


def is_watched() -> bool:
    """Whether calls of converted code have to be told here."""
    return _watch.on is not None


def entering(function: types.FunctionType) -> None:
    """A function of the user's is called, converted."""
    if _watch.on is not None:
        if writes(function.__code__, allowed=()):
            refuse()
        _watch.on.functions.append(function)


def call(f: Any, args: tuple, kwargs: dict) -> Any:
    """Calls what is not converted, if it is known to do nothing but compute. What it calls is its own affair."""
    if not _is_pure(f) or any(isinstance(x, Counter) for x in jax.tree.leaves((args, kwargs))):
        refuse()
    with watching(None):
        return f(*args, **kwargs)


def _is_pure(f: Any) -> bool:
    if inspect.isclass(f):
        return f in _BUILTINS or f.__module__ == "numpy" or issubclass(f, tuple)
    if isinstance(f, types.BuiltinFunctionType):
        owner = f.__self__
        if owner is None or isinstance(owner, types.ModuleType):
            return f in _BUILTINS or _in_package(f.__module__)
        return isinstance(owner, _IMMUTABLE) or (isinstance(owner, (dict, list)) and f.__name__ in _READING)
    if isinstance(f, types.MethodType):
        f = f.__func__
    if isinstance(f, types.FunctionType):
        # Not what wraps another.
        library = _in_package(f.__globals__.get("__name__")) and _in_package(f.__module__)
        return library and f.__name__ not in _CHANGING
    return _in_package(type(f).__module__)


def _in_package(module: Any) -> bool:
    return str(module).partition(".")[0] in _PACKAGES and not str(module).startswith(_SHOWING)


def writes(code: types.CodeType, allowed: Iterable[str]) -> bool:
    """Whether code assigns anything but its own variables and those that are allowed, or calls what cannot be watched.

    The calls of context managers cannot, but for the scope that converted functions have, nor those of some built-ins.
    """
    own, contexts = {*allowed, *code.co_cellvars}, 0
    for instruction in dis.get_instructions(code):
        if instruction.opname in _WRITES or (instruction.opname == "STORE_DEREF" and instruction.argval not in own):
            return True
        contexts += instruction.opname in ("BEFORE_WITH", "LOAD_SPECIAL")
    if contexts > ("FunctionScope" in code.co_names) or not _UNWATCHED.isdisjoint(code.co_names):
        return True
    return any(writes(inner, own) for inner in code.co_consts if isinstance(inner, types.CodeType))


def depends_on(function: types.FunctionType, apart_from: Iterable[str], key_of: Callable[[Any], Any]) -> Any:
    """A key for what a function reads of the Python objects around it, as far as that is simple to tell."""
    found = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        if name not in apart_from:
            try:
                found.append((name, _state_of(cell.cell_contents, key_of)))
            except ValueError:  # not filled
                found.append((name, None))
    names = global_names(function.__code__)
    found += [(n, _state_of(function.__globals__[n], key_of)) for n in names if n in function.__globals__]
    return tuple(found)


@functools.lru_cache(1024)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals that code may read, and of attributes."""
    inner = [name for c in code.co_consts if isinstance(c, types.CodeType) for name in global_names(c)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


_SIMPLE = (bool, int, float, complex, str, bytes, type(None))


def _state_of(value: Any, key_of: Callable[[Any], Any], depth: int = 3) -> Any:
    """The value itself, and the simple ones among its items and attributes where it is the user's own."""
    key = key_of(value)
    if depth == 0 or isinstance(value, _SIMPLE):
        return key
    if isinstance(value, dict):
        items = value
    elif isinstance(value, (list, tuple)):
        items = dict(enumerate(value))
    elif (
        _in_library(type(value).__module__)
        or not hasattr(value, "__dict__")
        or inspect.isclass(value)
        or isinstance(value, (types.ModuleType, types.FunctionType))
    ):
        return key
    else:
        items = vars(value)
    return key, tuple((repr(k), _state_of(x, key_of, depth - 1)) for k, x in list(items.items())[:256])


def _in_library(module: str) -> bool:
    return module.partition(".")[0] in {"replicax", "jax", "jaxlib", "numpy", "keras", "flax", "malt"}
