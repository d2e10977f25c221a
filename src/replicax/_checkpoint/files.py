"""Checkpoints on disk: folders that Orbax writes.

Beside Orbax's files there is a record: the objects that the arrays belong to, and a checksum of each file, which shows
whether a checkpoint is damaged. The folder is put in place as a whole (see `atomic_files`), so that a path has a whole
checkpoint or none.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypeAlias, TypedDict, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import doc_pages, thread_state
from replicax._base.atomic_files import (
    Artifact,
    existing,
    read_record,
    replacing,
    write_record,
)
from replicax._base.errors import CheckpointError
from replicax._base.suppress_output import without_logs
from replicax._checkpoint import tensor_bundle
from replicax._report.terminal import progress

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

_T = TypeVar("_T")
Path: TypeAlias = str | bytes | os.PathLike[str]

UNREADABLE = (ValueError, KeyError, TypeError, OSError)  # raised where a record is lost or damaged
_FORMAT = 1
RECORD = "replicax.json"  # the record in a checkpoint's folder
LIST_NAME = "checkpoint"  # the name of the file that names the checkpoints of a folder
CHECKPOINT, LIST = Artifact("checkpoint", RECORD), Artifact("list of checkpoints")


class _Children(TypedDict):
    children: dict[str, int]


class NodeRecord(_Children, total=False):
    """A stored node of the object graph: the numbers of its children, and the key of its array."""

    key: str


class ArrayRecord(TypedDict):
    """The shape and dtype of an array."""

    shape: list[int]
    dtype: str


class Record(TypedDict):
    """The record in a checkpoint's folder."""

    format: int
    token: str
    save: NotRequired[str]  # equal for the copies that the workers of a job write in one call
    time: float
    nodes: list[NodeRecord]
    arrays: dict[str, ArrayRecord]
    files: dict[str, int]  # the checksum of each


class Saved(NamedTuple):
    """The content of a checkpoint: the nodes of the object graph, and the arrays by their keys."""

    nodes: list[NodeRecord]
    arrays: dict[str, np.ndarray]
    token: str  # names the call that wrote it, on this worker
    save: str  # equal on all workers, since their copies have equal content


def import_orbax() -> Any:
    """Return the module `orbax.checkpoint`, whose import takes seconds; raise ImportError if it is not installed."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            f"Checkpoints are written by Orbax. Install it: {doc_pages.install('checkpoint')}."
        ) from error
    return ocp


def orbax_checkpointer() -> tuple[Any, ocp.Checkpointer]:
    """Return Orbax's module of arguments, and a checkpointer that waits for no other process of the job."""
    ocp = import_orbax()
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


@contextlib.contextmanager
def _detach_from_job() -> Iterator[None]:
    """Keep Orbax from asking the job's coordination service for signals, which no other process sends.

    The service ends with process 0. A worker that wrote or read after that would wait forever.
    """
    _replace_signaling_client()
    with thread_state.entered(is_detached=True):
        yield


@functools.cache
def _replace_signaling_client() -> None:
    """Give Orbax a store of this process in place of the coordination service, within `_detach_from_job`."""
    try:
        from orbax.checkpoint._src.futures import signaling_client

        get_client: Any = signaling_client.get_signaling_client
        local_client = signaling_client.ThreadSafeKeyValueSignalingClient()
    except (ImportError, AttributeError):  # another Orbax, which may ask differently
        return

    def choose_client() -> Any:
        return local_client if thread_state.current.is_detached else get_client()

    if hasattr(get_client, "cache_clear"):  # Orbax calls it
        choose_client.cache_clear = get_client.cache_clear  # type: ignore[attr-defined]
    signaling_client.get_signaling_client = choose_client


def _array_writer(ocp: Any) -> Any:
    """Return a handler that writes NumPy arrays in any process; Orbax's own writes them in process 0 alone."""
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


@contextlib.contextmanager
def stage(path: str, saved: Saved, listed: bool = False) -> Iterator[None]:
    """Write a checkpoint before the block, and put it at `path` after it, unless the block raises.

    Args:
        path: where the checkpoint is to be; one that is there is replaced.
        saved: the content.
        listed: whether `write_list` will list the checkpoint.

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
    with contextlib.closing(checkpointer), errors_of_disks(f"checkpoint {path}"), replacing(path, CHECKPOINT) as new:
        if stored:
            folder, name = os.path.split(new)
            quiet = without_logs("absl", "Skipping merge of OCDBT checkpoints")
            with _tensorstore_path(folder) as parent, quiet, progress("writing arrays"), _detach_from_job():
                try:
                    checkpointer.save(os.path.join(parent, name), args.PyTreeSave(stored))
                except (ValueError, RuntimeError) as error:  # as tensorstore says that the disk is full
                    raise OSError(errno.EIO, str(error)) from error
        os.makedirs(new, exist_ok=True)
        arrays: dict[str, ArrayRecord] = {
            key: {"shape": list(array.shape), "dtype": array.dtype.name} for key, array in saved.arrays.items()
        }
        about = {"format": _FORMAT, "token": saved.token, "save": saved.save, "time": time.time()}
        write_record(
            os.path.join(new, RECORD), {**about, "nodes": saved.nodes, "arrays": arrays, "files": checksums(new)}
        )
        yield


_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}  # it is full, or fails


@contextlib.contextmanager
def errors_of_disks(target: str) -> Iterator[None]:
    """Raise CheckpointError, which names the target by its kind and path, in place of errors of disks."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK:
            raise
        raise CheckpointError(
            f"The {target} could not be written, and what was there is as before: {error.strerror}"
        ) from error


@contextlib.contextmanager
def _tensorstore_path(folder: str) -> Iterator[str]:
    """Yield a path of a folder that tensorstore can open: a symbolic link where it refuses the folder's own."""
    if "\\" not in folder and all(not "\ud800" <= character <= "\udfff" for character in folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as other:
        link = os.path.join(other, "link")
        os.symlink(folder, link)
        yield link


def checksums(folder: str) -> dict[str, int]:
    """Return the checksum of each file in a folder but the record, by its relative path.

    OCDBT checks its index alone: without these, a flipped bit in an array's data is read as another value.
    """
    paths = [os.path.join(inner, name) for inner, _, names in os.walk(folder) for name in names]
    files = {os.path.relpath(path, folder): path for path in paths}
    files.pop(RECORD, None)
    with progress("computing checksums", total=sum(map(os.path.getsize, files.values())), unit="bytes") as bar:
        return {name: _checksum(path, bar) for name, path in files.items()}


def _checksum(path: str, bar: progress) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
            bar.advance(len(block))
    return checksum


def _of_one_checkpoint(path: str, look: Callable[[str], _T]) -> _T:
    """Call `look` with the folder of a checkpoint, again if another process has replaced the checkpoint meanwhile.

    The first call may have seen parts of the old checkpoint and of the new one.
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


def check(path: str) -> None:
    """Compare the checksums of a checkpoint's files.

    Raises:
        FileNotFoundError: nothing is there.
        CheckpointError: it is damaged, or of another format.
    """
    if (prefix := tensorflow_prefix(path)) is not None:
        tensor_bundle.TensorBundle(prefix).check()
    else:
        _of_one_checkpoint(path, functools.partial(_check, path))


def _check(path: str, place: str) -> Record:
    if not os.path.isdir(place):
        raise FileNotFoundError(
            f"There is no checkpoint at {path}. Is the number at its end missing, as the '-1' of 'path/to/ckpt-1'? "
            f"See {doc_pages.page('how-to/checkpoints#saving-and-restoring')}."
        )
    try:
        content = cast(Record, read_record(os.path.join(place, RECORD)))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} was not written by replicax: it has no {RECORD}. Orbax may be able to read it."
        ) from error
    except UNREADABLE as error:
        raise _damage_error(path, f"{RECORD} cannot be read ({error})") from error
    if content["format"] != _FORMAT:
        raise CheckpointError(f"{path} has format {content['format']}, which a newer replicax writes and reads.")
    with progress("checking files", total=_size(place, content["files"]), unit="bytes") as bar:
        for name, checksum in content["files"].items():
            try:
                if _checksum(os.path.join(place, name), bar) != checksum:
                    raise _damage_error(path, f"the checksum of {name} does not fit")
            except OSError as error:
                raise _damage_error(path, f"{name} cannot be read ({error})") from error
    return content


def _size(folder: str, names: Iterable[str]) -> int:
    """Return the bytes of these files, for a display; files that cannot be read count nothing."""
    size = 0
    for name in names:
        with contextlib.suppress(OSError):
            size += os.path.getsize(os.path.join(folder, name))
    return size


def _damage_error(path: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {path} is damaged: {problem}. Restore an older one. "
        f"See {doc_pages.page('how-to/checkpoints#guarantees')}."
    )


def token_at(path: str) -> str | None:
    """Return the token of the call that wrote the checkpoint at `path`; None where there is no record."""
    token: str | None = record_at(existing(path)).get("token")
    return token


def record_at(place: str) -> dict[str, Any]:
    """Return the record of a checkpoint's folder, of any format; without entries where it is lost or damaged."""
    try:
        return read_record(os.path.join(place, RECORD))
    except UNREADABLE:
        return {}


def read(path: str) -> Saved:
    """Return a checkpoint's content; raises the errors of `check`."""
    return _of_one_checkpoint(path, functools.partial(_read, path))


def _read(path: str, place: str) -> Saved:
    content = _check(path, place)
    stored: dict[str, np.ndarray] = {}
    if any(0 not in kind["shape"] for kind in content["arrays"].values()):
        args, checkpointer = orbax_checkpointer()
        at = os.path.abspath(place)
        reading = progress("reading arrays")
        with contextlib.closing(checkpointer), _tensorstore_path(at) as folder, reading, _detach_from_job():
            stored = checkpointer.restore(folder, args.PyTreeRestore())
    arrays = {}
    for key, kind in content["arrays"].items():
        array = np.asarray(np.zeros(kind["shape"]) if 0 in kind["shape"] else stored[key], jnp.dtype(kind["dtype"]))
        arrays[key] = array.reshape(kind["shape"])
    return Saved(content["nodes"], arrays, content["token"], content.get("save", content["token"]))


def is_there(path: str) -> bool:
    """Return True if there is a folder at `path`, or the content of one that is being replaced, or TensorFlow's."""
    return os.path.isdir(existing(path)) or tensor_bundle.prefix_at(path) is not None


def tensorflow_prefix(path: str) -> str | None:
    """Return the prefix of TensorFlow's checkpoint at `path`; None for a checkpoint of replicax, or without any."""
    return None if os.path.isfile(os.path.join(existing(path), RECORD)) else tensor_bundle.prefix_at(path)
