"""All-reduces of a program that need not wait for each other, in one message.

A message between CPU devices, and more so between processes, costs far more than the first hundred kilobytes in it. XLA
puts all-reduces together, but on CPU devices it still sends one buffer after another. So before a function is compiled,
the sums over the replicas in it are put in order of what they wait for, and small ones that stand at the same place are
packed into one vector (see `_collectives.all_reduce.Fit`). A loss that is reduced outside of `run` travels with the
gradients in this way.

The program is cut into stages: what needs no message, then the first one, what needs that, the second, and so on. What
is computed alike of the parts of a message, or of the variables of a pack, is computed at once (see `vectorize`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from replicax._base import jax_internals
from replicax._base.jaxprs import Atom, kind_of
from replicax._collectives.all_reduce import Packing, all_reduce_p
from replicax._passes.facts import Facts
from replicax._passes.interpret import stages
from replicax._passes.jaxpr_graph import returns_rows, runs_replicas
from replicax._passes.vectorize import Piece, Value, Values, joined, pieces, whole
from replicax._values import AXIS


def applies(closed: jex.ClosedJaxpr, facts: Facts) -> bool:
    """Return whether a program has messages to merge, or vectors of variables to compute with."""
    if closed.effects:
        return False
    needs_order = facts.mesh is not None and facts.mesh.needs_bound
    if facts.vectors is None and not needs_order:
        return False
    return bool(facts.vectors) or any(runs_replicas(eqn) for eqn in closed.jaxpr.eqns)


def evaluate(closed: jex.ClosedJaxpr, facts: Facts, args: Sequence[jax.Array]) -> list[jax.Array]:
    """Compute a program, its sums over replicas in as few messages as possible.

    What is computed alike of parts of a vector is computed at once: of the vectors among the arguments, of those in
    messages, and for the results in `facts.vectors`.
    """
    jaxpr, packing = closed.jaxpr, facts.packing
    assert packing is not None
    values = Values(jaxpr, [*zip(jaxpr.constvars, closed.consts), *zip(jaxpr.invars, args)])
    for eqn in jaxpr.eqns:
        if runs_replicas(eqn) and eqn.outvars:
            _take_over(eqn, jaxpr, values, packing)
        else:
            values.take_piece(eqn)
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    vectors: dict[int, tuple[list[jex.JaxprEqn], jex.JaxprEqn]] = {}  # of places: constraints, and the concatenation
    for place in facts.vectors or ():
        constraints, eqn = [], made_by[jaxpr.outvars[place]]
        while eqn.primitive.name == "sharding_constraint":
            constraints.append(eqn)
            eqn = made_by[eqn.invars[0]]
        if eqn.primitive.name == "concatenate":
            vectors[place] = constraints, eqn
    others = [atom for place, atom in enumerate(jaxpr.outvars) if place not in vectors]
    arrays, joined_arrays = values.arrays_and_vectors(others, [eqn.invars for _, eqn in vectors.values()])
    results = {}
    for (place, (constraints, _)), vector in zip(vectors.items(), joined_arrays):
        for eqn in reversed(constraints):
            (vector,) = jax_internals.rebind(eqn, eqn.params, [vector])
        results[place] = vector
    rest = iter(arrays)
    return [results[i] if i in results else whole(next(rest)) for i in range(len(jaxpr.outvars))]


def _outputs(
    values: Values, outvars: Sequence[Atom], wanted: Sequence[Sequence[int]]
) -> tuple[Sequence[jax.Array | None], list[jax.Array]]:
    """Returns the values of variables, None for those in the wanted vectors, and these vectors."""
    taken = {place for places in wanted for place in places}
    left = (atom for place, atom in enumerate(outvars) if place not in taken)
    arrays, vectors = values.arrays_and_vectors(left, [[outvars[place] for place in places] for places in wanted])
    rest = iter(arrays)
    return [None if place in taken else whole(next(rest)) for place in range(len(outvars))], vectors


def _take_over(eqn: jex.JaxprEqn, jaxpr: jex.Jaxpr, values: Values, packing: Packing) -> None:
    """Has the replicas' program be evaluated in stages, together with the sums of what they return."""
    sums = _sums_of_rows(eqn, jaxpr.eqns, packing.fit.most)
    outputs: list[Atom] = [*eqn.outvars]
    rows = [outputs.index(one.invars[0]) for one in sums]
    replicated = {var for var, spec in zip(eqn.outvars, eqn.params["out_specs"]) if not any(spec)}

    def run(wanted: list[list[int]]) -> None:
        operands: list[jax.Array] = []
        specs: list[PartitionSpec] = []
        vectors: dict[int, int] = {}  # where the vectors of pieces stand among the operands
        # For each input of the replicas its operand, and which piece of that it is.
        inner: list[tuple[int, Piece | None]] = []
        for value, spec in zip(values.of(eqn.invars), eqn.params["in_specs"]):
            piece = value if isinstance(value, Piece) and not any(spec) else None
            value = whole(value) if piece is None else piece.vector
            if piece is None or id(value) not in vectors:
                vectors[id(value)] = len(operands)
                operands.append(value)
                specs.append(spec)
            inner.append((vectors[id(value)] if piece is not None else len(operands) - 1, piece))

        def replica(*blocks: jax.Array) -> list[jax.Array]:
            args = [blocks[i] if p is None else Piece(blocks[i], p.start, p.shape) for i, p in inner]
            return _staged(eqn.params["jaxpr"], args, packing, rows, wanted)

        taken = {place for places in wanted for place in places}
        left = [place for place in range(len(eqn.outvars)) if place not in taken]
        out_specs = [eqn.params["out_specs"][place] for place in left]
        same = [PartitionSpec()] * (len(rows) + len(wanted))
        results = iter(jax_internals.shard_map_like(eqn, replica, specs, [*out_specs, *same])(*operands))
        values.set([eqn.outvars[place] for place in left], results)
        values.set([one.outvars[0] for one in sums], results)
        for places, vector in zip(wanted, results):
            parts = [eqn.outvars[place] for place in places]
            values.set(parts, pieces(vector, [kind_of(var).shape for var in parts]))

    values.take_over(eqn, run, replicated, [one.outvars[0] for one in sums])


def _sums_of_rows(mapped: jex.JaxprEqn, eqns: Iterable[jex.JaxprEqn], most: int) -> list[jex.JaxprEqn]:
    """Finds the equations that do nothing but add up what each replica returned, of at most so many bytes."""
    return [
        eqn
        for eqn in eqns
        if eqn.primitive.name == "reduce_sum"
        and tuple(eqn.params["axes"]) == (0,)
        and eqn.invars[0] in mapped.outvars
        and returns_rows(mapped, mapped.outvars.index(eqn.invars[0]))
        and (kind := kind_of(eqn.outvars[0])).size * kind.dtype.itemsize <= most
    ]


def _staged(
    jaxpr: jex.Jaxpr,
    args: Sequence[Value],
    packing: Packing,
    row_places: Sequence[int],
    wanted: Sequence[Sequence[int]],
) -> list[jax.Array]:
    """Computes one replica's jaxpr: its outputs, the sums over the replicas of some of them, and the wanted vectors."""
    values = Values(jaxpr, zip(jaxpr.invars, args))
    waits = stages(jaxpr, _is_sum)  # for each variable, for how many messages, one after another
    sums: list[list[tuple[Atom, jex.Var]]] = [[]]  # for each stage, what is added up after it, and the results
    for eqn in filter(_is_sum, jaxpr.eqns):
        at = max(waits.of(eqn.invars))
        sums += [[] for _ in range(at + 2 - len(sums))]
        sums[at] += zip(eqn.invars, eqn.outvars)
    rows = [jaxpr.outvars[place] for place in row_places]
    row_sums: dict[int, jax.Array] = {}
    for at, of_stage in enumerate(sums):
        own = [i for i, atom in enumerate(rows) if waits.of([atom]) == [at]]
        parts = values.of([*(operand for operand, _ in of_stage), *(rows[i] for i in own)])
        parts[len(of_stage) :] = [whole(row)[0] for row in parts[len(of_stage) :]]
        totals = _all_reduced(parts, packing)
        values.set([result for _, result in of_stage], totals)
        row_sums.update(zip(own, map(whole, totals[len(of_stage) :])))
    results, vectors = _outputs(values, jaxpr.outvars, wanted)
    return [*(result for result in results if result is not None), *(row_sums[i] for i in range(len(rows))), *vectors]


def _is_sum(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an equation adds up over all replicas, in as many messages as we like."""
    params = eqn.params
    if eqn.primitive is all_reduce_p:
        return bool(params["packing"].merges)
    return eqn.primitive.name == "psum" and params["axes"] == (AXIS,) and params["axis_index_groups"] is None


def _all_reduced(parts: Sequence[Value], packing: Packing) -> list[Value]:
    """Adds up values over the replicas; the results of those that share a message are pieces of its vector."""
    parts = [part if isinstance(part, Piece) else jnp.asarray(part) for part in parts]
    results: dict[int, Value] = {}
    for group in packing.groups(parts):
        if len(group) == 1:
            results[group[0]] = packing.add(whole(parts[group[0]]))
        else:
            total = packing.add(joined([parts[i] for i in group]))
            results.update(zip(group, pieces(total, [parts[i].shape for i in group])))
    return [results[i] for i in range(len(parts))]
