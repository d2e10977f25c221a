"""Branches and loops on tensors as parts of the program that is being traced: their Python code runs once.

JAX's own are functions of arrays. Here a branch or the body of a loop is Python code that may also read and assign
variables, and return numbers and other objects. So each is first traced by itself, which tells the structure of its
results and the variables that it reads and writes (see `traced_block`); then `lax.cond`, `lax.while_loop` or `lax.scan`
runs its jaxpr, with the variables' values among the operands and results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax._base.thread_state import current
from replicax._base.types import Leaf, Tree
from replicax._control_flow import reversible_while
from replicax._control_flow.traced_block import (
    Leaves,
    Pulled,
    Tensor,
    TracedBlock,
    Undefined,
    UndefinedReturnValue,
    Value,
    flattened,
    pulled_outside,
    state_of,
    write,
)
from replicax._tracing import dataset_reads
from replicax._tracing.autograph_switch import where

# Branches.


def cond(
    pred: jax.Array, body: Callable[[], Sequence[Tree]], orelse: Callable[[], Sequence[Tree]], names: Sequence[str]
) -> list[Tree]:
    """Returns the values of `body()` where the scalar `pred` is True, and those of `orelse()` where it is False.

    Args:
        body, orelse: return a value for each of the names. Where both return one and the same number or object, it
            stays what it is; tensors and numbers become tensors.

    Raises:
        ValueError: a value is missing in one of the branches, or is of another structure or shape there.
        TypeError: it is of another dtype, or differs and is no tensor.
    """
    if jnp.shape(pred) != ():
        raise ValueError(f"{where()}the condition of a branch must be a scalar, got a tensor of shape {pred.shape}.")
    blocks = TracedBlock(names, body), TracedBlock(names, orelse)
    merged = [_merged(*pair) for pair in zip(blocks[0].values, blocks[1].values)]
    state, written = state_of(*blocks)
    chosen = [leaf for _, leaves in merged for leaf in leaves if isinstance(leaf, _Chosen)]

    def branch(which: int) -> Callable[[Leaves], tuple[list[jax.Array], Leaves]]:
        def run(state: Leaves) -> tuple[list[jax.Array], Leaves]:
            arrays, after = blocks[which].run((), state, written)
            return [leaf.of(which, arrays) for leaf in chosen], after

        return run

    results, after = lax.cond(jnp.asarray(pred, bool), branch(0), branch(1), state)
    write(written, after)
    found = iter(results)
    return [
        jax.tree.unflatten(tree, [next(found) if isinstance(leaf, _Chosen) else leaf for leaf in leaves])
        for tree, leaves in merged
    ]


class _Chosen:
    """A tensor that comes from either branch; a branch that does not define it returns zeros, which nobody reads."""

    def __init__(self, parts: tuple[Tensor | None, Tensor | None]):
        self.parts = parts

    def of(self, which: int, arrays: Sequence[jax.Array]) -> jax.Array:
        """Returns the tensor from the arrays of one branch."""
        part, other = self.parts[which], self.parts[1 - which]
        if part is not None:
            return arrays[part.place]
        assert other is not None
        return _zeros(other)


def _zeros(like: Tensor) -> jax.Array:
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), like.shape)
    return jnp.zeros(like.shape, like.dtype)


_BRANCHES = "main", "else"


def _merged(mine: Value, theirs: Value) -> tuple[Any, list[Leaf]]:
    """Returns the structure of a value that comes from either branch, and its leaves: `_Chosen` and other objects."""
    name, pair = mine.name, (mine, theirs)
    for which, value in enumerate(pair):
        lone, other = value.lone(), pair[1 - which]
        if not isinstance(lone, (Undefined, UndefinedReturnValue)) and lone is not None:
            continue
        if isinstance(other.lone(), type(lone)):
            return mine.tree, list(mine.leaves)
        if isinstance(lone, UndefinedReturnValue) or any(lone is guessed for guessed in current.undefined):
            return other.tree, [
                _Chosen((None, leaf) if which == 0 else (leaf, None)) if isinstance(leaf, Tensor) else leaf
                for leaf in other.leaves
            ]
        if lone is None:
            raise ValueError(f"{where()}'{name}' is None at the end of the {_BRANCHES[which]} branch.")
        raise ValueError(f"{where()}'{name}' must also be initialized in the {_BRANCHES[which]} branch.")
    rule = "What a branch on a tensor leaves behind must be tensors and numbers, or the same object in both branches."
    _check_alike(mine, theirs, "in the main branch", "in the else branch", rule)
    return mine.tree, [
        (a.given if a.is_constant_like(b) else _Chosen((a, b))) if isinstance(a, Tensor) else a
        for a, b in zip(mine.leaves, theirs.leaves)
    ]


def _check_alike(one: Value, other: Value, here: str, there: str, rule: str) -> None:
    """Raises an error unless two values differ in the numbers of their tensors alone."""
    name = one.name
    if one.tree != other.tree:
        raise ValueError(
            f"{where()}'{name}' has one structure {here} and another {there}: {one.tree} and {other.tree}."
        )
    for a, b in zip(one.leaves, other.leaves):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            for what, error in (("dtype", TypeError), ("shape", ValueError)):
                before, after = getattr(a, what), getattr(b, what)
                if before != after:
                    raise error(f"{where()}'{name}' has {what} {before} {here}, but {what} {after} {there}.")
        elif not _same_object(a, b):
            raise TypeError(f"{where()}'{name}' is {_described(a)} {here}, but {_described(b)} {there}. {rule}")


def _same_object(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    return a is b or isinstance(a, (Undefined, UndefinedReturnValue)) or (isinstance(a, (str, bytes)) and a == b)


def _described(leaf: object) -> str:
    return f"a tensor of {leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)


# Loops.


def while_loop(
    test: Callable[[list[Tree]], Leaf],
    body: Callable[[list[Tree]], Sequence[Tree]],
    init: Sequence[Tree],
    names: Sequence[str],
    limit: Leaf | None = None,
) -> list[Tree]:
    """Repeats `values = body(values)` for as long as `test(values)` is True, and returns the values.

    Values that are undefined or None before the loop are zeros if it never runs. It runs `limit` times at most.

    Raises:
        ValueError: a value has another structure or shape after an iteration, or is not defined before the loop.
        TypeError: it has another dtype, or differs and is no tensor.
    """
    if limit is not None:
        return while_loop(
            lambda values: jnp.logical_and(values[0] < limit, test(values[1:])),
            lambda values: (values[0] + 1, *body(values[1:])),
            (jnp.zeros((), jnp.int32), *init),
            ("the iteration", *names),
        )[1:]
    before, arrays, block = _loop_body(names, init, body)

    def tested(*tracers: jax.Array) -> tuple[jax.Array]:
        held = test(_rebuilt(before, tracers))
        if jnp.shape(held) != ():
            raise ValueError(f"{where()}the condition of a loop must be a scalar, got a tensor of {jnp.shape(held)}.")
        return (jnp.asarray(held, bool),)

    condition = TracedBlock(("the condition",), tested, arrays)
    if condition.level.written:
        raise RuntimeError(f"{where()}the condition of a loop on tensors assigns a variable; assign it in the loop.")
    state, written = state_of(condition, block)

    def running(operands: Tree, carry: Tree) -> jax.Array:
        (consts, _, unchanging), (values, changing) = operands, carry
        return condition.run(values, {**unchanging, **changing}, consts=consts)[0][0]

    def step(operands: Tree, carry: Tree) -> Tree:
        (_, consts, unchanging), (values, changing) = operands, carry
        return block.run(values, {**unchanging, **changing}, written, consts=consts)

    unchanging = {key: leaves for key, leaves in state.items() if key not in written}
    operands = condition.jaxpr.consts, block.jaxpr.consts, unchanging
    carry = arrays, {key: state[key] for key in written}
    arrays, after = reversible_while.differentiable(running, step, operands, carry)
    write(written, after)
    return _rebuilt(before, arrays)


def scan(
    body: Callable[[list[Tree], jax.Array], Sequence[Tree]], init: Sequence[Tree], xs: jax.Array, names: Sequence[str]
) -> list[Tree]:
    """Computes `values = body(values, x)` for each row `x` of an array, in order, and returns the values.

    For each `next(iterator)` in the body, the elements of all iterations are pulled before the program runs.

    Raises the errors of `while_loop`.
    """
    pulled: list[Pulled] = []
    before, arrays, block = _loop_body(names, init, body, xs[0], pulled)
    state, written = state_of(block)
    elements = _all_elements(block, len(xs))

    def step(carry: Tree, sliced: Tree) -> tuple[Tree, None]:
        (values, changing), (x, own) = carry, sliced
        return block.run([*values, x], {**state, **changing}, written, own), None

    (arrays, after), _ = lax.scan(step, (arrays, {key: state[key] for key in written}), (xs, elements))
    write(written, after)
    return _rebuilt(before, arrays)


def _all_elements(block: TracedBlock, count: int) -> list[list[jax.Array]]:
    """Pulls the elements of all iterations; for each `next(iterator)` in the body, returns them stacked."""
    if not block.slots:
        return []
    assert block.pulled is not None
    reader = dataset_reads.reader()
    assert reader is not None
    first = block.pulled[: len(block.slots)]
    rounds = [[dataset_reads.element_arrays(element) for _, element in first]]
    for _ in range(count - 1):
        rounds.append([dataset_reads.element_arrays(pulled_outside(reader, iterator)) for iterator, _ in first])
        if [[x.aval for x in arrays] for arrays in rounds[-1]] != [[x.aval for x in arrays] for arrays in rounds[0]]:
            raise dataset_reads.DrivenFromHost(always=False)  # batches of other sizes: each is a program of its own
    return [[jnp.stack(column) for column in zip(*element)] for element in zip(*rounds)]


def _rebuilt(values: Sequence[Value], arrays: Sequence[jax.Array]) -> list[Tree]:
    return [value.rebuilt(arrays) for value in values]


def _loop_body(
    names: Sequence[str],
    init: Sequence[Tree],
    body: Callable[..., Sequence[Tree]],
    x: jax.Array | None = None,
    pulled: list[Pulled] | None = None,
) -> tuple[list[Value], list[jax.Array], TracedBlock]:
    """Returns the values before a loop, their arrays, and its body.

    A value that is undefined or None before the loop gets the type that it has after an iteration: the body is traced
    once more, with zeros in its place.
    """
    rest = () if x is None else (x,)

    def traced(init: Sequence[Tree]) -> tuple[list[Value], list[jax.Array], TracedBlock]:
        before, arrays = flattened(names, init)

        def code(*tracers: jax.Array) -> Sequence[Tree]:
            return body(_rebuilt(before, tracers), *tracers[len(arrays) :])

        return before, arrays, TracedBlock(names, code, [*arrays, *rest], pulled)

    missing = [value for value in init if isinstance(value, Undefined)]
    current.undefined += missing
    try:
        before, arrays, block = traced(init)
    except UnboundLocalError as error:
        unread = next((value.symbol_name for value in missing if f"'{value.symbol_name}'" in str(error)), None)
        if unread is None:
            raise
        raise ValueError(
            f"{where()}'{unread}' must be defined before the loop, whose first iteration reads it."
        ) from error
    finally:
        del current.undefined[len(current.undefined) - len(missing) :]
    typed = [_with_types(*each) for each in zip(init, before, block.values)]
    if any(new is not old for new, old in zip(typed, init)):
        before, arrays, block = traced(typed)
    for old, new in zip(before, block.values):
        rule = "What changes in a loop on tensors must be tensors and numbers."
        _check_alike(old, new, "before the loop", "after one iteration", rule)
    return before, arrays, block


def _with_types(value: Tree, old: Value, new: Value) -> Tree:
    """Returns a value before a loop, with zeros for what is undefined or None and a tensor after an iteration."""
    lone = old.lone()
    undefined = lone is None or isinstance(lone, (Undefined, UndefinedReturnValue))
    if undefined and not isinstance(new.lone(), type(lone)):
        return jax.tree.unflatten(new.tree, [_zeros(leaf) if isinstance(leaf, Tensor) else leaf for leaf in new.leaves])
    if old.tree != new.tree or not any(a is None and isinstance(b, Tensor) for a, b in zip(old.leaves, new.leaves)):
        return value
    leaves = jax.tree.leaves(value, is_leaf=lambda x: x is None)  # such as those of a TensorArray not written to
    pairs = zip(leaves, new.leaves)
    return jax.tree.unflatten(new.tree, [_zeros(b) if a is None and isinstance(b, Tensor) else a for a, b in pairs])
