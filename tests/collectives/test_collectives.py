"""`all_reduce`, `all_gather` and `merge_call`: values, gradients, packing and the classes that do the reducing."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import (
    MEAN,
    SUM,
    carried,
    compiled,
    ctx,
    dealt,
    each,
    few,
    local_ids,
    mirrored,
    one_device,
    over,
    parts,
    per_replica,
    replica_id,
    several,
    ways,
)

import replicax as rx

ALL_OPS = [
    rx.ReductionToOneDevice,
    rx.HierarchicalCopyAllReduce,
    rx.NcclAllReduce,
    functools.partial(rx.NcclAllReduce, 0),
    functools.partial(rx.NcclAllReduce, 3),
    functools.partial(rx.HierarchicalCopyAllReduce, 0),
]
each_ops = pytest.mark.parametrize("ops", ALL_OPS, ids=["one", "hierarchical", "nccl", "nccl0", "nccl3", "hier0"])


@functools.cache
def strategy_with(ops, n) -> rx.MirroredStrategy:
    return rx.MirroredStrategy([f"GPU:{i}" for i in range(n)], cross_device_ops=ops())


# all_reduce


@pytest.mark.across_processes
@dealt("op", few([SUM, MEAN, "sum", "Mean"]))
@ways
def test_all_reduce(make, n, way, op):
    """Fact 52."""
    strategy = make()

    def replica():
        r = replica_id() + 1
        return ctx().all_reduce(op, {"a": r, "b": [jnp.stack([r, -r]), (r * jnp.ones((2, 0, 3)),)]})

    result = way(lambda: strategy.run(replica))()
    total = n * (n + 1) / 2 / (n if op in (MEAN, "Mean") else 1)
    assert parts(strategy, result["a"]) == [total] * n
    assert parts(strategy, result["b"][0]) == [[total, -total]] * n
    assert each(strategy, result["b"][1][0], np.shape) == [(2, 0, 3)] * n


@dealt(
    "dtype",
    few([jnp.bfloat16, np.float16, np.float32, np.int8, np.int32, np.complex64, np.uint8]),
    ids=lambda d: np.dtype(d).name,
    one_of_each=True,
)
@ways
def test_all_reduce_of_each_dtype(make, n, way, dtype):
    """Fact 52: the sum keeps the dtype, the mean of integers is floating point."""
    strategy = make()
    x = per_replica(strategy, [np.asarray(2 * r + 1).astype(dtype) for r in range(n)])

    def replica(x):
        return ctx().all_reduce(SUM, x), ctx().all_reduce(MEAN, x)

    total, mean = way(lambda x: strategy.run(replica, args=(x,)))(x)
    floating = np.float32 if np.dtype(dtype).kind in "iu" else dtype
    for value, kind, expected in ((total, dtype, n * n), (mean, floating, n)):
        assert each(strategy, value, lambda part: (part.dtype, complex(part))) == [(kind, expected)] * n


@over(at_least=2)
@ways
def test_one_call_may_mix_dtypes_and_be_empty(make, n, way):
    """Fact 52: TensorFlow refuses both, which is not to be copied."""
    strategy = make()

    def replica():
        r = ctx().replica_id_in_sync_group
        return ctx().all_reduce(SUM, [r, r * 0.5, r.astype(jnp.int8), (), {}])

    a, b, c, *empty = way(lambda: strategy.run(replica))()
    total = n * (n - 1) / 2
    assert parts(strategy, a) == [total] * n and parts(strategy, b) == [total / 2] * n
    assert parts(strategy, c) == [total] * n and empty == [(), {}]
    assert way(lambda: strategy.run(lambda: ctx().all_reduce(SUM, [])))() == []


@pytest.mark.across_processes
@over(plain=True)
@ways
def test_none_in_a_structure_stays_none(make, n, way):
    """For JAX it is an empty subtree, as in gradients of Equinox or of `optax.masked`. (TensorFlow refuses it.)"""
    strategy = make()

    def replica():
        tree = {"a": replica_id()[None] + 1, "b": None, "c": (None, [])}
        merged = ctx().merge_call(lambda s, t: s.reduce(SUM, t, axis=None), args=(tree,))
        return [ctx().all_reduce(SUM, tree), ctx().all_gather(tree, 0), merged, ctx().all_reduce(MEAN, {"b": None})]

    total, gathered, merged, empty = way(lambda: strategy.run(replica))()
    for tree in (total, gathered, merged):
        assert (list(tree), tree["b"], tree["c"]) == (["a", "b", "c"], None, (None, []))
    numbers = list(range(1, n + 1))
    found = [
        np.asarray(strategy.experimental_local_results(tree["a"])[0]).tolist() for tree in (total, gathered, merged)
    ]
    assert found == [[sum(numbers)], numbers, [sum(numbers)]] and empty == {"b": None}


@over(at_least=2, processes=1)
def test_none_on_some_of_the_eager_replicas_is_refused(make):
    strategy = make()

    def replica(call, first):
        own = jnp.ones(1) if bool(replica_id() == 0) is first else None
        return call({"a": own})

    for call in (lambda tree: ctx().all_reduce(SUM, tree), lambda tree: ctx().all_gather(tree, 0)):
        for first in (True, False):
            with pytest.raises(TypeError, match="None of type NoneType"):
                strategy.run(replica, args=(call, first))


@over()
@ways
def test_gradient_of_a_collective_of_a_structure_with_none(make, n, way):
    strategy = make()

    def replica():
        def loss(tree):
            return ctx().all_reduce(SUM, tree)["a"] * 3.0

        return jax.grad(loss)({"a": replica_id() * 1.0, "b": None})

    gradient = way(lambda: strategy.run(replica))()
    assert gradient["b"] is None and parts(strategy, gradient["a"]) == [3.0 * n] * n


@over(at_least=2)
@ways
def test_all_reduce_reads_variables_and_takes_numpy(make, n, way):
    """Fact 52."""
    strategy = make()
    with strategy.scope():
        v = rx.Variable(2.0)
        on_read = rx.Variable(
            1.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation=rx.VariableAggregation.MEAN
        )
    for value, expected in ((v, 2.0), (on_read, 1.0)):
        assert (
            parts(strategy, way(lambda value=value: strategy.run(lambda: ctx().all_reduce(SUM, value)))())
            == [expected * n] * n
        )
    numpy = [np.float32(1), np.array([5.0], np.float32)]
    a, b = way(lambda: strategy.run(lambda: ctx().all_reduce(SUM, [x.copy() for x in numpy])))()
    assert parts(strategy, a) == [1.0 * n] * n and parts(strategy, b) == [[5.0 * n]] * n


@over(at_least=2, processes=1)
@ways
def test_the_very_same_array_counts_as_one_value(make, n, way):
    """Fact 53: the trap. Captured or passed undistributed it is not multiplied; computed by the replica it is."""
    strategy, shared = make(), jnp.asarray([5.0])

    def all_of(x):
        c = ctx()
        return [
            c.all_reduce(SUM, shared),
            c.all_reduce(MEAN, shared),
            c.all_reduce(SUM, x),
            c.all_gather(shared, axis=0),
            *c.all_reduce(SUM, [shared, shared * 1.0 + 0.0 * replica_id()]),
            c.all_reduce(SUM, shared * 1.0),
            c.all_gather(shared * 1.0, axis=0),
        ]

    results = way(lambda x: strategy.run(all_of, args=(x,)))(shared)
    once, times = [5.0], [5.0 * n]
    found = [np.asarray(strategy.experimental_local_results(r)[-1]).tolist() for r in results]
    assert found == [once, once, once, once, once, times, times, once * n]


@over(at_least=2)
@ways
def test_all_reduce_refuses(make, n, way):
    """Fact 54."""
    strategy = make()

    def refused(error, match, value, op=SUM, **more):
        with pytest.raises(error, match=match):
            way(lambda: strategy.run(lambda: ctx().all_reduce(op, value(), **more)))()
        assert not rx.has_strategy()

    refused((TypeError, AttributeError), "float", lambda: 1.0)
    refused((TypeError, AttributeError), "float", lambda: [1.0, replica_id()])
    refused((TypeError, AttributeError), "None", lambda: None)
    refused(ValueError, "'MAX' is not a valid ReduceOp", replica_id, op="max")
    refused(rx.InvalidArgumentError, None, lambda: np.array("a"))
    refused(rx.InvalidArgumentError, "bool", lambda: replica_id() > 0)
    refused(TypeError, "unexpected keyword argument 'axis'", replica_id, axis=0)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'value'"):
        way(lambda: strategy.run(lambda: ctx().all_reduce(replica_id())))()


@pytest.mark.across_processes
@over(at_least=2)
def test_eager_replicas_with_different_shapes_or_dtypes_are_refused(make, n):
    """Fact 54: detected, not waited on."""
    strategy = make()

    def rid():
        return int(ctx().replica_id_in_sync_group)

    with pytest.raises(rx.InvalidArgumentError, match=r"shape.*replica 0: \(1,\), replica 1: \(2,\)"):
        strategy.run(lambda: ctx().all_reduce(SUM, jnp.zeros(rid() + 1)))
    with pytest.raises(rx.InvalidArgumentError, match="replica 0: int32, replica 1: float32"):
        strategy.run(lambda: ctx().all_reduce(SUM, jnp.ones((), jnp.float32 if rid() else jnp.int32)))


@pytest.mark.across_processes
@over(at_least=2)
@ways
@pytest.mark.parametrize("op", [SUM, MEAN])
def test_sparse_values_are_concatenated(make, n, way, op):
    """Fact 55: beside dense ones."""
    strategy = make()

    def replica():
        r = replica_id()
        x = rx.IndexedSlices((r + 1) * jnp.ones((1, 2)), ctx().replica_id_in_sync_group[None], (n, 2))
        return ctx().all_reduce(op, [x, r])

    slices, dense = way(lambda: strategy.run(replica))()
    share = n if op is MEAN else 1
    for part in strategy.experimental_local_results(slices):
        assert isinstance(part, rx.IndexedSlices)
        np.testing.assert_allclose(part.values, [[(r + 1) / share] * 2 for r in range(n)])
        assert np.asarray(part.indices).tolist() == list(range(n))
        np.testing.assert_allclose(part.to_dense(), [[(r + 1) / share] * 2 for r in range(n)])
    assert parts(strategy, dense) == [n * (n - 1) / 2 / share] * n


# all_gather


@pytest.mark.across_processes
@dealt("axis", few([0, 1, -1, -2]))
@ways
def test_all_gather(make, n, way, axis):
    """Fact 50."""
    strategy = make()
    values = [np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * r for r in range(n)]

    def replica(x):
        return ctx().all_gather({"a": x, "b": (x.astype(jnp.int32),), "c": ()}, axis=axis)

    result = way(lambda x: strategy.run(replica, args=(x,)))(per_replica(strategy, values))
    expected = np.concatenate(values, axis).tolist()
    assert parts(strategy, result["a"]) == parts(strategy, result["b"][0]) == [expected] * n
    assert result["c"] == ()


@pytest.mark.across_processes
@over(at_least=2)
def test_eager_all_gather_of_uneven_shares(make, n):
    """Fact 50."""
    strategy = make()

    def replica():
        r = int(ctx().replica_id_in_sync_group)
        return ctx().all_gather(jnp.full(r + 1, r), axis=0), ctx().all_gather(jnp.full((1, r), r), axis=1)

    a, b = strategy.run(replica)
    assert parts(strategy, a) == [[r for r in range(n) for _ in range(r + 1)]] * n
    assert parts(strategy, b) == [[[r for r in range(n) for _ in range(r)]]] * n


@over(at_least=2)
@ways
def test_all_gather_refuses(make, n, way):
    """Facts 50, 51."""
    strategy = make()

    def refused(error, match, value, axis=0):
        with pytest.raises(error, match=match):
            way(lambda: strategy.run(lambda: ctx().all_gather(value(), axis=axis)))()
        assert not rx.has_strategy()

    refused(rx.InvalidArgumentError, "[Ss]calars", replica_id)
    refused(rx.InvalidArgumentError, r"in the range \[-1, 1\), but got 1", lambda: replica_id()[None], 1)
    refused(rx.InvalidArgumentError, r"in the range \[-1, 1\), but got -2", lambda: replica_id()[None], -2)
    refused(
        NotImplementedError,
        "all_gather does not support IndexedSlices",
        lambda: rx.IndexedSlices(jnp.ones((1, 1)), jnp.array([0])),
    )
    refused(TypeError, None, lambda: np.array(["a"]))
    refused(TypeError, "bool", lambda: replica_id()[None] > 0)
    refused((TypeError, AttributeError), None, lambda: [1])
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'axis'"):
        way(lambda: strategy.run(lambda: ctx().all_gather(replica_id())))()
    assert way(lambda: strategy.run(lambda: ctx().all_gather([], axis=0)))() == []


@pytest.mark.across_processes
@over(at_least=2)
def test_eager_all_gather_of_shares_that_do_not_fit(make, n):
    """Fact 51."""
    strategy = make()

    def rid():
        return int(ctx().replica_id_in_sync_group)

    for value in (
        lambda: jnp.ones((1, rid() + 1)),
        lambda: jnp.ones(1) if rid() else jnp.ones((1, 1)),
        lambda: jnp.ones(1, jnp.int32 if rid() else jnp.float32),
    ):
        with pytest.raises(rx.InvalidArgumentError, match="replica 0: "):
            strategy.run(lambda value=value: ctx().all_gather(value(), axis=0))


# merge_call


@over(at_least=2)
@ways
def test_merge_call(make, n, way):
    """Fact 57."""
    strategy, seen = make(), []

    def merge(got, per, same, *, key):
        seen.append(
            (got is strategy, rx.get_replica_context(), rx.in_cross_replica_context(), rx.get_strategy() is got)
        )
        assert isinstance(per, rx.PerReplica) and isinstance(key[0], rx.PerReplica) and same == "same"
        return {"per": per, "sum": strategy.reduce(SUM, per, axis=None), "plain": 5}

    def replica():
        r = replica_id()
        return ctx().merge_call(merge, args=(r + 1, "same"), kwargs={"key": [r]})

    result = way(lambda: strategy.run(replica))()
    assert seen == [(True, None, True, True)]
    assert parts(strategy, result["per"]) == [r + 1.0 for r in range(n)]
    assert np.asarray(strategy.experimental_local_results(result["sum"])[0]).tolist() == n * (n + 1) / 2
    assert int(strategy.experimental_local_results(result["plain"])[0]) == 5


@over(at_least=2)
@ways
def test_merge_call_hands_out_components(make, n, way):
    """Fact 57: of what the merge function returns each replica gets its own component."""
    strategy = make()
    x = per_replica(strategy, [10.0 * r for r in range(n)])
    result = way(lambda x: strategy.run(lambda: ctx().merge_call(lambda s: {"x": x})["x"] + replica_id()))(x)
    assert parts(strategy, result) == [11.0 * r for r in range(n)]


@several
@ways
def test_merge_call_with_variables_and_errors(n, way):
    """Fact 58."""
    strategy, seen = mirrored(n), []
    with strategy.scope():
        v = rx.Variable(1.0)

    def merge(strategy, variable):
        seen.append(variable is v)
        variable.assign(9.0)
        return variable

    assert way(lambda: strategy.run(lambda: ctx().merge_call(merge, args=(v,))))() is v
    assert set(seen) == {True} and parts(strategy, v) == [9.0] * n

    def raises(error, merge_fn, **more):
        with pytest.raises(error):
            way(lambda: strategy.run(lambda: ctx().merge_call(merge_fn, **more)))()
        assert not rx.has_strategy()

    raises(TypeError, 5)
    raises(ZeroDivisionError, lambda strategy: 1 // 0)
    raises((AttributeError, AssertionError, RuntimeError), lambda strategy: ctx().merge_call(lambda strategy: 1))
    raises(TypeError, lambda: 1)
    assert int(way(lambda: strategy.run(lambda: ctx().merge_call(lambda s, x: x, args=[3])))()) == 3


@over(at_least=2)
@ways
def test_run_inside_of_a_merge_function(make, n, way):
    """Fact 58."""
    strategy = make()
    result = way(lambda: strategy.run(lambda: ctx().merge_call(lambda s: s.run(lambda: replica_id() + 1))))()
    assert parts(strategy, result) == [r + 1.0 for r in range(n)]


@pytest.mark.across_processes
@over(at_least=2)
@ways
def test_reduce_gather_and_local_results_inside_of_a_merge_function(make, n, way):
    """Fact 57: what merge functions are for."""
    strategy = make()

    def merge(s, x):
        return s.reduce(SUM, x, axis=0), s.reduce(MEAN, x, axis=None), s.gather(x, axis=0)

    def replica():
        total, mean, gathered = ctx().merge_call(merge, args=(jnp.stack([replica_id(), jnp.float32(1.0)]),))
        return total * 1.0, mean * 1.0, gathered * 1.0

    total, mean, gathered = way(lambda: strategy.run(replica))()
    ids = [float(r) for r in range(n)]
    assert parts(strategy, total) == [sum(ids) + n] * n
    assert parts(strategy, mean) == [[sum(ids) / n, 1.0]] * n
    assert parts(strategy, gathered) == [[x for r in ids for x in (r, 1.0)]] * n


@over(plain=True)
def test_a_kept_replica_context_refuses_elsewhere(make):
    """Fact 10."""
    strategy, kept, x = make(), [], jnp.ones(1)
    strategy.run(lambda: kept.append(ctx()))
    calls = [
        lambda c: c.all_reduce(SUM, x),
        lambda c: c.all_gather(x, axis=0),
        lambda c: c.merge_call(lambda strategy: 1),
    ]
    default = ctx()
    assert kept[0].num_replicas_in_sync == strategy.num_replicas_in_sync
    assert int(kept[0].replica_id_in_sync_group) == local_ids(strategy)[0]
    for call in calls:
        with pytest.raises(RuntimeError, match="Mismatching tf.distribute.Strategy objects: .* is not "):
            call(kept[0])
        with strategy.scope():
            for context in (kept[0], default):
                with pytest.raises(RuntimeError, match=r"Need to be inside `call_for_each_replica\(\)`"):
                    call(context)
        with pytest.raises(RuntimeError, match="Mismatching tf.distribute.Strategy objects"):
            strategy.run(lambda call=call: call(default))


@ways
def test_the_collectives_of_one_device(way):
    """Fact 116."""
    one = one_device()

    def replica():
        c = ctx()
        return (
            c.all_reduce(SUM, jnp.float32(2) * 1),
            c.all_reduce("MEAN", {"a": jnp.ones(1)}),
            c.all_gather(jnp.ones(1), axis=0),
            c.merge_call(lambda s, x: (s is one, x), args=(3,)),
        )

    total, mean, gathered, (same, three) = way(lambda: one.run(replica))()
    assert (
        float(total) == 2 and mean["a"].tolist() == [1] and gathered.tolist() == [1] and bool(same) and int(three) == 3
    )


# Gradients.


def by_grad(function, x):
    return jax.grad(function)(x)


def by_tape(function, x):
    with rx.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, x)


differentiated = pytest.mark.parametrize("differentiate", [by_grad, by_tape], ids=["grad", "tape"])


@over()
@ways
@differentiated
@pytest.mark.parametrize("op", [SUM, MEAN])
def test_the_gradient_of_all_reduce_is_the_all_reduce_of_gradients(make, n, way, differentiate, op):
    """Fact 56: replica r's loss is (r + 1) * all_reduce(x * x); its gradient 2 x times the reduced (r + 1)."""
    strategy = make()
    x = per_replica(strategy, [r + 1.0 for r in range(n)])

    def replica(x):
        scale = replica_id() + 1
        return differentiate(lambda x: ctx().all_reduce(op, x * x) * scale, x)

    gradient = way(lambda x: strategy.run(replica, args=(x,)))(x)
    reduced = n * (n + 1) / 2 / (n if op is MEAN else 1)
    assert parts(strategy, gradient) == [2 * (r + 1) * reduced for r in range(n)]


@pytest.mark.across_processes
@over(at_least=2)
@ways
@differentiated
def test_the_gradient_of_all_gather_is_the_replicas_own_part(make, n, way, differentiate):
    """Fact 56."""
    strategy = make()
    x = per_replica(strategy, [[1.0, 2.0]] * n)
    weights = np.arange(1.0, 2 * n + 1, dtype=np.float32)

    def replica(x):
        scale = replica_id() + 1
        return differentiate(lambda x: (ctx().all_gather(x, axis=0) * weights).sum() * scale, x)

    gradient = way(lambda x: strategy.run(replica, args=(x,)))(x)
    scales = n * (n + 1) / 2
    assert parts(strategy, gradient) == (weights.reshape(n, 2) * scales).tolist()


@pytest.mark.across_processes
@over(at_least=2, logical=False)
@differentiated
def test_the_gradient_of_an_uneven_all_gather(make, n, differentiate):
    """Facts 50, 56."""
    strategy = make()
    weights = np.arange(1.0, n * (n + 1) / 2 + 1, dtype=np.float32)

    def replica():
        r = int(ctx().replica_id_in_sync_group)
        return differentiate(lambda x: (ctx().all_gather(x, axis=0) * weights).sum(), jnp.ones(r + 1))

    starts = [r * (r + 1) // 2 for r in range(n + 1)]
    expected = [(weights[a:b] * n).tolist() for a, b in zip(starts, starts[1:])]
    assert parts(strategy, strategy.run(replica)) == expected


@over(at_least=2)
@ways
@differentiated
def test_the_local_gradient_is_not_summed(make, n, way, differentiate):
    """Fact 68: of a value that all replicas share every replica gets its own gradient."""
    strategy, w = make(), jnp.float32(3.0)
    x = per_replica(strategy, [r + 1.0 for r in range(n)])
    gradient = way(lambda w, x: strategy.run(lambda a: differentiate(lambda w: w * w * a, w * 1.0), args=(x,)))(w, x)
    assert parts(strategy, gradient) == [6.0 * (r + 1) for r in range(n)]


@over(at_least=2)
@ways
@differentiated
def test_two_collectives_after_one_another_are_differentiated(make, n, way, differentiate):
    strategy = make()
    x = per_replica(strategy, [r + 1.0 for r in range(n)])

    def loss(x):
        centred = x - ctx().all_reduce(MEAN, x)
        return ctx().all_reduce(SUM, centred * centred) / n  # the variance

    gradient = way(lambda x: strategy.run(lambda a: differentiate(loss, a), args=(x,)))(x)
    mean = (n + 1) / 2  # the n replicas' losses are the same variance, whose gradients sum up
    np.testing.assert_allclose(parts(strategy, gradient), [2 * (r + 1 - mean) for r in range(n)], atol=1e-6)


@over(at_least=2)
@ways
def test_a_nest_of_dtypes_is_differentiated(make, n, way):
    """Integers have no gradient and do not stand in the way."""
    strategy = make()
    x = per_replica(strategy, [r + 1.0 for r in range(n)])

    def replica(x):
        def loss(x):
            total, count = ctx().all_reduce(SUM, [x * x, ctx().replica_id_in_sync_group * 0 + 1])
            return total / count

        return jax.value_and_grad(loss)(x)

    value, gradient = way(lambda x: strategy.run(replica, args=(x,)))(x)
    np.testing.assert_allclose(parts(strategy, value), [sum((r + 1) ** 2 for r in range(n)) / n] * n)
    np.testing.assert_allclose(parts(strategy, gradient), [2 * (r + 1.0) for r in range(n)])


# How many all-reduces there are.


def all_reduces(strategy, shapes, dtypes=(jnp.float32,), **options) -> int:
    """How many all-reduces the compiled program of one `all_reduce` has."""

    @rx.function
    def program():
        def replica():
            r = ctx().replica_id_in_sync_group
            # each another value, lest XLA finds that two are the same
            tree = [jnp.ones(s, d) * r.astype(d) + i for i, s in enumerate(shapes) for d in dtypes]
            return ctx().all_reduce(SUM, tree, rx.CommunicationOptions(**options))

        return strategy.run(replica)

    found = carried(program)
    assert set(found) <= {1}, found  # XLA has not put several into one
    return len(found)


def test_all_tensors_of_one_dtype_are_packed_into_one_all_reduce():
    strategy, shapes = mirrored(4), [(3,), (2, 2), (), (5,)]
    assert all_reduces(strategy, shapes) == 1
    assert all_reduces(strategy, shapes, (jnp.float32, jnp.int32)) == 2


def test_packing_follows_the_classes_and_options():
    shapes = [(256,)] * 6
    assert all_reduces(strategy_with(functools.partial(rx.NcclAllReduce, 0), 2), shapes) == 6
    assert all_reduces(strategy_with(rx.NcclAllReduce, 2), shapes) == 1
    assert all_reduces(strategy_with(functools.partial(rx.NcclAllReduce, 3), 2), shapes) == 3
    assert all_reduces(mirrored(2), shapes, bytes_per_pack=2048) == 3
    assert all_reduces(mirrored(2), shapes, bytes_per_pack=1) == 6
    assert all_reduces(strategy_with(rx.HierarchicalCopyAllReduce, 4), shapes) == 2
    assert all_reduces(strategy_with(rx.HierarchicalCopyAllReduce, 2), shapes) == 1


def test_packs_come_one_after_the_other_and_those_of_the_last_tensors_first():
    """Gradients of the last layers are there first, so that they can travel while the others are computed."""

    @rx.function
    def program():
        def replica():
            r = ctx().replica_id_in_sync_group
            tree = [jnp.zeros((0,)), r * jnp.ones((4,)), r * jnp.ones((8,)), r * jnp.ones((2, 2), jnp.int32), r * 1.0]
            return ctx().all_reduce(SUM, tree, rx.CommunicationOptions(bytes_per_pack=1))

        return mirrored(2).run(replica)

    text = program.lower().as_text().replace("\n", " ")  # before XLA
    sent = re.findall(r"all_reduce.*?-> tensor<(.*?)>", text)
    assert [kind for kind in sent if kind != "0xf32"] == ["f32", "2x2xi32", "8xf32", "4xf32"]


def bound(narrow, n, op):
    """How large the error may be, as a part of the sum of the values' magnitudes.

    It is derived in docs/explanation/communication.md.
    """
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[narrow]
    return (1 + unit) ** n * (1 + 2.0**-24) ** (op is MEAN) - 1


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
@pytest.mark.parametrize("n", [2, 4, 8])
@ways
def test_the_error_of_a_narrow_reduction_has_a_bound(n, narrow, way):
    strategy, unit = mirrored(n), {"bfloat16": 2.0**-8, "float16": 2.0**-11}[narrow]
    first = np.arange(n)[:, None] == 0
    values = np.random.default_rng(0).normal(size=(n, 500)).astype(np.float32)
    cases = [
        values,
        np.full((n, 3), 1 + unit),  # half way between two numbers: the largest error of a cast
        np.where(first, 1.0, unit),  # nothing of the small ones is left if they are added one by one
        np.where(np.arange(n)[:, None] % 2, -1, 1) * (1 + np.abs(values) / 1000),  # what is left is small
    ]
    data = np.concatenate([np.broadcast_to(case, (n, max(3, case.shape[1]))) for case in cases], 1).astype(np.float32)
    options = rx.CommunicationOptions(reduction_dtype=narrow)
    worst = []
    for op in (SUM, MEAN):
        x = per_replica(strategy, list(data))
        run = way(lambda x, op=op: strategy.run(lambda x: ctx().all_reduce(op, x, options), args=(x,)))
        got = np.stack(parts(strategy, run(x)))
        assert (got == got[0]).all()
        share = n if op is MEAN else 1
        allowed = bound(narrow, n, op) * np.abs(data).sum(0, dtype=np.float64) / share
        error = np.abs(got[0] - data.sum(0, dtype=np.float64) / share)
        assert (error <= allowed + n * 2.0**-25).all()
        worst.append((error / (unit * np.abs(data).sum(0) / share)).max())
    assert min(worst) > 0.9  # a unit of half the size would not do


@over(at_least=2)
@ways
def test_reduction_dtype_applies_to_all_reduce_but_not_to_reduce(make, n, way):
    """Wider floating point numbers, which keep their dtype; what `reduce` and aggregation give is exact."""
    strategy, options = make(), rx.CommunicationOptions(reduction_dtype="float16")
    exact = 2049.0  # not a float16

    def replica():
        r, c = ctx().replica_id_in_sync_group, ctx()
        one = jnp.where(r == 0, exact, 0.0)
        whole = jnp.where(r == 0, 2049, 0)
        large = 60000.0 + 0.0 * replica_id()  # whose sum is no float16
        half, mean = c.all_reduce(SUM, [one, whole], options), c.all_reduce(MEAN, large, options)
        return half, mean, c.all_reduce(SUM, one), one

    half, mean, whole, one = way(lambda: strategy.run(replica))()
    assert parts(strategy, half[0]) == [2048.0] * n and parts(strategy, half[1]) == [2049] * n
    assert parts(strategy, mean) == [60000.0] * n and parts(strategy, whole) == [exact] * n
    assert {part.dtype for part in strategy.experimental_local_results(half[0])} == {np.dtype(np.float32)}
    assert float(strategy.reduce(SUM, one, axis=None)) == exact


def test_a_narrow_reduction_sends_half_the_bytes():
    """In float16; XLA for the CPU adds up bfloat16 in float32."""
    strategy = mirrored(2)

    @rx.function
    def program():
        def replica():
            tree = [replica_id() * jnp.ones(100), replica_id() + jnp.ones((3, 3)), ctx().replica_id_in_sync_group]
            return ctx().all_reduce(MEAN, tree, rx.CommunicationOptions(reduction_dtype="float16"))

        return strategy.run(replica)

    text = program.lower().compile().as_text()
    sent = re.findall(r"= (\(.*?\)|\S+?)(?:\{\d?\})? all-reduce(?:-start)?\(", text)
    assert sorted(sent) == ["f16[109]", "s32[]"]


def test_one_replica_needs_no_packing():
    assert all_reduces(mirrored(1), [(3,)] * 4) <= 1


@dealt("bytes_per_pack", few([0, 1, 1 << 20, 8]), one_of_each=True)
@ways
def test_options_do_not_change_the_values(make, n, way, bytes_per_pack):
    """Facts 52, 96."""
    strategy = make()
    options = rx.CommunicationOptions(bytes_per_pack, timeout_seconds=10.0, implementation="ring")

    def replica():
        r = replica_id()
        return ctx().all_reduce(SUM, [r, r * jnp.ones((2, 3)), r * 2], options=options)

    a, b, c = way(lambda: strategy.run(replica))()
    total = n * (n - 1) / 2
    assert parts(strategy, a) == [total] * n and parts(strategy, b) == [[[total] * 3] * 2] * n
    assert parts(strategy, c) == [2 * total] * n
    gather = way(lambda: strategy.run(lambda: ctx().all_gather(replica_id()[None], axis=0, options=options)))()
    assert parts(strategy, gather) == [list(range(n))] * n


# The classes.


@several
@ways
@each_ops
@pytest.mark.parametrize("op", [SUM, MEAN])
def test_every_class_gives_the_same(n, way, ops, op):
    """Fact 91."""
    strategy = strategy_with(ops, n)

    def replica():
        r = replica_id() + 1
        tree = {"a": r, "b": [r * jnp.ones(3), ctx().replica_id_in_sync_group], "c": r * jnp.ones((2, 2))}
        return ctx().all_reduce(op, tree)

    result = way(lambda: strategy.run(replica))()
    share = n if op is MEAN else 1
    total = n * (n + 1) / 2 / share
    assert parts(strategy, result["a"]) == [total] * n
    assert parts(strategy, result["b"][0]) == [[total] * 3] * n
    assert parts(strategy, result["b"][1]) == [n * (n - 1) / 2 / share] * n
    assert parts(strategy, result["c"]) == [[[total] * 2] * 2] * n


@several
@ways
@each_ops
def test_every_class_is_differentiable(n, way, ops):
    """Fact 56."""
    strategy = strategy_with(ops, n)

    def replica():
        return jax.grad(lambda x: ctx().all_reduce(SUM, x * x) * (replica_id() + 1))(replica_id() + 1)

    total = n * (n + 1) / 2
    assert parts(strategy, way(lambda: strategy.run(replica))()) == [2 * (r + 1) * total for r in range(n)]


@each_ops
def test_reduce_batch_reduce_and_broadcast(ops):
    """Fact 93."""
    strategy, ops = mirrored(2), ops()
    x, y = per_replica(strategy, [1.0, 3.0]), per_replica(strategy, [[1.0], [2.0]])
    with strategy.scope():
        v = rx.Variable(1.0)

    def shown(value):
        return type(value).__name__, parts(strategy, value)

    assert shown(ops.reduce(SUM, x, destinations=x)) == ("Mirrored", [4.0, 4.0])
    mean = ops.reduce(MEAN, x, destinations=v)
    assert shown(mean) == ("Mirrored", [2.0, 2.0])
    assert [p.devices() for p in mean.values] == [c.value().devices() for c in v.values]
    assert [shown(r) for r in ops.batch_reduce(SUM, [(x, x), (y, v)])] == [
        ("Mirrored", [4.0, 4.0]),
        ("Mirrored", [[3.0], [3.0]]),
    ]
    assert shown(ops.broadcast(jnp.float32(2), v)) == ("Mirrored", [2.0, 2.0])
    on_one = ops.reduce(SUM, x, destinations="GPU:1")
    assert isinstance(on_one, jax.Array) and float(on_one) == 4.0
    assert on_one.devices() == v.values[1].value().devices()
    assert ops.broadcast(jnp.float32(2), "GPU:1").devices() == on_one.devices()


@each_ops
@pytest.mark.parametrize("value", [3.0, [1.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
def test_each_copy_of_what_is_mirrored_is_a_component(ops, value):
    """Seen in TensorFlow, for variables and for values."""
    strategy, ops = mirrored(2), ops()
    with strategy.scope():
        v = rx.Variable(value)
    reduced = ops.reduce(MEAN, per_replica(strategy, [value, value]), v)
    assert isinstance(reduced, rx.Mirrored)
    for x in (v, reduced):
        total, (mean,) = ops.reduce(SUM, x, v), ops.batch_reduce(MEAN, [(x, v)])
        assert parts(strategy, total) == [(2 * np.asarray(value)).tolist()] * 2
        assert parts(strategy, mean) == [value] * 2


@each_ops
def test_cross_device_ops_refuse_wrong_arguments(ops):
    """Facts 93, 94."""
    strategy, ops = mirrored(2), ops()
    x = per_replica(strategy, [1.0, 3.0])
    for op in ("SUM", "max", None):
        with pytest.raises(ValueError, match=r"`reduce_op` must be Reduce.SUM or Reduce.MEAN\."):
            ops.reduce(op, x, x)
    for call in (lambda: ops.reduce(SUM, x, None), lambda: ops.broadcast(jnp.float32(1), None)):
        with pytest.raises(ValueError, match="destinations must be one of a `DistributedValues` object, a tf.Variable"):
            call()
    for pairs in ((x, x), [x]):
        with pytest.raises(ValueError, match="Each element of `value_destination_pairs` should be a tuple"):
            ops.batch_reduce(SUM, pairs)
    assert ops.batch_reduce(SUM, []) == []
    assert float(ops.reduce(SUM, jnp.float32(1), "GPU:0")) == 1 and int(ops.reduce(SUM, 5, "GPU:0")) == 5


def test_constructors():
    """Fact 92."""
    with pytest.raises(ValueError, match="NCCL all-reduce requires num_packs >= 0, but -1 is specified"):
        rx.NcclAllReduce(num_packs=-1)
    with pytest.raises(ValueError, match="HierarchicalCopy requires num_packs >= 0, but -2 is specified"):
        rx.HierarchicalCopyAllReduce(num_packs=-2)
    x = per_replica(mirrored(2), [1.0, 2.0])
    for call in (lambda o: o.reduce(SUM, x, x), lambda o: o.batch_reduce(SUM, [(x, x)])):
        with pytest.raises(NotImplementedError):
            call(rx.CrossDeviceOps())
    assert all(issubclass(c, rx.CrossDeviceOps) for c in (rx.NcclAllReduce, rx.ReductionToOneDevice))


@ways
def test_a_user_defined_accumulation_is_used_by_all_reduce(way):
    """Fact 95: used by all_reduce, not by `Strategy.reduce`."""
    calls = []

    def accumulate(values):
        calls.append(len(values))
        return sum(values[1:], values[0]) * 100.0

    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"], rx.ReductionToOneDevice("GPU:1", accumulate))
    x = per_replica(strategy, [1.0, 2.0])
    assert float(way(lambda x: strategy.reduce(SUM, x, axis=None))(x)) == 3.0 and calls == []
    assert parts(strategy, way(lambda x: strategy.run(lambda a: ctx().all_reduce(SUM, a), args=(x,)))(x)) == [300.0] * 2
    assert calls == [2]


@ways
def test_a_user_defined_cross_device_op_is_called_once_by_all_reduce(way):
    """Fact 95: `all_reduce` calls the batch form, once, with PerReplica values and options."""
    log = []

    class Mine(rx.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            log.append((reduce_op, type(per_replica_value).__name__, type(options).__name__))
            return per_replica_value.values[0]

        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            log.append(len(value_destination_pairs))
            return [self.reduce_implementation(reduce_op, v, d, options) for v, d in value_destination_pairs]

    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"], Mine())
    x = per_replica(strategy, [1.0, 2.0])
    assert float(way(lambda x: strategy.reduce(SUM, x, axis=None))(x)) == 3.0 and log == []
    result = way(lambda x: strategy.run(lambda a: ctx().all_reduce(SUM, a), args=(x,)))(x)
    assert parts(strategy, result) == [1.0, 1.0]
    assert log == [1, (SUM, "PerReplica", "Options")]


@ways
def test_something_else_than_cross_device_ops_is_refused_when_used(way):
    """Fact 91: not checked when the strategy is made."""
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"], cross_device_ops="nccl")
    x = per_replica(strategy, [1.0, 2.0])
    assert float(strategy.reduce(SUM, x, axis=None)) == 3.0
    with pytest.raises(TypeError, match="cross_device_ops is a CrossDeviceOps such as .*, got 'nccl' of type str"):
        way(lambda x: strategy.run(lambda a: ctx().all_reduce(SUM, a), args=(x,)))(x)


def test_communication_options():
    """Fact 96."""
    options = rx.CommunicationOptions()
    assert (options.bytes_per_pack, options.timeout_seconds) == (0, 300.0)
    assert options.implementation is rx.CommunicationImplementation.AUTO
    with pytest.raises(ValueError, match=r"Argument `bytes_per_pack` must be >=0, Received -1\."):
        rx.CommunicationOptions(bytes_per_pack=-1)
    assert rx.CommunicationOptions(implementation="NCCL").implementation is rx.CommunicationImplementation.NCCL
    assert rx.CommunicationOptions(timeout_seconds=-5).timeout_seconds == -5
    assert repr(rx.CommunicationOptions(100)) == (
        "Options(bytes_per_pack=100,timeout_seconds=300.0, implementation=CommunicationImplementation.AUTO)"
    )
    narrow = rx.CommunicationOptions(reduction_dtype=jnp.bfloat16)
    assert narrow.reduction_dtype == jnp.bfloat16 and repr(narrow).endswith("AUTO, reduction_dtype=bfloat16)")
    with pytest.raises(ValueError, match="`reduction_dtype` is 'bfloat16' or 'float16'.*got 'float32'"):
        rx.CommunicationOptions(reduction_dtype="float32")


@over(at_least=2)
def test_compiled_collectives_are_traced_once(make, n):
    traces = []

    def replica(x):
        traces.append(1)
        y = ctx().all_gather(x, axis=0)
        return ctx().merge_call(lambda s, v: s.reduce(SUM, v, axis=0), args=(y,)) + ctx().all_reduce(MEAN, x)

    strategy = make()
    run = compiled(lambda x: strategy.run(replica, args=(x,)))
    for start in (0.0, 1.0):
        values = [start + r for r in range(n)]
        result = run(per_replica(strategy, [[v] for v in values]))
        np.testing.assert_allclose(parts(strategy, result), [[sum(values) * n + sum(values) / n]] * n)
    assert len(traces) == 1
