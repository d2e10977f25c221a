"""Branches and loops on tensors as parts of the program that is being traced: their Python code runs once.

JAX's own are functions of arrays. Here a branch or the body of a loop is Python code that may also read and assign
variables, and what it returns may hold numbers and other objects. So each is first traced by itself, which tells what
it returns and which variables it touches (see `traced_block`); then `lax.cond`, `lax.while_loop` or `lax.scan` runs
what was traced, with the variables' values among its operands and results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax._control_flow import reversible_while
from replicax._control_flow.traced_block import (
    Block,
    Tensor,
    Undefined,
    UndefinedReturnValue,
    Value,
    flattened,
    pulled_outside,
    state_of,
    write,
)
from replicax._tracing import active_tapes, dataset_reads, frames
from replicax._tracing.autograph_switch import where


class _Guessing(threading.local):
    def __init__(self):
        self.undefined: list[Undefined] = []  # those that a loop will define, whose types are not known yet


_guessing = _Guessing()


# Branches.


def cond(
    pred: Any, body: Callable[[], Sequence[Any]], orelse: Callable[[], Sequence[Any]], names: Sequence[str]
) -> list[Any]:
    """What `body()` returns where `pred`, a scalar tensor, holds, and what `orelse()` returns where it does not.

    Args:
        body, orelse: return a value for each of the names. Where both return one and the same number or object, it
            stays what it is; tensors and numbers become tensors.

    Raises:
        ValueError: a value is missing in one of the branches, or is of another structure or shape there.
        TypeError: it is of another dtype, or differs and is no tensor.
    """
    if jnp.shape(pred) != ():
        raise ValueError(f"{where()}the condition of a branch must be a scalar, got a tensor of shape {pred.shape}.")
    blocks = Block(names, body), Block(names, orelse)
    merged = [_merged(*pair) for pair in zip(blocks[0].values, blocks[1].values)]
    state, written = state_of(*blocks)
    chosen = [leaf for _, leaves in merged for leaf in leaves if isinstance(leaf, _Chosen)]

    def branch(which: int) -> Callable[[Any], Any]:
        def run(state: Any) -> Any:
            arrays, after = blocks[which].run((), state)
            return [leaf.of(which, arrays) for leaf in chosen], {key: after[key] for key in written}

        return run

    results, after = lax.cond(jnp.asarray(pred, bool), branch(0), branch(1), state)
    write(written, after)
    found = iter(results)
    return [
        jax.tree.unflatten(tree, [next(found) if isinstance(leaf, _Chosen) else leaf for leaf in leaves])
        for tree, leaves in merged
    ]


class _Chosen:
    """A tensor that comes from either branch; from one that does not define it as zeros, which nobody reads."""

    def __init__(self, parts: tuple[Tensor | None, Tensor | None]):
        self.parts = parts

    def of(self, which: int, arrays: Sequence[Any]) -> Any:
        part = self.parts[which]
        return arrays[part.place] if part is not None else _zeros(self.parts[1 - which])


def _zeros(like: Any) -> Any:
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), like.shape)
    return jnp.zeros(like.shape, like.dtype)


_BRANCHES = "main", "else"


def _merged(mine: Value, theirs: Value) -> tuple[Any, list[Any]]:
    """The tree of a value that comes from either branch, and its leaves: `_Chosen` tensors and other objects."""
    name, pair = mine.name, (mine, theirs)
    for which, value in enumerate(pair):
        lone, other = value.lone(), pair[1 - which]
        if not isinstance(lone, (Undefined, UndefinedReturnValue)) and lone is not None:
            continue
        if isinstance(other.lone(), type(lone)):
            return mine.tree, list(mine.leaves)
        if isinstance(lone, UndefinedReturnValue) or any(lone is guessed for guessed in _guessing.undefined):
            return other.tree, [
                _Chosen((None, leaf) if which == 0 else (leaf, None)) if isinstance(leaf, Tensor) else leaf
                for leaf in other.leaves
            ]
        if lone is None:
            raise ValueError(f"{where()}'{name}' is None at the end of the {_BRANCHES[which]} branch.")
        raise ValueError(f"{where()}'{name}' must also be initialized in the {_BRANCHES[which]} branch.")
    if mine.tree != theirs.tree:
        raise ValueError(
            f"{where()}'{name}' has one structure in the main branch and another in the else branch: {mine.tree} and "
            f"{theirs.tree}."
        )
    return mine.tree, [_merged_leaf(name, a, b) for a, b in zip(mine.leaves, theirs.leaves)]


def _merged_leaf(name: str, a: Any, b: Any) -> Any:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.is_constant_like(b):
            return a.given
        for what, error in (("dtype", TypeError), ("shape", ValueError)):
            if getattr(a, what) != getattr(b, what):
                raise error(
                    f"{where()}'{name}' has {what} {getattr(a, what)} in the main branch, but {what} "
                    f"{getattr(b, what)} in the else branch."
                )
        return _Chosen((a, b))
    if _same_object(a, b):
        return a
    raise TypeError(
        f"{where()}'{name}' is {_described(a)} in the main branch, but {_described(b)} in the else branch. What a "
        "branch on a tensor leaves behind must be tensors and numbers, or the same object in both branches."
    )


def _same_object(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    return a is b or isinstance(a, (Undefined, UndefinedReturnValue)) or (isinstance(a, (str, bytes)) and a == b)


def _described(leaf: Any) -> str:
    return f"a tensor of {leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)


# What is computed again for its gradient.


def recomputed(f: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """What `f(*args, **kwargs)` returns; its gradient computes what `f` computes again. Eagerly, a call and no more.

    Each call traces `f` anew: `jax.checkpoint` keeps what it traced, the values of variables that were read included.
    """
    if not frames.is_tracing():
        return f(*args, **kwargs)
    if not isinstance(frames.frame(), frames.TraceFrame):  # in a `jax.jit` of the user's
        return jax.checkpoint(lambda *args, **kwargs: f(*args, **kwargs))(*args, **kwargs)
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_whole)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def code(*tracers: Any) -> tuple[Any]:
        given = dict(zip(places, tracers))
        own_args, own_kwargs = jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
        return (f(*own_args, **own_kwargs),)

    arrays = [leaves[i] for i in places]
    block = Block(("the result",), code, arrays)
    state, written = state_of(block)

    def run(arrays: Any, state: Any) -> Any:
        results, after = block.run(arrays, state)
        return results, {key: after[key] for key in written}

    results, after = jax.checkpoint(run)(arrays, state)
    write(written, after)
    return block.values[0].rebuilt(results)


def _is_whole(leaf: Any) -> bool:
    return leaf is None or active_tapes.is_variable(leaf)


# Loops.


def while_loop(
    test: Callable[[list[Any]], Any],
    body: Callable[[list[Any]], Sequence[Any]],
    init: Sequence[Any],
    names: Sequence[str],
) -> list[Any]:
    """The values after `body(values)` has been repeated for as long as `test(values)` holds.

    Values that are undefined or None before the loop are zeros if it never runs.

    Raises:
        ValueError: a value has another structure or shape after an iteration, or is not defined before the loop.
        TypeError: it has another dtype, or differs and is no tensor.
    """
    before, arrays, block = _loop_body(names, init, body)

    def tested(*tracers: Any) -> Any:
        held = test(_rebuilt(before, tracers))
        if jnp.shape(held) != ():
            raise ValueError(f"{where()}the condition of a loop must be a scalar, got a tensor of {jnp.shape(held)}.")
        return (jnp.asarray(held, bool),)

    condition = Block(("the condition",), tested, arrays)
    if condition.level.written:
        raise RuntimeError(f"{where()}the condition of a loop on tensors assigns a variable; assign it in the loop.")
    state, written = state_of(condition, block)

    def running(operands: Any, carry: Any) -> Any:
        (consts, _, unchanging), (values, changing) = operands, carry
        return condition.run(values, {**unchanging, **changing}, consts=consts)[0][0]

    def step(operands: Any, carry: Any) -> Any:
        (_, consts, unchanging), (values, changing) = operands, carry
        values, after = block.run(values, {**unchanging, **changing}, consts=consts)
        return values, {key: after[key] for key in written}

    unchanging = {key: leaves for key, leaves in state.items() if key not in written}
    operands = condition.jaxpr.consts, block.jaxpr.consts, unchanging
    carry = arrays, {key: state[key] for key in written}
    arrays, after = reversible_while.differentiable(running, step, operands, carry)
    write(written, after)
    return _rebuilt(before, arrays)


def scan(
    body: Callable[[list[Any], Any], Sequence[Any]], init: Sequence[Any], xs: jax.Array, names: Sequence[str]
) -> list[Any]:
    """The values after `body(values, x)` for each `x` of an array, in order.

    Each `next(iterator)` in the body is pulled as often as the loop runs, before the program does.

    Raises: as `while_loop` does.
    """
    pulled: list[tuple[Any, Any]] = []
    before, arrays, block = _loop_body(names, init, body, xs[0], pulled)
    state, written = state_of(block)
    elements = _all_elements(block, len(xs))

    def step(carry: Any, sliced: Any) -> Any:
        (values, changing), (x, own) = carry, sliced
        values, after = block.run([*values, x], {**state, **changing}, own)
        return (values, {key: after[key] for key in written}), None

    (arrays, after), _ = lax.scan(step, (arrays, {key: state[key] for key in written}), (xs, elements))
    write(written, after)
    return _rebuilt(before, arrays)


def _all_elements(block: Block, count: int) -> list[list[Any]]:
    """What a loop of so many iterations pulls: for each `next(iterator)` in its body, stacked over the iterations."""
    if not block.slots:
        return []
    assert block.pulled is not None
    lift = dataset_reads.lifts.stack[-1]
    first = block.pulled[: len(block.slots)]
    rounds = [[dataset_reads.element_arrays(element) for _, element in first]]
    for _ in range(count - 1):
        rounds.append([dataset_reads.element_arrays(pulled_outside(lift, iterator)) for iterator, _ in first])
        if [[x.aval for x in arrays] for arrays in rounds[-1]] != [[x.aval for x in arrays] for arrays in rounds[0]]:
            raise dataset_reads.DrivenFromHost(always=False)  # batches of other sizes: each is a program of its own
    return [[jnp.stack(column) for column in zip(*element)] for element in zip(*rounds)]


def _rebuilt(values: Sequence[Value], arrays: Sequence[Any]) -> list[Any]:
    return [value.rebuilt(arrays) for value in values]


def _loop_body(
    names: Sequence[str],
    init: Sequence[Any],
    body: Callable[..., Sequence[Any]],
    x: Any = None,
    pulled: list[tuple[Any, Any]] | None = None,
) -> tuple[list[Value], list[Any], Block]:
    """The values before a loop, their arrays, and its body.

    What the loop is the first to define has no type before. It is found by tracing the body once more.
    """
    rest = () if x is None else (x,)

    def traced() -> tuple[list[Value], list[Any], Block]:
        before, arrays = flattened(names, init)

        def code(*tracers: Any) -> Sequence[Any]:
            return body(_rebuilt(before, tracers), *tracers[len(arrays) :])

        return before, arrays, Block(names, code, [*arrays, *rest], pulled)

    missing = [value for value in init if isinstance(value, Undefined)]
    _guessing.undefined += missing
    try:
        before, arrays, block = traced()
    except UnboundLocalError as error:
        unread = next((value.symbol_name for value in missing if f"'{value.symbol_name}'" in str(error)), None)
        if unread is None:
            raise
        raise ValueError(
            f"{where()}'{unread}' must be defined before the loop, whose first iteration reads it."
        ) from error
    finally:
        del _guessing.undefined[len(_guessing.undefined) - len(missing) :]
    init = list(init)
    guessed = False
    for i, (old, new) in enumerate(zip(before, block.values)):
        lone = old.lone()
        if (lone is None or isinstance(lone, (Undefined, UndefinedReturnValue))) and not isinstance(
            new.lone(), type(lone)
        ):
            init[i] = jax.tree.unflatten(
                new.tree, [_zeros(leaf) if isinstance(leaf, Tensor) else leaf for leaf in new.leaves]
            )
            guessed = True
        elif old.tree == new.tree and any(a is None and isinstance(b, Tensor) for a, b in zip(old.leaves, new.leaves)):
            leaves = jax.tree.leaves(init[i], is_leaf=lambda x: x is None)  # such as a TensorArray not written to
            init[i] = jax.tree.unflatten(
                new.tree, [_zeros(b) if a is None and isinstance(b, Tensor) else a for a, b in zip(leaves, new.leaves)]
            )
            guessed = True
    if guessed:
        before, arrays, block = traced()
    for old, new in zip(before, block.values):
        _check_invariant(old, new)
    return before, arrays, block


def _check_invariant(old: Value, new: Value) -> None:
    name = old.name
    if old.tree != new.tree:
        raise ValueError(
            f"{where()}'{name}' has one structure before the loop and another after one iteration: {old.tree} and "
            f"{new.tree}."
        )
    for a, b in zip(old.leaves, new.leaves):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            for what, error in (("dtype", TypeError), ("shape", ValueError)):
                if getattr(a, what) != getattr(b, what):
                    raise error(
                        f"{where()}'{name}' has {what} {getattr(a, what)} before the loop, but {what} "
                        f"{getattr(b, what)} after one iteration."
                    )
        elif not _same_object(a, b):
            raise TypeError(
                f"{where()}'{name}' is {_described(a)} before the loop, but {_described(b)} after one iteration. What "
                "changes in a loop on tensors must be tensors and numbers."
            )
