"""Datasets that read files: lines, records of one length, and TFRecord files, which can be written as well.

Each is divided among workers by files: a reading has a share of them. A TFRecord is the length of its bytes (64 bits),
a checksum of that, the bytes, and a checksum of these; both are CRC-32C, rotated and shifted by a constant.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from replicax._base import doc_pages
from replicax._base.crc32c import extending, masked, masked_crc32c
from replicax._base.errors import DataLossError, InvalidArgumentError
from replicax._base.specs import TensorSpec
from replicax._base.tracebacks import origin
from replicax._base.types import Tree
from replicax._data import record_blocks
from replicax._data.blocks import Blocks
from replicax._data.compression import TFRecordOptions, opened, record_compression
from replicax._data.dataset import Dataset
from replicax._data.elements import positive
from replicax._data.reading import Reading, skipped
from replicax._data.skipping import Later, Skip, warn_of_making
from replicax._data.sources import names_of
from replicax._data.specs import UNKNOWN_CARDINALITY

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 18  # how many bytes of a TFRecord file are read at a time

# Reads an open file of this name from its beginning, several strings at a time; while elements are skipped, it may
# yield how to read each.
_Read: TypeAlias = Callable[[BinaryIO, bytes, Skip | None], "Iterator[list[bytes] | Later]"]


def _element(text: bytes | Later) -> np.ndarray:
    element = np.empty((), object)
    element[()] = text
    return element


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


class _FileDataset(Dataset):
    """The strings that a function reads from each of several files, in the order of the files."""

    def _of_files(self, filenames: object, compression: str | None, read: _Read) -> None:
        kind, names = record_compression(compression), names_of(filenames)
        what = f"`{type(self).__name__}` ({origin().place}), whose files are compressed,"

        def lists(skip: Skip | None, name: bytes) -> Iterator[list[bytes] | Later]:
            with opened(name, kind) as file:
                yield from read(file, name, skip if kind is None else None)

        def elements(skip: Skip, name: bytes) -> Iterator[Tree]:
            for texts in lists(skip, name):
                if isinstance(texts, Later):
                    yield texts
                else:
                    yield from (Later(_element, text) if skip.on else _element(text) for text in texts)

        @skipped
        def make(reading: Reading) -> Iterator[Tree]:
            if kind is not None and reading.skip is not None and reading.skip.on:
                warn_of_making(reading.skip.count, what)
            count, index = reading.share
            # An error ends only its own file.
            if reading.skip is None:
                of_file: Callable[[bytes], Iterator[Tree]] = functools.partial(lists, None)
                return _Strings(itertools.chain.from_iterable(map(of_file, names[index::count])))
            return itertools.chain.from_iterable(map(functools.partial(elements, reading.skip), names[index::count]))

        self._set_up(make, lambda probe: TensorSpec((), np.object_), UNKNOWN_CARDINALITY, files=len(names))


class TextLineDataset(_FileDataset):
    """The lines of text files, without their ends, as strings.

    Args:
        filenames: a name, or several in a list or array or `Dataset`.
        compression_type: `"GZIP"`, `"ZLIB"`, or None.
        buffer_size, num_parallel_reads, name: accepted for compatibility.

    Raises:
        ValueError: another compression.
        FileNotFoundError: at iteration, where there is no such file.

    >>> import pathlib, tempfile
    >>> import replicax as rx
    >>> path = pathlib.Path(tempfile.mkdtemp(), "lines.txt")
    >>> _ = path.write_text("one\\ntwo\\n")
    >>> list(rx.data.TextLineDataset([str(path)]).as_numpy_iterator())
    [b'one', b'two']
    """

    def __init__(
        self,
        filenames: object,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ):
        self._of_files(filenames, compression_type, _lines)


class FixedLengthRecordDataset(_FileDataset):
    """Records of a fixed number of bytes from binary files, as strings.

    Args:
        filenames: a name, or several in a list or array or `Dataset`.
        record_bytes: how long a record is.
        header_bytes: what comes before the first one; by default nothing.
        footer_bytes: what comes after the last one; by default nothing.
        buffer_size, num_parallel_reads, name: accepted for compatibility.
        compression_type: `"GZIP"`, `"ZLIB"`, or None.

    Raises:
        ValueError: another compression.
        FileNotFoundError: at iteration, where there is no such file.
        InvalidArgumentError: at iteration, where a file does not consist of whole records.

    >>> import pathlib, tempfile
    >>> import replicax as rx
    >>> path = pathlib.Path(tempfile.mkdtemp(), "records")
    >>> _ = path.write_bytes(b"#aabb")
    >>> list(rx.data.FixedLengthRecordDataset(str(path), 2, header_bytes=1).as_numpy_iterator())
    [b'aa', b'bb']
    """

    def __init__(
        self,
        filenames: object,
        record_bytes: int,
        header_bytes: int | None = None,
        footer_bytes: int | None = None,
        buffer_size: int | None = None,
        compression_type: str | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ):
        size, header, footer = positive("record_bytes", record_bytes), int(header_bytes or 0), int(footer_bytes or 0)

        def read(file: BinaryIO, path: bytes, skip: Skip | None) -> Iterator[list[bytes] | Later]:
            file.read(header)
            total = 0
            if skip is not None:
                body = os.fstat(file.fileno()).st_size - header - footer
                while skip.on and body - total >= size:
                    yield Later(_bytes_at, path, header + total, size)
                    total += size
                file.seek(header + total)
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

        self._of_files(filenames, compression_type, read)


class TFRecordDataset(_FileDataset):
    """The records of TFRecord files, as strings.

    Checksums are verified where the package google-crc32c is there, which the extra `data` installs.

    Args:
        filenames: a name, or several in a list or array or `Dataset`.
        compression_type: `"GZIP"`, `"ZLIB"`, or None.
        buffer_size, num_parallel_reads, name: accepted for compatibility.

    Raises:
        ValueError: another compression.
        FileNotFoundError: at iteration, where there is no such file.
        DataLossError: at iteration, where a record is damaged or cut off.

    >>> import tempfile
    >>> import replicax as rx
    >>> path = tempfile.mkdtemp() + "/records"
    >>> with rx.data.TFRecordWriter(path) as writer:
    ...     writer.write(b"one")
    >>> list(rx.data.TFRecordDataset(path).as_numpy_iterator())
    [b'one']
    """

    def __init__(
        self,
        filenames: object,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ):
        self._of_files(filenames, compression_type, _records)


class TFRecordWriter:
    """Writes a TFRecord file; a context manager that closes it. It needs the package google-crc32c.

    Args:
        path: the file, which is written anew.
        options: the compression: `"GZIP"`, `"ZLIB"` or None, or a `TFRecordOptions`.

    >>> import os, tempfile
    >>> import replicax as rx
    >>> path = tempfile.mkdtemp() + "/records"
    >>> with rx.data.TFRecordWriter(path) as writer:
    ...     writer.write(b"hello")
    >>> os.path.getsize(path)
    21
    """

    def __init__(self, path: str | os.PathLike[str], options: Any = None):
        self._checksum = masked_crc32c()
        if self._checksum is None:
            raise ImportError(f"TFRecordWriter needs the package google-crc32c: {doc_pages.install('data')}.")
        if not isinstance(options, TFRecordOptions):
            options = TFRecordOptions(getattr(options, "compression_type", options))
        self._file = opened(os.fspath(path), options.compression_type, "wb", options.compression_level)

    def write(self, record: str | bytes) -> None:
        """Writes one record, of bytes or of text, which is encoded as UTF-8.

        >>> import tempfile, replicax as rx
        >>> path = tempfile.mkdtemp() + "/records"
        >>> with rx.data.TFRecordWriter(path) as writer:
        ...     writer.write(b"hello")
        >>> list(rx.data.TFRecordDataset(path).as_numpy_iterator())
        [b'hello']
        """
        data = record.encode() if isinstance(record, str) else bytes(record)
        length = struct.pack("<Q", len(data))
        self._file.write(b"".join([length, self._masked(length), data, self._masked(data)]))

    def _masked(self, data: bytes) -> bytes:
        assert self._checksum
        return struct.pack("<I", self._checksum(data))

    def flush(self) -> None:
        """Hands to the operating system what was written so far.

        >>> import os, tempfile, replicax as rx
        >>> path = tempfile.mkdtemp() + "/records"
        >>> with rx.data.TFRecordWriter(path) as writer:
        ...     writer.write(b"hello")
        ...     writer.flush()
        ...     os.path.getsize(path)
        21
        """
        self._file.flush()

    def close(self) -> None:
        """Closes the file.

        >>> import tempfile, replicax as rx
        >>> writer = rx.data.TFRecordWriter(tempfile.mkdtemp() + "/records")
        >>> writer.close()
        """
        self._file.close()

    def __enter__(self) -> TFRecordWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _bytes_at(path: bytes, place: int, count: int) -> np.ndarray:
    with open(path, "rb") as file:
        file.seek(place)
        return _element(file.read(count))


def _record_at(path: bytes, place: int) -> np.ndarray:
    with open(path, "rb") as file:
        file.seek(place)
        return _element(next(_whole_records(file, path, place, 1))[0])


def _lines(file: BinaryIO, path: bytes, skip: Skip | None) -> Iterator[list[bytes]]:
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


def _records(file: BinaryIO, path: bytes, skip: Skip | None) -> Iterator[list[bytes] | Later]:
    place = 0
    if skip is not None and (size := os.fstat(file.fileno()).st_size):
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            while skip.on and place + 16 <= size:
                yield Later(_record_at, path, place)
                place += 16 + struct.unpack_from("<Q", data, place)[0]
        file.seek(min(place, size))
    yield from _whole_records(file, path, place)


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
        record_blocks.note(records)
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
