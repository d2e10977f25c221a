"""Messages between tasks: a header in JSON, and the bytes of arrays.

A message is the length of the header, the header, and the arrays, each at a multiple of 64 bytes. Nothing in it is
code: what arrives is checked against a fixed list of dtypes. Arrays are sent from where they lie, and those of a
message that has arrived are views of it.

Messages follow each other over a lane. Over one of gRPC's, a large one goes in parts, behind a zero, where others have
the length of their header, and the length of all.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"
Bytes: TypeAlias = "bytes | memoryview"

CHUNK = 1 << 20  # bytes of a part of a large message
LARGE = 8 << 20  # bytes; a longer message goes in parts
_SMALL = 1 << 14  # bytes, as many as a record of TLS has; to copy a smaller array is cheaper than to send it by itself

_as_json, _from_json = json.JSONEncoder(separators=(",", ":")).encode, json.JSONDecoder().decode
_ALIGNMENT = 64  # what XLA wants of an array that it uses where it lies
_LENGTH = struct.Struct("<I")
_IN_PARTS = struct.Struct("<IQ")  # a zero, and the length of all

_KINDS = frozenset("biufc")  # the kinds of NumPy's own dtypes that are sent as they are
_OF_ML_DTYPES = {
    name: np.dtype(kind)
    for name, kind in vars(ml_dtypes).items()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}
_TEXTS: dict[str, type] = {"bytes": bytes, "str": str}


class Message:
    """What is sent: segments of bytes that follow each other, and their length."""

    def __init__(self, meta: Sequence[object], arrays: Iterable[object] = ()):
        specs, buffers = [], []
        for array in arrays:
            spec, data = _encoded(array)
            specs.append(spec)
            buffers.append(data)
        try:
            head = _as_json([*meta, specs]).encode()
        except (TypeError, ValueError) as error:
            raise TypeError(f"The head of a message has values that JSON does not have: {error}") from error
        self._segments: list[Bytes] = [_LENGTH.pack(len(head)) + head]
        self.size = _LENGTH.size + len(head)
        for data in buffers:
            if gap := -self.size % _ALIGNMENT:
                self._segments.append(bytes(gap))
            self._segments.append(data)
            self.size += gap + len(data)

    def pieces(self, prefix: bytes) -> Iterator[Bytes]:
        """Yields a prefix and the message as a connection takes them: arrays from where they lie, the rest joined."""
        small: list[Bytes] = [prefix]
        for segment in self._segments:
            if len(segment) < _SMALL:
                small.append(segment)
                continue
            if small:
                yield b"".join(small)
            yield segment
            small = []
        if small:
            yield b"".join(small)

    def parts(self) -> Iterator[bytes]:
        """Yields the message as it is sent: in one part, or, where it is large, in parts of about `CHUNK` bytes."""
        if self.size <= LARGE:
            yield b"".join(self._segments)
            return
        yield _IN_PARTS.pack(0, self.size)
        waiting: list[memoryview] = []
        length = 0
        for segment in self._segments:
            view = memoryview(segment)
            for start in range(0, len(view), CHUNK):
                waiting.append(view[start : start + CHUNK])
                length += len(waiting[-1])
                if length >= CHUNK // 2:
                    yield b"".join(waiting)
                    waiting, length = [], 0
        if waiting:
            yield b"".join(waiting)


def received(parts: Iterator[bytes]) -> Bytes | None:
    """Returns the next message of a stream, None at its end. One that came in parts lies at a multiple of 64 bytes.

    Raises:
        ValueError: parts of a message are missing, or longer than it is.
    """
    first = next(parts, None)
    if first is None or len(first) != _IN_PARTS.size or any(first[: _LENGTH.size]):
        return first
    _, total = _IN_PARTS.unpack(first)
    view = room_for(total)
    filled = 0
    while filled < total:
        part = next(parts, None)
        if part is None:
            raise ValueError(f"A message of {total} bytes ended after {filled}.")
        view[filled : filled + len(part)] = part  # ValueError where it is longer than what is left
        filled += len(part)
    return view


def room_for(size: int) -> memoryview:
    """Returns memory for a message, at a multiple of 64 bytes; ValueError where there is none."""
    try:
        room = np.empty(size + _ALIGNMENT, np.uint8)
    except (MemoryError, ValueError) as error:  # NumPy's ValueError is of sizes that no array has
        raise ValueError(f"There is no memory for a message of {size} bytes.") from error
    start = -room.ctypes.data % _ALIGNMENT
    return room.data[start : start + size]


def parsed(message: bytes | memoryview) -> tuple[list[Any], list[Any]]:
    """Returns the header and the arrays of a message. NumPy arrays are read-only views of it.

    Raises:
        ValueError: it is no message.
    """
    try:
        return _parsed(memoryview(message).toreadonly())
    except (LookupError, OverflowError, RecursionError, TypeError, struct.error) as error:
        raise ValueError(f"no message of a task: {error}") from error


def _parsed(view: memoryview) -> tuple[list[Any], list[Any]]:
    (length,) = _LENGTH.unpack(view[: _LENGTH.size])
    end = _LENGTH.size + length
    meta = _from_json(str(view[_LENGTH.size : end], "utf-8"))
    if end > len(view) or not isinstance(meta, list) or not isinstance(meta[-1], list):
        raise ValueError("no header of a message")
    arrays = []
    for spec in meta.pop():
        end += -end % _ALIGNMENT
        array, size = _decoded(spec, view[end:])
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
        arrays.append(array)
        end += size
    return meta, arrays


def _encoded(value: object) -> tuple[list[object], Bytes]:
    """Returns what is in the header for an array, and its bytes."""
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        spec, data = _encoded(jax.random.key_data(value))
        return ["key", str(jax.random.key_impl(value)), *spec], data
    array = np.asarray(value)
    shape = list(array.shape)
    if array.dtype == object:
        return _encoded_texts(array)
    if array.dtype.kind in "SU":
        name = array.dtype.newbyteorder("<").str
    elif array.dtype.kind in _KINDS or array.dtype.name in _OF_ML_DTYPES:
        name = array.dtype.name
    else:
        raise TypeError(f"An array of dtype {array.dtype} cannot be sent to another task.")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return [name, shape], np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _encoded_texts(array: Array) -> tuple[list[object], Bytes]:
    texts = array.ravel().tolist()
    for name, kind in _TEXTS.items():
        if all(isinstance(text, kind) for text in texts):
            data = [text if isinstance(text, bytes) else text.encode() for text in texts]
            lengths = np.array([len(text) for text in data], np.int64)
            return [name, list(array.shape), sum(map(len, data))], b"".join([lengths.tobytes(), *data])
    wrong = sorted({type(text).__name__ for text in texts})
    raise TypeError(
        f"An array of Python objects cannot be sent to another task unless all are bytes or all are str; got {wrong}."
    )


def _decoded(spec: list[Any], rest: memoryview) -> tuple[Any, int]:
    """Returns the array that a header describes, and how many bytes it has at the beginning of these."""
    name, shape = spec[0], spec[1]
    if name == "key":
        data, size = _decoded(spec[2:], rest)
        return jax.random.wrap_key_data(jax.numpy.asarray(data), impl=shape), size
    count = math.prod(shape)
    if min(shape, default=0) < 0:
        raise ValueError(f"no shape: {shape}")
    if name in _TEXTS:
        return _decoded_texts(_TEXTS[name], shape, count, rest), count * 8 + int(spec[2])
    dtype = _dtype(name)
    size = count * dtype.itemsize
    if size > len(rest):
        raise ValueError(f"A message ends before the {size} bytes of an array.")
    if size == 0:
        return np.empty(shape, dtype), 0
    return np.frombuffer(rest[:size], dtype).reshape(shape), size


def _decoded_texts(kind: type, shape: list[int], count: int, rest: memoryview) -> Array:
    texts = np.empty(count, object)
    start = count * 8
    for index, length in enumerate(np.frombuffer(rest[:start], np.int64)):
        data = bytes(rest[start : start + length])
        texts[index] = data if kind is bytes else data.decode()
        start += length
    return texts.reshape(shape)


def _dtype(name: str) -> np.dtype[Any]:
    if (found := _OF_ML_DTYPES.get(name)) is not None:
        return found
    dtype = np.dtype(name)
    if dtype.kind not in _KINDS | frozenset("SU"):
        raise ValueError(f"no dtype of an array that is sent: {name}")
    return dtype
