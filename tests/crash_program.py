"""Saves in every way that there is, for `crash_points` to look at; see test_crash_points.py, which restores."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crash_points

import replicax as rx
from replicax._base import atomic_files as atomic

Dataset = rx.data.Dataset
v = rx.Variable(0.0)


ASYNC = rx.train.CheckpointOptions(enable_async=True)


def checkpoint() -> Any:
    return rx.train.Checkpoint(v=v)


def write(folder: Path, saves: int, options: Any = None) -> Callable[[int], Any]:
    one = checkpoint()
    return lambda number: one.write(folder / "model", options)


def save(folder: Path, saves: int, options: Any = None) -> Callable[[int], Any]:
    one = checkpoint()
    return lambda number: one.save(folder / "ckpt", options)


def manager(
    folder: Path, saves: int, max_to_keep: int, same: bool = False, options: Any = None
) -> Callable[[int], Any]:
    one = rx.train.CheckpointManager(checkpoint(), folder, max_to_keep)
    return lambda number: one.save(1 if same else None, options=options)


def dataset(number: int) -> Any:
    return Dataset.range(4).map(lambda i: i * 0 + number)


def saved_dataset(folder: Path, saves: int) -> Callable[[int], Any]:
    return lambda number: dataset(number).enumerate().save(str(folder / "saved"), shard_func=lambda i, _: i % 2)


def cache(folder: Path, saves: int) -> Callable[[int], Any]:
    return lambda number: list(dataset(number).cache(str(folder / "cache")))


def snapshot(folder: Path, saves: int) -> Callable[[int], Any]:
    return lambda number: list(dataset(number).snapshot(str(folder / "snapshot")))


def after_a_kill(folder: Path, saves: int) -> Callable[[int], Any]:
    """What a process has left that was killed between two renames, and another while it deleted."""
    staging = folder / ".replicax-unfinished-1"
    for name, value in [("old", 0.0), ("new", 0.5)]:
        v.assign(value)
        checkpoint().write(staging / name)
    (staging / "target").write_text("ckpt-1")
    deleted = folder / ".replicax-unfinished-2"
    shutil.copytree(staging / "old" / "d", deleted / "deleted")
    (deleted / "target").write_text("ckpt-0")
    one = checkpoint()
    return lambda number: one.write(folder / "ckpt-1")


def over_damage(folder: Path, saves: int) -> Callable[[int], Any]:
    """Writes over a checkpoint with a damaged record, in which there is a file of the user."""
    model = Path(checkpoint().write(folder / "model"))
    (model / "replicax.json").write_text("{")
    (model / "mine").touch()
    return lambda number: checkpoint().write(model)


OVER = {
    "write": write,
    "manager, the same number": functools.partial(manager, max_to_keep=2, same=True),
    "Dataset.save": saved_dataset,
    "write after a kill": after_a_kill,
    "write over damage": over_damage,
}
WAYS: dict[str, Callable[[Path, int], Callable[[int], Any]]] = {
    **OVER,
    "save": save,
    "manager, max_to_keep=1": functools.partial(manager, max_to_keep=1),
    "manager, max_to_keep=2": functools.partial(manager, max_to_keep=2),
    "write, asynchronous": functools.partial(write, options=ASYNC),
    "save, asynchronous": functools.partial(save, options=ASYNC),
    "manager, asynchronous": functools.partial(manager, max_to_keep=1, options=ASYNC),
    "cache": cache,
    "snapshot": snapshot,
    **{f"{name}, two renames": make for name, make in OVER.items()},
}


def times(name: str, saves: int) -> int:
    """How many times to save: one more where only the third is deleted for, and once what is done once."""
    once = name.startswith(("cache", "snapshot", "write over damage"))
    return 1 if once else saves + name.endswith("max_to_keep=2")


def main() -> None:
    """Save the numbers 1, 2, 3 ... in each way, and say after each which one is there."""
    out, saves = Path(sys.argv[1]), int(sys.argv[2])
    for name in ("write", "cache"):  # so that all is imported that is to be
        (folder := out / "before" / name).mkdir(parents=True)
        WAYS[name](folder, saves)(1)
    print("ready", flush=True)
    input()
    crash_points.stop_at_changes()
    exchange = atomic._renameat2
    for name, make in WAYS.items():
        atomic._renameat2 = None if name.endswith("two renames") else exchange
        (folder := out / "saved" / name).mkdir(parents=True)
        one = make(folder, saves)

        def returned(number: int, name: str = name, folder: Path = folder) -> None:
            (out / "next").write_text(json.dumps({"folder": str(folder), "way": name, "returned": number}))
            os.replace(out / "next", out / "now")

        returned(0)
        for number in range(1, times(name, saves) + 1):
            v.assign(number)
            one(number)
            returned(number - name.endswith("asynchronous"))  # it has waited for the save before
        checkpoint().sync()
        returned(times(name, saves))
        (folder / "end").touch()  # so that the last state is seen


if __name__ == "__main__":
    main()
