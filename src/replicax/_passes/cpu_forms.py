"""Forms of equations that XLA for CPUs compiles to fast code, each with the versions of XLA that need it.

Matrix products are in the order of dimensions that its fast routine takes: [rows, sum] x [sum, columns]. The gradient
of a layer's weights sums over the first dimension of both factors. XLA folds the transposition that this takes into the
product, which its fast routine then refuses, unless a barrier keeps the two apart. (`jax.jit` of arrays with a
`NamedSharding` comes to the fast routine by chance, because XLA partitions it before it folds.) For convolutions see
`_passes.cpu_convolutions`. benchmarks/products.py and benchmarks/convolutions.py measure the gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import jaxlib
from jax import lax

from replicax._base import jax_internals
from replicax._base.jaxprs import equations, equations_in, kind_of
from replicax._passes import cpu_convolutions
from replicax._passes.facts import Facts, Stage
from replicax._passes.interpret import Rewriting, Rule
from replicax._passes.primitives import CALLS, CHECKPOINTS


@dataclass(frozen=True)
class Form:
    """A faster form of some equations on CPUs.

    Attributes:
        primitive: the name of the equations' primitive.
        rule_for: returns the rule that computes an equation in this form, None for an equation that XLA computes fast.
        since: the first version of jaxlib that is known to need it.
        until: the first version of jaxlib that does not; None while all versions need it.
    """

    primitive: str
    rule_for: Callable[[jex.JaxprEqn], Rule[jax.Array] | None]
    since: str
    until: str | None

    def is_needed(self, jaxlib_version: str) -> bool:
        """Return whether XLA of this version of jaxlib needs the form.

        >>> form = Form("dot_general", lambda eqn: None, since="0.10.2", until="0.13")
        >>> [form.is_needed(version) for version in ("0.9.1", "0.10.2", "0.12.0.1", "0.13.0")]
        [False, True, True, False]
        """
        version = _numbers(jaxlib_version)
        return _numbers(self.since) <= version and (self.until is None or version < _numbers(self.until))


LIMIT = 1 << 19  # elements that are transposed; more cost what the fast routine gains


def _product_rule_for(eqn: jex.JaxprEqn) -> Rule[jax.Array] | None:
    """Return the rule that computes a product in that order, None for other equations."""
    return _product if _sums_over_rows(eqn) else None


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


# XLA of jaxlib 0.10.2 and 0.12.0.1 needs all of them.
PRODUCTS = Form("dot_general", _product_rule_for, since="0.10.2", until=None)
CONVOLUTIONS = Form("conv_general_dilated", cpu_convolutions.rule_for, since="0.10.2", until=None)
INNER_CONVOLUTIONS = Form("conv_general_dilated", cpu_convolutions.order_for, since="0.10.2", until=None)


def applies(closed: jex.ClosedJaxpr, facts: Facts) -> bool:
    """Return whether equations of a jaxpr have a faster form."""
    if closed.effects and facts.stage is Stage.FUNCTION:
        return False
    rule_for = _rule_for(facts)
    return rule_for is not None and any(rule_for(eqn) is not None for eqn in equations(closed))


def evaluate(closed: jex.ClosedJaxpr, facts: Facts, args: Sequence[jax.Array]) -> list[jax.Array]:
    """Compute a jaxpr with equations in their faster forms."""
    rule_for = _rule_for(facts)
    assert rule_for is not None
    # Inside of branches and loops checkpoints have no use: nothing differentiates any more.
    calls = {**CALLS, **CHECKPOINTS} if facts.is_branch or facts.is_loop else CALLS
    return Rewriting(_in_replicas(rule_for, calls) if facts.is_loop else rule_for, calls).run(closed, args)


def _rule_for(facts: Facts) -> Callable[[jex.JaxprEqn], Rule[jax.Array] | None] | None:
    """Return the rules for the equations of a jaxpr; None for a jaxpr that was rewritten in an earlier stage."""
    if facts.stage is Stage.PROGRAM:
        forms = [INNER_CONVOLUTIONS] if facts.is_loop else []
    elif facts.stage is Stage.FUNCTION:
        forms = [CONVOLUTIONS]
    else:
        forms = [PRODUCTS, INNER_CONVOLUTIONS if facts.is_branch else CONVOLUTIONS]
    rules = {form.primitive: form.rule_for for form in forms if form.is_needed(jaxlib.__version__)}

    def rule_for(eqn: jex.JaxprEqn) -> Rule[jax.Array] | None:
        own = rules.get(eqn.primitive.name)
        return None if own is None else own(eqn)

    return rule_for if rules else None


def _in_replicas(
    rule_for: Callable[[jex.JaxprEqn], Rule[jax.Array] | None], calls: Mapping[str, str]
) -> Callable[[jex.JaxprEqn], Rule[jax.Array] | None]:
    """Return rules that also hold in the programs of replicas."""

    def compute(eqn: jex.JaxprEqn, args: list[jax.Array]) -> list[jax.Array]:
        params = eqn.params

        def replica(*blocks: jax.Array) -> list[jax.Array]:
            return Rewriting(rule_for, calls).run(params["jaxpr"], blocks)

        return list(jax_internals.shard_map_like(eqn, replica, params["in_specs"], params["out_specs"])(*args))

    def of_equation(eqn: jex.JaxprEqn) -> Rule[jax.Array] | None:
        if eqn.primitive.name != "shard_map" or eqn.params["jaxpr"].constvars:
            return rule_for(eqn)
        return compute if any(map(rule_for, equations_in(eqn))) else None

    return of_equation


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
