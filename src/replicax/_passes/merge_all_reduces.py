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
from replicax._base.jaxprs import Atom, has_side_effects, kind_of
from replicax._collectives.all_reduce import Packing, all_reduce_p
from replicax._passes.interpret import stages
from replicax._passes.jaxpr_graph import Graph, Key
from replicax._passes.vectorize import Piece, Value, Values, joined, pieces, whole
from replicax._tracing import frames
from replicax._values import AXIS


def evaluate(
    level: frames.TraceFrame,
    closed: jex.ClosedJaxpr,
    supplied: dict[int, Value],
    args: Sequence[jax.Array],
    packing: Packing | None,
    wanted: Sequence[Sequence[int]] = (),
) -> tuple[Sequence[jax.Array | None], list[jax.Array]]:
    """Computes the program of a level, its sums over replicas in as few messages as possible.

    Args:
        level: whose program it is.
        closed: its jaxpr.
        supplied: the values of the level's inputs, which may be pieces of vectors.
        args: the jaxpr's own inputs.
        packing: the messages that suit the devices; None to do as JAX does.
        wanted: places of outputs, of each of which one vector is made in place of arrays.

    Returns:
        The outputs, None where they went into a vector; and the vectors.
    """
    jaxpr = closed.jaxpr
    if packing is None or jaxpr.effects or not (wanted or any(runs_replicas(eqn) for eqn in jaxpr.eqns)):
        results: list[jax.Array] = level.replay(closed, {slot: whole(value) for slot, value in supplied.items()}, *args)
    else:
        values = Values(jaxpr, [*zip(jaxpr.constvars, closed.consts), *zip(jaxpr.invars, args)])
        for eqn in jaxpr.eqns:
            if frames.is_input(eqn):
                values.set(eqn.outvars, [supplied[eqn.params["slot"]]])
            elif runs_replicas(eqn) and eqn.outvars:
                _take_over(eqn, jaxpr, values, packing)
        return _outputs(values, jaxpr.outvars, wanted)
    vectors = [joined([results[place] for place in places]) for places in wanted]
    taken = {place for places in wanted for place in places}
    return [None if place in taken else result for place, result in enumerate(results)], vectors


def _outputs(
    values: Values, outvars: Sequence[Atom], wanted: Sequence[Sequence[int]]
) -> tuple[Sequence[jax.Array | None], list[jax.Array]]:
    """Returns the values of variables, None for those in the wanted vectors, and these vectors."""
    taken = {place for places in wanted for place in places}
    left = (atom for place, atom in enumerate(outvars) if place not in taken)
    arrays, vectors = values.arrays_and_vectors(left, [[outvars[place] for place in places] for places in wanted])
    rest = iter(arrays)
    return [None if place in taken else whole(next(rest)) for place in range(len(outvars))], vectors


def updated_alike(closed: jex.ClosedJaxpr, outputs: dict[int, int]) -> list[list[int]]:
    """Finds groups of outputs that are computed in the same way, element by element.

    Args:
        closed: a level's jaxpr.
        outputs: places of outputs, and for each the slot of the input that it replaces.
    """
    jaxpr = closed.jaxpr
    graph = Graph(jaxpr)
    slots = set(outputs.values())
    leaves = {graph.key(e.outvars[0]) for e in jaxpr.eqns if frames.is_input(e) and e.params["slot"] in slots}
    mapped = {id(eqn) for eqn in jaxpr.eqns if runs_replicas(eqn)}
    inside: dict[int, tuple[Graph, set[Key]]] = {}  # of replicas' programs
    groups: dict[tuple[int, int], list[int]] = {}
    for place in outputs:
        key = graph.source(graph.key(jaxpr.outvars[place]))
        node = graph.nodes.get(key)
        where, known = graph, leaves
        if node is not None and id(node.eqn) in mapped:
            eqn = node.eqn
            body = eqn.params["jaxpr"]
            if id(eqn) not in inside:
                own = Graph(body)
                inside[id(eqn)] = own, {own.key(var) for var, k in zip(body.invars, node.inputs) if k in leaves}
            where, known = inside[id(eqn)]
            key = where.key(body.outvars[node.outputs.index(key)])
        number = where.likeness(key, known)
        if not where.says_nothing(number):
            groups.setdefault((id(where), number), []).append(place)
    return list(groups.values())


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


def runs_replicas(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an equation runs replicas and its jaxpr may be computed in another order."""
    if eqn.primitive.name != "shard_map" or AXIS not in eqn.params["mesh"].axis_names:
        return False
    return not eqn.params["jaxpr"].constvars and not has_side_effects(eqn.params["jaxpr"])


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


def returns_rows(mapped: jex.JaxprEqn, place: int) -> bool:
    """Returns whether an output of a `shard_map` has one row for each replica."""
    axes = tuple(mapped.params["out_specs"][place])
    inside = mapped.params["jaxpr"].outvars[place]
    return axes[:1] == (AXIS,) and not any(axes[1:]) and kind_of(inside).shape[0] == 1


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
