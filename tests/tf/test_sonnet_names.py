"""What public libraries ask of `replicax.tf`, against TensorFlow's answers.

tests/tf/tf_libraries/cases.txt has expressions, and tensorflow.json what TensorFlow 2.21 gives for them:

    cd tests/tf
    python tf_records/run.py tensorflow tf_libraries/tensorflow.json tf_libraries/cases.txt

`scripts/library_tests.py` runs the tests of a library itself; docs/reference/libraries.md has what it found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES, RECORD = HERE / "tf_libraries" / "cases.txt", HERE / "tf_libraries" / "tensorflow.json"


def evaluated(python, module, path):
    """What each expression gives, but for the texts of errors."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    environment.pop("KERAS_BACKEND", None)  # TensorFlow has its own
    command = [str(python), str(HERE / "tf_records" / "run.py"), module, str(path), str(CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr[-5000:]
    return without_texts(path)


def without_texts(path):
    found = json.loads(path.read_text(encoding="utf-8"))
    return {name: {key: part for key, part in result.items() if key != "text"} for name, result in found.items()}


@pytest.fixture(scope="module")
def recorded():
    return without_texts(RECORD)


def compared(expected, got):
    assert set(got) == set(expected), "Record the rest, as the beginning of this file says."
    differing = [name for name in got if got[name] != expected[name]]
    assert not differing, "\n".join(f"{name}\n  TensorFlow {expected[name]}\n  here {got[name]}" for name in differing)


def test_the_same_as_tensorflow(recorded, tmp_path):
    compared(recorded, evaluated(sys.executable, "replicax.tf", tmp_path / "replicax.json"))


def test_the_record_is_what_tensorflow_gives(tensorflow_python, recorded, tmp_path):
    compared(recorded, evaluated(tensorflow_python, "tensorflow", tmp_path / "tensorflow.json"))


def test_a_function_is_converted_for_one_that_is_not(run_tf, tmp_path):
    (tmp_path / "chosen.py").write_text("""
def chosen(x):
    if x > 0:
        return x * 2
    return x - 1
""")
    run_tf(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from chosen import chosen
graph = tf.autograph.to_graph(chosen)
outer = tf.function(lambda x: graph(x), autograph=False)
assert [int(outer(tf.constant(n))) for n in (3, -3)] == [6, -4] and graph(tf.constant(1)) == 2
""")


def test_dm_tree_takes_shapes_for_leaves(run_tf, tmp_path):
    """The library is not installed for the tests: a module in its place asks what it asks, and when it does."""
    (tmp_path / "tree.py").write_text("""
import collections.abc
known = {}
def is_nested(value):
    return known.setdefault(type(value), isinstance(value, collections.abc.Sequence))
""")
    run_tf(f"""
import collections.abc, sys
sys.path.insert(0, {str(tmp_path)!r})
tf.install()
import tree
shape = tf.ones([2, 3]).shape
assert not tree.is_nested(shape) and tree.is_nested((2, 3))
assert isinstance(shape, tuple) and isinstance(shape, collections.abc.Sequence)
""")


def test_components_of_a_distributed_variable_under_their_private_name(run_tf):
    run_tf("""
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    v = tf.Variable(1.0)
assert v._values is v.values and len(v._values) == 2
""")
