"""A way to reduce of one's own, made as the page on the architecture says: the replicas' values one after the other."""

from __future__ import annotations

import functools
import operator

import jax.numpy as jnp
import numpy as np
import pytest
from strategies import MEAN, SUM, ctx, parts, per_replica, ways

import replicax as rx


class InReplicaOrder(rx.CrossDeviceOps):
    """Adds the replicas' values one after the other, in the order of the replicas."""

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        values = per_replica_value.values
        total = functools.reduce(operator.add, values)
        return self.broadcast(total / len(values) if reduce_op is MEAN else total, destinations)

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        return [self.reduce_implementation(reduce_op, *pair, options) for pair in value_destination_pairs]


def in_order(values):
    return functools.reduce(operator.add, values)


both = pytest.mark.parametrize(
    "ops", [InReplicaOrder(), rx.ReductionToOneDevice(accumulation_fn=in_order)], ids=["class", "function"]
)
# Above 2**24 float32 has only even numbers, so that in this order each 1 is rounded away: 8, where 10 is exact.
# From the other end each 1 counts.
VALUES = [2.0**24, 1.0, 1.0, 8.0 - 2.0**24]


def by_hand(values):
    total = np.float32(values[0])
    for value in values[1:]:
        total = np.float32(total + np.float32(value))
    return float(total)


def strategy_with(ops, n=4):
    return rx.MirroredStrategy([f"GPU:{i}" for i in range(n)], cross_device_ops=ops)


@ways
@both
def test_values_are_added_in_the_order_of_the_replicas(ops, way):
    assert (by_hand(VALUES), by_hand(VALUES[::-1]), sum(VALUES)) == (8.0, 10.0, 10.0)
    strategy = strategy_with(ops)
    there, back = per_replica(strategy, VALUES), per_replica(strategy, VALUES[::-1])

    def step(x, y):
        return strategy.run(lambda x, y: (ctx().all_reduce(SUM, [x, y]), ctx().all_reduce(MEAN, x)), args=(x, y))

    (forward, backward), mean = way(step)(there, back)
    assert parts(strategy, forward) == [8.0] * 4 and parts(strategy, backward) == [10.0] * 4
    assert parts(strategy, mean) == [2.0] * 4


@ways
@both
def test_each_replica_has_the_sum_on_its_own_device(ops, way):
    strategy = strategy_with(ops, 2)
    result = way(lambda: strategy.run(lambda: ctx().all_reduce(SUM, jnp.ones(3))))()
    own = strategy.run(lambda: jnp.ones(()))
    assert [part.devices() for part in result.values] == [part.devices() for part in own.values]


class Hundredfold(InReplicaOrder):
    """A sum that shows where it was taken."""

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        total = functools.reduce(operator.add, per_replica_value.values)
        return self.broadcast(total * 100.0, destinations)


@ways
def test_variables_and_reduce_add_up_without_it(way):
    """As TensorFlow does on CPU devices; see docs/reference/differences.md."""
    strategy = strategy_with(Hundredfold(), 2)
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)
    x = per_replica(strategy, [1.0, 2.0])
    total = way(lambda x: (strategy.run(v.assign, args=(x,)), strategy.reduce(SUM, x, axis=None))[1])(x)
    assert (float(v), float(total)) == (3.0, 3.0)


@ways
def test_batch_reduce_to_takes_it(way):
    strategy = strategy_with(Hundredfold(), 2)
    x = per_replica(strategy, [1.0, 2.0])
    (total,) = way(lambda x: strategy.extended.batch_reduce_to(SUM, [(x, x)]))(x)
    assert [float(part) for part in total.values] == [300.0] * 2


@ways
def test_a_new_cross_device_op_gets_components_of_sparse_values(way):
    class Joined(rx.CrossDeviceOps):
        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            return [
                self.broadcast(jnp.stack([s.to_dense() for s in x.values]), at) for x, at in value_destination_pairs
            ]

    strategy = strategy_with(Joined(), 2)

    def replica():
        i = ctx().replica_id_in_sync_group
        return ctx().all_reduce(SUM, rx.IndexedSlices(jnp.ones((1,)) * (i + 1), jnp.reshape(i, (1,)), (2,)))

    assert parts(strategy, way(lambda: strategy.run(replica))()) == [[[1.0, 0.0], [0.0, 2.0]]] * 2
