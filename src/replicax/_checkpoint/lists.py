"""The lists of checkpoints in folders: a small file beside the checkpoints that names them in order.

A folder in which TensorFlow has saved has its list, a text of the message CheckpointState
(tensorflow/python/training/checkpoint_state.proto), until the first save here.
"""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from replicax._base.atomic_files import between_renames, changing, existing, read_record, replacing, write_record
from replicax._base.errors import CheckpointError
from replicax._checkpoint import files, tensor_bundle
from replicax._checkpoint.files import LIST_NAME, UNREADABLE, Path
from replicax._job import background


def is_numbered(path: str, directory: str, name: str | None = None) -> bool:
    """Returns True for the path of a numbered checkpoint directly in a folder: `name-NUMBER`, any name for None."""
    directly = os.path.dirname(os.path.abspath(path)) == os.path.abspath(directory)
    pattern = ".+" if name is None else re.escape(name)
    return directly and re.fullmatch(rf"{pattern}--?\d+", os.path.basename(path)) is not None


def numbered_checkpoints(directory: str, name: str | None = None) -> dict[str, float]:
    """Returns the numbered checkpoints that are in a folder, listed or not, with their times, the oldest first."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    names += [os.path.basename(path) for path in between_renames(directory)]
    names += [entry.removesuffix(".index") for entry in names if entry.endswith(".index")]  # TensorFlow's
    paths = [path for path in (os.path.join(directory, n) for n in names) if is_numbered(path, directory, name)]
    times = {}
    for path, place in ((path, existing(path)) for path in paths):
        if os.path.isfile(os.path.join(place, files.RECORD)):
            # The record's first, since the files of a copy have other times.
            times[path] = files.record_at(place).get("time") or os.path.getmtime(place)
        elif (prefix := tensor_bundle.prefix_at(path)) is not None:
            times[path] = os.path.getmtime(f"{prefix}.index")
    return dict(sorted(times.items(), key=lambda item: (item[1], int(item[0].rpartition("-")[2]))))


class CheckpointList(NamedTuple):
    """The checkpoints of a folder, the oldest first, with the times of their making."""

    paths: dict[str, float]
    last_preserved: float | None = None


def write_list(
    directory: str, ours: CheckpointList, is_ours: Callable[[str], bool], before: CheckpointList | None = None
) -> None:
    """Writes the list of checkpoints: the others that are listed (in `before` if the list is lost), then these.

    Names are kept relative to the folder.

    Raises:
        CheckpointError: it could not be written, as on a full disk.
    """
    with changing(directory):
        try:
            there = _parsed_list(directory, LIST_NAME)
        except UNREADABLE:
            there = before or CheckpointList({})
        paths = {
            path: at for path, at in there.paths.items() if not is_ours(path) and files.is_there(path)
        } | ours.paths
        names = [_relative(path, directory) for path in paths]
        content = {
            "model_checkpoint_path": names[-1] if names else None,
            "all_model_checkpoint_paths": names,
            "all_model_checkpoint_timestamps": list(paths.values()),
            "last_preserved_timestamp": ours.last_preserved or there.last_preserved,
        }
        file = os.path.join(directory, LIST_NAME)
        with files.errors_of_disks(f"list of checkpoints {file}"), replacing(file, files.LIST) as new:
            write_record(new, content)


def _relative(path: str, directory: str) -> str:
    inside = os.path.dirname(os.path.abspath(path)) == os.path.abspath(directory)
    return os.path.basename(path) if inside else os.path.abspath(path)


def _parsed_list(directory: str, name: str) -> CheckpointList:
    file = os.path.join(directory, name)
    with open(file, "rb") as opened:
        is_tensorflows = opened.read(1 << 8).startswith(b"model_checkpoint_path:")
    index = _of_tensorflow(file) if is_tensorflows else read_record(file)
    paths = [os.path.join(directory, path) for path in index["all_model_checkpoint_paths"]]
    times = [float(stamp) for stamp in index["all_model_checkpoint_timestamps"]]
    return CheckpointList(dict(zip(paths, times, strict=True)), index["last_preserved_timestamp"])


def _of_tensorflow(file: str) -> dict[str, Any]:
    """Returns a list that TensorFlow wrote, of which the last path is the newest checkpoint's."""
    with open(file, encoding="utf-8") as opened:
        found = re.findall(r'^(\w+): ("(?:[^"\\]|\\.)*"|[\d.e+]+)$', opened.read(), re.MULTILINE)
    told: dict[str, list[Any]] = {}
    for key, value in found:  # its texts escape bytes as Python's do
        told.setdefault(key, []).append(ast.literal_eval(f"b{value}").decode() if value[0] == '"' else float(value))
    (newest,) = told["model_checkpoint_path"]
    paths = [path for path in told.get("all_model_checkpoint_paths", []) if path != newest] + [newest]
    times = told.get("all_model_checkpoint_timestamps", [])
    return {
        "all_model_checkpoint_paths": paths,
        "all_model_checkpoint_timestamps": times if len(times) == len(paths) else [0.0] * len(paths),
        "last_preserved_timestamp": told.get("last_preserved_timestamp", [None])[0],
    }


def read_list(directory: str, name: str = LIST_NAME) -> CheckpointList | None:
    """Returns the list that `write_list` wrote; None where there are no checkpoints. Waits for an asynchronous save.

    Where the file is lost or damaged, warns and returns the numbered checkpoints that are in the folder.
    """
    background.wait()
    file = os.path.join(directory, name)
    try:
        return _parsed_list(directory, name)
    except FileNotFoundError:  # a link that leads nowhere, too
        there, problem = numbered_checkpoints(directory) if name == LIST_NAME else {}, "is missing"
        if not there:
            return None
    except UNREADABLE as error:
        there, problem = numbered_checkpoints(directory), f"is damaged ({error})"
    names = ", ".join(map(os.path.basename, there)) or "none"
    warnings.warn(
        f"{file} {problem}, so the folder's checkpoints are looked for; there are: {names}. The next save writes the "
        "file anew.",
        stacklevel=3,
    )
    return CheckpointList(there)


def latest_checkpoint(checkpoint_dir: Path, latest_filename: str | None = None) -> str | None:
    """Returns the newest checkpoint of a folder that is not damaged; a warning names newer ones that are.

    Reads all files of a checkpoint, to compare their checksums.

    Args:
        checkpoint_dir: the folder of the paths given to `Checkpoint.save`.
        latest_filename: the name of the file that names the checkpoints, by default `"checkpoint"`.

    Returns:
        A path for `Checkpoint.restore`; None where there is none, which `restore` takes too.

    >>> import tempfile
    >>> import replicax as rx
    >>> rx.train.latest_checkpoint(tempfile.mkdtemp()) is None
    True
    """
    directory = os.fsdecode(checkpoint_dir)
    state = read_list(directory, latest_filename or LIST_NAME)
    if state is None:
        return None
    return newest_undamaged(state.paths) or newest_undamaged(
        path for path in numbered_checkpoints(directory) if path not in state.paths
    )


def newest_undamaged(paths: Iterable[str]) -> str | None:
    """Returns the last of these paths whose checkpoint is not damaged; a warning names each damaged one after it."""
    for path in reversed(list(paths)):
        try:
            files.check(path)
            return path
        except (CheckpointError, FileNotFoundError) as error:
            warnings.warn(f"A checkpoint is passed over for an older one. {error}", stacklevel=3)
    return None
