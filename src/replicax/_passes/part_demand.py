"""Finds which values of a replica's program are wanted whole, and for which the replica's part is enough.

See `sharded_variables`, which computes the program.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import jax.extend.core as jex
import jax.numpy as jnp

from replicax._base.jaxprs import Atom, has_side_effects, kind_of, opened, parts_of_scan
from replicax._collectives import sharding
from replicax._collectives.all_reduce import all_reduce_p
from replicax._passes import lookups
from replicax._passes.primitives import CHECKPOINTS, ELEMENTWISE
from replicax._values import AXIS

ANY = -1  # in place of an axis: the one that other uses of the value want, or any
SAME = frozenset({"copy", "copy_p"})  # the result is the operand
# What is computed of a gathered array again for each use, and not kept between uses.
CHEAP = frozenset(
    {"reshape", "transpose", "squeeze", "broadcast_in_dim", "slice", "rev", "convert_element_type", "neg"}
)
# Each iteration of a loop of at most so many gathers the variables that it uses, and reduces and scatters what it adds
# to sums. Loops over micro-batches have few iterations; those over time have more, and gather before the loop.
_FEW = 32
MEETING = {"reduce_sum": "psum", "reduce_max": "pmax", "reduce_min": "pmin"}  # how replicas' reductions are combined


class Sum(NamedTuple):
    """One of the sums over all replicas that an equation computes: its operand and its result."""

    operand: Atom
    result: jex.Var


def sums_of(eqn: jex.JaxprEqn) -> list[Sum]:
    """Returns the sums over all replicas that an equation computes, if it does nothing else."""
    if eqn.primitive is all_reduce_p:
        plain = not eqn.params["packing"].halves
    else:
        params = eqn.params
        plain = eqn.primitive.name == "psum" and params["axes"] == (AXIS,) and params["axis_index_groups"] is None
    return list(map(Sum, eqn.invars, eqn.outvars)) if plain else []


def operand_axes(eqn: jex.JaxprEqn, axis: int) -> list[int | None] | None:
    """Returns the axes of the parts of its operands that an equation needs to compute a part of its result.

    An operand that it needs whole has None. None in place of the list says that the result has to be computed whole.
    """
    name, out = eqn.primitive.name, kind_of(eqn.outvars[0])
    if name in ELEMENTWISE or name in SAME:
        if axis == ANY:
            return [ANY if kind_of(x).shape == out.shape else None for x in eqn.invars]
        own = (kind_of(x) for x in eqn.invars)  # of the same rank, perhaps with axes of size 1, or scalars
        return [axis if kind.ndim == out.ndim and kind.shape[axis] == out.shape[axis] else None for kind in own]
    kind, params = kind_of(eqn.invars[0]) if eqn.invars else out, eqn.params
    if axis == ANY:
        return [ANY] if name in ("transpose",) else None
    if name == "broadcast_in_dim" and len(eqn.invars) == 1:
        places = tuple(params["broadcast_dimensions"])
        if axis in places and kind.shape[places.index(axis)] == out.shape[axis]:
            return [places.index(axis)]
        return [None]
    if name == "transpose":
        return [params["permutation"][axis]]
    if name == "reshape" and len(eqn.invars) == 1 and params["dimensions"] is None:
        before, size = math.prod(out.shape[:axis]), out.shape[axis]
        fits = (a for a in range(kind.ndim) if kind.shape[a] == size and math.prod(kind.shape[:a]) == before)
        found = next(fits, None)
        return None if found is None else [found]
    if name in MEETING and len(eqn.invars) == 1:
        kept = [a for a in range(kind.ndim) if a not in params["axes"]]
        return [kept[axis]]
    return None


def is_loop(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an equation is a `lax.scan`."""
    return eqn.primitive.name == "scan"


def totals_of(body: jex.Jaxpr, consts: int, carried: int) -> dict[int, jex.Var]:
    """Returns the terms that each iteration of a loop adds to results that are plain sums, by the places of these.

    Args:
        body: the loop's.
        consts: how many of its inputs are constants.
        carried: how many of the others are carried.
    """
    used = collections.Counter(x for eqn in body.eqns for x in eqn.invars if isinstance(x, jex.Var))
    used.update(x for x in body.outvars if isinstance(x, jex.Var))
    makers = {eqn.outvars[0]: eqn for eqn in body.eqns if eqn.primitive.name in lookups.ADDED}
    found = {}
    for place, (before, after) in enumerate(zip(body.invars[consts : consts + carried], body.outvars)):
        eqn = makers.get(after) if isinstance(after, jex.Var) else None
        added = [] if eqn is None else [x for x in eqn.invars if x is not before and isinstance(x, jex.Var)]
        if eqn is None or len(added) != 1 or before not in eqn.invars:
            continue
        if used[before] == used[eqn.outvars[0]] == 1:
            found[place] = added[0]
    return found


def _among_others(variables: Mapping[int, jex.Var], eqn: jex.JaxprEqn) -> set[int]:
    """Returns the variables of a loop that each iteration gathers or scatters, so that they are not whole throughout.

    An array stays whole during the loop if the others have not more bytes than it has, as between uses (see `Uses`).
    """
    sizes = {place: _bytes(var) for place, var in variables.items()}
    whole = sum(sizes.values())
    return {place for place, size in sizes.items() if eqn.params["length"] <= _FEW and whole - size > size}


class Demand:
    """What is wanted of the values of a jaxpr.

    Args:
        jaxpr: one replica's, without calls that could be entered.
        given: its inputs of which each replica has a part, with the axis.
        wanted: the places of its outputs of which a part is wanted, with the axis.
        summed: the places of its outputs of which a part of the sum over the replicas is wanted, with the axis.
        varying: its variables whose values may differ between replicas: parts of them are not of one value.
        count: the number of replicas.

    Attributes:
        jaxpr, given, wanted, varying: the arguments.
        wanted_sums: the argument `summed`.
        whole: the variables that are wanted whole.
        part: those of which a part is wanted, with its axis.
        live: the places of the equations that are needed.
        by_parts: the places of reductions that are computed of parts.
        gathered: values that are computed in parts and also wanted whole.
        entered: loops (`scan`) and checkpoints, by their places, in which arrays are gathered, or sums scattered: the
            operands that they get in parts, with the axis.
        lookups: lookups of rows in tables that are there in parts, by their places, with the axis.
        rows: gradients of lookups (rows added to zeros), and multiples of them, of which only a part of the sum over
            the replicas is wanted: the rows alone are computed.
        summed: results of loops and checkpoints of which only a part of the sum over the replicas is wanted, with the
            axis: the sum is reduced and scattered inside, in a loop that of what each iteration adds.
    """

    def __init__(
        self,
        jaxpr: jex.Jaxpr,
        given: Mapping[jex.Var, int],
        wanted: Mapping[int, int],
        summed: Mapping[int, int],
        varying: Collection[jex.Var],
        count: int,
    ):
        self.jaxpr, self.given, self.wanted, self.wanted_sums = jaxpr, given, wanted, summed
        self.varying, self._count = varying, count
        self._able = self._ables(jaxpr, given)
        self.whole: set[jex.Var] = set()
        self.part: dict[jex.Var, int] = {}
        self.live: set[int] = set()
        self.by_parts: set[int] = set()
        self.gathered: set[jex.Var] = set()
        self.entered: dict[int, dict[int, int]] = {}
        self.lookups: dict[int, int] = {}
        self.rows: set[jex.Var] = set()
        self.summed: dict[jex.Var, int] = {}
        self._gradients = lookups.gradients(jaxpr)
        # Results of loops and checkpoints that can be summed inside, with the number of axes that they lack there: a
        # loop stacks slices.
        self._inner = {var: 0 for eqn in jaxpr.eqns if eqn.primitive.name in CHECKPOINTS for var in eqn.outvars}
        self._scaled: dict[jex.Var, jex.Var] = {}
        self._note_inner(jaxpr)
        for place, atom in enumerate(jaxpr.outvars):
            if not (place in summed and self._is_summed_inside(atom, summed[place])):
                self._want(atom, wanted.get(place))
        for place in reversed(range(len(jaxpr.eqns))):
            self._go_through(place, jaxpr.eqns[place])

    def _note_inner(self, jaxpr: jex.Jaxpr) -> None:
        zeros = lookups.zeros_of(jaxpr)
        for eqn in jaxpr.eqns:
            if is_loop(eqn):
                consts, carried = parts_of_scan(eqn)
                self._inner.update(dict.fromkeys(eqn.outvars[carried:], 1))
                totals = totals_of(opened(eqn.params["jaxpr"])[0], consts, carried)
                starts = {place: eqn.invars[consts + place] for place in totals}
                begun = {place: x for place, x in starts.items() if isinstance(x, jex.Var) and x in zeros}
                self._inner.update((eqn.outvars[place], 0) for place in _among_others(begun, eqn))
            elif eqn.primitive.name in ("mul", "div") and jnp.issubdtype(kind_of(eqn.outvars[0]).dtype, jnp.inexact):
                arrays = [x for x in eqn.invars if isinstance(x, jex.Var)]
                if len(arrays) == 1 and arrays[0] in self._inner and eqn.invars[0] is arrays[0]:
                    self._inner[eqn.outvars[0]] = self._inner[arrays[0]]
                    self._scaled[eqn.outvars[0]] = arrays[0]

    def _ables(self, jaxpr: jex.Jaxpr, given: Mapping[jex.Var, int]) -> dict[jex.Var, int]:
        """Returns the variables of which a part costs no more than the whole, with the axis or `ANY`."""
        able = dict(given)
        for eqn in jaxpr.eqns:
            for _, result in sums_of(eqn):
                kind = kind_of(result)
                if kind.size * kind.dtype.itemsize >= 1 << 14 and any(n % self._count == 0 for n in kind.shape):
                    able[result] = ANY
            if (
                len(eqn.outvars) != 1
                or eqn.outvars[0] in self.varying
                or not (eqn.primitive.name in ELEMENTWISE or eqn.primitive.name in SAME)
            ):
                continue
            out = kind_of(eqn.outvars[0])
            operands = [x for x in eqn.invars if isinstance(x, jex.Var) and x in able]
            found = [able[x] for x in operands if kind_of(x).shape == out.shape]
            if found:
                able[eqn.outvars[0]] = max(found)
        return able

    def _want(self, atom: Atom, axis: int | None) -> None:
        if isinstance(atom, jex.Literal):
            return
        if axis is None:
            self.whole.add(atom)
            return
        if axis == ANY:
            axis = self._able.get(atom, ANY)
        known = self.part.setdefault(atom, axis)
        if known == ANY:
            self.part[atom] = axis

    def _go_through(self, place: int, eqn: jex.JaxprEqn) -> None:
        outs = [
            var for var in eqn.outvars if any(var in found for found in (self.whole, self.part, self.summed, self.rows))
        ]
        effects = has_side_effects(eqn)
        if not outs and not effects:
            return
        self.live.add(place)
        if len(eqn.outvars) == 1 and outs and not effects:
            (out,) = outs
            if out in self.rows:
                if out not in self.whole and out not in self.part:
                    return self._want_rows(eqn)
                self.rows.remove(out)
                self.whole.add(out)
            if eqn.primitive.name in MEETING and self._reduces(eqn):
                self.by_parts.add(place)
                self._want(eqn.invars[0], ANY)
                self.whole.add(out)
                return
            if self._narrows(eqn):  # fewer bytes are gathered
                self.part.setdefault(out, self._able[out])
            axes = operand_axes(eqn, self.part[out]) if out in self.part else None
            if axes is not None and (out not in self.whole or self._able.get(out, ANY) != ANY):
                if out in self.whole:
                    self.gathered.add(out)
                for atom, axis in zip(eqn.invars, axes):
                    self._want(atom, axis)
                return
        if sums := sums_of(eqn):
            return self._want_summed(sums)
        if outs and outs[0] in self._scaled and outs[0] not in self.whole and outs[0] not in self.part:
            operand = self._scaled[outs[0]]
            if not self._is_summed_inside(operand, self.summed[outs[0]]):
                self._want(operand, None)
            return
        for var in outs:
            if var in self.whole or var in self.part:
                self.whole.add(var)
                self.summed.pop(var, None)
        axis = self._able.get(eqn.invars[0], ANY) if eqn.invars and isinstance(eqn.invars[0], jex.Var) else ANY
        if axis != ANY and lookups.is_worthwhile(eqn, axis, self._count):
            self.lookups[place] = axis
            self._want(eqn.invars[0], axis)
            return self._want(eqn.invars[1], None)
        parts = self._taken_in_parts(eqn)
        if parts or any(var in self.summed for var in outs):
            self.entered[place] = parts
        consts, carried = parts_of_scan(eqn) if is_loop(eqn) else (0, 0)
        zeros = {consts + i for i, var in enumerate(eqn.outvars[:carried]) if var in self.summed}  # of parts of totals
        for i, atom in enumerate(eqn.invars):
            if i not in zeros:
                self._want(atom, parts.get(i))

    def _want_summed(self, sums: list[Sum]) -> None:
        for operand, result in sums:
            axis = None if result in self.whole or result not in self.part else self.axis(result)
            if axis is not None and self._is_summed_inside(operand, axis):
                continue
            if result in self.whole or result in self.part:
                self._want(operand, None)

    def _is_summed_inside(self, atom: Atom, axis: int) -> bool:
        """Returns whether the part of a sum over the replicas, along an axis, is computed where the terms are."""
        if self._adds_rows(atom, axis):
            return True
        # Not along a loop's own axis.
        if isinstance(atom, jex.Var) and axis >= self._inner.get(atom, axis + 1):
            return self.summed.setdefault(atom, axis) == axis
        return False

    def _adds_rows(self, atom: Atom, axis: int) -> bool:
        """Notes, if that sends fewer bytes, that of a gradient of lookups only the rows are wanted; returns whether."""
        scatters = self._gradients.get(atom, ()) if isinstance(atom, jex.Var) else ()
        if not scatters or not lookups.is_sum_worthwhile(scatters, axis, self._count):
            return False
        assert isinstance(atom, jex.Var)
        self.rows.add(atom)
        return True

    def _want_rows(self, eqn: jex.JaxprEqn) -> None:
        for atom in eqn.invars[1:] if eqn.primitive.name == "scatter-add" else eqn.invars:
            if isinstance(atom, jex.Var) and atom in self._gradients:
                self.rows.add(atom)
            else:
                self._want(atom, None)

    def axis(self, var: jex.Var) -> int:
        """Returns the axis along which a part of a variable is wanted."""
        axis = self.part[var]
        if axis != ANY:
            return axis
        found = sharding.cut_axis(kind_of(var), self._count)
        assert found is not None, var  # which is why any axis will do
        return found

    def _taken_in_parts(self, eqn: jex.JaxprEqn) -> dict[int, int]:
        """Returns the operands, with the axis, of which a checkpoint takes a part, or a loop a part of each slice."""
        known = {i: self._able.get(x, ANY) for i, x in enumerate(eqn.invars) if isinstance(x, jex.Var)}
        if is_loop(eqn):
            consts, carried = parts_of_scan(eqn)
            used = {i: x for i, x in enumerate(eqn.invars[:consts]) if isinstance(x, jex.Var) and known[i] != ANY}
            again = _among_others(used, eqn)
            return {i: axis for i, axis in known.items() if i in again or (i >= consts + carried and axis > 0)}
        return {i: axis for i, axis in known.items() if axis != ANY} if eqn.primitive.name in CHECKPOINTS else {}

    def _narrows(self, eqn: jex.JaxprEqn) -> bool:
        """Returns whether an equation casts what is there in parts to a narrower dtype."""
        if eqn.primitive.name != "convert_element_type" or self._able.get(eqn.outvars[0], ANY) == ANY:
            return False
        return bool(kind_of(eqn.outvars[0]).dtype.itemsize < kind_of(eqn.invars[0]).dtype.itemsize)

    def _reduces(self, eqn: jex.JaxprEqn) -> bool:
        """Returns whether a reduction is of something that is there in parts, and goes along the parts' axis."""
        (operand,) = eqn.invars
        if not isinstance(operand, jex.Var) or operand not in self._able or operand in self.whole:
            return False
        kind = kind_of(operand)
        return len(eqn.params["axes"]) == kind.ndim and bool(kind.dtype != jnp.bool_)


class Uses:
    """Finds which uses of gathered arrays share one gather.

    An array is kept from one use to the next if what else is gathered in between has not more bytes than it has. So
    gathered arrays take at no time much more memory than one layer needs.

    Args:
        demand: what is wanted of the values of a jaxpr.
        root: returns the source that a variable is computed from at each use, None for others.
    """

    def __init__(self, demand: Demand, root: Mapping[jex.Var, jex.Var]):
        jaxpr = demand.jaxpr
        steps: list[tuple[int, list[jex.Var]]] = []
        for place, eqn in enumerate(jaxpr.eqns):
            derived = eqn.outvars and all(var in root for var in eqn.outvars)
            if place in demand.live and not derived and _takes_wholes(place, eqn, demand):
                parts = {0: 0} if place in demand.lookups else demand.entered.get(place, {})
                atoms = (atom for i, atom in enumerate(eqn.invars) if i not in parts)
                steps.append((place, list(dict.fromkeys(_roots(atoms, root)))))
        wholes = (x for x in jaxpr.outvars if isinstance(x, jex.Var) and x in demand.whole)
        steps.append((len(jaxpr.eqns), list(dict.fromkeys(_roots(wholes, root)))))
        self._number: dict[tuple[jex.Var, int], int] = {}
        last: dict[jex.Var, int] = {}  # the step of the last use
        number: dict[jex.Var, int] = {}
        for step, (place, sources) in enumerate(steps):
            for source in sources:
                if source in last:
                    between = {x for _, used in steps[last[source] + 1 : step] for x in used} - {source}
                    if sum(map(_bytes, between)) > _bytes(source):
                        number[source] += 1
                last[source] = step
                self._number[source, place] = number.setdefault(source, 0)

    def number(self, source: jex.Var, place: int) -> int:
        """Returns which gather of a source serves the equation at a place."""
        return self._number.get((source, place), 0)


def _takes_wholes(place: int, eqn: jex.JaxprEqn, demand: Demand) -> bool:
    """Returns whether an equation is computed of whole operands."""
    if place in demand.by_parts or any(var in demand.gathered for var in eqn.outvars):
        return False
    wholes = any(var in demand.whole or var in demand.rows for var in eqn.outvars) or not eqn.outvars
    return wholes or place in demand.entered or bool(sums_of(eqn))


def _roots(atoms: Iterable[Atom], root: Mapping[jex.Var, jex.Var]) -> Iterator[jex.Var]:
    for atom in atoms:
        if isinstance(atom, jex.Var) and atom in root:
            yield root[atom]


def _bytes(var: jex.Var) -> int:
    kind = kind_of(var)
    size: int = kind.size * kind.dtype.itemsize
    return size
