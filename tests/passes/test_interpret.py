"""The common interpreter of jaxprs: rules where there are some, JAX for the rest, in any values."""

from __future__ import annotations

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from replicax._base import jaxprs
from replicax._passes import interpret


class Doubling(interpret.Interpreter):
    """Sines are doubled, in calls too; all else is as it is."""

    def __init__(self):
        self.together = []  # how many equations JAX computed at a time

    def rule(self, eqn):
        if eqn.primitive.name == "sin":
            return lambda eqn, operands: [2 * jnp.sin(*operands)]
        inside = [one.primitive.name for one in jaxprs.equations_in(eqn)]
        return self.enter if "sin" in inside else None

    def compute(self, environment, eqns):
        self.together.append(len(eqns))
        super().compute(environment, eqns)


TABLE = np.arange(3.0, dtype=np.float32)


def program(x):
    @jax.custom_jvp
    def own(x):
        return jnp.sin(x) + 1

    own.defjvp(lambda x, t: (own(*x), t[0]))
    return jax.jit(lambda y: jnp.sin(y) + 3)(x * 2 - 1), jnp.asarray(TABLE) + jax.checkpoint(own)(x), 7


def test_rules_hold_in_calls_and_jax_computes_the_rest():
    closed, x = jax.make_jaxpr(program)(0.5), 0.5
    first, second, number = Doubling().run(closed, [x])
    assert float(first) == np.float32(2 * np.sin(np.float32(0))) + 3
    np.testing.assert_allclose(second, np.arange(3) + 2 * np.sin(0.5) + 1, rtol=1e-6)
    assert number == 7


def test_equations_without_a_rule_are_computed_together():
    interpreter = Doubling()
    interpreter.run(jax.make_jaxpr(lambda x: jnp.sin(x * 2 + 1) - x * 3)(1.0), [1.0])
    assert interpreter.together == [2, 2]


def test_stages_follow_the_dependencies_of_equations():
    def waits(x, y):
        first = jnp.sin(x)
        second = jnp.sin(first + y)
        return x + y, first * 2, first + second, jax.jit(jnp.sin)(second)

    closed = jax.make_jaxpr(waits)(1.0, 2.0)
    found = interpret.stages(closed, lambda eqn: eqn.primitive.name == "sin")
    assert found.of(closed.jaxpr.outvars) == [0, 1, 2, 2]  # what is inside of a call is no meeting


def test_needed_equations_of_a_value_are_found():
    def f(x, y):
        a = x + y
        b = a * 2
        c = y - 1
        return b * c, jnp.sin(a)

    jaxpr = jax.make_jaxpr(f)(1.0, 2.0).jaxpr
    makers = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    known = {*jaxpr.invars}
    eqns, inputs = interpret.needed_for([jaxpr.outvars[0]], jaxpr, makers, known.__contains__)
    assert [eqn.primitive.name for eqn in eqns] == ["add", "mul", "sub", "mul"]
    assert set(inputs) == set(jaxpr.invars)
    known.add(eqns[0].outvars[0])  # the sum
    eqns, inputs = interpret.needed_for([jaxpr.outvars[1]], jaxpr, makers, known.__contains__)
    assert [eqn.primitive.name for eqn in eqns] == ["sin"] and inputs == [jaxpr.eqns[0].outvars[0]]
    literal = jex.Literal(1.0, jaxpr.invars[0].aval)
    assert interpret.needed_for([literal], jaxpr, makers, known.__contains__) == ([], [])
