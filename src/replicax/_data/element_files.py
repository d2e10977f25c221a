"""Elements on disk: caches, snapshots and saved datasets.

A file of elements is an `.npz` file, which `numpy.load` reads too: a zip archive of `.npy` arrays, with a CRC-32 of
each. It has consecutive elements in chunks. A chunk has two arrays for each leaf of the elements:
`CHUNK.LEAF.values` are the values of all elements one after the other, and `CHUNK.LEAF.shapes` the shape of each
element. Strings are stored as bytes, with their lengths in `CHUNK.LEAF.lengths`, and so are dtypes that `.npy` does
not know. The last member, `elements.json`, has the elements' spec, and the part and the number of elements of each
chunk. A cache is such a file; a saved dataset is a folder with one, and with the record that makes it known as ours.
Files and folders come into place whole (see `_base.atomic_files`).
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import threading
import uuid
import weakref
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from replicax._base.atomic_files import Artifact, existing, read_record, replacing, write_record
from replicax._base.errors import DataLossError, InvalidArgumentError
from replicax._base.specs import TensorSpec, as_dtype, spec_of
from replicax._base.types import Tree
from replicax._data.elements import flatten, tensor_dtype

_FORMATS = "replicax dataset "
_FORMAT = _FORMATS + "4"
_RECORD, _FILE, _ABOUT = "replicax-dataset.json", "elements.npz", "elements.json"
_DATASET, CACHE = Artifact("saved dataset", _RECORD), Artifact("cache")
_CHUNK_ELEMENTS, _CHUNK_BYTES = 1024, 1 << 20  # a chunk ends with the element that reaches one of these
_STRING = np.dtype(object)

PartOf: TypeAlias = Callable[[Tree], int]


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


class ElementWriter:
    """A file that elements of this spec are written to, each to the part whose number `part_of` gives.

    Without a spec it is that of the first element.
    """

    def __init__(self, path: str, spec: Tree = None, compression: str | None = None, part_of: PartOf | None = None):
        self._part_of = part_of
        self._take_spec(() if spec is None else spec, known=spec is not None)
        # For each part, the leaves of the elements of its next chunk, and their bytes.
        self._waiting: dict[int, list[list[np.ndarray]]] = collections.defaultdict(list)
        self._bytes: dict[int, int] = collections.Counter()
        self._count, self._chunks = 0, list[tuple[int, int]]()
        self._file = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compression == "GZIP" else zipfile.ZIP_STORED)

    def _take_spec(self, spec: Tree, known: bool) -> None:
        self._spec, self._known = spec, known
        self._description = spec_to_json(spec)
        specs, self._structure = flatten(spec)
        self._dtypes = [spec.dtype for spec in specs]

    def through(self, elements: Iterator[Tree]) -> Iterator[Tree]:
        """Yields the elements and writes each of them; the file is complete only if all have been asked for."""
        try:
            for element in elements:
                self._write(element)
                yield element
            for part in sorted(part for part, waiting in self._waiting.items() if waiting):
                self._end_chunk(part)
            about = {"spec": self._description, "chunks": self._chunks, "id": uuid.uuid4().hex}
            self._file.writestr(_ABOUT, json.dumps(about))
            self._file.close()
        finally:
            with contextlib.suppress(OSError):  # as on a full disk
                self._file.close()

    def _write(self, element: Tree) -> None:
        leaves, structure = flatten(element)
        if not self._known:
            self._take_spec(spec_of(element), known=True)
        if structure != self._structure or any(array.dtype != kind for array, kind in zip(leaves, self._dtypes)):
            raise InvalidArgumentError(
                f"Elements of one file have one structure and its dtypes: those of {self._spec}, and not, as number "
                f"{self._count}, of {spec_of(element)}."
            )
        part = 0 if self._part_of is None else self._part_of(element)
        waiting = self._waiting[part]
        if waiting and [array.ndim for array in leaves] != [array.ndim for array in waiting[0]]:
            self._end_chunk(part)
        waiting.append([np.array(array) for array in leaves])  # copies: iterators may use their memory again
        self._bytes[part] += sum(array.nbytes for array in leaves)
        self._count += 1
        if len(waiting) >= _CHUNK_ELEMENTS or self._bytes[part] >= _CHUNK_BYTES:
            self._end_chunk(part)

    def _end_chunk(self, part: int) -> None:
        waiting = self._waiting[part]
        for leaf, arrays in enumerate(zip(*waiting)):
            for name, array in _packed(arrays).items():
                content = io.BytesIO()
                np.lib.format.write_array(content, array, allow_pickle=False)
                self._file.writestr(f"{len(self._chunks)}.{leaf}.{name}.npy", content.getbuffer())
        self._chunks.append((part, len(waiting)))
        waiting.clear()
        self._bytes[part] = 0


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


class ElementFile:
    """A file that `ElementWriter` wrote, open as long as this object lives: all parts are read from one open file.

    Raises:
        DataLossError: it is missing or damaged; here, or where an element is read.
    """

    def __init__(self, path: str):
        self._opening = threading.Lock()
        with _as_data_loss(path):
            self._file, self._identity = self._opened(path), _identity(path)
            self._about: dict[str, Any] = json.loads(self._file.read(_ABOUT))
            self.spec = spec_from_json(self._about["spec"])
            # Of each part the numbers of its chunks, and how many elements they have.
            self.chunks: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
            for number, (part, count) in enumerate(self._about["chunks"]):
                self.chunks[int(part)].append((number, int(count)))

    def _opened(self, path: str) -> zipfile.ZipFile:
        file = zipfile.ZipFile(path)
        weakref.finalize(self, file.close)
        return file

    def _current(self, path: str) -> zipfile.ZipFile:
        """Returns the open file; another one, with the same content, where it is not what lies at `path` now."""
        with self._opening:
            if (identity := _identity(path)) != self._identity:
                file = self._opened(path)
                if json.loads(file.read(_ABOUT)) != self._about:
                    raise ValueError("it was written anew since it was opened")
                self._file, self._identity = file, identity
            return self._file

    def elements(self, path: str, part: int, spec: Tree) -> Iterator[Tree]:
        """Yields the elements of one part, in the structure of `spec`; `path` is where the file lies now."""
        specs, structure = flatten(spec)
        with _as_data_loss(path):
            file = self._current(path)
        for number, count in self.chunks[part]:
            with _as_data_loss(path):
                columns = [_unpacked(file, f"{number}.{leaf}", s.dtype) for leaf, s in enumerate(specs)]
            yield from (structure.unflatten([column[i] for column in columns]) for i in range(count))


def _identity(path: str) -> tuple[int, ...]:
    """Returns what tells that an open file is still what lies at a path, and was opened by this process.

    Forked processes would move each other's position in a file that they share.
    """
    found = os.stat(path)
    return os.getpid(), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


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


# --- saved datasets --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def saving(
    path: str, spec: Tree, compression: str | None, part_of: PartOf | None, first: bool
) -> Iterator[ElementWriter]:
    """Return a context in which a dataset is saved at `path`; with `first`, unless that has been done meanwhile."""
    with replacing(path, _DATASET, first) as folder:
        os.mkdir(folder)
        yield ElementWriter(os.path.join(folder, _FILE), spec, compression, part_of)
        write_record(os.path.join(folder, _RECORD), {"format": _FORMAT, "files": [_FILE]})


def is_saved(path: str) -> bool:
    """Returns whether a dataset was saved at `path`."""
    return os.path.isfile(os.path.join(existing(path), _RECORD))


class SavedDataset:
    """A dataset that was saved at `path`.

    Raises:
        FileNotFoundError: there is none.
        DataLossError: it is damaged.
    """

    def __init__(self, path: str):
        self._path = os.path.abspath(path)  # the working folder may be another one when elements are read
        if not is_saved(self._path):
            raise FileNotFoundError(f"There is no saved dataset at {path}: the file {_RECORD} is not there.")
        try:
            found = read_record(os.path.join(existing(self._path), _RECORD)).get("format")
            if not isinstance(found, str) or not found.startswith(_FORMATS):
                raise ValueError(f"the format is {found!r}")
        except (ValueError, OSError) as e:
            raise DataLossError(f"{path} is no dataset that replicax saved, or is damaged: {e}") from e
        if found != _FORMAT:
            raise DataLossError(
                f"{path} was saved by another version of replicax: its format is {found!r}, and this version reads "
                f"{_FORMAT!r}. Read it with that version, or save the dataset anew."
            )
        self._file = ElementFile(self._place())
        self.spec = self._file.spec
        # The number of elements of each part.
        self.parts = {part: sum(count for _, count in chunks) for part, chunks in sorted(self._file.chunks.items())}

    def _place(self) -> str:
        return os.path.join(existing(self._path), _FILE)

    def elements(self, part: int, spec: Tree) -> Iterator[Tree]:
        """Returns the elements of one part, in the structure of `spec`."""
        return self._file.elements(self._place(), part, spec)

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
