"""Messages of protocol buffers, read field by field: https://protobuf.dev/programming-guides/encoding/."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

Value: TypeAlias = int | bytes  # numbers without a sign, and the bytes of texts, messages and packed lists


class Field(NamedTuple):
    """A field of a message: its number, and its value."""

    number: int
    value: Value


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number of variable length that begins at `at`, without a sign, and where it ends.

    Raises:
        ValueError: it is cut off, or has more than 64 bits.
    """
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("a number is cut off")
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & 0xFFFF_FFFF_FFFF_FFFF, at
    raise ValueError("a number has more than 64 bits")


def signed(number: int) -> int:
    """Returns a number of 64 bits as one with a sign."""
    return number - (1 << 64) if number >> 63 else number


def fields(data: bytes) -> Iterator[Field]:
    """Yields the fields of a message in their order.

    Raises:
        ValueError: the message is cut off, or is none.
    """
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = varint(data, at)
            yield Field(number, value)
            continue
        if kind == 2:
            size, at = varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field has the unknown wire type {kind}")
        part, at = data[at : at + size], at + size
        if len(part) < size:
            raise ValueError("a field is cut off")
        yield Field(number, part if kind == 2 else struct.unpack("<Q" if kind == 1 else "<I", part)[0])
