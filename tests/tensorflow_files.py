"""The checkpoints that TensorFlow wrote, which `checkpoint/tensorflow_files/recorded` has."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "checkpoint" / "tensorflow_files"
RECORDED = HERE / "recorded"


@pytest.fixture(params=["recorded", pytest.param("live", marks=pytest.mark.tensorflow)])
def written(request, once, tmp_path_factory):
    """A folder of checkpoints that TensorFlow wrote."""
    if request.param == "recorded":
        return RECORDED
    python = request.getfixturevalue("tensorflow_python")
    folder = tmp_path_factory.mktemp("tensorflow")

    def write():
        command = [python, HERE / "write.py", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return str(folder)

    return Path(once("tensorflow_checkpoints", write))
