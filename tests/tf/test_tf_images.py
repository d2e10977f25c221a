"""`tf.image`, and the operations of `tf.io` that decode and encode images, against TensorFlow's.

tests/tf/tf_images/cases.txt has expressions, and tests/recorded/images.json what TensorFlow 2.21 gives for them. They
are evaluated as those of test_tf_ops.py are: in a compiled function, eagerly, and in a function of a dataset that runs
in Python.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from evaluation import difference
from test_tf_ops import assert_alike, expressions_of, signatures  # noqa: F401

FOLDER = Path(__file__).parent / "tf_images"
# They compile as users do: XLA's older emitters round positions next to whole numbers in two ways within one program.
AS_USERS = {"XLA_FLAGS": None, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
IMAGES = expressions_of(FOLDER, "images", (FOLDER / "run.py").read_text(encoding="utf-8"), AS_USERS)


@pytest.fixture(scope="module")
def results(request):
    return IMAGES.results(request)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("expression", IMAGES.all)
def test_an_operation_gives_what_tensorflow_gives(expression, results):
    assert_alike(results.tensorflow[expression], results.replicax[expression])


def test_every_function_is_used_in_an_expression(signatures):  # noqa: F811
    names = [name for name, parameters in signatures[1]["image"].items() if parameters is not None]
    assert len(names) > 60
    text = " ".join(IMAGES.all)
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)], "Add expressions to cases.txt."


def test_the_record_is_what_tensorflow_gives(request, tensorflow_python):
    recorded, live = IMAGES.sample(request)
    for expression, found in live.items():
        assert difference(recorded[expression], found) is None, expression


PIPELINE = """
numbers = np.random.default_rng(0)

def augmented(image):
    image = tf.image.convert_image_dtype(image, tf.float32)
    image = tf.image.resize_with_crop_or_pad(image, 12, 12)
    image = tf.image.random_crop(image, [8, 8, 3])
    image = tf.image.random_flip_left_right(image)
    image = tf.image.random_brightness(image, 0.2)
    image = tf.image.random_contrast(image, 0.7, 1.3)
    image = tf.image.random_saturation(image, 0.7, 1.3)
    image = tf.image.random_hue(image, 0.1)
    return tf.image.per_image_standardization(image)

def in_python(image):
    image.numpy()  # which compiled code cannot do
    return augmented(image)

images = numbers.integers(0, 256, (40, 8, 8, 3)).astype(np.uint8)
"""


def test_random_operations_draw_the_same_compiled_and_in_python(run_tf):
    run_tf(
        PIPELINE
        + """
tf.random.set_seed(1)
source = tf.data.Dataset.from_tensor_slices(images)
def stacked(function):
    return np.stack(list(source.map(function, num_parallel_calls=2).as_numpy_iterator()))
compiled, plain = stacked(augmented), stacked(in_python)
np.testing.assert_allclose(compiled, plain, atol=2e-4)
assert len(np.unique(compiled[:, 0, 0, 0])) == 40  # each element draws its own numbers
"""
    )


def test_random_operations_have_tensorflows_distributions(run_tf):
    run_tf(
        """
image = tf.reshape(tf.range(36, dtype=tf.float32), [6, 6, 1])
def firsts(function):
    return np.array(list(tf.data.Dataset.range(2000).map(lambda i: function(i)[0, 0, 0]).as_numpy_iterator()))
corners = firsts(lambda i: tf.image.random_crop(image, [4, 5, 1], seed=1))
places, counts = np.unique(corners, return_counts=True)
assert places.tolist() == [0, 1, 6, 7, 12, 13] and counts.min() > 260 and counts.max() < 410, counts
flips = firsts(lambda i: tf.image.random_flip_up_down(image, seed=2))
assert 900 < (flips == 30).sum() < 1100 and set(flips) == {0, 30}
batch = tf.image.random_flip_left_right(tf.tile(image[None], [200, 1, 1, 1]), seed=3)
assert 60 < int(tf.reduce_sum(tf.cast(batch[:, 0, 0, 0] == 5, tf.int32))) < 140
brighter = firsts(lambda i: tf.image.random_brightness(tf.zeros([1, 1, 1]), 0.5, seed=4))
assert -0.5 <= brighter.min() < -0.49 and 0.49 < brighter.max() < 0.5 and abs(brighter.mean()) < 0.03
boxes = tf.constant([[[0.2, 0.3, 0.6, 0.9]]])
for i in range(50):
    begin, size, box = tf.image.stateless_sample_distorted_bounding_box(
        [40, 50, 3], boxes, [i, 1], min_object_covered=0.4, area_range=[0.1, 0.8], max_attempts=500)
    top, left, height, width = *begin.numpy()[:2], *size.numpy()[:2]
    np.testing.assert_allclose(box.numpy()[0, 0] * [40, 50, 40, 50], [top, left, top + height, left + width], atol=1e-4)
    assert 0.1 * 2000 <= height * width <= 0.8 * 2000 and 0.74 < width / height < 1.34
    common = max(min(24, top + height) - max(8, top), 0) * max(min(45, left + width) - max(15, left), 0)
    assert common >= 0.4 * 16 * 30 - 1e-3, (begin, size)
"""
    )


def test_offsets_need_not_be_known_in_compiled_code(run_tf):
    run_tf(
        """
image = tf.reshape(tf.range(2 * 24), [1, 4, 6, 2])

@tf.function
def moved(top, left, turns):
    part = tf.image.crop_to_bounding_box(image, top, left, 2, 3)
    padded = tf.image.pad_to_bounding_box(part, left, top, 6, 6)
    return part, padded, tf.image.rot90(padded, turns)

part, padded, turned = moved(tf.constant(1), tf.constant(2), tf.constant(3))
assert part.numpy().tolist() == image.numpy()[:, 1:3, 2:5].tolist()
assert padded.numpy()[:, 2:4, 1:4].tolist() == part.numpy().tolist() and padded.numpy().sum() == part.numpy().sum()
assert turned.numpy().tolist() == np.rot90(padded.numpy(), 3, (1, 2)).tolist()
"""
    )


def test_files_are_decoded_and_resized_in_datasets(run_tf):
    """In threads, with OpenCV and without; a damaged file is an error that `ignore_errors` leaves out."""
    run_tf(
        """
import pathlib, tempfile
from replicax.tf._images import libraries
folder = pathlib.Path(tempfile.mkdtemp())
numbers = np.random.default_rng(0)
images = [numbers.integers(0, 256, (10 + i, 14 - i, 3)).astype(np.uint8) for i in range(8)]
for i, image in enumerate(images):
    tf.io.write_file(str(folder / f"{i}.png"), tf.io.encode_png(image))

def read(path):
    image = tf.io.decode_image(tf.io.read_file(path), channels=3, expand_animations=False)
    image = tf.image.random_flip_left_right(image, seed=1)
    return tf.image.resize(image, [9, 9]), tf.shape(image)

def found():
    files = tf.data.Dataset.list_files(str(folder / "*.png"), shuffle=False)
    return list(files.map(read, num_parallel_calls=2).ignore_errors().as_numpy_iterator())

fast = found()
assert [shape.tolist() for _, shape in fast] == [list(image.shape) for image in images]
for (resized, _), image in zip(fast, images):
    flips = [tf.image.resize(x, [9, 9]).numpy() for x in (image, image[:, ::-1])]
    assert min(abs(resized - x).max() for x in flips) < 1e-3
libraries.opencv = lambda: None
for (resized, _), (other, _) in zip(fast, found()):
    np.testing.assert_allclose(resized, other, atol=1e-3)
(folder / "3.png").write_bytes(b"damaged")
assert len(found()) == 7
"""
    )


def test_a_library_that_is_missing_is_named(run_tf):
    run_tf(
        """
import sys
sys.modules["simplejpeg"] = None
try:
    tf.io.decode_jpeg(b"\\xff\\xd8\\xff\\xe0 and so on")
except ImportError as error:
    assert "simplejpeg" in str(error) and "pip install" in str(error), error
else:
    raise AssertionError
"""
    )
