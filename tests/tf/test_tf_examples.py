"""The examples of the reference of `replicax.tf`: every public name has one, and they print what the files say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "tf_examples.py"
FILES = sorted((ROOT / "docs" / "reference" / "examples").glob("*.txt"))
# Two parts of about the same time, which can run at the same time.
PARTS = [[ROOT / "docs" / "reference" / "examples" / "tf.txt"], [file for file in FILES if file.name != "tf.txt"]]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs the script, which runs examples in a process of their own; XLA leaves its slow passes out."""
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    env = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize("files", PARTS, ids=["tf", "others"])
def test_examples_print_what_the_files_say(files: Sequence[Path]) -> None:
    done = run(*files)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_public_name_has_an_example() -> None:
    done = run("--names")
    assert done.returncode == 0, done.stdout + done.stderr


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


@pytest.mark.parametrize("files", PARTS, ids=["tf", "others"])
def test_tensorflow_prints_the_same(files: Sequence[Path], tensorflow_python: str) -> None:
    done = run("--tensorflow", tensorflow_python, *files)
    assert done.returncode == 0, done.stdout + done.stderr


def test_docstrings_print_what_they_say(run_tf):
    """The doctests in `replicax.tf`, which the collection of doctests leaves out."""
    run_tf("""
import ast, doctest, pathlib

runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
for path in sorted(pathlib.Path(tf.__file__).parent.rglob("*.py")):
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if ">>> " in text else ():
        if isinstance(node, documented) and (doc := ast.get_docstring(node)):
            name = f"{path.name}:{getattr(node, 'name', '')}"
            runner.run(doctest.DocTestParser().get_doctest(doc, {"tf": tf, "np": np}, name, str(path), 0))
assert runner.tries and not runner.failures, (runner.tries, runner.failures)
""")
