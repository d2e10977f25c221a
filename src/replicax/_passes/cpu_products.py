"""Matrix products in the order of dimensions that XLA's fast routine for the CPU takes: [rows, sum] x [sum, columns].

The gradient of a layer's weights sums over the first dimension of both factors. XLA folds the transposition that this
takes into the product, which its fast routine then refuses, unless a barrier keeps the two apart. (`jax.jit` of arrays
with a `NamedSharding` comes to the fast routine by chance, as it is partitioned before XLA folds.) What this gains, and
up to which size, is measured by benchmarks/products.py.
"""

from __future__ import annotations

import math

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from replicax._base import jax_internals
from replicax._base.jaxprs import equations_in, kind_of
from replicax._passes import cpu_convolutions
from replicax._passes.interpret import Interpreter, Rule
from replicax._passes.primitives import CALLS

LIMIT = 1 << 19  # elements that are transposed; more cost what the fast routine gains


def in_order(closed: jex.ClosedJaxpr, *args: jax.Array) -> list[jax.Array]:
    """Computes a jaxpr, its products that sum over first dimensions and its convolutions by XLA's fast routines."""
    return _InOrder().run(closed, args)


def rule_for(eqn: jex.JaxprEqn) -> Rule[jax.Array] | None:
    """Returns what computes an equation in another form, None for equations that XLA computes fast."""
    return _product if _sums_over_rows(eqn) else cpu_convolutions.rule_for(eqn)


class _InOrder(Interpreter[jax.Array]):
    def rule(self, eqn: jex.JaxprEqn) -> Rule[jax.Array] | None:
        if (rule := rule_for(eqn)) is not None:
            return rule
        if eqn.primitive.name in CALLS and any(rule_for(inner) is not None for inner in equations_in(eqn)):
            return self.enter
        return None


def _sums_over_rows(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an equation is a product that sums over the first dimensions of both factors."""
    if eqn.primitive.name != "dot_general":
        return False
    (left, right), batches = eqn.params["dimension_numbers"]
    first = tuple(range(len(left)))
    if any(batches) or not first or tuple(left) != first or tuple(right) != first:
        return False
    if not all(jnp.issubdtype(kind_of(x).dtype, jnp.floating) for x in eqn.invars):
        return False
    rows = math.prod(kind_of(eqn.invars[0]).shape[: len(first)])
    sizes = [kind_of(x).size for x in eqn.invars]
    return all(x > rows for x in sizes) and min(_transposed(eqn)) <= LIMIT


def _transposed(eqn: jex.JaxprEqn) -> tuple[int, int]:
    """Returns how many elements are transposed in a product with the left factor first, and with the right one."""
    left, right, result = (kind_of(x).size for x in (*eqn.invars, eqn.outvars[0]))
    return left + result, right


def _product(eqn: jex.JaxprEqn, operands: list[jax.Array]) -> list[jax.Array]:
    """Computes such an equation with one factor transposed, as is less work."""
    left, right = operands
    (sums, _), _ = eqn.params["dimension_numbers"]
    at, out = len(sums), kind_of(eqn.outvars[0]).shape
    left, right = (lax.reshape(x, (math.prod(x.shape[:at]), math.prod(x.shape[at:]))) for x in (left, right))

    def product(first: jax.Array, second: jax.Array) -> jax.Array:
        first = lax.optimization_barrier(lax.transpose(first, (1, 0)))
        params = {**eqn.params, "dimension_numbers": (((1,), (0,)), ((), ()))}
        (result,) = jax_internals.rebind(eqn, params, [first, second])
        kept: jax.Array = lax.optimization_barrier(result)
        return kept

    left_first, right_first = _transposed(eqn)
    if left_first <= right_first:
        return [lax.reshape(product(left, right), out)]
    return [lax.reshape(lax.transpose(product(right, left), (1, 0)), out)]
