"""AutoGraph: Python code with `if`, `while` and `for` on tensors, compiled as a whole.

The library diastatic-malt, TensorFlow's AutoGraph without TensorFlow, rewrites the source of a function so that each
statement of control flow is a call of an *operator*, and each call one of `converted_call`, which rewrites the callee.
The operators here do what Python does, unless the condition is a tensor whose value only the program will know: then
the branch or loop becomes part of the program, see `_staging`.
"""

from __future__ import annotations

import functools
import importlib.util  # noqa: F401  malt uses it without importing it
import inspect
import itertools
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Sized
from typing import Any

import jax
import jax.numpy as jnp
from malt.core import converter
from malt.impl import api
from malt.operators import function_wrappers, py_builtins

from replicax import _conversion, _data, _input, _levels, _pulls, _staging
from replicax._staging import DynamicRange, Undefined, UndefinedReturnValue

# Libraries whose functions are called as they are: written for JAX, or with no tensors in their control flow.
_LIBRARIES = {
    "replicax", "jax", "jaxlib", "malt", "numpy", "scipy", "ml_dtypes", "keras", "flax", "optax", "orbax", "chex",
    "equinox", "haiku", "jaxtyping", "grain", "einops", "tensorflow", "torch", "sklearn", "matplotlib", "pandas", "PIL",
    "absl", "rich", "tqdm", "pytest", "_pytest", "wrapt",
}  # fmt: skip


class _Negation(threading.local):
    """The last tensor that `not` gave, and what it is the opposite of."""

    def __init__(self):
        self.last: tuple[Any, Any] = (None, None)


_negation = _Negation()


# Operators.


def _truth(value: Any, what: str) -> Any:
    """A bool, or the scalar tensor whose value is not known yet."""
    try:
        return bool(value)
    except jax.errors.TracerBoolConversionError:
        tensor = jnp.asarray(value)
    except ValueError as error:
        if not isinstance(value, jax.Array):
            raise
        raise ValueError(_not_scalar(what, value)) from error
    if tensor.shape != ():
        raise ValueError(_not_scalar(what, tensor))
    return tensor.astype(bool)


def _not_scalar(what: str, tensor: Any) -> str:
    return (
        f"{_where()}condition of {what} expected to be a scalar, got a tensor of shape {tensor.shape}; to check for "
        "None, use `is not None`"
    )


def if_stmt(
    cond: Any, body: Callable, orelse: Callable, get_state: Callable, set_state: Callable, names: Any, nouts: int
) -> None:
    """An `if` statement. Its variables are what `get_state` gives; the first `nouts` of them are read after it."""
    (result, operand), _negation.last = _negation.last, (None, None)
    truth = _truth(cond, "if statement")
    if isinstance(truth, bool):
        return body() if truth else orelse()
    init = get_state()
    # In a branch, the condition itself is known: after `if not done: ...; done = True` it is known to hold.
    opposite = operand if cond is result and cond is not None else None

    def branch(code: Callable, holds: bool) -> Callable[[], Any]:
        def known(value: Any) -> Any:
            return holds if value is cond else not holds if value is opposite and value is not None else value

        def run() -> Any:
            set_state(tuple(known(value) for value in init))
            code()
            return get_state()[:nouts]

        return run

    try:
        new = _staging.cond(truth, branch(body, True), branch(orelse, False), names[:nouts])
    finally:
        set_state(init)
    set_state((*new, *init[nouts:]))
    return None


def if_exp(cond: Any, if_true: Callable[[], Any], if_false: Callable[[], Any], text: str) -> Any:
    """`a if cond else b`."""
    truth = _truth(cond, "conditional expression")
    if isinstance(truth, bool):
        return if_true() if truth else if_false()
    return _staging.cond(truth, lambda: (if_true(),), lambda: (if_false(),), (text,))[0]


def and_(a: Callable[[], Any], b: Callable[[], Any]) -> Any:
    """`a and b`."""
    first = a()
    truth = _truth(first, "`and`")
    if isinstance(truth, bool):
        return b() if truth else first
    return _staging.cond(truth, lambda: (b(),), lambda: (first,), ("and",))[0]


def or_(a: Callable[[], Any], b: Callable[[], Any]) -> Any:
    """`a or b`."""
    first = a()
    truth = _truth(first, "`or`")
    if isinstance(truth, bool):
        return first if truth else b()
    return _staging.cond(truth, lambda: (first,), lambda: (b(),), ("or",))[0]


def not_(a: Any) -> Any:
    """`not a`."""
    truth = _truth(a, "`not`")
    if isinstance(truth, bool):
        return not truth
    _negation.last = (jnp.logical_not(truth), a)
    return _negation.last[0]


def while_stmt(
    test: Callable[[], Any], body: Callable[[], Any], get_state: Callable, set_state: Callable, names: Any, opts: Any
) -> None:
    """A `while` statement. It goes on as a part of the program as soon as its condition is a tensor."""
    while True:
        truth = _truth(test(), "while statement")
        if not isinstance(truth, bool):
            break
        if not truth:
            return
        body()

    def tested(values: list[Any]) -> Any:
        set_state(tuple(values))
        return _truth(test(), "while statement")

    def repeated(values: list[Any]) -> Any:
        set_state(tuple(values))
        body()
        return get_state()

    init = get_state()
    try:
        new = _staging.while_loop(tested, repeated, init, names)
    finally:
        set_state(init)
    set_state(tuple(new))


def for_stmt(
    iter_: Any,
    extra_test: Callable[[], Any] | None,
    body: Callable[[Any], Any],
    get_state: Callable,
    set_state: Callable,
    names: Any,
    opts: Any,
) -> None:
    """A `for` statement; `extra_test` is false once it was left by `break` or `return`."""
    state = get_state, set_state, names
    if isinstance(iter_, DynamicRange):
        return _for_range(iter_, extra_test, body, *state)
    if isinstance(iter_, jax.Array) and iter_.ndim and _levels.is_tracing():
        return _for_tensor(iter_, extra_test, body, *state)
    if isinstance(iter_, (_data.Dataset, _input.DistributedDataset, _input.DistributedIterator)):
        if _levels.is_tracing():
            _pulls.drive_from_host("A loop over a dataset")
    return _for_python(iter_, extra_test, body, *state)


_END = object()
_MOST_GUARDED = 1000


def _for_python(iter_: Iterable[Any], extra_test: Any, body: Any, get_state: Any, set_state: Any, names: Any) -> None:
    iterator, guarded = iter(iter_), 0
    while True:
        truth = True if extra_test is None else _truth(extra_test(), "for statement")
        if truth is False or (target := next(iterator, _END)) is _END:
            return
        if truth is True:
            body(target)
            continue
        # Left by a `break` that depends on a tensor: the rest is part of the program, as far as Python's own loop goes.
        guarded += 1
        if guarded > _MOST_GUARDED and not isinstance(iter_, Sized):
            raise NotImplementedError(
                f"{_where()}a Python loop with a `break` or `return` that depends on a tensor is unrolled, and this one "
                f"does not end within {_MOST_GUARDED} iterations. Loop over a tensor or a range of one, or use `while`."
            )
        code = functools.partial(body, target)
        if_stmt(truth, code, _nothing, get_state, set_state, names, len(names))


def _nothing() -> None:
    pass


def _for_tensor(array: Any, extra_test: Any, body: Any, get_state: Any, set_state: Any, names: Any) -> None:
    def step(values: list[Any], x: Any) -> Any:
        set_state(tuple(values))
        truth = True if extra_test is None else _truth(extra_test(), "for statement")
        if isinstance(truth, bool):
            if truth:
                body(x)
        else:
            if_stmt(truth, functools.partial(body, x), _nothing, get_state, set_state, names, len(names))
        return get_state()

    if not len(array):
        return
    init = get_state()
    try:
        new = _staging.scan(step, init, array, names)
    finally:
        set_state(init)
    set_state(tuple(new))


def _for_range(numbers: DynamicRange, extra_test: Any, body: Any, get_state: Any, set_state: Any, names: Any) -> None:
    size = numbers.size()

    def tested(values: list[Any]) -> Any:
        set_state(tuple(values[1:]))
        more = values[0] < size
        return more if extra_test is None else jnp.logical_and(more, _truth(extra_test(), "for statement"))

    def repeated(values: list[Any]) -> Any:
        set_state(tuple(values[1:]))
        body((numbers.start + values[0] * numbers.delta).astype(numbers.dtype))
        return (values[0] + 1, *get_state())

    init = get_state()
    try:
        new = _staging.while_loop(tested, repeated, (jnp.zeros((), jnp.int32), *init), ("the iteration", *names))
    finally:
        set_state(init)
    set_state(tuple(new[1:]))


def ld(value: Any) -> Any:
    """Reads a Python variable."""
    return value.read() if isinstance(value, Undefined) else value


def ldu(read: Callable[[], Any], name: str) -> Any:
    """Reads what may not be there, such as `x.y`."""
    try:
        return read()
    except (KeyError, AttributeError, NameError):
        return Undefined(name)


def assert_stmt(holds: Any, message: Callable[[], str]) -> None:
    """`assert`; of a tensor, checked when the program runs."""
    truth = _truth(holds, "assert statement")
    if isinstance(truth, bool):
        assert truth, message()
        return
    text = f"{_where()}{message()}"

    # A program that fails would take the variables' new values with it: the call that runs it raises, after it.
    failures = next((frame.failures for frame in _levels._frames.stack if isinstance(frame, _levels.Level)), None)

    def check(holds: Any) -> None:
        if not holds and failures is None:
            raise AssertionError(text)
        if not holds:
            failures.append(text)

    jax.debug.callback(check, truth)


class FunctionScope(function_wrappers.FunctionScope):
    """Wraps the body of a converted function."""

    def __init__(self, function_name: str, scope_name: str, options: Any):
        super().__init__(function_name, scope_name, options)
        self._function_name = function_name

    def ret(self, value: Any, did_return: Any) -> Any:
        """What the function returns."""
        if isinstance(value, UndefinedReturnValue):
            return None
        if not isinstance(_truth(did_return, "return"), bool):
            raise ValueError(
                f"{_where()}{self._function_name} returns a value in one branch on a tensor, but not in the other: the "
                "other branch must also have a return statement."
            )
        return value


def with_function_scope(thunk: Callable[[Any], Any], scope_name: str, options: Any) -> Any:
    """The same for a lambda."""
    with FunctionScope("lambda", scope_name, options) as scope:
        return thunk(scope)


def converted_artifact(function: Any) -> Any:
    """Marks a function as converted already."""
    setattr(function, _conversion.MARK, True)
    return function


# Built-in functions of tensors.


def _int(*args: Any, **kwargs: Any) -> Any:
    try:
        return int(*args, **kwargs)
    except jax.errors.ConcretizationTypeError:
        return args[0].astype(jnp.int32)


def _float(*args: Any) -> Any:
    try:
        return float(*args)
    except jax.errors.ConcretizationTypeError:
        return args[0].astype(jnp.float32)


def _range(*args: Any) -> Any:
    try:
        return range(*args)
    except jax.errors.TracerIntegerConversionError:
        start, limit = (0, args[0]) if len(args) == 1 else args[:2]
        return DynamicRange(start, limit, *args[2:])


_BUILTINS: dict[int, Callable[..., Any]] = {id(int): _int, id(float): _float, id(range): _range}
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
    if function is None or not _conversion.is_on() or not _is_the_users(function):
        return f(*args, **kwargs)
    rewritten = _rewritten(function)
    return f(*args, **kwargs) if rewritten is None else rewritten(*first, *args, **kwargs)


def _python_function(f: Any) -> tuple[types.FunctionType | None, tuple]:
    """The function that a call of `f` runs and what it is bound to; None where it cannot be converted."""
    if getattr(f, _conversion.MARK, None) is True or inspect.isclass(f):
        return None, ()
    first: tuple = ()
    if not isinstance(f, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        first, f = (f,), getattr(type(f), "__call__", None)
    if isinstance(f, types.MethodType):
        first, f = (*first, f.__self__), f.__func__
    if not isinstance(f, types.FunctionType) or inspect.isgeneratorfunction(f) or inspect.iscoroutinefunction(f):
        return None, ()
    return (None, ()) if getattr(f, _conversion.MARK, None) is True else (f, first)


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
    and_=and_,
    assert_stmt=assert_stmt,
    autograph_artifact=converted_artifact,
    converted_call=converted_call,
    for_stmt=for_stmt,
    if_exp=if_exp,
    if_stmt=if_stmt,
    ld=ld,
    ldu=ldu,
    not_=not_,
    or_=or_,
    while_stmt=while_stmt,
    with_function_scope=with_function_scope,
)


class _Transpiler(api.PyToPy):
    def get_extra_locals(self) -> dict[str, Any]:
        return {"ag__": _OPERATORS}


_OPTIONS = converter.ConversionOptions(recursive=True, optional_features=converter.Feature.ASSERT_STATEMENTS)
_OPERATORS.STD = _OPTIONS
_transpiler = _Transpiler()
_origins: dict[str, dict[Any, Any]] = {}  # of each file of rewritten code, what its lines were made of
_reasons: weakref.WeakKeyDictionary[types.CodeType, str] = weakref.WeakKeyDictionary()  # why code is not converted


def _rewritten(function: types.FunctionType) -> Callable[..., Any] | None:
    """The converted function; None where its source is not there, or has something that cannot be rewritten."""
    if function.__code__ in _reasons:
        return None
    try:
        rewritten, module, source_map = _transpiler.transform(function, converter.ProgramContext(_OPTIONS))
    except Exception as error:
        _reasons[function.__code__] = f"{type(error).__name__}: {error}".strip()
        return None
    _origins[module.__file__] = source_map
    return rewritten


def reason(function: Any) -> str:
    """Why a function is not converted; empty where it is."""
    code = getattr(_python_function(function)[0], "__code__", None)
    return _reasons.get(code, "") if code is not None else ""


def call(fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Calls `fn` converted. An error that leaves it says where in the user's code it was raised."""
    outermost = not _conversion.is_on()
    try:
        with _conversion.switched(True):
            return converted_call(fn, args, kwargs)
    except Exception as error:
        if outermost:
            _add_lines(error)
        raise
    finally:
        _negation.last = (None, None)


def _origin(frame: types.FrameType, line: int) -> Any:
    """What a line of rewritten code, or the nearest one above it, was made of; None for other code."""
    name = frame.f_code.co_filename
    origins = _origins.get(name)
    if origins is None:
        return None
    return next((origins[name, n] for n in range(line, 0, -1) if (name, n) in origins), None)


def _add_lines(error: Exception) -> None:
    lines = ["In user code:"]
    for frame, line in traceback.walk_tb(error.__traceback__):
        origin = _origin(frame, line)
        if origin is None:
            continue
        text = f'  File "{origin.loc.filename}", line {origin.loc.lineno}, in {origin.function_name}\n'
        text += f"    {origin.source_code_line.strip()}"
        if text != lines[-1]:
            lines.append(text)
    if len(lines) > 1 and not any(note.startswith(lines[0]) for note in getattr(error, "__notes__", ())):
        error.add_note("\n".join(lines))


def _where() -> str:
    """The line of the user's code that runs, for the beginning of a message."""
    for frame, line in itertools.islice(traceback.walk_stack(sys._getframe(1)), 200):
        origin = _origin(frame, line)
        if origin is not None:
            return f"{origin.loc.filename}:{origin.loc.lineno}: "
    return ""


_staging.where = _where
