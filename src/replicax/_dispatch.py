"""A bound on how many compiled calls with collectives are under way at once on CPU devices.

With several CPU devices JAX runs each device's part of a call on a thread of one pool. Once 32 calls that hold
collectives are in flight, each waits for threads that the others hold, and the process deadlocks and aborts
(seen on JAX 0.10). A bound on calls in flight costs nothing, since the devices are busy all the same.
"""

from __future__ import annotations

import collections
import threading
from typing import Any

import jax

LIMIT = 16
_HELD_BYTES = 1 << 16  # a larger output is waited for at once, in place of being held

_in_flight: collections.deque[jax.Array] = collections.deque()
_lock = threading.Lock()


def launched(output: Any) -> None:
    """Says that a call was dispatched whose output this is. Every so often, waits until half of the calls have ended.

    Waiting once for several calls wakes this thread up less often than waiting a little at each call.
    """
    if isinstance(output, jax.core.Tracer):  # part of a larger program, whose own call counts
        return
    if output.nbytes > _HELD_BYTES:
        output.block_until_ready()
        return
    with _lock:
        _in_flight.append(output)
        if len(_in_flight) < LIMIT:
            return
        older = [_in_flight.popleft() for _ in range(LIMIT // 2)]
    for array in older:
        if not array.is_deleted():
            array.block_until_ready()
