"""Convolutions in branches and loops of programs for the CPU, where XLA makes 100 times slower code of some.

Its fast convolutions take dimensions in one order only: batch, space, features. It brings others to that order, such as
those of gradients, but only where they stand in a program's outermost computation.
"""

from __future__ import annotations

import jax
import jax.extend.core as jex
from jax import lax


def in_order(eqn: jex.JaxprEqn, operands: list[jax.Array]) -> list[jax.Array]:
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
    result = eqn.primitive.bind(left, right, **{**eqn.params, "dimension_numbers": ordered})
    places = dict(zip(numbers.out_spec, ordered.out_spec))
    return [lax.transpose(result, [places[i] for i in range(result.ndim)])]
