"""TensorFlow's tensor bundles, read: a file `PREFIX.index` and files `PREFIX.data-00000-of-00001` with the tensors.

The index is a sorted table. Its first entry, of the empty key, says in how many files the tensors are; each other entry
says of a tensor its dtype and shape, and where it lies. The values are messages of
tensorflow/core/protobuf/tensor_bundle.proto. A tensor that was saved in slices has an entry that lists them, and an
entry for each slice.
"""

from __future__ import annotations

import math
import os
import struct
import weakref
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from replicax._base import crc32c, doc_pages
from replicax._base.errors import CheckpointError
from replicax._base.wire_format import fields, signed, varint
from replicax._checkpoint import sorted_table

_STRING = 7
# The numbers of tensorflow/core/framework/types.proto.
_DTYPES: dict[int, np.dtype] = {
    number: np.dtype(object) if number == _STRING else jnp.dtype(name)
    for number, name in {
        1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", _STRING: "string", 8: "complex64",
        9: "int64", 10: "bool", 14: "bfloat16", 17: "uint16", 18: "complex128", 19: "float16", 22: "uint32",
        23: "uint64", 24: "float8_e5m2", 25: "float8_e4m3fn", 26: "float8_e4m3fnuz", 27: "float8_e4m3b11fnuz",
        28: "float8_e5m2fnuz", 29: "int4", 30: "uint4",
    }.items()
}  # fmt: skip
_CHUNK = 1 << 24  # how many bytes are read at once


class _Extent(NamedTuple):
    """The part of a dimension that a slice has; all of it where the length is None."""

    start: int
    length: int | None


class _Entry(NamedTuple):
    """What the index says of a tensor."""

    number: int  # of the dtype
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    slices: list[list[_Extent]]


def prefix_at(path: str) -> str | None:
    """Returns the prefix of the bundle at a path, which may be the folder of a SavedModel; None where there is none."""
    if os.path.isfile(f"{path}.index"):
        return path
    of_model = os.path.join(path, "variables", "variables")
    is_model = any(os.path.isfile(os.path.join(path, f"saved_model.{end}")) for end in ("pb", "pbtxt"))
    return of_model if is_model and os.path.isfile(f"{of_model}.index") else None


class TensorBundle(Mapping[str, np.ndarray]):
    """The tensors of a bundle by their keys, each read and checked when it is asked for.

    The index is read and checked at once, and so is that all of it is there. The files stay open, so that tensors can
    be read when the files have been deleted. Tensors of strings are arrays of objects, which are bytes.

    Args:
        prefix: the path of the files without their endings.

    Raises:
        ImportError: google-crc32c is missing.
        CheckpointError: the bundle is damaged or cut off, or a file is missing.
    """

    def __init__(self, prefix: str):
        extend, masked_crc32c = crc32c.extending(), crc32c.masked_crc32c()
        if extend is None or masked_crc32c is None:
            raise ImportError(
                f"Checkpoints of TensorFlow are read with the package google-crc32c: {doc_pages.install('checkpoint')}."
            )
        self._prefix, self._extend = prefix, extend
        index = f"{prefix}.index"
        try:
            with open(index, "rb") as file:
                content = file.read()
            table = dict(sorted_table.entries(content, masked_crc32c))
            self.digest = zlib.crc32(content)  # of the index, which has the checksum of each tensor
            shards = _shard_count(table.pop(b""))
            self._entries = {key: _entry(value) for key, value in table.items()}
            # Those of slices begin with a zero byte.
            self._names = {key.decode(): key for key in table if not key.startswith(b"\0")}
        except (OSError, ValueError, KeyError, struct.error) as error:
            raise CheckpointError(f"TensorFlow's checkpoint {prefix} is damaged: {index}: {error}.") from error
        self._files = [self._open(number, shards) for number in range(shards)]
        self._check_sizes()

    def _open(self, number: int, count: int) -> tuple[str, int]:
        """Returns the name of a file with tensors, and its descriptor."""
        path = f"{self._prefix}.data-{number:05d}-of-{count:05d}"
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"TensorFlow's checkpoint {self._prefix} is not whole: {error}.") from error
        weakref.finalize(self, os.close, descriptor)
        return path, descriptor

    def _check_sizes(self) -> None:
        sizes = [os.fstat(descriptor).st_size for _, descriptor in self._files]
        for key, entry in self._entries.items():
            if not entry.slices and (entry.shard >= len(sizes) or entry.offset + entry.size > sizes[entry.shard]):
                raise self._damaged(key, entry, "it is cut off")

    def _damaged(self, key: bytes, entry: _Entry, problem: str) -> CheckpointError:
        file = self._files[entry.shard][0] if entry.shard < len(self._files) else f"{self._prefix}.index"
        name = key.decode(errors="replace") if not key.startswith(b"\0") else f"a slice of {_name_of_slice(key)}"
        return CheckpointError(f"TensorFlow's checkpoint {self._prefix} is damaged: {file}: {name}: {problem}.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def check(self) -> None:
        """Reads all of the bundle; raises CheckpointError where something is damaged."""
        for key, entry in self._entries.items():
            if not entry.slices and entry.number in _DTYPES:
                self._tensor(key, entry)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return self._entries[self._names[name]].shape

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype of a tensor: `object` for strings and for what NumPy has no dtype for."""
        return _DTYPES.get(self._entries[self._names[name]].number, np.dtype(object))

    def __getitem__(self, name: str) -> np.ndarray:
        key = self._names[name]
        entry = self._entries[key]
        if entry.number not in _DTYPES:
            raise CheckpointError(f"{name} in {self._prefix} is of TensorFlow's dtype {entry.number}: no array has it.")
        if not entry.slices:
            return self._tensor(key, entry)
        whole = np.empty(entry.shape, self.dtype(name))
        missing = math.prod(entry.shape)
        for extents in entry.slices:
            part_key = _key_of_slice(key, extents)
            if (part := self._entries.get(part_key)) is None:
                raise self._damaged(key, entry, f"its slice {_shown(extents)} is missing")
            place = tuple(slice(start, None if length is None else start + length) for start, length in extents)
            try:
                whole[place] = self._tensor(part_key, part)
            except ValueError as error:
                raise self._damaged(key, entry, f"its slice {_shown(extents)} does not fit: {error}") from error
            missing -= math.prod(part.shape)
        if missing:
            raise self._damaged(key, entry, "its slices do not cover it")
        return whole

    def _tensor(self, key: bytes, entry: _Entry) -> np.ndarray:
        data, checksum = self._bytes(key, entry)
        if entry.number == _STRING:
            return self._strings(key, entry, data.tobytes())
        if crc32c.masked(checksum) != entry.checksum:
            raise self._damaged(key, entry, "its checksum does not fit")
        try:
            tensor: np.ndarray = data.view(_DTYPES[entry.number])
            return tensor.reshape(entry.shape)
        except ValueError as error:
            raise self._damaged(key, entry, "its size does not fit its shape") from error

    def _bytes(self, key: bytes, entry: _Entry) -> tuple[np.ndarray, int]:
        """Returns the bytes of a tensor, and their checksum."""
        data, checksum, (_, descriptor) = np.empty(entry.size, np.uint8), 0, self._files[entry.shard]
        for start in range(0, entry.size, _CHUNK):
            chunk = os.pread(descriptor, min(_CHUNK, entry.size - start), entry.offset + start)
            if len(chunk) < min(_CHUNK, entry.size - start):
                raise self._damaged(key, entry, "it is cut off")
            data[start : start + len(chunk)] = np.frombuffer(chunk, np.uint8)
            checksum = self._extend(checksum, chunk)
        return data, checksum

    def _strings(self, key: bytes, entry: _Entry, data: bytes) -> np.ndarray:
        """Returns strings: their lengths come first, then a checksum of the lengths, then the bytes of all.

        The checksums are those of the lengths as numbers of 4 bytes (8 where they do not fit), and of what follows.
        """
        count, at, checksum = math.prod(entry.shape), 0, 0
        lengths = []
        try:
            for _ in range(count):
                length, at = varint(data, at)
                lengths.append(length)
                checksum = self._extend(checksum, struct.pack("<I" if length < 1 << 32 else "<Q", length))
        except ValueError as error:
            raise self._damaged(key, entry, str(error)) from error
        stored = data[at : at + 4]
        if len(data) != at + 4 + sum(lengths) or struct.pack("<I", crc32c.masked(checksum)) != stored:
            raise self._damaged(key, entry, "the lengths of its strings do not fit")
        if crc32c.masked(self._extend(checksum, data[at:])) != entry.checksum:
            raise self._damaged(key, entry, "its checksum does not fit")
        strings, at = np.empty(count, object), at + 4
        for number, length in enumerate(lengths):
            strings[number] = data[at : at + length]
            at += length
        return strings.reshape(entry.shape)


def _shard_count(header: bytes) -> int:
    """Returns the number of files with tensors (BundleHeaderProto)."""
    told = dict(fields(header))
    if told.get(2, 0) != 0:
        raise ValueError("it was written on a machine with another order of bytes (big-endian)")
    return _int(told.get(1, 1))


def _entry(message: bytes) -> _Entry:
    """Returns an entry of the index (BundleEntryProto)."""
    told: dict[int, int] = {}
    shape: tuple[int, ...] = ()
    slices = []
    for number, value in fields(message):
        if isinstance(value, int):
            told[number] = value
        elif number == 2:
            dims = [dict(fields(dim)) for n, dim in fields(value) if n == 2 and isinstance(dim, bytes)]
            shape = tuple(signed(_int(dim.get(1, 0))) for dim in dims)
        elif number == 7:
            extents = [dict(fields(extent)) for _, extent in fields(value) if isinstance(extent, bytes)]
            slices.append([_Extent(_int(e.get(1, 0)), _int(e[2]) if 2 in e else None) for e in extents])
    shard, offset, size, checksum = (told.get(number, 0) for number in (3, 4, 5, 6))
    return _Entry(told.get(1, 0), shape, shard, offset, size, checksum, slices)


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a field is of another kind than it should be")
    return value


def _shown(extents: list[_Extent]) -> str:
    return str([(start, length) for start, length in extents])


# The keys of slices, in the format of LevelDB's "ordered code".


def _key_of_slice(name: bytes, extents: list[_Extent]) -> bytes:
    """Returns the key of a slice: 0, the tensor's name, the number of dimensions, and each extent."""
    numbers = [number for e in extents for number in (e.start, -1 if e.length is None else e.length)]
    return (
        b"\0"
        + name.replace(b"\0", b"\0\xff")
        + b"\0\1"
        + _ordered(len(extents))
        + b"".join(map(_ordered_signed, numbers))
    )


def _name_of_slice(key: bytes) -> str:
    return key[1:].partition(b"\0\1")[0].decode(errors="replace")


def _ordered(number: int) -> bytes:
    """Returns a number as its count of bytes, and the bytes."""
    size = (number.bit_length() + 7) // 8
    return bytes([size]) + number.to_bytes(size, "big")


def _ordered_signed(number: int) -> bytes:
    """Returns a number as `size` bytes, of which the first `size` bits, before the number's sign, tell the size."""
    size = (number if number >= 0 else ~number).bit_length() // 7 + 1
    head = ((1 << size) - 1) << (7 * size)  # `size` bits that are set, and one for the sign
    return ((number + (1 << 8 * size)) % (1 << 8 * size) ^ head).to_bytes(size, "big")
