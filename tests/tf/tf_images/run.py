"""Evaluate expressions of images in cases.txt, as tests/tf/tf_ops/run.py does."""

import base64
import json
import pathlib
import sys

import numpy as np

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "tf_ops"))
import run as ops  # noqa: E402

tf = ops.tf

numbers = np.random.default_rng(0)
small = numbers.integers(0, 256, (2, 5, 7, 3)).astype(np.uint8)
floats = numbers.random((2, 6, 5, 3), np.float32)
large = np.clip(np.cumsum(numbers.normal(0, 0.1, (2, 24, 26, 3)), 1) / 2 + 0.5, 0, 1).astype(np.float32)

ops.INPUTS.clear()
ops.INPUTS |= {
    "x": tf.constant(floats[0]),
    "xs": tf.constant(floats),
    "gray": tf.constant(floats[..., :1]),
    "wide": tf.constant(np.sin(np.arange(9 * 13 * 3)).astype(np.float32).reshape(9, 13, 3) * 100),
    "big": tf.constant(large),
    "other": tf.constant(np.clip(large + 0.1 * numbers.normal(size=large.shape), 0, 1).astype(np.float32)),
    "u": tf.constant(small[0]),
    "us": tf.constant(small),
    "h": tf.constant(floats[0].astype(np.float16)),
    "w": tf.constant(small[0].astype(np.uint16) * 257),
    "boxes": tf.constant([[0.1, 0.2, 0.7, 0.9], [0.0, 0.0, 1.0, 1.0], [0.15, 0.2, 0.75, 0.9], [0.6, 0.6, 0.2, 0.1]]),
    "scores": tf.constant([0.9, 0.3, 0.8, 0.5]),
}
# What is differentiated, which takes compilation.
ops.FLOATS = ("x", "xs")
ops.FILES = {name: base64.b64decode(text) for name, text in json.loads((FOLDER / "files.json").read_text()).items()}


def decoded(name, op, **options):
    """A file, decoded by an operation of tf.io."""
    return getattr(tf.io, op)(ops.FILES[name], **options)


def again(image, **options):
    """An image as it is in the JPEG file that encode_jpeg makes of it."""
    return tf.io.decode_jpeg(tf.io.encode_jpeg(image, **options))


ops.NAMES |= {"decoded": decoded, "again": again, "FILES": ops.FILES}
ops.REPLICAS = False
ops.CASES = FOLDER / "cases.txt"

if __name__ == "__main__":
    ops.main()
