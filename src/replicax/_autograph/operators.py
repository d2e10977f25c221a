"""What `if`, `while`, `for` and the like do in converted code, and `int`, `float` and `range`; see `convert`.

Each does what Python does, unless the condition is a tensor whose value only the program will know: then the branch or
loop becomes part of the program, see `cond_and_loops`. Its code comes as functions that share variables: `get_state`
gives those that the statement may assign, whose names are given too, and `set_state` puts others in their place.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sized
from typing import Any

import jax
import jax.numpy as jnp

from replicax import _data
from replicax._control_flow import cond_and_loops
from replicax._control_flow.traced_block import DynamicRange, Undefined
from replicax._input.distributed_dataset import DistributedDataset
from replicax._tracing import dataset_reads, frames
from replicax._tracing.autograph_switch import where


class _Negation(threading.local):
    """The last tensor that `not` gave, and what it is the opposite of."""

    def __init__(self):
        self.last: tuple[Any, Any] = (None, None)


_negation = _Negation()


def forget_negation() -> None:
    """Lets go of the tensors of the last `not`."""
    _negation.last = (None, None)


# Operators.


def truth_of(value: Any, what: str) -> Any:
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
        f"{where()}condition of {what} expected to be a scalar, got a tensor of shape {tensor.shape}; to check for "
        "None, use `is not None`"
    )


def if_stmt(
    cond: Any, body: Callable, orelse: Callable, get_state: Callable, set_state: Callable, names: Any, nouts: int
) -> None:
    """An `if` statement. Its variables are what `get_state` gives; the first `nouts` of them are read after it."""
    (result, operand), _negation.last = _negation.last, (None, None)
    truth = truth_of(cond, "if statement")
    if isinstance(truth, bool):
        return body() if truth else orelse()
    init = get_state()
    opposite = operand if cond is result else None

    def branch(code: Callable, holds: bool) -> Callable[[], Any]:
        def known(name: str, value: Any) -> Any:
            # After `if not do_return: ...; do_return = True`, as the converter writes it, the flag is known to hold.
            return not holds if value is opposite and value is not None and name.startswith("do_return") else value

        def run() -> Any:
            set_state(tuple(known(*pair) for pair in zip(names, init)))
            code()
            return get_state()[:nouts]

        return run

    try:
        new = cond_and_loops.cond(truth, branch(body, True), branch(orelse, False), names[:nouts])
    finally:
        set_state(init)
    set_state((*new, *init[nouts:]))
    return None


def if_exp(cond: Any, if_true: Callable[[], Any], if_false: Callable[[], Any], text: str) -> Any:
    """`a if cond else b`."""
    truth = truth_of(cond, "conditional expression")
    if isinstance(truth, bool):
        return if_true() if truth else if_false()
    return cond_and_loops.cond(truth, lambda: (if_true(),), lambda: (if_false(),), (text,))[0]


def and_(a: Callable[[], Any], b: Callable[[], Any]) -> Any:
    """`a and b`."""
    first = a()
    truth = truth_of(first, "`and`")
    if isinstance(truth, bool):
        return b() if truth else first
    return cond_and_loops.cond(truth, lambda: (b(),), lambda: (first,), ("and",))[0]


def or_(a: Callable[[], Any], b: Callable[[], Any]) -> Any:
    """`a or b`."""
    first = a()
    truth = truth_of(first, "`or`")
    if isinstance(truth, bool):
        return first if truth else b()
    return cond_and_loops.cond(truth, lambda: (first,), lambda: (b(),), ("or",))[0]


def not_(a: Any) -> Any:
    """`not a`."""
    truth = truth_of(a, "`not`")
    if isinstance(truth, bool):
        return not truth
    _negation.last = (jnp.logical_not(truth), a)
    return _negation.last[0]


def while_stmt(
    test: Callable[[], Any], body: Callable[[], Any], get_state: Callable, set_state: Callable, names: Any, opts: Any
) -> None:
    """A `while` statement. It goes on as a part of the program as soon as its condition is a tensor."""
    while True:
        truth = truth_of(test(), "while statement")
        if not isinstance(truth, bool):
            break
        if not truth:
            return
        body()

    def tested(values: list[Any]) -> Any:
        set_state(tuple(values))
        return truth_of(test(), "while statement")

    def repeated(values: list[Any]) -> Any:
        set_state(tuple(values))
        body()
        return get_state()

    init = get_state()
    try:
        new = cond_and_loops.while_loop(tested, repeated, init, names)
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
    if isinstance(iter_, jax.Array) and iter_.ndim and frames.is_tracing():
        return _for_tensor(iter_, extra_test, body, *state)
    datasets = _data.Dataset, _data.ElementIterator, DistributedDataset
    if isinstance(iter_, datasets) and frames.is_tracing():
        dataset_reads.drive_from_host("A loop over a dataset")
    return _for_python(iter_, extra_test, body, *state)


_END = object()
_MOST_GUARDED = 1000


def _for_python(iter_: Iterable[Any], extra_test: Any, body: Any, get_state: Any, set_state: Any, names: Any) -> None:
    iterator, guarded = iter(iter_), 0
    while True:
        truth = True if extra_test is None else truth_of(extra_test(), "for statement")
        if truth is False or (target := next(iterator, _END)) is _END:
            return
        if truth is True:
            body(target)
            continue
        # Left by a `break` that depends on a tensor: the rest is part of the program, as far as Python's own loop goes.
        guarded += 1
        if guarded > _MOST_GUARDED and not isinstance(iter_, Sized):
            raise NotImplementedError(
                f"{where()}a Python loop with a `break` or `return` that depends on a tensor is unrolled, and this "
                f"one does not end within {_MOST_GUARDED} iterations. Loop over a tensor, or use `while`."
            )
        code = functools.partial(body, target)
        if_stmt(truth, code, _nothing, get_state, set_state, names, len(names))


def _nothing() -> None:
    pass


def _for_tensor(array: Any, extra_test: Any, body: Any, get_state: Any, set_state: Any, names: Any) -> None:
    def step(values: list[Any], x: Any) -> Any:
        set_state(tuple(values))
        truth = True if extra_test is None else truth_of(extra_test(), "for statement")
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
        new = cond_and_loops.scan(step, init, array, names)
    finally:
        set_state(init)
    set_state(tuple(new))


def _for_range(numbers: DynamicRange, extra_test: Any, body: Any, get_state: Any, set_state: Any, names: Any) -> None:
    size = numbers.size()

    def tested(values: list[Any]) -> Any:
        set_state(tuple(values[1:]))
        more = values[0] < size
        return more if extra_test is None else jnp.logical_and(more, truth_of(extra_test(), "for statement"))

    def repeated(values: list[Any]) -> Any:
        set_state(tuple(values[1:]))
        body((numbers.start + values[0] * numbers.delta).astype(numbers.dtype))
        return (values[0] + 1, *get_state())

    init = get_state()
    try:
        new = cond_and_loops.while_loop(tested, repeated, (jnp.zeros((), jnp.int32), *init), ("the iteration", *names))
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
    truth = truth_of(holds, "assert statement")
    if isinstance(truth, bool):
        assert truth, message()
        return
    text = f"{where()}{message()}"

    def check(holds: Any) -> None:
        if not holds:
            raise AssertionError(text)

    jax.debug.callback(check, truth)


# Built-in functions of tensors.


def int_(*args: Any, **kwargs: Any) -> Any:
    try:
        return int(*args, **kwargs)
    except jax.errors.ConcretizationTypeError:
        return args[0].astype(jnp.int32)


def float_(*args: Any) -> Any:
    try:
        return float(*args)
    except jax.errors.ConcretizationTypeError:
        return args[0].astype(jnp.float32)


def range_(*args: Any) -> Any:
    try:
        return range(*args)
    except jax.errors.TracerIntegerConversionError:
        start, limit = (0, args[0]) if len(args) == 1 else args[:2]
        return DynamicRange(start, limit, *args[2:])
