"""Counts what arrays hold, for tests that say how often a variable's value is in memory."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

Held = dict[tuple[jax.Device, Any], int]


def _bytes_held(min_size: int) -> Held:
    """Returns the bytes of all live arrays by device and kind of memory, buffers that several arrays share once."""
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
def memory_watched(min_size: int) -> Iterator[Callable[[Held, str], None]]:
    """Yields a function that checks the change since in the bytes that arrays hold, by device and kind of memory.

    It leaves out places where nothing has changed, and shards of less than `min_size` bytes. XLA releases a
    computation's operands in threads of its own, some time after the results are ready, and signals nothing. So the
    check looks again until it finds what is expected, and fails if that takes more than ten seconds.
    """
    jax.block_until_ready(jax.live_arrays())
    before = _bytes_held(min_size)

    def check(expected: Held, what: str) -> None:
        deadline = time.monotonic() + 10
        while True:
            more = {place: size - before.get(place, 0) for place, size in _bytes_held(min_size).items()}
            more = {place: size for place, size in more.items() if size}
            if more == expected or time.monotonic() > deadline:
                assert more == expected, what
                return

    yield check
