"""AutoGraph: Python code with `if`, `while` and `for` on tensors, compiled as a whole.

The library diastatic-malt, TensorFlow's AutoGraph without TensorFlow, rewrites the source of a function so that each
statement of control flow is a call of an *operator*, and each call one of `converted_call`, which rewrites the callee.
The operators are in `_autograph.operators`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import traceback
import types
import weakref
from collections.abc import Callable
from typing import TypeVar

import jax
from malt.core import converter
from malt.operators import function_wrappers, py_builtins

from replicax._autograph import operators, rewriting
from replicax._base import thread_state
from replicax._base.types import Tree
from replicax._control_flow.traced_block import Undefined, UndefinedReturnValue
from replicax._tracing import autograph_switch

_F = TypeVar("_F")

# Libraries whose functions are called as they are: written for JAX, or with no tensors in their control flow.
_LIBRARIES = {
    "replicax", "jax", "jaxlib", "malt", "numpy", "scipy", "ml_dtypes", "keras", "flax", "optax", "orbax", "chex",
    "equinox", "haiku", "jaxtyping", "grain", "einops", "tensorflow", "torch", "sklearn", "matplotlib", "pandas", "PIL",
    "absl", "rich", "tqdm", "pytest", "_pytest", "wrapt",
}  # fmt: skip


class FunctionScope(function_wrappers.FunctionScope):  # type: ignore[misc]  # malt may be missing
    """Wraps the body of a converted function."""

    _replicax_key = "function scope"  # each call has one of its own, which does the same

    def __init__(self, function_name: str, scope_name: str, options: converter.ConversionOptions):
        super().__init__(function_name, scope_name, options)
        self._function_name = function_name

    def ret(self, value: Tree, did_return: object) -> Tree:
        """Returns the value that the function returns."""
        if isinstance(value, UndefinedReturnValue):
            return None
        if not isinstance(operators.truth_of(did_return, "return"), bool):
            raise ValueError(
                f"{where()}{self._function_name} returns a value in one branch on a tensor, but not in the other: the "
                "other branch must also have a return statement."
            )
        return value


def with_function_scope(
    thunk: Callable[[FunctionScope], Tree], scope_name: str, options: converter.ConversionOptions
) -> Tree:
    """Wraps the body of a converted lambda."""
    with FunctionScope("lambda", scope_name, options) as scope:
        return thunk(scope)


def converted_artifact(function: _F) -> _F:
    """Marks a function as converted already."""
    setattr(function, autograph_switch.MARK, True)
    return function


_BUILTINS: dict[int, Callable[..., Tree]] = {
    id(int): operators.int_,
    id(float): operators.float_,
    id(range): operators.range_,
}
_IN_CONTEXT: dict[int, Callable[..., Tree]] = {
    id(eval): lambda args, scope: py_builtins.eval_in_original_context(eval, args, scope),
    id(super): lambda args, scope: py_builtins.super_in_original_context(super, args, scope),
    id(globals): lambda args, scope: py_builtins.globals_in_original_context(scope),
    id(locals): lambda args, scope: py_builtins.locals_in_original_context(scope),
}


# Calls.


def converted_call(
    f: Callable[..., Tree],
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree] | None,
    scope: FunctionScope | None = None,
    options: converter.ConversionOptions | None = None,
) -> Tree:
    """Calls `f` from converted code; `f` is converted too if it is the user's own."""
    kwargs = kwargs or {}
    if isinstance(f, functools.partial):
        return converted_call(f.func, (*f.args, *args), {**f.keywords, **kwargs}, scope)
    if id(f) in _IN_CONTEXT:
        return _IN_CONTEXT[id(f)](args, scope)
    if id(f) in _BUILTINS:
        return _BUILTINS[id(f)](*args, **kwargs)
    function, first = _python_function(f)
    users = function is not None and thread_state.current.autograph and _is_user_code(function)
    rewritten = _rewritten(function) if function is not None and users else None
    if function is None or rewritten is None:
        return f(*args, **kwargs)
    return rewritten(*first, *args, **kwargs)


def _python_function(f: object) -> tuple[types.FunctionType | None, tuple[object, ...]]:
    """Returns the function that a call of `f` runs and its bound arguments; None where it cannot be converted."""
    if getattr(f, autograph_switch.MARK, None) is True or inspect.isclass(f):
        return None, ()
    first: tuple[object, ...] = ()
    if not isinstance(f, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        first, f = (f,), getattr(type(f), "__call__", None)  # noqa: B004  not whether it is callable
    if isinstance(f, types.MethodType):
        first, f = (*first, f.__self__), f.__func__
    if not isinstance(f, types.FunctionType) or inspect.isgeneratorfunction(f) or inspect.iscoroutinefunction(f):
        return None, ()
    return (None, ()) if getattr(f, autograph_switch.MARK, None) is True else (f, first)


def _is_user_code(function: types.FunctionType) -> bool:
    package = str(function.__globals__.get("__name__", "")).partition(".")[0]
    return package not in _LIBRARIES and (package == "__main__" or package not in sys.stdlib_module_names)


_OPTIONS = converter.ConversionOptions(recursive=True, optional_features=converter.Feature.ASSERT_STATEMENTS)
_OPERATORS = types.SimpleNamespace(
    STD=_OPTIONS,
    ConversionOptions=converter.ConversionOptions,
    Feature=converter.Feature,
    FunctionScope=FunctionScope,
    Undefined=Undefined,
    UndefinedReturnValue=UndefinedReturnValue,
    and_=operators.and_,
    assert_stmt=operators.assert_stmt,
    autograph_artifact=converted_artifact,
    converted_call=converted_call,
    for_stmt=operators.for_stmt,
    if_exp=operators.if_exp,
    if_stmt=operators.if_stmt,
    ld=operators.ld,
    ldu=operators.ldu,
    not_=operators.not_,
    or_=operators.or_,
    while_stmt=operators.while_stmt,
    with_function_scope=with_function_scope,
)


_transpiler = rewriting.Transpiler(_OPERATORS, _OPTIONS)
_reasons: weakref.WeakKeyDictionary[types.CodeType, str] = weakref.WeakKeyDictionary()  # why code is not converted


def _rewritten(function: types.FunctionType) -> types.FunctionType | None:
    """Returns the converted function; None where its source is missing, or has something that cannot be rewritten."""
    if function.__code__ in _reasons:
        return None
    try:
        return _transpiler.rewritten(function)
    except Exception as error:
        _reasons[function.__code__] = f"{type(error).__name__}: {error}".strip()
        return None


def reason(error: BaseException) -> str:
    """Names the function on the error's traceback that could not be converted, and why; empty if all were."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code in _reasons:
            return f"AutoGraph could not convert {frame.f_code.co_name} ({_reasons[frame.f_code]})."
    return ""


def call(fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
    """Calls `fn` converted."""
    outermost = not thread_state.current.autograph
    try:
        with thread_state.entered(autograph=True):
            return converted_call(fn, args, kwargs)
    except jax.errors.ConcretizationTypeError as error:
        if outermost and (why := reason(error)) and why not in getattr(error, "__notes__", ()):
            error.add_note(why)
        raise
    finally:
        operators.forget_negation()


def where() -> str:
    """Returns the file and line of the user's code that runs, for the beginning of a message."""
    for frame, line in itertools.islice(traceback.walk_stack(sys._getframe(1)), 200):
        if rewriting.is_rewritten(frame.f_code):
            return f"{frame.f_code.co_filename}:{line}: "
    return ""
