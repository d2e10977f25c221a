"""Small messages between the workers of a job, through JAX's coordination service.

They go past the devices and their collectives, so any thread may send them; each topic has an order of its own.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax

from replicax._base import jax_internals
from replicax._job import state

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
    count, me = jax.process_count(), jax.process_index()
    if count == 1:
        return [message]
    with _lock:
        number = _counts[topic]
        _counts[topic] += 1
    client = jax_internals.coordination_client()
    client.key_value_set(_key(topic, number, me), message)
    watch = state.waiting(f"{' '.join(message.split())[:80]} (exchange {number})")
    with watch if stopped is None else contextlib.nullcontext():
        told = [message if i == me else _wait(client, _key(topic, number, i), stopped) for i in range(count)]
    if number >= 2:  # all have sent number - 1, so all have read number - 2
        client.key_value_delete(_key(topic, number - 2, me))
    return told


def _wait(client: Any, key: str, stopped: Callable[[], bool] | None) -> str:
    # In pieces, so that Ctrl-C is seen in between.
    while (text := jax_internals.value_of_key(client, key, 500)) is None:
        if stopped is not None and stopped():
            raise Stopped
    return text


def _key(topic: str, number: int, process: int) -> str:
    return f"replicax/{topic}/{number}/{process}"
