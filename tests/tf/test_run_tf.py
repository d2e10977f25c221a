"""`replicax run-tf` and `replicax launch --tf`: programs of TensorFlow's as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


def replicax(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the command `replicax` in a folder."""
    environment = {**os.environ, "REPLICAX_VIRTUAL_DEVICES": "CPU:2", **variables}
    for name in ("KERAS_BACKEND", "GLIBC_TUNABLES"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "replicax", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_a_program_runs_as_it_is_with_its_arguments_and_children(tmp_path):
    (tmp_path / "beside.py").write_text("from tensorflow.keras import layers\n")
    (tmp_path / "train.py").write_text("""
import argparse, importlib.metadata, multiprocessing, os, subprocess, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
assert "jax" not in sys.modules, "nothing is imported before TensorFlow is"

def child(queue):
    import tensorflow as tf
    queue.put((tf.__version__, float(tf.reduce_sum(tf.ones([3])))))

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--report")
    given = parser.parse_args()
    here = os.path.dirname(os.path.abspath(__file__))
    assert sys.argv == ["train.py", "--report", "mine"] and sys.path[0] == here and given.report == "mine"
    assert importlib.metadata.version("tensorflow") == "2.21.0"
    os.environ["KERAS_BACKEND"] = "tensorflow"  # as Keras's own examples do
    import keras
    import tensorflow as tf
    import beside
    assert keras.backend.backend() == "jax" and beside.layers is tf.keras.layers
    model = tf.keras.Sequential([beside.layers.Dense(2)])
    model.compile("sgd", "mse")
    model.fit(tf.data.Dataset.from_tensor_slices((tf.ones([8, 3]), tf.ones([8, 2]))).batch(4), verbose=0)
    shape = model.trainable_variables[0].shape  # TensorFlow's own kind, as in Keras on TensorFlow
    assert shape.rank == 2 and shape.as_list() == [3, 2] and shape == (3, 2)
    spawning = multiprocessing.get_context("spawn")
    queue = spawning.Queue()
    process = spawning.Process(target=child, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == ("2.21.0", 3.0)
    process.join()
    code = "import keras; print(keras.backend.backend()); import tensorflow.keras as k; print(k.layers is keras.layers)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["jax", "False"], done  # Keras keeps TensorFlow's names in a module of its own
    sys.exit(7)
""")
    done = replicax(tmp_path, "run-tf", "--report=names.txt", "train.py", "--report", "mine")
    assert (done.returncode, done.stderr) == (7, "")
    report = (tmp_path / "names.txt").read_text()
    assert "beside.py\n  keras.layers, line 1: runs\n" in report
    assert "  keras.Sequential, line 22: runs\n" in report and "0 are missing" in report


@pytest.mark.thorough
def test_a_program_keeps_large_buffers_unless_told_not_to(tmp_path):
    code = "import os, platform\nprint(platform.libc_ver()[0], os.environ.get('GLIBC_TUNABLES'))"
    (tmp_path / "shown.py").write_text(code)
    library, tunables = replicax(tmp_path, "run-tf", "shown.py").stdout.split()
    assert ("malloc.mmap_threshold=" in tunables) == (library == "glibc")
    assert replicax(tmp_path, "run-tf", "--no-tuning", "shown.py").stdout.split()[1] == "None"


def test_a_name_that_is_missing_ends_the_program_and_stands_in_the_report(tmp_path):
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text("""
import tensorflow as tf
optional = hasattr(tf, "nosuch")
def decode(path):
    return tf.audio.decode_wav(path)
decode("x")
""")
    done = replicax(tmp_path, "run-tf", "--report", "-m", "project.train")
    assert done.returncode == 1
    traceback, _, report = done.stderr.partition("Names of TensorFlow in the files of the program")
    assert "replicax.tf has no 'audio' (project/train.py:5). Use librosa" in traceback
    assert 'train.py", line 6, in <module>' in traceback and "src/replicax" not in traceback
    assert "  audio.decode_wav, line 5: missing: Use librosa" in report
    asked = report.partition("Names that the program asked for and did not find:")[2]
    assert "  nosuch (project/train.py:3)" in asked and "  audio (project/train.py:5): Use librosa" in asked


def test_the_workers_of_a_job_run_a_program_of_tensorflow(tmp_path):
    (tmp_path / "train.py").write_text("""
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([])))
print("total", float(total), tf.__version__)
""")
    done = replicax(tmp_path, "launch", "--workers", "2", "--tf", "train.py", REPLICAX_VIRTUAL_DEVICES="CPU:1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("total 2.0 2.21.0") == 2


@pytest.mark.thorough
def test_a_sitecustomize_that_is_hidden_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.customized = True\n")
    (tmp_path / "program.py").write_text("import sys; assert sys.customized\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = replicax(tmp_path, "run-tf", "program.py", PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    missing = replicax(tmp_path, "run-tf", "nosuch.py")
    assert missing.returncode == 2 and "nosuch.py" in missing.stderr
