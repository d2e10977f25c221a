"""`tf.image`, and the operations of `tf.io` that decode and encode images, against TensorFlow's.

tests/tf/tf_images/cases.txt has expressions, and tests/tf/tf_images/tensorflow.json what TensorFlow 2.21 gives:

    python tests/tf/tf_images/run.py tensorflow tests/tf/tf_images/tensorflow.json

They are evaluated as those of test_tf_ops.py are: in a compiled function, eagerly, and in a function of a dataset that
runs in Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_tf_ops import differences

FOLDER = Path(__file__).parent / "tf_images"


PARAMETERS = """
import inspect, json, types
import replicax.tf as tf
found = {}
for space in ("image", "io"):
    for name in dir(getattr(tf, space)):
        value = getattr(getattr(tf, space), name)
        if isinstance(value, types.FunctionType) and not name.startswith("_"):
            found[f"{space}.{name}"] = list(inspect.signature(value).parameters)
print(json.dumps(found))
"""


def _run(python, module, path, **env):
    command = [str(python), str(FOLDER / "run.py"), module, str(path)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", **env}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def record():
    return json.loads((FOLDER / "tensorflow.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def recorded(record):
    return record["values"]


@pytest.fixture(scope="module")
def ours(once, tmp_path_factory):
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # compiling takes the time
    env = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}", "REPLICAX_VIRTUAL_DEVICES": "CPU:2"}
    path = tmp_path_factory.mktemp("images") / "replicax.json"
    return once("images", lambda: _run(sys.executable, "replicax.tf", path, **env))


@pytest.mark.parametrize("way", ["eager", "function", "python"])
def test_the_same_as_tensorflow(way, recorded, ours):
    parts = ["value", "raises", "failed"] + (["gradients"] if way == "function" else [])
    assert len(ours[way]) > 80
    found = differences(recorded, ours[way], parts)
    assert not found, f"\n{found}"


def test_the_record_is_complete(recorded, ours):
    failed = [name for name, result in recorded.items() if "failed" in result or result.get("raises", 1) is None]
    assert not failed, f"These do not work in TensorFlow itself: {failed}"
    assert set(recorded) == set(ours["eager"]) | set(ours["function"])


def test_names_and_parameters_are_tensorflows(record, recorded):
    done = subprocess.run([sys.executable, "-c", PARAMETERS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    names = {name: found for name, found in json.loads(done.stdout).items() if name in record["signatures"]}
    assert {name: record["signatures"][name] for name in names} == names
    text = " ".join(recorded)
    of_images = [name.partition(".")[2] for name in names if name.startswith("image.")]
    assert len(of_images) > 60
    assert not [name for name in of_images if name not in text], "Add expressions to cases.txt."


def test_the_record_is_what_tensorflow_gives(tensorflow_python, recorded, tmp_path):
    again = _run(tensorflow_python, "tensorflow", tmp_path / "tensorflow.json")["values"]
    assert set(again) == set(recorded), "Run tests/tf/tf_images/run.py to record it anew."
    found = differences(recorded, again)
    assert not found, f"\n{found}"


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
