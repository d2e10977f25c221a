"""Replace files and folders so that a path has the whole old content or the whole new content at every instant.

replicax replaces files and folders with `replacing` alone, and deletes them with `remove` alone. New content is made in
a staging folder beside the target, flushed to the disk, and moved into place by one system call: a file is renamed over
the old one, and a folder changes places with it (`renameat2` with RENAME_EXCHANGE). Where the file system cannot
exchange, the old folder is renamed into the staging folder first. If the process is killed between these two renames,
`existing` finds the content there, and `clean_up` puts it in place.

A staging folder has a file that names the target. The process that made the folder keeps this file locked. The lock
ends with the process, so that `clean_up` can tell the leftovers of a killed process from work that goes on.

Only files and folders of replicax are replaced or deleted. A folder is recognized by its record: a JSON file that lists
the folder's files. A folder with a damaged record is replaced like any other, but stays under another name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from replicax._base.errors import InvalidArgumentError

try:
    import fcntl
except ImportError:  # Windows: nothing tells whether a process still works, so that leftovers stay
    fcntl = None  # type: ignore[assignment]

AnyPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_STAGING = ".replicax-unfinished-"  # the beginning of a staging folder's name
_TARGET = "target"  # the locked file in a staging folder, with the name of the target
_LOCK = ".replicax-lock"  # the file that is locked in place of a folder that cannot be
_NEW, _OLD, _DELETED = "new", "old", "deleted"
_AT_WORKING_FOLDER, _EXCHANGE = -100, 2  # of renameat2
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
_OF_THE_SYSTEM = (".DS_Store", ".nfs")  # files that macOS and NFS put into any folder


class Artifact(NamedTuple):
    """A kind of folder with a record of this name, or a kind of single file without one, replaced as a whole."""

    noun: str
    record: str | None = None


# --- records ---------------------------------------------------------------------------------------------------------


def write_record(path: str, content: dict[str, Any]) -> None:
    """Write JSON with a checksum of itself. A process that is killed leaves the whole record or none."""
    unfinished = f"{path}.unfinished"
    with open(unfinished, "w", encoding="utf-8") as file:
        json.dump({"content": content, "digest": _digest(content)}, file, indent=1)
    os.replace(unfinished, path)


def read_record(path: str) -> dict[str, Any]:
    """Return the content of a record that `write_record` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    with open(path, encoding="utf-8") as file:
        record = json.load(file)
    if not isinstance(record, dict) or record.get("digest") != _digest(record.get("content")):
        raise ValueError("its checksum does not fit")
    content: dict[str, Any] = record["content"]
    return content


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# --- content that may be replaced ------------------------------------------------------------------------------------


def path_text(path: AnyPath, noun: str) -> str:
    """Return a path of a user, text or bytes, as text that can be the name of a file.

    Raises:
        InvalidArgumentError: it is empty, or has characters that no file's name has.
    """
    text = os.fsdecode(os.fspath(path))
    if not text:
        raise InvalidArgumentError(f"The path of the {noun} is empty. Give the name that it is to have.")
    try:
        possible = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise InvalidArgumentError(f"{text!r} cannot be the path of a {noun}: it has characters that no file name has.")
    return text


def _target(path: AnyPath, item: Artifact) -> str:
    """Return the absolute path to write at, unless that would replace files of the user.

    For a link to a folder, it is the path of the folder; a link to a file is replaced itself.
    """
    text = path_text(path, item.noun)
    if item.record is None:
        if os.path.isdir(text):
            raise IsADirectoryError(f"{text} is a folder. Give the name of a file.")
        return os.path.abspath(text)
    target, here = os.path.realpath(text), os.path.realpath(os.getcwd())
    if os.path.commonpath([target, here]) == target:
        problem = "is the working folder" if target == here else "has the working folder in it"
        raise InvalidArgumentError(
            f"{text!r} {problem}, which a {item.noun} would replace. Give the path of a new folder, such as "
            "'run/model'."
        )
    if os.path.ismount(target):
        raise InvalidArgumentError(
            f"{text!r} is a mount point, which no {item.noun} can replace. Give the path of a new folder in it."
        )
    if os.path.isdir(target):
        _refuse_other_folders(target, item)
    elif os.path.lexists(target):
        raise FileExistsError(f"A {item.noun} is a folder, and {text} is a file. Remove it or choose another path.")
    return target


def _refuse_other_folders(folder: str, item: Artifact) -> None:
    """Raise FileExistsError for a folder that is not empty and not of this kind, or has files of the user in it."""
    assert item.record is not None
    try:
        names = os.listdir(folder)
    except FileNotFoundError:  # another thread or process has just deleted it
        return
    if names and item.record not in names:
        raise FileExistsError(
            f"{folder} is there and is no {item.noun}: it is left as it is. Choose another path, such as one in that "
            "folder."
        )
    if user_files := _find_unlisted_files(folder, item.record):
        raise FileExistsError(
            f"{folder} is a {item.noun} in which there are files that do not belong to it, such as {user_files[0]}: "
            "it is left as it is. Choose another path, or move those files elsewhere."
        )


def _find_unlisted_files(folder: str, record: str) -> list[str]:
    """Return the files in a folder that its record does not list; none where the record is damaged.

    If another thread or process replaces the folder meanwhile, its record and its files are read again.
    """
    while (listed := _files_listed(folder, record)) is not None:
        paths = [os.path.join(inner, name) for inner, folders, files in os.walk(folder) for name in folders + files]
        paths = [path for path in paths if os.path.islink(path) or not os.path.isdir(path)]
        unlisted = {os.path.relpath(path, folder) for path in paths if not _is_of_the_system(path)} - {record, *listed}
        if not unlisted or _files_listed(folder, record) == listed:
            return sorted(unlisted)
    return []


def _is_of_the_system(path: str) -> bool:
    """Return whether a path has the name of a file that an operating system puts into any folder."""
    return os.path.basename(path).startswith(_OF_THE_SYSTEM)


def _files_listed(folder: str, record: str) -> list[str] | None:
    """Return the files that a folder's record lists; None where the record is damaged or is another program's."""
    try:
        return list(read_record(os.path.join(folder, record))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_damaged(folder: str, record: str) -> bool:
    """Return whether a folder has a record that does not tell which of its files may be deleted."""
    return os.path.lexists(os.path.join(folder, record)) and _files_listed(folder, record) is None


# --- staging folders -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _staging(target: str, item: Artifact) -> Iterator[str]:
    """Yield a new, locked staging folder beside `target`, and remove it at the end with its content."""
    staging, lock = _new_staging(target, item)
    try:
        try:
            yield staging
        finally:
            _finish(staging, target, item.record)
    finally:
        os.close(lock)


def _new_staging(target: str, item: Artifact) -> tuple[str, int]:
    about = [os.path.basename(target), *([item.record] if item.record else [])]
    while True:
        staging = os.path.join(os.path.dirname(target), _STAGING + uuid.uuid4().hex)
        os.mkdir(staging)
        name = os.path.join(staging, _TARGET)
        try:
            lock = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        except FileNotFoundError:  # another process has just taken the empty folder for abandoned
            continue
        with contextlib.suppress(OSError):  # a file system without locks
            _lock(lock)
        try:
            os.write(lock, b"\0".join(map(os.fsencode, about)))
        except OSError:  # as on a full disk
            _finish(staging, None, None)
            os.close(lock)
            raise
        if os.path.exists(name):
            return staging, lock
        os.close(lock)  # another process has taken it for abandoned before it was locked


def _lock(file: int) -> None:
    """Lock an open file for this process; OSError where another one has it, or there are no locks."""
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "there are no locks")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _stagings(folder: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        return [e.path for e in entries if e.name.startswith(_STAGING) and e.is_dir(follow_symlinks=False)]
    return []


def _purpose(staging: str) -> tuple[str | None, str | None]:
    """Return the path that a staging folder is for, if it names one, and the name of a folder's record."""
    try:
        with open(os.path.join(staging, _TARGET), "rb") as file:
            name, _, record = os.fsdecode(file.read()).partition("\0")
    except OSError:
        return None, None
    plain = os.path.basename(name) == name and name not in ("", os.curdir, os.pardir)
    return os.path.join(os.path.dirname(staging), name) if plain else None, record or None


def _finish(staging: str, target: str | None, record: str | None) -> None:
    """Put a folder in place that was caught between two renames, and remove the staging folder.

    A folder with a damaged record is kept beside the target, with a warning.
    """
    old, new = os.path.join(staging, _OLD), os.path.join(staging, _NEW)
    if target is not None and os.path.isdir(old) and not os.path.lexists(target):
        os.rename(new if os.path.isdir(new) else old, target)
        _flush(os.path.dirname(target))
    damaged_copy = None
    with contextlib.suppress(OSError):  # the next process tries again to remove the rest
        for name in os.listdir(staging):
            path = os.path.join(staging, name)
            if target is not None and record is not None and _is_damaged(path, record):
                os.rename(path, aside := f"{target}.damaged-{uuid.uuid4().hex[:8]}")
                damaged_copy = aside
            elif name != _TARGET:
                shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
        os.remove(os.path.join(staging, _TARGET))  # last, since only a folder that has it is known as ours
        os.rmdir(staging)
    if damaged_copy is not None:
        warnings.warn(
            f"The file {record} in {target} was damaged, so that it does not tell your files from those of replicax. "
            f"The replaced folder is kept as {damaged_copy}; delete it if you do not need it.",
            stacklevel=2,
        )


def clean_up(folder: str) -> None:
    """Finish the replacements that killed processes began in a folder, and delete their other leftovers.

    Staging folders of living processes stay, and so do all of them where the file system has no locks.
    """
    for staging in _stagings(folder):
        with contextlib.suppress(OSError):
            _take_over(staging)


def _take_over(staging: str) -> None:
    try:
        lock = os.open(os.path.join(staging, _TARGET), os.O_RDWR)
    except FileNotFoundError:
        os.rmdir(staging)  # killed right after it was made, and so empty
        return
    try:
        _lock(lock)
        _finish(staging, *_purpose(staging))
    finally:
        os.close(lock)


# --- replacing, reading and removing ---------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: AnyPath, item: Artifact, first: bool = False) -> Iterator[str]:
    """Yield a path for the block to make a new file or folder at, which then takes the place of `path`.

    If the block raises, or the process ends, the old content stays at `path`. Folders above a folder are made. With
    `first`, a folder of this kind that another process puts there before the block ends stays, and the block's goes.

    Raises:
        InvalidArgumentError: the path is empty, or is the working folder or one above it.
        FileExistsError, IsADirectoryError: there is something that is not of this kind.
    """
    target = _target(path, item)
    parent = os.path.dirname(target)
    if item.record is not None:
        make_folders(parent)
    clean_up(parent)
    with _staging(target, item) as staging:
        yield os.path.join(staging, _NEW)
        _target(target, item)  # again, since the target may have changed meanwhile
        if not (first and item.record is not None and os.path.isfile(os.path.join(target, item.record))):
            _put(staging, target)


def _put(staging: str, target: str) -> None:
    new, old = os.path.join(staging, _NEW), os.path.join(staging, _OLD)
    for inner, _, files in os.walk(staging, topdown=False):
        for name in files:
            _flush(os.path.join(inner, name))
        _flush(inner)
    if not os.path.isdir(new):
        os.replace(new, target)
    else:
        try:
            os.rename(new, target)
        except OSError:
            if not os.path.isdir(target):
                raise
            _swap(new, target, old)
    _flush(os.path.dirname(target))


def _swap(new: str, target: str, old: str) -> None:
    """Put a folder in the place of another one, which is then at `new` or `old`."""
    if _try_exchange(new, target):
        return
    os.rename(target, old)
    try:
        os.rename(new, target)
    except OSError:
        os.rename(old, target)
        raise


def _try_exchange(first: str, second: str) -> bool:
    """Exchange two folders and return True; return False where the system or the file system cannot do that."""
    return _renameat2 is not None and not _renameat2(
        _AT_WORKING_FOLDER, os.fsencode(first), _AT_WORKING_FOLDER, os.fsencode(second), _EXCHANGE
    )


def _flush(path: str) -> None:
    """Wait until the present content of a file or folder is on the disk."""
    if os.name != "posix":  # Windows flushes no folders
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not os.path.isdir(path):  # some cannot flush folders
            raise
    finally:
        os.close(file)


@contextlib.contextmanager
def changing(folder: str) -> Iterator[None]:
    """Make other processes wait that change a file of this folder too, where the file system has locks."""
    with contextlib.ExitStack() as stack:

        def lock(path: str, flags: int) -> None:
            file = os.open(path, flags, 0o666)
            stack.callback(os.close, file)
            assert fcntl is not None
            fcntl.flock(file, fcntl.LOCK_EX)

        if fcntl is not None:
            try:
                lock(folder, os.O_RDONLY)
            except OSError as error:
                if error.errno == errno.EBADF:  # NFS locks only files that are open for writing
                    with contextlib.suppress(OSError):
                        lock(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT)
        yield


def make_folders(folder: str) -> None:
    """Make a folder and the missing folders above it, and flush them to the disk."""
    if not os.path.isdir(folder):
        make_folders(os.path.dirname(os.path.abspath(folder)))
        os.makedirs(folder, exist_ok=True)
        _flush(os.path.dirname(os.path.abspath(folder)))


def existing(path: str) -> str:
    """Return the path of the content of `path`: aside if a process was killed while it put the content in place."""
    if not os.path.lexists(path):
        target = os.path.realpath(path)
        for staging in _stagings(os.path.dirname(target)):
            old, new = os.path.join(staging, _OLD), os.path.join(staging, _NEW)
            if _purpose(staging)[0] == target and os.path.isdir(old):
                return new if os.path.isdir(new) else old
    return path


def between_renames(folder: str) -> list[str]:
    """Return the paths in a folder that `existing` finds aside."""
    targets = [_purpose(staging)[0] for staging in _stagings(folder)]
    return [target for target in targets if target is not None and existing(target) != target]


def remove(path: str, item: Artifact) -> None:
    """Delete a folder of this kind. Its name is free at once. Do nothing if the path has no folder of this kind.

    A folder with files of the user in it, or with a damaged record, is kept, with a warning.
    """
    assert item.record is not None
    if os.path.islink(path) or not os.path.isfile(os.path.join(path, item.record)):
        return
    target = os.path.abspath(path)
    try:
        _refuse_other_folders(target, item)
        if _is_damaged(target, item.record):
            raise FileExistsError(f"The file {item.record} in {path} is damaged: delete the folder yourself.")
        with _staging(target, item) as staging:
            os.rename(target, os.path.join(staging, _DELETED))
    except FileExistsError as error:
        warnings.warn(f"A {item.noun} that was to be deleted is kept. {error}", stacklevel=2)
    except FileNotFoundError:  # another process has just deleted it
        pass
