"""A program with its communication taken out: what the step would cost if messages were free.

Each replica takes its own value for what the others would send it. The results are wrong, the arithmetic is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from replicax._base import jax_internals
from replicax._base.jaxprs import AnyJaxpr, equations_in, kind_of, opened
from replicax._passes.interpret import Interpreter, Rule
from replicax._passes.jaxpr_graph import returns_rows, runs_replicas
from replicax._passes.primitives import CALLS, COLLECTIVES


class _Rows(NamedTuple):
    """Rows that the replicas have returned, one each, and the row that each of them takes for all."""

    all: jax.Array
    own: jax.Array


_Value = jax.Array | _Rows


def alone(closed: AnyJaxpr) -> jex.ClosedJaxpr:
    """Returns the program of a level, in which each replica is alone."""
    types = [kind_of(var) for var in opened(closed)[0].invars]
    program: jex.ClosedJaxpr = jax.make_jaxpr(lambda *args: _plain(_Alone().run(closed, args)))(*types)
    return program


def _plain(values: Sequence[_Value]) -> list[jax.Array]:
    return [value.all if isinstance(value, _Rows) else value for value in values]


class _Alone(Interpreter[_Value]):
    """Computes a program in which each replica is alone. What replicas return may be `_Rows`."""

    def rule(self, eqn: jex.JaxprEqn) -> Rule[_Value] | None:
        name = eqn.primitive.name
        if name in COLLECTIVES:
            return _filled
        if runs_replicas(eqn):
            return _mapped
        if name.startswith("reduce_") and 0 in eqn.params.get("axes", ()):
            return _reduced
        if not _communicates(eqn):
            return None
        return self.enter if name in CALLS else _with_programs_alone

    def array(self, value: _Value) -> jax.Array:
        return value.all if isinstance(value, _Rows) else value


def _communicates(eqn: jex.JaxprEqn) -> bool:
    """Returns True if the programs in an equation communicate, or have replicas in them."""
    return any(one.primitive.name in COLLECTIVES or runs_replicas(one) for one in equations_in(eqn))


def _filled(eqn: jex.JaxprEqn, operands: list[_Value]) -> list[_Value]:
    """Takes the replica's own value; where a collective's result has another shape, parts of the value fill it."""
    shapes = (kind_of(var).shape for var in eqn.outvars)
    return [x if x.shape == shape else jnp.resize(x, shape) for x, shape in zip(_plain(operands), shapes)]


def _reduced(eqn: jex.JaxprEqn, operands: list[_Value]) -> list[_Value]:
    """Reduces along the first dimension; of rows of replicas that is an all-reduce."""
    own = [x.own if isinstance(x, _Rows) else x for x in operands]
    return jax_internals.rebind(eqn, eqn.params, own)


def _with_programs_alone(eqn: jex.JaxprEqn, operands: list[_Value]) -> list[_Value]:
    """Computes an equation with programs in it, such as a loop, in which each replica is alone."""
    params = {name: _without(value) for name, value in eqn.params.items()}
    return jax_internals.rebind(eqn, params, _plain(operands))


def _mapped(eqn: jex.JaxprEqn, operands: list[_Value]) -> list[_Value]:
    """Returns what the replicas of a `shard_map` compute, each of them alone."""
    rows = [place for place in range(len(eqn.outvars)) if returns_rows(eqn, place)]

    def replica(*blocks: jax.Array) -> list[jax.Array]:
        results = _plain(_Alone().run(eqn.params["jaxpr"], blocks))
        return [*results, *(results[place] for place in rows)]

    in_specs, out_specs = eqn.params["in_specs"], [*eqn.params["out_specs"], *[PartitionSpec()] * len(rows)]
    results = jax_internals.shard_map_like(eqn, replica, in_specs, out_specs)(*_plain(operands))
    own = dict(zip(rows, results[len(eqn.outvars) :]))
    return [_Rows(x, own[i]) if i in own else x for i, x in enumerate(results[: len(eqn.outvars)])]


def _without(param: Any) -> Any:
    """Returns a parameter of an equation, programs in it without their communication."""
    if isinstance(param, tuple):
        return tuple(_without(part) for part in param)
    if isinstance(param, jex.ClosedJaxpr):
        return alone(param)
    return alone(param).jaxpr if isinstance(param, jex.Jaxpr) else param
