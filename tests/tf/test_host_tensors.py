"""Tensors on the host, in functions of datasets that run in Python: their memory, their numbers and their files."""

from __future__ import annotations


def test_images_keep_their_pixels_while_others_are_made(run_tf):
    """Crops are views, flips and resized images have memory of a pool, and threads have memory of their own."""
    run_tf(
        """
shapes = [(9 + i % 5, 12 - i % 4, 3) for i in range(60)]

def image(i):
    return np.random.default_rng(i).integers(0, 256, shapes[i]).astype(np.uint8)

def changed(number):
    i = int(number)
    resized = tf.image.resize(tf.constant(image(i)), [20, 24])
    cut = tf.image.random_crop(resized, [16, 16, 3], seed=1)
    flipped, padded = tf.image.flip_left_right(cut), tf.image.resize_with_crop_or_pad(cut, 18, 15)
    before = [x.numpy() for x in (resized, cut, flipped, padded)]
    for x in (resized, cut, flipped, padded):
        x.numpy()[:] = 0  # a copy
    others = [tf.image.resize(tf.constant(image(i) // 2), [n, n]) for n in (20, 24)]
    tf.image.flip_left_right(others[0]), tf.image.per_image_standardization(cut)
    for x, y in zip((resized, cut, flipped, padded), before):
        np.testing.assert_array_equal(x.numpy(), y)
    np.testing.assert_array_equal(before[2], before[1][:, ::-1])
    np.testing.assert_array_equal(before[3], np.pad(before[1][:, :15], [(1, 1), (0, 0), (0, 0)]))
    return resized, cut, flipped, padded

def listed(threads):
    numbers = tf.data.Dataset.range(60)
    return list(numbers.map(changed, num_parallel_calls=threads).as_numpy_iterator())

alone = listed(None)
for i, (resized, cut, *_) in enumerate(alone):
    np.testing.assert_allclose(resized, tf.image.resize(image(i), [20, 24]).numpy(), atol=1e-3)
for _ in range(3):
    for one, other in zip(alone, listed(4)):
        for x, y in zip(one, other):
            np.testing.assert_array_equal(x, y)
"""
    )


def test_images_are_standardized_exactly(run_tf):
    """Also where the mean is far from 0, where all pixels are equal or one is no number, and without OpenCV."""
    run_tf(
        """
import math
from replicax.tf._images import libraries
draw = np.random.default_rng(0)
images = {
    "bytes": draw.integers(0, 256, (31, 17, 3)).astype(np.uint8),
    "floats": draw.normal(120, 50, (40, 30, 3)).astype(np.float32),
    "gray": draw.normal(0.5, 0.2, (40, 30, 1)).astype(np.float32),
    "many channels": draw.normal(0.5, 0.2, (12, 9, 7)).astype(np.float32),
    "far": draw.normal(120, 0.5, (40, 30, 3)).astype(np.float32),
    "large": draw.normal(0, 1e15, (40, 30, 3)).astype(np.float32),
    "one color": np.full((8, 8, 3), 64, np.uint8),
    "batch": draw.integers(0, 256, (2, 8, 8, 3)).astype(np.uint8),
    "wide": draw.integers(-500, 500, (8, 8, 3)).astype(np.int32),
    "no number": np.where(np.arange(48).reshape(4, 4, 3) == 5, np.nan, 1).astype(np.float32),
}

def exact(image):
    if image.ndim == 4:
        return np.stack([exact(x) for x in image])
    x = image.astype(np.float64)
    x = x - x.mean()
    return x / max(math.sqrt((x * x).mean()), 1 / math.sqrt(x.size))

def check():
    def standardized(number):
        image = list(images.values())[int(number)]
        middle = tf.constant(image)[..., 1:-1, :, :]  # a view
        return tf.image.per_image_standardization(image), tf.image.per_image_standardization(middle)

    found = tf.data.Dataset.range(len(images)).map(standardized).as_numpy_iterator()
    for (name, image), (whole, middle) in zip(images.items(), found, strict=True):
        assert whole.dtype == np.float32
        np.testing.assert_allclose(whole, exact(image), atol=3e-5, err_msg=name)
        np.testing.assert_allclose(middle, exact(image[..., 1:-1, :, :]), atol=3e-5, err_msg=name)

check()
libraries.opencv = lambda: None
check()
"""
    )


def test_the_larger_and_the_smaller_as_compiled(run_tf):
    run_tf(
        """
numbers = np.asarray([[-2.0, 0.0, 0.5], [np.nan, np.inf, 7.0]], np.float32)

def clipped(x):
    whole = tf.cast(tf.where(tf.math.is_finite(x), x, 3.0), tf.int32)
    return (
        tf.clip_by_value(x, 0.0, 1.0), tf.maximum(x, 0.25), tf.minimum(0.25, x), tf.maximum(x, x[::-1]),
        tf.clip_by_value(whole, -1, 2), tf.maximum(whole, 1), tf.maximum(tf.cast(x, tf.float64), 0.1),
    )

def in_python(x):
    x.numpy()
    return clipped(x)

one, other = (tf.data.Dataset.from_tensor_slices(numbers).map(f) for f in (clipped, in_python))
assert one.element_spec == other.element_spec
for x, y in zip(one.as_numpy_iterator(), other.as_numpy_iterator(), strict=True):
    for a, b in zip(x, y):
        np.testing.assert_array_equal(a, b)
"""
    )


def test_arguments_in_lists_may_be_variables_and_strings(run_tf):
    run_tf(
        """
v = tf.Variable(2.0)

def function(name):
    name.numpy()
    long = tf.stack([float(n) for n in range(1000)] + [v])
    return (
        tf.stack([v, 1.0]), tf.concat([[v, v], [3.0]], 0), tf.reshape([v, 1.0], [2, 1]), tf.add_n([[v], [1.0]]), long,
        tf.stack([name, "b"]), tf.strings.join([name, "b"]),
    )

found = next(iter(tf.data.Dataset.from_tensors("a").map(function).as_numpy_iterator()))
assert [x.tolist() for x in found[:4]] == [[2, 1], [2, 2, 3], [[2], [1]], [3]]
assert found[4].shape == (1001,) and found[4][-1] == 2
assert found[5].tolist() == [b"a", b"b"] and found[6] == b"ab"
"""
    )


def test_files_of_any_kind_are_read_whole(run_tf):
    """Empty ones, large ones, those whose size is not known before, and those that grow."""
    run_tf(
        """
import os, pathlib, tempfile, threading
from replicax.tf import _gfile
folder = pathlib.Path(tempfile.mkdtemp())

def read(name):
    return tf.io.read_file(str(folder / name)).item()

contents = {"empty": b"", "one": b"x", "large": os.urandom(3 << 20)}
for name, content in contents.items():
    (folder / name).write_bytes(content)
    assert read(name) == content
assert tf.io.read_file((str(folder / "one")).encode()).item() == b"x"

os.mkfifo(folder / "pipe")
writer = threading.Thread(target=(folder / "pipe").write_bytes, args=(contents["large"],))
writer.start()
assert read("pipe") == contents["large"]
writer.join()

class Smaller:
    st_size = 5

fstat = os.fstat
os.fstat = lambda file: Smaller
try:
    assert read("large") == contents["large"] and read("one") == b"x"
finally:
    os.fstat = fstat
raises(tf.errors.NotFoundError, lambda: read("none"), "No such file")
raises(tf.errors.FailedPreconditionError, lambda: tf.io.read_file(str(folder)), "directory")
"""
    )


def test_operators_with_assignment_make_new_tensors(run_tf):
    """`x += y` gives the name another tensor; what else shows the first one does not change, strings among it."""
    run_tf(
        """
def function(word):
    number = tf.strings.length(word)
    before = word, number
    word += b"c"
    number += 1
    number *= 3
    return before, word, number

expected = [((b"a", 1), b"ac", 6), ((b"bb", 2), b"bbc", 9)]
found = tf.data.Dataset.from_tensor_slices([b"a", b"bb"]).map(function).as_numpy_iterator()
assert [tuple(e) for e in found] == expected
word = first = tf.constant("a")
word += "b"
assert (first.numpy(), word.numpy()) == (b"a", b"ab")
"""
    )
