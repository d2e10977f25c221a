"""Nodes that read files: lines, records of one length, and TFRecord files.

Each is divided among workers by files: a reading has a share of them. A TFRecord is the length of its bytes (64 bits),
a checksum of that, the bytes, and a checksum of these; both are CRC-32C, rotated and shifted by a constant.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from replicax._base import frontend
from replicax._base.crc32c import extending, masked
from replicax._base.errors import DataLossError, InvalidArgumentError
from replicax._base.specs import TensorSpec
from replicax._base.types import Tree
from replicax._data.blocks import Blocks
from replicax._data.compression import opened
from replicax._data.nodes.node import Node, after_skip
from replicax._data.reading import Reading
from replicax._data.skipping import Recipe, Skip, ready, warn_of_making

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 18  # how many bytes of a TFRecord file are read at a time


def _element(text: bytes) -> np.ndarray:
    element = np.empty((), object)
    element[()] = text
    return element


class Files(Node):
    """The elements that a function reads from each of several files, in the order of the files."""

    def __init__(self, name: str, names: Sequence[bytes], read_file: Callable[[bytes], Iterator[Tree]], spec: Tree):
        text = f"{name}({len(names)} file{'s' if len(names) != 1 else ''})"
        super().__init__(text, files=len(names), spec=spec)
        self._names, self._read_file = names, read_file

    def share(self, reading: Reading) -> Sequence[bytes]:
        """Return the names of the files that belong to a reading."""
        count, index = reading.share
        return self._names[index::count]

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        if start:
            return after_skip(self, reading, start)
        # An exception ends only its own file.
        return itertools.chain.from_iterable(map(self._read_file, self.share(reading)))

    def read_recipes(self, reading: Reading, skip: Skip) -> Iterator[Recipe]:
        return map(ready, self.read(reading, 0))


class StringFormat:
    """How strings are stored in a file."""

    def lists(self, file: BinaryIO, path: bytes, place: int) -> Iterator[list[bytes]]:
        """Yield the strings from byte `place` on, where the file stands, several at a time."""
        raise NotImplementedError

    def recipes(self, file: BinaryIO, path: bytes, skip: Skip) -> Generator[Recipe, None, int]:
        """Yield recipes for the strings that are skipped; return the byte at which the others begin."""
        yield from ()
        return 0


class FilesOfStrings(Files):
    """The strings in files of a format, which are compressed if `compression` is not None."""

    def __init__(self, name: str, names: Sequence[bytes], compression: str | None, form: StringFormat):
        super().__init__(name, names, self._lists, TensorSpec((), np.object_))
        self._compression, self._format = compression, form
        self._what = f"`{name}` ({self.origin.place}), whose files are compressed,"

    def _lists(self, name: bytes) -> Iterator[list[bytes]]:
        with opened(name, self._compression) as file:
            yield from self._format.lists(file, name, 0)

    def read(self, reading: Reading, start: int) -> Iterator[Tree]:
        return super().read(reading, start) if start else _Strings(super().read(reading, 0))

    def read_recipes(self, reading: Reading, skip: Skip) -> Iterator[Recipe]:
        if self._compression is not None and skip.on:
            warn_of_making(skip.count, self._what)
        return itertools.chain.from_iterable(map(functools.partial(self._recipes, skip), self.share(reading)))

    def _recipes(self, skip: Skip, name: bytes) -> Iterator[Recipe]:
        with opened(name, self._compression) as file:
            place = 0
            if self._compression is None:
                place = yield from self._format.recipes(file, name, skip)
            for texts in self._format.lists(file, name, place):
                yield from (functools.partial(_element, text) for text in texts)


class _Strings(Blocks):
    """The strings of lists, one by one or as blocks. An exception in place of a list does not end them."""

    def __init__(self, lists: Iterator[list[bytes]]):
        self._lists = lists
        self._list: list[bytes] = []
        self._at = 0

    def __next__(self) -> np.ndarray:
        if self._at == len(self._list):
            self._next_list()
        self._at += 1
        return _element(self._list[self._at - 1])

    def next_block(self, most: int) -> tuple[np.ndarray, int]:
        if self._at == len(self._list):
            self._next_list()
        found = self._list[self._at : self._at + most]
        self._at += len(found)
        block = np.empty(len(found), object)
        block[:] = found
        return block, len(found)

    def _next_list(self) -> None:
        self._list, self._at = [], 0
        while not self._list:
            self._list = next(self._lists)


class Lines(StringFormat):
    """Lines of text, without their ends."""

    def lists(self, file: BinaryIO, path: bytes, place: int) -> Iterator[list[bytes]]:
        lines: list[bytes] = []
        size, most = 0, _CHUNK if os.path.isfile(path) else 0  # a pipe gives each line as it comes
        try:
            for line in file:
                lines.append(line.rstrip(b"\r\n"))
                size += len(line)
                if size > most:
                    yield lines
                    lines, size = [], 0
        except Exception:
            if lines:  # those before the place where compressed data are damaged
                yield lines
            raise
        if lines:
            yield lines


class FixedLengthRecords(StringFormat):
    """Records of `size` bytes, after a header and before a footer of so many bytes."""

    def __init__(self, size: int, header: int, footer: int):
        self._size, self._header, self._footer = size, header, footer

    def recipes(self, file: BinaryIO, path: bytes, skip: Skip) -> Generator[Recipe, None, int]:
        place = self._header
        end = os.fstat(file.fileno()).st_size - self._footer
        while skip.on and end - place >= self._size:
            yield functools.partial(_bytes_at, path, place, self._size)
            place += self._size
        file.seek(place)
        return place

    def lists(self, file: BinaryIO, path: bytes, place: int) -> Iterator[list[bytes]]:
        size, header, footer = self._size, self._header, self._footer
        if not place:
            file.read(header)
        total = max(0, place - header)
        ahead = bytearray()
        while more := file.read1(max(size, _CHUNK)):  # type: ignore[attr-defined]  # what comes before an error
            ahead += more
            used = (len(ahead) - footer) // size * size
            if used > 0:
                whole = bytes(ahead[:used])
                yield [whole[i : i + size] for i in range(0, used, size)]
                total += used
                del ahead[:used]
        if len(ahead) != footer:
            raise InvalidArgumentError(
                f"Excluding the header ({header} bytes) and footer ({footer} bytes), {os.fsdecode(path)!r} has "
                f"body length {total + len(ahead) - footer} bytes, which is not an exact multiple of the record "
                f"length ({size} bytes)."
            )


def _bytes_at(path: bytes, place: int, count: int) -> np.ndarray:
    with open(path, "rb") as file:
        file.seek(place)
        return _element(file.read(count))


class TFRecords(StringFormat):
    """Records of the TFRecord format."""

    def recipes(self, file: BinaryIO, path: bytes, skip: Skip) -> Generator[Recipe, None, int]:
        place, size = 0, os.fstat(file.fileno()).st_size
        if size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                while skip.on and place + 16 <= size:
                    yield functools.partial(_record_at, path, place)
                    place += 16 + _LENGTH.unpack_from(data, place)[0]
            file.seek(min(place, size))
        return place

    def lists(self, file: BinaryIO, path: bytes, place: int) -> Iterator[list[bytes]]:
        return _whole_records(file, path, place)


def _record_at(path: bytes, place: int) -> np.ndarray:
    with open(path, "rb") as file:
        file.seek(place)
        return _element(next(_whole_records(file, path, place, 1))[0])


def _whole_records(file: BinaryIO, path: bytes, place: int, least: int = _CHUNK) -> Iterator[list[bytes]]:
    """Yields the records from byte `place` on, where the file stands; `least` is how many bytes are read at a time."""
    wrong = _comparison()
    data, size = b"", least
    while True:
        more = file.read(size)
        data += more
        records, ends, missing = _whole_in(data)
        used = ends[-1]
        heads = ends if len(data) - used >= 12 else ends[:-1]  # that of a record which is not whole too
        bad = wrong(data, heads, 8)
        bad[: len(records)] |= wrong(data, ends[:-1] + 12, np.diff(ends) - 16)
        sound = int(bad.argmax()) if bad.any() else len(records)
        frontend.current.note_records(records)
        if sound:
            yield records[:sound]
        if bad.any():
            raise DataLossError(f"Corrupted record at byte {place + ends[sound]} of {os.fsdecode(path)!r}.")
        if not more:
            if used < len(data):
                raise DataLossError(f"Truncated record at byte {place + used} of {os.fsdecode(path)!r}.")
            return
        # A length that is damaged asks for no more memory than the file has bytes.
        data, place, size = data[used:], place + int(used), max(least, min(missing, max(len(data), _CHUNK)))


def _whole_in(data: bytes) -> tuple[list[bytes], np.ndarray, int]:
    """Returns the records that are whole in `data`, 0 and where each ends, and how many bytes the next one lacks."""
    records, ends, place, size, missing = list[bytes](), [0], 0, len(data), 12
    while place + 12 <= size:
        end = place + 16 + _LENGTH.unpack_from(data, place)[0]
        if end > size:
            missing = end - size
            break
        records.append(data[place + 12 : end - 4])
        ends.append(end)
        place = end
    return records, np.array(ends), missing


def _comparison() -> Callable[[bytes, np.ndarray, Any], np.ndarray]:
    """Returns a function that tells which of several pieces of data do not have the checksum that stands behind them.

    Its arguments are the data, and the pieces' places and sizes.
    """
    extend = extending()
    if extend is None:
        return lambda data, starts, sizes: np.zeros(len(starts), bool)

    def wrong(data: bytes, starts: np.ndarray, sizes: Any) -> np.ndarray:
        if not len(starts):
            return np.zeros(0, bool)
        ends = starts + sizes
        pairs = zip(starts.tolist(), ends.tolist())
        sums = np.array([extend(0, data[i:j]) for i, j in pairs], np.uint64)
        anywhere = np.ndarray((len(data) - 3,), "<u4", data, strides=(1,))
        found: np.ndarray = masked(sums) != anywhere[ends]
        return found

    return wrong
