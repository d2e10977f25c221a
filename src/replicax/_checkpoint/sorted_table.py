"""Files of sorted keys and values in the format of LevelDB's tables, in which TensorFlow keeps the index of a bundle.

A table is blocks, behind each its compression (a byte) and a checksum (4 bytes). A block has entries, each of which
leaves out what its key begins with like the one before it. The last 48 bytes of the file tell where the block is whose
values tell where the other blocks are. See LevelDB's doc/table_format.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from replicax._base.wire_format import varint

_FOOTER, _MAGIC = 48, 0xDB4775248B80FB57
_PLAIN, _SNAPPY = 0, 1


def entries(content: bytes, masked_crc32c: Callable[[bytes], int]) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys of a table with their values, in the order of the keys.

    Raises:
        ValueError: it is damaged or cut off, or is no such table.
    """
    if len(content) < _FOOTER or struct.unpack("<Q", content[-8:])[0] != _MAGIC:
        raise ValueError("its end is missing, or it is no index")
    start, size, at = _place(content, len(content) - _FOOTER)
    _block(content, start, size, masked_crc32c)  # of the names of filters: there are none
    start, size, _ = _place(content, at)
    for _, place in _of_block(_block(content, start, size, masked_crc32c)):
        start, size, _ = _place(place, 0)
        yield from _of_block(_block(content, start, size, masked_crc32c))


def _place(data: bytes, at: int) -> tuple[int, int, int]:
    """Returns where a block begins, its size, and where these two numbers end."""
    start, at = varint(data, at)
    size, at = varint(data, at)
    return start, size, at


def _block(content: bytes, start: int, size: int, masked_crc32c: Callable[[bytes], int]) -> bytes:
    whole = content[start : start + size + 5]
    if len(whole) < size + 5:
        raise ValueError("a block is cut off")
    if masked_crc32c(whole[:-4]) != struct.unpack("<I", whole[-4:])[0]:
        raise ValueError("the checksum of a block does not fit")
    block, compression = whole[:-5], whole[-5]
    if compression == _PLAIN:
        return block
    if compression != _SNAPPY:
        raise ValueError(f"a block has the unknown compression {compression}")
    try:
        import cramjam
    except ImportError as error:
        raise ImportError("This checkpoint's index is compressed with Snappy: pip install cramjam.") from error
    return bytes(cramjam.snappy.decompress_raw(block))


def _of_block(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(block) < 4:
        raise ValueError("a block is cut off")
    end = len(block) - 4 - 4 * struct.unpack("<I", block[-4:])[0]  # before the places where whole keys are
    at, key = 0, b""
    while at < end:
        shared, at = varint(block, at)
        more, at = varint(block, at)
        size, at = varint(block, at)
        key = key[:shared] + block[at : at + more]
        value = block[at + more : at + more + size]
        at += more + size
        if at > end:
            raise ValueError("an entry is cut off")
        yield key, value
