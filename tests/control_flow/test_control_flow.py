"""Collectives in JAX control flow: allowed where all replicas take the same way, refused where they may not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from strategies import MEAN, SUM, ctx, over, parts, per_replica, replica_id, ways

import replicax as rx

A, S = rx.VariableAggregation, rx.VariableSynchronization
REFUSED = "`merge_call`, `all_reduce` or another meeting of the replicas stands inside of a "


def total(x):
    return ctx().all_reduce(SUM, x)


def merged(x):
    return ctx().merge_call(lambda s, v: s.reduce(SUM, v, axis=None), args=(x,))


def gathered(x):
    return ctx().all_gather(x[None], axis=0).sum()


meetings = pytest.mark.parametrize("meet", [total, merged, gathered])


def compiled_run(strategy, replica, *args):
    return parts(strategy, rx.function(lambda *a: strategy.run(replica, args=a))(*args))


@over(at_least=2)
@meetings
def test_a_branch_that_replicas_may_take_differently_is_refused(make, n, meet):
    """Fact 26: TensorFlow refuses all of them; to hang would be the alternative."""
    strategy = make()
    predicates = [
        lambda x: replica_id() > 0,
        lambda x: x > 1.0,
        lambda x: jnp.logical_and(total(x) > 0, replica_id() < 1),
        lambda x: lax.cond(replica_id() > 0, lambda: True, lambda: False),
        lambda x: lax.fori_loop(0, 3, lambda i, y: y + x, 0.0) > 2,
        lambda x: jax.jit(lambda y: y > 1)(x),
        lambda x: lax.scan(lambda c, i: (c + i, c * x), 0.0, jnp.arange(3.0))[1][1] > 1,
    ]
    x = per_replica(strategy, [r + 1.0 for r in range(n)])
    for predicate in predicates:

        def replica(x, predicate=predicate):
            return lax.cond(predicate(x), lambda: meet(x), lambda: x * 0.0)

        with pytest.raises(RuntimeError, match=REFUSED + "branch"):
            compiled_run(strategy, replica, x)
        assert not rx.has_strategy()
    assert compiled_run(strategy, lambda x: total(x), x) == [n * (n + 1) / 2] * n


@over(at_least=2, copies=True)
def test_jax_own_collectives_in_a_branch_that_replicas_may_take_differently_are_refused(make, n):
    """Those that the strategy itself never uses as well: a hang is a hang."""
    strategy = make()
    ones, zeros = jnp.ones(n, jnp.int32), jnp.zeros(n, jnp.int32)
    collectives = [
        lambda x: lax.ppermute(x, "replica", [(i, (i + 1) % n) for i in range(n)]),
        lambda x: lax.all_to_all(x, "replica", 0, 0),
        lambda x: lax.psum_scatter(x, "replica"),
        lambda x: lax.ragged_all_to_all(x, x, jnp.arange(n), ones, zeros, ones, axis_name="replica"),
    ]
    for collective in collectives:

        def replica(collective=collective):
            x = jnp.arange(float(n))
            return lax.cond(replica_id() > 0, lambda: collective(x).sum(), lambda: 0.0)

        with pytest.raises(RuntimeError, match=REFUSED + "branch"):
            compiled_run(strategy, replica)


@over(at_least=2)
@meetings
def test_a_branch_that_all_replicas_take_alike_works(make, n, meet):
    strategy = make()
    flag = jnp.asarray(True)
    x = per_replica(strategy, [r + 1.0 for r in range(n)])
    predicates = [
        lambda x, flag: flag,
        lambda x, flag: total(x) > 1.0,
        lambda x, flag: jnp.logical_and(flag, ctx().all_reduce(MEAN, x) > 0),
        lambda x, flag: ctx().all_gather(x[None], axis=0)[0] > 0,
        lambda x, flag: lax.while_loop(lambda k: k < 3, lambda k: k + 1, 0) > 2,
    ]
    expected = n * (n + 1) / 2
    for predicate in predicates:

        def replica(x, flag, predicate=predicate):
            return lax.cond(predicate(x, flag), lambda: meet(x) * 1.0, lambda: x * 0.0)

        assert compiled_run(strategy, replica, x, flag) == [expected] * n
    assert compiled_run(strategy, lambda x, f: lax.cond(f, lambda: meet(x), lambda: x), x, ~flag) == [
        r + 1.0 for r in range(n)
    ]


@over(at_least=2)
@meetings
def test_a_meeting_in_a_scan_or_a_counted_loop_works(make, n, meet):
    strategy = make()
    x = per_replica(strategy, [r + 1.0 for r in range(n)])
    expected = n * (n + 1) / 2

    def in_scan(x):
        return lax.scan(lambda carry, k: (carry + meet(x * k), None), jnp.zeros(()), jnp.arange(4.0))[0]

    def in_fori(x):
        return lax.fori_loop(0, 3, lambda i, carry: carry + meet(x), jnp.zeros(()))

    def in_while(x):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + meet(x)), (0, jnp.zeros(())))[1]

    assert compiled_run(strategy, in_scan, x) == [6 * expected] * n
    assert compiled_run(strategy, in_fori, x) == compiled_run(strategy, in_while, x) == [3 * expected] * n


@over(at_least=2)
@meetings
def test_a_loop_that_replicas_may_leave_differently_is_refused(make, n, meet):
    strategy = make()
    x = per_replica(strategy, [r + 1.0 for r in range(n)])

    def by_own_value(x):
        return lax.while_loop(lambda c: c < 10.0, lambda c: c + meet(x), x)

    def by_own_count(x):
        return lax.fori_loop(0, ctx().replica_id_in_sync_group + 1, lambda i, c: c + meet(x), jnp.zeros(()))

    def becomes_own(x):  # shared at first, the replica's own after one turn
        return lax.while_loop(lambda c: c[0] < 9.0, lambda c: (c[1], c[1] + x, meet(x)), (0.0, 0.0, 0.0))[2]

    def nested(x):
        return lax.scan(lambda c, k: (lax.cond(c > 1, lambda: meet(c), lambda: c), None), x, jnp.arange(3))[0]

    for replica in (by_own_value, by_own_count, becomes_own, nested):
        with pytest.raises(RuntimeError, match=REFUSED):
            compiled_run(strategy, replica, x)


@over(at_least=2)
def test_a_loop_until_a_shared_condition_holds(make, n):
    """As in line search or convergence: the condition went through all_reduce."""
    strategy = make()

    def replica(x):
        def body(carry):
            y, _ = carry
            y = y * 2
            return y, total(y)

        y, reached = lax.while_loop(lambda c: c[1] < 100.0, body, (x, total(x)))
        return reached + 0 * y

    x = per_replica(strategy, [r + 1.0 for r in range(n)])
    expected = n * (n + 1) / 2
    while expected < 100:
        expected *= 2
    assert compiled_run(strategy, replica, x) == [expected] * n


@over(at_least=2)
def test_branches_without_meetings_may_differ(make, n):
    strategy = make()
    x = per_replica(strategy, [r + 1.0 for r in range(n)])

    def replica(x):
        y = lax.cond(x > 1.0, lambda: x * 10, lambda: x)
        z = lax.while_loop(lambda c: c < 5.0, lambda c: c + x, x)
        return total(y) + 0 * z

    assert compiled_run(strategy, replica, x) == [1.0 + sum(10.0 * r for r in range(2, n + 1))] * n


@over(at_least=2, copies=True)
def test_conditions_from_variables(make, n):
    """A mirrored variable is the same everywhere, an on-read one is not."""
    strategy = make()
    with strategy.scope():
        shared = rx.Variable(1.0)
        own = rx.Variable(1.0, synchronization=S.ON_READ, aggregation=A.SUM)

    def program(v):
        return lambda: strategy.run(lambda: lax.cond(v.value() > 0, lambda: total(replica_id()), lambda: replica_id()))

    assert parts(strategy, rx.function(program(shared))()) == [n * (n - 1) / 2] * n
    with pytest.raises(RuntimeError, match=REFUSED + "branch"):
        rx.function(program(own))()


@over(at_least=2, copies=True)
def test_a_refused_function_changes_nothing(make, n):
    strategy = make()
    with strategy.scope():
        v = rx.Variable(1.0, aggregation=A.SUM)

    @rx.function
    def step():
        def replica():
            v.assign_add(replica_id() + 1)
            return lax.cond(replica_id() > 0, lambda: total(replica_id()), lambda: replica_id())

        return strategy.run(replica)

    for _ in range(2):
        with pytest.raises(RuntimeError, match=REFUSED):
            step()
    assert parts(strategy, v) == [1.0] * n


@over(at_least=2)
def test_gradients_through_meetings_in_loops(make, n):
    strategy = make()

    def replica(x):
        def loss(x):
            return lax.scan(lambda c, k: (c + total(x * x) * k, None), jnp.zeros(()), jnp.array([1.0, 2.0]))[0]

        return jax.grad(loss)(x)

    x = per_replica(strategy, [r + 1.0 for r in range(n)])
    np.testing.assert_allclose(compiled_run(strategy, replica, x), [2 * 3 * n * (r + 1.0) for r in range(n)])


@over(at_least=2)
@meetings
def test_eager_replicas_may_not_meet_inside_of_control_flow(make, n, meet):
    """Facts 25, 26."""
    x = per_replica(make(), [1.0] * n)
    for replica in (
        lambda x: lax.cond(True, lambda: meet(x), lambda: x),
        lambda x: lax.fori_loop(0, 2, lambda i, c: c + meet(x), 0.0),
        lambda x: lax.scan(lambda c, k: (c + meet(x), None), 0.0, jnp.arange(2))[0],
        lambda x: jax.jit(meet)(x),
        lambda x: jax.vmap(meet)(x[None] * jnp.ones(2)),
    ):
        with pytest.raises(
            RuntimeError, match="^`merge_call` called while defining a new graph or a tf.function. This can"
        ):
            make().run(replica, args=(x,))
        assert not rx.has_strategy()


@over(at_least=2)
@ways
def test_python_loops_and_branches_on_shared_values(make, n, way):
    def replica():
        y = replica_id()
        for _ in range(3):
            y = total(y) / n
        return y

    strategy = make()
    assert parts(strategy, way(lambda: strategy.run(replica))()) == [(n - 1) / 2] * n
