"""Whether the body of a loop may be traced once in place of being run each time.

In converted code (see `_autograph`) each call goes through one place, where a watch can look at it. What is called must
be known to do nothing but compute: functions of JAX and of replicax, and functions of the user's made of such. Whatever
else is called, or a place of a structure that is assigned, may be seen from outside each time.
"""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from replicax._pulls import Abort

_PACKAGES = {"jax", "jaxlib", "replicax", "optax", "math", "operator"}
# Modules of these packages that write files, show something or change settings.
_SHOWING: tuple[str, ...] = (
    "jax._src.profiler", "jax._src.debugging", "jax._src.config", "jaxlib._profiler", "replicax._checkpoint",
    "replicax._files", "replicax._profiling", "replicax.tf._summary", "replicax.tf._gfile", "replicax.tf._config",
    "replicax.tf._profiler", "replicax._data", "replicax._input",
)  # fmt: skip
# Functions of these packages that do not just compute, by name.
_CHANGING = {"timestamp", "set_seed", "set_global_generator", "setitem", "delitem", "iadd", "iconcat"}
_COMPILING = {"run", "call_for_each_replica"}  # methods of strategies that trace the function that they are given
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
            _refuse_value()
        return Counter(self.added + number)

    __radd__ = __add__

    def __sub__(self, number: Any) -> Counter:
        return self + -number if type(number) is int else _refuse_value()


def refuse(why: str) -> Any:
    """Ends the tracing, for this reason."""
    if _watch.on is not None:
        _watch.on.refused = why
    raise Impure


def _refuse_value(*_: Any, **__: Any) -> Any:
    refuse("it asks for the value of an integer that it counts")


_METHODS = "eq ne lt le gt ge bool hash str repr format index int float complex len iter call getitem neg rsub"
_METHODS += " mul rmul mod rmod floordiv rfloordiv truediv rtruediv divmod rdivmod pow rpow"
for _name in _METHODS.split():
    setattr(Counter, f"__{_name}__", _refuse_value)


class Watch:
    """What the code that is traced turned out to call."""

    def __init__(self) -> None:
        self.refused = ""  # why it may do more than compute; empty where it does not
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
            refuse(f"it calls {_named(function)}, which does more than compute")
        depends_on([(function, {"ag__"})], id)  # it is not even called where it takes elements of an iterator, say
        _watch.on.functions.append(function)


def call(f: Any, args: tuple, kwargs: dict, again: Callable[..., Any]) -> Any:
    """Calls what is not converted, if it is known to do nothing but compute. What it calls is its own affair.

    But functions of the user's that it is given, as `jax.tree.map` is, are watched: `again(function, args, kwargs)`
    calls them. What is compiled and what compiles them traces them once in any case.
    """
    if not _is_pure(f) or any(isinstance(x, Counter) for x in jax.tree.leaves((args, kwargs))):
        refuse(f"it calls {_named(f)}, which may do more than compute, or asks for a value")
    calls = types.FunctionType, types.MethodType, types.BuiltinFunctionType, type
    if isinstance(f, calls) and f.__name__ not in _COMPILING:
        args = tuple(_followed(x, again) for x in args)
        kwargs = {name: _followed(x, again) for name, x in kwargs.items()}
    with watching(None):
        return f(*args, **kwargs)


def _named(f: Any) -> str:
    return getattr(f, "__qualname__", None) or type(f).__name__


def _followed(value: Any, again: Callable[..., Any]) -> Any:
    """An argument, its functions replaced by such as are watched."""
    if type(value) in (list, tuple):
        return type(value)(_followed(x, again) for x in value)
    functions = types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial
    if not isinstance(value, functions) or _is_pure(value):
        return value
    watch = _watch.on

    def function(*args: Any, **kwargs: Any) -> Any:
        with watching(watch):
            return again(value, args, kwargs)

    return function if isinstance(value, functools.partial) else functools.wraps(value)(function)


def _is_pure(f: Any) -> bool:
    if getattr(f, "__name__", None) in _CHANGING:
        return False
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


def depends_on(functions: Iterable[tuple[types.FunctionType, set[str]]], key_of: Callable[[Any], Any]) -> Any:
    """A key for what functions read of the Python objects around them; the names of each that do not count stand by it.

    Raises:
        Impure: it cannot be told, as they read too much, or read something else each time, such as an iterator.
    """
    try:
        return _Reading(functions, key_of).key
    except Exception as error:  # of the user's objects, or as they stand too deep in each other
        raise Impure from error


class _Reading:
    def __init__(self, functions: Iterable[tuple[types.FunctionType, set[str]]], key_of: Callable[[Any], Any]):
        self._key_of, self._functions = key_of, list(functions)
        self._names = {name for function, _ in self._functions for name in global_names(function.__code__)}
        self._codes = {function.__code__ for function, _ in self._functions}
        self._left = _MOST_READ
        self._known: dict[int, tuple[Any, Any]] = {}  # the keys of objects by their id, and these, which so stay theirs
        # Getters of properties join the functions on the way.
        self.key = tuple(key for function, apart_from in self._functions for key in self._around(function, apart_from))

    def _around(self, function: types.FunctionType, apart_from: set[str]) -> Iterator[Any]:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if name not in apart_from and not _is_empty(cell):
                yield name, self._of(cell.cell_contents)
        for name in global_names(function.__code__):
            if name in function.__globals__ and name not in apart_from:
                yield name, self._of(function.__globals__[name])
        yield "", self._of([function.__defaults__, function.__kwdefaults__])

    def _of(self, value: Any) -> Any:
        """The value itself, and what may be read of it."""
        self._left -= 1
        if self._left < 0:
            raise Impure
        if isinstance(value, _SIMPLE):
            return self._key_of(value)
        if id(value) not in self._known:
            self._known[id(value)] = ("inside of itself", len(self._known)), value
            self._known[id(value)] = self._looked_at(value), value
        return self._known[id(value)][0]

    def _looked_at(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, np.ndarray):
            if value.nbytes > _MOST_BYTES or value.dtype.hasobject:
                raise Impure
            return kind, value.shape, value.dtype, value.tobytes()
        if isinstance(value, (dict, list, tuple, set, frozenset, collections.deque)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            return kind, tuple((repr(k), self._of(x)) for k, x in items)
        if hasattr(kind, "__next__") and not kind.__module__.startswith("replicax."):
            raise Impure
        if isinstance(value, types.FunctionType) and value.__code__ in self._codes:  # else it is only handed on
            cells = [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
            return value.__code__, self._of([*cells, value.__defaults__, value.__kwdefaults__])
        if isinstance(value, types.MethodType):
            return kind, self._of([value.__func__, value.__self__])
        if isinstance(value, functools.partial):
            return kind, self._of([value.func, value.args, value.keywords])
        key = self._key_of(value)
        if isinstance(value, types.FunctionType):
            return key
        if isinstance(value, types.ModuleType) or inspect.isclass(value):
            if _in_library(value.__name__ if isinstance(value, types.ModuleType) else value.__module__):
                return key
            spaces = [vars(value)] if isinstance(value, types.ModuleType) else map(vars, reversed(value.__mro__))
            found = {name: space[name] for space in spaces for name in self._names & space.keys()}
        elif _in_library(kind.__module__):
            return key
        else:
            found = self._attributes(value)
        return key, tuple((name, self._of(found[name])) for name in sorted(found))

    def _attributes(self, value: Any) -> dict[str, Any]:
        """The attributes of an object of the user's, as far as code with these names can read them."""
        found: dict[str, Any] = {}
        everything = False
        kinds = [kind for kind in type(value).__mro__ if not _in_library(kind.__module__) and kind is not object]
        for space in map(vars, kinds):
            getters = [space[name] for name in _READING_METHODS & space.keys()]
            everything = everything or bool(getters)
            for name in self._names & space.keys():
                member = space[name]
                if isinstance(member, property):
                    getters.append(member.fget)
                elif isinstance(member, types.MemberDescriptorType):  # of `__slots__`
                    found.setdefault(name, getattr(value, name, None))
                else:
                    found.setdefault(name, member)
            for getter in getters:
                self._add(getter)
        own = getattr(value, "__dict__", {})
        return {**found, **{str(name): own[name] for name in (own if everything else self._names & own.keys())}}

    def _add(self, getter: Any) -> None:
        """What runs where an attribute or item is read belongs to the functions."""
        if isinstance(getter, types.FunctionType) and all(getter is not known for known, _ in self._functions):
            if writes(getter.__code__, ()):
                raise Impure
            self._functions.append((getter, set()))
            self._names.update(global_names(getter.__code__))


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


@functools.lru_cache(1024)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in code."""
    inner = [name for c in code.co_consts if isinstance(c, types.CodeType) for name in global_names(c)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_READING_METHODS = {"__getattr__", "__getattribute__", "__getitem__", "__contains__", "__len__", "__bool__"}
_MOST_READ = 10_000  # objects
_MOST_BYTES = 1 << 20  # of an array of numpy


def _in_library(module: str) -> bool:
    return module.partition(".")[0] in {"replicax", "jax", "jaxlib", "numpy", "keras", "flax", "malt"}
