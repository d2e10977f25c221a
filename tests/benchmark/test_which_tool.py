"""The page that compares tools shows the programs that are run, and its table says what was measured."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run():
    spec = importlib.util.spec_from_file_location("which_tool_run", ROOT / "benchmarks" / "which_tool" / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_programs_that_are_run(run):
    page = run.PAGE.read_text(encoding="utf-8")
    assert "strategy.run(replica_step" in page
    assert run.filled(page, None) == page, "Write the programs into it: benchmarks/which_tool/run.py --page"
    changed = page.replace("strategy.run(replica_step", "strategy.run(another_step")
    assert run.filled(changed, None) == page


def test_the_table_has_medians_of_the_rounds_of_the_tools_that_ran(run):
    steps = [{"first": 2.0, "step": ms, "cpu": 3 * ms, "loss": 0.5} for ms in (10.0, 40.0, 20.0)]
    results = {"rounds": {"replicax": steps}, "machine": "2 cores", "load": 1.5}
    _, _, row, _, machine = run.table(results).splitlines()
    lines = run.lines_of("with_replicax.py")
    assert row == f"| replicax | `with_replicax.py` | {lines} | 1 | 2.0 | 20.0 | 10.0, 40.0 | 60.0 | 0.500 |"
    assert machine == "2 cores; load of the machine: 1.5."
    assert 30 < lines < len((ROOT / "benchmarks/which_tool/with_replicax.py").read_text().splitlines())


def test_each_program_writes_down_its_steps(run):
    names = {path.name for path in (ROOT / "benchmarks" / "which_tool").glob("with_*.py")}
    assert names == {program.file for program in run.PROGRAMS}
    for name in names:
        text = (ROOT / "benchmarks" / "which_tool" / name).read_text(encoding="utf-8")
        assert text.count("record(") == 1, name
