"""`Strategy.reduce` and `Strategy.gather`, with numbers worked out by hand."""

from __future__ import annotations

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import (
    MEAN,
    SUM,
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

S, A = rx.VariableSynchronization, rx.VariableAggregation


def components(n, *shape, dtype=np.float32):
    """Components that all differ: 0, 1, 2, ... through all replicas."""
    size = int(np.prod(shape))
    return [np.arange(r * size, (r + 1) * size).reshape(shape).astype(dtype) for r in range(n)]


def ragged(strategy, *shares):
    return strategy.experimental_distribute_values_from_function(
        lambda c: jnp.asarray(shares[c.replica_id_in_sync_group], dtype=jnp.float32)
    )


@pytest.mark.across_processes
@dealt("axis", few([None, 0, 1, -1, -2, (0, 1), (), (1,), (-1, 0)]), one_of_each=True)
@ways
def test_reduce(make, n, way, axis):
    """Facts 37, 38, 47."""
    strategy, values = make(), components(n, 2, 3)
    x = per_replica(strategy, values)
    total, mean = way(lambda x: (strategy.reduce(SUM, x, axis=axis), strategy.reduce(MEAN, x, axis=axis)))(x)
    within = values if axis is None else [v.sum(axis=axis) for v in values]
    expected = np.sum(within, axis=0)
    count = n * (1 if axis is None else values[0].size // max(1, within[0].size))
    assert isinstance(total, jax.Array) and total.dtype == mean.dtype == np.float32
    np.testing.assert_array_equal(total, expected)
    np.testing.assert_allclose(mean, expected / count, rtol=1e-6)


@pytest.mark.across_processes
@over(at_least=2)
@ways
def test_the_result_of_run_is_reduced(make, n, way):
    strategy = make()

    def program():
        y = strategy.run(lambda: ctx().replica_id_in_sync_group.astype(jnp.float32) + jnp.ones(2))
        return strategy.reduce("sum", y, axis=None), strategy.reduce("Mean", y, axis=0)

    total, mean = way(program)()
    assert total.tolist() == [n * (n + 1) / 2] * 2 and float(mean) == (n + 1) / 2


@dealt(
    "axis, dtype, mean_dtype",
    [
        (axis, *dtypes)
        for axis in (None, 0)
        for dtypes in few(
            [
                (np.int8, np.float32),
                (np.uint8, np.float32),
                (np.int16, np.float32),
                (np.uint16, np.float32),
                (np.int32, np.float32),
                (np.float16, np.float16),
                (jnp.bfloat16, jnp.bfloat16),
                (np.float32, np.float32),
                (np.complex64, np.complex64),
            ]
        )
    ],
    one_of_each=True,
)
@ways
def test_dtypes(make, n, way, axis, dtype, mean_dtype):
    """Fact 40: SUM keeps the dtype, MEAN is a true division. 32-bit integers have float64 means under 64-bit types."""
    strategy = make()
    x = per_replica(strategy, [np.array([2 * r + 1, 2]).astype(dtype) for r in range(n)])
    total, mean = way(lambda x: (strategy.reduce(SUM, x, axis=axis), strategy.reduce(MEAN, x, axis=axis)))(x)
    assert total.dtype == dtype and mean.dtype == mean_dtype
    expected = np.array([n * n, 2 * n]) if axis is None else np.array(n * n + 2 * n)
    np.testing.assert_array_equal(np.asarray(total).astype(np.complex64), expected)
    wide = np.asarray(mean).astype(np.complex64)
    np.testing.assert_allclose(wide, expected / (n if axis is None else 2 * n), rtol=1e-2)


def test_means_of_integers_are_wide_where_there_are_64_bit_types():
    """Fact 40."""
    strategy = mirrored(2)
    with jax.enable_x64(True):
        for dtype, expected in ((np.int32, np.float64), (np.int64, np.float64), (np.int16, np.float32)):
            x = per_replica(strategy, [np.asarray(r, dtype) for r in (1, 2)])
            mean = strategy.reduce(MEAN, x, axis=None)
            assert mean.dtype == expected and float(mean) == 1.5
            assert strategy.reduce(SUM, x, axis=None).dtype == dtype
        x = per_replica(strategy, [np.array([1.0, 2.0]), np.array([3.0, 5.0])])
        assert strategy.reduce(MEAN, x, axis=0).dtype == np.float64 and float(strategy.reduce(MEAN, x, axis=0)) == 2.75


@ways
def test_negative_means_are_not_cut_off(way):
    """Fact 40."""
    strategy = mirrored(2)
    x, y = per_replica(strategy, [np.int32([-1, -2]), np.int32([0, 0])]), per_replica(strategy, [-1, -2])
    a, b = way(lambda x, y: (strategy.reduce(MEAN, x, axis=0), strategy.reduce(MEAN, y, axis=None)))(x, y)
    assert float(a) == -0.75 and float(b) == -1.5


@dealt("axis, op", [(None, SUM), (0, MEAN), (0, SUM), (None, MEAN)], one_of_each=True)
@ways
def test_booleans_are_refused(make, n, way, axis, op):
    """Fact 40."""
    x = per_replica(make(), [np.array([True])] * n)
    with pytest.raises(rx.InvalidArgumentError, match="bool"):
        way(lambda x: make().reduce(op, x, axis=axis))(x)


@over(at_least=2)
def test_text_and_mixed_dtypes_are_refused(make, n):
    """Fact 40."""
    strategy = make()
    text = strategy.experimental_distribute_values_from_function(lambda c: np.array("a"))
    with pytest.raises(rx.InvalidArgumentError):
        strategy.reduce(SUM, text, axis=None)
    mixed = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.float32(1) if c.replica_id_in_sync_group else jnp.int32(1)
    )
    with pytest.raises(rx.InvalidArgumentError, match="replica 0: int32, replica 1: float32"):
        strategy.reduce(SUM, mixed, axis=None)


@pytest.mark.filterwarnings("ignore:.* gives every replica the same weight")
def test_uneven_shares():
    """Fact 39: with an axis every element weighs the same."""
    strategy = mirrored(2)
    x = ragged(strategy, [1, 2, 3, 4], [5, 6])
    assert float(strategy.reduce(SUM, x, axis=0)) == 21 and float(strategy.reduce(MEAN, x, axis=0)) == 3.5
    for op in (SUM, MEAN):
        with pytest.raises(rx.InvalidArgumentError, match=r"\(4,\).*\(2,\)"):
            strategy.reduce(op, x, axis=None)
    means = strategy.run(jnp.mean, args=(x,))
    assert float(strategy.reduce(MEAN, means, axis=None)) == 4.0
    one_empty = ragged(strategy, [3, 5], [])
    assert float(strategy.reduce(SUM, one_empty, axis=0)) == 8 and float(strategy.reduce(MEAN, one_empty, axis=0)) == 4
    both_empty = ragged(strategy, [], [])
    assert float(strategy.reduce(SUM, both_empty, axis=0)) == 0
    assert np.isnan(float(strategy.reduce(MEAN, both_empty, axis=0)))
    tall = ragged(strategy, [[1, 1]], [[1, 1], [1, 1]])
    assert strategy.reduce(MEAN, tall, axis=0).tolist() == [1, 1]
    with pytest.raises(rx.InvalidArgumentError):
        strategy.reduce(MEAN, tall, axis=1)


@pytest.mark.filterwarnings("ignore:.* gives every replica the same weight")
def test_an_empty_share_gives_nan_means_and_zero_sums():
    """Fact 165."""
    strategy = mirrored(2)
    x = ragged(strategy, [3], [])
    means, sums = strategy.run(lambda a: (a.mean(), a.sum()), args=(x,))
    assert parts(strategy, sums) == [3, 0] and np.isnan(parts(strategy, means)[1])
    assert float(strategy.reduce(MEAN, x, axis=0)) == 3.0
    assert np.isnan(float(strategy.reduce(MEAN, means, axis=None)))


@over()
@ways
def test_wrong_axes(make, n, way):
    """Fact 38."""
    strategy = make()
    x, scalar = per_replica(strategy, components(n, 2, 2)), per_replica(strategy, [1.0] * n)
    for op in (SUM, MEAN):
        for value, axis in ((x, 2), (x, -3), (x, (0, 2)), (scalar, 0)):
            with pytest.raises(ValueError, match="Invalid reduction dimension"):
                way(lambda v, op=op, axis=axis: strategy.reduce(op, v, axis=axis))(value)
        with pytest.raises(TypeError, match=r"an int or a tuple of ints, got \[0\]"):
            way(lambda v, op=op: strategy.reduce(op, v, axis=[0]))(x)
        with pytest.raises(TypeError):
            way(lambda v, op=op: strategy.reduce(op, v, axis="0"))(x)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'axis'"):
            strategy.reduce(op, x)


@over()
@ways
def test_the_reduce_op(make, n, way):
    """Fact 45."""
    strategy = make()
    x = per_replica(strategy, [float(r) for r in range(n)])
    total = n * (n - 1) / 2
    for op, expected in (("sum", total), ("Mean", total / n), ("SUM", total), (MEAN, total / n)):
        assert float(way(lambda x, op=op: strategy.reduce(op, x, axis=None))(x)) == expected
    for op in (A.SUM, A.MEAN, None, 0):
        with pytest.raises(AssertionError):
            way(lambda x, op=op: strategy.reduce(op, x, axis=None))(x)
    for op, name in (("max", "MAX"), ("ReduceOp.SUM", "REDUCEOP.SUM")):
        with pytest.raises(ValueError, match=f"'{name}' is not a valid ReduceOp"):
            way(lambda x, op=op: strategy.reduce(op, x, axis=None))(x)


@over(here=2)
@ways
def test_a_value_that_is_not_distributed(make, n, way):
    """Fact 42."""
    strategy, x = make(), jnp.asarray([1.0, 3.0])
    with pytest.raises(
        ValueError, match=r"A non-DistributedValues value .* cannot be reduced with the given reduce op"
    ):
        way(lambda x: strategy.reduce(SUM, x, axis=None))(x)
    for bare in (3, 0, 0.0, None, rx.Variable(3.0)):
        with pytest.raises(ValueError, match="A non-DistributedValues value"):
            way(lambda bare=bare: strategy.reduce(SUM, bare, axis=None))()
    with pytest.raises(ValueError, match=r"A non-DistributedValues value 3 cannot be .* reduce op ReduceOp.SUM\."):
        way(lambda: strategy.reduce(SUM, strategy.run(lambda: 3), axis=None))()
    assert way(lambda x: strategy.reduce(MEAN, x, axis=None))(x).tolist() == [1.0, 3.0]


@over(at_least=2)
@ways
def test_a_value_that_is_not_distributed_stands_for_every_replicas(make, n, way):
    """Fact 42."""
    strategy, x = make(), jnp.asarray([1.0, 3.0])
    assert way(lambda x: strategy.reduce(MEAN, x, axis=None))(x).tolist() == [1.0, 3.0]
    assert float(way(lambda x: strategy.reduce(SUM, x, axis=0))(x)) == 4.0 * n
    assert float(way(lambda x: strategy.reduce(MEAN, x, axis=0))(x)) == 2.0


@ways
def test_with_one_replica_a_plain_value_is_returned(way):
    """Fact 42."""
    strategy, x = mirrored(1), jnp.asarray([1.0, 3.0])
    assert way(lambda x: strategy.reduce(SUM, x, axis=None))(x).tolist() == [1.0, 3.0]
    assert float(way(lambda x: strategy.reduce(SUM, x, axis=0))(x)) == 4.0
    three = way(lambda: strategy.reduce(SUM, 3, axis=None))()
    assert isinstance(three, jax.Array) and int(three) == 3


@several
@ways
def test_variables_and_mirrored_values(n, way):
    """Fact 43."""
    strategy = mirrored(n)
    with strategy.scope():
        v = rx.Variable(3.0)
        on_read = rx.Variable(3.0, synchronization=S.ON_READ, aggregation=A.SUM)
        value = strategy.extended.reduce_to(SUM, per_replica(strategy, [1.0] * n), destinations=v)
    strategy.run(lambda: on_read.assign_add(ctx().replica_id_in_sync_group.astype(jnp.float32)))
    for mirror in (v, value):
        with pytest.raises(AssertionError):
            way(lambda mirror=mirror: strategy.reduce(SUM, mirror, axis=None))()
    assert float(way(lambda: strategy.reduce(MEAN, v, axis=None))()) == 3.0
    assert float(way(lambda: strategy.reduce(MEAN, value, axis=None))()) == n
    total = 3.0 * n + n * (n - 1) / 2
    assert float(way(lambda: strategy.reduce(SUM, on_read, axis=None))()) == total
    assert float(way(lambda: strategy.reduce(MEAN, on_read, axis=None))()) == total / n


@several
@ways
def test_mean_and_rows_of_copies_that_may_differ_are_those_of_all(n, way):
    strategy = mirrored(n)
    with strategy.scope():
        v = rx.Variable([0.0, 1.0], copies_may_differ=True)
    strategy.run(lambda: v.assign_add(4.0 * ctx().replica_id_in_sync_group * jnp.ones(2)))
    mean = 4.0 * (n - 1) / 2
    assert way(lambda: strategy.reduce(MEAN, v, axis=None))().tolist() == [mean, mean + 1]
    assert float(way(lambda: strategy.reduce(MEAN, v, axis=0))()) == mean + 0.5
    assert way(lambda: strategy.gather(v, axis=0))().tolist() == [x + 4.0 * i for i in range(n) for x in (0.0, 1.0)]
    with pytest.raises(AssertionError, match="sum of a mirrored value is ambiguous"):
        way(lambda: strategy.reduce(SUM, v, axis=None))()


@several
@ways
def test_mean_of_a_mirrored_variable_is_that_of_its_first_copy(n, way):
    """With an axis, TensorFlow takes the mean of all copies (docs/reference/differences.md)."""
    strategy = mirrored(n)
    with strategy.scope():
        v = rx.Variable([1.0, 2.0])
    v.values[1].assign([3.0, 6.0])
    assert parts(strategy, v)[:2] == [[1.0, 2.0], [3.0, 6.0]]
    assert np.asarray(way(lambda: strategy.reduce(MEAN, v, axis=None))()).tolist() == [1.0, 2.0]
    assert float(way(lambda: strategy.reduce(MEAN, v, axis=0))()) == 1.5
    for axis in (None, 0):
        with pytest.raises(AssertionError, match="sum of a mirrored value is ambiguous"):
            way(lambda axis=axis: strategy.reduce(SUM, v, axis=axis))()


@over(at_least=2)
@ways
def test_nests_are_reduced_leaf_by_leaf(make, n, way):
    """Fact 44."""
    strategy = make()
    x, y = per_replica(strategy, [1.0] * n), per_replica(strategy, [[2.0]] * n)
    result = way(lambda x, y: strategy.reduce(SUM, {"a": x, "b": [y, ()]}, axis=None))(x, y)
    assert float(result["a"]) == n and result["b"][0].tolist() == [2.0 * n] and result["b"][1] == ()
    assert way(lambda: strategy.reduce(SUM, [], axis=None))() == []
    mean, five = way(lambda x: strategy.reduce(MEAN, [x, 5], axis=None))(x)
    assert float(mean) == 1.0 and int(five) == 5
    if len(local_ids(strategy)) > 1:  # else it is this worker's component
        with pytest.raises(ValueError, match="A non-DistributedValues value 5 cannot be reduced"):
            way(lambda x: strategy.reduce(SUM, [x, 5], axis=None))(x)


@pytest.mark.across_processes
@over(plain=True)
@ways
def test_none_in_a_nest_stays_none(make, n, way):
    """For JAX it is an empty subtree. A value that is None itself is refused, as in TensorFlow."""
    strategy = make()
    nested = strategy.run(lambda: [None, {"a": jnp.ones(2), "b": None}])

    def program(nested):
        total = strategy.reduce(SUM, nested, axis=None)
        return total, strategy.reduce(MEAN, nested, axis=0), strategy.gather(nested, axis=0)

    for (none, tree), expected in zip(way(program)(nested), ([n, n], 1.0, [1.0] * 2 * n)):
        assert none is tree["b"] is None and tree["a"].tolist() == expected
    if n > 1:
        with pytest.raises(ValueError, match="A non-DistributedValues value None cannot be reduced"):
            strategy.reduce(SUM, None, axis=None)


@pytest.mark.across_processes
@over(at_least=2)
@ways
def test_sparse_values_are_concatenated(make, n, way):
    """Fact 46."""
    strategy = make()

    def replica():
        r = ctx().replica_id_in_sync_group
        return rx.IndexedSlices(jnp.ones((1, 2)) * (r + 1), jnp.reshape(r % 3, (1,)), (3, 2))

    def program(op):
        return way(lambda: strategy.reduce(op, strategy.run(replica), axis=None))()

    total, mean = program(SUM), program(MEAN)
    assert isinstance(total, rx.IndexedSlices)
    assert np.asarray(total.indices).tolist() == [r % 3 for r in range(n)]
    assert np.asarray(total.values).tolist() == [[r + 1.0] * 2 for r in range(n)]
    assert np.asarray(mean.values).tolist() == [[(r + 1.0) / n] * 2 for r in range(n)]
    dense = np.zeros((3, 2))
    for r in range(n):
        dense[r % 3] += (r + 1) / n
    np.testing.assert_allclose(mean.to_dense(), dense)


@pytest.mark.across_processes
@over(at_least=2)
@ways
def test_dense_shape_may_be_computed(make, n, way):
    strategy = make()

    def replica(rows):
        r = ctx().replica_id_in_sync_group
        slices = rx.IndexedSlices(replica_id()[None], r[None], jnp.stack([rows * 2]))
        return slices, ctx().all_reduce(SUM, slices)

    own, total = way(lambda rows: strategy.run(replica, args=(rows,)))(jnp.asarray(n))
    expected = np.diag(np.arange(2.0 * n))[:n]
    assert each(strategy, own, lambda part: part.to_dense().tolist()) == expected.tolist()
    assert each(strategy, total, lambda part: part.to_dense().tolist()) == [expected.sum(0).tolist()] * n
    mean = way(lambda rows: strategy.reduce(MEAN, strategy.run(replica, args=(rows,))[0], axis=None))(jnp.asarray(n))
    np.testing.assert_allclose(mean.to_dense(), expected.sum(0) / n)


@pytest.mark.parametrize("shape", [(2,), [2], np.array([2]), jnp.array([2])], ids=["tuple", "list", "numpy", "jax"])
def test_jitted_functions_take_and_return_any_dense_shape(shape):
    slices = rx.IndexedSlices(jnp.ones(1), jnp.array([1]), shape)
    twice = jax.jit(lambda x, rows: (x, rx.IndexedSlices(x.values, x.indices, rows * 2)))
    for _ in range(3):  # JAX calls a function that it knows in another way
        same, longer = twice(slices, jnp.array([2]))
        assert same.to_dense().tolist() == [0, 1] and longer.to_dense().tolist() == [0, 1, 0, 0]


def test_python_numbers_of_replicas():
    """Fact 41: numpy arrays are taken, Python numbers are not."""
    strategy = mirrored(2)

    def rid():
        return int(ctx().replica_id_in_sync_group)

    for make in (lambda: rid() + 1, lambda: float(rid()), lambda: [rid(), 2]):
        with pytest.raises((TypeError, ValueError)):
            strategy.reduce(SUM, strategy.run(make), axis=None)
    x = strategy.run(lambda: np.array([rid(), 2.0]))
    assert strategy.reduce(SUM, x, axis=None).tolist() == [1.0, 4.0]
    assert float(strategy.reduce(SUM, x, axis=0)) == 5.0


@over(at_least=2)
@ways
def test_reduce_inside_of_the_scope_and_refused_in_replicas(make, n, way):
    """Facts 9, 47."""
    strategy = make()
    x = per_replica(strategy, [1.0] * n)

    def inside(x):
        with strategy.scope():
            return strategy.reduce(SUM, x, axis=None)

    assert float(way(inside)(x)) == n
    with pytest.raises(RuntimeError, match="Method requires being in cross-replica context, use get_replica_context"):
        way(lambda x: strategy.run(lambda a: strategy.reduce(SUM, a, axis=None), args=(x,)))(x)


@pytest.mark.across_processes
@over(at_least=2)
def test_the_gradient_of_a_reduction(make, n):
    strategy = make()
    x = per_replica(strategy, [[1.0, 2.0]] * n)
    for op, expected in ((SUM, 2.0), (MEAN, 2.0 / n)):
        gradient = jax.grad(lambda x, op=op: (strategy.reduce(op, x, axis=None) * 2.0).sum())(x)
        assert parts(strategy, gradient) == [[expected, expected]] * n
        gradient = jax.jit(jax.grad(lambda x, op=op: (strategy.reduce(op, x, axis=None) * 2.0).sum()))(x)
        assert parts(strategy, gradient) == [[expected, expected]] * n


# gather


@pytest.mark.across_processes
@dealt(
    "axis, dtype",
    list(itertools.product(few([0, 1, -1, -2]), few([np.float16, np.float32, np.int32]))),
    one_of_each=True,
)
@ways
def test_gather(make, n, way, axis, dtype):
    """Fact 48."""
    strategy, values = make(), components(n, 2, 3, dtype=dtype)
    result = way(lambda x: strategy.gather(x, axis=axis))(per_replica(strategy, values))
    assert isinstance(result, jax.Array) and result.dtype == dtype
    np.testing.assert_array_equal(result, np.concatenate(values, axis))


def test_gather_of_uneven_shares_and_nests():
    """Fact 48."""
    strategy = mirrored(2)
    uneven, x = ragged(strategy, [1, 2, 3], [4]), per_replica(strategy, [[[1, 2]], [[3, 4]]])
    result = strategy.gather({"a": uneven, "b": [x]}, axis=0)
    assert result["a"].tolist() == [1, 2, 3, 4] and result["b"][0].tolist() == [[1, 2], [3, 4]]
    wide = ragged(strategy, [[1, 2], [3, 4]], [[5], [6]])
    assert strategy.gather(wide, axis=1).tolist() == [[1, 2, 5], [3, 4, 6]]
    empty = ragged(strategy, [7], [])
    assert strategy.gather(empty, axis=0).tolist() == [7]


@over(at_least=2)
@ways
def test_gather_refuses(make, n, way):
    """Facts 48, 49."""
    strategy = make()
    scalars, x = per_replica(strategy, list(range(n))), per_replica(strategy, [[[1, 2]]] * n)
    with pytest.raises(rx.InvalidArgumentError, match="[Ss]calars"):
        way(lambda v: strategy.gather(v, axis=0))(scalars)
    for axis in (2, -3):
        with pytest.raises(rx.InvalidArgumentError, match=rf"dimensions in the range \[-2, 2\), but got {axis}"):
            way(lambda v, axis=axis: strategy.gather(v, axis=axis))(x)
    with pytest.raises(TypeError, match="bool"):
        way(lambda v: strategy.gather(v, axis=0))(per_replica(strategy, [np.array([True])] * n))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'axis'"):
        strategy.gather(x)
    with pytest.raises(RuntimeError, match="gather method requires cross-replica context, use get_replica_context"):
        way(lambda v: strategy.run(lambda a: strategy.gather(a, axis=0), args=(v,)))(x)


@over(plain=True, one_of_each=True)
def test_gather_refuses_sparse_values_that_are_not_distributed(make):
    slices = rx.IndexedSlices(jnp.ones((1, 1)), jnp.array([0]), (2, 1))
    for value in (slices, {"a": slices}):
        with pytest.raises(NotImplementedError, match="gather does not support IndexedSlices"):
            make().gather(value, axis=0)
    assert rx.get_strategy().gather(slices.to_dense(), axis=0).tolist() == [[1], [0]]


def test_gather_refuses_shares_that_do_not_fit():
    """Fact 49."""
    strategy = mirrored(2)
    with pytest.raises(rx.InvalidArgumentError, match=r"\(1, 2\).*\(1, 3\)"):
        strategy.gather(ragged(strategy, [[1, 2]], [[3, 4, 5]]), axis=0)
    with pytest.raises(rx.InvalidArgumentError, match="rank"):
        strategy.gather(ragged(strategy, [1], [[2]]), axis=0)
    text = strategy.experimental_distribute_values_from_function(lambda c: np.array(["a"]))
    with pytest.raises(TypeError):
        strategy.gather(text, axis=0)
    slices = strategy.run(lambda: rx.IndexedSlices(jnp.ones((1, 1)), jnp.array([0])))
    with pytest.raises(ValueError, match="IndexedSlices"):
        strategy.gather(slices, axis=0)


@several
@ways
def test_gather_of_what_is_not_distributed(n, way):
    """Fact 49: not repeated. A mirrored variable gives its copies one after the other."""
    strategy, x = mirrored(n), jnp.asarray([1, 2])
    assert way(lambda x: strategy.gather(x, axis=0))(x).tolist() == [1, 2]
    assert int(way(lambda: strategy.gather(5, axis=0))()) == 5
    with strategy.scope():
        v = rx.Variable([1.0])
    assert way(lambda: strategy.gather(v, axis=0))().tolist() == [1.0] * n


def test_one_replica_gathers_its_input():
    """Facts 49, 116."""
    x = jnp.asarray([1, 2])
    assert mirrored(1).gather(x, axis=0).tolist() == [1, 2]
    assert one_device().gather(x, axis=0) is x


def test_the_one_device_strategy_reduces_its_argument():
    """Fact 116."""
    one, t = one_device(), jnp.asarray([1.0, 2.0, 3.0])
    assert one.reduce(SUM, t, axis=None) is t and one.reduce(SUM, "text", axis=None) == "text"
    assert one.reduce("MEAN", [1, 2], axis=None) == [1, 2]
    assert float(one.reduce(SUM, t, axis=0)) == 6.0 and float(one.reduce(MEAN, t, axis=0)) == 2.0
    mean = one.reduce(MEAN, jnp.asarray([1, 2]), axis=0)
    assert float(mean) == 1.5
    with pytest.raises(ValueError, match="'MAX' is not a valid ReduceOp"):
        one.reduce("max", t, axis=None)
    assert one.experimental_local_results((1, 2)) == ((1, 2),)
    with pytest.raises(RuntimeError, match="Method requires being in cross-replica context"):
        one.run(lambda: one.reduce(SUM, t, axis=None))


def test_reducing_keeps_namedtuples():
    """Fact 44."""
    Pair = collections.namedtuple("Pair", "a b")
    strategy = mirrored(2)
    result = strategy.reduce(SUM, Pair(per_replica(strategy, [1, 2]), per_replica(strategy, [3, 4])), axis=None)
    assert isinstance(result, Pair) and int(result.a) == 3 and int(result.b) == 7
