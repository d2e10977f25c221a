"""The operations of `replicax.tf` against TensorFlow's: values, dtypes, gradients, errors and signatures.

tests/tf/tf_ops/cases.txt has expressions, and tests/recorded/operations.json what TensorFlow 2.21 gives for them (see
recorded.py). replicax evaluates one half in a compiled function, the other half in the replicas of a strategy, both
with gradients, eagerly where values decide on shapes or an error is expected, and every second one in a function of a
dataset that runs in Python too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from evaluation import Expressions, difference
from recorded import from_tensorflow

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

RUNNER = (FOLDER / "run.py").read_text(encoding="utf-8")
INPUTS = RUNNER[RUNNER.index("INPUTS = {") : RUNNER.index("CASES = ")]


def expressions_of(folder: Path, record: str, inputs: str, env: Mapping[str, str | None] | None = None) -> Expressions:
    """Return the expressions of a folder's cases.txt, which its run.py evaluates with these inputs."""
    lines = (folder / "cases.txt").read_text(encoding="utf-8").splitlines()
    cases = [line for line in lines if line and not line.startswith("#")]
    texts = {re.sub("^(eager|raises|nograd): ", "", case): inputs + case for case in cases}
    return Expressions(record, folder / "run.py", texts, env=env)


OPERATIONS = expressions_of(FOLDER, "operations", INPUTS)


def any_nonzero(nest):
    return any(any_nonzero(x) for x in nest) if isinstance(nest, list) else abs(nest) > 1e-6


def without_zeros(result):
    """A result, but for gradients that are all zeros, which are None where nothing connects."""
    parts = result.get("gradients", {}).items()
    gradients = {name: tensors for name, tensors in parts if any_nonzero([numbers for _, _, numbers in tensors])}
    return {**result, "gradients": gradients} if "gradients" in result else result


def assert_alike(expected, got):
    """Check the results of an expression in all ways against TensorFlow's; functions of datasets have no gradients."""
    theirs = without_zeros(expected["eager"])
    assert "failed" not in theirs and theirs.get("raises", 1) is not None, f"fails in TensorFlow itself: {theirs}"
    assert got
    for way, result in got.items():
        wanted = {part: value for part, value in theirs.items() if (way, part) != ("python", "gradients")}
        ours = {part: value for part, value in without_zeros(result).items() if part in (*wanted, "failed")}
        assert difference(wanted, ours) is None, f"{way}: {difference(wanted, ours)}"


@pytest.fixture(scope="module")
def results(request):
    return OPERATIONS.results(request)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("expression", OPERATIONS.all)
def test_an_operation_gives_what_tensorflow_gives(expression, results):
    assert_alike(results.tensorflow[expression], results.replicax[expression])


def test_the_record_is_what_tensorflow_gives(request, tensorflow_python):
    recorded, live = OPERATIONS.sample(request)
    for expression, found in live.items():
        assert difference(recorded[expression], found) is None, expression


# Images and records have tests of their own.
NAMESPACES = """math nn nn.experimental linalg random random.experimental bitwise strings io io.gfile debugging nest
errors dtypes quantization sets signal summary summary.experimental config config.experimental config.optimizer
config.threading test profiler.experimental saved_model saved_model.experimental"""
SCRIPT = Path(__file__).parent / "signatures.py"
SIGNATURES = Expressions("signatures", SCRIPT, {space: space for space in ["", "image", *NAMESPACES.split()]})


@pytest.fixture(scope="module")
def signatures(request, once, tmp_path_factory):
    """The names of each namespace in TensorFlow and in `replicax.tf`, with the parameters of functions."""
    theirs = from_tensorflow("signatures", SIGNATURES.texts, SIGNATURES.live(request))
    folder = tmp_path_factory.mktemp("signatures")
    return theirs, once("signatures", lambda: SIGNATURES.evaluate("replicax.tf", SIGNATURES.all, folder))


def full(space: str, name: str) -> str:
    return f"{space}.{name}" if space else name


def test_every_operation_is_used_in_an_expression(signatures):
    files = [FOLDER / "cases.txt", FOLDER.parent / "tf_libraries" / "cases.txt"]
    files += (FOLDER.parent / "tf_records").glob("*.txt")
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    other = set(ELSEWHERE.split())
    absent = []
    for space, members in signatures[1].items():
        if space == "image" or space.split(".")[0] in (*ELSEWHERE_ALL, "profiler"):
            continue
        for name, parameters in members.items():
            if parameters is None or full(space, name) in other:
                continue
            if not re.search(rf"\btf\.(\w+\.)?{name}\b", text):
                absent.append(full(space, name))
    assert not absent, f"Add an expression to tests/tf/tf_ops/cases.txt for each of: {absent}"


def test_names_and_parameters_are_tensorflows(signatures):
    theirs, ours = signatures
    wrong = []
    for space, members in ours.items():
        for name, parameters in members.items():
            if name not in theirs[space]:
                if space != "version":
                    wrong.append(f"{full(space, name)}: TensorFlow has no such name")
                continue
            expected = theirs[space][name]
            if parameters is None or expected is None or parameters == expected:
                continue
            if not set(expected) & {"args", "kwargs"}:  # TensorFlow's own wrapper hides the names
                wrong.append(f"{full(space, name)}: TensorFlow {expected}, replicax {parameters}")
    assert not wrong, "\n" + "\n".join(wrong)
