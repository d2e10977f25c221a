"""`tf.debugging`: assertions.

Ranks, shapes and dtypes are checked while a function is traced. Values are checked immediately in eager code. In
compiled code they are checked while the program runs, and the call of the `tf.function` raises the error. If a function
is compiled by `jax.jit` alone, a failure is written to standard error, and an `InvalidArgumentError` is raised when the
program next reads a tensor with `numpy()` or evaluates an assertion.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from replicax.tf._core import InvalidArgumentError, PerReplica, as_dtype, jax_internals, step_failures
from replicax.tf._host import jnp
from replicax.tf._op_tables import pair
from replicax.tf._operations import on_values, operation
from replicax.tf._ops import convert_to_tensor, is_tensor, known
from replicax.tf._types import DTypeLike, TensorLike

_failures: list[str] = []
_has_traced: list[bool] = []


def raise_failures() -> None:
    """Raises `InvalidArgumentError` if an assertion in compiled code has failed since the last call."""
    if _has_traced:
        jax_internals.wait_for_effects()
    if _failures:
        message = _failures[0]
        _failures.clear()
        raise InvalidArgumentError(message)


def check(holds: jax.Array, describe: Callable[..., str], *values: jax.Array | np.ndarray) -> None:
    """Raises `InvalidArgumentError` unless `holds`; `describe` makes the message from the values as numpy arrays."""
    raise_failures()
    if not any(isinstance(x, jax.core.Tracer) for x in (holds, *values)):
        if not bool(holds):
            raise InvalidArgumentError(describe(*(np.asarray(x) for x in values)))
        return

    def report(holds: np.ndarray, *values: np.ndarray) -> None:
        if not bool(holds):
            message = describe(*(np.asarray(x) for x in values))
            if step_failures.in_callback():  # the call of the program raises it
                raise InvalidArgumentError(message)
            sys.stderr.write(f"Assertion failed in compiled code: {message}\n")
            _failures.append(message)

    _has_traced[:] = [True]
    jax.debug.callback(report, holds, *values)


def _with_message(message: object, text: str) -> str:
    return f"{message} {text}" if message else text


def _few(array: np.ndarray, summarize: int | None) -> str:
    flat = np.asarray(array).reshape(-1)
    count = 3 if summarize is None else len(flat) if summarize < 0 else summarize
    return f"{flat[:count].tolist()}{'...' if len(flat) > count else ''}"


def Assert(
    condition: TensorLike, data: Iterable[TensorLike], summarize: int | None = None, name: str | None = None
) -> None:
    """Raises `InvalidArgumentError` with the data if the condition is false."""
    condition = convert_to_tensor(condition)
    arrays = [convert_to_tensor(x) for x in data]
    texts = [str(np.asarray(x).tolist()) for x in arrays if not isinstance(x, jax.Array)]
    check(
        jnp.all(condition.astype(bool)),
        lambda *values: " ".join(["Assertion failed:", *(_few(x, summarize) for x in values), *texts]),
        *(x for x in arrays if isinstance(x, jax.Array)),
    )


# Comparisons: each row has the function that compares elements, and its text for messages.


def _comparison(compare: Callable[..., jax.Array], sign: str) -> Callable[..., None]:
    def op(
        x: TensorLike, y: TensorLike, message: object = None, summarize: int | None = None, name: str | None = None
    ) -> None:
        a, b = (jnp.asarray(v) for v in pair(x, y))

        def describe(a: np.ndarray, b: np.ndarray) -> str:
            text = f"Condition x {sign} y did not hold. x = {_few(a, summarize)}, y = {_few(b, summarize)}"
            return _with_message(message, text)

        check(jnp.all(compare(a, b)), describe, a, b)

    op.__doc__ = f"Raises `InvalidArgumentError` unless `x {sign} y` for all elements."
    return on_values(2)(op)


def _check_sign(compare: Callable[[jax.Array], jax.Array], condition: str) -> Callable[..., None]:
    def op(x: TensorLike, message: object = None, summarize: int | None = None, name: str | None = None) -> None:
        a = convert_to_tensor(x)
        describe = lambda a: _with_message(message, f"Condition x {condition} did not hold. x = {_few(a, summarize)}")  # noqa: E731
        check(jnp.all(compare(a)), describe, a)

    op.__doc__ = f"Raises `InvalidArgumentError` unless `x {condition}` for all elements."
    return op


COMPARISONS = {
    "assert_equal": _comparison(jnp.equal, "=="),
    "assert_greater": _comparison(jnp.greater, ">"),
    "assert_greater_equal": _comparison(jnp.greater_equal, ">="),
    "assert_less": _comparison(jnp.less, "<"),
    "assert_less_equal": _comparison(jnp.less_equal, "<="),
    "assert_negative": _check_sign(lambda x: x < 0, "< 0"),
    "assert_non_negative": _check_sign(lambda x: x >= 0, ">= 0"),
    "assert_non_positive": _check_sign(lambda x: x <= 0, "<= 0"),
    "assert_positive": _check_sign(lambda x: x > 0, "> 0"),
}
_unequal = _comparison(jnp.not_equal, "!=")


@on_values(2)
def assert_none_equal(
    x: TensorLike, y: TensorLike, summarize: int | None = None, message: object = None, name: str | None = None
) -> None:
    """Raises `InvalidArgumentError` unless `x != y` for all elements."""
    _unequal(x, y, message, summarize)


@on_values(2)
def assert_near(
    x: TensorLike,
    y: TensorLike,
    rtol: jax.typing.ArrayLike | None = None,
    atol: jax.typing.ArrayLike | None = None,
    message: object = None,
    summarize: int | None = None,
    name: str | None = None,
) -> None:
    """Raises `InvalidArgumentError` unless `|x - y| <= atol + rtol |y|`, by default ten times the dtype's precision."""
    a, b = (jnp.asarray(v) for v in pair(x, y))
    eps = 10 * float(jnp.finfo(a.dtype).eps)
    rtol, atol = (eps if t is None else t for t in (rtol, atol))
    describe = lambda a, b: _with_message(  # noqa: E731
        message,
        f"x and y not equal to tolerance rtol = {rtol}, atol = {atol}. {_few(a, summarize)}, {_few(b, summarize)}",
    )
    check(jnp.all(jnp.abs(a - b) <= atol + rtol * jnp.abs(b)), describe, a, b)


def assert_all_finite(x: TensorLike, message: object, name: str | None = None) -> jax.Array:
    """Returns the tensor; raises `InvalidArgumentError` if an element is infinite or NaN."""
    return check_numerics(x, message)


def check_numerics(tensor: TensorLike, message: object, name: str | None = None) -> jax.Array:
    """Returns the tensor; raises `InvalidArgumentError` if an element is infinite or NaN."""
    tensor = convert_to_tensor(tensor)

    def describe(array: np.ndarray) -> str:
        kinds = [name for name, is_kind in (("Inf", np.isinf), ("NaN", np.isnan)) if is_kind(array).any()]
        return f"{message} : Tensor had {' and '.join(kinds)} values"

    check(jnp.all(jnp.isfinite(tensor)), describe, tensor)
    return tensor


# Checks that need no values.


def _fail(message: object, text: str, error: type[Exception] = ValueError) -> None:
    raise error(_with_message(message, text))


def assert_rank(x: TensorLike, rank: TensorLike, message: object = None, name: str | None = None) -> None:
    """Raises `ValueError` unless the tensor has this rank."""
    _ranks(x, [rank], message, lambda rank, ranks: rank == ranks[0], "rank")


def assert_rank_at_least(x: TensorLike, rank: TensorLike, message: object = None, name: str | None = None) -> None:
    """Raises `ValueError` unless the tensor has at least this rank."""
    _ranks(x, [rank], message, lambda rank, ranks: rank >= ranks[0], "at least rank")


def assert_rank_in(x: TensorLike, ranks: Iterable[TensorLike], message: object = None, name: str | None = None) -> None:
    """Raises `ValueError` unless the tensor has one of these ranks."""
    _ranks(x, ranks, message, lambda rank, ranks: rank in ranks, "a rank in")


def _ranks(
    x: TensorLike, ranks: Iterable[TensorLike], message: object, fits: Callable[[int, list[int]], bool], words: str
) -> None:
    shape = convert_to_tensor(x).shape
    numbers = [int(known(r, "The rank", "Give a Python number.")) for r in ranks]
    if not fits(len(shape), numbers):
        expected = numbers[0] if len(numbers) == 1 else tuple(numbers)
        _fail(message, f"The tensor must have {words} {expected}, got rank {len(shape)}, shape {tuple(shape)}.")


def assert_scalar(tensor: TensorLike, message: object = None, name: str | None = None) -> jax.Array:
    """Returns the tensor; raises `ValueError` unless it is a scalar."""
    tensor = convert_to_tensor(tensor)
    if tensor.ndim:
        _fail(message, f"Expected a scalar, got shape {tuple(tensor.shape)}.")
    return tensor


def assert_shapes(
    shapes: Any, data: object = None, summarize: int | None = None, message: object = None, name: str | None = None
) -> None:
    """Raises `ValueError` unless the tensors have these shapes. A letter stands for the same size everywhere.

    `shapes` is a list of pairs (tensor, shape) or a dict. A shape is a string or a tuple of numbers, letters, None (any
    size) and, at its beginning, `...` (any number of dimensions).
    """
    sizes: dict[str, int] = {}
    for x, expected in list(shapes.items() if isinstance(shapes, dict) else shapes):
        shape = tuple(convert_to_tensor(x).shape)
        symbols = list(expected) if isinstance(expected, (list, tuple, str)) else [expected]
        symbols = symbols[3:] if symbols[:3] == [".", ".", "."] else symbols
        open_ended = symbols[:1] in ([Ellipsis], ["*"]) or (isinstance(expected, str) and expected.startswith("..."))
        symbols = symbols[1:] if symbols[:1] in ([Ellipsis], ["*"]) else symbols
        if len(shape) < len(symbols) or (len(shape) > len(symbols) and not open_ended):
            _fail(message, f"Specified by tensor of shape {shape}: it must have rank {len(symbols)} for {expected!r}.")
        for size, symbol in zip(shape[len(shape) - len(symbols) :], symbols):
            if symbol in (None, "."):
                continue
            is_letter = isinstance(symbol, str) and not symbol.isdigit()
            expected_size = sizes.setdefault(symbol, size) if is_letter else int(symbol)
            if expected_size != size:
                _fail(
                    message,
                    f"A tensor of shape {shape} does not fit {expected!r}: dimension {symbol} must be {expected_size}.",
                )


def assert_type(tensor: TensorLike, tf_type: DTypeLike, message: object = None, name: str | None = None) -> None:
    """Raises `TypeError` unless the tensor has this dtype."""
    dtype = convert_to_tensor(tensor).dtype
    if dtype != as_dtype(tf_type):
        _fail(message, f"The tensor must be of dtype {as_dtype(tf_type)}, got {dtype}.", TypeError)


def assert_integer(x: TensorLike, message: object = None, name: str | None = None) -> None:
    """Raises `TypeError` unless the tensor has an integer dtype."""
    dtype = convert_to_tensor(x).dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        _fail(message, f"Expected a tensor of integers, got dtype {dtype}.", TypeError)


def assert_proper_iterable(values: object) -> None:
    """Raises `TypeError` for a tensor, an array, a string, or an object that cannot be iterated."""
    if is_tensor(values) or isinstance(values, (np.ndarray, str, bytes)):
        raise TypeError(f"Expected a list or another iterable, got {type(values).__name__}.")
    if not hasattr(values, "__iter__") or isinstance(values, PerReplica):
        raise TypeError(f"Expected an iterable, got {type(values).__name__}.")


def assert_same_float_dtype(tensors: Iterable[TensorLike] | None = None, dtype: DTypeLike | None = None) -> np.dtype:
    """Returns the common dtype (float32 without tensors); raises `ValueError` unless it is one floating-point dtype."""
    dtypes = {np.dtype(convert_to_tensor(t).dtype) for t in tensors or ()}
    dtypes |= set() if dtype is None else {np.dtype(as_dtype(dtype))}
    if len(dtypes) > 1 or any(not jnp.issubdtype(d, jnp.floating) for d in dtypes):
        raise ValueError(f"Expected tensors of one floating-point dtype, got {sorted(d.name for d in dtypes)}.")
    return dtypes.pop() if dtypes else np.dtype(np.float32)


def is_numeric_tensor(tensor: TensorLike) -> bool:
    """Returns whether `tensor` is a tensor with a numeric dtype."""
    return is_tensor(tensor) and tensor.dtype != np.bool_


def enable_check_numerics(stack_height_limit: int = 30, path_length_limit: int = 50) -> None:
    """Makes every operation that returns NaN raise `FloatingPointError`: sets `jax_debug_nans`."""
    jax.config.update("jax_debug_nans", True)
    jax.clear_caches()  # JAX does not check programs that ran before


def disable_check_numerics() -> None:
    """Undoes `enable_check_numerics`."""
    jax.config.update("jax_debug_nans", False)


def disable_traceback_filtering() -> None:
    """Makes tracebacks of errors show JAX's own frames."""
    jax.config.update("jax_traceback_filtering", "off")


def enable_traceback_filtering() -> None:
    """Undoes `disable_traceback_filtering`."""
    jax.config.update("jax_traceback_filtering", "auto")


def set_log_device_placement(enabled: bool) -> None:
    """Warns that JAX does not log devices: a tensor's `sharding` says where it is."""
    if enabled:
        text = "JAX does not log where operations run: print `x.sharding` of a tensor, or use tf.profiler.experimental."
        warnings.warn(text, stacklevel=2)


DEBUGGING = """disable_traceback_filtering enable_traceback_filtering set_log_device_placement
Assert assert_all_finite assert_integer assert_near assert_none_equal assert_proper_iterable assert_rank
assert_rank_at_least assert_rank_in assert_same_float_dtype assert_scalar assert_shapes assert_type check_numerics
disable_check_numerics enable_check_numerics is_numeric_tensor"""

COMPARISONS = {name: operation(op, name) for name, op in COMPARISONS.items()}
assert_near, assert_none_equal = (
    operation(assert_near, "assert_near"),
    operation(assert_none_equal, "assert_none_equal"),
)
