"""All-reduces of a program that need not wait for each other, in one message.

A message between CPU devices, and more so between processes, costs far more than the first hundred kilobytes in it. XLA
puts all-reduces together, but on CPU devices it still sends one buffer after another. So before a function is compiled,
the sums over the replicas in it are put in order of what they wait for, and those that stand at the same place are
packed into one vector. A loss that is reduced outside of `run` travels with the gradients in this way.

The program is cut into stages: what needs no message, then the first one, what needs that, the second, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from replicax import _collectives, _private
from replicax._values import AXIS

LIMIT = 1 << 20  # bytes; packing copies, which costs more than a message where there are many bytes


def evaluate(closed: Any, *args: Any) -> list[Any]:
    """What the program of a jaxpr computes, its sums over replicas in as few messages as they can be."""
    jaxpr = closed.jaxpr
    if jaxpr.effects or not any(_is_mapped(eqn) for eqn in jaxpr.eqns):
        return jex.jaxpr_as_fun(closed)(*args)
    values = _Values(jaxpr, [*zip(jaxpr.constvars, closed.consts), *zip(jaxpr.invars, args)])
    done: set[int] = set()  # equations that a mapped one before them has computed as well
    waiting: list[Any] = []
    for eqn in jaxpr.eqns:
        if id(eqn) in done:
            continue
        if not _is_mapped(eqn):
            waiting.append(eqn)
            continue
        values.compute(waiting)
        waiting = []
        sums = _sums_of_rows(eqn, jaxpr.eqns)
        done.update(id(one) for one in sums)
        places = [eqn.outvars.index(one.invars[0]) for one in sums]
        results = _private.shard_map_again(
            eqn, lambda *blocks, eqn=eqn, places=places: _staged(eqn.params["jaxpr"], blocks, places), len(sums)
        )(*values.of(eqn.invars))
        values.set([*eqn.outvars, *(one.outvars[0] for one in sums)], results)
    values.compute(waiting)
    return values.of(jaxpr.outvars)


def _is_mapped(eqn: Any) -> bool:
    """Whether an equation runs replicas, whose jaxpr may be computed in another order."""
    if eqn.primitive.name != "shard_map" or AXIS not in eqn.params["mesh"].axis_names:
        return False
    return not eqn.params["jaxpr"].constvars and all(type(e) in _HARMLESS for e in eqn.params["jaxpr"].effects)


_HARMLESS = {_private.named_axis_effect()}


def _sums_of_rows(mapped: Any, eqns: Iterable[Any]) -> list[Any]:
    """The equations that do nothing but add up what each replica returned."""
    return [
        eqn
        for eqn in eqns
        if eqn.primitive.name == "reduce_sum"
        and tuple(eqn.params["axes"]) == (0,)
        and eqn.invars[0] in mapped.outvars
        and _is_rows(mapped, mapped.outvars.index(eqn.invars[0]))
        and _bytes(eqn.outvars[0].aval) <= LIMIT
    ]


def _is_rows(mapped: Any, place: int) -> bool:
    axes = tuple(mapped.params["out_specs"][place])
    inside = mapped.params["jaxpr"].outvars[place]
    return axes[:1] == (AXIS,) and not any(axes[1:]) and inside.aval.shape[0] == 1


def _staged(jaxpr: Any, args: Sequence[Any], row_places: Sequence[int]) -> list[Any]:
    """The outputs of one replica's jaxpr, and the sums over the replicas of those at these places."""
    values = _Values(jaxpr, zip(jaxpr.invars, args))
    stage: dict[Any, int] = {}  # of each variable that waits for a message, for how many

    def stage_of(atoms: Iterable[Any]) -> int:
        return max((stage.get(atom, 0) for atom in atoms if not isinstance(atom, jex.Literal)), default=0)

    stages: list[list[Any]] = [[]]
    messages: list[list[tuple[Any, Any]]] = [[]]  # for each stage, what is added up after it, and what that gives
    for eqn in jaxpr.eqns:
        at = stage_of(eqn.invars)
        if _is_sum(eqn):
            messages[at] += zip(eqn.invars, eqn.outvars)
            if len(stages) == at + 1:
                stages.append([])
                messages.append([])
        else:
            stages[at].append(eqn)
        stage.update((var, at + _is_sum(eqn)) for var in eqn.outvars)
    rows = [jaxpr.outvars[place] for place in row_places]
    row_sums: list[Any] = [None] * len(rows)
    for at, eqns in enumerate(stages):
        values.compute(eqns)
        own = [i for i, atom in enumerate(rows) if stage_of([atom]) == at]
        parts = [*values.of(atom for atom, _ in messages[at]), *(row[0] for row in values.of(rows[i] for i in own))]
        sums = _all_reduced(parts)
        values.set([var for _, var in messages[at]], sums)
        for i, total in zip(own, sums[len(messages[at]) :]):
            row_sums[i] = total
    return [*values.of(jaxpr.outvars), *row_sums]


def _is_sum(eqn: Any) -> bool:
    params = eqn.params
    return eqn.primitive.name == "psum" and params["axes"] == (AXIS,) and params["axis_index_groups"] is None


def _all_reduced(parts: list[Any]) -> list[Any]:
    parts = [jnp.asarray(part) for part in parts]
    return _collectives.packed(parts, lambda part: lax.psum(part, AXIS), _packs)


def _packs(parts: list[Any]) -> list[list[int]]:
    return _collectives.packs_by_dtype(parts, LIMIT)


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


class _Values:
    """The values of a jaxpr's variables, as far as they are computed."""

    def __init__(self, jaxpr: Any, known: Iterable[tuple[Any, Any]]):
        self._jaxpr, self._values = jaxpr, dict(known)

    def of(self, atoms: Iterable[Any]) -> list[Any]:
        return [atom.val if isinstance(atom, jex.Literal) else self._values[atom] for atom in atoms]

    def set(self, variables: Iterable[Any], values: Iterable[Any]) -> None:
        self._values.update(zip(variables, values))

    def compute(self, eqns: Sequence[Any]) -> None:
        """Computes some equations, which need nothing but what is known and each other."""
        if not eqns:
            return
        made = list(dict.fromkeys(var for eqn in eqns for var in eqn.outvars if not isinstance(var, jex.DropVar)))
        atoms = (atom for eqn in eqns for atom in eqn.invars if not isinstance(atom, jex.Literal))
        needed = [var for var in dict.fromkeys(atoms) if var in self._values]
        part = _private.part_of_jaxpr(self._jaxpr, eqns, needed, made)
        self.set(made, jex.jaxpr_as_fun(part)(*self.of(needed)))
