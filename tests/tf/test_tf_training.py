"""What training programs of `replicax.tf` rely on: layers built in functions, recomputed gradients, methods."""

from __future__ import annotations

import textwrap

import pytest

START = """
import warnings; warnings.simplefilter("error", UserWarning)
import contextlib
mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
strategies = {"none": None, "mirrored": mirrored, "one": tf.distribute.OneDeviceStrategy("CPU:0"),
              "central": tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])}
def scope(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()
def run(strategy, f, *args):
    return f(*args) if strategy is None else strategy.run(f, args=args)
def last(value):
    return np.asarray(value.values[-1] if hasattr(value, "values") else value).tolist()
"""


@pytest.fixture
def run(run_tf):
    return lambda program: run_tf(START + textwrap.dedent(program), timeout=240)


@pytest.mark.numbers
def test_layers_and_modules_draw_their_first_values_in_functions_and_the_stream_goes_on_after_them(run):
    """Eagerly the initial value is the first draw after the seed, the next one the second; no number comes twice."""
    run("""
    class Layer(tf.keras.layers.Layer):
        def __init__(self, make):
            super().__init__()
            self.make = make
        def build(self, shape):
            self.w = self.make(self)
        def call(self, x):
            return x * self.w
    class Module(tf.Module):
        def __init__(self, make):
            super().__init__()
            self.make, self.w = make, None
        def __call__(self, x):
            if self.w is None:
                self.w = self.make(self)
            return x * self.w
    normal, uniform = lambda: tf.random.normal([3]), lambda: tf.random.uniform([3])
    initial = lambda: 20.0 * tf.random_normal_initializer()([3])  # its standard deviation is 0.05
    makers = {
        "value": (normal, lambda layer: tf.Variable(tf.random.normal([3]))),
        "function": (normal, lambda layer: tf.Variable(lambda: tf.random.normal([3]))),
        "initializer": (initial, lambda layer: tf.Variable(20.0 * tf.random_normal_initializer()(shape=(3,)))),
        "add_weight": (uniform, lambda layer: layer.add_weight(
            shape=(3,), initializer=lambda shape, dtype=None: tf.random.uniform(shape))),
    }
    for name, (draw, make) in makers.items():
        tf.random.set_seed(1)
        expected = [draw().numpy(), tf.random.normal([2]).numpy()]
        for kind in (Layer, Module)[:1 if name == "add_weight" else 2]:
            for key, strategy in strategies.items():
                for way in (tf.function, lambda f: f):
                    tf.random.set_seed(1)
                    with scope(strategy):
                        layer = kind(make)
                    y = way(lambda x: run(strategy, layer, x))(tf.ones([2, 3]))
                    case = name, kind.__name__, key, way is tf.function
                    np.testing.assert_allclose(last(y), [layer.w.numpy()] * 2, rtol=1e-6, err_msg=str(case))
                    if way is tf.function:  # which has a stream of its own
                        continue
                    np.testing.assert_allclose(layer.w.numpy(), expected[0], rtol=1e-6, err_msg=str(case))
                    if kind is Layer or strategy is None:  # a module's replicas each draw a value, the first's counts
                        np.testing.assert_allclose(tf.random.normal([2]).numpy(), expected[1], err_msg=str(case))
    # In the function that builds a layer, other draws are others, and no number comes twice.
    for strategy in (None, mirrored):
        tf.random.set_seed(2)
        with scope(strategy):
            layer = Layer(makers["value"][1])
        @tf.function
        def f():
            def replica():
                before = tf.random.normal([3])
                return before, layer(tf.ones([3])), tf.random.normal([3])
            return run(strategy, replica)
        numbers = [np.asarray(getattr(x, "values", [x])[0]).tolist() for x in [*f(), tf.random.normal([3])]]
        assert len({tuple(x) for x in numbers}) == 4, numbers
    """)


def test_a_recomputed_function_reads_and_assigns_variables_as_they_are_at_each_call(run):
    """Y = 2 sin(x v) and dy/dv = 2 x cos(x v), with v = [1, 2] and then [5, 6]."""
    run("""
    def program(strategy, way):
        with scope(strategy):
            v = tf.Variable([1.0, 2.0])
            calls = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        def body(x, scale, doubled=False):
            calls.assign_add(1.0)
            return {"y": tf.sin(x * v) * (scale if doubled else 1.0) + 0.0 * tf.random.normal([2]), "none": None}
        f = tf.recompute_grad(body)
        def replica(x):
            with tf.GradientTape() as tape:
                y = f(x, 2.0, doubled=True)["y"]
            return y, tape.gradient(y, v)
        step, found = way(lambda x: run(strategy, replica, x)), []
        for value in ([1.0, 2.0], [5.0, 6.0]):
            v.assign(value)
            found.append([last(part) for part in step(tf.ones([2]))])
        assert calls.numpy() == 2.0, calls
        return found
    expected = [[2 * np.sin(v), 2 * np.cos(v)] for v in (np.array([1.0, 2.0]), np.array([5.0, 6.0]))]
    for key in ("none", "mirrored"):
        for way in (tf.function, lambda f: f):
            np.testing.assert_allclose(program(strategies[key], way), expected, rtol=1e-5, err_msg=key)
    # Twice in one function, with an assignment between.
    v = tf.Variable([1.0, 2.0])
    f = tf.recompute_grad(lambda x: x * v)
    @tf.function
    def twice(x):
        found = []
        for value in ([1.0, 2.0], [5.0, 6.0]):
            v.assign(value)
            with tf.GradientTape() as tape:
                y = f(x)
            found.append([y, tape.gradient(y, v)])
        return found
    assert [[x.numpy().tolist() for x in pair] for pair in twice(tf.ones([2]))] == [
        [[1.0, 2.0], [1.0, 1.0]], [[5.0, 6.0], [1.0, 1.0]]]
    """)


def test_a_layer_of_keras_that_needs_a_value_is_driven_from_the_host_and_says_so_where_there_is_none(run_tf):
    run_tf(
        """
        import warnings
        keras = tf.keras
        class Layer(keras.layers.Layer):
            def call(self, x):
                return x * 2 if float(tf.reduce_sum(x)) > 0 else x - 1
        layer = Layer()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function = tf.function(lambda x: layer(x))
            assert function(tf.constant([1.0, 2.0])).numpy().tolist() == [2, 4]
            assert function(tf.constant([-1.0])).numpy().tolist() == [-2]
            hashed = tf.function(keras.layers.Hashing(7))
            assert hashed(tf.constant([1, 2])).numpy().tolist() == keras.layers.Hashing(7)(np.array([1, 2])).tolist()
        raises(TypeError, lambda: Layer()(keras.Input([2])), "Could not automatically infer", "Layer.call()")
        class Wrong(keras.layers.Layer):
            def call(self, x, factor=3):
                raise ValueError("of mine")
        raises(ValueError, lambda: Wrong()(tf.ones([2])), "of mine", "factor=3")

        filled = tf.constant("a", shape=[2, 2])
        assert filled.dtype == tf.string and filled.numpy().tolist() == [[b"a"] * 2] * 2
        assert tf.constant(["a", "b"], shape=[2, 1]).numpy().tolist() == [[b"a"], [b"b"]]
        """
    )


def test_a_replica_without_rows_flattens_its_part_of_the_last_batch(run):
    """Of 3 rows in batches of 2, the second replica gets none of the last: 630 is the sum of 0 to 35."""
    run("""
    x = np.arange(36, dtype=np.float32).reshape(3, 2, 2, 3)
    for key in ("mirrored", "central"):
        strategy = strategies[key]
        with strategy.scope():
            w = tf.Variable(tf.ones([12, 1]))
        def replica(rows):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.matmul(tf.reshape(rows, (tf.shape(rows)[0], -1)), w))
            gradient = tape.gradient(loss, w)
            return loss, tf.distribute.get_replica_context().all_reduce("SUM", gradient)
        def step(rows):
            loss, gradient = strategy.run(replica, args=(rows,))
            return strategy.reduce("SUM", loss, axis=None), strategy.experimental_local_results(gradient)[0]
        for way in (tf.function(step), step):
            batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(x).batch(2))
            losses, gradients = zip(*map(way, batches))
            assert float(sum(losses)) == 630.0, (key, losses)
            np.testing.assert_array_equal(sum(gradients)[:, 0], x.reshape(3, 12).sum(0))
    """)


def test_sizes_that_operations_compute_are_known_in_replicas_and_under_a_tape(run):
    """Half as many rows again as x has, ceil(1.5 * 3) = 5: the gradient of v, which multiplies them, is 5."""
    run("""
    factor = tf.constant(3.0) / 2.0
    def replica(strategy, v, x):
        with tf.GradientTape() as tape:
            rows = tf.cast(tf.math.ceil(tf.cast(tf.shape(x)[0], tf.float32) * factor * tf.constant(1.0)), tf.int32)
            y = tf.reduce_sum(tf.ones([rows]) * v)
        return tape.gradient(y, v)
    def constants(x):
        with tf.GradientTape() as tape:
            c = tf.constant(3.0)
            tape.watch(c)
            y = c * c
            z = tf.reduce_sum(tf.ones([tf.cast(y, tf.int32)])) * y
        return tape.gradient(z, c)
    for key, strategy in strategies.items():
        with scope(strategy):
            v = tf.Variable(2.0)
        for way in (tf.function, lambda f: f):
            assert last(way(lambda x: run(strategy, lambda x: replica(strategy, v, x), x))(tf.ones([3]))) == 5.0
            assert last(way(lambda x: run(strategy, constants, x))(tf.ones([3]))) == 54.0  # 9 * 2 * 3
    """)


def test_an_error_for_an_unknown_size_names_the_operation_that_depends_on_values(run):
    run("""
    v = tf.Variable(2)
    def of_values(x):
        size = tf.cast(tf.reduce_sum(x), tf.int32)
        return tf.zeros([size * 2])
    def of_a_variable(x):
        return tf.zeros([v + 1])
    def of_an_argument(x):
        return tf.zeros([x])
    def of_replicas(x):
        return tf.zeros([tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(2))])
    warnings.simplefilter("ignore")  # that the function is driven from the host, but for its replicas
    for f, x, words in [
        (of_values, [1.0, 2.0], "the result of `reduce_sum` at"),
        (of_a_variable, 1, "the result of `add` at"),
        (of_an_argument, 1, "an argument of the function, or the value of a variable"),
        (of_replicas, 1, "the result of `replicax_all_reduce` at"),
    ]:
        step = tf.function(lambda x: mirrored.run(f, args=(x,)))
        raises(TypeError, lambda: step(tf.constant(x)), "An element of the shape determines", words)
    """)


def test_moving_averages_of_variables_are_tensorflows(run):
    """Numbers that TensorFlow 2.21 gives. In a function an average begins with the value before the function."""
    run("""
    ON_READ, A = tf.VariableSynchronization.ON_READ, tf.VariableAggregation
    def averages(strategy, way, in_replicas):
        with scope(strategy):
            v = tf.Variable([1.0, 2.0], name="v", aggregation=A.MEAN)
            h = tf.Variable(4.0, dtype=tf.float64, aggregation=A.MEAN)
            n = tf.Variable(0, dtype=tf.int64, trainable=False, aggregation=A.ONLY_FIRST_REPLICA)
            m = tf.Variable(1.0, synchronization=ON_READ, aggregation=A.MEAN, trainable=False)
        ema = tf.train.ExponentialMovingAverage(0.9, num_updates=n)
        plain = tf.train.ExponentialMovingAverage(tf.constant(0.25), name="plain")
        def body():
            v.assign_add([1.0, 2.0])
            h.assign_add(1.0)
            n.assign_add(1)
            if in_replicas:
                m.assign_add(tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32) + 1.0)
                plain.apply([m])
            ema.apply([v, h])
        def across():
            with scope(strategy):
                body()
        step, found = way((lambda: strategy.run(body) and None) if in_replicas else across), []
        for _ in range(3):
            step()
            found.append([*ema.average(v).numpy(), ema.average(h).numpy()])
        average = ema.average(v)
        assert not average.trainable and average.name == "v/ExponentialMovingAverage:0" and ema.average(n) is None
        assert ema.average(h).dtype == tf.float64 and ema.average_name(v) == "v/ExponentialMovingAverage"
        return found, [float(plain.average(m).numpy())] if in_replicas else []
    eager = [[2.0, 4.0, 5.0], [2.75, 5.5, 5.75], [3.6153846, 7.2307692, 6.6153846]]
    function = [[1.8181818, 3.6363635, 4.8181818], [2.7045455, 5.4090910, 5.7045454], [3.6013987, 7.2027974, 6.6013986]]
    of_m = {("one", "eager"): 3.6875, ("one", "function"): 3.671875, ("mirrored", "eager"): 5.0234375,
            ("mirrored", "function"): 5.0078125, ("central", "eager"): 5.03125, ("central", "function"): 5.0078125}
    for key, strategy in strategies.items():
        for name, way, expected in (("eager", lambda f: f, eager), ("function", tf.function, function)):
            for in_replicas in ([False] if strategy is None else [False, True]):
                found, last_of_m = averages(strategy, way, in_replicas)
                np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=f"{key} {name} {in_replicas}")
                np.testing.assert_allclose(last_of_m, [of_m[key, name]] if in_replicas else [], err_msg=f"{key} {name}")
    ema = tf.train.ExponentialMovingAverage(0.9)
    raises(TypeError, lambda: ema.apply([tf.constant(1.0)]), "does not support non-Variable tensors")
    raises(TypeError, lambda: ema.apply([tf.Variable(1)]), "The variables must be half, float, or double: Variable:0")
    """)


def test_distributed_values_are_printed_and_evaluated_by_their_components(run):
    """The lines and values are TensorFlow's; in a function TensorFlow prints symbolic tensors."""
    run(r"""
    import io, tempfile
    import jax
    def printed(*inputs):
        stream = io.StringIO()
        tf.print(*inputs, output_stream=stream)
        return stream.getvalue()
    value = mirrored.run(lambda: tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32))
    lines = ["PerReplica:{", "  0: <tf.Tensor: shape=(), dtype=float32, numpy=0.0>,"]
    text = "\n".join([*lines, "  1: <tf.Tensor: shape=(), dtype=float32, numpy=1.0>", "}"])
    assert printed(value) == text + "\n" and printed("x", (value,)) == f"x ({text},)\n", printed(value)
    stream = io.StringIO()
    tf.function(lambda: tf.print(mirrored.run(lambda: tf.ones([])), output_stream=stream))()
    jax.effects_barrier()
    assert stream.getvalue().count("numpy=1.0") == 2, stream.getvalue()
    with mirrored.scope():
        v = tf.Variable([1.0, 2.0])
    assert printed(v) == "[1 2]\n" and printed(v.assign([3.0, 4.0])).startswith("Mirrored:{")
    assert printed(tf.constant("plain")) == "plain\n" and printed([tf.constant("x")]) == '["x"]\n'
    assert printed("plain", tf.constant("x")) == 'plain "x"\n' and printed(tf.constant(["a"])) == '["a"]\n'

    case = tf.test.TestCase()
    assert case.evaluate(v.assign([5.0, 6.0])).tolist() == [5.0, 6.0]
    number, parts = case.evaluate([tf.Variable(1.0), value])
    assert number == 1.0 and isinstance(parts, tf.distribute.DistributedValues) and parts.values == (0.0, 1.0)
    assert all(type(part) is np.float32 for part in parts.values)

    checkpoint = tf.train.Checkpoint(v=v)
    path = checkpoint.write(tempfile.mkdtemp() + "/checkpoint")
    assert checkpoint.read(path).run_restore_ops() is None
    assert checkpoint.read(path).assert_consumed().initialize_or_restore() is None
    assert checkpoint.restore(None).initialize_or_restore() is None
    raises(AssertionError, lambda: checkpoint.restore(None).run_restore_ops(), "no restore ops are available")
    """)
