"""What Keras's callbacks save in a job of several workers: of those that give the same path, one writes there.

All of them go through the saving, since state that differs between the replicas is put together by all; the others do
so aside. On a machine that does not share the folder with the one that writes, the path gets a copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import jax

from replicax._base.atomic_files import Kind, make_folders, replacing
from replicax._base.foreign_state import around
from replicax._integrations.keras.fit import strategy_of
from replicax._job import exchange


class _Saving(threading.local):
    def __init__(self) -> None:
        self.by_all = False  # whether a callback saves, and so all workers do


_saving = _Saving()


def join() -> None:
    """Changes the two callbacks that save models; a model that the program itself saves is saved as ever."""
    import keras
    from keras.src.utils import file_utils

    around(file_utils, "makedirs", _makedirs)
    for callback in (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore):
        around(callback, "_save_model", _by_all)
    around(keras.callbacks.BackupAndRestore, "on_train_end", _first_one_then_the_others)
    for name in ("save", "save_weights"):
        around(keras.Model, name, _one_for_all)


def _is_of_a_job(model: Any) -> bool:
    strategy = strategy_of(model)
    return strategy is not None and strategy.extended._worker.size > 1


def _everyones(path: str, told: str = "") -> list[tuple[str, str]]:
    """The paths of all workers, and what they tell."""
    texts = exchange.everyones(f"the file {path}\n{told}", "keras files")
    return [(text.partition("\n")[0], text.partition("\n")[2]) for text in texts]


def _first_with(path: str) -> int:
    """The first worker that has the same path."""
    paths = [other for other, _ in _everyones(path)]
    return paths.index(paths[jax.process_index()])


def _stamp(path: str) -> str:
    if not os.path.exists(path):
        return ""
    found = os.stat(path)
    return f"{found.st_size} {found.st_mtime_ns}"


def _by_all(save: Callable[..., Any], callback: Any, *args: Any, **kwargs: Any) -> Any:
    before, _saving.by_all = _saving.by_all, _is_of_a_job(callback.model)
    try:
        return save(callback, *args, **kwargs)
    finally:
        _saving.by_all = before


def _makedirs(make: Callable[..., Any], path: Any) -> None:
    """Makes a folder, which several workers find missing at the same time."""
    with contextlib.suppress(FileExistsError) if _saving.by_all else contextlib.nullcontext():
        make(path)


def _one_for_all(save: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    if not _saving.by_all:
        return save(model, filepath, *args, **kwargs)
    path = os.path.abspath(os.fspath(filepath))
    first, me = _first_with(path), jax.process_index()
    if first == me:
        save(model, filepath, *args, **kwargs)
        _everyones(path, _stamp(path))
        return
    with tempfile.TemporaryDirectory() as folder:
        aside = os.path.join(folder, os.path.basename(path))
        save(model, aside, *args, **kwargs)
        if _everyones(path)[first][1] != _stamp(path):  # the same name on another machine's disk
            make_folders(os.path.dirname(path))
            with replacing(path, Kind("Keras file")) as new:
                shutil.move(aside, new)


def _first_one_then_the_others(end: Callable[..., Any], callback: Any, logs: Any = None) -> Any:
    """The end of a backup, which removes its folder where it is there still."""
    if not _is_of_a_job(callback.model):
        return end(callback, logs)
    path = os.path.abspath(os.fspath(callback.backup_dir))
    first = _first_with(path) == jax.process_index()  # and all have written what goes into it
    if first:
        end(callback, logs)
    _everyones(path)
    if not first:
        end(callback, logs)
