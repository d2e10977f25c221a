"""Counts what arrays hold, for tests that say how often a variable's value is in memory."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax


def _bytes_held(min_size: int) -> dict[tuple[jax.Device, Any], int]:
    """Returns the bytes of all live arrays by device and kind of memory, buffers that several arrays share once."""
    # A replica's thread keeps values until it has ended; `threading.enumerate` leaves it out shortly before that.
    for thread in list(threading._dangling):  # type: ignore[attr-defined]
        if thread.name.startswith("replicax-replica") and thread.ident is not None:
            thread.join()
    gc.collect()
    found: dict[tuple[jax.Device, Any], dict[int, int]] = {}
    for array in jax.live_arrays():
        if array.nbytes < min_size:  # of the thousands that other tests have left
            continue
        for shard in array.addressable_shards:
            if shard.data.nbytes >= min_size:
                place = shard.device, shard.data.sharding.memory_kind
                found.setdefault(place, {})[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return {place: sum(buffers.values()) for place, buffers in found.items()}


@contextlib.contextmanager
def memory_watched(min_size: int) -> Iterator[Callable[[], dict[tuple[jax.Device, Any], int]]]:
    """Yields a function that returns the change since in the bytes that arrays hold, by device and kind of memory.

    It leaves out places where nothing has changed, and shards of less than `min_size` bytes.
    """
    before = _bytes_held(min_size)

    def more_held() -> dict[tuple[jax.Device, Any], int]:
        more = {place: size - before.get(place, 0) for place, size in _bytes_held(min_size).items()}
        return {place: size for place, size in more.items() if size}

    yield more_held
