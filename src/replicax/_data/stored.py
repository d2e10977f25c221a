"""Elements on disk: caches, snapshots and saved datasets.

A file has a line of JSON, which tells the elements' structure, dtypes and shapes, and then the elements. One begins
with a byte 1, and has for each array its rank and dimensions as 64-bit numbers, and its bytes; strings have their
lengths before them. A byte 0 and the number of elements end the file. All numbers are little-endian. Files come into
place whole: they are written beside it, and renamed.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import jax
import numpy as np

from replicax._data.elements import flatten, tensor_dtype
from replicax._data.reading import Maker, Reading, replayed
from replicax._errors import DataLossError, InvalidArgumentError
from replicax._specs import TensorSpec, as_dtype, spec_of

if TYPE_CHECKING:
    from replicax._data.core import Base

_FORMAT = "replicax dataset 1"
SPEC = "spec.json"


# --- structures as JSON ----------------------------------------------------------------------------------------------


def described(spec: Any) -> Any:
    """A structure of specs as what JSON can write."""
    if isinstance(spec, TensorSpec):
        shape = None if spec.shape.rank is None else list(spec.shape)
        return {"shape": shape, "dtype": "string" if spec.dtype == np.dtype(object) else np.dtype(spec.dtype).name}
    if isinstance(spec, dict):
        if not all(isinstance(key, str) for key in spec):
            raise TypeError(f"Elements that are written to files have strings for the keys of dicts, got {list(spec)}.")
        return {"dict": {key: described(value) for key, value in spec.items()}}
    if isinstance(spec, tuple):
        parts = [described(value) for value in spec]
        fields = getattr(spec, "_fields", None)
        return {"tuple": parts} if fields is None else {"named": type(spec).__name__, "fields": fields, "tuple": parts}
    raise TypeError(f"Elements that are written to files are made of arrays, tuples and dicts, got {spec!r}.")


def read_description(description: Any) -> Any:
    """The specs that `described` described. A named tuple becomes one of a class of its own."""
    if "dtype" in description:
        return TensorSpec(description["shape"], as_dtype(description["dtype"]))
    if "dict" in description:
        return {key: read_description(value) for key, value in description["dict"].items()}
    parts = tuple(map(read_description, description["tuple"]))
    return (
        collections.namedtuple(description["named"], description["fields"])(*parts) if "named" in description else parts
    )


# --- files -----------------------------------------------------------------------------------------------------------


def opened(path: str | bytes | os.PathLike[Any], compression: str | None, mode: str = "rb") -> BinaryIO:
    """The file, read or written through GZIP where `compression` says so."""
    return gzip.open(path, mode) if compression == "GZIP" else open(path, mode)  # type: ignore[return-value]


def checked_compression(compression: str | None, *further: str) -> str | None:
    """`compression`, if it is one that there is."""
    if compression not in (None, "", "NONE", "GZIP", *further):
        raise ValueError(f'The compression is "GZIP" or None, got {compression!r}.')
    return "GZIP" if compression == "GZIP" else None


class Writer:
    """A file that elements are written to. It is there once `finish` was called, and not at all before."""

    def __init__(self, path: Path, compression: str | None):
        self._path, self.count = path, 0
        self._temporary = _beside(path)
        self._file = opened(self._temporary, compression, "wb")
        self._spec: Any = None

    def write(self, element: Any) -> None:
        """Writes one element."""
        if self._spec is None:
            self._begin(spec_of(element))
        leaves, structure = flatten(element)
        if structure != jax.tree.structure(self._spec):
            raise InvalidArgumentError(
                f"Elements of one file have one structure: the first is {self._spec}, number {self.count} "
                f"{spec_of(element)}."
            )
        parts = [b"\x01"]
        for array in leaves:
            parts.append(struct.pack(f"<{1 + array.ndim}q", array.ndim, *array.shape))
            if array.dtype == np.dtype(object):
                for text in array.ravel():
                    parts += [struct.pack("<q", len(text)), text]
            else:
                parts.append(array.tobytes())
        self._file.write(b"".join(parts))
        self.count += 1

    def _begin(self, spec: Any) -> None:
        self._spec = spec
        self._file.write(json.dumps({"format": _FORMAT, "spec": described(spec)}).encode() + b"\n")

    def finish(self) -> None:
        """Puts the file in its place."""
        if self._spec is None:
            self._begin(())
        self._file.write(b"\x00" + struct.pack("<q", self.count))
        self._file.close()
        os.replace(self._temporary, self._path)

    def abandon(self) -> None:
        """Leaves no file, unless `finish` was called."""
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._temporary)


def read_elements(path: Path, compression: str | None) -> Iterator[Any]:
    """The elements of a file that `Writer` wrote."""
    with opened(path, compression) as file:
        try:
            header = json.loads(file.readline())
            if header["format"] != _FORMAT:
                raise ValueError(f"the format is {header['format']!r}")
        except (ValueError, TypeError, KeyError, OSError) as e:
            raise DataLossError(f"{path} is no file of elements that replicax wrote: {e}") from e
        specs, structure = flatten(read_description(header["spec"]))
        count = 0
        while (mark := _bytes(file, 1, path)) == b"\x01":
            yield structure.unflatten([_array(file, s.dtype, path) for s in specs])
            count += 1
        (expected,) = struct.unpack("<q", _bytes(file, 8, path))
        if mark != b"\x00" or count != expected:
            raise DataLossError(f"{path} should have {expected} elements, and {count} were found. Write it anew.")


def _array(file: BinaryIO, dtype: Any, path: Path) -> np.ndarray:
    (rank,) = struct.unpack("<q", _bytes(file, 8, path))
    shape = struct.unpack(f"<{rank}q", _bytes(file, 8 * rank, path))
    size = int(np.prod(shape, dtype=np.int64))
    if dtype != np.dtype(object):
        return np.frombuffer(_bytes(file, size * dtype.itemsize, path), dtype).reshape(shape)
    texts = np.empty(size, object)
    for i in range(size):
        (length,) = struct.unpack("<q", _bytes(file, 8, path))
        texts[i] = _bytes(file, length, path)
    return texts.reshape(shape)


def _bytes(file: BinaryIO, count: int, path: Path) -> bytes:
    try:
        found = file.read(count)
    except (EOFError, OSError) as e:  # as gzip says it
        raise DataLossError(f"{path} cannot be read: {e}") from e
    if len(found) < count:
        raise DataLossError(f"{path} ends in the middle of an element. Write it anew.")
    return found


def _beside(path: Path) -> Path:
    """A new file in the folder of `path`."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Give the name of a file.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent} for the file {path.name}. Make it before.")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    return Path(name)


# --- datasets --------------------------------------------------------------------------------------------------------


def written_once(filename: str | os.PathLike[str], source: Base) -> Maker:
    """The elements of `source`, from the file if it is there; the first complete pass writes it."""
    path = Path(os.fspath(filename))

    @replayed
    def make(reading: Reading) -> Iterator[Any]:
        if path.is_file():
            yield from read_elements(path, None)
            return
        if reading.probing:
            yield from source._make(reading)
            return
        writer = Writer(path, None)
        try:
            for element in source._make(reading):
                writer.write(element)
                yield element
            writer.finish()
        finally:
            writer.abandon()

    return make


class Spread:
    """Writes elements to the files of a folder, and what they are."""

    def __init__(self, folder: Path, compression: str | None, shard_of: Callable[[Any], int] | None, spec: Any):
        self._folder, self._compression, self._shard_of, self._spec = folder, compression, shard_of, spec
        self._writers: dict[int, Writer] = {}

    def write(self, element: Any) -> None:
        """Writes one element to its file."""
        number = 0 if self._shard_of is None else self._shard_of(element)
        if number not in self._writers:
            self._writers[number] = Writer(self._folder / _name(number), self._compression)
        self._writers[number].write(element)

    def finish(self) -> None:
        """Puts the files in their places."""
        for writer in self._writers.values():
            writer.finish()
        shards = {str(number): writer.count for number, writer in sorted(self._writers.items())}
        about = {"format": _FORMAT, "spec": described(self._spec), "compression": self._compression, "shards": shards}
        (self._folder / SPEC).write_text(json.dumps(about))

    def abandon(self) -> None:
        """Closes what is open."""
        for writer in self._writers.values():
            writer.abandon()


def _name(number: int) -> str:
    return f"{number:05d}.elements"


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that takes the place of `path` at the end, and goes where an exception comes before."""
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield folder
        if path.exists():
            if not (path / SPEC).exists() and any(path.iterdir()):
                raise FileExistsError(
                    f"{path} is there and is no saved dataset: it is left as it is. Take another path."
                )
            old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
            os.replace(path, old / "old")
            os.replace(folder, path)
            shutil.rmtree(old)
        else:
            os.replace(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Saved:
    """A folder that `Spread` wrote.

    Raises:
        FileNotFoundError: there is none.
        DataLossError: it is of something else.
    """

    def __init__(self, path: Path):
        if not (path / SPEC).is_file():
            raise FileNotFoundError(f"There is no saved dataset at {path}: the file {SPEC} is not there.")
        try:
            about = json.loads((path / SPEC).read_text())
            if about["format"] != _FORMAT:
                raise ValueError(f"the format is {about['format']!r}")
            self.spec, self._compression = read_description(about["spec"]), about["compression"]
            self.shards = {int(number): int(count) for number, count in about["shards"].items()}
        except (ValueError, TypeError, KeyError) as e:
            raise DataLossError(f"{path} is no dataset that replicax saved: {e}") from e
        self._path = path

    def elements(self, number: int, structure: Any) -> Iterator[Any]:
        """The elements of one file, in the structure `structure`."""
        for element in read_elements(self._path / _name(number), self._compression):
            yield structure.unflatten(jax.tree.leaves(element))

    def check(self, spec: Any) -> Any:
        """The spec of the elements in the structure of `spec`, if it fits; None for what was saved."""
        if spec is None:
            return self.spec
        structure: Any
        wanted, structure = flatten(spec)
        there = jax.tree.leaves(self.spec)
        if len(wanted) != len(there) or not all(map(_fits, wanted, there)):
            raise InvalidArgumentError(f"The dataset was saved with elements {self.spec}, not {spec}.")
        return structure.unflatten(there)


def _fits(wanted: Any, there: TensorSpec) -> bool:
    """Whether users may describe `there` so: on the host, or as the tensor that it becomes."""
    dtypes = (there.dtype, tensor_dtype(there.dtype))
    return isinstance(wanted, TensorSpec) and wanted.dtype in dtypes and wanted.shape.is_compatible_with(there.shape)
