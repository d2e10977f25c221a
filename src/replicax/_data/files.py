"""Datasets that read files: lines, records of one length, and TFRecord files, which can be written as well."""

from __future__ import annotations

import os
import struct
from typing import Any

from replicax._base import doc_pages
from replicax._base.crc32c import masked_crc32c
from replicax._data.compression import TFRecordOptions, opened, record_compression
from replicax._data.dataset import Dataset
from replicax._data.elements import positive
from replicax._data.nodes.files import FilesOfStrings, FixedLengthRecords, Lines, StringFormat, TFRecords
from replicax._data.sources import names_of


class _FileDataset(Dataset):
    """The strings of several files, in the order of the files."""

    def _of_files(self, filenames: object, compression: str | None, form: StringFormat) -> None:
        kind, names = record_compression(compression), names_of(filenames)
        self._begin(FilesOfStrings(type(self).__name__, names, kind, form))


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
        self._of_files(filenames, compression_type, Lines())


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
        self._of_files(filenames, compression_type, FixedLengthRecords(size, header, footer))


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
        self._of_files(filenames, compression_type, TFRecords())


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
