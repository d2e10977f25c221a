"""The masked CRC-32C that TensorFlow puts behind records, blocks of tables, and tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TypeVar

import numpy as np

_N = TypeVar("_N", int, np.ndarray)


def extending() -> Callable[[int, bytes], int] | None:
    """Returns the function that takes the checksum of what came before (0: nothing); None without google-crc32c."""
    if importlib.util.find_spec("google_crc32c") is None:
        return None
    import google_crc32c

    extend: Callable[[int, bytes], int] = google_crc32c.extend
    return extend


def masked(checksum: _N) -> _N:
    """Returns a checksum, or an array of them that are 64 bits wide, as it is stored."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) % 2**32


def masked_crc32c() -> Callable[[bytes], int] | None:
    """Returns the function that computes a checksum as it is stored, or None where google-crc32c is missing."""
    extend = extending()
    return None if extend is None else lambda data: masked(extend(0, data))
