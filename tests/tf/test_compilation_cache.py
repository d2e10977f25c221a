"""Where `replicax run-tf` keeps compiled programs, and that a program never fails for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replicax._base import compilation_cache

PROGRAM = """
import collections, warnings
warnings.simplefilter("error")
import jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
import numpy as np
import replicax as rx
print(float(rx.function(lambda x: x @ x)(np.ones([3, 3], np.float32))[0, 0]), end=" ")
print(events["cache_hits"] > 0, events["cache_misses"] > 0, jax.config.jax_compilation_cache_dir)
"""


@pytest.fixture
def run(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    unset = {"REPLICAX_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_DIR", "KERAS_BACKEND"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}

    def run(cache: Path, **variables: str) -> list[str]:
        command = [sys.executable, "-m", "replicax", "run-tf", str(program)]
        variables = {**environment, "XDG_CACHE_HOME": str(cache), **variables}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return run


@pytest.mark.thorough
@pytest.mark.processes
def test_a_second_run_compiles_nothing_whatever_has_become_of_the_files(run, tmp_path):
    cache = tmp_path / "new" / "cache"
    first = run(cache)
    folder = Path(first[-1])
    assert first[:-1] == ["3.0", "False", "True"] and folder.is_relative_to(cache / "replicax")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert run(cache)[:-1] == ["3.0", "True", "False"]
    for entry in folder.iterdir():
        entry.write_bytes(entry.read_bytes()[:50])  # as a full disk leaves it
    assert run(cache)[:-1] == ["3.0", "False", "True"]


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.processes
@pytest.mark.parametrize("trouble", ["a file in the way", "others may write"])
def test_a_folder_that_cannot_be_used_is_left_alone(run, tmp_path, trouble):
    cache = tmp_path / "cache"
    if trouble == "a file in the way":
        cache.write_text("")
    else:
        folder = Path(run(cache)[-1])
        folder.chmod(0o777)
    assert run(cache) == ["3.0", "False", "False", "None"]


@pytest.mark.thorough
@pytest.mark.processes
def test_what_the_user_has_set_stays(run, tmp_path):
    own = tmp_path / "own"
    assert run(tmp_path / "cache", JAX_COMPILATION_CACHE_DIR=str(own))[-1] == str(own)
    assert run(tmp_path / "cache", REPLICAX_COMPILATION_CACHE=str(own))[-1] == str(own)
    assert run(tmp_path / "cache", REPLICAX_COMPILATION_CACHE="off")[-1] == "None"
    assert not (tmp_path / "cache").exists()


def test_machines_of_another_kind_have_another_folder(monkeypatch):
    here = compilation_cache.default_folder()
    monkeypatch.setattr(compilation_cache, "_cpu_features", lambda: ["flags : fpu avx512f"])
    assert compilation_cache.default_folder().parent == here.parent and compilation_cache.default_folder() != here


def test_programs_that_were_not_used_for_longest_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation_cache, "LIMIT", 1000)
    for machine, number in (("a", 1), ("a", 2), ("b", 3), ("b", 4)):
        (tmp_path / machine).mkdir(exist_ok=True)
        path = tmp_path / machine / f"{number}-cache"
        path.write_bytes(bytes(300))
        os.utime(path, (number, number))
    compilation_cache._make_room(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["3-cache", "4-cache"]
    compilation_cache._make_room(tmp_path)
    assert len(list(tmp_path.glob("*/*"))) == 2
