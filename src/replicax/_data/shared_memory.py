"""Large arrays on their way from one process to another, in memory that both have mapped."""

from __future__ import annotations

import collections
import mmap
import os
import tempfile
from typing import NamedTuple

import numpy as np

from replicax._base.host_memory import LARGE, lend, settle

# The bytes of the memory; the system provides what is used.
_SIZE = 1 << 28


def new_file() -> int:
    """Returns the descriptor of a file for such memory, which has no name and ends with the last of its users."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("replicax-input")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    try:
        os.truncate(file, _SIZE)
    except OSError:
        os.close(file)
        raise
    return file


def _mapped(file: int) -> np.ndarray:
    try:
        return np.frombuffer(mmap.mmap(file, _SIZE), np.uint8)
    finally:
        os.close(file)


class Place(NamedTuple):
    """Where an array lies in the memory: its first byte there, its shape and its dtype."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype


class Writer:
    """The side that puts arrays into the memory."""

    def __init__(self, file: int):
        self._memory = _mapped(file)
        self._end = 0
        self._rooms: dict[int, int] = {}  # the bytes of each place that was ever used
        self._free: dict[int, list[int]] = collections.defaultdict(list)  # places by their bytes
        self._taken: list[int] = []  # places that were not handed over yet

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Place, np.ndarray] | None:
        """Returns a place, and an array in it to be filled; None for small arrays, and where there is no room."""
        size = int(np.prod(shape)) * dtype.itemsize
        if size < LARGE or dtype.hasobject:
            return None
        room = 1 << (size - 1).bit_length()
        if self._free[room]:
            start = self._free[room].pop()
        elif self._end + room <= _SIZE:
            start, self._end = self._end, self._end + room
            self._rooms[start] = room
        else:
            return None
        self._taken.append(start)
        return Place(start, shape, dtype), self._memory[start : start + size].view(dtype).reshape(shape)

    def hand_over(self) -> None:
        """Notes that the reader has the places that were taken."""
        self._taken.clear()

    def take_back(self) -> None:
        """Frees the places that were taken, since the reader does not get them."""
        for start in self._taken:
            self.free(start)
        self._taken.clear()

    def free(self, start: int) -> None:
        """Takes back a place that nobody reads any more."""
        self._free[self._rooms[start]].append(start)


class Reader:
    """The side that uses the arrays where they lie."""

    def __init__(self, file: int):
        self._memory = _mapped(file)
        self._address = _address(self._memory)
        self._unused: collections.deque[np.ndarray] = collections.deque()

    def array(self, place: Place) -> np.ndarray:
        """Returns the array in a place, settled."""
        size = int(np.prod(place.shape)) * place.dtype.itemsize
        array = lend(self._memory[place.start : place.start + size], self._unused)
        return settle(array.view(place.dtype).reshape(place.shape))

    def unused(self) -> list[int]:
        """Returns the starts of places that nobody holds any more, each once."""
        found = []
        while self._unused:
            found.append(_address(self._unused.popleft()) - self._address)
        return found


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
