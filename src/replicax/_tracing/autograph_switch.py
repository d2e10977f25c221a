"""The switch of AutoGraph: whether functions that are called now are converted for tensors in their control flow.

Everything that calls functions of the user imports this module. The converter, which needs the library that rewrites
Python code, stands above; it is plugged in with `set_converter` and imported when a function is first converted.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar, overload

import jax

from replicax._base import doc_pages, errors
from replicax._base.thread_state import current, entered
from replicax._base.types import Tree

_P = ParamSpec("_P")
_R = TypeVar("_R")

MARK = "_replicax_converted"  # on functions that are called as they are, having been converted or not to be


class Converter(Protocol):
    """Converts Python code, so that its `if`, `while` and `for` may stand on tensors."""

    def call(self, fn: Callable[..., _R], args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> _R:
        """Calls `fn` converted."""

    def reason(self, error: BaseException) -> str:
        """Returns which function that the error came through could not be converted, and why; empty where all were."""

    def where(self) -> str:
        """Returns the line of the user's converted code that runs, for the beginning of a message, or an empty text."""


@functools.cache
def available() -> bool:
    """Returns whether the library that rewrites Python code is installed."""
    return importlib.util.find_spec("malt") is not None


_provider: Callable[[], Converter] | None = None
_converter: Converter | None = None  # once a function has been converted


def set_converter(provider: Callable[[], Converter]) -> None:
    """Plugs in the converter. `provider` is called when a function is first converted, and imports it."""
    global _provider
    _provider = provider


def _provided() -> Converter:
    global _converter
    if _converter is None:
        if _provider is None:
            raise errors.not_plugged_in("AutoGraph's converter")
        _converter = _provider()
    return _converter


def where() -> str:
    """Returns the line of converted code that runs, for the beginning of a message; empty where it is not known."""
    return "" if _converter is None else _converter.where()


def call(fn: Callable[..., _R], args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> _R:
    """Call `fn` converted; as it is if the library that rewrites Python code is not installed."""
    if not available():
        with entered(autograph=False):
            return fn(*args, **kwargs)
    return _provided().call(fn, args, kwargs)


def hint(error: Exception) -> str:
    """Returns what may help a function that was not compiled for this error."""
    if not available():
        return f"For `if`, `while` and `for` on arrays to be compiled: {doc_pages.install('autograph')}."
    return _provided().reason(error) or (
        "For one program, take the value from a Python number or a shape, give a `tf.TensorArray` its size, and use "
        "`tf.cond` or `lax.cond` for what AutoGraph does not convert."
    )


_BRANCH = (
    "Python's `if`, `while`, `and`, `or` and `not` need a value, and this one is known only when the compiled program "
    "runs. To compile them, decorate the function with `replicax.function(autograph=True)`, or with `tf.function` of "
    "replicax.tf; or use `jax.lax.cond`, `jax.lax.while_loop` or `jax.numpy.where`."
)
_VALUE = (
    "This value is known only when the compiled program runs. Compute with jax.numpy or tf operations, return it, and "
    "convert it to a number or NumPy array outside of the function. For `range` on tensors, decorate the function with "
    "`replicax.function(autograph=True)`, or use `tf.range` in a `tf.function`. To look at values, run eagerly: "
    "`replicax.config.run_functions_eagerly(True)`."
)
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


LEFT_BEHIND = (
    "A tensor was used outside of the compiled function that computed it, or of the replica function of "
    "`strategy.run`, which had left it on an object or in a list. Return it from that function and use the result. "
    "JAX says:"
)


def advise(error: BaseException) -> None:
    """Add to an error of JAX about a traced value what to do, once."""
    if isinstance(error, jax.errors.UnexpectedTracerError) and not str(error).startswith(LEFT_BEHIND):
        error.args = (f"{LEFT_BEHIND} {error}",)
    if isinstance(error, NEEDS_VALUES):
        text = _BRANCH if isinstance(error, jax.errors.TracerBoolConversionError) and not current.autograph else _VALUE
        if not {_BRANCH, _VALUE} & set(getattr(error, "__notes__", ())):
            error.add_note(text)


def converted(fn: Callable[..., _R]) -> Callable[..., _R]:
    """Returns `fn` for code of replicax that is called from converted code and calls it in turn."""
    if not current.autograph:
        return fn

    @functools.wraps(fn, updated=())
    def call_converted(*args: Tree, **kwargs: Tree) -> _R:
        return call(fn, args, kwargs)

    return call_converted


@overload
def do_not_convert(func: Callable[_P, _R]) -> Callable[_P, _R]: ...
@overload
def do_not_convert(func: None = None) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def do_not_convert(
    func: Callable[_P, _R] | None = None,
) -> Callable[_P, _R] | Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Keep AutoGraph from converting a function and the functions that it calls; a decorator.

    >>> import jax.numpy as jnp, replicax as rx
    >>> @do_not_convert  # tf.autograph.experimental.do_not_convert
    ... def double(x):
    ...     return 2 * x
    >>> float(rx.function(lambda x: double(x), autograph=True)(jnp.ones(())))
    2.0
    """
    if func is None:
        return do_not_convert

    @functools.wraps(func)
    def unconverted(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with entered(autograph=False):
            return func(*args, **kwargs)

    setattr(unconverted, MARK, True)
    return unconverted
