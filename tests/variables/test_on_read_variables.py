"""Variables that synchronize on read: each replica has its own value, aggregated when read from outside."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import MEAN, SUM, ctx, mirrored, over, parts, per_replica, replica_id, several, ways

import replicax as rx

S, A = rx.VariableSynchronization, rx.VariableAggregation
aggregations = pytest.mark.parametrize("aggregation", [A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA], ids=lambda a: a.name)
NO_OP = "Could not convert from `tf.VariableAggregation` VariableAggregationV2.NONE to`tf.distribute.ReduceOp` type"


def made(strategy, value=1.0, aggregation=A.SUM, **more):
    with strategy.scope():
        return rx.Variable(value, synchronization=S.ON_READ, aggregation=aggregation, **more)


def combined(aggregation, values):
    return {A.SUM: sum(values), A.MEAN: sum(values) / len(values), A.ONLY_FIRST_REPLICA: values[0]}[aggregation]


@over(copies=True)
@ways
@aggregations
def test_an_assignment_outside_returns_the_aggregated_value(make, n, way, aggregation):
    v = made(make(), [1.0, 2.0], aggregation=aggregation)
    assert (way(lambda: v.assign([8.0, 16.0]) * 2.0)()).tolist() == [16.0, 32.0]


@pytest.mark.across_processes
@over(copies=True)
@ways
@aggregations
def test_reading_outside_aggregates_and_inside_does_not(make, n, way, aggregation):
    """Fact 77."""
    strategy, v = make(), made(make(), aggregation=aggregation)
    way(lambda: strategy.run(lambda: v.assign(replica_id() + 1)))()
    values = [r + 1.0 for r in range(n)]
    assert parts(strategy, v) == values
    expected = combined(aggregation, values)
    for read in (lambda: v.read_value(), lambda: v + 0, lambda: v.value(), lambda: jnp.asarray(v)):
        assert float(way(read)()) == expected
        assert parts(strategy, way(lambda read=read: strategy.run(lambda: read() * 1.0))()) == values
    assert float(v.numpy()) == float(v) == expected


@over(at_least=2, copies=True)
@ways
def test_without_aggregation_reading_outside_is_an_error(make, n, way):
    """Facts 77, 79."""
    strategy, v = make(), made(make(), aggregation=A.NONE)
    way(lambda: strategy.run(lambda: v.assign(replica_id())))()
    for use in (lambda: v.read_value(), lambda: v + 0, lambda: v.assign(6.0), lambda: v.assign_add(2.0)):
        with pytest.raises(ValueError, match=NO_OP):
            way(use)()
    with pytest.raises(ValueError, match=NO_OP):
        v.numpy()
    assert parts(strategy, v) == [float(r) for r in range(n)]
    assert parts(strategy, way(lambda: strategy.run(lambda: v * 2))()) == [2.0 * r for r in range(n)]


@over(copies=True)
@ways
@aggregations
def test_writing_in_replicas_stays_local(make, n, way, aggregation):
    """Fact 78: and Python numbers will do."""
    strategy, v = make(), made(make(), aggregation=aggregation)

    def replica():
        result = v.assign_add(10.0 * (replica_id() + 1))
        return result, v.read_value() * 1.0

    result, read = way(lambda: strategy.run(replica))()
    expected = [1 + 10.0 * (r + 1) for r in range(n)]
    assert parts(strategy, result) == parts(strategy, read) == parts(strategy, v) == expected
    way(lambda: strategy.run(lambda: v.assign_sub(1.0)))()
    assert parts(strategy, v) == [x - 1 for x in expected]
    way(lambda: strategy.run(lambda: v.assign(7.0)))()
    assert parts(strategy, v) == [7.0] * n


@over(at_least=2, copies=True)
@ways
def test_writing_in_replicas_is_no_meeting_point(make, n, way):
    """Fact 78: replicas may write as often as they like, each in its own way."""
    strategy, v = make(), made(make(), 0.0)

    def eagerly():
        for _ in range(int(ctx().replica_id_in_sync_group)):
            v.assign_add(1.0)

    strategy.run(eagerly)
    assert parts(strategy, v) == [float(r) for r in range(n)]

    def conditionally():
        x = v.value()
        v.assign(jax.lax.cond(replica_id() > 0, lambda: x + 1.0, lambda: x * 1.0))

    way(lambda: strategy.run(conditionally))()
    assert parts(strategy, v) == [0.0, *(r + 1.0 for r in range(1, n))]


@over(copies=True)
@ways
@aggregations
def test_writing_outside(make, n, way, aggregation):
    """Fact 79: SUM divides by the number of replicas, so that reading gives the value back."""
    strategy, v = make(), made(make(), aggregation=aggregation)
    way(lambda: v.assign(8.0))()
    share = 8.0 / n if aggregation is A.SUM else 8.0
    assert parts(strategy, v) == [share] * n and float(v) == 8.0
    for method, expected in (("assign_add", 10.0), ("assign_sub", 8.0)):
        if aggregation is A.SUM:
            with pytest.raises(ValueError, match=f"does not support `{method}` in cross-replica context when aggr"):
                way(lambda method=method: getattr(v, method)(2.0))()
        else:
            way(lambda method=method: getattr(v, method)(2.0))()
            assert parts(strategy, v) == [expected] * n
    with pytest.raises((TypeError, AttributeError)):
        way(lambda x: v.assign(x))(per_replica(strategy, [1.0] * n))
    for where in (lambda f: f(), strategy.run):
        with pytest.raises(NotImplementedError, match="`synchronization=ON_READ` doesn't support `scatter_add`"):
            way(lambda where=where: where(lambda: v.scatter_add(rx.IndexedSlices(jnp.ones(1), jnp.array([0])))))()


@ways
@aggregations
def test_what_a_mirrored_variable_was_assigned_can_be_assigned_outside(way, aggregation):
    strategy, v = mirrored(2), made(mirrored(2), aggregation=aggregation)
    with strategy.scope():
        source = rx.Variable(1.0)
    way(lambda: v.assign(source.assign(8.0)))()
    assert parts(strategy, v) == [4.0 if aggregation is A.SUM else 8.0] * 2 and float(v) == 8.0


@ways
def test_adding_outside_adds_to_the_aggregated_value(way):
    """Fact 79."""
    strategy = mirrored(2)
    for aggregation, expected in ((A.MEAN, 4.5), (A.ONLY_FIRST_REPLICA, 3.0)):
        v = made(mirrored(2), aggregation=aggregation)
        strategy.run(lambda v=v: v.assign(1.0 + 3 * replica_id()))
        way(lambda v=v: v.assign_add(2.0))()
        assert parts(strategy, v) == [expected] * 2


@ways
def test_integers(way):
    """Fact 80: what the number of replicas does not divide is cut off."""
    strategy, v = mirrored(2), made(mirrored(2), 1)
    way(lambda: strategy.run(lambda: v.assign_add(ctx().replica_id_in_sync_group)))()
    assert parts(strategy, v) == [1, 2] and int(v.read_value()) == 3
    way(lambda: v.assign(5))()
    assert parts(strategy, v) == [2, 2] and v.numpy() == 4 and v.dtype == np.int32
    with pytest.raises(ValueError, match="aggregation=MEAN and a non-floating dtype is not supported"):
        made(mirrored(2), 0, aggregation=A.MEAN)
    with pytest.raises(ValueError, match="aggregation=MEAN and a non-floating dtype is not supported"):
        made(mirrored(2), {"sum": 0.0, "count": 0}, aggregation=A.MEAN)


@over(at_least=2, copies=True)
@ways
def test_on_read_variables_have_the_properties_of_variables(make, n, way):
    """Facts 69, 81."""
    strategy, v = make(), made(make(), [1.0, 2.0], name="n")
    assert type(v).__name__ == "SyncOnReadVariable" and isinstance(v, rx.Variable)
    assert (v.trainable, v.synchronization, v.aggregation) == (False, S.ON_READ, A.SUM)
    assert (v.name, v.shape, v.dtype) == ("n:0", (2,), np.float32)
    assert made(make(), trainable=True).trainable and strategy.extended.variable_created_in_scope(v)
    assert way(lambda: strategy.reduce(SUM, v, axis=None))().tolist() == [n * 1.0, n * 2.0]
    assert float(way(lambda: strategy.reduce(SUM, v, axis=0))()) == 3.0 * n
    assert float(way(lambda: strategy.reduce(MEAN, v, axis=0))()) == 1.5
    assert parts(strategy, way(lambda: strategy.run(lambda: jnp.sum(v.value())))()) == [3.0] * n

    def program():
        strategy.run(lambda: v.assign_add([1.0, 1.0]))
        return v.read_value()

    assert way(program)().tolist() == [2.0 * n, 3.0 * n]
    way(lambda: strategy.extended.update(v, lambda c: c.assign([0.0, 0.0])))()
    assert parts(strategy, v) == [[0.0, 0.0]] * n


@over(at_least=2, copies=True)
@ways
def test_inside_of_a_merge_function(make, n, way):
    """Fact 82: as in any cross-replica context."""
    strategy, v = make(), made(make())

    def merge(s):
        total = v.read_value()
        v.assign(8.0)
        return total

    result = way(lambda: strategy.run(lambda: ctx().merge_call(merge) * 1.0))()
    assert parts(strategy, result) == [float(n)] * n and parts(strategy, v) == [8.0 / n] * n


@ways
def test_one_replica(way):
    """Fact 82."""
    for aggregation in (A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA):
        v = made(mirrored(1), aggregation=aggregation)
        way(lambda v=v: mirrored(1).run(lambda: v.assign_add(1.0)))()
        assert type(v).__name__ == "SyncOnReadVariable" and float(v) == 2.0


@pytest.mark.across_processes
@over(at_least=2, copies=True)
@ways
def test_metrics_over_several_steps(make, n, way):
    """What on-read variables are for: a running mean over replicas and steps."""
    strategy = make()
    total, count = made(make(), 0.0), made(make(), 0)
    x = per_replica(strategy, [[float(r), r + 1.0] for r in range(n)])

    def replica(x):
        total.assign_add(x.sum())
        count.assign_add(x.size)

    step = way(lambda x: strategy.run(replica, args=(x,)))
    for _ in range(3):
        step(x)
    assert float(total) == 3.0 * n * n and int(count) == 6 * n
    assert float(way(lambda: total.read_value() / count.read_value())()) == n / 2
    total.assign(0.0)
    assert parts(strategy, total) == [0.0] * n


def test_printing_shows_each_component():
    """Fact 30."""
    v = made(mirrored(2), name="n")
    mirrored(2).run(lambda: v.assign(replica_id()))
    assert str(v) == (
        "SyncOnReadVariable:{\n  0: <Variable 'n:0' shape=() dtype=float32, numpy=0.0>,\n"
        "  1: <Variable 'n/replica_1:0' shape=() dtype=float32, numpy=1.0>\n}"
    )


def test_a_deep_copy_is_a_variable_of_its_own():
    v = made(mirrored(2))
    mirrored(2).run(lambda: v.assign(replica_id()))
    clone = copy.deepcopy(v)
    mirrored(2).run(lambda: v.assign(5.0))
    assert parts(mirrored(2), clone) == [0.0, 1.0] and type(clone).__name__ == "SyncOnReadVariable"


@several
@ways
def test_a_component_assigned_by_itself(n, way):
    strategy, v = mirrored(n), made(mirrored(n))
    v.values[1].assign(5.0)
    assert parts(strategy, v)[:2] == [1.0, 5.0] and float(way(lambda: v.read_value())()) == n + 4.0


@over(at_least=2, copies=True)
@ways
def test_a_pytree(make, n, way):
    strategy, v = make(), made(make(), {"a": jnp.zeros(2), "b": (jnp.ones(()),)})

    def replica():
        v.assign(jax.tree.map(lambda x: x + replica_id(), v.value()))

    way(lambda: strategy.run(replica))()
    total = n * (n - 1) / 2
    assert jax.tree.map(lambda x: x.tolist(), v.numpy()) == {"a": [total] * 2, "b": (n + total,)}


@several
@ways
def test_each_replicas_own_value_can_be_assigned_to_a_mirrored_variable(n, way):
    strategy = mirrored(n)
    own = made(strategy, 0.0)
    with strategy.scope():
        mean = rx.Variable(0.0, aggregation=A.MEAN)

    def replica():
        own.assign(replica_id() + 1)
        mean.assign(own)

    way(lambda: strategy.run(replica))()
    assert float(mean) == (n + 1) / 2
