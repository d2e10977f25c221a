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

from replicax import _private
from replicax._primitives import COLLECTIVES
from replicax._stages import _is_mapped, _is_rows


class _Rows(NamedTuple):
    """Rows that the replicas have returned, one each, and the row that each of them takes for all."""

    all: Any
    own: Any


def alone(closed: Any) -> Any:
    """The program of a level, in which each replica is alone."""
    types = [var.aval for var in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: _plain(_evaluated(closed.jaxpr, closed.consts, args)))(*types)


def _plain(values: Sequence[Any]) -> list[Any]:
    return [value.all if isinstance(value, _Rows) else value for value in values]


def _evaluated(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values = dict([*zip(jaxpr.constvars, consts), *zip(jaxpr.invars, args)])

    def of(atoms: Sequence[Any]) -> list[Any]:
        return [atom.val if isinstance(atom, jex.Literal) else values[atom] for atom in atoms]

    for eqn in jaxpr.eqns:
        operands = of(eqn.invars)
        name, inside = eqn.primitive.name, eqn.params.get("jaxpr")
        if name in COLLECTIVES:
            results = [_filled(operand, var.aval) for operand, var in zip(operands, eqn.outvars)]
        elif _is_mapped(eqn):
            results = _mapped(eqn, _plain(operands))
        elif name in ("jit", "pjit") and _communicates(inside):
            results = _evaluated(inside.jaxpr, inside.consts, operands)
        else:
            if name.startswith("reduce_") and 0 in eqn.params.get("axes", ()):  # of rows it is an all-reduce
                operands = [x.own if isinstance(x, _Rows) else x for x in operands]
            params = {name: _without(value) for name, value in eqn.params.items()}
            results = _private.bound_again(eqn, params, _plain(operands))
        values.update(zip(eqn.outvars, results))
    return of(jaxpr.outvars)


def _mapped(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """What the replicas of a mapped equation return, each of them alone."""
    rows = [place for place in range(len(eqn.outvars)) if _is_rows(eqn, place)]

    def replica(*blocks: Any) -> list[Any]:
        results = _plain(_evaluated(eqn.params["jaxpr"], (), blocks))
        return [*results, *(results[place] for place in rows)]

    in_specs, out_specs = eqn.params["in_specs"], [*eqn.params["out_specs"], *[PartitionSpec()] * len(rows)]
    results = _private.shard_map_again(eqn, replica, in_specs, out_specs)(*operands)
    own = dict(zip(rows, results[len(eqn.outvars) :]))
    return [_Rows(x, own[i]) if i in own else x for i, x in enumerate(results[: len(eqn.outvars)])]


def _without(param: Any) -> Any:
    """A parameter of an equation, programs in it without their communication."""
    if not _communicates(param):
        return param
    if isinstance(param, tuple):
        return tuple(_without(part) for part in param)
    jaxpr, consts = (param.jaxpr, param.consts) if isinstance(param, jex.ClosedJaxpr) else (param, ())
    closed = jax.make_jaxpr(lambda *args: _plain(_evaluated(jaxpr, consts, args)))(*[var.aval for var in jaxpr.invars])
    return closed if isinstance(param, jex.ClosedJaxpr) else closed.jaxpr


def _communicates(param: Any) -> bool:
    """Whether there is communication in the programs of a parameter, or in that of replicas that they run."""
    if isinstance(param, tuple):
        return any(_communicates(part) for part in param)
    return isinstance(param, (jex.ClosedJaxpr, jex.Jaxpr)) and any(
        eqn.primitive.name in COLLECTIVES or _is_mapped(eqn) or any(map(_communicates, eqn.params.values()))
        for eqn in param.eqns
    )


def _filled(operand: Any, aval: Any) -> Any:
    """Returns the replica's own value; where a collective's result has another shape, parts of the value fill it."""
    return operand if operand.shape == aval.shape else jnp.resize(operand, aval.shape)
