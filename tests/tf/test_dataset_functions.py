"""Functions of `tf.data` that are traced and compiled, beside the same ones that run in Python for each element."""

from __future__ import annotations

START = """
import itertools, threading
from replicax.data import Dataset as Plain
D = tf.data.Dataset
R, S = D.range, D.from_tensor_slices
images = np.random.default_rng(0).integers(0, 255, (70, 6, 6, 3)).astype(np.uint8)

def listed(dataset):
    return [tf.nest.map_structure(lambda x: np.asarray(x).tolist(), e) for e in dataset.as_numpy_iterator()]

def in_python(function):
    "The same function, which cannot be compiled."
    def called(*args):
        tf.nest.flatten(args)[0].numpy()
        return function(*args)
    return called

def augmented(image):
    image = tf.cast(image, tf.float32) / 255.0
    top, left = tf.unstack(tf.random.uniform([2], 0, 3, tf.int32))
    image = tf.roll(tf.pad(image, [[1, 1], [1, 1], [0, 0]]), [1, 1], [0, 1])
    if tf.random.uniform([]) < 0.5:
        image = tf.reverse(image, [1])
    return image * tf.cast(top + 1, tf.float32) + tf.cast(left, tf.float32)
"""


def test_one_trace_and_the_elements_of_python(run_tf):
    """A function is traced once for a spec; blocks, batches and threads change neither results nor their order."""
    run_tf(
        START
        + """
traces = []
def function(x):
    traces.append(type(x))
    return {"a": x * 2, "b": (tf.cast(x, tf.float32) + 0.5, [x, x + 1])}
dataset = R(1000).map(function)
assert listed(dataset) == [{"a": 2 * i, "b": (i + 0.5, [i, i + 1])} for i in range(1000)]
assert len(traces) == 1, traces
assert listed(dataset) == listed(dataset.prefetch(3)) and len(traces) == 1
calls = []
expected = listed(R(300).map(in_python(lambda x: calls.append(1) or x * x)))
assert expected == [i * i for i in range(300)] and len(calls) == 300
for threads in (None, 1, 3, tf.data.AUTOTUNE):
    mapped = R(300).map(lambda x: x * x, num_parallel_calls=threads)
    assert listed(mapped) == expected
    for size in (1, 7, 64, 128, 300, 999):
        batches = listed(mapped.batch(size))
        assert list(itertools.chain(*batches)) == expected and {len(b) for b in batches[:-1]} <= {size}
        assert len(listed(mapped.batch(size, drop_remainder=True))) == 300 // size
    assert listed(mapped.shuffle(20, seed=1).take(4)) == listed(R(300).shuffle(20, seed=1).take(4).map(lambda x: x * x))
    assert listed(mapped.skip(290)) == expected[290:] and listed(mapped.filter(lambda x: x > 88_000)) == expected[297:]
batches = S(np.arange(10.0)).batch(4).map(lambda x: (x + 1, tf.reduce_sum(x)))
assert batches.element_spec == (tf.TensorSpec([None], tf.float64), tf.TensorSpec([], tf.float64))
assert listed(batches) == [([1, 2, 3, 4], 6), ([5, 6, 7, 8], 22), ([9, 10], 17)]
assert R(3).map(lambda x: tf.zeros([2, 3], tf.bfloat16)).element_spec == tf.TensorSpec([2, 3], tf.bfloat16)
"""
    )


def test_random_numbers_follow_from_the_element(run_tf):
    """They are the same compiled and in Python, in any block and thread; each pass of `repeat` has its own."""
    run_tf(
        START
        + """
def numbers(dataset):
    return np.concatenate([b.numpy().reshape(-1) for b in dataset])
tf.random.set_seed(3)
compiled, python = S(images).map(augmented), S(images).map(in_python(augmented))
first = numbers(compiled.batch(70))
np.testing.assert_allclose(first, numbers(python.batch(70)), rtol=1e-6)
for size, threads in ((1, None), (16, 2), (33, 3)):
    again = S(images).map(augmented, num_parallel_calls=threads).batch(size)
    assert np.array_equal(first, numbers(again)), (size, threads)
assert np.array_equal(first, numbers(compiled.batch(70)))  # a new iterator begins anew, as in TensorFlow
twice = numbers(compiled.repeat(2).batch(70))
assert np.array_equal(twice[:first.size], first) and not np.array_equal(twice[first.size:], first)
# Each element has its own numbers, and they are spread evenly.
drawn = np.array(listed(R(4000).map(lambda _: tf.random.uniform([]))))
assert len(set(drawn)) > 3990 and abs(drawn.mean() - 0.5) < 0.03
assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.06
def in_loop(_):
    return tf.map_fn(lambda x: x + tf.random.uniform([]), tf.zeros([4]))
assert all(len(set(row)) == 4 for row in listed(R(3).map(in_loop)))
# A seed of the call's own; without any seed each iterator draws other numbers.
own = lambda: listed(R(5).map(lambda _: tf.random.uniform([], seed=7)))
assert own() == own() == listed(R(5).map(in_python(lambda _: tf.random.uniform([], seed=7))))
tf.random.set_seed(None)
assert own() == own()
free = R(5).map(lambda _: tf.random.uniform([]))
assert listed(free) != listed(free)
two = R(5).map(lambda x: (x, tf.random.uniform([]))).map(lambda x, y: (y, tf.random.uniform([])))
assert all(one != other for one, other in listed(two))
"""
    )


def test_a_restored_iterator_draws_the_same_numbers(run_tf):
    """To the last bit, at each place, also in the buffer of a shuffle and in a further pass."""
    run_tf(
        START
        + """
def positions(dataset, places):
    whole = [e.numpy() for e in dataset]
    for place in places:
        iterator = iter(dataset)
        before = [next(iterator).numpy() for _ in range(place)]
        state = iterator.save_state()
        expected = [e.numpy() for e in iterator]
        again = iter(dataset)
        again.restore_state(state)
        found = [e.numpy() for e in again]
        assert len(found) == len(expected) == len(whole) - place
        assert all(np.array_equal(a, b) for a, b in zip(found, expected)), place
for function in (augmented, in_python(augmented)):
    for threads in (None, 2):
        mapped = S(images[:40]).map(function, num_parallel_calls=threads)
        positions(mapped, (1, 25))
        positions(mapped.shuffle(8).batch(6), (1, 4))
        positions(mapped.repeat(2).batch(8).prefetch(2), (3, 7))
"""
    )


def test_what_is_not_compiled_runs_in_python(run_tf):
    """Strings, shapes that depend on data, variables, Python functions and other libraries' functions."""
    run_tf(
        START
        + """
scale = tf.Variable(2)
scaled = R(3).map(lambda x: tf.cast(x, tf.int32) * scale)
assert listed(scaled) == [0, 2, 4]
scale.assign(5)
assert listed(scaled) == [0, 5, 10]
assert listed(S(["a b", "c"]).map(lambda s: tf.size(tf.strings.split(s)))) == [2, 1]
assert listed(R(4).map(lambda x: tf.range(x))) == [[], [0], [0, 1], [0, 1, 2]]
assert listed(R(3).map(lambda x: tf.numpy_function(lambda y: y + 1, [x], tf.int64))) == [1, 2, 3]
assert listed(R(3).map(lambda x: tf.py_function(lambda y: y.numpy() + 1, [x], tf.int64))) == [1, 2, 3]
assert listed(R(3).map(lambda x: np.flip(np.arange(3)) + x)) == [[2, 1, 0], [3, 2, 1], [4, 3, 2]]
assert [listed(e) for e in R(2).map(lambda x: D.range(x + 1))] == [[0], [0, 1]]
assert listed(R(3).map(tf.function(lambda x: x + 1))) == [1, 2, 3]
many = D.from_generator(lambda: (np.ones([n]) for n in range(9)), output_signature=tf.TensorSpec([None], tf.float64))
assert listed(many.map(lambda x: tf.reduce_sum(x))) == [float(n) for n in range(9)]
kinds = []
R(1).map(in_python(lambda x: kinds.append((x, x + 1, tf.cast(x, tf.float32) / 3)) or x)).get_single_element()
tensors = kinds[-1]
assert all(isinstance(x, tf.Tensor) and tf.is_tensor(x) for x in tensors)
assert [x.dtype for x in tensors] == [tf.int64, tf.int64, tf.float32] and tensors[0].shape.as_list() == []
assert tensors[2].numpy() == 0 and isinstance(tensors[2].numpy(), np.float32) and tensors[1] == 1
raises(TypeError, lambda: tensors[0].__setitem__((), 1), "item assignment")
source = np.arange(3)
def changing(x):
    x.numpy()
    x += 1
    return x
assert listed(S(source).map(changing)) == [1, 2, 3] and source.tolist() == [0, 1, 2]
"""
    )


def test_errors_come_in_their_places(run_tf):
    """An exception in place of an element does not end the iterator, nor take others with it."""
    run_tf(
        START
        + """
def broken():
    yield from range(3)
    raise ValueError("torn")
def found(dataset):
    iterator, out = iter(dataset), []
    while len(out) < 20:
        try:
            out.append(int(next(iterator)))
        except StopIteration:
            return out
        except Exception as error:
            out.append(type(error).__name__)
checked = lambda x: tf.debugging.assert_less(x, tf.constant(2, tf.int64)) or x
for threads in (None, 2):
    torn = D.from_generator(broken, output_signature=tf.TensorSpec([], tf.int64))
    assert found(torn.map(lambda x: x + 1, num_parallel_calls=threads)) == [1, 2, 3, "ValueError"]
    assert found(R(4).map(checked, num_parallel_calls=threads)) == [0, 1, *["InvalidArgumentError"] * 2]
    some = R(5).map(checked).ignore_errors()
    assert found(some.map(lambda x: x * 10, num_parallel_calls=threads)) == [0, 10]
raises(ZeroDivisionError, lambda: listed(R(3).map(lambda x: 1 // 0)), "division")
raises(tf.errors.InvalidArgumentError, lambda: listed(R(3).map(lambda x: tf.ones([2]) + tf.ones([3]))), "shapes")
"""
    )


def test_a_generator_is_asked_for_no_more_than_its_turn(run_tf):
    """Without `num_parallel_calls` a source may wait for what the program does with the elements before."""
    run_tf(
        START
        + """
given = []
def slowly():
    for number in range(50):
        given.append(number)
        yield number
source = D.from_generator(slowly, output_signature=tf.TensorSpec([], tf.int64))
iterator = iter(source.map(lambda x: x + 1))
assert [int(next(iterator)) for _ in range(3)] == [1, 2, 3] and given == [0, 1, 2]
given.clear()
iterator = iter(source.map(lambda x: x + 1, num_parallel_calls=2))
assert int(next(iterator)) == 1 and len(given) > 3
"""
    )


def test_replicax_data_calls_functions_in_python(run_tf):
    """`rx.data` is for programs of JAX, whose functions are Python: only `tf.data` traces."""
    run_tf(
        START
        + """
calls = []
assert listed(Plain.range(5).map(lambda x: calls.append(1) or x * 2)) == [0, 2, 4, 6, 8] and len(calls) == 5
assert isinstance(R(3).batch(2), D) and isinstance(R(3), Plain) and not isinstance(Plain.range(3).batch(2), D)
assert isinstance(tf.data.TextLineDataset([]).map(lambda x: x), D) and isinstance(R(4).window(2).take(1), D)
"""
    )


def test_specs_of_images_and_bytes_that_were_not_read_yet(run_tf):
    """Shapes are those that TensorFlow infers, and no file is read for them."""
    run_tf(
        """
        records = {key: tf.io.FixedLenFeature([], tf.string) for key in ("image", "raw")}
        parsed = lambda x: tf.io.parse_single_example(x, records)
        lookup = tf.keras.layers.StringLookup(vocabulary=["a"], num_oov_indices=0)  # which refuses other strings
        cases = [
            (lambda x: tf.io.decode_jpeg(x, channels=3), [None, None, 3], "uint8"),
            (lambda x: lookup(parsed(x)["raw"]), [], "int64"),
            (lambda x: tf.io.decode_png(x, channels=1, dtype=tf.uint16), [None, None, 1], "uint16"),
            (lambda x: tf.io.decode_png(x), [None, None, None], "uint8"),
            (lambda x: tf.io.decode_image(x, 3), None, "uint8"),
            (lambda x: tf.io.decode_image(x, 3, tf.float32, expand_animations=False), [None, None, 3], "float32"),
            (lambda x: tf.io.decode_gif(x), [None, None, None, 3], "uint8"),
            (lambda x: tf.image.decode_and_crop_jpeg(x, [0, 0, 4, 5], channels=3), [4, 5, 3], "uint8"),
            (lambda x: tf.io.extract_jpeg_shape(x), [3], "int32"),
            (lambda x: tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(x), 3), [8, 9]), [8, 9, 3], "float32"),
            (lambda x: tf.image.random_crop(tf.io.decode_jpeg(x, 3), [224, 224, 3]), [224, 224, 3], "uint8"),
            (lambda x: tf.io.decode_jpeg(parsed(x)["image"], 3), [None, None, 3], "uint8"),
            (lambda x: tf.io.decode_raw(parsed(x)["raw"], tf.float32), [None], "float32"),
            (lambda x: tf.io.parse_tensor(x, tf.float32), None, "float32"),
        ]
        for function, shape, dtype in cases:
            spec = tf.data.Dataset.from_tensor_slices(["there is no such file"] * 2).map(function).element_spec
            assert spec.shape == tf.TensorShape(shape) and spec.dtype == dtype, (spec, shape)
        """
    )
