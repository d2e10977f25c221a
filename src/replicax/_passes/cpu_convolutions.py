"""Convolutions in branches and loops of programs for the CPU, where XLA makes 100 times slower code of some.

Its fast convolutions take dimensions in one order only: batch, space, features. It brings others to that order, such as
those of gradients, but only where they stand in a program's outermost computation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax

from replicax._base import jax_internals
from replicax._base.jaxprs import equations
from replicax._passes.uneven_replicas import unwrapped


def _in_order(eqn: jex.JaxprEqn, operands: list[jax.Array]) -> list[jax.Array]:
    """Computes the equation of a convolution by one whose dimensions are in that order: a rule."""
    left, right = operands
    numbers = eqn.params["dimension_numbers"]
    space = range(1, len(numbers.lhs_spec) - 1)
    ordered = lax.ConvDimensionNumbers(
        (0, len(space) + 1, *space), (len(space) + 1, len(space), *(i - 1 for i in space)), (0, len(space) + 1, *space)
    )
    batch, features, *rest = numbers.lhs_spec
    left = lax.transpose(left, (batch, *rest, features))
    out, features, *rest = numbers.rhs_spec
    right = lax.transpose(right, (*rest, features, out))
    (result,) = jax_internals.rebind(eqn, {**eqn.params, "dimension_numbers": ordered}, [left, right])
    places = dict(zip(numbers.out_spec, ordered.out_spec))
    return [lax.transpose(result, [places[i] for i in range(result.ndim)])]


# Rules for an `Interpreter`.
RULES = {"conv_general_dilated": _in_order}


def convolves(closed: jex.ClosedJaxpr) -> bool:
    """Returns whether there is a convolution in a jaxpr."""
    return any(eqn.primitive.name == "conv_general_dilated" for eqn in equations(closed))


def in_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same function, with convolutions that XLA compiles to fast code also in loops on the CPU."""

    def of_replicas(eqn: jex.JaxprEqn, args: list[jax.Array]) -> list[jax.Array]:
        if eqn.params["jaxpr"].constvars:
            return jax_internals.rebind(eqn, eqn.params, args)

        def replica(*blocks: jax.Array) -> list[jax.Array]:
            return unwrapped(jex.ClosedJaxpr(eqn.params["jaxpr"], []), *blocks, rules=RULES, meet=False)

        params = eqn.params
        return list(jax_internals.shard_map_like(eqn, replica, params["in_specs"], params["out_specs"])(*args))

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        closed, kinds = jax.make_jaxpr(lambda *x: function(*jax.tree.unflatten(tree, x)), return_shape=True)(*leaves)
        results = unwrapped(closed, *leaves, rules={**RULES, "shard_map": of_replicas}, meet=False)
        return jax.tree.unflatten(jax.tree.structure(kinds), results)

    return run
