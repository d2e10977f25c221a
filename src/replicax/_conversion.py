"""Whether the Python code that runs now is rewritten for tensors in its control flow; see `_autograph`, which does it.

This much is needed without the library that rewrites, and is imported by everything that calls functions of the user's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator
from typing import Any

MARK = "_replicax_converted"  # on functions that are called as they are, having been converted or not to be


class _Mode(threading.local):
    def __init__(self):
        self.on = False


_mode = _Mode()


def is_on() -> bool:
    """Whether functions called now are to be converted."""
    return _mode.on


@contextlib.contextmanager
def switched(on: bool) -> Iterator[None]:
    """A context in which functions are converted, or are not."""
    before, _mode.on = _mode.on, on
    try:
        yield
    finally:
        _mode.on = before


@functools.cache
def available() -> bool:
    """Whether the library that rewrites Python code is installed."""
    return importlib.util.find_spec("malt") is not None


def call(on: bool, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Calls `fn`, converted where `on` and where it can be, and otherwise as it is."""
    if not on or not available():
        with switched(False):
            return fn(*args, **kwargs)
    from replicax import _autograph  # the library is imported for whom it is needed

    return _autograph.call(fn, args, kwargs)


def hint(error: Exception) -> str:
    """What may help a function that was not compiled for this error."""
    if not available():
        return "For `if`, `while` and `for` on arrays to be compiled, `pip install replicax[autograph]`."
    from replicax import _autograph

    return _autograph.reason(error) or (
        "Use lax.cond, lax.scan and the like, or tf.cond, where AutoGraph does not convert the code."
    )


def converted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` for code of replicax that is called from converted code and calls it in turn."""
    if not _mode.on:
        return fn
    return lambda *args, **kwargs: call(True, fn, args, kwargs)


def do_not_convert(func: Callable[..., Any] | None = None) -> Any:
    """Keeps AutoGraph from converting a function and what it calls; a decorator.

    >>> import jax.numpy as jnp, replicax as rx
    >>> from replicax._conversion import do_not_convert
    >>> @do_not_convert
    ... def double(x):
    ...     return 2 * x
    >>> float(rx.function(lambda x: double(x), autograph=True)(jnp.ones(())))
    2.0
    """
    if func is None:
        return do_not_convert

    @functools.wraps(func)
    def unconverted(*args: Any, **kwargs: Any) -> Any:
        with switched(False):
            return func(*args, **kwargs)

    setattr(unconverted, MARK, True)
    return unconverted
