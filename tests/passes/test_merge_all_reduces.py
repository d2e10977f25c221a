"""Sums over the replicas that need not wait for each other travel in one message, and mean what they meant."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import MEAN, SUM, carried, ctx, mirrored, over, parts, replica_id

import replicax as rx
from replicax._collectives.all_reduce import packing_for


def messages(function, *args) -> int:
    """How many buffers the all-reduces of a compiled function send."""
    return sum(carried(function, *args))


def test_a_loss_that_is_reduced_outside_travels_with_the_gradients():
    strategy = mirrored(4)
    with strategy.scope():
        weight = rx.Variable(jnp.ones((3, 2)))
        bias = rx.Variable(jnp.zeros(2))

    @rx.function
    def step():
        def replica():
            x = jnp.full((3,), replica_id() + 1.0)
            with rx.GradientTape() as tape:
                loss = jnp.sum((x @ weight + bias) ** 2)
            gradients = ctx().all_reduce(SUM, tape.gradient(loss, [weight, bias]))
            weight.assign_sub(0.001 * gradients[0])
            bias.assign_sub(0.001 * gradients[1])
            return loss

        losses = strategy.run(replica)
        return strategy.reduce(SUM, losses, axis=None), strategy.reduce(MEAN, losses, axis=None), losses

    assert messages(step) == 1
    total, mean, losses = step()
    # Replica r's outputs are 3 (r + 1), twice, so its loss is 18 (r + 1)^2.
    assert (float(total), float(mean)) == (540.0, 135.0)
    assert parts(strategy, losses) == [18.0, 72.0, 162.0, 288.0]
    # The gradient of each weight is 2 * 3 (r + 1) * (r + 1), of each bias 2 * 3 (r + 1).
    np.testing.assert_allclose(weight.numpy(), np.full((3, 2), 1 - 0.001 * 6 * 30), rtol=1e-6)
    np.testing.assert_allclose(bias.numpy(), np.full(2, -0.001 * 6 * 10), rtol=1e-6)


def test_an_all_reduce_that_depends_on_another_is_not_merged():
    strategy = mirrored(2)

    @rx.function
    def moments():
        def replica():
            x = replica_id() + 1.0
            mean = ctx().all_reduce(MEAN, x)
            count = ctx().all_reduce(SUM, jnp.ones(()) + 0.0 * x)
            variance = ctx().all_reduce(MEAN, (x - mean) ** 2)
            return mean, variance, count, ctx().all_reduce(SUM, 10.0 * x)

        return strategy.run(replica)

    assert messages(moments) == 2  # the variance alone waits for the mean
    mean, variance, count, tens = (parts(strategy, value) for value in moments())
    assert (mean, variance, count, tens) == ([1.5] * 2, [0.25] * 2, [2.0] * 2, [30.0] * 2)


def test_each_dtype_is_a_message():
    strategy = mirrored(2)

    @rx.function
    def three():
        def replica():
            r = replica_id()
            return r + 1.0, r.astype(jnp.int32) * jnp.array([1, 2]), jnp.ones((2, 2)) * r

        return [strategy.reduce(SUM, value, axis=None) for value in strategy.run(replica)]

    assert messages(three) == 2
    number, integers, square = three()
    assert (float(number), integers.tolist(), square.tolist()) == (3.0, [1, 2], [[1.0, 1.0], [1.0, 1.0]])
    assert integers.dtype == jnp.int32


def test_large_tensors_of_one_call_travel_by_themselves():
    strategy = mirrored(2)
    large = packing_for(strategy.extended._mesh).fit.together // 4

    @rx.function
    def sums():
        def replica():
            tensors = [jnp.full((size,), i + replica_id() + 1.0) for i, size in enumerate((3, large, 5, large))]
            return [x[-1] for x in ctx().all_reduce(SUM, tensors)]

        return strategy.run(replica)

    assert messages(sums) == 3  # the two small ones are one vector
    assert [parts(strategy, x) for x in sums()] == [[3.0 + 2 * i] * 2 for i in range(4)]


def test_messages_suit_the_platform():
    mesh = mirrored(4).extended._mesh
    kinds = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in (10, 100_000, 20, 1 << 20)]
    assert packing_for(mesh).groups(kinds) == [[0, 1, 2], [3]]
    with mesh.standing_for("tpu", 8):
        assert packing_for(mesh).groups(kinds) == [[0, 2], [1], [3]]
        assert packing_for(mesh, pack_bytes=1 << 20).groups(kinds) == [[0, 1, 2], [3]]  # the user's word


def test_large_sums_are_not_copied_together():
    strategy, size = mirrored(2), packing_for(mirrored(2).extended._mesh).fit.together // 4

    @rx.function
    def both():
        def replica():
            large = jnp.full((size,), replica_id() + 1.0)
            return ctx().all_reduce(SUM, large)[-1], ctx().all_reduce(SUM, 2 * large[:3])

        return strategy.run(replica)

    assert messages(both) == 2
    last, few = both()
    assert parts(strategy, last) == [3.0] * 2 and parts(strategy, few) == [[6.0] * 3] * 2


@over(at_least=2, processes=1)
def test_runs_that_follow_each_other(make, n):
    """The second run gets what the first one's sum came to, and what it left to the replicas."""
    strategy = make()

    @rx.function
    def twice():
        first = strategy.run(lambda: replica_id() + 1.0)
        total = strategy.reduce(SUM, first, axis=None)
        second = strategy.run(lambda own: own * total, args=(first,))
        return total, strategy.reduce(SUM, second, axis=None), strategy.reduce(MEAN, first, axis=None)

    total = n * (n + 1) / 2
    assert [float(x) for x in twice()] == [total, total * total, total / n]


@over(at_least=2, processes=1)
def test_the_same_through_a_gradient_tape(make, n):
    """Under a tape the program stays as it was traced, whose gradients JAX knows."""
    strategy = make()
    with strategy.scope():
        v = rx.Variable(3.0)

    @rx.function
    def loss():
        return strategy.reduce(SUM, strategy.run(lambda: v * v * (replica_id() + 1.0)), axis=None)

    with rx.GradientTape() as tape:
        value = loss()
    scale = n * (n + 1) / 2
    assert float(value) == float(loss()) == 9 * scale
    assert float(tape.gradient(value, v)) == 6 * scale


def test_prints_between_all_reduces_are_kept(capfd):
    strategy = mirrored(2)

    @rx.function
    def says():
        def replica():
            jax.debug.print("replica {}", replica_id())
            return ctx().all_reduce(SUM, replica_id() + 1)

        return strategy.reduce(SUM, strategy.run(replica), axis=None)

    assert int(says()) == 6
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "replica 0.0", "replica 1.0"]


def test_a_sum_inside_of_a_loop_stays_there():
    strategy = mirrored(2)

    @rx.function
    def loops():
        def replica():
            def body(carry, _):
                return carry + ctx().all_reduce(SUM, carry), None

            carry, _ = jax.lax.scan(body, replica_id() + 1.0, length=2)
            return carry

        values = strategy.run(replica)
        return values, strategy.reduce(SUM, values, axis=None)

    values, total = loops()
    # 1, 2 -> 4, 5 -> 13, 14
    assert parts(strategy, values) == [13.0, 14.0] and float(total) == 27.0


@pytest.mark.parametrize("replicas", [1, 2])
def test_functions_without_replicas_are_not_rewritten(replicas):
    strategy = mirrored(replicas)
    with strategy.scope():
        v = rx.Variable(jnp.arange(3.0))

    @rx.function
    def plain(x):
        v.assign_add(x)
        return v.value().sum()

    assert float(plain(jnp.ones(3))) == 6.0 and float(plain(jnp.ones(3))) == 9.0
