"""Checkpoints on disk: folders that Orbax writes, and the small file beside them that names them in order.

To what Orbax writes a record is added: the objects that the arrays belong to, and a checksum of each file, so that a
damaged checkpoint is known. It is put in place as a whole (see `atomic_files`), so that a path has a whole checkpoint
or none.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import os
import re
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import doc_pages
from replicax._base.atomic_files import (
    Artifact,
    between_renames,
    changing,
    existing,
    read_record,
    replacing,
    write_record,
)
from replicax._base.errors import CheckpointError
from replicax._base.suppress_output import without_logs

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

_T = TypeVar("_T")
Path: TypeAlias = str | bytes | os.PathLike[str]

_UNREADABLE = (ValueError, KeyError, TypeError, OSError)  # raised where a record is lost or damaged
_FORMAT = 1
_RECORD = "replicax.json"  # the record in a checkpoint's folder
LIST_NAME = "checkpoint"  # the name of the file that names the checkpoints of a folder
CHECKPOINT, LIST = Artifact("checkpoint", _RECORD), Artifact("list of checkpoints")


class _Children(TypedDict):
    children: dict[str, int]


class NodeRecord(_Children, total=False):
    """A node of the object graph as it is stored: the numbers of its children, and the key of its array."""

    key: str


class ArrayRecord(TypedDict):
    """The shape and dtype of an array."""

    shape: list[int]
    dtype: str


class Record(TypedDict):
    """The record in a checkpoint's folder."""

    format: int
    token: str
    time: float
    nodes: list[NodeRecord]
    arrays: dict[str, ArrayRecord]
    files: dict[str, int]  # the checksum of each


class Saved(NamedTuple):
    """The content of a checkpoint: the nodes of the object graph, and the arrays by their keys."""

    nodes: list[NodeRecord]
    arrays: dict[str, np.ndarray]
    token: str  # names the call that wrote it


def orbax_checkpointer() -> tuple[Any, ocp.Checkpointer]:
    """Returns Orbax's module of arguments, and a checkpointer that waits for no other process of the job."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            f"Checkpoints are written by Orbax. Install it: {doc_pages.install('checkpoint')}."
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
    """Returns a handler that writes NumPy arrays in any process; Orbax's own writes them in process 0 alone."""
    import tensorstore

    class ArrayWriter(ocp.type_handlers.NumpyHandler):  # type: ignore[misc]  # Orbax may be missing
        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
            for value, info in zip(values, infos):
                file = {"driver": "file", "path": os.path.join(info.parent_dir, info.name)}
                store = await tensorstore.open(
                    {"driver": "zarr", "kvstore": file}, create=True, dtype=value.dtype, shape=value.shape
                )
                await store.write(value)
            return []

    return ArrayWriter()


def write(path: str, saved: Saved, listed: bool = False) -> None:
    """Writes a checkpoint at `path`, in place of one that is there. `listed` tells that `write_list` will list it.

    Raises:
        FileExistsError: there is something else.
        IsADirectoryError: it could not be listed, because there is a folder where the list should be.
        InvalidArgumentError: the path is empty, or is the working folder or one above it.
        CheckpointError: it could not be written, as on a full disk.
    """
    if listed and os.path.isdir(state := os.path.join(os.path.dirname(path), LIST_NAME)):
        raise IsADirectoryError(
            f"The checkpoint {path} was not written. {state} is a folder, and it is the name of the file that lists "
            "the checkpoints. Move that folder elsewhere."
        )
    args, checkpointer = orbax_checkpointer()
    stored = {key: array for key, array in saved.arrays.items() if array.size}  # Orbax takes no empty ones
    with contextlib.closing(checkpointer), _errors_of_disks(f"checkpoint {path}"), replacing(path, CHECKPOINT) as new:
        if stored:
            folder, name = os.path.split(new)
            with _tensorstore_path(folder) as known, without_logs("absl", "Skipping merge of OCDBT checkpoints"):
                try:
                    checkpointer.save(os.path.join(known, name), args.PyTreeSave(stored))
                except (ValueError, RuntimeError) as error:  # as tensorstore says that the disk is full
                    raise OSError(errno.EIO, str(error)) from error
        os.makedirs(new, exist_ok=True)
        arrays: dict[str, ArrayRecord] = {
            key: {"shape": list(array.shape), "dtype": array.dtype.name} for key, array in saved.arrays.items()
        }
        about = {"format": _FORMAT, "token": saved.token, "time": time.time()}
        write_record(
            os.path.join(new, _RECORD), {**about, "nodes": saved.nodes, "arrays": arrays, "files": _checksums(new)}
        )


_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}  # it is full, or fails


@contextlib.contextmanager
def _errors_of_disks(what: str) -> Iterator[None]:
    """Raises CheckpointError, which names the path, in place of errors of disks."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK:
            raise
        raise CheckpointError(
            f"The {what} could not be written, and what was there is as before: {error.strerror}"
        ) from error


@contextlib.contextmanager
def _tensorstore_path(folder: str) -> Iterator[str]:
    """Yields a path by which tensorstore can open a folder: a symbolic link where it refuses the folder's own."""
    if "\\" not in folder and all(not "\ud800" <= character <= "\udfff" for character in folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as other:
        link = os.path.join(other, "link")
        os.symlink(folder, link)
        yield link


def _checksums(folder: str) -> dict[str, int]:
    """Returns the checksum of each file in a folder but the record, by its relative path.

    OCDBT checks its index alone: without these, a flipped bit in an array's data is read as another value.
    """
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


def _of_one_checkpoint(path: str, look: Callable[[str], _T]) -> _T:
    """Calls `look` with the folder of a checkpoint, again if another process has replaced the checkpoint meanwhile.

    Such a call may have seen parts of the old checkpoint and of the new one.
    """
    while True:
        before = place, _ = _identity(path)
        try:
            seen = look(place)
        except Exception:
            if _identity(path) == before:
                raise
        else:
            if _identity(path) == before:
                return seen


def _identity(path: str) -> tuple[str, str | None]:
    return existing(path), token_at(path)


def check(path: str) -> Record:
    """Returns the record of a checkpoint after comparing the checksums of its files.

    Raises:
        FileNotFoundError: nothing is there.
        CheckpointError: it is damaged, or of another format.
    """
    return _of_one_checkpoint(path, functools.partial(_check, path))


def _check(path: str, place: str) -> Record:
    if not os.path.isdir(place):
        if os.path.exists(path + ".index"):
            raise CheckpointError(
                f"{path} is a checkpoint in TensorFlow's own format, which replicax does not read. Load it in "
                "TensorFlow, and assign the values to variables here."
            )
        raise FileNotFoundError(
            f"There is no checkpoint at {path}. Is the number at its end missing, as the '-1' of 'path/to/ckpt-1'?"
        )
    try:
        content = cast(Record, read_record(os.path.join(place, _RECORD)))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} was not written by replicax: it has no {_RECORD}. Orbax may be able to read it."
        ) from error
    except _UNREADABLE as error:
        raise _damaged(path, f"{_RECORD} cannot be read ({error})") from error
    if content["format"] != _FORMAT:
        raise CheckpointError(f"{path} has format {content['format']}, which a newer replicax writes and reads.")
    for name, checksum in content["files"].items():
        try:
            if _checksum(os.path.join(place, name)) != checksum:
                raise _damaged(path, f"the checksum of {name} does not fit")
        except OSError as error:
            raise _damaged(path, f"{name} cannot be read ({error})") from error
    return content


def _damaged(path: str, what: str) -> CheckpointError:
    return CheckpointError(f"The checkpoint {path} is damaged: {what}. Restore an older one.")


def token_at(path: str) -> str | None:
    """Returns the token of the call that wrote the checkpoint at `path`; None where there is no record."""
    token: str | None = _record_at(existing(path)).get("token")
    return token


def _record_at(place: str) -> dict[str, Any]:
    """Returns the record of a checkpoint's folder, of any format; without entries where it is lost or damaged."""
    try:
        return read_record(os.path.join(place, _RECORD))
    except _UNREADABLE:
        return {}


def read(path: str) -> Saved:
    """Returns a checkpoint's content; raises the errors of `check`."""
    return _of_one_checkpoint(path, functools.partial(_read, path))


def _read(path: str, place: str) -> Saved:
    content = _check(path, place)
    stored: dict[str, np.ndarray] = {}
    if any(0 not in kind["shape"] for kind in content["arrays"].values()):
        args, checkpointer = orbax_checkpointer()
        with contextlib.closing(checkpointer), _tensorstore_path(os.path.abspath(place)) as known:
            stored = checkpointer.restore(known, args.PyTreeRestore())
    arrays = {}
    for key, kind in content["arrays"].items():
        array = np.asarray(np.zeros(kind["shape"]) if 0 in kind["shape"] else stored[key], jnp.dtype(kind["dtype"]))
        arrays[key] = array.reshape(kind["shape"])
    return Saved(content["nodes"], arrays, content["token"])


def is_there(path: str) -> bool:
    """Returns True if there is a folder at `path`, or the content of one that is being replaced."""
    return os.path.isdir(existing(path))


def is_numbered(path: str, directory: str, name: str | None = None) -> bool:
    """Returns True for the path of a numbered checkpoint directly in a folder: `name-NUMBER`, any name for None."""
    directly = os.path.dirname(os.path.abspath(path)) == os.path.abspath(directory)
    pattern = ".+" if name is None else re.escape(name)
    return directly and re.fullmatch(rf"{pattern}--?\d+", os.path.basename(path)) is not None


def numbered_checkpoints(directory: str, name: str | None = None) -> dict[str, float]:
    """Returns the numbered checkpoints that are in a folder, listed or not, with their times, the oldest first."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    names += [os.path.basename(path) for path in between_renames(directory)]
    paths = [path for path in (os.path.join(directory, n) for n in names) if is_numbered(path, directory, name)]
    times = {}
    for path, place in ((path, existing(path)) for path in paths):
        if os.path.isfile(os.path.join(place, _RECORD)):
            # The record's first, since the files of a copy have other times.
            times[path] = _record_at(place).get("time") or os.path.getmtime(place)
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
        except _UNREADABLE:
            there = before or CheckpointList({})
        paths = {path: at for path, at in there.paths.items() if not is_ours(path) and is_there(path)} | ours.paths
        names = [_relative(path, directory) for path in paths]
        content = {
            "model_checkpoint_path": names[-1] if names else None,
            "all_model_checkpoint_paths": names,
            "all_model_checkpoint_timestamps": list(paths.values()),
            "last_preserved_timestamp": ours.last_preserved or there.last_preserved,
        }
        file = os.path.join(directory, LIST_NAME)
        with _errors_of_disks(f"list of checkpoints {file}"), replacing(file, LIST) as new:
            write_record(new, content)


def _relative(path: str, directory: str) -> str:
    inside = os.path.dirname(os.path.abspath(path)) == os.path.abspath(directory)
    return os.path.basename(path) if inside else os.path.abspath(path)


def _parsed_list(directory: str, name: str) -> CheckpointList:
    index = read_record(os.path.join(directory, name))
    paths = [os.path.join(directory, path) for path in index["all_model_checkpoint_paths"]]
    times = [float(stamp) for stamp in index["all_model_checkpoint_timestamps"]]
    return CheckpointList(dict(zip(paths, times, strict=True)), index["last_preserved_timestamp"])


def read_list(directory: str, name: str = LIST_NAME) -> CheckpointList | None:
    """Returns the list that `write_list` wrote; None where there are no checkpoints.

    Where the file is lost or damaged, warns and returns the numbered checkpoints that are in the folder.
    """
    file = os.path.join(directory, name)
    try:
        return _parsed_list(directory, name)
    except FileNotFoundError:  # a link that leads nowhere, too
        there, problem = numbered_checkpoints(directory) if name == LIST_NAME else {}, "is missing"
        if not there:
            return None
    except _UNREADABLE as error:
        if glob.glob(os.path.join(glob.escape(directory), "*.index")):
            raise CheckpointError(
                f"{directory} has checkpoints in TensorFlow's own format, which replicax does not read. Choose another "
                "folder."
            ) from error
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

    Raises:
        CheckpointError: the folder has TensorFlow's own checkpoints.

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
            check(path)
            return path
        except (CheckpointError, FileNotFoundError) as error:
            warnings.warn(f"A checkpoint is passed over for an older one. {error}", stacklevel=3)
    return None
