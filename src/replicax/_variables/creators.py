"""Making variables: creators that see each one, and the scopes of names."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

from replicax._base import jax_internals
from replicax._base.messages import received
from replicax._base.thread_state import current
from replicax._base.types import Tree
from replicax._tracing import context, frames
from replicax._values import PerReplica

_V = TypeVar("_V")
Creator: TypeAlias = Callable[..., Any]  # a user's: takes the next creator and the arguments, returns a variable


@contextlib.contextmanager
def variable_creator_scope(creator: Creator) -> Iterator[None]:
    """Returns a context in which `creator(next_creator, **kwargs)` makes variables, by `next_creator(**kwargs)`.

    >>> import replicax as rx
    >>> def not_trained(next_creator, **kwargs):
    ...     return next_creator(**{**kwargs, "trainable": False})
    >>> with rx.variable_creator_scope(not_trained):
    ...     rx.Variable(1.0).trainable
    False
    """
    current.creators = (*current.creators, (context.get_strategy(), creator))
    try:
        yield
    finally:
        current.creators = current.creators[:-1]


class name_scope:
    """A context in which `name/` stands before the names of new variables; alone, if the name itself ends so.

    >>> import replicax as rx
    >>> with rx.name_scope("layer1"):
    ...     rx.Variable(1.0, name="w").name
    'layer1/w:0'
    """

    def __init__(self, name: str):
        if not isinstance(name, str):
            raise ValueError(f"name for name_scope must be a string, got {received(name)}.")
        self._name = name
        self._outer: list[tuple[str, ...]] = []

    @property
    def name(self) -> str:
        """The name.

        >>> import replicax as rx
        >>> rx.name_scope("layer1").name
        'layer1'
        """
        return self._name

    def __enter__(self) -> str:
        self._outer.append(current.names)
        whole = self._name.endswith("/")
        current.names = tuple(self._name[:-1].split("/")) if whole else (*current.names, self._name)
        return "/".join(current.names) + "/"

    def __exit__(self, *error: object) -> None:
        current.names = self._outer.pop()


@contextlib.contextmanager
def outside(strategy: context.StrategyLike | None = None) -> Iterator[None]:
    """Returns a context outside of all replicas and traces, under the same strategy or the given one."""
    outer = context.get_strategy() if context.has_strategy() else None
    within = context.get_replica_context() is not None
    strategy = strategy or (outer if within else None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax_internals.untraced())
        stack.enter_context(frames.entered(frames.GlobalFrame()))
        if strategy is not None and (within or strategy is not outer):
            stack.enter_context(context.entered(strategy, None))
        yield


def through_creators(make: Callable[..., _V], components: bool = False) -> Callable[..., _V]:
    """Returns `make` wrapped in the creators that see variables, or in those that see their components.

    The latter were entered outside of the current strategy's scope.
    """
    strategy = context.get_strategy()
    for strategy_then, creator in current.creators:
        if (strategy_then is not strategy and context.has_strategy()) is components:
            make = functools.partial(creator, make)
    return make


def create_together(strategy: context.StrategyLike, new: Callable[..., _V], kwargs: dict[str, Tree]) -> _V:
    """Calls `new(**kwargs)`; in a replica function of the strategy once, where all replicas have come to it."""
    replica_context = context.get_replica_context()
    if replica_context is None or replica_context.strategy is not strategy:
        return new(**kwargs)

    def merged(_: context.StrategyLike, makers: PerReplica | functools.partial[_V]) -> _V:
        every = makers.values if isinstance(makers, PerReplica) else (makers,)
        first: functools.partial[_V] = every[0]
        for index, other in enumerate(every):
            name = other.keywords["name"]
            if _without_numbers(name) != _without_numbers(first.keywords["name"]):
                raise RuntimeError(f"Tried to create variable {name} with mismatching name on device {index}")
        return first()

    tag = ("the creation of a variable", id(strategy))
    made: _V = replica_context._merge(merged, (functools.partial(new, **kwargs),), {}, tag)
    return made


def _without_numbers(name: str | None) -> str:
    """Return a name without the numbers that end its parts, as in `layer_1/kernel_2`."""
    return re.sub(r"_\d+(?=/|$)", "", name or "Variable")
