"""`tf.io.gfile` through fsspec: local files, and those of every file system of fsspec (`gs://`, `s3://` ...).

fsspec is imported on first use; the extra `gfile` installs it.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from replicax.tf._core import FailedPreconditionError, NotFoundError, Probe, as_strings, doc_pages, folder_of
from replicax.tf._exceptions import AlreadyExistsError
from replicax.tf._types import TensorLike

_Path: TypeAlias = "str | os.PathLike[str]"


def _place(path: _Path | bytes) -> tuple[Any, str]:
    """Returns the file system of a path, and the path in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"tf.io.gfile needs fsspec: {doc_pages.install('gfile')}.") from error
    path = os.fspath(path)
    result: tuple[Any, str] = url_to_fs(path.decode() if isinstance(path, bytes) else path)
    return result


def _below(folder: str, place: str, found: str) -> str:
    """Returns a path that was found in a folder as one that begins with `folder`, as the caller wrote it.

    Args:
        folder: the folder, as the caller wrote it.
        place: its path in the file system.
        found: the path in the file system of what was found.
    """
    # Paths in object stores have no leading slash.
    rest = posixpath.relpath("/" + found.lstrip("/"), "/" + place.lstrip("/"))
    return folder if rest == "." else posixpath.join(folder, rest)


@contextlib.contextmanager
def _as_tensorflow(path: _Path) -> Iterator[None]:
    """Converts Python's file errors to TensorFlow's, which are subclasses of them."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFoundError(f"{os.fspath(path)}; No such file or directory") from error
    except FileExistsError as error:
        raise AlreadyExistsError(f"{os.fspath(path)}; file already exists") from error
    except (IsADirectoryError, NotADirectoryError) as error:
        raise FailedPreconditionError(f"{os.fspath(path)}; {error.strerror or error}") from error


def exists(path: _Path) -> bool:
    """Returns whether a file or a folder exists."""
    filesystem, name = _place(path)
    return bool(filesystem.exists(name))


def isdir(path: _Path) -> bool:
    """Returns whether the path is a folder."""
    filesystem, name = _place(path)
    return bool(filesystem.isdir(name))


def listdir(path: _Path) -> list[str]:
    """Returns the names of files and folders in a folder; raises `NotFoundError` without one."""
    filesystem, name = _place(path)
    if not filesystem.isdir(name):
        raise NotFoundError(f"Could not find directory {os.fspath(path)}")
    return [posixpath.basename(entry.rstrip("/")) for entry in filesystem.ls(name, detail=False)]


def glob(pattern: _Path | list[_Path] | tuple[_Path, ...]) -> list[str]:
    """Returns the files and folders that match a pattern, or one of a list of patterns, sorted.

    They begin with the folder before the pattern's first wildcard, as it is written; without one, with `./`.
    """
    if isinstance(pattern, (list, tuple)):
        return [found for one in pattern for found in glob(one)]
    filesystem, name = _place(pattern)
    text = os.fspath(pattern)
    folder = folder_of(text)
    if folder is None:
        return [text] if filesystem.exists(name) else []
    place = _place(folder)[1]
    return [_below(folder, place, found) for found in sorted(filesystem.glob(name))]


def mkdir(path: _Path) -> None:
    """Creates a folder; does nothing if it exists; raises `NotFoundError` if its parent does not."""
    filesystem, name = _place(path)
    if filesystem.isdir(name):
        return
    with _as_tensorflow(path):
        filesystem.mkdir(name, create_parents=False)


def makedirs(path: _Path) -> None:
    """Creates a folder and its parents; does nothing if it exists."""
    filesystem, name = _place(path)
    with _as_tensorflow(path):
        filesystem.makedirs(name, exist_ok=True)


def remove(path: _Path) -> None:
    """Removes a file; raises `NotFoundError` if it does not exist."""
    filesystem, name = _place(path)
    if not filesystem.exists(name):
        raise NotFoundError(f"{os.fspath(path)}; No such file or directory")
    with _as_tensorflow(path):
        filesystem.rm_file(name)


def rmtree(path: _Path) -> None:
    """Removes a folder and its contents; raises `NotFoundError` if it does not exist."""
    filesystem, name = _place(path)
    if not filesystem.exists(name):
        raise NotFoundError(f"{os.fspath(path)}; No such file or directory")
    filesystem.rm(name, recursive=True)


def copy(src: _Path, dst: _Path, overwrite: bool = False) -> None:
    """Copies a file, also from one filesystem to another; `AlreadyExistsError` without `overwrite`."""
    _refuse_existing(dst, overwrite)
    with GFile(src, "rb") as source, GFile(dst, "wb") as target:
        while chunk := source.read(1 << 20):
            target.write(chunk)


def rename(src: _Path, dst: _Path, overwrite: bool = False) -> None:
    """Moves a file or a folder within its filesystem; `AlreadyExistsError` without `overwrite`."""
    _refuse_existing(dst, overwrite)
    filesystem, name = _place(src)
    if not filesystem.exists(name):
        raise NotFoundError(f"{os.fspath(src)}; No such file or directory")
    target = _place(dst)[1]
    if filesystem.protocol in ("file", ("file", "local")):
        os.replace(name, target)  # atomically, which writers of checkpoints rely on
    else:
        filesystem.mv(name, target, recursive=filesystem.isdir(name))


def _refuse_existing(path: _Path, overwrite: bool) -> None:
    if not overwrite and exists(path):
        raise AlreadyExistsError(f"{os.fspath(path)}; file already exists: pass overwrite=True to replace it")


class FileStatistics(NamedTuple):
    """Statistics of a file: bytes, time of the last change in nanoseconds, and whether it is a folder."""

    length: int
    mtime_nsec: int
    is_directory: bool


def stat(path: _Path) -> FileStatistics:
    """Returns size, time and kind of a file; raises `NotFoundError` without one."""
    filesystem, name = _place(path)
    with _as_tensorflow(path):
        info = filesystem.info(name)
    changed = info.get("mtime", info.get("created", 0))
    seconds = changed.timestamp() if hasattr(changed, "timestamp") else changed
    return FileStatistics(int(info.get("size") or 0), int(seconds * 1e9), info["type"] == "directory")


def walk(
    top: _Path, topdown: bool = True, onerror: Callable[[OSError], object] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields `(folder, names of folders in it, names of files in it)` for a folder and all folders below it."""
    filesystem, name = _place(top)
    for folder, folders, files in filesystem.walk(name, topdown=topdown):
        yield _below(os.fspath(top), name, folder), sorted(folders), sorted(files)


def join(path: _Path, *paths: _Path) -> str:
    """Joins parts to one path."""
    first = os.fspath(path)
    result: str = (posixpath if "://" in first else os.path).join(first, *(os.fspath(p) for p in paths))
    return result


def get_registered_schemes() -> list[str]:
    """Returns the protocols that fsspec supports."""
    _place(".")
    from fsspec import available_protocols

    return sorted(available_protocols())


class GFile:
    """A file on any file system, opened when it is first read or written.

    Args:
        name: the path.
        mode: "r", "w" or "a", with "+" and "b" as of `open`. Text is UTF-8.
    """

    def __init__(self, name: _Path, mode: str = "r"):
        if mode.replace("b", "").replace("+", "") not in ("r", "w", "a"):
            raise ValueError(f'mode must be "r", "w" or "a", with "b" and "+", got {mode!r}.')
        self.name, self.mode = os.fspath(name), mode
        self._file: Any = None

    def _opened(self) -> Any:
        if self._file is None:
            filesystem, path = _place(self.name)
            text = {} if "b" in self.mode else {"encoding": "utf-8"}
            with _as_tensorflow(self.name):
                self._file = filesystem.open(path, self.mode, **text)
        return self._file

    def read(self, n: int = -1) -> str | bytes:
        """Reads the rest of the file, or `n` bytes or characters."""
        result: str | bytes = self._opened().read(n)
        return result

    def readline(self) -> str | bytes:
        """Reads the next line."""
        result: str | bytes = self._opened().readline()
        return result

    def readlines(self) -> list[str] | list[bytes]:
        """Reads all remaining lines."""
        result: list[str] | list[bytes] = self._opened().readlines()
        return result

    def write(self, file_content: str | bytes) -> None:
        """Writes text or bytes."""
        self._opened().write(file_content)

    def seek(self, offset: int, whence: int = 0) -> None:
        """Goes to a place in the file."""
        self._opened().seek(offset, whence)

    def seekable(self) -> bool:
        """Returns whether `seek` works."""
        return bool(self._opened().seekable())

    def tell(self) -> int:
        """Returns the position in the file."""
        return int(self._opened().tell())

    def size(self) -> int:
        """Returns the size of the file in bytes."""
        return stat(self.name).length

    def flush(self) -> None:
        """Writes what is held back."""
        self._opened().flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
        elif self.mode[0] in "wa":
            self._opened().close()  # creates the file even if nothing was written

    def __enter__(self) -> GFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[str | bytes]:
        return iter(self._opened())

    def __next__(self) -> str | bytes:
        result: str | bytes = next(self._opened())
        return result


# `tf.io`'s own functions of files. Their contents are tensors of strings: numpy arrays of bytes.


def _text(value: TensorLike) -> str:
    item = np.asarray(value).item() if not isinstance(value, (str, bytes, os.PathLike)) else value
    return item.decode() if isinstance(item, bytes) else os.fspath(item)


def _content_of(path: str) -> bytes:
    """Returns the contents of a file of this machine, with fewer calls of the system than Python's files make.

    At each of them a thread lets go of Python's lock, and has to wait for it again.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        content = os.read(file, size + 1)
        if 0 < size == len(content):
            return content
        parts = [content]  # of what has no size, or has grown, or is larger than one call reads
        while parts[-1]:
            parts.append(os.read(file, 1 << 20))
        return b"".join(parts)
    finally:
        os.close(file)


def read_file(filename: TensorLike, name: str | None = None) -> np.ndarray:
    """Returns the contents of a file as a scalar tensor of bytes."""
    if isinstance(probe := np.asarray(filename, object).item(), Probe):
        return np.array(probe, object)
    path = _text(filename)
    if ":" not in path:  # a file of this machine, for which fsspec would take longer than reading does
        with _as_tensorflow(path):
            return as_strings(np.array(_content_of(path), object))
    with GFile(path, "rb") as file:
        return as_strings(np.array(file.read(), object))


def write_file(filename: TensorLike, contents: TensorLike, name: str | None = None) -> None:
    """Writes a file, and makes the folders around it."""
    item = np.asarray(contents, object).item()
    makedirs(os.path.dirname(_text(filename)) or ".")
    with GFile(_text(filename), "wb") as file:
        file.write(item.encode() if isinstance(item, str) else item)


def matching_files(pattern: TensorLike, name: str | None = None) -> np.ndarray:
    """Returns the files that match a pattern as a tensor of bytes, sorted."""
    patterns = [_text(p) for p in np.atleast_1d(np.asarray(pattern, object))]
    found = sorted({path for p in patterns for path in glob(p)})
    return as_strings(np.array([path.encode() for path in found], object))


GFILE = """GFile copy exists get_registered_schemes glob isdir join listdir makedirs mkdir remove rename rmtree stat
walk"""
