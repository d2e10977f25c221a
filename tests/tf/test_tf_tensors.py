"""Tensors of `replicax.tf` as libraries written for TensorFlow use them: dtypes, operators, arguments, errors.

What an expression gives stands in tests/tf/tf_ops/cases.txt and is compared with TensorFlow by test_tf_ops.py; here is
what one expression does not show. `replicax.tf` changes JAX's arrays, so each program runs in a process of its own.
"""

from __future__ import annotations

import pytest


def test_dtypes_are_numpys_objects_with_the_attributes_of_tensorflow(run_python):
    """And nothing of numpy's own is another than before."""
    done = run_python("""
import copy, pickle
import numpy as np
every = [np.dtype(c) for c in "?bhilqBHILQefdFDSUVOMm"] + [np.dtype([("a", "f4")]), np.dtype(">f4")]
own = {name: value for name, value in vars(np.dtype).items()}
said = [(repr(d), str(d), d.name, hash(d), pickle.dumps(d)) for d in every]
for d in every:
    assert not hasattr(d, "is_floating")  # looked up before, so that Python remembers that it is not there
import replicax.tf as tf
import jax, jax.numpy as jnp, ml_dtypes
assert all(vars(np.dtype)[name] is value for name, value in own.items())
assert said == [(repr(d), str(d), d.name, hash(d), pickle.dumps(d)) for d in every]
assert [d.is_floating for d in every[-2:]] == [False, True] and np.dtype("S3").is_numeric is False
assert np.dtype(ml_dtypes.bfloat16) is tf.bfloat16 and tf.bfloat16.is_floating

# One object, however a tensor came about, in code that JAX runs and in compiled code.
array = pickle.loads(pickle.dumps(np.ones(2, np.float32)))
assert array.dtype is not tf.float32  # numpy's way
tensor = tf.ones([2])
made = [array, copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), jnp.asarray(array), jax.device_put(array)]
seen = []
def look(x):
    seen.append(tf.convert_to_tensor(x).dtype is tf.float32 and x.dtype.is_floating and x.dtype.as_numpy_dtype)
    return x
for x in made:
    tf.function(look)(x), jax.jit(look)(x), jax.grad(lambda x: look(x).sum())(jnp.asarray(x)), tf.Variable(x)
    assert tf.Variable(x).dtype is tf.float32 and tf.TensorSpec.from_tensor(x).dtype is tf.float32
assert set(seen) == {np.float32}, seen
spec = pickle.loads(pickle.dumps(tf.TensorSpec([None], tf.int64)))
assert spec.dtype is tf.int64 and spec.dtype.is_integer
assert jnp.zeros(2, tf.bfloat16).astype(tf.int8).dtype is tf.int8 and np.zeros(2, tf.float16).dtype.size == 2
assert isinstance(tf.float32, tf.DType) and not isinstance("float32", tf.DType) and tf.DType(3) is tf.int32
assert isinstance(array.dtype, tf.DType) and issubclass(type(tf.bfloat16), tf.DType)

# What is pickled or copied keeps 64 bits, by multiprocessing too, though JAX's own setting is 32.
from multiprocessing.reduction import ForkingPickler
ways = [lambda x, p=p: pickle.loads(pickle.dumps(x, p)) for p in range(2, 6)]
ways += [lambda x: pickle.loads(ForkingPickler.dumps(x)), copy.copy, copy.deepcopy]
wide = {tf.int64: 2**40 + 1, tf.float64: 1 / 3, tf.complex128: 1 / 3 + 1j, tf.uint64: 2**64 - 1}
for dtype, number in (wide | {tf.int32: 5, tf.bool: True}).items():
    tensor = tf.constant([number], dtype)
    for x in tensor, tf.Variable(tensor), {"a": (tensor,)}:
        for way in ways:
            (got,) = tf.nest.flatten(way(x))
            assert got.dtype is dtype and got.numpy().tolist() == [number], (way, got)
        assert b"replicax" not in pickle.dumps(tensor) or dtype in wide  # else JAX alone can load it

key = jax.random.key(0)  # of a dtype that numpy has not
assert key.dtype == jax.random.key(1).dtype and not isinstance(key.dtype, tf.DType)
""")
    assert done.returncode == 0, done.stderr


# Operations with a number among their arguments: `n(number)`, or `m(number)` for a whole one.
NUMBERS = """
tf.add(x, n(2.0)); tf.subtract(n(2.0), x); tf.multiply(x, n(2.0)); tf.divide(x, n(2.0)); tf.math.floordiv(x, n(2.0))
tf.math.floormod(x, n(2.0)); tf.pow(tf.abs(x), n(2.0)); tf.maximum(x, n(0.5)); tf.minimum(n(0.5), x)
tf.equal(x, n(0.5)); tf.less(x, n(0.5)); tf.greater_equal(n(0.5), x); tf.math.squared_difference(x, n(0.5))
tf.math.divide_no_nan(x, n(0.0)); tf.math.multiply_no_nan(x, n(0.0)); tf.math.xlogy(tf.abs(x), n(2.0))
tf.math.xdivy(x, n(2.0)); tf.atan2(x, n(2.0)); tf.scalar_mul(n(2.0), x); tf.add_n([x, x])
tf.math.polyval([n(2.0), n(1.0)], x); tf.math.igamma(n(0.5), tf.abs(x)); tf.math.zeta(n(2.0), tf.abs(x))
tf.math.betainc(n(0.5), n(0.5), n(0.25)); tf.math.nextafter(x, n(9.0)); tf.math.polygamma(n(1.0), tf.abs(x))
tf.clip_by_value(x, n(0.0), n(0.5)); tf.clip_by_norm(x, n(0.5)); tf.clip_by_global_norm([x], n(0.5))
tf.clip_by_global_norm([x], n(0.5), use_norm=n(2.0)); tf.one_hot([0, 1], 2, on_value=n(0.5), off_value=n(0.0))
tf.one_hot([0, 1], 2, on_value=n(0.5)); tf.fill([2], n(0.5)); tf.linspace(n(0.0), n(2.0), 3)
tf.pad(x, [[1, 0], [0, 1]], constant_values=n(0.5)); tf.where(x > 0, n(0.5), x); tf.where(x > 0, x, n(0.5))
tf.stack([x[0], [n(0.5), n(0.5), n(2.0)]]); tf.stack([n(0.5), n(2.0)]); tf.concat([x, [[n(0.5)] * 3]], 0)
tf.cast(n(0.5), tf.int32); tf.saturate_cast(n(0.5), tf.uint8); tf.complex(n(0.5), n(2.0))
tf.nn.leaky_relu(x, n(0.5)); tf.nn.silu(x, n(0.5))
tf.nn.weighted_cross_entropy_with_logits(tf.ones_like(x), x, n(2.0))
tf.nn.batch_normalization(x, n(0.5), n(2.0), n(0.0), n(2.0), n(0.25))
tf.nn.batch_normalization(x, n(0.5), n(2.0), None, None, n(0.25)); tf.math.l2_normalize(x, 1, n(0.25))
tf.nn.local_response_normalization(tf.reshape(x, [1, 1, 2, 3]), 1, n(2.0), n(0.5), n(0.5))
tf.nn.compute_average_loss(x, sample_weight=n(0.5)); tf.nn.dropout(x, rate=n(0.0)); tf.zeros_like(n(0.5))
tf.ones_like(n(0.5)); tf.reshape(n(0.5), [1]); tf.broadcast_to(n(0.5), [2]); tf.tile([n(0.5)], [2])
tf.expand_dims(n(0.5), 0); tf.reduce_sum([n(0.5), n(2.0)]); tf.tensordot(x, n(0.5), 0)
tf.tensor_scatter_nd_update(x, [[0, 0]], [n(0.5)]); tf.scatter_nd([[1]], [n(0.5)], [3])
tf.nn.moments([n(0.5), n(2.0)], 0); tf.nn.l2_loss(n(0.5)); tf.math.reduce_std([n(0.5), n(2.0)])
tf.searchsorted([0.0, 1.0, 2.0], [n(0.5)]); tf.nn.embedding_lookup(tf.identity(x), [0, 1], max_norm=n(0.5))
tf.roll(x, m(1), 1); tf.roll(x, [m(1), m(2)], [0, 1]); tf.range(3) + m(1); tf.gather(x, m(1))
tf.gather(x, [m(1), m(0)]); tf.one_hot(m(1), 3); tf.sequence_mask(m(2), 3); tf.math.floormod(tf.range(5), m(2))
tf.bitwise.left_shift(tf.range(3), m(1)); tf.pow(tf.range(3), m(2))
tf.tensor_scatter_nd_add(x, [[m(1), m(0)]], [n(0.5)])
tf.math.bincount([0, 1, 1], weights=[n(0.5), n(2.0), n(0.25)]); tf.stop_gradient(n(0.5)); tf.identity(n(0.5))
tf.convert_to_tensor(n(0.5)); tf.convert_to_tensor([n(0.5), n(2.0)]); tf.cond(n(0.5) > 0, lambda: x, lambda: -x)
tf.constant(0.5) + n(0.5); tf.linalg.set_diag(tf.eye(2), [n(0.5), n(2.0)]); tf.linalg.diag([n(0.5), n(2.0)])
tf.math.unsorted_segment_sum(x, [m(1), m(0)], 2); tf.nn.log_poisson_loss(x, n(0.5))
tf.nn.sigmoid_cross_entropy_with_logits(tf.zeros_like(x), x * n(2.0)); tf.math.in_top_k([1, 0], x, 2)
tf.slice(x, [m(1), 0], [1, 2]); tf.map_fn(lambda row: row * n(2.0), x); tf.scan(lambda a, b: a * n(0.5) + b, x[0])
tf.norm(x * n(2.0)); tf.math.accumulate_n([x, x * n(2.0)]); tf.reverse_sequence(x, [m(1), m(2)], seq_axis=1)
tf.meshgrid([n(0.5)], [n(2.0)]); tf.math.confusion_matrix([0, 1], [m(1), m(0)], 2)
tf.dynamic_stitch([[0], [1]], [[n(0.5)], [n(2.0)]]); tf.repeat([n(0.5)], 2); tf.random.normal([2], n(0.5), 0.0)
tf.random.uniform([2], n(0.5), n(0.5)); tf.random.stateless_normal([2], [1, 2], n(0.5), n(0.0))
tf.random.stateless_uniform([2], [1, 2], n(0.5), n(0.5)); tf.random.truncated_normal([2], n(0.5), n(0.0))
tf.case([(n(0.5) > 1, lambda: x)], default=lambda: -x); tf.switch_case(m(1), [lambda: x, lambda: -x])
tf.while_loop(lambda i: i < m(2), lambda i: [i + 1], [tf.constant(0)]); tf.debugging.assert_greater(x, n(-5.0))
tf.math.reduce_logsumexp([n(0.5), n(2.0)]); x[m(1)]; x[m(1), m(0)]; x[..., m(2)]; x[tf.newaxis, m(0)]; x[[m(1), m(2)]]
x[m(1) - 2]; x[m(0), 1:]; x[(m(1),)]
"""


@pytest.mark.numbers
def test_a_number_among_arguments_may_be_a_variable_a_tensor_or_numpys(run_tf):
    """In each operation and index, and where it is a variable also compiled: always what Python's number gives."""
    run_tf(
        f"""
import warnings
cases = [case.strip() for line in {NUMBERS!r}.strip().splitlines() for case in line.split(";")]"""
        + """
x = tf.constant([[0.5, -1.5, 2.0], [1.0, 3.0, -0.25]])
variables = {(type(n), n): tf.Variable(n) for n in (0.5, 0.0, 2.0, 1.0, 0.25, 9.0, -5.0, 0, 1, 2)}
ways = {
    "number": lambda n: n,
    "variable": lambda n: variables[type(n), n],
    "tensor": tf.constant,
    "numpy": lambda n: (np.float32 if type(n) is float else np.int32)(n),
}

def evaluate(case, make):
    return eval(case, {"tf": tf, "x": x, "n": make, "m": make})

def plain(result):
    return [(str(t.dtype), t.numpy().tolist()) for t in tf.nest.flatten(result) if t is not None]

expected = {case: plain(evaluate(case, ways["number"])) for case in cases}
for way, make in ways.items():
    @tf.function(autograph=False)
    def compiled():
        return {case: evaluate(case, make) for case in cases}
    eager = {case: evaluate(case, make) for case in cases}
    for got in [eager, compiled()] if way == "variable" else [eager]:  # compiled, a tensor is a constant
        for case in cases:
            for one, other in zip(expected[case], plain(got[case]), strict=True):
                assert one[0] == other[0] and np.allclose(one[1], other[1], rtol=1e-5, equal_nan=True), (way, case)

# Bounds of slices decide on shapes: a function with them runs from the host, unless they are constants.
one, two = variables[int, 1], variables[int, 2]
variable = tf.Variable(x)
for index in (
    lambda i, j: x[i:], lambda i, j: x[:i, ::j], lambda i, j: variable[i:j, i], lambda i, j: x[[i, slice(j)]],
    lambda i, j: tf.split(x, [i, i])[1], lambda i, j: tf.pad(x, [[i, 0], [0, j]]),
):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert plain(tf.function(lambda: index(one, two))()) == plain(index(1, 2))
    constants = tf.function(lambda: index(tf.constant(1), tf.constant(2)), autograph=False)
    assert plain(constants()) == plain(index(1, 2))
    assert plain(index(one, two)) == plain(index(tf.constant(1), two)) == plain(index(1, 2))
raises(TypeError, lambda: x[tf.Variable(1.0)]), raises(TypeError, lambda: x[tf.Variable(1.0):])
raises(TypeError, lambda: x[[[0, 1]]])

rate = tf.Variable(0.5)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
dropped = tf.function(lambda: strategy.run(lambda x: tf.nn.dropout(x, rate=rate), (tf.ones([50]),)))()
assert all(set(part.numpy().tolist()) == {0.0, 2.0} for part in dropped.values)
""",
        timeout=300,
    )


def test_errors_are_invalid_argument_errors_and_what_jax_raises(run_tf):
    run_tf("""
x, y, m = tf.ones([2]), tf.ones([3]), tf.ones([2, 3])
texts = {  # as TensorFlow 2.21 has them
    "Incompatible shapes: [2] vs. [3]": [
        lambda: x + y, lambda: x * [1.0, 2.0, 3.0], lambda: tf.Variable(x) - y, lambda: tf.add(x, y), lambda: x < y,
        lambda: tf.maximum(x, y), lambda: tf.clip_by_value(x, 0.0, y), lambda: tf.broadcast_to(x, [3])],
    "Matrix size-incompatible: In[0]: [2,3], In[1]: [2,3]": [lambda: m @ m, lambda: tf.matmul(m, m)],
    "Input to reshape is a tensor with 128 values, but the requested shape has 192": [
        lambda: tf.reshape(tf.ones([128]), [192])],
    "Input to reshape is a tensor with 6 values, but the requested shape requires a multiple of 4": [
        lambda: tf.reshape(m, [4, -1])],
    "ConcatOp : Ranks of all input tensors should match: shape[0] = [2,3] vs. shape[1] = [2]": [
        lambda: tf.concat([m, x], 0)],
    "ConcatOp : Dimension 1 in both shapes must be equal: shape[0] = [2,3] vs. shape[1] = [2,2]": [
        lambda: tf.concat([m, tf.ones([2, 2])], 0)],
    "ConcatOp : Expected concatenating dimensions in the range [-2, 2), but got 5": [lambda: tf.concat([m, m], 5)],
    "Shapes of all inputs must match: values[0].shape = [2] != values[1].shape = [3]": [lambda: tf.stack([x, y])],
    "Can not squeeze dim[0], expected a dimension of 1, got 2": [lambda: tf.squeeze(x, 0)],
    "Tried to squeeze dim index 5 for tensor with 2 dimensions.": [lambda: tf.squeeze(m, [5])],
    "Tried to expand dim index 5 for tensor with 1 dimensions.": [lambda: tf.expand_dims(x, 5)],
    # And with JAX's own words, where TensorFlow's would take a check of ours.
    "conv2d: ": [lambda: tf.nn.conv2d(tf.ones([1, 4, 4, 3]), tf.ones([2, 2, 2, 1]), 1, "SAME")],
    "(shapes: [2])": [lambda: tf.reduce_sum(x, axis=3), lambda: tf.math.top_k(x, 5)],
}
for text, functions in texts.items():
    for function in functions:
        for kind in (tf.errors.InvalidArgumentError, ValueError, TypeError):
            raises(kind, function, text)
            raises(kind, tf.function(function), text)  # TensorFlow: ValueError
# Shapes that no tensor can have, of all functions that draw; a generator's state stays.
generator = tf.random.Generator.from_seed(1)
state = generator.state.numpy().tolist()
drawing = [tf.zeros, tf.ones, tf.random.normal, tf.random.uniform, tf.random.truncated_normal, generator.normal]
drawing += [generator.uniform, generator.truncated_normal, generator.uniform_full_int]
drawing += [lambda s: tf.fill(s, 1.0), lambda s: generator.binomial(s, 5.0, 0.5), tf.random_normal_initializer()]
drawing += [lambda s: tf.random.gamma(s, 1.0), lambda s: tf.random.poisson(s, 1.0)]
for stateless in (tf.random.stateless_normal, tf.random.stateless_uniform, tf.random.stateless_truncated_normal):
    drawing.append(lambda s, op=stateless: op(s, [1, 2]))
for stateless, *more in (
    (tf.random.stateless_gamma, 1.0), (tf.random.stateless_poisson, 1.0), (tf.random.stateless_binomial, 5.0, 0.5)
):
    drawing.append(lambda s, op=stateless, more=more: op(s, [1, 2], *more))
bad = {
    "-1": ([-1], tf.constant([-1]), tf.Variable([2, -1])), "-3": ([2, -3], np.array([2, -3])), "1.5": ([1.5], 1.5),
    "None": (None, [None], [None, 2], tf.TensorShape([None])), "too many elements": ([2**31, 2**31], [2**62, 8]),
    "text": ("text", ["text"]),
}
for function in drawing:
    for text, shapes in bad.items():
        for shape in shapes:
            raises(tf.errors.InvalidArgumentError, lambda: function(shape), text)
for function in (tf.random.categorical, lambda logits, n: tf.random.stateless_categorical(logits, n, [1, 2])):
    for n in (-1, 1.5, None):
        raises(tf.errors.InvalidArgumentError, lambda: function([[0.0, 0.0]], n), str(n))
raises(tf.errors.InvalidArgumentError, lambda: tf.function(tf.random.normal)([-1]), "-1")
raises(tf.errors.InvalidArgumentError, lambda: tf.function(lambda: generator.normal([2, -3]))(), "-3")
assert generator.state.numpy().tolist() == state

# What is no complaint of JAX's stays what it is.
raises(TypeError, lambda: tf.add(x), "missing 1 required positional argument")
raises(TypeError, lambda: x + object(), "unsupported operand")
def unknown(x):
    return tf.zeros([tf.cast(x[0], tf.int32)])
import jax
raises(jax.errors.ConcretizationTypeError, lambda: jax.jit(unknown)(x))

# The lines that JAX's errors and programs name are the program's own.
strategy = tf.distribute.MirroredStrategy(["CPU:0"])
def branches():
    total = tf.reduce_sum(x)
    return 1 if total > 2 else 0
line = f"{branches.__code__.co_filename}:{branches.__code__.co_firstlineno + 2}:"
jax_error = jax.errors.TracerBoolConversionError
raises(jax_error, tf.function(lambda: strategy.run(branches), autograph=False), "operation", line)
text = tf.function(lambda x: tf.nn.softmax(-x @ x)[0]).lower(tf.ones([2, 2])).as_text(debug_info=True)
import os, replicax
assert branches.__code__.co_filename in text and os.path.dirname(replicax.__file__) not in text
import warnings
warnings.simplefilter("ignore")  # for such errors have a function driven from the host
assert tf.function(unknown)(x).shape == [1]
raises(ValueError, lambda: tf.boolean_mask(x, [True]), "are incompatible")
""")


def test_a_tensor_left_behind_by_a_compiled_function_is_refused_in_the_words_of_the_program(run_tf):
    run_tf("""
import jax
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
class Trainer:
    def step(self, x):
        self.last = x * 3.0
        return x
    @tf.function
    def run(self, x):
        return strategy.run(self.step, args=(x,))
trainer = Trainer()
trainer.run(tf.constant(1.0))
left = trainer.last
error, words = jax.errors.UnexpectedTracerError, ("left it on an object", "Return it from that function")
for use in (
    lambda: left + 1.0, lambda: 1.0 - left, lambda: left == 1.0, lambda: left[None], lambda: tf.reduce_sum(left),
    lambda: tf.stack([left, left]), lambda: float(left), lambda: int(left), lambda: bool(left),
    lambda: np.asarray(left), lambda: tf.print(left), lambda: tf.Variable(0.0).assign_add(left),
    lambda: abs(left), lambda: -left,
):
    raises(error, use, *words)
raises(AttributeError, lambda: left.numpy(), "numpy() has no value", *words)
assert not hasattr(left, "numpy")

# Where it is known, and while a function is traced, the errors are about other things.
raises(jax.errors.TracerArrayConversionError, lambda: jax.jit(lambda x: np.asarray(x))(1.0), "called on traced array")
raises(AttributeError, lambda: jax.jit(lambda x: x.numpy())(1.0), "Return the tensor, and call numpy()")
raises(AttributeError, lambda: jax.jit(lambda x: x.nothing)(1.0), "nothing")
""")


def test_objects_of_attrs_classes_are_structures_of_nest(run_tf):
    run_tf("""
import types
class Box:
    __attrs_attrs__ = types.SimpleNamespace(name="b"), types.SimpleNamespace(name="a")
    def __init__(self, b, a):
        self.b, self.a = b, a
class Other(Box):
    pass
nest, box = tf.nest, Box(1, {"z": 2, "a": [3]})
assert nest.is_nested(box) and nest.flatten(box) == [1, 3, 2]
more = nest.map_structure(lambda x, y: x + y, box, box)
assert type(more) is Box and (more.b, more.a) == (2, {"z": 4, "a": [6]})
packed = nest.pack_sequence_as(box, [7, 8, 9])
assert type(packed) is Box and (packed.b, packed.a) == (7, {"z": 9, "a": [8]})
nest.assert_same_structure(Box(1, 2), Box(3, 4))
nest.assert_same_structure(Box(1, 2), Other(3, 4), check_types=False)
for other in (Other(3, 4), (3, 4)):
    raises(TypeError, lambda: nest.assert_same_structure(Box(1, 2), other), "Box")
raises(ValueError, lambda: nest.assert_same_structure(Box(1, 2), 3), "has a leaf")
raises(ValueError, lambda: nest.assert_same_structure(Box(1, 2), Box(3, [4])), "'a'")
""")


def test_modules_and_operations_support_what_libraries_need(run_tf):
    run_tf("""
class Overridden(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.count = tf.Variable(1.0), tf.Variable(2, trainable=False)
    @property
    def variables(self):
        raise RuntimeError("not this one")
module = Overridden()
assert [v is module.weight for v in module.trainable_variables] == [True]
assert [v is module.count for v in module.non_trainable_variables] == [True]

# Operations are functions of their modules, by their names: a configuration may hold and pickle them.
for op, name in ((tf.nn.relu, "relu"), (tf.cumsum, "cumsum"), (tf.argmax, "argmax"), (tf.nn.silu, "silu")):
    assert op.__name__ == name and pickle.loads(pickle.dumps(op)) is op and copy.deepcopy(op) is op
assert tf.nn.swish is tf.nn.silu and tf.math.softmax is tf.nn.softmax
assert tf.math.segment_sum.__name__ == "segment_sum" and tf.bitwise.invert.__name__ == "invert"

# The gradient of a variable that is a number among arguments.
limit, slope, x = tf.Variable(0.5), tf.Variable(0.25), tf.constant([-2.0, 0.25, 3.0])
def gradients():
    with tf.GradientTape() as tape:
        sums = tf.clip_by_value(x, -1.0, limit) + tf.nn.leaky_relu(x, slope) + tf.one_hot([0], 3, limit, 0.0)
        y = tf.reduce_sum(sums)
    return tape.gradient(y, [limit, slope])
for way in (lambda f: f, tf.function):
    assert [float(g) for g in way(gradients)()] == [2.0, -2.0]
""")


def test_lists_of_tensors_and_64_bit_numbers_are_assigned_as_they_are(run_tf):
    """Eagerly, compiled and in replicas, as in TensorFlow."""
    run_tf("""
third, big = 1 / 3, 2**40 + 1
floats, integers, wide = tf.Variable([1.0, 2.0]), tf.Variable([1, 2]), tf.Variable([1.0, 2.0], dtype=tf.float64)
matrix, long = tf.Variable([[1.0, 2.0], [3.0, 4.0]]), tf.Variable([1, 2], dtype=tf.int64)
number, whole = tf.Variable(1.0, dtype=tf.float64), tf.Variable(1, dtype=tf.int64)
cases = [  # what is assigned, for tensors y of [5, 6] and w of [1/3, 7] in float64, and the value then
    (floats, lambda y, w: [y[0], y[1]], [5.0, 6.0]), (floats, lambda y, w: (y[1], 3.0), [6.0, 3.0]),
    (floats, lambda y, w: [2, y[0]], [2.0, 5.0]), (floats, lambda y, w: [floats[1], floats[0]], [2.0, 1.0]),
    (floats, lambda y, w: [number, y[0]], [1.0, 5.0]), (integers, lambda y, w: [integers[1], 7], [2, 7]),
    (matrix, lambda y, w: [y, y], [[5.0, 6.0], [5.0, 6.0]]),
    (matrix, lambda y, w: [floats, y], [[1.0, 2.0], [5.0, 6.0]]),
    (matrix, lambda y, w: [[y[0], 1], [2.5, floats[1]]], [[5.0, 1.0], [2.5, 2.0]]),
    (matrix, lambda y, w: [y, np.ones(2)], [[5.0, 6.0], [1.0, 1.0]]), (wide, lambda y, w: [third, 0.1], [third, 0.1]),
    (wide, lambda y, w: [0.1, w[0]], [0.1, third]), (wide, lambda y, w: w * 3, [third * 3, 21.0]),
    (number, lambda y, w: 0.1, 0.1), (whole, lambda y, w: big, big), (whole, lambda y, w: np.int64(big), big),
    (long, lambda y, w: [big, -big], [big, -big]), (long, lambda y, w: [whole, big], [1, big]),
]
ways = lambda f, *a: f(*a), lambda f, *a: tf.function(f)(*a)
y, w = tf.constant([5.0, 6.0]), tf.constant([third, 7.0], tf.float64)
def changed(y, w, method):
    values = []
    for variable, value, _ in cases:
        before = tf.identity(variable)
        getattr(variable, method)(value(y, w))
        values.append(tf.identity(variable))
        variable.assign(before)
    return values
for way in ways:
    for i, (assigned, added) in enumerate(zip(way(changed, y, w, "assign"), way(changed, y, w, "assign_add"))):
        variable, _, expected = cases[i]
        assert assigned.numpy().tolist() == expected, (i, assigned)
        assert added.numpy().tolist() == (variable.numpy() + np.asarray(expected, variable.dtype)).tolist(), (i, added)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    mirrored = tf.Variable([1.0, 2.0], dtype=tf.float64)
for way in ways:
    way(lambda: strategy.run(lambda w: mirrored.assign([w[0], 0.1]), (w,)))
    assert mirrored.numpy().tolist() == [third, 0.1]
    way(lambda: mirrored.assign([0.2, third]))
    assert mirrored.numpy().tolist() == [0.2, third]

for dtype, value in ((tf.float64, third), (tf.int64, big), (tf.uint64, 2**64 - 1), (tf.complex128, third + 1j)):
    assert tf.Variable(value, dtype=dtype).numpy() == value == tf.Variable([value], dtype=dtype).numpy()[0]
d, i = tf.constant(3.0, tf.float64), tf.constant(3, tf.int64)
assert [t.numpy() for t in (d * 0.1, 0.1 * d, d + 0.1, 0.1 - d, d / 0.1, d**0.1, -d % 0.1)] == [
    3 * 0.1, 0.1 * 3, 3 + 0.1, 0.1 - 3, 3 / 0.1, 3**0.1, np.mod(-3, 0.1)]
assert [t.numpy() for t in (i + big, big - i, i * big, big // i, i | big)] == [
    3 + big, big - 3, 3 * big, big // 3, 3 | big]
assert tf.pad([i], [[0, 1]], constant_values=big).numpy().tolist() == [3, big]
assert tf.saturate_cast(tf.constant(2**62, tf.int64), tf.int64).numpy() == 2**62

# What would lose a part is refused, and nothing changes.
raises(TypeError, lambda: tf.Variable(0.5, dtype=tf.int32), "0.5", "int32")
raises(TypeError, lambda: tf.Variable([0.5], dtype=tf.int64), "[0.5]", "int64")
raises(TypeError, lambda: tf.constant(1j, tf.float32), "1j", "float32")
raises(TypeError, lambda: tf.Variable(big, dtype=tf.int32), str(big), "int32")
for way in ways[:2]:
    for value in ([y[0], y[1]], [1.5, 2], ["a", "b"], [None, 1], {"a": 1}):
        raises(TypeError, lambda: way(lambda: integers.assign(value)), "Cannot convert", "int32")
    raises(ValueError, lambda: way(lambda: floats.assign([[y[0], y[1]]])), "(2,)", "(1, 2)")
assert integers.numpy().tolist() == [1, 2] and floats.numpy().tolist() == [1.0, 2.0]
""")


def test_messages_about_wrong_dtypes_name_the_operation(run_python):
    done = run_python("""
import replicax.tf as tf

def message(call):
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)

assert message(lambda: tf.reduce_sum(tf.constant(True))).startswith("reduce_sum takes numbers, got dtype bool")
assert message(lambda: tf.math.reduce_all(tf.constant(1.0))).startswith("reduce_all takes bools, got dtype float32")
assert message(lambda: tf.add(tf.constant("a"), tf.constant("b"))).startswith("`add` takes no strings")
""")
    assert done.returncode == 0, done.stderr
