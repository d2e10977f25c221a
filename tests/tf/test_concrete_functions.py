"""Concrete functions whose specs have dimensions of None, and tensors of such shapes while they are traced."""


def test_a_concrete_function_is_traced_once_for_all_sizes(run_tf):
    run_tf(
        """
seen = []
weight = tf.Variable(tf.ones([3, 2]))

@tf.function
def f(x, y):
    static = x.shape.as_list()
    seen.append((x.shape, static, x.shape.rank, x.shape == [None, 3], x.shape.is_fully_defined(), y.get_shape()))
    rows = tf.shape(x)[0] if static[0] is None else static[0]
    mean = tf.reduce_sum(x) / tf.cast(rows, tf.float32)
    return {"product": x @ weight, "mean": mean, "zeros": tf.zeros([rows, 5]), "sum": x + y, "size": tf.shape(x)}

spec = tf.TensorSpec([None, 3])
concrete = f.get_concrete_function(spec, spec)
known = tf.TensorShape([None, 3])
assert seen[-1] == (known, [None, 3], 2, True, False, known), seen
assert str(seen[-1][0]) == "(None, 3)" and repr(seen[-1][0]) == "TensorShape([None, 3])"
shapes = {name: shape.as_list() for name, shape in concrete.output_shapes.items()}
assert shapes == {"product": [None, 2], "mean": [], "zeros": [None, 5], "sum": [None, 3], "size": [2]}, shapes
assert concrete.variables == (weight,) and [spec.shape.rank for spec in concrete.inputs] == [2, 2, 2]
result = concrete(tf.ones([4, 3]), tf.ones([4, 3]))
assert result["mean"].numpy() == 3 and result["size"].numpy().tolist() == [4, 3] and result["zeros"].shape == (4, 5)

# A function that needs a size as a number is traced with one.
sizes = []
as_number = tf.function(lambda x: (sizes.append(int(x.shape[0])), x[: int(x.shape[0]) // 2])[1])
assert as_number.get_concrete_function(tf.TensorSpec([None])).output_shapes.as_list() == [None]
assert sizes[0] == 8

# Errors of the function come when it is asked for.
wrong = tf.function(lambda x: x @ weight)
raises(tf.errors.InvalidArgumentError, lambda: wrong.get_concrete_function(tf.TensorSpec([None, 4])))
"""
    )


def test_shapes_that_are_not_known_are_shapes_of_other_tensors(run_tf):
    run_tf(
        """
spec = lambda *shape, dtype=tf.float32: tf.TensorSpec(shape, dtype)

def shape_of(function, *specs):
    found = tf.function(function).get_concrete_function(*specs)
    assert found.not_general is None, found.not_general
    return tf.nest.map_structure(lambda shape: shape.as_list(), found.output_shapes)

def heads(x):
    return tf.transpose(tf.reshape(x, (tf.shape(x)[0], -1, 2, 2)), [0, 2, 1, 3])

def rows_of(x):
    total = tf.constant(0.0)
    for i in tf.range(tf.shape(x)[0]):
        total += x[i, 0]
    return total

x, images = spec(None, 3), spec(None, 8, 8, 3)
assert shape_of(heads, spec(None, None, 4)) == [None, 2, None, 2]
assert shape_of(rows_of, x) == []
assert shape_of(lambda x: tf.fill([tf.shape(x)[0], tf.size(x)], 1.0), x) == [None, None]
assert shape_of(lambda x: tf.range(tf.shape(x)[0]), x) == [None]
assert shape_of(lambda x: tf.reshape(x, tf.concat([tf.shape(x)[:1], [1, 3]], 0)), x) == [None, 1, 3]
assert shape_of(lambda x: tf.broadcast_to(tf.zeros([3]), tf.shape(x)), x) == [None, 3]
assert shape_of(lambda x: tf.tile(tf.zeros([1, 3]), tf.stack([tf.shape(x)[0], 2])), x) == [None, 6]
assert shape_of(lambda x: tf.eye(tf.shape(x)[0]), x) == [None, None]
assert shape_of(lambda x: x + tf.random.normal(tf.shape(x)), x) == [None, 3]
assert shape_of(lambda x: tf.nn.conv2d(x, tf.ones([3, 3, 3, 4]), 2, "SAME"), images) == [None, 4, 4, 4]
assert shape_of(lambda x: tf.linalg.band_part(tf.ones((tf.shape(x)[1],) * 2), -1, 0), spec(None, None)) == [None, None]
assert shape_of(lambda x, y: x * tf.one_hot(y, 3), x, spec(None, dtype=tf.int32)) == [None, 3]
assert shape_of(lambda x: x[1:, :-1], x) == [None, 2]
assert shape_of(lambda x: (tf.shape(x), x.shape[0]), x) == ([2], [])
"""
    )


def test_arguments_of_an_input_signature_may_be_given_by_name(run_tf):
    run_tf(
        """
@tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([], tf.int32)])
def f(x, n, scale=2.0):
    return x * tf.cast(n, tf.float32) * scale

assert f([1.0, 2.0], n=3).numpy().tolist() == f(n=3, x=[1.0, 2.0]).numpy().tolist() == [6.0, 12.0]
raises(TypeError, lambda: f([1.0]), "Binding inputs to tf.function failed", "missing a required argument: 'n'")
raises(TypeError, lambda: f([1.0], m=3), "Binding inputs", "'m'")
"""
    )
