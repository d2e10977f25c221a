"""How tests evaluate expressions under TensorFlow and under `replicax.tf`, and compare the results."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import programs
import pytest
from recorded import from_tensorflow, sample, selected

PART = 150  # expressions or examples that a process evaluates, so that it stays far below its time limit


class Results(NamedTuple):
    """Results of the same expressions, by the expressions."""

    tensorflow: Mapping[str, Any]
    replicax: Mapping[str, Any]


class LazyResults(dict[str, Any]):
    """Results by name, computed part by part: looking up a name computes the results of its part.

    Args:
        names: all names.
        compute: returns the results of a part; it is called with the part's number and names.
    """

    def __init__(self, names: Sequence[str], compute: Callable[[int, Sequence[str]], Mapping[str, Any]]):
        super().__init__()
        self._names, self._compute = list(names), compute

    def __missing__(self, name: str) -> Any:
        part = self._names.index(name) // PART
        self.update(self._compute(part, self._names[part * PART : (part + 1) * PART]))
        return self[name]


class Expressions:
    """Expressions of a record, and the script that evaluates them.

    Args:
        record: the name of the record in tests/recorded.
        script: the script, which is called with the module, a JSON file of expressions and the file of the results.
        texts: for each expression all text that its result depends on.
        arguments: further arguments of the script.
        env: changes to the environment in which replicax evaluates.
    """

    def __init__(
        self,
        record: str,
        script: Path,
        texts: Mapping[str, str],
        arguments: Sequence[object] = (),
        env: Mapping[str, str | None] | None = None,
    ):
        self.record, self.script, self.texts, self.arguments = record, script, dict(texts), arguments
        self.all, self.env = list(texts), env or {}

    def evaluate(self, module: str, expressions: Sequence[str], folder: Path, python: str = sys.executable) -> Any:
        """Return the results of the script, which runs in a process of an interpreter."""
        (folder / "expressions.json").write_text(json.dumps(list(expressions)), encoding="utf-8")
        arguments = [module, folder / "expressions.json", folder / "results.json", *self.arguments]
        theirs = {"KERAS_BACKEND": None, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
        ours = {"REPLICAX_VIRTUAL_DEVICES": "CPU:2", **self.env}
        programs.run_well(
            self.script,
            arguments,
            folder=folder,
            timeout=230.0,
            env=theirs if module == "tensorflow" else ours,
            python=python,
            imports="replicax.tf",
        )
        return json.loads((folder / "results.json").read_text(encoding="utf-8"))

    def live(self, request: pytest.FixtureRequest) -> Callable[[Sequence[str]], Any]:
        """Return a function that evaluates expressions under TensorFlow."""
        folders = request.getfixturevalue("tmp_path_factory")
        return lambda expressions: self.evaluate(
            "tensorflow", expressions, folders.mktemp("tensorflow"), request.getfixturevalue("tensorflow_python")
        )

    def results(self, request: pytest.FixtureRequest) -> Results:
        """Return the results of the expressions of the tests that run."""
        folders, once = (request.getfixturevalue(name) for name in ("tmp_path_factory", "once"))
        chosen = selected(request, "expression")

        def ours(number: int, part: Sequence[str]) -> Mapping[str, Any]:
            evaluate = lambda: self.evaluate("replicax.tf", part, folders.mktemp("replicax"))  # noqa: E731
            return once(f"{self.record}-{number}", evaluate)

        return Results(from_tensorflow(self.record, self.texts, self.live(request), chosen), LazyResults(chosen, ours))

    def sample(self, request: pytest.FixtureRequest) -> Results:
        """Return recorded results of some expressions, and what TensorFlow gives for them now."""
        some = sample(self.all)
        return Results(from_tensorflow(self.record, self.texts, self.live(request), some), self.live(request)(some))


def difference(expected: Any, got: Any, where: str = "", *, rel: float = 2e-3, abs: float = 2e-5) -> str | None:
    """Return the first difference of two results, or None; floating-point numbers may differ a little."""
    if isinstance(expected, float) and isinstance(got, (int, float)) and not isinstance(got, bool):
        same = math.isclose(expected, got, rel_tol=rel, abs_tol=abs) or (math.isnan(expected) and math.isnan(got))
        return None if same else f"{where}: TensorFlow {expected}, replicax {got}"
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        pairs = [(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(expected, got))]
    elif isinstance(expected, dict) and isinstance(got, dict) and set(expected) == set(got):
        pairs = [(f"{where}.{key}", expected[key], got[key]) for key in expected]
    elif expected == got and type(expected) is type(got):
        return None
    else:
        return f"{where}: TensorFlow {expected}, replicax {got}"
    differences = (difference(a, b, place, rel=rel, abs=abs) for place, a, b in pairs)
    return next((text for text in differences if text), None)
