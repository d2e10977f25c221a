"""Numbers of `tf.random`: those of JAX, in programs that are few and compile quickly."""

from __future__ import annotations


def test_the_hash_gives_the_published_words(run_tf):
    """The vectors are those of Random123, the uniform number is that of JAX by itself."""
    run_tf(
        """
import jax
from jax.extend.random import threefry_2x32
def hashed(key, words):
    return jax.jit(lambda *a: threefry_2x32((a[0], a[1]), a[2]))(*map(np.uint32, key), np.array(words, np.uint32))
assert hashed((0, 0), (0, 0)).tolist() == [0x6B200159, 0x99BA4EFE]
assert hashed((2**32 - 1,) * 2, (2**32 - 1,) * 2).tolist() == [0x1CB996FC, 0xBB002BE7]
assert hashed((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)).tolist() == [0xC4923A9C, 0x483DF7A0]
assert float(jax.random.uniform(jax.random.key(3))) == 0.07405257225036621
assert "while" not in jax.jit(lambda k: jax.random.bits(k, (8,))).lower(jax.random.key(0)).as_text()
"""
    )


def test_eager_numbers_are_those_of_functions_and_of_jax(run_tf):
    """Whatever the shape, the dtype and the bounds, though eager code draws more numbers than it returns."""
    run_tf(
        """
import jax
key = jax.random.wrap_key_data(np.array([5, 6], np.uint32), impl="threefry2x32")
draws = [
    lambda shape: tf.random.stateless_uniform(shape, [5, 6]),
    lambda shape: tf.random.stateless_normal(shape, [5, 6], 1.5, 0.3),
    lambda shape: tf.random.stateless_uniform(shape, [5, 6], -3, 9, tf.int32),
    lambda shape: tf.random.stateless_uniform(shape, [5, 6], 0, 10**12, tf.int64),
    lambda shape: tf.random.stateless_truncated_normal(shape, [5, 6], dtype=tf.float64),
]
for draw in draws:
    for shape in ([2, 0], [5, 3]):
        eager, compiled = draw(shape), tf.function(lambda: draw(shape))()
        assert isinstance(eager, jax.Array) and eager.dtype == compiled.dtype and list(eager.shape) == shape
        np.testing.assert_allclose(eager, compiled, rtol=1e-6)
assert np.array_equal(draws[0]([7, 3]), jax.random.uniform(key, (7, 3)))
randint = jax.jit(lambda low, high: jax.random.randint(key, (21,), low, high))
for low, high in ((-3, 9), (0, 2**31 - 1), (4, 4), (7, 2), (-(2**31), 2**31 - 1)):
    ours = tf.random.stateless_uniform([21], [5, 6], low, high, tf.int32)
    assert np.array_equal(ours, randint(np.int32(low), np.int32(high))), (low, high)
assert np.array_equal(
    tf.random.stateless_uniform([5000], [5, 6], 0, 9, tf.int32), jax.random.randint(key, (5000,), 0, 9)
)
tf.random.set_seed(1)
one, two = tf.random.normal([5]), tf.random.normal([5])
generator, again = (tf.random.Generator.from_seed(1) for _ in range(2))
assert not np.array_equal(one, two)
for shape in ([4], [9], [2, 2]):
    assert np.array_equal(generator.normal(shape), again.normal(shape))
"""
    )


def test_a_seed_that_is_set_again_repeats_the_orders_of_datasets(run_tf):
    """`set_seed` begins anew the numbers of operations and those of datasets."""
    run_tf(
        """
def orders():
    tf.random.set_seed(3)
    datasets = [tf.data.Dataset.range(20).shuffle(20) for _ in range(2)]
    return [list(dataset.as_numpy_iterator()) for dataset in datasets]

first, second = orders()
assert sorted(first) == list(range(20)) and first != second
assert orders() == [first, second]
"""
    )


def test_shapes_share_programs(run_tf):
    """A new shape is not compiled anew; one that is drawn very often gets a program of its own."""
    run_tf(
        """
import jax
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
)
tf.random.normal([9])
del compiled[:]
for shape in ([2], [3, 3], [1, 2, 5], [13], [16], [0]):
    tf.random.normal(shape)
assert not compiled, compiled
first = [np.asarray(tf.random.stateless_normal([7], [1, i])) for i in range(150)]
assert len(compiled) == 1
assert np.array_equal(first[149], tf.random.stateless_normal([8], [1, 149])[:7])
"""
    )


def test_functions_of_datasets_in_python_draw_the_numbers_of_compiled_ones(run_tf):
    run_tf(
        """
        from replicax.tf import _draws

        tf.random.set_seed(3)
        def numbers(i):
            return (
                tf.random.uniform([], -2.0, 1.5), tf.random.uniform([3], 0, 2**31 - 1, tf.int32),
                tf.random.uniform([2], -5, 2**40, tf.int64), tf.random.normal([2, 3], 1.0, 2.0),
                tf.random.truncated_normal([40]), tf.random.uniform([2], seed=4),
            )
        def in_python(i):
            i.numpy()  # which compiled code cannot do
            return numbers(i)
        def listed(function, **options):
            elements = tf.data.Dataset.range(150).map(function, **options)
            return [list(each) for each in zip(*elements.as_numpy_iterator())]
        for options in ({}, {"num_parallel_calls": 3}):
            _draws._blocks.clear()
            for compiled, python in zip(listed(numbers, **options), listed(in_python, **options)):
                np.testing.assert_array_equal(compiled, python)
            assert len(_draws._blocks) <= 5 * 4  # one call of a program for 64 elements

        # Bounds that differ from element to element, and shapes.
        def own(i):
            return tf.random.uniform([int(i) % 3 + 1], 0.0, float(i) + 1)
        first, again = (list(tf.data.Dataset.range(9).map(own).as_numpy_iterator()) for _ in range(2))
        assert all(0 <= x.min() and x.max() < i + 1 and x.shape == (i % 3 + 1,) for i, x in enumerate(first))
        """
    )


def test_replicas_draw_from_a_generator_of_any_strategy(run_tf):
    """Each replica draws other numbers, the state counts one draw, and a reset needs an aggregation."""
    run_tf(
        """
import pytest
def draw(strategy, way):
    with strategy.scope():
        generator = tf.random.Generator.from_seed(1)
    def replica():
        generator.skip(2)
        return generator.normal([3]), generator.make_seeds(1)
    drawn = [way(lambda: strategy.run(replica))() for _ in range(2)]
    cross = way(lambda: generator.normal([]))()
    parts = [[x.numpy().tolist() for x in strategy.experimental_local_results(leaf)] for leaf in tf.nest.flatten(drawn)]
    assert all(first != second for first, second in parts), parts
    return generator, [parts, float(cross), generator.state.numpy().tolist()]
D = tf.distribute
for way in (lambda f: f, tf.function):
    _, expected = draw(D.MirroredStrategy(["CPU:0", "CPU:1"]), way)
    central = D.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])
    generator, drawn = draw(central, way)
    assert drawn == expected, (drawn, expected)
    with pytest.raises(ValueError, match="You must specify an aggregation method"):
        way(lambda: central.run(lambda: generator.reset_from_seed(3)))()
    assert generator.state.numpy().tolist() == expected[2]
"""
    )
