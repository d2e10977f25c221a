"""Compressed files of records: GZIP and ZLIB."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from typing import Any, BinaryIO

from replicax._base.errors import DataLossError

_CHUNK = 1 << 16  # the bytes that a compressed file gives at a time


def record_compression(compression: str | None) -> str | None:
    """Returns `"GZIP"`, `"ZLIB"` or None for the compression that a user gave; raises ValueError for another one."""
    if compression not in (None, "", "NONE", "GZIP", "ZLIB"):
        raise ValueError(f'The compression is "GZIP", "ZLIB" or None, got {compression!r}.')
    return compression if compression in ("GZIP", "ZLIB") else None


class TFRecordOptions:
    """How a TFRecord file is compressed.

    Args:
        compression_type: `"GZIP"`, `"ZLIB"`, or `""` or None for none.
        compression_level: from 0 to 9, as zlib counts.
        flush_mode, input_buffer_size, output_buffer_size, window_bits, compression_method, mem_level,
            compression_strategy: accepted for compatibility.

    Raises:
        ValueError: another compression.
    """

    def __init__(
        self,
        compression_type: str | None = None,
        flush_mode: int | None = None,
        input_buffer_size: int | None = None,
        output_buffer_size: int | None = None,
        window_bits: int | None = None,
        compression_level: int | None = None,
        compression_method: int | None = None,
        mem_level: int | None = None,
        compression_strategy: int | None = None,
    ):
        self.compression_type = record_compression(compression_type) or ""
        self.compression_level = compression_level


def opened(
    path: str | bytes | os.PathLike[str], compression: str | None, mode: str = "rb", level: int | None = None
) -> BinaryIO:
    """Opens a file, through zlib where `compression` says so; reading damaged data raises DataLossError."""
    level = 6 if level is None else level  # zlib's own default
    file: Any = gzip.open(path, mode, level) if compression == "GZIP" else open(path, mode)  # noqa: SIM115
    if compression == "ZLIB":
        file = _Deflating(file, level) if mode == "wb" else io.BufferedReader(_Inflating(file), _CHUNK)
    if compression is None or mode == "wb":
        return file  # type: ignore[no-any-return]
    return io.BufferedReader(_Inflated(file, path), _CHUNK)


class _Inflated(io.RawIOBase):
    """The content of a compressed file, whose errors name the file."""

    def __init__(self, content: Any, path: str | bytes | os.PathLike[str]):
        self._content, self._path = content, path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count: int = self._content.readinto1(buffer)  # the bytes before the damage are given
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataLossError(f"{os.fsdecode(self._path)!r} cannot be read: {error}") from error
        return count

    def close(self) -> None:
        self._content.close()
        super().close()


class _Inflating(io.RawIOBase):
    """The content of a file of zlib's format."""

    def __init__(self, file: Any):
        self._file, self._inflate = file, zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        out = b""
        while not out and not self._inflate.eof:
            compressed = self._inflate.unconsumed_tail or self._file.read(1 << 16)
            if not compressed:
                raise EOFError("the compressed data are cut off")
            out = self._inflate.decompress(compressed, len(buffer))
        buffer[: len(out)] = out
        return len(out)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Deflating(io.RawIOBase):
    """Writes a file of zlib's format."""

    def __init__(self, file: Any, level: int):
        self._file, self._deflate = file, zlib.compressobj(level)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._file.write(self._deflate.compress(data))
        return len(data)

    def flush(self) -> None:
        if not self.closed and not self._file.closed:
            self._file.write(self._deflate.flush(zlib.Z_SYNC_FLUSH))
            self._file.flush()

    def close(self) -> None:
        if not self._file.closed:
            self._file.write(self._deflate.flush())
            self._file.close()
        super().close()
