"""Keys by which jaxprs of several traces are compared: what is computed alike has equal keys.

Unless they are `exact`, constants are compared by their values, and any two Python functions are taken to be the same:
made anew in each trace, constants and Python functions of custom derivatives are other objects and yet the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from replicax._base.jaxprs import AnyJaxpr, Atom, kind_of, opened


def key_of(value: object, exact: bool = True) -> Hashable:
    """Returns a key that equal parameters of equations share, and jaxprs that are alike."""
    if isinstance(value, AnyJaxpr):
        return key_of_jaxpr(*opened(value), exact)
    if isinstance(value, (tuple, list)):
        return (type(value), *(key_of(item, exact) for item in value))
    if isinstance(value, dict):
        return tuple((key, key_of(value[key], exact)) for key in sorted(value, key=str))
    if not exact and (hasattr(value, "call_wrapped") or (callable(value) and not isinstance(value, type))):
        return callable
    if isinstance(value, (float, np.floating)) and value != value:
        return "NaN"  # which equals nothing
    try:
        hash(value)
    except TypeError:
        return key_of_constant(value, exact)
    return value


def key_of_constant(value: Any, exact: bool) -> Hashable:
    """Returns a key of an array: which object it is or, unless `exact`, its values."""
    if exact or isinstance(value, jax.core.Tracer) or not hasattr(value, "dtype"):
        return object, id(value)
    host = jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
    return value.shape, value.dtype, np.asarray(host).tobytes()


def key_of_jaxpr(jaxpr: jex.Jaxpr, consts: Sequence[Any], exact: bool) -> Hashable:
    """Returns a key of what a jaxpr computes with these constants."""
    places: dict[jex.Var, int] = {}

    def atom_key(atom: Atom) -> Hashable:
        if isinstance(atom, jex.Literal):
            return key_of_literal(atom)
        return places.setdefault(atom, len(places)), kind_of(atom).shape, kind_of(atom).dtype

    keys = [*map(atom_key, [*jaxpr.constvars, *jaxpr.invars])]
    for eqn in jaxpr.eqns:
        keys.append((eqn.primitive, key_of(eqn.params, exact), *map(atom_key, [*eqn.invars, *eqn.outvars])))
    constants = (key_of_constant(value, exact) for value in consts)
    return ("jaxpr", *constants, *keys, *map(atom_key, jaxpr.outvars))


def key_of_literal(literal: jex.Literal) -> Hashable:
    """Returns a key of a literal: its kind and value."""
    return "literal", kind_of(literal).shape, kind_of(literal).dtype, np.asarray(literal.val).tobytes()
