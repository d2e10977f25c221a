"""Giving traced functions the names of the user's function and its arguments, for JAX's messages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from replicax._base.types import Tree

# The path of a leaf, as `jax.tree_util` gives it.
Path: TypeAlias = tuple[Any, ...]


class _Text(str):
    """The name of a parameter that may be any text, such as "batch['image']"."""

    def isidentifier(self) -> bool:
        return True


def identifier(function: object) -> str:
    """Return the name that a function has in programs and traces."""
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() else "function"


def named(flat: Callable[..., Tree], function: Callable[..., Tree], paths: Sequence[Path]) -> Callable[..., Tree]:
    """Returns `flat`, which takes arrays alone, with the name and place of `function`, and names of its arguments.

    Args:
        flat: what JAX is to trace.
        function: the user's function that it calls.
        paths: for each parameter of `flat`, where it stands in `(args, kwargs)` of `function`.
    """

    @functools.wraps(function, updated=())
    def traced(*arrays: jax.Array) -> Tree:
        return flat(*arrays)

    parameters = [inspect.Parameter(_Text(name), inspect.Parameter.POSITIONAL_ONLY) for name in _names(function, paths)]
    traced.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return traced


def _names(function: Callable[..., Tree], paths: Sequence[Path]) -> list[str]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")

    def name(path: Path) -> str:
        group, first, *inside = path
        if group.idx == 1:
            root = str(first.key)
        elif first.idx < len(positional):
            root = positional[first.idx]
        else:
            root = f"{rest}[{first.idx - len(positional)}]"
        return root + jax.tree_util.keystr(tuple(inside))

    names = [name(path) for path in paths]
    return [n if names.count(n) == 1 else f"{n}.{names[:i].count(n)}" for i, n in enumerate(names)]
