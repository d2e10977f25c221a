"""Streams over which calls follow each other, and what ends a call that takes too long."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from replicax._transport.wire import Bytes, Message, received


class Lane:
    """Calls that follow each other over one stream, which costs each of them a third of a gRPC call of its own."""

    def __init__(self, opened: Callable[[Iterator[bytes]], Any]):
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._answers = opened(self._parts())

    def _parts(self) -> Iterator[bytes]:
        while (message := self._messages.get()) is not None:
            yield from message.parts()
            del message  # and the arrays in it

    def call(self, message: Message) -> Bytes | None:
        """Sends a message and returns the answer; None where the other side has ended the stream."""
        self._messages.put(message)
        return received(self._answers)

    def close(self) -> None:
        """Ends the stream; a call that is under way fails."""
        self._messages.put(None)
        self._answers.cancel()


@contextlib.contextmanager
def limited(timeout: float | None, give_up: Callable[[], None]) -> Iterator[threading.Event]:
    """Returns a context in which something is given up after so many seconds, and an event that tells of it."""
    late = threading.Event()
    if timeout is None:
        yield late
        return

    def end() -> None:
        late.set()
        give_up()

    timer = threading.Timer(max(timeout, 0.0), end)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
