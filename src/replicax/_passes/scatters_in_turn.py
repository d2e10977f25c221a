"""Reduce-scatters of gradients, one message after another in the order in which the gradients are ready.

XLA for GPUs combines reduce-scatters that do not depend on each other. The combined message starts after the last
gradient: no computation is left to overlap with it, and all gradients take memory until then. Here each message waits
for the previous one, by an optimization barrier. XLA for GPUs removes barriers only after it has combined collectives.
The order follows the backward pass, not the names of the variables.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.extend.core as jex
from jax import lax

from replicax._base import jax_internals
from replicax._base.jaxprs import Atom, kind_of
from replicax._passes.facts import Facts
from replicax._passes.interpret import Interpreter, Rule, needed_for
from replicax._passes.jaxpr_graph import runs_replicas
from replicax._passes.primitives import ELEMENTWISE, SAME_ELEMENTS
from replicax._values import AXIS

# Equations that take hardly any time: their results are ready when their operands are.
_BRIEF = ELEMENTWISE | SAME_ELEMENTS | {"transpose", "slice", "optimization_barrier"}


def applies(closed: jex.ClosedJaxpr, facts: Facts) -> bool:
    """Return whether replicas send two messages of reduce-scatters or more."""
    size = _message_size(facts)
    return not closed.effects and any(len(_messages(eqn, size)) > 1 for eqn in closed.jaxpr.eqns)


def evaluate(closed: jex.ClosedJaxpr, facts: Facts, args: Sequence[jax.Array]) -> list[jax.Array]:
    """Compute the jaxpr of a function with the replicas' reduce-scatters in turn."""
    return _InTurn(_message_size(facts)).run(closed, args)


def _message_size(facts: Facts) -> int:
    """Return the bytes that close a message. XLA may combine the reduce-scatters of a message."""
    assert facts.packing is not None
    return facts.packing.fit.ahead


class _InTurn(Interpreter[jax.Array]):
    def __init__(self, message_size: int):
        self._message_size = message_size

    def rule(self, eqn: jex.JaxprEqn) -> Rule[jax.Array] | None:
        messages = _messages(eqn, self._message_size)
        return None if len(messages) < 2 else lambda eqn, operands: _run_replicas(eqn, operands, messages)


def _messages(mapped: jex.JaxprEqn, message_size: int) -> list[list[jex.JaxprEqn]]:
    """Return the messages of the replicas' program as lists of reduce-scatters, in the order of their operands."""
    if not runs_replicas(mapped):
        return []
    messages: list[list[jex.JaxprEqn]] = []
    size = message_size
    for eqn in _scatters(mapped.params["jaxpr"]):
        if size >= message_size:
            messages.append([])
            size = 0
        messages[-1].append(eqn)
        kind = kind_of(eqn.invars[0])
        size += kind.size * kind.dtype.itemsize
    return messages


def _scatters(jaxpr: jex.Jaxpr) -> list[jex.JaxprEqn]:
    """Return the reduce-scatters over all replicas, in the order in which their operands are ready."""
    ready: dict[jex.Var, int] = {}  # the place of the last equation that takes time
    scatters: list[tuple[int, jex.JaxprEqn]] = []
    for place, eqn in enumerate(jaxpr.eqns):
        operands_ready = max((ready.get(x, -1) for x in eqn.invars if isinstance(x, jex.Var)), default=-1)
        if _is_scatter(eqn):
            scatters.append((operands_ready, eqn))
        result_ready = operands_ready if eqn.primitive.name in _BRIEF else place
        ready.update((var, result_ready) for var in eqn.outvars)
    return [eqn for _, eqn in sorted(scatters, key=lambda pair: pair[0])]


def _is_scatter(eqn: jex.JaxprEqn) -> bool:
    params = eqn.params
    if eqn.primitive.name != "reduce_scatter":
        return False
    return tuple(params["axis_name"]) == (AXIS,) and params["axis_index_groups"] is None


def _run_replicas(
    mapped: jex.JaxprEqn, operands: Sequence[jax.Array], messages: Sequence[Sequence[jex.JaxprEqn]]
) -> list[jax.Array]:
    params = mapped.params

    def replica(*blocks: jax.Array) -> list[jax.Array]:
        return _evaluate(params["jaxpr"], blocks, messages)

    return list(jax_internals.shard_map_like(mapped, replica, params["in_specs"], params["out_specs"])(*operands))


def _evaluate(
    jaxpr: jex.Jaxpr, args: Sequence[jax.Array], messages: Sequence[Sequence[jex.JaxprEqn]]
) -> list[jax.Array]:
    """Compute one replica's program; each message waits for the previous one."""
    arrays: dict[jex.Var, jax.Array] = dict(zip(jaxpr.invars, args))
    makers = {var: place for place, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}

    def values(atoms: Sequence[Atom]) -> list[jax.Array]:
        for eqn in needed_for(atoms, jaxpr, makers, arrays.__contains__)[0]:
            compute(eqn, [read(atom) for atom in eqn.invars])
        return [read(atom) for atom in atoms]

    def read(atom: Atom) -> jax.Array:
        return atom.val if isinstance(atom, jex.Literal) else arrays[atom]

    def compute(eqn: jex.JaxprEqn, operands: Sequence[jax.Array]) -> None:
        arrays.update(zip(eqn.outvars, jax_internals.rebind(eqn, eqn.params, operands)))

    previous: list[jax.Array] = []
    for message in messages:
        for eqn in message:
            (operand,) = values(eqn.invars)
            compute(eqn, lax.optimization_barrier((operand, *previous))[:1])
        previous = [arrays[eqn.outvars[0]] for eqn in message]
    return values(jaxpr.outvars)
