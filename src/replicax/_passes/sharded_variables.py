"""Computes one replica's program where the replica has only a part of some variables (see `_variables.homes`).

In the program a variable is whole, so that nothing else has to know of parts. Here it is gathered from all replicas
where it is used, and gathered again for a later use, so that no gathered array outlives its layer. On GPUs it is
gathered while earlier layers compute. The new value of a variable is computed in parts: elementwise equations need only
parts of their operands, and a sum over the replicas of which a part is enough is reduced and scattered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from replicax._base import jax_internals
from replicax._base.jaxprs import Atom, checkpoint_like, kind_of, opened, parts_of_scan, scan_like
from replicax._collectives import sharding
from replicax._collectives.all_reduce import packing_for
from replicax._passes import check_collectives, device_layouts, lookups
from replicax._passes.facts import Facts
from replicax._passes.interpret import Interpreter, Rule
from replicax._passes.part_demand import (
    ANY,
    CHEAP,
    MEETING,
    SAME,
    Demand,
    Uses,
    is_loop,
    operand_axes,
    sums_of,
    totals_of,
)
from replicax._passes.primitives import CALLS, CUSTOM_DERIVATIVES
from replicax._values import AXIS, ReplicaMesh

_ENTERED = {**CALLS, **CUSTOM_DERIVATIVES}  # not checkpoints, which would no longer recompute


def evaluate(closed: jex.ClosedJaxpr, facts: Facts, args: Sequence[jax.Array]) -> list[jax.Array]:
    """Compute a replica function's jaxpr, of which some arguments and results are parts (see `Parts`)."""
    parts, mesh = facts.parts, facts.mesh
    assert parts is not None and mesh is not None
    program = jax.make_jaxpr(lambda *args: _Flat().run(closed, args))(*closed.in_avals)
    jaxpr, consts = opened(program)
    given = {jaxpr.invars[place]: axis for place, axis in parts.arguments.items()}
    own = [not mesh.all_local and const.ndim > 0 for const in consts]  # another process may have another
    varying = check_collectives.differing(jaxpr, [*own, *parts.differ])
    known: device_layouts.Known = {jaxpr.invars[place]: layout for place, layout in parts.argument_layouts.items()}
    known |= {jaxpr.outvars[place]: layout for place, layout in parts.result_layouts.items()}
    layouts = device_layouts.spread(jaxpr, known)
    demand = Demand(jaxpr, given, parts.results, {}, varying, mesh.size)
    return _Evaluation(demand, layouts, mesh, packing_for(mesh).fit.ahead).run([*consts, *args])


class _Flat(Interpreter[Any]):
    """Computes a jaxpr with calls entered."""

    def rule(self, eqn: jex.JaxprEqn) -> Rule[Any] | None:
        return self.enter if eqn.primitive.name in _ENTERED else None


class _Evaluation:
    """Computes one jaxpr.

    Args:
        demand: what is wanted of its values.
        layouts: how its variables are split over the devices of a replica, where that is known.
        mesh: the replicas'.
        ahead: the bytes of variables to gather ahead of their use; 0 to gather each when its use can start. Bodies of
            loops do the latter: gathers of one round cannot start in the round before, and XLA for GPUs overlaps fewer
            of them where they are ahead.
    """

    def __init__(self, demand: Demand, layouts: device_layouts.Layouts, mesh: ReplicaMesh, ahead: int = 0):
        self._demand, self._layouts, self._mesh, self._count = demand, layouts, mesh, mesh.size
        self._jaxpr = jaxpr = demand.jaxpr
        # For each array that is gathered, and what is computed of it at no cost: the variable that is gathered.
        self._root: dict[jex.Var, jex.Var] = {var: var for var in (*demand.given, *demand.gathered)}
        self._maker = {var: (place, eqn) for place, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in CHEAP | SAME and len(eqn.invars) == 1 and eqn.outvars[0] not in self._root:
                source = self._root.get(eqn.invars[0]) if isinstance(eqn.invars[0], jex.Var) else None
                if source is not None:
                    self._root[eqn.outvars[0]] = source
        self._uses = Uses(demand, self._root)
        self._wholes: dict[jex.Var, jax.Array] = {}
        self._parts: dict[jex.Var, tuple[jax.Array, int]] = {}
        self._gathered: dict[tuple[jex.Var, int], jax.Array] = {}
        self._rows: dict[Atom, list[lookups.Rows | jax.Array]] = {}  # the terms of gradients of lookups
        self._ids: dict[Atom, jax.Array] = {}  # of all replicas
        self._ahead = ahead
        # The latest gathers: an operand of the equation that each is for, and its bytes.
        self._recent: list[tuple[jax.Array, int]] = []
        self._scattered: dict[Atom, jax.Array] = {}  # results of loops, whose sums are scattered in them

    def run(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the outputs, of the values of the jaxpr's constants and inputs."""
        for var, value in zip([*self._jaxpr.constvars, *self._jaxpr.invars], values):
            if var in self._demand.given:
                self._parts[var] = value, self._demand.given[var]
            else:
                self._wholes[var] = value
        for place, eqn in enumerate(self._jaxpr.eqns):
            if place in self._demand.live:
                self._compute(place, eqn)
        return [self._output(place, atom) for place, atom in enumerate(self._jaxpr.outvars)]

    def _output(self, place: int, atom: Atom) -> jax.Array:
        demand, end = self._demand, len(self._jaxpr.eqns)
        sums = demand.wanted_sums
        if place in demand.wanted:
            return self._part(atom, demand.wanted[place], end)[0]
        if isinstance(atom, jex.Var) and atom in demand.rows:
            return self._part_of_terms(self._rows[atom], atom, sums[place])
        if place in sums and isinstance(atom, jex.Var) and atom in self._scattered:
            return self._scattered[atom]
        value = self._whole(atom, end)
        return value if place not in sums else self._scatter(value, sums[place], atom)

    def _scatter(self, value: jax.Array, axis: int, result: Atom) -> jax.Array:
        """Returns this replica's part of the sum over the replicas, which is laid out as a result."""
        layout = None if isinstance(result, jex.Literal) else self._layouts.get(result)
        return sharding.scattered(value, axis, self._mesh, layout)

    def _compute(self, place: int, eqn: jex.JaxprEqn) -> None:
        demand = self._demand
        if place in demand.by_parts:
            part, _ = self._part(eqn.invars[0], ANY, place)
            (own,) = jax_internals.rebind(eqn, eqn.params, [part])
            self._wholes[eqn.outvars[0]] = getattr(lax, MEETING[eqn.primitive.name])(own, AXIS)
            return
        if place in demand.lookups:
            part, axis = self._part(eqn.invars[0], demand.lookups[place], place)
            rows = lookups.look_up(eqn, part, axis, self._ids_of_all(eqn.invars[1], place), self._mesh)
            self._wholes[eqn.outvars[0]] = rows
            return
        if sums_of(eqn):
            return self._add_up(place, eqn)
        if len(eqn.outvars) == 1 and eqn.outvars[0] in demand.rows:
            self._rows[eqn.outvars[0]] = self._terms(place, eqn)
            return
        if place in demand.entered:
            return self._enter(place, eqn)
        if len(eqn.outvars) == 1 and eqn.outvars[0] in demand.summed:
            return self._scale(place, eqn)
        outs = [var for var in eqn.outvars if var in demand.whole or var in demand.part]
        if len(outs) == 1 and outs[0] in demand.part and (outs[0] in demand.gathered or outs[0] not in demand.whole):
            return self._compute_part(place, eqn)
        if any(var not in self._root for var in eqn.outvars) or not eqn.outvars:
            operands = [self._whole(atom, place) for atom in eqn.invars]
            self._wholes.update(zip(eqn.outvars, jax_internals.rebind(eqn, eqn.params, operands)))

    def _add_up(self, place: int, eqn: jex.JaxprEqn) -> None:
        """Computes sums over the replicas; those of which a part is enough are reduced and scattered."""
        demand, rest = self._demand, []
        for one in sums_of(eqn):
            if one.result in demand.whole:
                rest.append(one)
            elif one.result in demand.part:
                axis = demand.axis(one.result)
                if one.operand in demand.summed:
                    self._parts[one.result] = self._scattered[one.operand], axis
                    continue
                if one.operand in demand.rows:
                    self._parts[one.result] = self._part_of_terms(self._rows[one.operand], one.result, axis), axis
                    continue
                total = self._scatter(self._whole(one.operand, place), axis, one.result)
                self._parts[one.result] = total, axis
        if rest:
            operands = [self._whole(one.operand, place) for one in rest]
            self._wholes.update(zip((one.result for one in rest), jax_internals.rebind(eqn, eqn.params, operands)))

    def _scale(self, place: int, eqn: jex.JaxprEqn) -> None:
        """Multiplies or divides a loop's result by a number, in this replica's part of the sum over the replicas."""
        (out,), (operand, *others) = eqn.outvars, eqn.invars
        if operand not in self._scattered:  # its whole is wanted too
            part = self._scatter(self._whole(operand, place), self._demand.summed[out], operand)
        else:
            part = self._scattered[operand]
        (self._scattered[out],) = jax_internals.rebind(
            eqn, eqn.params, [part, *(self._whole(x, place) for x in others)]
        )

    def _ids_of_all(self, atom: Atom, place: int) -> jax.Array:
        if atom not in self._ids:
            self._ids[atom] = lookups.of_all_replicas(self._whole(atom, place))
        return self._ids[atom]

    def _terms(self, place: int, eqn: jex.JaxprEqn) -> list[lookups.Rows | jax.Array]:
        """Returns the terms of a gradient of lookups: rows, or an array where the whole is wanted too."""
        if eqn.primitive.name == "scatter-add":
            return [lookups.Rows(eqn, eqn.invars[1], self._whole(eqn.invars[2], place))]
        operands = [
            self._rows[x] if isinstance(x, jex.Var) and x in self._rows else [self._whole(x, place)] for x in eqn.invars
        ]
        if eqn.primitive.name in lookups.ADDED:
            return [term for terms in operands for term in terms]
        return lookups.scaled(eqn, operands)

    def _part_of_terms(self, terms: list[lookups.Rows | jax.Array], result: jex.Var, axis: int) -> jax.Array:
        """Returns this replica's part of the sum over the replicas of a gradient of lookups."""
        end, kind = len(self._jaxpr.eqns), kind_of(result)
        rows = [term for term in terms if isinstance(term, lookups.Rows)]
        if len(rows) < len(terms):  # all of the array is there anyway
            arrays = [x.array(self._whole(x.ids, end)) if isinstance(x, lookups.Rows) else x for x in terms]
            return self._scatter(functools.reduce(jnp.add, arrays), axis, result)
        parts = [lookups.part_of_sum(x, self._ids_of_all(x.ids, end), kind, axis) for x in rows]
        return functools.reduce(jnp.add, parts)

    def _enter(self, place: int, eqn: jex.JaxprEqn) -> None:
        """Computes a loop or a checkpoint, in which arrays are gathered, and sums reduced and scattered."""
        parts, summed = self._demand.entered[place], self._demand.summed
        consts, carried = parts_of_scan(eqn) if is_loop(eqn) else (len(eqn.invars), len(eqn.outvars))
        totals = {i for i, var in enumerate(eqn.outvars[:carried]) if is_loop(eqn) and var in summed}
        operands = []
        for i, atom in enumerate(eqn.invars):
            if i - consts in totals:
                operands.append(self._zeros(atom, summed[eqn.outvars[i - consts]]))
            else:
                operands.append(self._part(atom, parts[i], place)[0] if i in parts else self._whole(atom, place))
        inner, _ = opened(eqn.params["jaxpr"])
        closed = jax.make_jaxpr(lambda *args: _Flat().run(eqn.params["jaxpr"], args))(*map(_kind, inner.invars))
        body, added = closed.jaxpr, totals_of(closed.jaxpr, consts, carried) if totals else {}
        results = [added[i] if i in totals else x for i, x in enumerate(body.outvars)]
        inputs = [*body.constvars, *body.invars]
        body = jax_internals.part_of_jaxpr(body, body.eqns, inputs, results).jaxpr
        inputs = inputs[len(closed.consts) :]
        own = [isinstance(atom, jex.Var) and atom in self._demand.varying for atom in eqn.invars]
        differ = [*(False for _ in closed.consts), *check_collectives.differing_in(eqn, own)]
        varying = check_collectives.differing(body, differ)
        # Of slices that a loop takes or stacks the axes are one less than those of the arrays.
        given = {inputs[i]: axis - (i >= consts + carried) for i, axis in parts.items()}
        sums = {i: summed[var] - (i >= carried) for i, var in enumerate(eqn.outvars) if var in summed}
        known: device_layouts.Known = {}
        for var, atom, sliced in [
            *((inputs[i], eqn.invars[i], i >= consts + carried) for i in parts),
            *((body.outvars[i], eqn.outvars[i], i >= carried) for i in sums),
        ]:
            layout = self._layouts.get(atom)
            known[var] = device_layouts.of_slices(layout) if sliced else layout
        layouts = device_layouts.spread(body, known)

        def inside(*args: jax.Array) -> list[jax.Array]:
            demand = Demand(body, given, {}, sums, varying, self._count)
            return _Evaluation(demand, layouts, self._mesh).run([*closed.consts, *args])

        found = _loop(eqn, inside, operands, totals) if is_loop(eqn) else checkpoint_like(eqn, inside, operands)
        for i, (var, value) in enumerate(zip(eqn.outvars, found)):
            (self._scattered if i in sums else self._wholes)[var] = value

    def _zeros(self, atom: Atom, axis: int) -> jax.Array:
        """Returns this replica's part of an array of zeros."""
        kind = kind_of(atom)
        shape = list(kind.shape)
        shape[axis] //= self._count
        return jnp.zeros(shape, kind.dtype)

    def _compute_part(self, place: int, eqn: jex.JaxprEqn) -> None:
        """Computes a part of an equation's result of parts of its operands."""
        (out,) = eqn.outvars
        axis, params = self._demand.part[out], eqn.params
        if axis == ANY:
            axis = self._axis_of_operands(place, eqn)
        axes = operand_axes(eqn, axis)
        assert axes is not None, eqn
        operands = [
            self._whole(atom, place)
            if own is None or isinstance(atom, jex.Literal)
            else self._part(atom, own, place)[0]
            for atom, own in zip(eqn.invars, axes)
        ]
        for name in ("shape", "new_sizes"):
            if name in params and eqn.primitive.name in ("broadcast_in_dim", "reshape"):
                shape = list(params[name])
                shape[axis] //= self._count
                params = {**params, name: tuple(shape)}
        (self._parts[out],) = ((x, axis) for x in jax_internals.rebind(eqn, params, operands))

    def _axis_of_operands(self, place: int, eqn: jex.JaxprEqn) -> int:
        """Returns the axis along which an equation's result is a part, where the operands' parts say it."""
        axes = zip(eqn.invars, operand_axes(eqn, ANY) or ())
        taken = [atom for atom, own in axes if own is not None and isinstance(atom, jex.Var)]
        _, found = self._part(next((var for var in taken if var in self._parts), taken[0]), ANY, place)
        return eqn.params["permutation"].index(found) if eqn.primitive.name == "transpose" else found

    def _part(self, atom: Atom, axis: int, place: int) -> tuple[jax.Array, int]:
        """Returns this replica's part of a value, along an axis or, for `ANY`, along some axis, which it returns."""
        if isinstance(atom, jex.Var) and atom in self._parts:
            part, own = self._parts[atom]
            if axis in (ANY, own):
                return part, own
            return sharding.own_along(sharding.gathered_along(part, own, self._layouts.get(atom)), axis), axis
        if axis == ANY:
            assert isinstance(atom, jex.Var), atom
            axis = self._demand.axis(atom)
        part = sharding.own_along(self._whole(atom, place), axis)
        if isinstance(atom, jex.Var):
            self._parts[atom] = part, axis
        return part, axis

    def _whole(self, atom: Atom, place: int) -> jax.Array:
        """Returns the whole value of an atom, as the equation at a place uses it."""
        if isinstance(atom, jex.Literal):
            value: jax.Array = atom.val
            return value
        if atom in self._wholes:
            return self._wholes[atom]
        source = self._root[atom]
        key = atom, self._uses.number(source, place)
        if key not in self._gathered:
            if atom is source:
                part, axis = self._parts[source]
                layout = self._layouts.get(source)
                self._gathered[key] = sharding.gathered_along(self._behind(part, place), axis, layout)
            else:
                eqn = self._maker[atom][1]
                (self._gathered[key],) = jax_internals.rebind(eqn, eqn.params, [self._whole(eqn.invars[0], place)])
        return self._gathered[key]

    def _behind(self, part: jax.Array, place: int) -> jax.Array:
        """Returns a part that is not gathered before the other operands of the equation at a place are there."""
        if place == len(self._jaxpr.eqns):
            return part
        operands = (x for x in self._jaxpr.eqns[place].invars if isinstance(x, jex.Var) and x in self._wholes)
        made = [x for x in operands if x in self._maker and _can_be_waited_for(kind_of(x))]
        if not made:
            return part
        last = max(made, key=lambda var: self._maker[var][0])
        before = self._before(self._wholes[last], part.size * part.dtype.itemsize * self._count)
        return part if before is None else sharding.behind(before, part, self._mesh)

    def _before(self, operand: jax.Array, size: int) -> jax.Array | None:
        """Returns the array behind which an array of so many bytes is gathered, for an equation with this operand.

        Where messages go in turn, that is the operand of an earlier equation, with so many bytes gathered since that
        this gather overlaps with it; None if fewer bytes have been gathered.
        """
        if not self._ahead:
            return operand
        earlier, since = None, 0
        for place in reversed(range(len(self._recent))):
            since += self._recent[place][1]
            if since >= self._ahead:
                earlier = self._recent[place][0]
                del self._recent[:place]
                break
        self._recent.append((operand, size))
        return earlier


def _loop(
    eqn: jex.JaxprEqn, inside: Callable[..., list[jax.Array]], operands: Sequence[jax.Array], totals: Collection[int]
) -> list[jax.Array]:
    """Computes a `scan` with another body, which returns what is added to the totals."""
    consts, _ = parts_of_scan(eqn)

    def body(*args: jax.Array) -> list[jax.Array]:
        outs = inside(*args)
        return [args[consts + i] + out if i in totals else out for i, out in enumerate(outs)]

    return scan_like(eqn, body, operands)


def _kind(var: jex.Var) -> jax.ShapeDtypeStruct:
    kind = kind_of(var)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def _can_be_waited_for(kind: jax.core.ShapedArray) -> bool:
    return kind.size > 0 and not jnp.issubdtype(kind.dtype, jax.dtypes.extended)
