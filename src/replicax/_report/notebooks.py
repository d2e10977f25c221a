"""Notebooks: whether this process is one's kernel, and what it shows of a value."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_to_html: Callable[[Any], tuple[str, str] | None] | None = None


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook. IPython on a terminal is none.

    >>> is_notebook()
    False
    """
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


def set_to_html(to_html: Callable[[Any], tuple[str, str] | None]) -> None:
    """Plug in the function that returns HTML of a value, and a text in place of the `repr` if that would be costly."""
    global _to_html
    _to_html = to_html


class Displayed:
    """A base class of values that notebooks show as HTML."""

    __slots__ = ()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Return what IPython shows; where there is no text, IPython takes the `repr`."""
        html, text = (_to_html and _to_html(self)) or ("", "")
        return {kind: content for kind, content in (("text/html", html), ("text/plain", text)) if content}

    def _repr_html_(self) -> str | None:
        return self._repr_mimebundle_().get("text/html")
