"""How much a program computes, as far as shapes tell it."""

from __future__ import annotations

import math

import jax.extend.core as jex

from replicax._base.jaxprs import AnyJaxpr, equations, kind_of


def multiplications(jaxpr: AnyJaxpr) -> int:
    """Returns the number of multiplications in matrix products and convolutions; in loops, of one pass.

    Those of symbolic shapes do not count.
    """
    return sum(map(_of_equation, equations(jaxpr)))


def _of_equation(eqn: jex.JaxprEqn) -> int:
    if eqn.primitive.name == "dot_general":
        left, summed = kind_of(eqn.invars[0]).shape, eqn.params["dimension_numbers"][0][0]
        sizes = [left[axis] for axis in summed]
    elif eqn.primitive.name == "conv_general_dilated":
        kernel, (_, *summed) = kind_of(eqn.invars[1]).shape, eqn.params["dimension_numbers"].rhs_spec
        sizes = [kernel[axis] for axis in summed]
    else:
        return 0
    sizes += kind_of(eqn.outvars[0]).shape
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0
