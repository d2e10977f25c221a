"""Reading jaxprs: the jaxprs and equations in them, at any depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from replicax._base import jax_internals

Atom = jex.Var | jex.Literal
AnyJaxpr = jex.Jaxpr | jex.ClosedJaxpr


def opened(jaxpr: AnyJaxpr) -> tuple[jex.Jaxpr, Sequence[Any]]:
    """Returns a jaxpr without its constants, and these."""
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, jex.ClosedJaxpr) else (jaxpr, ())


def kind_of(atom: Atom) -> jax.core.ShapedArray:
    """Returns the shape and dtype of a variable or literal."""
    kind: jax.core.ShapedArray = atom.aval  # type: ignore[assignment]  # JAX's own types are wider
    return kind


def jaxprs_in(value: object) -> Iterator[AnyJaxpr]:
    """Yields the jaxprs in a parameter of an equation, or in a list of parameters."""
    if isinstance(value, AnyJaxpr):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from jaxprs_in(item)


def equations(jaxpr: AnyJaxpr) -> Iterator[jex.JaxprEqn]:
    """Yields the equations of a jaxpr, and those of the jaxprs in them."""
    for eqn in opened(jaxpr)[0].eqns:
        yield eqn
        yield from equations_in(eqn)


def equations_in(eqn: jex.JaxprEqn) -> Iterator[jex.JaxprEqn]:
    """Yields the equations of the jaxprs in an equation."""
    for inner in jaxprs_in([*eqn.params.values()]):
        yield from equations(inner)


def has_side_effects(jaxpr: jex.Jaxpr) -> bool:
    """Returns whether a jaxpr does more than compute, such as print."""
    return any(not isinstance(effect, _NAMED_AXIS) for effect in jaxpr.effects)


_NAMED_AXIS = jax_internals.named_axis_effect()
