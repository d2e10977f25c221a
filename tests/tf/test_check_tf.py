"""`replicax check-tf`: what code uses of TensorFlow, found without running it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

GOOD = """
import tensorflow as tf
from tensorflow.keras import layers as L
from tensorflow import data

K = tf.keras.backend

def step(x, layers):
    K.mean(x)
    for layer in layers:
        layers.append(layer.nosuch)
    tf = x
    tf.nosuch
    return L.Dense(units=3)(x)

class Model(tf.keras.Model):
    tf = None

    def call(self, x, audio=tf.float32.as_numpy_dtype):
        return tf.reshape(tensor=x, shape=[-1], name="flat")

try:
    from tensorflow import nosuch
except ImportError:
    nosuch = None
if hasattr(tf, "quux"):
    tf.quux()
getattr(tf, "quux", None)
data.Dataset.range(3)
"""

BAD = """
import tensorflow.compat.v2 as tf2
import tensorflow_hub as hub
import tensorflow_datasets.public_api as tfds
import tensorflow_probability.substrates.jax as tfp
from tensorflow.core.protobuf import config_pb2 as config
from tensorflow.python.framework import ops, dtypes
from tensorflow.nn import ctc_beam_search_decoder as loss

tf2.reshape([1], shape=[1], nosuch=3)
loss(labels=1)
tf2.data.Dataset.nosuch(3)
config.GraphDef()
ops.convert_to_tensor(1)
ops.RegisterNothing()
x = lambda self: tf2.keras.layers.Nosuch()
getattr(tf2.audio, "decode_wav")
tf2.random.normal([2])
"""

NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "source": ["tf.audio"]},
        {"cell_type": "code", "source": ["!pip install \\\n", "   tensorflow\n", "import tensorflow as tf"]},
        {"cell_type": "code", "source": ["%%bash\n", "not python"]},
        {"cell_type": "code", "source": ["%time\n", "if True:\n", "  !ls\n", "tf.audio.decode_wav"]},
    ]
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The exit status and the output of the command, as JSON and as text, on the code above and on the good file."""
    folder = tmp_path_factory.mktemp("code")
    for name, text in {
        "good.py": GOOD,
        "bad.py": BAD,
        "broken.py": "def (",
        "book.ipynb": json.dumps(NOTEBOOK),
    }.items():
        (folder / name).write_text(text)
    hidden = folder / ".hidden"
    hidden.mkdir()
    (hidden / "file.py").write_text(BAD)
    environment = {**os.environ, "KERAS_BACKEND": "jax"}

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "replicax", "check-tf", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout

    return run("--json", "."), run("good.py")


@pytest.fixture(scope="module")
def found(checked):
    """The findings of each file: (line, name, status, text, caught)."""
    status, text = checked[0]
    assert status == 1
    content = json.loads(text)
    assert list(content["unreadable"]) == ["broken.py"]
    files = content["files"]
    keys = ("line", "name", "status", "text", "caught")
    return {Path(file).name: [tuple(each[key] for key in keys) for each in found] for file, found in files.items()}


def names(found, status, *, caught=False):
    return [(line, name) for line, name, given, _, is_caught in found if given == status and is_caught == caught]


def test_aliases_scopes_and_guards_are_followed(found):
    assert set(found) == {"good.py", "bad.py", "book.ipynb"}
    good = found["good.py"]
    assert names(good, "missing") == [] and names(good, "differs") == []
    assert names(good, "missing", caught=True) == [("23", "nosuch"), ("27", "quux"), ("28", "quux")]
    used = dict.fromkeys(name for _, name in names(good, "runs"))
    wanted = ["keras.layers", "data", "keras.backend", "keras.backend.mean", "keras.layers.Dense", "keras.Model"]
    assert list(used) == [*wanted, "float32.as_numpy_dtype", "reshape", "data.Dataset.range"]


def test_what_is_missing_is_found_with_what_stands_for_it(found):
    bad = found["bad.py"]
    assert names(bad, "missing") == [
        ("3", "tensorflow_hub"),
        ("4", "tensorflow_datasets"),
        ("8", "nn.ctc_beam_search_decoder"),
        ("10", "reshape"),
        ("11", "nn.ctc_beam_search_decoder"),
        ("12", "data.Dataset.nosuch"),
        ("13", "core.protobuf.config_pb2.GraphDef"),
        ("15", "python.framework.ops.RegisterNothing"),
        ("16", "keras.layers.Nosuch"),
        ("17", "audio"),
        ("17", "audio.decode_wav"),
    ]
    texts = {name: text for _, name, status, text, _ in bad if status == "missing"}
    assert texts["reshape"] == "It has no argument 'nosuch'" and "pyctcdecode" in texts["nn.ctc_beam_search_decoder"]
    assert "librosa" in texts["audio"]
    assert "Keras 3" in texts["keras.layers.Nosuch"] and "data_source" in texts["tensorflow_datasets"]
    assert names(bad, "differs") == [("18", "random.normal")]


def test_cells_of_a_notebook_are_one_program(found):
    assert found["book.ipynb"] == [("3:4", "audio.decode_wav", "missing", found["book.ipynb"][0][3], False)]


def test_the_exit_status_is_zero_where_everything_is_there(checked):
    status, text = checked[1]
    assert status == 0 and text.endswith("0 run and differ, 0 are missing.\n")
    assert "nosuch, line 23: missing, which the code expects" in text
