"""Prints, assertions and other callbacks of cut programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cut_simulator import check, normal, simulate, unpacked, variable
from jax import lax
from jax.experimental import io_callback

import replicax as rx
from replicax._tracing import step_failures

__all__ = ["unpacked"]


def test_callbacks_become_outputs_in_the_order_of_the_program(capfd):
    v = variable(normal(3))
    called = []

    @rx.function
    def step(x):
        jax.debug.print("x is {}, v {}", x, v.value())
        v.assign_add(x)
        jax.debug.callback(step_failures.only_shows(lambda y: called.append(("shows", y))), x[0])
        inner = jax.jit(lambda y: (jax.debug.callback(lambda *y: called.append(y), y, 2 * y, ordered=True), y)[1])
        io_callback(lambda y: called.append(y), None, inner(x[1]), ordered=True)
        return v.value()

    outcome = check(simulate(step, (jnp.arange(3.0),), exported=True))
    assert [(callback.count, callback.shows) for callback in outcome.cut.callbacks] == [
        (2, True), (1, True), (2, False), (1, False),
    ]  # fmt: skip
    assert not outcome.cut.has_callbacks
    jax.effects_barrier()
    called.clear()
    capfd.readouterr()
    for callback, operands in zip(outcome.cut.callbacks, outcome.operands, strict=True):
        callback.function(*map(np.asarray, operands))
    assert capfd.readouterr().out.startswith("x is [0. 1. 2.], v [")
    assert called == [("shows", 0), (1, 2), 1]


def test_an_assertion_fails_where_it_is_called():
    @rx.function
    def step(x):
        def report(positive, x):
            if not positive:
                raise ValueError(f"{x} is not positive")

        jax.debug.callback(report, x > 0, x)
        return x

    outcome = check(simulate(step, (jnp.float32(1.0),)))
    (callback,) = outcome.cut.callbacks
    callback.function(np.asarray(True), np.float32(1))
    assert not callback.shows


@pytest.mark.parametrize("kind", ["loop", "branch", "used", "pure"])
def test_other_callbacks_stay_in_the_workers_program(kind):
    v = variable(0.0)

    def show(y):
        jax.debug.callback(lambda y: None, y)
        return y

    @rx.function
    def step(x):
        if kind == "loop":
            x = lax.fori_loop(0, 3, lambda i, y: show(y + i), x)
        elif kind == "branch":
            x = lax.cond(x > 0, show, lambda y: y * 2, x)
        elif kind == "used":
            x = io_callback(lambda y: y, jax.ShapeDtypeStruct((), jnp.float32), x)
        else:
            x = jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct((), jnp.float32), x)
        v.assign_add(x)

    outcome = check(simulate(step, (jnp.float32(2.0),)))
    assert outcome.cut.has_callbacks and not outcome.cut.callbacks
    assert (outcome.shipped, outcome.read) == (4, 0)


def test_ids_that_a_callback_gives_are_no_lookup():
    table = variable(normal(300, 8))

    @rx.function
    def read(ids):
        ids = jax.pure_callback(lambda ids: ids, jax.ShapeDtypeStruct(ids.shape, ids.dtype), ids)
        return table.value()[ids]

    outcome = check(simulate(read, (jnp.arange(3),)))
    assert outcome.cut.index is None and outcome.read == 300 * 8 * 4
