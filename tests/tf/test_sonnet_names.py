"""What public libraries ask of `replicax.tf`, against TensorFlow's answers.

tests/tf/tf_libraries/cases.txt has expressions, and tests/recorded/libraries.json what TensorFlow 2.21 gives for them.
`scripts/library_tests.py` runs the tests of a library itself; docs/reference/libraries.md has what it found.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_records import expressions_of, without_text

LIBRARIES = expressions_of([Path(__file__).parent / "tf_libraries" / "cases.txt"], "libraries")


@pytest.fixture(scope="module")
def results(request):
    return LIBRARIES.results(request)


@pytest.mark.parametrize("expression", LIBRARIES.all)
def test_an_expression_gives_what_tensorflow_gives(expression, results):
    assert without_text(results.replicax[expression]) == without_text(results.tensorflow[expression])


def test_the_record_is_what_tensorflow_gives(request, tensorflow_python):
    recorded, live = LIBRARIES.sample(request)
    for expression, found in live.items():
        assert without_text(found) == without_text(recorded[expression])


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
