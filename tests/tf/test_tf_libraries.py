"""What public libraries ask of `replicax.tf`, against TensorFlow's answers.

tests/tf/tf_libraries/cases.txt has expressions, and tensorflow.json what TensorFlow 2.21 gives for them:

    cd tests/tf
    python tf_records/run.py tensorflow tf_libraries/tensorflow.json tf_libraries/cases.txt

`scripts/library_tests.py` runs the tests of a library itself; docs/libraries.md has what it found.
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
