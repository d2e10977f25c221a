"""`if`, `while`, `for` and other operators of converted code, and `int`, `float` and `range`; see `convert`.

Each does what Python does, unless the condition is a tracer: then the branch or loop becomes part of the program, see
`cond_and_loops`. Its code comes as functions that share variables: `get_state` returns those that the statement may
assign, whose names are given too, and `set_state` assigns them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base.thread_state import current
from replicax._base.types import Tree
from replicax._control_flow import cond_and_loops
from replicax._control_flow.traced_block import DynamicRange, Undefined
from replicax._data.dataset import Dataset
from replicax._data.iterators import ElementIterator
from replicax._input.distributed_dataset import DistributedDataset
from replicax._tracing import dataset_reads, frames
from replicax._tracing.autograph_switch import where

GetState: TypeAlias = Callable[[], tuple[Tree, ...]]
SetState: TypeAlias = Callable[[tuple[Tree, ...]], None]


def forget_negation() -> None:
    """Drops the references to the tensors of the last `not`."""
    current.negated = (None, None)


# Operators.


def truth_of(value: Tree, what: str) -> bool | jax.Array:
    """Returns the truth of a value as a bool, or as a scalar tracer."""
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


def _not_scalar(what: str, tensor: jax.Array) -> str:
    return (
        f"{where()}condition of {what} expected to be a scalar, got a tensor of shape {tensor.shape}; to check for "
        "None, use `is not None`"
    )


def if_stmt(
    cond: Tree,
    body: Callable[[], None],
    orelse: Callable[[], None],
    get_state: GetState,
    set_state: SetState,
    names: Sequence[str],
    nouts: int,
) -> None:
    """Runs an `if` statement. The first `nouts` of its variables are read after it."""
    (result, operand), current.negated = current.negated, (None, None)
    truth = truth_of(cond, "if statement")
    if isinstance(truth, bool):
        return body() if truth else orelse()
    opposite = operand if cond is result else None

    def branch(init: tuple[Tree, ...], code: Callable[[], None], holds: bool) -> Callable[[], tuple[Tree, ...]]:
        def known(name: str, value: Tree) -> Tree:
            # After `if not do_return: ...; do_return = True`, as the converter writes it, the flag is known to hold.
            return not holds if value is opposite and value is not None and name.startswith("do_return") else value

        def run() -> tuple[Tree, ...]:
            set_state(tuple(known(*pair) for pair in zip(names, init)))
            code()
            return get_state()[:nouts]

        return run

    def chosen(init: tuple[Tree, ...]) -> tuple[Tree, ...]:
        branches = branch(init, body, True), branch(init, orelse, False)
        return (*cond_and_loops.cond(truth, *branches, names[:nouts]), *init[nouts:])

    return _in_program(get_state, set_state, chosen)


def _in_program(
    get_state: GetState, set_state: SetState, statement: Callable[[tuple[Tree, ...]], Sequence[Tree]]
) -> None:
    """Assigns the values that a statement's variables have after it, computed from those before it."""
    init = get_state()
    try:
        new = statement(init)
    finally:
        set_state(init)
    set_state(tuple(new))


def _choice(value: Tree, what: str, name: str, if_true: Callable[[], Tree], if_false: Callable[[], Tree]) -> Tree:
    truth = truth_of(value, what)
    if isinstance(truth, bool):
        return if_true() if truth else if_false()
    return cond_and_loops.cond(truth, lambda: (if_true(),), lambda: (if_false(),), (name,))[0]


def if_exp(cond: Tree, if_true: Callable[[], Tree], if_false: Callable[[], Tree], text: str) -> Tree:
    """Returns `a if cond else b`."""
    return _choice(cond, "conditional expression", text, if_true, if_false)


def and_(a: Callable[[], Tree], b: Callable[[], Tree]) -> Tree:
    """Returns `a and b`."""
    first = a()
    return _choice(first, "`and`", "and", b, lambda: first)


def or_(a: Callable[[], Tree], b: Callable[[], Tree]) -> Tree:
    """Returns `a or b`."""
    first = a()
    return _choice(first, "`or`", "or", lambda: first, b)


def not_(a: Tree) -> bool | jax.Array:
    """Returns `not a`."""
    truth = truth_of(a, "`not`")
    if isinstance(truth, bool):
        return not truth
    opposite = jnp.logical_not(truth)
    current.negated = (opposite, a)
    return opposite


def while_stmt(
    test: Callable[[], Tree],
    body: Callable[[], None],
    get_state: GetState,
    set_state: SetState,
    names: Sequence[str],
    opts: dict[str, Any],
) -> None:
    """Runs a `while` statement. It becomes part of the program as soon as its condition is a tracer.

    `opts` are those of `tf.autograph.experimental.set_loop_options`.
    """
    limit: Any = opts.get("maximum_iterations")
    while True:
        condition = test()
        truth = truth_of(condition, "while statement")
        # A bound is of loops on tensors, among them those whose value is known while they are traced.
        limited = limit is not None and isinstance(condition, (jax.Array, np.generic))
        if not isinstance(truth, bool) or (limited and isinstance(limit, jax.core.Tracer)):
            break
        if not truth or (limited and int(limit) <= 0):
            return
        body()
        limit = limit - 1 if limited else limit

    def tested(values: Sequence[Tree]) -> bool | jax.Array:
        set_state(tuple(values))
        return truth_of(test(), "while statement")

    def repeated(values: Sequence[Tree]) -> tuple[Tree, ...]:
        set_state(tuple(values))
        body()
        return get_state()

    _in_program(get_state, set_state, lambda init: cond_and_loops.while_loop(tested, repeated, init, names, limit))


def for_stmt(
    iter_: Iterable[Tree],
    extra_test: Callable[[], Tree] | None,
    body: Callable[[Tree], None],
    get_state: GetState,
    set_state: SetState,
    names: Sequence[str],
    opts: dict[str, Any],
) -> None:
    """Runs a `for` statement; `extra_test` is false once it was left by `break` or `return`.

    `opts` are those of `tf.autograph.experimental.set_loop_options`. As in TensorFlow, they are for loops over tensors,
    not for those over datasets.
    """
    loop = _For(extra_test, body, get_state, set_state, names, opts.get("maximum_iterations"))
    if isinstance(iter_, DynamicRange):
        return loop.over_range(iter_)
    if isinstance(iter_, jax.Array) and iter_.ndim and frames.is_tracing():
        return loop.over_tensor(iter_)
    datasets = Dataset, ElementIterator, DistributedDataset
    if isinstance(iter_, datasets) and frames.is_tracing():
        dataset_reads.drive_from_host("A loop over a dataset")
    return loop.over_python(iter_)


_END = object()
_MOST_GUARDED = 1000


class _For(NamedTuple):
    extra_test: Callable[[], Tree] | None
    body: Callable[[Tree], None]
    get_state: GetState
    set_state: SetState
    names: Sequence[str]
    limit: int | jax.Array | None  # of iterations, where the loop is part of the program

    def known_limit(self) -> int | None:
        """Returns how many iterations there are at most, None without a bound."""
        return None if self.limit is None else max(int(self.limit), 0)

    def goes_on(self) -> bool | jax.Array:
        """Returns False once the loop was left by `break` or `return`."""
        return True if self.extra_test is None else truth_of(self.extra_test(), "for statement")

    def run_if(self, truth: bool | jax.Array, target: Tree) -> None:
        """Runs the body if `truth` is True, in the program if it is a tracer."""
        if truth is True:
            self.body(target)
        elif truth is not False:
            code = functools.partial(self.body, target)
            if_stmt(truth, code, lambda: None, self.get_state, self.set_state, self.names, len(self.names))

    def over_python(self, values: Iterable[Tree]) -> None:
        iterator, guarded = iter(values), 0
        while True:
            truth = self.goes_on()
            if truth is False or (target := next(iterator, _END)) is _END:
                return
            self.run_if(truth, target)
            # Left by a `break` that depends on a tracer: the rest is part of the program, as far as Python's loop goes.
            guarded += truth is not True
            if guarded > _MOST_GUARDED and not isinstance(values, Sized):
                raise NotImplementedError(
                    f"{where()}a Python loop with a `break` or `return` that depends on a tensor is unrolled, and this "
                    f"one does not end within {_MOST_GUARDED} iterations. Loop over a tensor, or use `while`."
                )

    def over_tensor(self, array: jax.Array) -> None:
        def step(values: Sequence[Tree], x: jax.Array) -> tuple[Tree, ...]:
            self.set_state(tuple(values))
            self.run_if(self.goes_on(), x)
            return self.get_state()

        if not len(array):
            return
        if isinstance(self.limit, jax.core.Tracer):
            rows = self._replace(body=lambda i: self.body(array[i]))
            return rows.over_range(DynamicRange(0, len(array)))
        array = array[: self.known_limit()]
        if len(array):
            scan = functools.partial(cond_and_loops.scan, step, xs=array, names=self.names)
            _in_program(self.get_state, self.set_state, scan)

    def over_range(self, numbers: DynamicRange) -> None:
        size = numbers.size()
        if self.limit is not None:
            size = jnp.minimum(size, self.limit)

        def tested(values: Sequence[Tree]) -> bool | jax.Array:
            self.set_state(tuple(values[1:]))
            more = values[0] < size
            return more if self.extra_test is None else jnp.logical_and(more, self.goes_on())

        def repeated(values: Sequence[Tree]) -> tuple[Tree, ...]:
            self.set_state(tuple(values[1:]))
            self.body((numbers.start + values[0] * numbers.delta).astype(numbers.dtype))
            return (values[0] + 1, *self.get_state())

        def looped(init: tuple[Tree, ...]) -> Sequence[Tree]:
            names = "the iteration", *self.names
            return cond_and_loops.while_loop(tested, repeated, (jnp.zeros((), jnp.int32), *init), names)[1:]

        _in_program(self.get_state, self.set_state, looped)


def ld(value: Tree) -> Tree:
    """Reads a Python variable."""
    return value.read() if isinstance(value, Undefined) else value


def ldu(read: Callable[[], Tree], name: str) -> Tree:
    """Reads an attribute or item that may be missing, such as `x.y`."""
    try:
        return read()
    except (KeyError, AttributeError, NameError):
        return Undefined(name)


def assert_stmt(holds: Tree, message: Callable[[], str]) -> None:
    """Runs an `assert` statement; a tracer is checked when the program runs."""
    truth = truth_of(holds, "assert statement")
    if isinstance(truth, bool):
        assert truth, message()
        return
    text = f"{where()}{message()}"

    def check(holds: np.ndarray) -> None:
        if not holds:
            raise AssertionError(text)

    jax.debug.callback(check, truth)


# Built-in functions of tensors.


def int_(*args: Any, **kwargs: Any) -> int | jax.Array:
    """Returns `int(...)`, of a tracer in int32."""
    try:
        return int(*args, **kwargs)
    except jax.errors.ConcretizationTypeError:
        return jnp.asarray(args[0], jnp.int32)


def float_(*args: Any) -> float | jax.Array:
    """Returns `float(...)`, of a tracer in float32."""
    try:
        return float(*args)
    except jax.errors.ConcretizationTypeError:
        return jnp.asarray(args[0], jnp.float32)


def range_(*args: Any) -> range | DynamicRange:
    """Returns `range(...)`, or its like where a limit is a tracer."""
    try:
        return range(*args)
    except jax.errors.TracerIntegerConversionError:
        start, limit = (0, args[0]) if len(args) == 1 else args[:2]
        return DynamicRange(start, limit, *args[2:])
