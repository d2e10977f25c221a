"""Files of Keras: those of its callbacks in a job of several workers, and weights that Keras 2 saved on TensorFlow.

Of the workers that give the same path, one writes there. All of them save, since state that differs between the
replicas is reduced by all; the others save to a temporary folder. On a machine that does not share the folder with the
worker that writes, that file is moved to the path.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from typing import TYPE_CHECKING

import jax

from replicax._base import planning, thread_state
from replicax._base.atomic_files import Artifact, make_folders, replacing
from replicax._base.foreign_state import Original, wrap
from replicax._base.types import Tree
from replicax._checkpoint import tensor_bundle
from replicax._checkpoint.checkpoint import Checkpoint
from replicax._integrations.keras.fit import strategy_of
from replicax._job import exchange
from replicax._tracing.protocols import worker_of

if TYPE_CHECKING:
    import keras


def join() -> None:
    """Changes the two callbacks that save models; a program's own calls of `save` are only refused in plans."""
    import keras
    from keras.src.utils import file_utils

    wrap(file_utils, "makedirs", _makedirs)
    for callback in (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore):
        wrap(callback, "_save_model", _by_all)
    wrap(keras.callbacks.BackupAndRestore, "on_train_end", _first_one_then_the_others)
    for name in ("save", "save_weights"):
        wrap(keras.Model, name, _one_for_all)
    wrap(keras.Model, "load_weights", _from_tensorflow_too)


def _is_of_a_job(model: keras.Model) -> bool:
    strategy = strategy_of(model)
    return strategy is not None and worker_of(strategy).size > 1


def _paths_of_all(path: str, message: str = "") -> list[tuple[str, str]]:
    """Returns the paths and messages of all workers."""
    texts = exchange.all_gather(f"the file {path}\n{message}", "keras files")
    return [(text.partition("\n")[0], text.partition("\n")[2]) for text in texts]


def _first_with(path: str) -> int:
    """Returns the first worker that has the same path."""
    paths = [other for other, _ in _paths_of_all(path)]
    return paths.index(paths[jax.process_index()])


def _stamp(path: str) -> str:
    if not os.path.exists(path):
        return ""
    found = os.stat(path)
    return f"{found.st_size} {found.st_mtime_ns}"


def _by_all(save: Original, callback: keras.callbacks.Callback, /, *args: object, **kwargs: object) -> Tree:
    with thread_state.entered(keras_saves_by_all=_is_of_a_job(callback.model)):
        return save(callback, *args, **kwargs)


def _makedirs(make: Original, path: str) -> None:
    """Makes a folder that another worker may be making too."""
    by_all = thread_state.current.keras_saves_by_all
    with contextlib.suppress(FileExistsError) if by_all else contextlib.nullcontext():
        make(path)


def _one_for_all(
    save: Original, model: keras.Model, /, filepath: str | os.PathLike[str], *args: object, **kwargs: object
) -> None:
    planning.refuse_saving("A Keras model's save or save_weights")
    if not thread_state.current.keras_saves_by_all:
        save(model, filepath, *args, **kwargs)
        return
    path = os.path.abspath(os.fspath(filepath))
    first, me = _first_with(path), jax.process_index()
    if first == me:
        save(model, filepath, *args, **kwargs)
        _paths_of_all(path, _stamp(path))
        return
    with tempfile.TemporaryDirectory() as folder:
        aside = os.path.join(folder, os.path.basename(path))
        save(model, aside, *args, **kwargs)
        if _paths_of_all(path)[first][1] != _stamp(path):  # the same name on another machine's disk
            make_folders(os.path.dirname(path))
            with replacing(path, Artifact("Keras file")) as new:
                shutil.move(aside, new)


def _first_one_then_the_others(
    end: Original, callback: keras.callbacks.Callback, logs: dict[str, Tree] | None = None
) -> None:
    """Ends a backup on the first worker of a folder, which removes it, and then on the others, which find it gone."""
    if not _is_of_a_job(callback.model):
        end(callback, logs)
        return
    path = os.path.abspath(os.fspath(callback.backup_dir))
    first = _first_with(path) == jax.process_index()  # and all have written what goes into it
    if first:
        end(callback, logs)
    _paths_of_all(path)
    if not first:
        end(callback, logs)


def _from_tensorflow_too(
    load: Original, model: keras.Model, /, filepath: str | os.PathLike[str], *args: object, **kwargs: object
) -> Tree:
    """Loads weights; those of a checkpoint of TensorFlow, as Keras 2 saved them, by the names of layers."""
    if tensor_bundle.prefix_at(os.fspath(filepath)) is None:
        return load(model, filepath, *args, **kwargs)
    if args or any(kwargs.values()):
        raise ValueError(
            f"{filepath} is a checkpoint of TensorFlow, whose weights are loaded by the names of layers, without "
            f"options; got {', '.join(kwargs) or 'positional ones'}."
        )
    return Checkpoint(model).read(filepath).assert_nontrivial_match()
