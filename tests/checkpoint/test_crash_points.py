"""Whenever a process that saves is killed, there is something whole on the disk, as new as the last call that returned.

Each way to save runs under `crash_points`, which copies the folder before system calls that change it, and the newest
is restored from the copies: here at the calls that change names, and at one in twelve of the others. `python
scripts/storage.py` restores at all of them, after more saves, saves again in each copy, and prints how many there were.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import crash_points
import pytest
from strategies import WORKERS

import replicax as rx

pytestmark = pytest.mark.skipif(WORKERS > 1, reason="no matter of jobs")

HERE = Path(__file__).parents[1]
Dataset = rx.data.Dataset
SAVES = int(os.environ.get("REPLICAX_CRASH_SAVES", "2"))
ALL = "REPLICAX_CRASH_SAVES" in os.environ
v = rx.Variable(0.0)


def checkpoint():
    v.assign(-1.0)
    return rx.train.Checkpoint(v=v)


def read(path):
    """The value that was written at a path; None where nothing was."""
    try:
        checkpoint().read(path).assert_consumed()
    except FileNotFoundError:
        return None
    return float(v)


def written(folder):
    return read(folder / "model")


def written_after_a_kill(folder):
    return read(folder / "ckpt-1")


def written_over_damage(folder):
    """None while the damaged checkpoint is at the path, where there is always one. The user's file is kept."""
    assert list(folder.rglob("mine")), "the user's file is gone"
    try:
        checkpoint().read(folder / "model").assert_consumed()
    except rx.CheckpointError as error:
        assert "replicax.json cannot be read" in str(error)
        return None
    return float(v)


def saved(folder):
    one = checkpoint()
    path = rx.train.latest_checkpoint(folder)
    return None if path is None else (one.restore(path).assert_consumed(), float(v))[1]


def managed(folder):
    manager = rx.train.CheckpointManager(checkpoint(), folder, 2)
    return None if manager.restore_or_initialize() is None else float(v)


def saved_dataset(folder):
    try:
        loaded = list(Dataset.load(folder / "saved").as_numpy_iterator())
    except FileNotFoundError:
        return None
    assert [int(i) for i, _ in loaded] == [0, 1, 2, 3]
    (value,) = {int(value) for _, value in loaded}
    return value


def kept(keep):
    """What a pass yields, and None if the elements were made anew for that."""

    def value(folder):
        made = []
        dataset = Dataset.range(4).map(lambda i: made.append(1) or i * 0 + 1)
        _ = dataset.element_spec
        made.clear()
        assert [int(value) for value in keep(dataset, folder)] == [1, 1, 1, 1] and len(made) in (0, 4)
        return None if made else 1

    return value


RESTORE = {  # each gives the value that was saved last, or None
    "write": written,
    "write after a kill": written_after_a_kill,
    "write over damage": written_over_damage,
    "save": saved,
    "manager": managed,
    "Dataset.save": saved_dataset,
    "cache": kept(lambda dataset, folder: dataset.take(4).cache(str(folder / "cache"))),
    "snapshot": kept(lambda dataset, folder: dataset.take(4).snapshot(str(folder / "snapshot"))),
}


def save_again(kind, folder):
    """Goes on after the kill: saves 99, and finds it, and nothing of what was unfinished."""
    if kind in ("cache", "snapshot"):
        RESTORE[kind](folder)  # a pass that makes it, if it is not there
    elif kind == "Dataset.save":
        Dataset.range(4).map(lambda i: i * 0 + 99).enumerate().save(folder / "saved")
    elif kind == "save":
        one = checkpoint()
        one.restore(rx.train.latest_checkpoint(folder))
        v.assign(99.0)
        one.save(folder / "ckpt")
    elif kind == "manager":
        manager = rx.train.CheckpointManager(checkpoint(), folder, 2)
        manager.restore_or_initialize()
        v.assign(99.0)
        manager.save()
    else:
        one = checkpoint()
        v.assign(99.0)
        one.write(folder / ("ckpt-1" if kind == "write after a kill" else "model"))
    again = kind not in ("cache", "snapshot")
    assert RESTORE[kind](folder) == (99 if again else 1)
    if again:
        assert not [name for name in os.listdir(folder) if name.startswith(".replicax")]
    if kind == "manager":
        assert len([name for name in os.listdir(folder) if name.startswith("ckpt-")]) <= 2


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    """The folder of copies, and for each what was going on."""
    if not crash_points.CAN_TRACE:
        pytest.skip("processes are traced on Linux, on x86-64 and aarch64")
    out = tmp_path_factory.mktemp("points")
    programs = [HERE / "crash_points.py", out, 1 if ALL else 12, HERE / "crash_program.py", out, SAVES]
    environment = {**os.environ, "REPLICAX_VIRTUAL_DEVICES": "CPU:1"}  # which has fewer threads
    done = subprocess.run(
        [sys.executable, *map(str, programs)], env=environment, timeout=600, check=False, capture_output=True, text=True
    )
    if done.returncode == crash_points.REFUSED:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return out / "points", [json.loads(line) for line in (out / "points.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_a_killed_process_leaves_a_complete_checkpoint_as_new_as_its_last_save(points):
    folder, notes = points
    count, fresh = collections.Counter(), collections.Counter()
    warnings.simplefilter("ignore")  # of lists of checkpoints that are not there yet
    for number, note in enumerate(notes):
        kind = note["way"].removesuffix(", two renames").partition(",")[0]
        where = f"{note}, {folder / str(number)}"
        try:
            value = RESTORE[kind](folder / str(number))
            assert (0 if value is None else value) >= note["returned"], f"{where}: restored {value}"
            if kind == "write after a kill":
                assert value is not None, where
            if ALL or number % 15 == 0:
                save_again(kind, folder / str(number))
        except Exception as error:
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
        count[note["way"]] += 1
        fresh[note["way"]] += value is not None
    assert len(count) == 18 and all(fresh.values()) and min(count.values()) > 5, count
    if "REPLICAX_FIGURES" in os.environ:
        with open(os.environ["REPLICAX_FIGURES"], "a", encoding="utf-8") as figures:
            for way, all_of_it in count.items():
                was = {"restored": fresh[way], "before there was anything": all_of_it - fresh[way]}
                figures.write(json.dumps([f"kills: {way}", was]) + "\n")
