"""How many files of replicax a call of a compiled step enters, which are those that a reader of a call has to open."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "files_entered.py"


def load_script():
    spec = importlib.util.spec_from_file_location("files_entered", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("step", ["plain", "training", "nnx"])
def test_a_call_of_a_compiled_step_enters_few_files(step):
    if step == "nnx":
        pytest.importorskip("flax")
    script = load_script()
    first, later = script.files_of(script.STEPS[step]())
    assert "_engine/program.py" in first & later and "_engine/compiled.py" in first - later
    most_first, most_later = script.LIMITS[step]
    assert len(first) <= most_first, sorted(first)
    assert len(later) <= most_later, sorted(later)
