"""Elements on disk: caches, snapshots and saved datasets.

A file has a first line that tells the format, and then records. A record is the length of its bytes (64 bits), a
checksum, the bytes, and a checksum again. A checksum is the CRC-32 of all lengths and bytes of the file up to there,
so that a length is not believed before it is checked, and records that have changed places are noticed. The first
record is JSON: the elements' structure, dtypes and shapes, and to which saving the file belongs. One for an element
begins with a byte 1, and has for each array its rank and dimensions as 64-bit numbers, and its bytes; strings have
their lengths before them. The last record has a byte 0 and the number of elements. All numbers are little-endian.
Files and folders come into place whole (see `_atomic_files`).
"""

from __future__ import annotations

import collections
import gzip
import json
import os
import struct
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import jax
import numpy as np

from replicax._atomic_files import Kind, existing, read_record, replacing, write_record
from replicax._data.elements import flatten, tensor_dtype
from replicax._data.reading import Maker, Reading, replayed
from replicax._errors import DataLossError, InvalidArgumentError
from replicax._specs import TensorSpec, as_dtype, spec_of

if TYPE_CHECKING:
    from replicax._data.core import Base

_FORMAT = "replicax dataset 2"  # 1 had no checksums; no release wrote it
_BEGINNING = b"replicax elements 2\n"
RECORD = "replicax-dataset.json"
DATASET, _CACHE = Kind("saved dataset", RECORD), Kind("cache")
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, IndexError, struct.error)  # what no writer wrote


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
    """A file that elements are written to; it is complete once `finish` was called."""

    def __init__(self, path: str | os.PathLike[str], compression: str | None, **about: Any):
        self.count = 0
        self._about, self._spec, self._checksum = about, None, 0
        self._file = opened(path, compression, "wb")
        self._file.write(_BEGINNING)

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
        self._record(b"".join(parts))
        self.count += 1

    def _begin(self, spec: Any) -> None:
        self._spec = spec
        self._record(json.dumps({"spec": described(spec), **self._about}).encode())

    def _record(self, content: bytes) -> None:
        length = struct.pack("<Q", len(content))
        before = zlib.crc32(length, self._checksum)
        self._checksum = zlib.crc32(content, before)
        self._file.write(b"".join([length, struct.pack("<I", before), content, struct.pack("<I", self._checksum)]))

    def finish(self) -> None:
        """Ends the file."""
        if self._spec is None:
            self._begin(())
        self._record(b"\x00" + struct.pack("<q", self.count))
        self._file.close()

    def abandon(self) -> None:
        """Closes the file where it stands, unless `finish` was called."""
        self._file.close()


def read_elements(path: str | os.PathLike[str], compression: str | None, **about: Any) -> Iterator[Any]:
    """The elements of a file that `Writer` wrote, with the same `about`.

    Raises:
        DataLossError: it is missing or damaged.
    """
    records = _records(path, compression)
    try:
        told = json.loads(next(records, b""))
        specs, structure = flatten(read_description(told["spec"]))
    except _UNREADABLE as e:
        raise DataLossError(f"{path} is no file of elements that replicax wrote: {e}") from e
    if any(told.get(name) != value for name, value in about.items()):
        raise DataLossError(f"{path} belongs to another saved dataset, or was saved anew since this one was loaded.")
    count = 0
    for content in records:
        if content[:1] == b"\x00":
            if content[1:] != struct.pack("<q", count) or next(records, None) is not None:
                raise DataLossError(f"{path} does not have the elements that it should have. Write it anew.")
            return
        try:
            element = structure.unflatten(_arrays(content, specs))
        except _UNREADABLE as e:
            raise DataLossError(f"{path} cannot be read at element {count}: {e}") from e
        yield element
        count += 1
    raise DataLossError(f"{path} ends after {count} elements, before its end. Write it anew.")


def _records(path: str | os.PathLike[str], compression: str | None) -> Iterator[bytes]:
    """The records of a file, each once its checksum was found right."""
    with _opened_whole(path, compression) as file:
        if _bytes(file, len(_BEGINNING), path) != _BEGINNING:
            raise DataLossError(
                f"{path} is no file of elements that replicax wrote. Delete it to have it written anew."
            )
        checksum = 0
        while length := _bytes(file, 8, path):
            (size,) = struct.unpack("<Q", _checked(length, file, checksum, path))
            checksum = zlib.crc32(length, checksum)
            content = _checked(_bytes(file, size, path), file, checksum, path, size)
            checksum = zlib.crc32(content, checksum)
            yield content


def _opened_whole(path: str | os.PathLike[str], compression: str | None) -> BinaryIO:
    try:
        return opened(path, compression)
    except PermissionError:
        raise
    except OSError as e:
        raise DataLossError(f"{path} cannot be read: {e}") from e


def _checked(content: bytes, file: BinaryIO, checksum: int, path: Any, size: int = 8) -> bytes:
    """What was read, if it is complete and the checksum that comes next is that of it."""
    told = _bytes(file, 4, path)
    if len(content) < size or len(told) < 4:
        raise DataLossError(f"{path} ends in the middle of an element. Write it anew.")
    if told != struct.pack("<I", zlib.crc32(content, checksum)):
        raise DataLossError(f"{path} is damaged: a checksum does not fit. Write it anew.")
    return content


def _bytes(file: BinaryIO, count: int, path: Any) -> bytes:
    try:
        return file.read(count)
    except (EOFError, OSError, zlib.error) as e:  # as gzip says it
        raise DataLossError(f"{path} cannot be read: {e}") from e


def _arrays(content: bytes, specs: list[TensorSpec]) -> list[np.ndarray]:
    arrays, place, view = [], 1, memoryview(content)

    def numbers(count: int) -> tuple[int, ...]:
        nonlocal place
        place += 8 * count
        return struct.unpack_from(f"<{count}q", content, place - 8 * count)

    def taken(count: int) -> bytes:
        nonlocal place
        place += count
        return bytes(view[place - count : place])  # a copy, which is aligned

    for spec in specs:
        shape = numbers(*numbers(1))
        size = int(np.prod(shape, dtype=np.int64))
        if spec.dtype != np.dtype(object):
            arrays.append(np.frombuffer(taken(size * spec.dtype.itemsize), spec.dtype).reshape(shape))
            continue
        texts = np.empty(size, object)
        texts[:] = [taken(*numbers(1)) for _ in range(size)]
        arrays.append(texts.reshape(shape))
    return arrays


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
        if not path.parent.is_dir():
            raise FileNotFoundError(f"There is no folder {path.parent} for the file {path.name}. Make it before.")
        with replacing(path, _CACHE) as new:
            yield from while_written(source._make(reading), Writer(new, None))

    return make


class Spread:
    """Writes elements to the files of a folder, and what they are."""

    def __init__(self, folder: Path, compression: str | None, shard_of: Callable[[Any], int] | None, spec: Any):
        self._folder, self._compression, self._shard_of, self._spec = folder, compression, shard_of, spec
        self._writers: dict[int, Writer] = {}
        self._token = uuid.uuid4().hex
        folder.mkdir()

    def write(self, element: Any) -> None:
        """Writes one element to its file."""
        number = 0 if self._shard_of is None else self._shard_of(element)
        if number not in self._writers:
            about = {"token": self._token, "number": number}
            self._writers[number] = Writer(self._folder / _name(number), self._compression, **about)
        self._writers[number].write(element)

    def finish(self) -> None:
        """Ends the files, and writes what they are."""
        for writer in self._writers.values():
            writer.finish()
        about = {
            "format": _FORMAT,
            "token": self._token,
            "spec": described(self._spec),
            "compression": self._compression,
            "shards": {str(number): writer.count for number, writer in sorted(self._writers.items())},
            "files": [_name(number) for number in sorted(self._writers)],
        }
        write_record(os.path.join(self._folder, RECORD), about)

    def abandon(self) -> None:
        """Closes what is open."""
        for writer in self._writers.values():
            writer.abandon()


def while_written(elements: Iterator[Any], writer: Writer | Spread) -> Iterator[Any]:
    """The elements, each written as it passes by. What is written is finished only if all of them have passed."""
    try:
        for element in elements:
            writer.write(element)
            yield element
        writer.finish()
    finally:
        writer.abandon()


def _name(number: int) -> str:
    return f"{number:05d}.elements"


def is_saved(path: Path) -> bool:
    """Whether there is a folder that `Spread` wrote.

    Raises:
        DataLossError: there is one, and its record is not.
    """
    place = Path(existing(str(path)))
    if not (place / RECORD).is_file() and next(place.glob("*.elements"), None):
        raise DataLossError(f"{path} is a saved dataset of which the file {RECORD} is missing. Save it anew elsewhere.")
    return (place / RECORD).is_file()


class Saved:
    """A folder that `Spread` wrote.

    Raises:
        FileNotFoundError: there is none.
        DataLossError: it is damaged.
    """

    def __init__(self, path: Path):
        if not is_saved(path):
            raise FileNotFoundError(f"There is no saved dataset at {path}: the file {RECORD} is not there.")
        self._path = os.path.abspath(path)  # the working folder may be another one when elements are read
        try:
            about = read_record(os.path.join(existing(self._path), RECORD))
            if about["format"] != _FORMAT:
                raise ValueError(f"the format is {about['format']!r}")
            self.spec, self._compression = read_description(about["spec"]), about["compression"]
            self.shards = {int(number): int(count) for number, count in about["shards"].items()}
            self._token = about["token"]
        except (*_UNREADABLE, OSError) as e:
            raise DataLossError(f"{path} is no dataset that replicax saved, or is damaged: {e}") from e

    def elements(self, number: int, structure: Any) -> Iterator[Any]:
        """The elements of one file, in the structure `structure`."""
        file = os.path.join(existing(self._path), _name(number))
        for element in read_elements(file, self._compression, token=self._token, number=number):
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
