"""The operations of `replicax.tf` against TensorFlow's: values, dtypes, gradients, errors and signatures.

tests/tf/tf_ops/cases.txt has expressions, and tests/tf/tf_ops/tensorflow.json what TensorFlow 2.21 gives for them:

    python tests/tf/tf_ops/run.py tensorflow tests/tf/tf_ops/tensorflow.json

replicax evaluates one half in a compiled function, the other half in the replicas of a strategy, both with gradients,
eagerly where values decide on shapes or an error is expected, and every second one in a function of a dataset that runs
in Python too. Where TensorFlow is installed the record itself is checked.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "tf_ops"

# Names whose results are no tensors to compare, or are random or files: test_tf_namespace.py shows what they do.
ELSEWHERE = """
AggregationMethod control_dependencies device get_current_name_scope get_logger init_scope print timestamp
type_spec_from_value random_normal_initializer random_uniform_initializer parallel_stack
nn.experimental.stateless_dropout debugging.disable_check_numerics debugging.enable_check_numerics
debugging.set_log_device_placement make_ndarray make_tensor_proto
signal.fftnd signal.ifftnd signal.rfftnd signal.irfftnd
debugging.disable_traceback_filtering debugging.enable_traceback_filtering
"""
ELSEWHERE_ALL = ("config", "errors", "io", "random", "saved_model", "summary", "test", "version")


def difference(expected, got, where=""):
    """What differs, None where nothing does; numbers may be a little off."""
    if isinstance(expected, float) and isinstance(got, (int, float)) and not isinstance(got, bool):
        same = math.isclose(expected, got, rel_tol=2e-3, abs_tol=2e-5) or (math.isnan(expected) and math.isnan(got))
        return None if same else f"{where}: TensorFlow {expected}, replicax {got}"
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        return next(
            (d for i, (a, b) in enumerate(zip(expected, got)) if (d := difference(a, b, f"{where}[{i}]"))), None
        )
    if isinstance(expected, dict) and isinstance(got, dict) and set(expected) == set(got):
        return next((d for k in expected if (d := difference(expected[k], got[k], f"{where}.{k}"))), None)
    same = expected == got and type(expected) is type(got)
    return None if same else f"{where}: TensorFlow {expected}, replicax {got}"


def any_nonzero(nest):
    return any(any_nonzero(x) for x in nest) if isinstance(nest, list) else abs(nest) > 1e-6


def without_zeros(result):
    """A result, but for gradients that are all zeros, which are None where nothing connects."""
    parts = result.get("gradients", {}).items()
    gradients = {name: tensors for name, tensors in parts if any_nonzero([numbers for _, _, numbers in tensors])}
    return {**result, "gradients": gradients} if "gradients" in result else result


def differences(expected, got, parts=("value", "gradients", "raises", "failed")):
    def chosen(result):
        return {k: v for k, v in without_zeros(result).items() if k in parts}

    pairs = ((name, difference(chosen(expected[name]), chosen(result))) for name, result in got.items())
    return "\n".join(f"{name}  {found}" for name, found in pairs if found)


@pytest.fixture(scope="module")
def recorded():
    return json.loads((FOLDER / "tensorflow.json").read_text(encoding="utf-8"))


def _run(python, module, path, *way, **env):
    command = [str(python), str(FOLDER / "run.py"), module, str(path), *way]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", **env}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(path.read_text(encoding="utf-8"))


WAYS = "eager", "function", "replicas", "python"


@pytest.fixture(scope="module")
def ours(once, tmp_path_factory):
    """A function that returns what replicax gives in one way, each in a process of its own."""
    # Compiling takes nearly all of the time, so XLA leaves its slow passes out.
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    env = {"REPLICAX_VIRTUAL_DEVICES": "CPU:2", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
    folder = tmp_path_factory.mktemp("ops")

    def found(way):
        return once(f"ops-{way}", lambda: _run(sys.executable, "replicax.tf", folder / f"{way}.json", way, **env)[way])

    return found


def test_the_record_is_complete(recorded):
    failed = [
        name for name, result in recorded["values"].items() if "failed" in result or result.get("raises", 1) is None
    ]
    assert not failed, f"These do not work in TensorFlow itself: {failed}"


@pytest.mark.parametrize("way", WAYS)
def test_the_same_as_tensorflow(way, recorded, ours):
    parts = [part for part in ("value", "gradients", "raises", "failed") if (way, part) != ("python", "gradients")]
    results = ours(way)
    assert len(results) > 80
    found = differences(recorded["values"], results, parts)
    assert not found, f"\n{found}"


def test_every_expression_was_evaluated(recorded, ours):
    assert set(recorded["values"]) == set().union(*(ours(way) for way in WAYS if way != "python"))


def test_the_record_is_what_tensorflow_gives(tensorflow_python, recorded, tmp_path):
    again = _run(tensorflow_python, "tensorflow", tmp_path / "tensorflow.json")
    assert set(again["values"]) == set(recorded["values"]), "Run tests/tf/tf_ops/run.py to record it anew."
    found = differences(recorded["values"], again["values"])
    assert not found, f"\n{found}"
    assert again["signatures"] == recorded["signatures"]


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """The names of each namespace, with the names of parameters of those that are functions."""
    program = """
import inspect, json
import operator
from replicax.tf import _names
import replicax.tf as tf
def parameters(value):
    plain = callable(value) and not inspect.isclass(value)
    return list(inspect.signature(value).parameters) if plain else None
# in test_records.py, test_tf_images.py and test_sonnet_names.py
elsewhere = "autograph", "data", "experimental", "image", "lookup", "ragged", "raw_ops", "sparse", "tpu", "train", "xla"
found = {space: {name: parameters(getattr(operator.attrgetter(space)(tf) if space else tf, name))
                 for name in _names.names(space)}
         for space in _names.NAMESPACES if space.partition(".")[0] not in elsewhere}
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_operation_is_used_in_an_expression(names):
    files = [FOLDER / "cases.txt", FOLDER.parent / "tf_libraries" / "cases.txt"]
    files += (FOLDER.parent / "tf_records").glob("*.txt")
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    other = set(ELSEWHERE.split())
    absent = []
    for space, members in names.items():
        for name, parameters in members.items():
            full = f"{space}.{name}" if space else name
            if parameters is None or full in other or space.split(".")[0] in (*ELSEWHERE_ALL, "profiler"):
                continue
            if not re.search(rf"\btf\.(\w+\.)?{name}\b", text):
                absent.append(full)
    assert not absent, f"Add an expression to tests/tf/tf_ops/cases.txt for each of: {absent}"


def test_names_and_parameters_are_tensorflows(names, recorded):
    expected, wrong = recorded["signatures"], []
    for space, members in names.items():
        for name, parameters in members.items():
            full = f"{space}.{name}" if space else name
            if full not in expected:
                if space != "version":
                    wrong.append(f"{full}: TensorFlow has no such name")
            elif parameters is not None and expected[full] is not None and parameters != expected[full]:
                if set(expected[full]) & {"args", "kwargs"}:
                    continue  # TensorFlow's own wrapper hides the names
                wrong.append(f"{full}: TensorFlow {expected[full]}, replicax {parameters}")
    assert not wrong, "\n" + "\n".join(wrong)
