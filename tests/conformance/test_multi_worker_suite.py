"""The shared tests over MultiWorkerMirroredStrategy: every worker of a job runs them, in step with the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import Workers

TESTS = Path(__file__).parents[1]
# Files that have a test over all strategies, several processes among them: collecting the others would take seconds.
OVER_STRATEGIES = re.compile(r"^@(over|dealt)\((?!.*processes=1)", re.MULTILINE)
ACROSS_PROCESSES = re.compile(r"^@pytest.mark.across_processes$", re.MULTILINE)
# What these show does not depend on there being several processes, or another test shows it of them.
ELSEWHERE = {
    "test_checkpoint.py",  # test_checkpoint_workers.py has what a job of several needs
    "test_contexts.py",  # a context is a matter of threads
    "test_control_flow.py",  # of how a program is traced
    "test_tensorflow_checkpoints.py",  # of how files are read
    "test_keras.py",  # whose import takes long: examples/multi_worker.py and test_exact_resume.py train its models
    "test_uneven_replicas.py",  # test_multi_worker_input.py has uneven batches
}


def files_with(pattern: re.Pattern[str]) -> list[str]:
    """Return the test files that have a pattern and are not listed in `ELSEWHERE`."""
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if pattern.search(path.read_text(encoding="utf-8"))]
    # -k finds "multi_worker" in the names of files too.
    return [str(path) for path in files if "multi_worker" not in path.name and path.name not in ELSEWHERE]


# Every worker runs pytest. The strategy is made before the first test, as in a user's program.
PROGRAM = f"""
import os, sys
import pytest

class Job:
    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session):
        import strategies
        strategies.STRATEGIES["multi_worker"].make()

sys.path.insert(0, {str(TESTS)!r})
status = pytest.main(
    ["-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    + ["-k", os.environ["REPLICAX_SUITE_TESTS"], *os.environ["REPLICAX_SUITE_OPTIONS"].split("|")]
    + ["--rootdir", {str(TESTS.parent)!r}, "-c", {str(TESTS.parent / "pyproject.toml")!r}],
    plugins=[Job()],
)
sys.exit(int(status))
"""


# Of functions those that read datasets: the tests of variables, of optimizers and of `run` compile others.
EAGERLY = "multi_worker and not compiled and (dataset or iterator or uneven or not test_function.py)"
DIVIDED = "multi_worker and (test_mirrored_variables.py or test_optimizer.py) and not scatter"


def test_two_workers_pass_the_tests_that_cross_processes(tmp_path):
    """Collectives, input, aggregation and uneven batches, with two replicas in each worker, and in one way each."""
    run_suite(tmp_path, 2, "", 45, ["-m", "across_processes", *files_with(ACROSS_PROCESSES)])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "devices, tests, at_least, sharded",
    [(1, "multi_worker and compiled", 130, ""), (2, EAGERLY, 150, ""), (1, DIVIDED, 30, "1")],
    ids=["compiled", "eagerly", "sharded"],
)
def test_two_workers_pass_the_shared_tests(devices, tests, at_least, sharded, tmp_path):
    """Tests that are not of one way to run take part once, with two replicas in each worker."""
    run_suite(tmp_path, devices, tests, at_least, files_with(OVER_STRATEGIES), sharded)


def run_suite(tmp_path, devices, tests, at_least, options, sharded=""):
    """Check that two workers pass the same tests, and at least so many.

    Args:
        devices: the number of devices in each worker.
        tests: the tests, as `pytest -k` takes them; "" for all, of which each case runs in one way.
        at_least: the least number of tests.
        options: further arguments of pytest, among them the files.
        sharded: "1" to divide variables over the replicas.
    """
    env = {
        "REPLICAX_SUITE_TESTS": tests,
        "REPLICAX_SUITE_OPTIONS": "|".join(options),
        "REPLICAX_SUITE_WORKERS": "2",
        "REPLICAX_SUITE_SHARDED": sharded,
        "REPLICAX_SUITE_DEVICES": f"GPU:{devices}",
        "REPLICAX_VIRTUAL_DEVICES": f"GPU:{devices}",  # replicax is imported before conftest.py
        "REPLICAX_STEP_TIMEOUT": "120",  # a busy machine is no fault
        "REPLICAX_HEARTBEAT_TIMEOUT": "60",
        "REPLICAX_PREFLIGHT": "quiet",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # what they compile is small, and there is much of it
    }
    with Workers(tmp_path, 2, PROGRAM, devices=devices + 1, env=env) as workers:
        done = workers.join(timeout=500)
    assert all(worker.returncode == 0 for worker in done.values()), done[0].stdout[-6000:] + done[0].stderr[-3000:]
    said = [re.search(r"^(\d+) passed, \d+ deselected in ", done[i].stdout, re.MULTILINE) for i in done]
    passed = [int(found[1]) for found in said if found]  # none failed, none was skipped
    assert len(passed) == 2 and passed[0] == passed[1] >= at_least, [done[i].stdout[-500:] for i in done]
