"""`lax.while_loop` with a gradient.

JAX has none, since the carries of all iterations would have to be kept, in a buffer whose size is not known. Here some
are kept, and those between are computed again on the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from replicax._base.types import Leaf, Tree

KEPT = 32  # iterations whose carry is kept: all of up to 32, every 2nd of up to 64, every 4th of up to 128 ...


def differentiable(
    running: Callable[[Tree, Tree], jax.Array], step: Callable[[Tree, Tree], Tree], operands: Tree, carry: Tree
) -> Tree:
    """Repeats `carry = step(operands, carry)` for as long as `running(operands, carry)`, and returns the carry.

    Both functions may depend on nothing but their arguments, which are nests of arrays. It has gradients in reverse
    mode, of first order; none in forward mode.
    """

    def loop(operands: Tree, carry: Tree) -> Tree:
        return lax.while_loop(lambda c: running(operands, c), lambda c: step(operands, c), carry)

    def forward(operands: Tree, carry: Tree) -> tuple[Tree, Tree]:
        kept = jax.tree.map(lambda x: jnp.broadcast_to(x, (KEPT, *jnp.shape(x))), carry)

        def keeping(state: Tree) -> Tree:
            carry, count, stride, kept = state
            full = count == stride * KEPT
            kept = lax.cond(full, lambda: _every_second(kept), lambda: kept)
            stride = jnp.where(full, stride * 2, stride)
            kept = lax.cond(count % stride == 0, lambda: _with(kept, count // stride, carry), lambda: kept)
            return step(operands, carry), count + 1, stride, kept

        start = carry, jnp.int32(0), jnp.int32(1), kept
        carry, count, stride, kept = lax.while_loop(lambda state: running(operands, state[0]), keeping, start)
        return carry, (operands, count, stride, kept)

    def backward(residuals: Tree, cotangents: Tree) -> tuple[Tree, Tree]:
        operands, count, stride, kept = residuals

        def carry_at(iteration: jax.Array) -> Tree:
            place = iteration // stride
            carry = jax.tree.map(lambda x: x[place], kept)
            return lax.fori_loop(place * stride, iteration, lambda _, c: step(operands, c), carry)

        def back(state: Tree) -> Tree:
            iteration, of_carry, of_operands = state
            carry = carry_at(iteration)

            def stepped(some_operands: list[jax.Array], some_carry: list[jax.Array]) -> list[jax.Array]:
                return _inexact(step(_merged(operands, some_operands), _merged(carry, some_carry)))

            _, pull = jax.vjp(stepped, _inexact(operands), _inexact(carry))
            more, of_carry = pull(of_carry)
            return iteration - 1, of_carry, [a + b for a, b in zip(of_operands, more)]

        # Cotangents of integers are float0, not numbers.
        given = [x for x, y in zip(jax.tree.leaves(cotangents), jax.tree.leaves(kept)) if _is_inexact(y)]
        start = count - 1, given, [jnp.zeros_like(x) for x in _inexact(operands)]
        _, of_carry, of_operands = lax.while_loop(lambda state: state[0] >= 0, back, start)
        first = jax.tree.map(lambda x: x[0], kept)
        return _merged(operands, of_operands, others=_no_gradient), _merged(first, of_carry, others=_no_gradient)

    whole = jax.custom_vjp(loop)
    whole.defvjp(forward, backward)
    return whole(operands, carry)


def _every_second(kept: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.concatenate([x[::2], x[::2]]), kept)


def _with(kept: Tree, place: jax.Array, carry: Tree) -> Tree:
    return jax.tree.map(lambda x, value: x.at[place].set(value), kept, carry)


def _is_inexact(x: Leaf) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _inexact(nest: Tree) -> list[jax.Array]:
    """Returns the leaves that can be differentiated."""
    return [leaf for leaf in jax.tree.leaves(nest) if _is_inexact(leaf)]


def _merged(nest: Tree, inexact: Sequence[jax.Array], others: Callable[[Leaf], Leaf] = lambda x: x) -> Tree:
    """Returns the pytree with other arrays in place of those that can be differentiated."""
    found = iter(inexact)
    return jax.tree.map(lambda leaf: next(found) if _is_inexact(leaf) else others(leaf), nest)


def _no_gradient(leaf: Leaf) -> None:
    return None
