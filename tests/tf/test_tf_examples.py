"""The examples of the reference of `replicax.tf`: every public name has one, and they print what the files say."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import programs
import pytest
from evaluation import LazyResults
from recorded import selected

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "tf_examples.py"
FILES = sorted((ROOT / "docs" / "reference" / "examples").glob("*.txt"))

spec = importlib.util.spec_from_file_location("tf_examples", SCRIPT)
assert spec is not None and spec.loader is not None
tf_examples = importlib.util.module_from_spec(spec)
sys.modules["tf_examples"] = tf_examples  # dataclasses look for their module
spec.loader.exec_module(tf_examples)
EXAMPLES = tf_examples.load(FILES)


@pytest.fixture(scope="module")
def outputs(request, once, tmp_path_factory):
    """What the steps of the examples print whose tests run."""

    def run(names: Sequence[str]) -> dict[str, list[str]]:
        folder = tmp_path_factory.mktemp("examples")
        (folder / "chosen.json").write_text(json.dumps(names), encoding="utf-8")
        files = {"--result": folder / "outputs.json", "--chosen": folder / "chosen.json"}
        arguments = ["--run", "replicax.tf", *(part for pair in files.items() for part in pair), *FILES]
        env = {"REPLICAX_VIRTUAL_DEVICES": "CPU:2"}
        programs.run_well(SCRIPT, arguments, folder=folder, timeout=230.0, env=env, imports="replicax.tf")
        return json.loads((folder / "outputs.json").read_text(encoding="utf-8"))

    return LazyResults(selected(request, "name"), lambda part, names: once(f"examples-{part}", lambda: run(names)))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", list(EXAMPLES))
def test_an_example_prints_what_its_file_says(name: str, outputs: dict[str, list[str]]) -> None:
    assert not tf_examples.differences(EXAMPLES[name], outputs[name])


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the script, which runs examples in a process of their own."""
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_every_public_name_has_an_example() -> None:
    done = run("--names")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
def test_an_example_that_prints_something_else_is_found(tmp_path: Path) -> None:
    file = tmp_path / "tf.txt"
    file.write_text(
        "## tf.square\n>>> tf.square(3)\n<tf.Tensor: shape=(), dtype=int32, numpy=9>\n\n"
        "## tf.sqrt\nText.\n>>> tf.sqrt(2.0).numpy()\nnp.float32(1.41422)\n>>> 1 / 0\n3\n",
        encoding="utf-8",
    )
    done = run(file)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stdout and "tf.square" not in done.stdout, done.stdout
    assert "1 in all" in done.stderr, done.stdout  # numbers may be a little off
    assert run("--write", file).returncode == 0
    assert "ZeroDivisionError: division by zero" in file.read_text(encoding="utf-8")
    assert run(file).returncode == 0


def test_tensorflow_prints_the_same(tensorflow_python: str) -> None:
    done = run("--tensorflow", tensorflow_python)
    assert done.returncode == 0, done.stdout + done.stderr


def test_docstrings_print_what_they_say(run_tf):
    """The doctests in `replicax.tf`, which the collection of doctests leaves out."""
    run_tf("""
import ast, doctest, pathlib

runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
for path in sorted(pathlib.Path(tf.__file__).parent.rglob("*.py")):
    text = path.read_text(encoding="utf-8")
    if ">>> " not in text or "_programs" in path.parts:  # test_compare.py runs the examples there
        continue
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and (doc := ast.get_docstring(node)):
            name = f"{path.name}:{getattr(node, 'name', '')}"
            runner.run(doctest.DocTestParser().get_doctest(doc, {"tf": tf, "np": np}, name, str(path), 0))
assert runner.tries and not runner.failures, (runner.tries, runner.failures)
""")
