"""Small messages between the workers of a job, through JAX's coordination service.

They go past the devices and their collectives, so any thread may send them; each topic has an order of its own.
The background task's messages have separate topics, since it and the main thread exchange at the same time.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from replicax._base import jax_internals
from replicax._job import background, state

_CHUNK = 1 << 23  # bytes that are sent at once

_lock = threading.Lock()
_counts: collections.Counter[str] = collections.Counter()


def name(process: int) -> str:
    """Returns the name of a process of the job in messages."""
    job = state.current()
    return f"process {process}" if job is None else job.name(process)


class Stopped(Exception):
    """Raised where an exchange is given up."""


def all_gather(message: str, topic: str = "eager", stopped: Callable[[], bool] | None = None) -> list[str]:
    """Sends a message to all workers and returns everyone's at this topic's next exchange, by process.

    With `stopped` the wait is not watched, and is given up (`Stopped`) as soon as that is true.
    """
    in_background = background.is_current_thread()
    topic += "-in-background" if in_background else ""
    count, me = jax.process_count(), jax.process_index()
    if count == 1:
        return [message]
    with _lock:
        number = _counts[topic]
        _counts[topic] += 1
    client = jax_internals.coordination_client()
    client.key_value_set(_key(topic, number, me), message)
    watch = state.waiting(f"{' '.join(message.split())[:80]} (exchange {number})", counted=not in_background)
    with watch if stopped is None else contextlib.nullcontext():
        told = [message if i == me else _wait(client, _key(topic, number, i), stopped) for i in range(count)]
    if number >= 2:  # all have sent number - 1, so all have read number - 2
        client.key_value_delete(_key(topic, number - 2, me))
    return told


def broadcast(data: bytes, sender: int, what: str) -> bytes:
    """Return the bytes of one process on all processes, sent through their devices; the others pass anything.

    Args:
        data: the bytes.
        sender: the process that has them.
        what: names them in reports of the job.
    """
    me = jax.process_index()
    size = int(all_gather(str(len(data)), "broadcasts")[sender])
    devices = {device.process_index: device for device in reversed(jax.devices())}
    mesh = jax.sharding.Mesh([devices[process] for process in sorted(devices)], ("process",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("process"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    add = jax.jit(lambda x: x.sum(0, dtype=x.dtype), out_shardings=whole)  # the others add zeros
    received = bytearray()
    for start in range(0, size, _CHUNK):
        length = min(_CHUNK, size - start)
        row = np.zeros((1, _CHUNK if size > _CHUNK else _padded(size)), np.uint8)
        if me == sender:
            row[0, :length] = np.frombuffer(data, np.uint8, length, start)
        call = state.begin(f"{what} from {name(sender)}")
        total = add(
            jax.make_array_from_single_device_arrays(
                (len(devices), row.shape[1]), rows, [jax.device_put(row, devices[me])]
            )
        )
        if call is not None:
            call.dispatched(total)
        received += np.asarray(total.addressable_data(0))[:length].tobytes()
    return bytes(received)


def _padded(size: int) -> int:
    """Returns the next power of two, so that few sizes are compiled."""
    return 1 << max(0, size - 1).bit_length()


def _wait(client: Any, key: str, stopped: Callable[[], bool] | None) -> str:
    # In pieces, so that Ctrl-C is seen in between.
    while (text := jax_internals.value_of_key(client, key, 500)) is None:
        if stopped is not None and stopped():
            raise Stopped
    return text


def _key(topic: str, number: int, process: int) -> str:
    return f"replicax/{topic}/{number}/{process}"
