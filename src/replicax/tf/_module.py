"""`Module`: an object that finds the variables in its attributes."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, TypeVar

from replicax.tf._core import Variable, creators, object_graph, thread_state

_M = TypeVar("_M", bound="Module")
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Module:
    """A base class for objects with variables and other modules in their attributes."""

    def __init__(self, name: str | None = None):
        name = name or re.sub("(?<=[a-z0-9])(?=[A-Z])|(?<=.)(?=[A-Z][a-z])", "_", type(self).__name__).lower()
        if not name.isidentifier():
            raise ValueError(f"{name!r} is not a valid module name. Module names must be valid Python identifiers.")
        self._name = name
        self._name_scope = creators.name_scope("/".join([*thread_state.current.names, name]) + "/")

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        object_graph.attached(value)

    def _tracked(self) -> dict[str, object]:
        return vars(self)

    @property
    def name(self) -> str:
        """The name."""
        return self._name

    @property
    def name_scope(self) -> contextlib.AbstractContextManager[str]:
        """A context in which the names of new variables begin with the module's name."""
        return self._name_scope

    @property
    def variables(self) -> tuple[Variable, ...]:
        """All variables, each once."""
        return _variables(self)

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """The trainable variables."""
        return tuple(v for v in _variables(self) if v.trainable)

    @property
    def non_trainable_variables(self) -> tuple[Variable, ...]:
        """The variables that are not trainable."""
        return tuple(v for v in _variables(self) if not v.trainable)

    @classmethod
    def with_name_scope(cls, method: Callable[Concatenate[_M, _P], _R]) -> Callable[Concatenate[_M, _P], _R]:
        """Returns a method in which the names of new variables begin with the module's name."""

        @functools.wraps(method)
        def named(self: _M, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self.name_scope:
                return method(self, *args, **kwargs)

        return named  # type: ignore[return-value]

    @property
    def submodules(self) -> tuple[Module, ...]:
        """All modules that this one contains, directly or indirectly."""
        return tuple(x for x in _walk(self, {id(self)}) if isinstance(x, Module))


def _variables(module: Module) -> tuple[Variable, ...]:
    return tuple(x for x in _walk(module, {id(module)}) if isinstance(x, Variable))


def _walk(module: Module, seen: set[int]) -> Iterator[Variable | Module]:
    """Yields a module's variables and modules in TensorFlow's order: first its own, then those of its modules."""
    inner = []
    for _, attribute in sorted(vars(module).items()):
        for leaf in _leaves(attribute):
            if id(leaf) not in seen:
                seen.add(id(leaf))
                yield leaf
                if isinstance(leaf, Module):
                    inner.append(leaf)
    for submodule in inner:
        yield from _walk(submodule, seen)


def _leaves(value: object) -> Iterator[Variable | Module]:
    """Yields the variables and modules in dicts, lists and tuples."""
    if isinstance(value, (Variable, Module)):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value) if len({type(key) for key in value}) == 1 else value:
            yield from _leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
