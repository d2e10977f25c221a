"""Replica functions that differ from replica to replica, as one program in which all meet in the same collectives.

One SPMD program cannot hold parts of a batch that differ in shape. So the function is traced once for each shape that
occurs, and the jaxprs are cut at their collectives:

    section 0 of each jaxpr, of which every replica runs its own    `lax.switch` by replica
    the collectives that need nothing else                        common code
    section 1, which needs those ...

What all jaxprs compute alike of the collectives' results, such as an optimizer's update, is common code as well, and
compiled once. A value that lives from one section to a later one has a place among the results of the `lax.switch`;
where only some jaxprs have a value of that shape, the others fill the place with zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._base import jax_internals
from replicax._base.array_conversion import strong
from replicax._base.jaxprs import Atom, equations_in, has_side_effects, kind_of
from replicax._collectives import arithmetic
from replicax._passes.facts import Facts
from replicax._passes.interpret import Environment, Interpreter, Rule, computed, needed_for, stages
from replicax._passes.jaxpr_graph import key_of, key_of_constant, key_of_literal
from replicax._passes.primitives import CALLS, CHECKPOINTS, COLLECTIVES
from replicax._values import AXIS, filled, largest_of, part_of


class NotAlike(Exception):
    """The replicas' programs do not meet in the same collectives; the message says why."""


_CALLS = {**CALLS, **CHECKPOINTS}


def has_collectives_in_calls(closed: jex.ClosedJaxpr, facts: Facts) -> bool:
    """Return whether a branch of a program whose replicas differ has collectives inside of its equations."""
    return any(_meets(eqn) for eqn in closed.jaxpr.eqns)


def open_calls(closed: jex.ClosedJaxpr, facts: Facts, args: Sequence[jax.Array]) -> list[jax.Array]:
    """Compute a jaxpr, so that collectives within calls of other jaxprs stand in the program itself.

    Raises:
        NotAlike: there is a collective in a loop or a branch.
    """
    return _Opened().run(closed, args)


class _Opened(Interpreter[jax.Array]):
    def rule(self, eqn: jex.JaxprEqn) -> Rule[jax.Array] | None:
        if not _meets(eqn):
            return None
        if eqn.primitive.name in _CALLS:
            return self.enter
        raise NotAlike(f"the replicas meet inside of a {eqn.primitive.name!r}")


def _meets(eqn: jex.JaxprEqn) -> bool:
    """Return whether there are collectives inside of an equation."""
    return any(inner.primitive.name in COLLECTIVES for inner in equations_in(eqn))


def together(
    functions: Sequence[Callable[..., list[jax.Array]]], which: jax.Array, args: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[bool]]:
    """Computes `functions[which](*args)`, where `which` differs between the replicas that run this.

    Args:
        functions: traced once each; their results have the same shapes and dtypes.
        which: an int32 scalar.
        args: arrays.

    Returns:
        The results, and for each of them whether all functions compute it in the same way from arguments, constants and
        what collectives give.

    Raises:
        NotAlike: the functions do not have the same collectives, of the same shapes, in the same order.
    """
    numbers: Numbers = {}
    traced = [jax.make_jaxpr(function)(*args) for function in functions]
    programs = [_NumberedJaxpr(closed, args, numbers) for closed in traced]
    for program in programs[1:]:
        programs[0].check_meetings(program)
    common = frozenset.intersection(*(frozenset(program.made) for program in programs))
    for program in programs:
        program.common = common
    results = _Assembly(programs, which).results()
    # Made anew in each trace, constants and Python functions of custom derivatives are other objects and yet the same.
    loose: Numbers = {}
    programs = [_NumberedJaxpr(closed, args, loose, exact=False) for closed in traced]
    return results, [len({p.number_of(atom) for p, atom in zip(programs, atoms)}) == 1 for atoms in _outputs(programs)]


def _outputs(programs: Sequence[_NumberedJaxpr]) -> list[tuple[Atom, ...]]:
    """Returns for each result its variable or literal in each program."""
    return list(zip(*(program.jaxpr.outvars for program in programs)))


class Gathers:
    """How replicas gather values that differ in shape from one to the other.

    A trace knows only its own shapes. So all traces are taken once to see them, and again with what was seen.

    Args:
        known: for each gathering the shapes of all replicas' values, as far as they were seen.
    """

    def __init__(self, known: Sequence[Sequence[tuple[int, ...]]]):
        self._known = known
        self.own: list[tuple[int, ...]] = []  # for each gathering, the shape of this trace's value
        self.guessed = False  # whether it took others' values to have shapes that nobody has seen

    @property
    def supposes(self) -> bool:
        """Whether the trace has gathered a value before the shapes of the other replicas' values were known."""
        return len(self.own) > len(self._known)

    def __call__(self, leaf: jax.Array, axis: int) -> jax.Array:
        self.own.append(leaf.shape)
        shapes: Sequence[tuple[int, ...]] = [leaf.shape]
        if len(self.own) <= len(self._known):
            shapes = self._known[len(self.own) - 1]
        elif leaf.shape[axis] == 0:  # others are likely to have more, and what follows may need some
            shapes, self.guessed = [leaf.shape, (*leaf.shape[:axis], 1, *leaf.shape[axis + 1 :])], True
        if len(set(shapes)) == 1:
            return arithmetic.gathered_alike(leaf, axis)
        if len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) > 1:
            raise NotAlike(f"the replicas gather values of shapes {', '.join(map(str, shapes))} along axis {axis}")
        everyone = lax.all_gather(filled(leaf, largest_of([leaf.shape, *shapes])), AXIS)
        return jnp.concatenate([part_of(everyone[i], shape) for i, shape in enumerate(shapes)], axis)


def gathered(traces: Sequence[Gathers], which: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Returns for each gathering the shapes of all replicas' values; `which` trace is each replica's."""
    if len({len(trace.own) for trace in traces}) > 1:
        raise NotAlike("some replicas gather values more often than others")
    return [[traces[i].own[k] for i in which] for k in range(len(traces[0].own))]


Numbers = dict[Hashable, int]


class _NumberedJaxpr:
    """One jaxpr, its values numbered: two of any programs have the same number if they are computed alike.

    Unless `exact`, constants are compared by their values, and any two Python functions are taken to be the same.
    """

    def __init__(self, closed: jex.ClosedJaxpr, args: Sequence[jax.Array], numbers: Numbers, exact: bool = True):
        self.jaxpr, self._numbers = closed.jaxpr, numbers
        self.common: frozenset[int] = frozenset()
        self.known: dict[jex.Var, jax.Array] = dict(
            zip([*self.jaxpr.constvars, *self.jaxpr.invars], [*closed.consts, *args])
        )
        self.made: dict[int, jex.Var] = {}  # a variable for each number
        self.number: dict[jex.Var, int] = {}
        # For how many collectives, one after another, a variable waits.
        self.stage = stages(closed, lambda eqn: eqn.primitive.name in COLLECTIVES).known
        self.maker: dict[jex.Var, int] = {}  # the equation that computes a variable
        self.meetings: list[tuple[int, jex.JaxprEqn]] = []  # stage and equation of each collective
        if has_side_effects(self.jaxpr):
            raise NotAlike("it has side effects, such as printing")
        for i, (variable, value) in enumerate(self.known.items()):
            outer = i < len(self.jaxpr.constvars)
            key = ("outer", key_of_constant(value, exact)) if outer else ("argument", i - len(self.jaxpr.constvars))
            self._add([variable], key)
        for i, eqn in enumerate(self.jaxpr.eqns):
            if eqn.primitive.name in COLLECTIVES:
                self._add(eqn.outvars, ("meeting", len(self.meetings)))
                self.meetings.append((max(map(self.stage_of, eqn.invars), default=0), eqn))
            else:
                key = (eqn.primitive, key_of(eqn.params, exact), *map(self.number_of, eqn.invars))
                self._add(eqn.outvars, key, maker=i)

    def _add(self, variables: Sequence[jex.Var], key: Hashable, maker: int | None = None) -> None:
        for i, variable in enumerate(variables):
            number = self.number[variable] = self._numbers.setdefault((key, i), len(self._numbers))
            self.made.setdefault(number, variable)
            if maker is not None:
                self.maker[variable] = maker

    def number_of(self, atom: Atom) -> int:
        if isinstance(atom, jex.Literal):
            return self._numbers.setdefault(key_of_literal(atom), len(self._numbers))
        return self.number[atom]

    def stage_of(self, atom: Atom) -> int:
        return 0 if isinstance(atom, jex.Literal) else self.stage[atom]

    def check_meetings(self, other: _NumberedJaxpr) -> None:
        mine, theirs = self._meetings_key(), other._meetings_key()
        for (name, *one), (other_name, *another) in zip(mine, theirs):
            if name != other_name or one != another:
                raise NotAlike(
                    f"the replicas meet in different calls, {name} of {one[0]} and {other_name} of {another[0]}"
                )
        if len(mine) != len(theirs):
            raise NotAlike(f"the replicas meet {len(mine)} and {len(theirs)} times")

    def _meetings_key(self) -> list[Any]:
        return [
            (eqn.primitive.name, [(kind_of(x).shape, kind_of(x).dtype) for x in eqn.invars], stage, key_of(eqn.params))
            for stage, eqn in self.meetings
        ]

    def is_free(self, variable: jex.Var) -> bool:
        """Returns whether a value is better computed again than kept."""
        made = self.maker.get(variable)
        if made is None:
            return False
        shared = self.number[variable] in self.common and not self.stage[variable]
        return shared or all(isinstance(atom, jex.Literal) for atom in self.jaxpr.eqns[made].invars)


class _Section:
    """What one program computes at one stage: the values that are wanted of it, of what they are computed, and how."""

    def __init__(self, program: _NumberedJaxpr, stage: int, wanted: Sequence[Atom]):
        self.program, self.wanted = program, list(wanted)

        def is_elsewhere(variable: jex.Var) -> bool:  # arguments and common code
            return variable in program.known or program.number[variable] in program.common

        def is_known(variable: jex.Var) -> bool:
            return not program.is_free(variable) and (is_elsewhere(variable) or program.stage[variable] < stage)

        # What it computes, and of what: `kept` are those that earlier sections compute.
        self.eqns, self.needed = needed_for(wanted, program.jaxpr, program.maker, is_known)
        self.kept = [variable for variable in self.needed if not is_elsewhere(variable)]


# For a stage: which outgoing values its sections compute, each program's section, and its variables that live on.
_Stage = tuple[list[int], list[_Section], list[list[jex.Var]]]
_Place = tuple[tuple[int, ...], np.dtype, int]  # of a value that lives on: its shape and dtype, and a number


class _Assembly:
    """The sections of several programs and their common code, put together."""

    def __init__(self, programs: Sequence[_NumberedJaxpr], which: jax.Array):
        self._programs, self._which, self._first = programs, which, programs[0]
        self._values = Environment(self._first.jaxpr, self._first.known.items())  # what is common, of the first program
        self._places: dict[tuple[int, jex.Var], jax.Array] = {}  # of each program's own variables that live on
        # Values that sections hand on to collectives or return: for each the stage, and the programs' atoms.
        self._outgoing = [
            (max(program.stage_of(atom) for program, atom in zip(programs, atoms)), atoms)
            for atoms in _outputs(programs)
        ]
        self._operands: list[list[int]] = []  # of each collective, which of those it takes
        for meetings in zip(*(program.meetings for program in programs)):
            at = len(self._outgoing)
            self._outgoing += [(meetings[0][0], atoms) for atoms in zip(*(eqn.invars for _, eqn in meetings))]
            self._operands.append(list(range(at, len(self._outgoing))))
        self._outgoing_values: dict[int, jax.Array] = {}  # as far as they are computed
        self._stages = 1 + max((stage for stage, _ in self._outgoing), default=0)

    def results(self) -> list[jax.Array]:
        for stage, (own, sections, keeping) in enumerate(self._planned()):
            self._run_sections(own, sections, keeping)
            for (at, eqn), operands in zip(self._first.meetings, self._operands):
                if at == stage:
                    results = jax_internals.rebind(eqn, eqn.params, [*map(self._value_of, operands)])
                    self._values.set(eqn.outvars, results)
        return [self._value_of(i) for i in range(len(self._first.jaxpr.outvars))]

    def _is_shared(self, atoms: Sequence[Atom]) -> bool:
        return len({program.number_of(atom) for program, atom in zip(self._programs, atoms)}) == 1

    def _value_of(self, place: int) -> jax.Array:
        if place not in self._outgoing_values:
            self._outgoing_values[place] = self._common([self._outgoing[place][1][0]])[0]
        return self._outgoing_values[place]

    def _planned(self) -> list[_Stage]:
        """Returns for each stage which of the programs' own values go out of it, its sections, and what lives on."""
        plan: list[_Stage] = []
        living: list[dict[jex.Var, None]] = [{} for _ in self._programs]
        for stage in reversed(range(self._stages)):
            own = [i for i, (at, atoms) in enumerate(self._outgoing) if at == stage and not self._is_shared(atoms)]
            sections, keeping = [], []
            for i, program in enumerate(self._programs):
                kept = [variable for variable in living[i] if program.stage[variable] == stage]
                section = _Section(program, stage, [*(self._outgoing[place][1][i] for place in own), *kept])
                living[i].update(dict.fromkeys(section.kept))
                sections.append(section)
                keeping.append(kept)
            plan.append((own, sections, keeping))
        return plan[::-1]

    def _run_sections(self, own: list[int], sections: list[_Section], keeping: list[list[jex.Var]]) -> None:
        if not any(section.wanted for section in sections):
            return
        places = list(dict.fromkeys(place for kept in keeping for place in _numbered(kept)))
        operands: dict[int, jax.Array] = {}
        branches = []
        for i, (section, kept) in enumerate(zip(sections, keeping)):
            values = [self._operand(i, variable) for variable in section.needed]
            operands.update((id(value), value) for value in values)
            filled_by = dict(zip(_numbered(kept), range(len(own), len(section.wanted))))
            order = [*range(len(own)), *(filled_by.get(place, place) for place in places)]
            branches.append(_branch(section, [id(value) for value in values], order, operands))
        results = lax.switch(self._which, branches, list(operands.values()))
        self._outgoing_values.update(zip(own, results))
        kept_results = dict(zip(places, results[len(own) :]))
        for i, kept in enumerate(keeping):
            self._places.update(((i, var), kept_results[place]) for var, place in zip(kept, _numbered(kept)))

    def _operand(self, i: int, variable: jex.Var) -> jax.Array:
        """Returns the value of a variable that a section of program `i` takes."""
        program = self._programs[i]
        if variable in program.known:
            return program.known[variable]
        if (i, variable) in self._places:
            return self._places[i, variable]
        return self._common([self._first.made[program.number[variable]]])[0]

    def _common(self, atoms: Iterable[Atom]) -> list[jax.Array]:
        """Computes values of the first program that all programs compute alike."""
        atoms, first, known = list(atoms), self._first, self._values.known
        eqns, _ = needed_for(atoms, first.jaxpr, first.maker, known.__contains__)
        known.update(computed(first.jaxpr, eqns, known.__getitem__) if eqns else ())
        return self._values.of(atoms)


def _numbered(variables: Sequence[jex.Var]) -> list[_Place]:
    """Returns a place for each variable: its shape and dtype, and its number among those that share them."""
    kinds = [(kind_of(variable).shape, kind_of(variable).dtype) for variable in variables]
    seen: dict[tuple[tuple[int, ...], np.dtype], Iterator[int]] = {kind: itertools.count() for kind in kinds}
    return [(*kind, next(seen[kind])) for kind in kinds]


def _branch(
    section: _Section, needed: list[int], order: Sequence[int | _Place], operands: dict[int, jax.Array]
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Returns a section as a branch of the `lax.switch`.

    Args:
        section: what it computes.
        needed: the ids of the operands that it takes.
        order: what it returns, numbers of what it computes or places, which are filled with zeros.
        operands: all operands by their ids, in the order in which they come.
    """
    part = jax_internals.part_of_jaxpr(section.program.jaxpr, section.eqns, list(section.needed), section.wanted)

    def run(values: list[jax.Array]) -> list[jax.Array]:
        at = dict(zip(operands, values))
        found = jex.jaxpr_as_fun(part)(*(at[key] for key in needed))
        return [strong(found[i]) if isinstance(i, int) else lax.full(i[0], 0, i[1]) for i in order]

    return run
