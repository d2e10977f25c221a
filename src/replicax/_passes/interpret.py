"""The one loop over the equations of a jaxpr, for all that computes jaxprs in another way than JAX does.

A pass is an `Interpreter` whose rules say what is different; what has no rule is computed as JAX does. The values need
not be arrays: with numbers or flags in their place, an interpreter finds out what depends on what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax.extend.core as jex

from replicax._base import jax_internals
from replicax._base.jaxprs import AnyJaxpr, Atom, equations_in, opened
from replicax._passes.primitives import IN_CALLS

V = TypeVar("V")
Rule = Callable[[jex.JaxprEqn, list[V]], Sequence[V]]  # computes the outputs of an equation from its operands


class Environment(Generic[V]):
    """The values of a jaxpr's variables, as far as they are known. `literal` gives the value of a literal."""

    def __init__(
        self, jaxpr: jex.Jaxpr, known: Iterable[tuple[jex.Var, V]], literal: Callable[[Any], V] = lambda x: x.val
    ):
        self.jaxpr, self.known = jaxpr, dict(known)
        self._literal = literal

    def of(self, atoms: Iterable[Atom]) -> list[V]:
        """Returns the values of variables and literals."""
        return [self._literal(atom) if isinstance(atom, jex.Literal) else self.known[atom] for atom in atoms]

    def set(self, variables: Iterable[jex.Var], values: Iterable[V]) -> None:
        """Adds the values of variables."""
        self.known.update(zip(variables, values))


class Interpreter(Generic[V]):
    """Computes jaxprs, some equations by rules of its own."""

    def run(self, jaxpr: AnyJaxpr, args: Sequence[V]) -> list[V]:
        """Returns the outputs of a jaxpr, open or closed."""
        environment = self.environment(jaxpr, args)
        return environment.of(environment.jaxpr.outvars)

    def environment(self, jaxpr: AnyJaxpr, args: Sequence[V]) -> Environment[V]:
        """Returns the values of all variables of a jaxpr."""
        inner, consts = opened(jaxpr)
        variables, values = [*inner.constvars, *inner.invars], [*map(self.constant, consts), *args]
        environment = Environment(inner, zip(variables, values), self.literal)
        waiting: list[jex.JaxprEqn] = []  # equations without a rule are computed together
        for eqn in inner.eqns:
            rule = self.rule(eqn)
            if rule is None:
                waiting.append(eqn)
                continue
            if eqn.invars:  # inputs of programs need nothing, and may stand anywhere
                self.compute(environment, waiting)
                waiting = []
            environment.set(eqn.outvars, rule(eqn, environment.of(eqn.invars)))
        self.compute(environment, waiting)
        return environment

    def rule(self, eqn: jex.JaxprEqn) -> Rule[V] | None:
        """Returns what computes an equation, None where JAX does. For subclasses."""
        raise NotImplementedError

    def literal(self, literal: jex.Literal) -> V:
        """Returns the value of a literal."""
        value: V = literal.val
        return value

    def constant(self, value: V) -> V:
        """Returns the value of a constant of a closed jaxpr."""
        return value

    def array(self, value: V) -> Any:
        """Returns a value as JAX takes it."""
        return value

    def compute(self, environment: Environment[V], eqns: Sequence[jex.JaxprEqn]) -> None:
        """Computes equations as JAX does."""
        if eqns:
            known = environment.known
            environment.known.update(computed(environment.jaxpr, eqns, lambda var: self.array(known[var])))

    def enter(self, eqn: jex.JaxprEqn, operands: list[V]) -> list[V]:
        """Computes the jaxpr of a call in place of the call: a rule."""
        return self.run(eqn.params[IN_CALLS[eqn.primitive.name]], operands)


class Rewriting(Interpreter[Any]):
    """Computes jaxprs with some equations in another form.

    Args:
        rule_for: returns the rule for an equation, None for an equation that is computed as JAX does.
        calls: the primitives of calls in which rules hold too, with the names of their parameters.
    """

    def __init__(self, rule_for: Callable[[jex.JaxprEqn], Rule[Any] | None], calls: Mapping[str, str]):
        self._rule_for, self._calls = rule_for, calls

    def rule(self, eqn: jex.JaxprEqn) -> Rule[Any] | None:
        if (rule := self._rule_for(eqn)) is not None:
            return rule
        is_call = eqn.primitive.name in self._calls
        return self.enter if is_call and any(map(self._rule_for, equations_in(eqn))) else None


def part_of(jaxpr: jex.Jaxpr, eqns: Sequence[jex.JaxprEqn]) -> tuple[jex.ClosedJaxpr, list[jex.Var], list[jex.Var]]:
    """Returns some equations as a jaxpr of their own, the variables that it needs, and those that it computes."""
    made = dict.fromkeys(var for eqn in eqns for var in eqn.outvars if not isinstance(var, jex.DropVar))
    atoms = (atom for eqn in eqns for atom in eqn.invars if not isinstance(atom, jex.Literal))
    needed = [var for var in dict.fromkeys(atoms) if var not in made]
    return jax_internals.part_of_jaxpr(jaxpr, eqns, needed, list(made)), needed, list(made)


def computed(
    jaxpr: jex.Jaxpr, eqns: Sequence[jex.JaxprEqn], value_of: Callable[[Any], Any]
) -> Iterable[tuple[Any, Any]]:
    """Computes some equations of a jaxpr as JAX does.

    Args:
        jaxpr: theirs.
        eqns: need nothing but each other and what is known.
        value_of: returns the array of a variable that is known.

    Returns:
        The variables that they assign, with their values.
    """
    part, needed, made = part_of(jaxpr, eqns)
    return zip(made, jex.jaxpr_as_fun(part)(*map(value_of, needed)))


def stages(jaxpr: AnyJaxpr, is_meeting: Callable[[jex.JaxprEqn], bool]) -> Environment[int]:
    """Finds for each variable of a jaxpr for how many meetings, one after another, it waits."""
    inner, _ = opened(jaxpr)
    waits = Environment(inner, ((var, 0) for var in (*inner.constvars, *inner.invars)), lambda _: 0)
    for eqn in inner.eqns:
        own = max(waits.of(eqn.invars), default=0) + is_meeting(eqn)
        waits.set(eqn.outvars, [own] * len(eqn.outvars))
    return waits


def needed_for(
    wanted: Iterable[Atom], jaxpr: jex.Jaxpr, makers: Mapping[jex.Var, int], is_known: Callable[[jex.Var], bool]
) -> tuple[list[jex.JaxprEqn], list[jex.Var]]:
    """Finds the equations of a jaxpr that compute some variables from what is known.

    Args:
        wanted: the variables; literals are passed over.
        jaxpr: theirs.
        makers: for each variable that is not known, the place of the equation that computes it.
        is_known: returns whether a variable is known.

    Returns:
        The equations in their order, and the known variables that are needed.
    """
    found: set[int] = set()
    known: dict[jex.Var, None] = {}
    waiting = [*wanted]
    while waiting:
        atom = waiting.pop()
        if isinstance(atom, jex.Literal):
            continue
        if is_known(atom):
            known[atom] = None
        elif makers[atom] not in found:
            found.add(makers[atom])
            waiting += jaxpr.eqns[makers[atom]].invars
    return [jaxpr.eqns[i] for i in sorted(found)], list(known)
