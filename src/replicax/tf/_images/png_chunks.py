"""The chunks of a PNG file: a length, a type of four letters, the data, and a CRC-32 of the type and the data."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from replicax.tf._core import InvalidArgumentError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_HEADER_BYTES = 13
_CRITICAL = {b"IHDR", b"PLTE", b"IDAT", b"IEND"}


def write_chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def check(content: bytes) -> bytes:
    """Return a PNG file without damaged optional chunks, and with all pixels in one chunk.

    Pillow ignores the checksums of pixels. It checks zlib's own checksum only in the chunk of the last pixels.

    Raises:
        InvalidArgumentError: a required chunk is unknown or has a wrong checksum, or the file is cut off.
    """
    optional_before, optional_after, pixels = list[bytes](), list[bytes](), list[bytes]()
    for kind, data in _sound_chunks(content):
        if kind == b"IDAT":
            pixels.append(data)
        else:
            (optional_after if pixels else optional_before).append(write_chunk(kind, data))
    return b"".join([SIGNATURE, *optional_before, write_chunk(b"IDAT", b"".join(pixels)), *optional_after])


def _sound_chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the type and the data of each chunk, except for optional chunks with a wrong checksum."""
    offset, kind = len(SIGNATURE), b""
    while kind != b"IEND":
        if offset + 12 > len(content):
            raise _damage(content, "it ends before its last chunk")
        size, kind = struct.unpack_from(">I4s", content, offset)
        end = offset + 12 + size
        if end > len(content):
            raise _damage(content, f"the chunk at byte {offset} is cut off")
        data = content[offset + 8 : end - 4]
        is_sound = zlib.crc32(data, zlib.crc32(kind)) == struct.unpack_from(">I", content, end - 4)[0]
        is_optional = bool(kind[0] & 0x20)  # the first letter is lower case
        if not is_optional and kind not in _CRITICAL:
            raise _damage(content, f"the chunk at byte {offset} has the unknown type {kind!r}")
        if not is_sound and not is_optional:
            raise _damage(content, f"the chunk {kind.decode()} at byte {offset} has a wrong checksum")
        if offset == len(SIGNATURE) and (kind != b"IHDR" or size != _HEADER_BYTES):
            raise _damage(content, "it does not begin with its header")
        if is_sound:
            yield kind, data
        offset = end


def _damage(content: bytes, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"Invalid PNG data, size {len(content)}: {reason}.")
