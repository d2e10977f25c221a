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
from typing import Any

import jax
from malt.core import converter
from malt.operators import function_wrappers, py_builtins

from replicax._autograph import operators, rewriting
from replicax._control_flow.traced_block import Undefined, UndefinedReturnValue
from replicax._tracing import autograph_switch

# Libraries whose functions are called as they are: written for JAX, or with no tensors in their control flow.
_LIBRARIES = {
    "replicax", "jax", "jaxlib", "malt", "numpy", "scipy", "ml_dtypes", "keras", "flax", "optax", "orbax", "chex",
    "equinox", "haiku", "jaxtyping", "grain", "einops", "tensorflow", "torch", "sklearn", "matplotlib", "pandas", "PIL",
    "absl", "rich", "tqdm", "pytest", "_pytest", "wrapt",
}  # fmt: skip


class FunctionScope(function_wrappers.FunctionScope):
    """Wraps the body of a converted function."""

    _replicax_key = "function scope"  # each call has one of its own, which does the same

    def __init__(self, function_name: str, scope_name: str, options: Any):
        super().__init__(function_name, scope_name, options)
        self._function_name = function_name

    def ret(self, value: Any, did_return: Any) -> Any:
        """What the function returns."""
        if isinstance(value, UndefinedReturnValue):
            return None
        if not isinstance(operators.truth_of(did_return, "return"), bool):
            raise ValueError(
                f"{where()}{self._function_name} returns a value in one branch on a tensor, but not in the other: the "
                "other branch must also have a return statement."
            )
        return value


def with_function_scope(thunk: Callable[[Any], Any], scope_name: str, options: Any) -> Any:
    """The same for a lambda."""
    with FunctionScope("lambda", scope_name, options) as scope:
        return thunk(scope)


def converted_artifact(function: Any) -> Any:
    """Marks a function as converted already."""
    setattr(function, autograph_switch.MARK, True)
    return function


_BUILTINS: dict[int, Callable[..., Any]] = {
    id(int): operators.int_,
    id(float): operators.float_,
    id(range): operators.range_,
}
_IN_CONTEXT: dict[int, Callable[..., Any]] = {
    id(eval): lambda args, scope: py_builtins.eval_in_original_context(eval, args, scope),
    id(super): lambda args, scope: py_builtins.super_in_original_context(super, args, scope),
    id(globals): lambda args, scope: py_builtins.globals_in_original_context(scope),
    id(locals): lambda args, scope: py_builtins.locals_in_original_context(scope),
}


# Calls.


def converted_call(f: Any, args: tuple, kwargs: dict | None, scope: Any = None, options: Any = None) -> Any:
    """A call in converted code: of `f`, converted if it is the user's own."""
    kwargs = kwargs or {}
    if isinstance(f, functools.partial):
        return converted_call(f.func, (*f.args, *args), {**f.keywords, **kwargs}, scope)
    if id(f) in _IN_CONTEXT:
        return _IN_CONTEXT[id(f)](args, scope)
    if id(f) in _BUILTINS:
        return _BUILTINS[id(f)](*args, **kwargs)
    function, first = _python_function(f)
    users = function is not None and autograph_switch.is_on() and _is_the_users(function)
    rewritten = _rewritten(function) if function is not None and users else None
    if function is None or rewritten is None:
        return f(*args, **kwargs)
    return rewritten(*first, *args, **kwargs)


def _python_function(f: Any) -> tuple[types.FunctionType | None, tuple]:
    """The function that a call of `f` runs and what it is bound to; None where it cannot be converted."""
    if getattr(f, autograph_switch.MARK, None) is True or inspect.isclass(f):
        return None, ()
    first: tuple = ()
    if not isinstance(f, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        first, f = (f,), getattr(type(f), "__call__", None)  # noqa: B004  not whether it is callable
    if isinstance(f, types.MethodType):
        first, f = (*first, f.__self__), f.__func__
    if not isinstance(f, types.FunctionType) or inspect.isgeneratorfunction(f) or inspect.iscoroutinefunction(f):
        return None, ()
    return (None, ()) if getattr(f, autograph_switch.MARK, None) is True else (f, first)


def _is_the_users(function: types.FunctionType) -> bool:
    package = str(function.__globals__.get("__name__", "")).partition(".")[0]
    return package not in _LIBRARIES and (package == "__main__" or package not in sys.stdlib_module_names)


_OPERATORS = types.SimpleNamespace(
    STD=converter.STANDARD_OPTIONS,
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


_OPTIONS = converter.ConversionOptions(recursive=True, optional_features=converter.Feature.ASSERT_STATEMENTS)
_OPERATORS.STD = _OPTIONS
_transpiler = rewriting.Transpiler(_OPERATORS, _OPTIONS)
_reasons: weakref.WeakKeyDictionary[types.CodeType, str] = weakref.WeakKeyDictionary()  # why code is not converted


def _rewritten(function: types.FunctionType) -> Callable[..., Any] | None:
    """The converted function; None where its source is not there, or has something that cannot be rewritten."""
    if function.__code__ in _reasons:
        return None
    try:
        return _transpiler.rewritten(function)
    except Exception as error:
        _reasons[function.__code__] = f"{type(error).__name__}: {error}".strip()
        return None


def reason(error: BaseException) -> str:
    """Which function that the error came through could not be converted, and why; empty where all were."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code in _reasons:
            return f"AutoGraph could not convert {frame.f_code.co_name} ({_reasons[frame.f_code]})."
    return ""


def call(fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Calls `fn` converted."""
    outermost = not autograph_switch.is_on()
    try:
        with autograph_switch.switched(True):
            return converted_call(fn, args, kwargs)
    except jax.errors.ConcretizationTypeError as error:
        if outermost and (why := reason(error)) and why not in getattr(error, "__notes__", ()):
            error.add_note(why)
        raise
    finally:
        operators.forget_negation()


def where() -> str:
    """The line of the user's code that runs, for the beginning of a message."""
    for frame, line in itertools.islice(traceback.walk_stack(sys._getframe(1)), 200):
        if rewriting.is_rewritten(frame.f_code):
            return f"{frame.f_code.co_filename}:{line}: "
    return ""
