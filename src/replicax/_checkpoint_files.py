"""Checkpoints on disk: folders that Orbax writes, and the small file beside them that names them in order.

To what Orbax writes a record is added: the objects that the arrays belong to, and a checksum of each file, so that a
damaged checkpoint is known. It is all written under another name and renamed, so that a path has a whole checkpoint or
none.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import uuid
import warnings
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from replicax._errors import CheckpointError
from replicax._quiet import without_logs

_FORMAT = 1
_RECORD = "replicax.json"  # the record in a checkpoint's folder
STATE = "checkpoint"  # the name of the file that names the checkpoints of a folder


class Saved(NamedTuple):
    """What a checkpoint has: the graph's nodes, each with its children's numbers and its array's key; the arrays."""

    nodes: list[dict[str, Any]]
    arrays: dict[str, np.ndarray]
    token: str  # which call has written it


def _orbax() -> Any:
    """Orbax's arguments, and its checkpointer for this process by itself, whatever job it is in."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            "Checkpoints are written by Orbax. Install it: pip install 'replicax[checkpoint]'."
        ) from error
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"replicax{me}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    if me:
        registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, _array_writer(ocp)))
        with without_logs("absl", "No jax.Array in TypeHandlerRegistry"):
            handler = ocp.PyTreeCheckpointHandler(
                use_ocdbt=False, type_handler_registry=registry, multiprocessing_options=alone
            )
    return ocp.args, ocp.Checkpointer(handler, multiprocessing_options=alone)


def _array_writer(ocp: Any) -> Any:
    """What writes arrays in the processes of a job but the first, where Orbax's own handler leaves numpy's out."""
    import tensorstore

    class ArrayWriter(ocp.type_handlers.NumpyHandler):
        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
            for value, info in zip(values, infos):
                file = {"driver": "file", "path": os.path.join(info.parent_dir, info.name)}
                store = await tensorstore.open(
                    {"driver": "zarr", "kvstore": file}, create=True, dtype=value.dtype, shape=value.shape
                )
                await store.write(value)
            return []

    return ArrayWriter()


def write(path: str, saved: Saved) -> None:
    """Writes a checkpoint at `path`, in place of one that is there.

    Raises:
        FileExistsError: there is something else.
    """
    if os.path.lexists(path) and not os.path.isdir(path):
        raise FileExistsError(f"A checkpoint is a folder, and {path} is a file. Remove it or choose another path.")
    args, checkpointer = _orbax()
    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    for left in glob.glob(glob.escape(path) + ".unfinished-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    unfinished = f"{path}.unfinished-{saved.token}"
    stored = {key: array for key, array in saved.arrays.items() if array.size}  # Orbax takes no empty ones
    try:
        with contextlib.closing(checkpointer):
            if stored:
                with without_logs("absl", "Skipping merge of OCDBT checkpoints"):
                    checkpointer.save(unfinished, args.PyTreeSave(stored))
        os.makedirs(unfinished, exist_ok=True)
        with open(os.path.join(unfinished, _RECORD), "w", encoding="utf-8") as file:
            json.dump(_recorded_of(saved, _checksums(unfinished)), file)
        _put(unfinished, path)
    except BaseException:
        for left in glob.glob(glob.escape(unfinished) + "*"):
            shutil.rmtree(left, ignore_errors=True)
        raise


def _put(unfinished: str, path: str) -> None:
    """Renames a folder, in place of one that is there, which stays where this fails."""
    before = f"{path}.unfinished-{uuid.uuid4().hex}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, before)
    try:
        os.rename(unfinished, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.rename(before, path)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _recorded_of(saved: Saved, files: dict[str, int]) -> dict[str, Any]:
    arrays = {key: {"shape": list(array.shape), "dtype": array.dtype.name} for key, array in saved.arrays.items()}
    content = {"format": _FORMAT, "token": saved.token, "nodes": saved.nodes, "arrays": arrays, "files": files}
    return {"content": content, "digest": _digest(content)}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _checksums(folder: str) -> dict[str, int]:
    """The checksum of each file in a folder but the record, by its path there."""
    found = {}
    for inner, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(inner, name)
            if (where := os.path.relpath(path, folder)) != _RECORD:
                found[where] = _checksum(path)
    return found


def _checksum(path: str) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def check(path: str) -> dict[str, Any]:
    """The record of a checkpoint, if all of its files are as they were written.

    Raises:
        FileNotFoundError: nothing is there.
        CheckpointError: it is damaged, or of another format.
    """
    if not os.path.isdir(path):
        if os.path.exists(path + ".index"):
            raise CheckpointError(
                f"{path} is a checkpoint in TensorFlow's own format, which replicax does not read. Load it in "
                "TensorFlow, and assign the values to variables here."
            )
        raise FileNotFoundError(
            f"There is no checkpoint at {path}. Is the number at its end missing, as the '-1' of 'path/to/ckpt-1'?"
        )
    try:
        content = _record_at(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} was not written by replicax: it has no {_RECORD}. Orbax may be able to read it."
        ) from error
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise _damaged(path, f"{_RECORD} cannot be read ({error})") from error
    if content["format"] != _FORMAT:
        raise CheckpointError(f"{path} has format {content['format']}, which a newer replicax writes and reads.")
    for name, checksum in content["files"].items():
        try:
            if _checksum(os.path.join(path, name)) != checksum:
                raise _damaged(path, f"the checksum of {name} does not fit")
        except OSError as error:
            raise _damaged(path, f"{name} cannot be read ({error})") from error
    return content


def _damaged(path: str, what: str) -> CheckpointError:
    return CheckpointError(f"The checkpoint {path} is damaged: {what}. Restore an older one.")


def _record_at(path: str) -> dict[str, Any]:
    with open(os.path.join(path, _RECORD), encoding="utf-8") as file:
        record = json.load(file)
    if _digest(record["content"]) != record["digest"]:
        raise ValueError("its checksum does not fit")
    return record["content"]


def token_at(path: str) -> str | None:
    """Which call has written the checkpoint at `path`; None where there is no record."""
    try:
        return _record_at(path)["token"]
    except (ValueError, KeyError, TypeError, OSError):
        return None


def read(path: str) -> Saved:
    """A checkpoint's content; raises what `check` does."""
    content = check(path)
    stored: dict[str, Any] = {}
    if any(0 not in kind["shape"] for kind in content["arrays"].values()):
        args, checkpointer = _orbax()
        with contextlib.closing(checkpointer):
            stored = checkpointer.restore(os.path.abspath(path), args.PyTreeRestore())
    arrays = {}
    for key, kind in content["arrays"].items():
        array = np.asarray(stored[key] if key in stored else np.zeros(kind["shape"]), jnp.dtype(kind["dtype"]))
        arrays[key] = array.reshape(kind["shape"])
    return Saved(content["nodes"], arrays, content["token"])


def remove(path: str) -> None:
    """Deletes a checkpoint; one that is only half deleted is none any more."""
    gone = f"{path}.unfinished-{uuid.uuid4().hex}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


class State(NamedTuple):
    """The checkpoints of a folder, the oldest first, with the times of their making."""

    paths: dict[str, float]
    last_preserved: float | None = None


def record(directory: str, state: State, name: str = STATE) -> None:
    """Writes which checkpoints there are, in place of what is there. Names are kept relative to the folder."""
    content = {
        "model_checkpoint_path": next((_relative(path, directory) for path in reversed(state.paths)), None),
        "all_model_checkpoint_paths": [_relative(path, directory) for path in state.paths],
        "all_model_checkpoint_timestamps": list(state.paths.values()),
        "last_preserved_timestamp": state.last_preserved,
    }
    file = os.path.join(directory, name)
    unfinished = f"{file}.unfinished"
    with open(unfinished, "w", encoding="utf-8") as out:
        json.dump(content, out, indent=1)
    os.replace(unfinished, file)


def _relative(path: str, directory: str) -> str:
    inside = os.path.dirname(os.path.abspath(path)) == os.path.abspath(directory)
    return os.path.basename(path) if inside else os.path.abspath(path)


def recorded(directory: str, name: str = STATE) -> State | None:
    """What `record` has written; None where it has not. Where its file is damaged, a warning, and what is there."""
    file = os.path.join(directory, name)
    try:
        with open(file, encoding="utf-8") as text:
            told = json.load(text)
        paths = [os.path.join(directory, path) for path in told["all_model_checkpoint_paths"]]
        times = [float(stamp) for stamp in told["all_model_checkpoint_timestamps"]]
        return State(dict(zip(paths, times, strict=True)), told["last_preserved_timestamp"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        if glob.glob(os.path.join(glob.escape(directory), "*.index")):
            raise CheckpointError(
                f"{directory} has checkpoints in TensorFlow's own format, which replicax does not read. Choose another "
                "folder."
            ) from error
        warnings.warn(f"{file} is damaged ({error}); the checkpoints beside it are looked for.", stacklevel=3)
    found = [os.path.dirname(path) for path in glob.glob(f"{glob.escape(directory)}/*-*/{_RECORD}")]
    whole = [path for path in found if ".unfinished-" not in path]
    return State({path: os.path.getmtime(path) for path in sorted(whole, key=os.path.getmtime)})


def latest_checkpoint(checkpoint_dir: str, latest_filename: str | None = None) -> str | None:
    """The newest checkpoint of a folder that is whole; a warning names newer ones that are not.

    Reads a checkpoint through, to see that its checksums fit.

    Args:
        checkpoint_dir: the folder of the paths given to `Checkpoint.save`.
        latest_filename: the name of the file that names the checkpoints, by default `"checkpoint"`.

    Returns:
        A path for `Checkpoint.restore`; None where there is none, which `restore` takes too.

    Raises:
        CheckpointError: the folder has TensorFlow's own checkpoints.

    >>> import tempfile
    >>> import replicax as rx
    >>> rx.train.latest_checkpoint(tempfile.mkdtemp()) is None
    True
    """
    directory = os.fspath(checkpoint_dir)
    state = recorded(directory, latest_filename or STATE)
    return newest_whole(state.paths) if state is not None else None


def newest_whole(paths: Any) -> str | None:
    """The last of these paths with a whole checkpoint; a warning names each one before it that is damaged."""
    for path in reversed(list(paths)):
        try:
            check(path)
            return path
        except (CheckpointError, FileNotFoundError) as error:
            warnings.warn(f"A checkpoint is passed over for an older one. {error}", stacklevel=3)
    return None
