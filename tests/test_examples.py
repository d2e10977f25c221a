"""The small examples run as commands, and come to what they should. (examples/digits.py has tests of its own.)"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def output_of(name: str, *arguments: str) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("REPLICAX_", "KERAS_"))}
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], env=env, capture_output=True, text=True, timeout=180
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.parametrize(
    "name, least",
    [("custom_training.py", 0.8), ("keras_fit.py", 0.8), ("tpu.py", 0.8), ("nnx.py", 0.8)],
)
def test_it_learns(name, least):
    accuracies = re.findall(r"test accuracy ([\d.]+)", output_of(name))
    assert float(accuracies[-1]) > least


def test_every_kind_of_input_gives_the_same_sum():
    sums = dict(re.findall(r"^(.*?): +([\d.]+)$", output_of("distributed_input.py"), re.MULTILINE))
    assert len(sums) == 6
    assert sums["a dataset of global batches"] == sums["a function of the worker"] == sums["a list of arrays"]
    assert sums["a list of arrays"] == sums["the sum of all rows by numpy"]
