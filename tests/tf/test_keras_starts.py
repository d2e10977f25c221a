"""How Keras starts under `replicax.tf`: what it imports, and what is compiled as a model is built."""

from __future__ import annotations

import pytest

# Counts the programs that are compiled.
COUNTING = """
import jax
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
)
keras = tf.keras
"""


def test_keras_comes_without_the_libraries_of_its_wrappers_and_plots(run_tf):
    """They are loaded when something in them is asked for, which nothing but that does."""
    run_tf(
        """
import inspect, sys, threading
tf.install()
import keras
heavy = {"sklearn", "matplotlib"}
assert not heavy & set(sys.modules)
assert keras.visualization.__name__ == "keras.visualization" and "plot_image_gallery" not in vars(keras.visualization)
inspect.getmodule(sys)  # looks into all modules
inspect.getsource(keras.layers.Dense)
assert not heavy & set(sys.modules)

found = []
asking = [threading.Thread(target=lambda: found.append(keras.wrappers.SKLearnClassifier)) for _ in range(4)]
for thread in asking:
    thread.start()
for thread in asking:
    thread.join()
assert len(found) == 4 and len(set(found)) == 1
assert {"plot_image_gallery", "draw_bounding_boxes"} <= set(dir(tf.keras.visualization))
from keras.visualization import plot_image_gallery
import keras.src.visualization.plot_image_gallery as inner
assert inner.plot_image_gallery is plot_image_gallery
try:
    keras.wrappers.nothing
except AttributeError as error:
    assert "module 'keras.wrappers' has no attribute 'nothing'" in str(error)
else:
    raise AssertionError
"""
    )


def test_a_module_that_cannot_be_loaded_says_so_each_time(run_tf):
    run_tf(
        """
import sys
from replicax.tf import _deferred
keras = tf.keras
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("keras.src.visualization."):
            raise OSError("no such disk")
sys.meta_path.insert(0, Broken())
for _ in range(2):
    try:
        keras.visualization.plot_image_gallery
    except OSError as error:
        assert "no such disk" in str(error)
    else:
        raise AssertionError
del sys.meta_path[0]
assert callable(keras.visualization.plot_image_gallery)
"""
    )


@pytest.mark.thorough
def test_variables_of_new_shapes_are_made_without_new_programs(run_tf):
    """The values are those that Keras's own functions give, of which each compiles a program for each shape."""
    run_tf(
        COUNTING
        + """
def built(units):
    layers = [keras.layers.Dense(n, kernel_initializer=kind) for n, kind in zip(units, ("he_normal", "glorot_uniform"))]
    model = keras.Sequential([keras.Input([units[-1]]), *layers, keras.layers.BatchNormalization()])
    keras.optimizers.Adam().build(model.trainable_variables)
    return model
built([3, 4, 5])
tf.zeros([3])
del compiled[:]
for units in ([7, 9, 11], [300, 30, 170]):
    built(units)
tf.zeros([2, 5]), tf.ones([4], tf.int64)
assert not compiled, len(compiled)

# Integers of 64 bits, and shapes that are given as one number.
assert tf.ones([4], tf.int64).dtype == tf.int64 and keras.ops.full(3, 2.5, "float16").tolist() == [2.5] * 3
assert keras.ops.zeros(2, "bool").dtype == "bool" and keras.ops.full([2], np.arange(2)).tolist() == [0, 1]
assert keras.ops.zeros(np.int64(3)).shape == keras.ops.ones(jax.numpy.int32(3)).shape == (3,)
assert tf.zeros([2], tf.string).numpy().tolist() == [b"", b""]

key = jax.numpy.array([5, 0], jax.numpy.uint32)
for shape in ([], [0, 3], [7], [3, 3, 5, 16], [300, 400]):
    initializers = keras.initializers
    uniform = jax.random.uniform(key, shape, "float32", -0.25, 0.5)
    assert np.array_equal(initializers.RandomUniform(-0.25, 0.5, 5)(shape), uniform)
    normal = jax.random.normal(key, shape, "float32") * 2.0 + 1.0
    assert np.array_equal(initializers.RandomNormal(1.0, 2.0, 5)(shape), normal)
    truncated = jax.random.truncated_normal(key, -2.0, 2.0, shape, "bfloat16") * 0.5 + 0.0
    found = initializers.TruncatedNormal(0.0, 0.5, 5)(shape, "bfloat16")
    assert found.dtype == "bfloat16" and np.array_equal(found, truncated), shape

# An array among the parameters, a function that is traced, and a tape, which may look at what is drawn.
spread = keras.random.normal([2, 2], mean=tf.constant([0.0, 100.0]), seed=1)
assert (np.asarray(spread)[:, 1] > 50).all()
traced = tf.function(lambda: keras.random.uniform([3], seed=5) + keras.ops.ones([3]))()
np.testing.assert_allclose(traced, keras.random.uniform([3], seed=5) + 1)
x = tf.constant(3.0)
with tf.GradientTape() as tape:
    tape.watch(x)
    total = tf.reduce_sum(keras.ops.full([4], x)) + tf.reduce_sum(keras.random.uniform([2], maxval=x, seed=5))
np.testing.assert_allclose(tape.gradient(total, x), 4 + tf.reduce_sum(keras.random.uniform([2], seed=5)), rtol=1e-6)

# Shapes that are drawn very often get programs of their own, with the same numbers.
drawn = {np.asarray(keras.random.normal([5], seed=5)).tobytes() for _ in range(150)}
assert len(drawn) == 1
"""
    )


def test_normalization_and_activations_are_one_program_for_a_shape(run_tf):
    run_tf(
        COUNTING
        + """
def normalized(x):
    return keras.ops.batch_normalization(x, mean, variance, -1, offset, scale)
mean, variance, offset, scale = (tf.constant([i, i + 1.0]) for i in range(4))
x, y, z = (tf.constant(np.linspace(-2, 2, 2 * n, dtype=np.float32).reshape(-1, 2)) for n in (4, 5, 6))
expected = (x - mean) / np.sqrt(np.asarray(variance) + 1e-3) * scale + offset
np.testing.assert_allclose(normalized(x), expected, rtol=1e-5, atol=1e-6)
tf.nn.relu(x), tf.nn.selu(x)
del compiled[:]
normalized(y)
assert len(compiled) == 1, len(compiled)
tf.nn.relu(y), tf.nn.selu(y)
assert len(compiled) == 3, len(compiled)

def gradients(z, scale):
    with tf.GradientTape() as tape:
        tape.watch([z, scale])
        out = keras.ops.batch_normalization(z, mean, variance, -1, offset, scale)
        total = tf.reduce_sum(tf.nn.relu(out))
    return tape.gradient(total, [z, scale])
for one, other in zip(gradients(z, scale), tf.function(gradients)(z, scale)):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
statistics = keras.Variable(np.array([0.0, 1.0], np.float32)), keras.Variable(np.array([1.0, 2.0], np.float32))
found = keras.ops.batch_normalization(x, *statistics, -1, offset, scale)
np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
assert tf.nn.relu(tf.constant([-1, 2])).numpy().tolist() == [0, 2]
wide = [tf.constant(value, tf.float64) for value in ([[1.0]], [0.0], [0.0])]  # with 64 bits of epsilon too
assert abs(float(keras.ops.batch_normalization(*wide, -1, epsilon=0.1)[0, 0]) - 0.1**-0.5) < 1e-14
in_python = tf.data.Dataset.from_tensors([-1.0, 2.0]).map(lambda x: x.numpy() is None or tf.nn.relu(x))
assert next(iter(in_python)).numpy().tolist() == [0, 2]
"""
    )
