"""What servers do to the old values of variables, and what workers ship to them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cut_simulator import check, cut_of, normal, simulate, unpacked, uses_of, variable
from jax import export, lax

import replicax as rx
from replicax._parameter_server.cut_types import Take

__all__ = ["unpacked"]
ROWS, DIM = 1000, 4
SHAPE = (ROWS, DIM)
# Servers, and the shapes that are divided over them. Two variables that are whole may also be on two servers.
PLACES, APART = [(1, ()), (3, [SHAPE])], (2, ())
BYTES = 4 * ROWS * DIM


def x(*shape, seed=9):
    return jnp.asarray(normal(*(shape or SHAPE), seed=seed))


def compared(outcome):
    return [place for update in outcome.cut.exchange.updates for place in update.compared]


def test_an_addition_ships_what_is_added_and_answers_the_sum():
    v = variable(normal(*SHAPE))

    @rx.function
    def add(x):
        v.assign_add(jnp.exp(x))
        return v.value()

    for servers, sharded in PLACES:
        outcome = check(simulate(add, (x(),), servers, sharded))
        parts = servers if sharded else 1
        assert (outcome.shipped, outcome.read) == (BYTES, 0)
        exchange = outcome.cut.exchange
        assert exchange.answers == tuple((1, part, 0) for part in range(parts)) and not exchange.computed


def test_a_counter_is_the_servers_own():
    steps = variable(0)

    @rx.function
    def count():
        return steps.assign_add(1)

    outcome = check(simulate(count), exact=True)
    assert (outcome.shipped, outcome.read, outcome.cut.exchange.answers) == (0, 0, ((1, 0, 0),))


def test_a_plain_assignment_reads_nothing_and_is_not_compared():
    v = variable(normal(*SHAPE))

    @rx.function
    def assign(x):
        v.assign(jnp.tanh(x))
        return v.value()

    for servers, sharded in PLACES:
        outcome = check(simulate(assign, (x(),), servers, sharded))
        assert (outcome.shipped, outcome.read, compared(outcome)) == (BYTES, 0, [])
        assert not outcome.cut.exchange.answers  # the worker has it
        assert all(uses_of(program)[0] == () for program in outcome.cut.programs)


@pytest.mark.parametrize("change", ["reverse", "loop", "sort"])
def test_what_a_worker_makes_of_the_old_value_is_compared(change):
    v = variable(normal(*SHAPE))
    changes = {
        "reverse": lambda x: x[::-1],
        "loop": lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) + i, x),
        "sort": lambda x: jnp.sort(x, axis=0),
    }

    @rx.function
    def change_all():
        v.assign(changes[change](v.value()))

    for servers, sharded in PLACES:
        outcome = check(simulate(change_all, (), servers, sharded))
        assert len(compared(outcome)) == (servers if sharded else 1)


@pytest.mark.parametrize("change", ["some", "some of many", "none"])
def test_elements_that_a_worker_makes_of_the_old_ones_are_compared(change):
    v = variable(normal(*SHAPE))

    @rx.function
    def step(x):
        made = jnp.sort(v.value(), axis=0)
        if change == "some":
            v.assign(jnp.where(x > 0, made, v.value()))
        elif change == "some of many":
            v.assign(2 * jnp.where(x > 0, jnp.where(x > 1, v.value(), 0.5), made) + v.value())
        else:  # as a gradient is
            v.assign(jnp.where(x > 0, v.value() - made, v.value()))

    for servers, sharded in PLACES:
        outcome = check(simulate(step, (x(),), servers, sharded))
        assert len(compared(outcome)) == (0 if change == "none" else servers if sharded else 1)


def test_what_goes_element_by_element_is_done_where_the_old_value_is():
    v = variable(normal(*SHAPE))

    @rx.function
    def change(x, scale):
        bias = jnp.tanh(x[0] @ x[0])
        new = jnp.where(v.value() > bias, v.value() * scale[:, None], jnp.clip(v.value(), -1.0, 1.0) / x[0])
        v.assign(new + jnp.arange(float(ROWS))[:, None])

    for servers, sharded in PLACES:
        outcome = check(simulate(change, (x(), x(ROWS)), servers, sharded))
        assert (outcome.read, compared(outcome)) == (0, [])
        assert outcome.shipped <= 4 * ROWS + servers * (4 * DIM + 4)


def test_a_branch_that_goes_element_by_element_is_done_where_the_old_value_is():
    v, left = variable(normal(*SHAPE)), variable(3)

    @rx.function
    def change(positive):
        v.assign(lax.cond(positive, lambda v: v * 2, lambda v: v + 1, v.value()))
        left.assign(lax.switch(jnp.clip(left.value(), 0, 2), [lambda: 5, lambda: 0, lambda: left.value() - 1]))
        return left.value()

    for positive in (True, False):
        for servers, sharded in (*PLACES, APART):
            outcome = check(simulate(change, (jnp.asarray(positive),), servers, sharded))
            assert (outcome.shipped, outcome.read, compared(outcome)) == (servers if sharded else 1, 0, [])


def test_values_of_other_variables_on_the_same_server_are_not_shipped():
    online, target = variable(normal(*SHAPE)), variable(normal(*SHAPE, seed=1))

    @rx.function
    def average():
        target.assign(0.9 * target.value() + 0.1 * online.value())

    for servers, sharded in (*PLACES, APART):
        outcome = check(simulate(average, (), servers, sharded))
        elsewhere = servers == 2 and not sharded
        assert (outcome.shipped, outcome.read) == ((BYTES, BYTES) if elsewhere else (0, 0))
        assert not compared(outcome)
        reads = sum(len(update.reads) for update in outcome.cut.exchange.updates)
        assert reads == (0 if elsewhere else servers if sharded else 1)


@pytest.mark.parametrize("typed", [True, False])
def test_random_number_states_are_exact_on_the_server(typed):
    state = variable(jax.random.key(3) if typed else jax.random.PRNGKey(3))

    @rx.function
    def draw():
        following, key = jax.random.split(state.value())
        state.assign(following)
        return jax.random.normal(key, (3,))

    outcome = check(simulate(draw), exact=True)
    assert (outcome.shipped, outcome.read, compared(outcome)) == (0, 8, [])


IDS = np.array([1, 5, 5, -1, 2000, -3000, 7], np.int32)


@pytest.mark.parametrize("way", ["add", "subtract", "multiply", "min", "max", "set", "one", "slice"])
def test_rows_are_changed_in_the_old_value(way):
    v = variable(normal(*SHAPE))

    @rx.function
    def change(ids, x):
        at = v.value().at
        if way == "slice":
            v.assign(lax.dynamic_update_slice(v.value(), x[:3], (ids[4], 0)))
        elif way == "one":
            v.assign(at[ids[0]].set(x[0]))
        else:
            ids = ids[jnp.array([0, 1, 3, 4, 5])] if way == "set" else ids  # else it is not said which one is set
            v.assign(getattr(at[ids], way)(x[: len(ids)]))

    for servers, sharded in PLACES:
        outcome = check(simulate(change, (jnp.asarray(IDS), x(len(IDS), DIM)), servers, sharded))
        assert not outcome.read and not compared(outcome)
        assert outcome.shipped <= len(IDS) * (4 * DIM + 4)


def test_rows_set_to_what_the_worker_made_of_the_old_ones_are_compared():
    v = variable(normal(*SHAPE))

    @rx.function
    def sort(ids):
        v.assign(v.value().at[ids].set(jnp.sort(v.value()[ids], axis=-1)))

    for servers, sharded in PLACES:
        outcome = check(simulate(sort, (jnp.arange(7),), servers, sharded))
        assert len(compared(outcome)) == servers
        assert outcome.gathered == 7 * DIM * 4 and not outcome.read


def test_rows_that_a_worker_reads_too_are_changed_in_the_old_value_where_as_many_bytes_travel():
    v = variable(normal(*SHAPE))

    @rx.function
    def average(ids, x):
        v.assign(v.value().at[ids].set(0.9 * v.value()[ids] + 0.1 * x))
        return jnp.sum(jnp.sort(v.value()[ids], axis=0))

    outcome = check(simulate(average, (jnp.arange(7), x(7, DIM))))
    assert outcome.shipped == 7 * (4 * DIM + 4) and not compared(outcome)


def test_an_optimizer_of_rows_finds_them_on_the_server():
    table, slots = variable(normal(*SHAPE)), variable(normal(*SHAPE, seed=1))

    @rx.function
    def step(ids, x):
        rows = table.value()[ids]
        gradient = jax.grad(lambda rows: jnp.sum(jnp.tanh(rows @ jnp.ones((DIM, 3))) * x))(rows)
        momentum = 0.9 * slots.value()[ids] + 0.1 * gradient
        slots.assign(slots.value().at[ids].set(momentum))
        table.assign(table.value().at[ids].add(-0.1 * momentum))

    outcome = check(simulate(step, (jnp.arange(7), x(7, 3))))
    assert (outcome.shipped, outcome.gathered, outcome.read) == (7 * 4 + 7 * DIM * 4, 7 * DIM * 4, 0)
    assert not compared(outcome)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_sums_of_rows_are_added_without_an_array_of_zeros(dtype):
    v, momentum = variable(normal(*SHAPE).astype(dtype)), variable(normal(*SHAPE, seed=1).astype(dtype))

    @rx.function
    def step(ids, x, rate):
        zeros = jnp.zeros(SHAPE, dtype)
        total = zeros.at[ids].add(x) + zeros.at[jnp.abs(ids[:2])].add(x[:2]) * rate
        v.assign_sub(total * (rate / 2))
        momentum.assign(jnp.asarray(0.9, dtype) * momentum.value() + zeros.at[ids].add(-x) / rate)

    args = jnp.asarray(IDS), x(len(IDS), DIM).astype(dtype), jnp.asarray(0.3, dtype)
    for servers, sharded in PLACES:
        outcome = check(simulate(step, args, servers, sharded), 1e-6 if dtype == np.float32 else 1e-2)
        assert not outcome.read
        if dtype == np.float32:
            for program in outcome.cut.programs:
                text = str(jax.make_jaxpr(program.function)(*program.avals))
                rows = program.avals[0][0].shape[0]
                assert f"f32[{rows},{DIM}] = broadcast_in_dim" not in text


def test_a_sum_of_rows_that_something_else_needs_as_well_is_an_array():
    v = variable(normal(*SHAPE))

    @rx.function
    def step(ids, x):
        total = jnp.zeros(SHAPE).at[ids].add(x)
        v.assign_sub(total * total)
        v.assign_add(total)

    check(simulate(step, (jnp.asarray(IDS), x(len(IDS), DIM))))


def test_constants_that_only_the_worker_needs_are_not_in_the_updates():
    v, data = variable(normal(*SHAPE)), jnp.asarray(normal(50, ROWS))

    @rx.function
    def step(x):
        v.assign_add(data.T @ x)

    for servers, sharded in PLACES:
        outcome = check(simulate(step, (x(50, DIM),), servers, sharded), 1e-5)
        for program in outcome.cut.programs:
            assert not jax.make_jaxpr(program.function)(*program.avals).consts


def test_a_variable_without_elements_and_one_of_few_rows_on_many_servers():
    few, none = variable(normal(2, DIM)), variable(np.zeros((0, DIM), np.float32))

    @rx.function
    def step(x):
        few.assign_add(x)
        few.assign(few.value().at[jnp.array([0, 1, 5])].add(1.0))
        none.assign(none.value() + 1)
        return few.value(), none.value()

    check(simulate(step, (x(2, DIM),), 3, [(2, DIM), (0, DIM)]))


def test_an_input_that_nobody_has_is_refused():
    v = variable(0.0)

    @rx.function
    def read():
        return v.value()

    _, program, leaves, _ = cut_of(read, ())
    with pytest.raises(ValueError, match="neither of variables on servers nor of datasets"):
        cut_of(read, (), leaves=leaves[:0])


@pytest.mark.parametrize("count", range(6))
def test_rows_are_sent_to_the_server_that_has_them(count):
    ids, rows = np.array([7, 3, 4, 3, 9, 12, 3, 5], np.int32)[:count], np.arange(16.0).reshape(8, 2)[:count]
    own, of_own = Take(0, True, 3, 6).of([ids, rows])
    places = [i for i in range(count) if 3 <= ids[i] < 6]
    np.testing.assert_array_equal(own, [ids[i] - 3 for i in places])
    np.testing.assert_array_equal(of_own, rows[places])


def test_rows_may_be_padded_and_their_number_symbolic():
    v = variable(normal(*SHAPE))

    @rx.function
    def step(ids, x):
        v.assign(v.value().at[ids].add(x).at[ids[:2]].set(x[:2]))

    parts = cut_of(step, (jnp.asarray(IDS), x(len(IDS), DIM)), 2, [SHAPE])[0]
    assert [len(avals) for avals in parts.exchange.shipped] == [2, 2]
    olds, read, taken = parts.programs[0].avals
    (size,) = export.symbolic_shape("size")
    taken = [jax.ShapeDtypeStruct((size, *kind.shape[1:]), kind.dtype) for kind in taken]
    exported = export.export(jax.jit(parts.programs[0].function))(olds, read, taken)
    (new,), _ = exported.call((jnp.zeros(olds[0].shape),), (), [jnp.array([2, 500, -1]), jnp.ones((3, DIM))] * 2)
    np.testing.assert_array_equal(np.flatnonzero(new[:, 0]), [2])
