"""A loop of a length that is not known, with its gradient.

JAX has none for `lax.while_loop`, since the values of all iterations would have to be kept, in a buffer whose size is
not known. Here some are kept, and those between are computed again on the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

KEPT = 32  # iterations whose values are kept; at least every 2nd of up to 64, every 4th of up to 128 ...


def differentiable(
    running: Callable[[Any, Any], Any], step: Callable[[Any, Any], Any], operands: Any, carry: Any
) -> Any:
    """The carry after `carry = step(operands, carry)` has been repeated for as long as `running(operands, carry)`.

    Both functions may depend on nothing but their arguments, which are nests of arrays. It has gradients in reverse
    mode, of first order; none in forward mode.
    """

    def loop(operands: Any, carry: Any) -> Any:
        return lax.while_loop(lambda c: running(operands, c), lambda c: step(operands, c), carry)

    def forward(operands: Any, carry: Any) -> tuple[Any, Any]:
        kept = jax.tree.map(lambda x: jnp.broadcast_to(x, (KEPT, *jnp.shape(x))), carry)

        def keeping(state: Any) -> Any:
            carry, count, stride, kept = state
            full = count == stride * KEPT
            kept = lax.cond(full, lambda: _every_second(kept), lambda: kept)
            stride = jnp.where(full, stride * 2, stride)
            kept = lax.cond(count % stride == 0, lambda: _with(kept, count // stride, carry), lambda: kept)
            return step(operands, carry), count + 1, stride, kept

        start = carry, jnp.int32(0), jnp.int32(1), kept
        carry, count, stride, kept = lax.while_loop(lambda state: running(operands, state[0]), keeping, start)
        return carry, (operands, count, stride, kept)

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, Any]:
        operands, count, stride, kept = residuals

        def carry_at(iteration: Any) -> Any:
            place = iteration // stride
            carry = jax.tree.map(lambda x: x[place], kept)
            return lax.fori_loop(place * stride, iteration, lambda _, c: step(operands, c), carry)

        def back(state: Any) -> Any:
            iteration, of_carry, of_operands = state
            carry = carry_at(iteration)

            def stepped(some_operands: list[Any], some_carry: list[Any]) -> list[Any]:
                return _inexact(step(_merged(operands, some_operands), _merged(carry, some_carry)))

            _, pull = jax.vjp(stepped, _inexact(operands), _inexact(carry))
            more, of_carry = pull(of_carry)
            return iteration - 1, of_carry, [a + b for a, b in zip(of_operands, more)]

        # Cotangents of integers are no numbers.
        given = [x for x, y in zip(jax.tree.leaves(cotangents), jax.tree.leaves(kept)) if _is_inexact(y)]
        start = count - 1, given, [jnp.zeros_like(x) for x in _inexact(operands)]
        _, of_carry, of_operands = lax.while_loop(lambda state: state[0] >= 0, back, start)
        return _merged(operands, of_operands, others=_no_gradient), _merged(
            jax.tree.map(lambda x: x[0], kept), of_carry, others=_no_gradient
        )

    whole = jax.custom_vjp(loop)
    whole.defvjp(forward, backward)
    return whole(operands, carry)


def _every_second(kept: Any) -> Any:
    return jax.tree.map(lambda x: jnp.concatenate([x[::2], x[::2]]), kept)


def _with(kept: Any, place: Any, carry: Any) -> Any:
    return jax.tree.map(lambda x, value: x.at[place].set(value), kept, carry)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _inexact(nest: Any) -> list[Any]:
    """What can be differentiated in a nest of arrays."""
    return [leaf for leaf in jax.tree.leaves(nest) if _is_inexact(leaf)]


def _merged(nest: Any, inexact: Sequence[Any], others: Callable[[Any], Any] = lambda x: x) -> Any:
    """The nest with other arrays in place of those."""
    found = iter(inexact)
    return jax.tree.map(lambda leaf: next(found) if _is_inexact(leaf) else others(leaf), nest)


def _no_gradient(leaf: Any) -> None:
    return None
