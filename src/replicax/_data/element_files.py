"""Elements on disk: caches, snapshots and saved datasets.

A file of elements is an `.npz` file, which `numpy.load` reads too: a zip archive of `.npy` arrays, with a CRC-32 of
each. It has consecutive elements in chunks. A chunk has two arrays for each leaf of the elements:
`CHUNK.LEAF.values` are the values of all elements one after the other, and `CHUNK.LEAF.shapes` the shape of each
element. Strings are stored as bytes, with their lengths in `CHUNK.LEAF.lengths`, and so are dtypes that `.npy` does
not know. The last member, `elements.json`, is the elements' structure and dtypes, how many elements each chunk has,
and to which saving the file belongs. Files and folders come into place whole (see `_base.atomic_files`).
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import uuid
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from replicax._base.atomic_files import Kind, existing, read_record, replacing, write_record
from replicax._base.errors import DataLossError, InvalidArgumentError
from replicax._base.specs import TensorSpec, as_dtype, spec_of
from replicax._base.types import Tree
from replicax._data.base import Base
from replicax._data.elements import Structure, flatten, tensor_dtype
from replicax._data.reading import Maker, Reading, replayed

_FORMAT = "replicax dataset 3"
RECORD = "replicax-dataset.json"
DATASET, _CACHE = Kind("saved dataset", RECORD), Kind("cache")
_ABOUT = "elements.json"
_SUFFIX = ".elements.npz"
_CHUNK_ELEMENTS, _CHUNK_BYTES = 1024, 1 << 20  # a chunk ends with the element that reaches one of these
_STRING = np.dtype(object)


# --- structures as JSON ----------------------------------------------------------------------------------------------


def spec_to_json(spec: Tree) -> dict[str, Any]:
    """Returns a structure of specs as what JSON can write."""
    if isinstance(spec, TensorSpec):
        shape = None if spec.shape.rank is None else list(spec.shape)
        return {"shape": shape, "dtype": "string" if spec.dtype == np.dtype(object) else np.dtype(spec.dtype).name}
    if isinstance(spec, dict):
        if not all(isinstance(key, str) for key in spec):
            raise TypeError(f"Elements that are written to files have strings for the keys of dicts, got {list(spec)}.")
        return {"dict": {key: spec_to_json(value) for key, value in spec.items()}}
    if isinstance(spec, tuple):
        parts = [spec_to_json(value) for value in spec]
        fields = getattr(spec, "_fields", None)
        return {"tuple": parts} if fields is None else {"named": type(spec).__name__, "fields": fields, "tuple": parts}
    raise TypeError(f"Elements that are written to files are made of arrays, tuples and dicts, got {spec!r}.")


def spec_from_json(description: dict[str, Any]) -> Tree:
    """Returns the specs that `spec_to_json` returned. A named tuple becomes one of a class of its own."""
    if "dtype" in description:
        return TensorSpec(description["shape"], as_dtype(description["dtype"]))
    if "dict" in description:
        return {key: spec_from_json(value) for key, value in description["dict"].items()}
    parts = tuple(map(spec_from_json, description["tuple"]))
    return (
        collections.namedtuple(description["named"], description["fields"])(*parts) if "named" in description else parts
    )


# --- files -----------------------------------------------------------------------------------------------------------


def checked_compression(compression: str | None, *further: str) -> str | None:
    """Returns `"GZIP"` or None for the compression that a user gave."""
    if compression not in (None, "", "NONE", "GZIP", *further):
        raise ValueError(f'The compression is "GZIP" or None, got {compression!r}.')
    return "GZIP" if compression == "GZIP" else None


class FileWriter:
    """A file that elements are written to; it is complete once `finish` was called."""

    def __init__(self, path: str | os.PathLike[str], compression: str | None, **about: Any):
        self.count = 0
        self._about = about
        self._spec: Tree = None
        self._structure: Structure | None = None
        self._dtypes, self._description = list[np.dtype](), spec_to_json(())
        self._waiting: list[list[np.ndarray]] = []  # the leaves of the elements of the next chunk
        self._bytes, self._chunks = 0, list[int]()
        how = zipfile.ZIP_DEFLATED if compression == "GZIP" else zipfile.ZIP_STORED
        self._file = zipfile.ZipFile(path, "w", how)

    def write(self, element: Tree) -> None:
        """Writes one element."""
        leaves, structure = flatten(element)
        if self._spec is None:
            self._spec = spec_of(element)
            self._structure, self._dtypes = structure, [array.dtype for array in leaves]
            self._description = spec_to_json(self._spec)
        if structure != self._structure or [array.dtype for array in leaves] != self._dtypes:
            raise InvalidArgumentError(
                f"Elements of one file have one structure and its dtypes: the first is {self._spec}, number "
                f"{self.count} {spec_of(element)}."
            )
        if self._waiting and [array.ndim for array in leaves] != [array.ndim for array in self._waiting[0]]:
            self._end_chunk()
        self._waiting.append([np.array(array) for array in leaves])  # copies: iterators may use their memory again
        self._bytes += sum(array.nbytes for array in leaves)
        self.count += 1
        if len(self._waiting) >= _CHUNK_ELEMENTS or self._bytes >= _CHUNK_BYTES:
            self._end_chunk()

    def _end_chunk(self) -> None:
        for leaf, arrays in enumerate(zip(*self._waiting)):
            for part, array in _packed(arrays).items():
                content = io.BytesIO()
                np.lib.format.write_array(content, array, allow_pickle=False)
                self._file.writestr(f"{len(self._chunks)}.{leaf}.{part}.npy", content.getbuffer())
        self._chunks.append(len(self._waiting))
        self._waiting, self._bytes = [], 0

    def finish(self) -> None:
        """Completes and closes the file."""
        if self._waiting:
            self._end_chunk()
        about = {"spec": self._description, "chunks": self._chunks, **self._about}
        self._file.writestr(_ABOUT, json.dumps(about))
        self._file.close()

    def abandon(self) -> None:
        """Closes the file, which is not to be read, unless `finish` was called."""
        with contextlib.suppress(OSError):  # as on a full disk
            self._file.close()


def _packed(arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns arrays of one dtype and rank as those that stand for them in a file."""
    shapes = np.array([array.shape for array in arrays], np.int64)
    values = np.concatenate([array.ravel() for array in arrays])
    if values.dtype == _STRING:
        lengths = np.array([len(text) for text in values], np.int64)
        return {"shapes": shapes, "lengths": lengths, "values": np.frombuffer(b"".join(values), np.uint8)}
    return {"shapes": shapes, "values": values if values.dtype.isbuiltin == 1 else values.view(np.uint8)}


def _unpacked(file: zipfile.ZipFile, name: str, dtype: np.dtype) -> list[np.ndarray]:
    """Returns the arrays that `_packed` packed, of a chunk and leaf of this name."""
    shapes, values = _member(file, f"{name}.shapes"), _member(file, f"{name}.values")
    if dtype == _STRING:
        ends, content = _member(file, f"{name}.lengths").cumsum(), values.tobytes()
        texts = np.empty(len(ends), object)
        texts[:] = [content[start:end] for start, end in zip([0, *ends], ends)]
        values = texts
    else:
        values = values.view(dtype)
    values.flags.writeable = False  # elements are views of it
    ends = shapes.prod(axis=1).cumsum()
    return [values[start:end].reshape(shape) for start, end, shape in zip([0, *ends], ends, shapes)]


def _member(file: zipfile.ZipFile, name: str) -> np.ndarray:
    # A member is read whole before its content is used, so that its checksum has been compared.
    return np.lib.format.read_array(io.BytesIO(file.read(f"{name}.npy")), allow_pickle=False)


def read_elements(path: str | os.PathLike[str], **about: Any) -> Iterator[Tree]:
    """Yields the elements of a file that `FileWriter` wrote, with the same `about`.

    Raises:
        DataLossError: it is missing or damaged.
    """
    with contextlib.ExitStack() as stack:
        with _as_data_loss(path):
            file = stack.enter_context(zipfile.ZipFile(path))
            told = json.loads(file.read(_ABOUT))
            specs, structure = flatten(spec_from_json(told["spec"]))
            chunks: list[int] = told["chunks"]
        if any(told.get(name) != value for name, value in about.items()):
            raise DataLossError(
                f"{path} belongs to another saved dataset, or was saved anew since this one was loaded."
            )
        for number, count in enumerate(chunks):
            with _as_data_loss(path):
                columns = [_unpacked(file, f"{number}.{leaf}", spec.dtype) for leaf, spec in enumerate(specs)]
            yield from (structure.unflatten([column[i] for column in columns]) for i in range(count))


@contextlib.contextmanager
def _as_data_loss(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises what reading a file raises as a DataLossError that names it."""
    try:
        yield
    except (PermissionError, MemoryError):
        raise
    except Exception as e:  # what zipfile and the decompression raise for damage is not documented
        raise DataLossError(
            f"{path} is damaged, or is no file of elements that replicax wrote: {e}. Delete it and write it anew."
        ) from e


# --- datasets --------------------------------------------------------------------------------------------------------


def cached_in_file(filename: str | os.PathLike[str], source: Base) -> Maker:
    """Returns the elements of `source`, read from the file if it exists; the first complete pass writes it."""
    path = Path(os.fspath(filename))

    @replayed
    def make(reading: Reading) -> Iterator[Tree]:
        if path.is_file():
            yield from read_elements(path)
            return
        if reading.probing:
            yield from source._make(reading)
            return
        if not path.parent.is_dir():
            raise FileNotFoundError(f"There is no folder {path.parent} for the file {path.name}. Create it first.")
        with replacing(path, _CACHE) as new:
            yield from written_through(source._make(reading), FileWriter(new, None))

    return make


class FolderWriter:
    """Writes elements to the files of a folder, and a record of their spec and the files."""

    def __init__(self, folder: Path, compression: str | None, shard_of: Callable[[Tree], int] | None, spec: Tree):
        self._folder, self._compression, self._shard_of, self._spec = folder, compression, shard_of, spec
        self._writers: dict[int, FileWriter] = {}
        self._token = uuid.uuid4().hex
        folder.mkdir()

    def write(self, element: Tree) -> None:
        """Writes one element to its file."""
        number = 0 if self._shard_of is None else self._shard_of(element)
        if number not in self._writers:
            about = {"token": self._token, "number": number}
            self._writers[number] = FileWriter(self._folder / _name(number), self._compression, **about)
        self._writers[number].write(element)

    def finish(self) -> None:
        """Finishes the files, and writes the record."""
        for writer in self._writers.values():
            writer.finish()
        about = {
            "format": _FORMAT,
            "token": self._token,
            "spec": spec_to_json(self._spec),
            "shards": {str(number): writer.count for number, writer in sorted(self._writers.items())},
            "files": [_name(number) for number in sorted(self._writers)],
        }
        write_record(os.path.join(self._folder, RECORD), about)

    def abandon(self) -> None:
        """Closes what is open."""
        for writer in self._writers.values():
            writer.abandon()


def written_through(elements: Iterator[Tree], writer: FileWriter | FolderWriter) -> Iterator[Tree]:
    """Yields the elements and writes each of them; the file is finished only if all have been asked for."""
    try:
        for element in elements:
            writer.write(element)
            yield element
        writer.finish()
    finally:
        writer.abandon()


def _name(number: int) -> str:
    return f"{number:05d}{_SUFFIX}"


def is_saved(path: Path) -> bool:
    """Returns whether there is a folder that `FolderWriter` wrote.

    Raises:
        DataLossError: there is one, and its record is not.
    """
    place = Path(existing(str(path)))
    if not (place / RECORD).is_file() and next(place.glob(f"*{_SUFFIX}"), None):
        raise DataLossError(f"{path} is a saved dataset of which the file {RECORD} is missing. Save it anew elsewhere.")
    return (place / RECORD).is_file()


class SavedDataset:
    """A folder that `FolderWriter` wrote.

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
            self.spec = spec_from_json(about["spec"])
            self.shards = {int(number): int(count) for number, count in about["shards"].items()}
            self._token = about["token"]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OSError) as e:
            raise DataLossError(f"{path} is no dataset that replicax saved, or is damaged: {e}") from e

    def elements(self, number: int, structure: Structure) -> Iterator[Tree]:
        """Yields the elements of one file, in the structure `structure`."""
        file = os.path.join(existing(self._path), _name(number))
        for element in read_elements(file, token=self._token, number=number):
            yield structure.unflatten(jax.tree.leaves(element))

    def check(self, spec: Tree) -> Tree:
        """Returns the spec of the saved elements, in the structure of `spec` if that is given and fits."""
        if spec is None:
            return self.spec
        wanted, structure = flatten(spec)
        there = jax.tree.leaves(self.spec)
        if len(wanted) != len(there) or not all(map(_fits, wanted, there)):
            raise InvalidArgumentError(f"The dataset was saved with elements {self.spec}, not {spec}.")
        return structure.unflatten(there)


def _fits(wanted: Tree, there: TensorSpec) -> bool:
    """Returns whether `wanted` describes the array `there`, or the tensor that it becomes."""
    dtypes = (there.dtype, tensor_dtype(there.dtype))
    return isinstance(wanted, TensorSpec) and wanted.dtype in dtypes and wanted.shape.is_compatible_with(there.shape)
