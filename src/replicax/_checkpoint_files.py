"""Checkpoints on disk: folders that Orbax writes, and the small file beside them that names them in order.

A folder has the arrays, and a record of the objects that they belong to with a checksum of each array, so that one that
is damaged is known. It is written under another name and renamed, so that a path has a whole checkpoint or none.
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

_FORMAT = 1
STATE = "checkpoint"  # the name of the file that names the checkpoints of a folder


class Saved(NamedTuple):
    """What a checkpoint has: the graph's nodes, each with its children's numbers and its array's key; the arrays."""

    nodes: list[dict[str, Any]]
    arrays: dict[str, np.ndarray]
    token: str  # which call has written it


def _handlers() -> Any:
    """Orbax, and its checkpointer for this process by itself, whatever job it is in."""
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
    handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(multiprocessing_options=alone))
    return ocp.args, ocp.Checkpointer(handler, multiprocessing_options=alone)


def write(path: str, saved: Saved) -> None:
    """Writes a checkpoint at `path`, in place of one that is there.

    Raises:
        FileExistsError: there is something else.
    """
    if os.path.lexists(path) and not os.path.isdir(path):
        raise FileExistsError(f"A checkpoint is a folder, and {path} is a file. Remove it or choose another path.")
    args, checkpointer = _handlers()
    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    for left in glob.glob(glob.escape(path) + ".unfinished-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    unfinished = f"{path}.unfinished-{saved.token}"
    stored = {key: array for key, array in saved.arrays.items() if array.size}  # Orbax takes no empty ones
    items = {"graph": args.JsonSave(_sealed(saved))}
    if stored:
        items["arrays"] = args.PyTreeSave(stored)
    try:
        with contextlib.closing(checkpointer):
            checkpointer.save(unfinished, args.Composite(**items))
        remove(path)
        os.rename(unfinished, path)
    except BaseException:
        for left in glob.glob(glob.escape(unfinished) + "*"):
            shutil.rmtree(left, ignore_errors=True)
        raise


def _sealed(saved: Saved) -> dict[str, Any]:
    described = {
        key: {"shape": list(array.shape), "dtype": array.dtype.name, "crc32": _checksum(array)}
        for key, array in saved.arrays.items()
    }
    content = {"format": _FORMAT, "token": saved.token, "nodes": saved.nodes, "arrays": described}
    return {"content": content, "digest": _digest(content)}


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read(path: str) -> Saved:
    """A checkpoint's content, all of it checked.

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
    args, checkpointer = _handlers()
    with contextlib.closing(checkpointer):
        try:
            content = _unsealed(checkpointer.restore(os.path.abspath(path), args.Composite(graph=args.JsonRestore())))
            described, stored = content["arrays"], {}
            if any(np.prod(what["shape"]) for what in described.values()):
                stored = checkpointer.restore(os.path.abspath(path), args.Composite(arrays=args.PyTreeRestore()))
                stored = stored["arrays"]
            arrays = {key: _checked(key, what, stored.get(key)) for key, what in described.items()}
        except Exception as error:  # whatever Orbax and TensorStore make of damaged files
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise CheckpointError(
                f"The checkpoint {path} is damaged, or was not written by replicax. Restore an older one. {text[:500]}"
            ) from error
    return Saved(content["nodes"], arrays, content["token"])


def _unsealed(restored: Any) -> dict[str, Any]:
    content = restored["graph"]["content"]
    if _digest(content) != restored["graph"]["digest"]:
        raise ValueError("the checksum of its record does not fit")
    if content["format"] != _FORMAT:
        raise ValueError(f"its format is {content['format']}, which a newer replicax writes")
    return content


def _checked(key: str, what: dict[str, Any], stored: Any) -> np.ndarray:
    dtype, shape = jnp.dtype(what["dtype"]), tuple(what["shape"])
    array = np.zeros(shape, dtype) if stored is None and 0 in shape else np.asarray(stored, dtype)
    if array.shape != shape or _checksum(array) != what["crc32"]:
        raise ValueError(f"the checksum of {key} does not fit")
    return array


def token_at(path: str) -> str | None:
    """Which call has written the checkpoint at `path`; None where there is no whole record."""
    args, checkpointer = _handlers()
    with contextlib.closing(checkpointer):
        try:
            restored = checkpointer.restore(os.path.abspath(path), args.Composite(graph=args.JsonRestore()))
            return _unsealed(restored)["token"]
        except Exception:
            return None


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
    unfinished = f"{file}.{uuid.uuid4().hex}"
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
    found = [os.path.dirname(path) for path in glob.glob(f"{glob.escape(directory)}/*-*/_CHECKPOINT_METADATA")]
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
            read(path)
            return path
        except (CheckpointError, FileNotFoundError) as error:
            passed_over(error, stacklevel=4)
    return None


def passed_over(error: Exception, stacklevel: int) -> None:
    """Warns that an older checkpoint is tried in place of a damaged one."""
    warnings.warn(f"A checkpoint is passed over for an older one. {error}", stacklevel=stacklevel)
