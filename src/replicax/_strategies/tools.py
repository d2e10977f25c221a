"""The functions of packages above that methods of `Strategy` call. `_wiring` plugs them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replicax._base import errors

_tools: dict[str, Callable[..., Any]] = {}


def plug_in(method: str, tool: Callable[..., Any]) -> None:
    """Plug in the function that a method of `Strategy` calls with the strategy and its arguments."""
    _tools[method] = tool


def find(method: str) -> Callable[..., Any]:
    """Return the function of a method; raise `RuntimeError` if it is not plugged in."""
    if method not in _tools:
        raise errors.not_plugged_in(f"The function of Strategy.{method}")
    return _tools[method]
