"""Programs computed on the parts of arrays that are cut for replicas; see `_collectives.sharding`.

Most of an optimizer goes element by element, and does so on the parts as on the whole. A reduction to one number (a
norm, "are all finite?") reduces the part and then meets the other replicas. All else gets the whole array, gathered
from all replicas, and so is right, if not cheap.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._base import jax_internals
from replicax._base.jaxprs import kind_of
from replicax._collectives import arithmetic
from replicax._collectives.sharding import Part, Same, Value, is_cut, own_part, whole
from replicax._passes.interpret import Interpreter, Rule
from replicax._passes.primitives import ELEMENTWISE, IN_CALLS, SAME_ELEMENTS
from replicax._values import AXIS


def evaluate(closed: jex.ClosedJaxpr, args: Sequence[Value], count: int) -> list[Value]:
    """Computes a closed jaxpr of arrays and parts, for so many replicas. Returns arrays and parts."""
    return _Evaluation(count).run(closed, args)


class _Evaluation(Interpreter[Value]):
    def __init__(self, count: int):
        self._count = count

    def literal(self, literal: jex.Literal) -> Value:
        return jnp.asarray(literal.val, kind_of(literal).dtype)

    def rule(self, eqn: jex.JaxprEqn) -> Rule[Value]:
        return self.enter if eqn.primitive.name in IN_CALLS else self._outputs

    def _outputs(self, eqn: jex.JaxprEqn, args: list[Value]) -> list[Value]:
        if not eqn.outvars:
            return jax_internals.rebind(eqn, eqn.params, [whole(arg) for arg in args])
        name, out = eqn.primitive.name, kind_of(eqn.outvars[0])
        if name == "broadcast_in_dim" and is_cut(out, self._count) and _is_number(args[0]):
            return [Same(_array(args[0]), out.shape)]
        if not any(isinstance(arg, (Part, Same)) for arg in args):
            return jax_internals.rebind(eqn, eqn.params, args)
        if name == "cond" and any(isinstance(arg, Part) for arg in args):
            return self._branches(eqn, args)
        result: Value | None = None
        if name in ELEMENTWISE and any(isinstance(arg, Part) for arg in args):
            result = Part(eqn.primitive.bind(*(self._aligned(arg, out) for arg in args), **eqn.params), out.shape)
        elif name in ELEMENTWISE and all(_is_number(arg) for arg in args):
            result = Same(eqn.primitive.bind(*(_array(arg) for arg in args), **eqn.params), out.shape)
        elif name in SAME_ELEMENTS and isinstance(args[0], Part) and out.size == math.prod(args[0].shape):
            if eqn.params.get("dimensions") is None or name == "squeeze":  # else `reshape` transposes first
                result = Part(args[0].part, out.shape)
        elif name in _REDUCTIONS and isinstance(args[0], Part) and out.size == 1:
            result = self._reduced(name, args[0], out)
        elif name == "dot_general" and out.ndim == 0:
            result = self._product(eqn, args, out)
        if result is None:
            return jax_internals.rebind(eqn, eqn.params, [whole(arg) for arg in args])
        return [result]

    def _aligned(self, arg: Value, out: jax.core.ShapedArray) -> jax.Array:
        """Returns the part of an operand, which is as large as the result or is broadcast to it."""
        if tuple(arg.shape) != tuple(out.shape):
            arg = Same(_array(arg), out.shape) if _is_number(arg) else jnp.broadcast_to(whole(arg), out.shape)
        return own_part(arg, self._count)

    def _product(self, eqn: jex.JaxprEqn, args: list[Value], out: jax.core.ShapedArray) -> jax.Array | None:
        """Returns the sum of the products of all elements; None for another product."""
        (left, right), _ = eqn.params["dimension_numbers"]
        if not tuple(left) == tuple(right) == tuple(range(len(args[0].shape))):
            return None
        first, second = (own_part(arg, self._count).astype(out.dtype) for arg in args)
        return self._reduced("reduce_sum", Part(first * second, args[0].shape), out)

    def _reduced(self, name: str, value: Part, out: jax.core.ShapedArray) -> jax.Array | None:
        """Reduces all elements of an array to one; returns None for what is not done on parts."""
        part, size = value.part, math.prod(value.shape)
        if name in ("reduce_and", "reduce_or"):
            if part.dtype != jnp.bool_:
                return None
            part = part.astype(jnp.int32)
        elif jnp.issubdtype(part.dtype, jnp.complexfloating) and name != "reduce_sum":
            return None
        neutral, reduce, meet = _REDUCTIONS[name]
        if part.size * self._count != size:
            place = lax.axis_index(AXIS) * part.size + jnp.arange(part.size)
            part = jnp.where(place < size, part, neutral(part.dtype))
        return jnp.reshape(meet(reduce(part)), out.shape).astype(out.dtype)

    def _branches(self, eqn: jex.JaxprEqn, args: list[Value]) -> list[Value]:
        """Computes a branch on a number that is the same on all replicas."""
        kinds = [kind_of(var) for var in eqn.outvars]

        def branch(closed: jex.ClosedJaxpr) -> Callable[[], list[jax.Array]]:
            def run() -> list[jax.Array]:
                own = [Part(arg.part, arg.shape) if isinstance(arg, Part) else arg for arg in args[1:]]
                results = self.run(closed, own)
                return [
                    own_part(x, self._count) if is_cut(k, self._count) else whole(x) for x, k in zip(results, kinds)
                ]

            return run

        results = lax.switch(args[0], [branch(closed) for closed in eqn.params["branches"]])
        return [Part(x, kind.shape) if is_cut(kind, self._count) else x for x, kind in zip(results, kinds)]


def _is_number(value: Value) -> bool:
    """Returns whether all elements of a value are the same."""
    return isinstance(value, Same) or (not isinstance(value, Part) and value.ndim == 0)


def _array(value: Value) -> jax.Array:
    """Returns a number that is the same at each place (see `_is_number`) as a scalar."""
    assert not isinstance(value, Part)
    return value.value if isinstance(value, Same) else value


def _least(dtype: np.dtype) -> float:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else int(jnp.iinfo(dtype).min)  # type: ignore[no-untyped-call]


def _greatest(dtype: np.dtype) -> float:
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else int(jnp.iinfo(dtype).max)  # type: ignore[no-untyped-call]


# For each reduction, what changes nothing in it, and how it is made on a part and on all replicas' results.
_OfArray = Callable[[jax.Array], jax.Array]
_REDUCTIONS: dict[str, tuple[Callable[[np.dtype], float], _OfArray, _OfArray]] = {
    "reduce_sum": (lambda dtype: 0, lambda x: jnp.sum(x, dtype=x.dtype), arithmetic.local_sum),
    "reduce_max": (_least, jnp.max, functools.partial(lax.pmax, axis_name=AXIS)),
    "reduce_min": (_greatest, jnp.min, functools.partial(lax.pmin, axis_name=AXIS)),
    "reduce_and": (lambda dtype: 1, jnp.min, functools.partial(lax.pmin, axis_name=AXIS)),
    "reduce_or": (lambda dtype: 0, jnp.max, functools.partial(lax.pmax, axis_name=AXIS)),
}
