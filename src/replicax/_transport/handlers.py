"""What a service is made of, whichever way calls come: its methods, and the peers that have connected."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Head: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = tuple[dict[str, Any], Sequence[Any]]


@functools.lru_cache(maxsize=1)
def _instance_of(pid: int) -> str:
    return uuid.uuid4().hex


def instance() -> str:
    """Returns a random name of this process: a task that is started again has another one."""
    return _instance_of(os.getpid())


class Caller:
    """One connection of a peer, from its greeting to its end.

    Attributes:
        local: whether the peer is in this process, and its arrays come as they are.
    """

    def __init__(self, local: bool = False):
        self.local = local
        self._lock = threading.Lock()
        self._closed = False
        self._on_close: list[Callable[[], None]] = []

    def on_close(self, callback: Callable[[], None]) -> None:
        """Has a function called when the connection ends, from any thread; at once if it has ended already."""
        with self._lock:
            if not self._closed:
                self._on_close.append(callback)
                return
        callback()

    def forget(self, callback: Callable[[], None]) -> None:
        """Removes a function that `on_close` was given. It may be running in another thread."""
        with self._lock, contextlib.suppress(ValueError):
            self._on_close.remove(callback)

    def close(self) -> None:
        """Ends the connection, as seen from here."""
        with self._lock:
            self._closed, callbacks, self._on_close = True, self._on_close, []
        for callback in callbacks:
            try:
                callback()
            except Exception:  # which nobody waits for; the others are called all the same
                traceback.print_exc()


class Request(NamedTuple):
    """A call as its handler sees it.

    Attributes:
        head: JSON values.
        arrays: arrays; read-only views of the message where the caller is another process.
        caller: the connection that it came over.
    """

    head: Head
    arrays: Sequence[Any]
    caller: Caller

    def on_close(self, callback: Callable[[], None]) -> None:
        """Has a function called when the caller's connection ends."""
        self.caller.on_close(callback)


Handler: TypeAlias = Callable[[Request], Answer]


def handle(methods: Mapping[str, Handler], method: str, request: Request) -> Answer:
    """Returns what a method answers."""
    try:
        handler = methods[method]
    except KeyError:
        raise NotImplementedError(f"There is no method {method!r} here, but {', '.join(sorted(methods))}.") from None
    return handler(request)
