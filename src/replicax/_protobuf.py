"""The few rules of protocol buffers that TPU topologies need: numbers are varints, lists of them are packed."""

from __future__ import annotations

from collections.abc import Iterator


def _varint(number: int) -> bytes:
    number %= 1 << 64  # negative ones in two's complement
    groups = []
    while True:
        number, group = number >> 7, number & 0x7F
        groups.append(group | (0x80 if number else 0))
        if not number:
            return bytes(groups)


def encoded(field: int, value: int | list[int]) -> bytes:
    """A field with a number or a packed list of them."""
    if isinstance(value, int):
        return _varint(field << 3) + _varint(value)
    packed = b"".join(map(_varint, value))
    return _varint(field << 3 | 2) + _varint(len(packed)) + packed


def varints(data: bytes) -> Iterator[int]:
    """The numbers of a packed list."""
    number = shift = 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield number - (1 << 64) if number >> 63 else number
            number = shift = 0
    if shift:
        raise ValueError("the bytes end within a number")


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message by number: numbers, and the bytes of anything else."""
    while data:
        ends = [i + 1 for i, byte in enumerate(data) if byte < 0x80][:2]
        key, value = varints(data[: ends[1]])
        data = data[ends[1] :]
        if key & 7 == 0:
            yield key >> 3, value
        elif key & 7 == 2 and value <= len(data):
            yield key >> 3, data[:value]
            data = data[value:]
        else:
            raise ValueError(f"field {key >> 3} is of a kind that a topology has not")
