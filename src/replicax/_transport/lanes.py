"""Lanes: streams over which the calls of one connection follow each other, and what ends a call that takes too long.

A lane carries one call at a time. It is a TLS connection of its own (`direct.py`), or, where the other side's port for
these cannot be reached, a stream of gRPC's connection.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from replicax._transport.wire import Bytes, Message, received

PATIENCE = 5.0  # seconds for a connection to a task that has just answered over gRPC
_MOST_IDLE = 16  # more are for a burst of calls; each is an open file and a thread on the other side


class Lane(Protocol):
    """Calls that follow each other."""

    def call(self, message: Message) -> Bytes | None:
        """Sends a message and returns the answer; None where the other side has ended the stream."""

    def close(self) -> None:
        """Ends the lane, from any thread; a call that is under way fails."""


class GrpcLane:
    """A stream of gRPC's, which costs each call a third of a gRPC call of its own."""

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
        """Ends the lane, from any thread; a call that is under way fails."""
        self._messages.put(None)
        self._answers.cancel()


class Lanes:
    """The lanes of one connection: those with a call under way, and those that wait for the next.

    Args:
        where: the other side as messages call it.
        direct: opens a direct lane within so many seconds; None if the other side takes none.
        streams: opens a stream of gRPC's.
    """

    def __init__(self, where: str, direct: Callable[[float], Lane] | None, streams: Callable[[Iterator[bytes]], Any]):
        self._where, self._direct, self._streams = where, direct, streams
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._all: set[Lane] = set()
        self._idle: list[Lane] = []
        self._closed = False

    def take(self, left: float | None) -> Lane:
        """Returns a lane for a call, which has `left` seconds, or no limit if that is None.

        Raises:
            RuntimeError: the lanes are those of the process from which this one was forked.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                "A process that was forked cannot use its parent's connections to other tasks. Start it anew, as "
                'multiprocessing does with "spawn" or "forkserver".'
            )
        with self._lock:
            if self._idle:
                return self._idle.pop()
        lane = self._opened(left)
        with self._lock:
            self._all.add(lane)
            closed = self._closed
        if closed:  # meanwhile: the call fails
            lane.close()
        return lane

    def _opened(self, left: float | None) -> Lane:
        direct = self._direct  # which another thread may set to None meanwhile
        if direct is not None:
            patience = PATIENCE if left is None else min(PATIENCE, max(left / 2, 0.1))  # the rest is for the call
            try:
                return direct(patience)
            except TimeoutError as error:
                if patience == PATIENCE:  # else another call may have the time
                    self._direct = None
                    print(
                        f"replicax: no connection to the second port of {self._where} within {PATIENCE:g} s ({error}): "
                        "calls use gRPC's connection, which is slower for large arrays.",
                        file=sys.stderr,
                        flush=True,
                    )
            except OSError:  # gRPC's streams may reach it, or say why not
                self._direct = None
        return GrpcLane(self._streams)

    def give_back(self, lane: Lane) -> None:
        """Keeps a lane for the next call, unless enough of them wait."""
        with self._lock:
            if len(self._idle) < _MOST_IDLE and not self._closed:
                self._idle.append(lane)
                return
        self.drop(lane)

    def drop(self, lane: Lane) -> None:
        """Ends a lane."""
        with self._lock:
            self._all.discard(lane)
        lane.close()

    def close(self) -> None:
        """Ends all of them, and the calls that are under way."""
        if os.getpid() != self._pid:  # forked: the parent goes on with them
            return
        with self._lock:
            self._closed, lanes, self._all, self._idle = True, self._all, set(), []
        for lane in lanes:
            lane.close()


@contextlib.contextmanager
def limited(timeout: float | None, give_up: Callable[[], None]) -> Iterator[threading.Event]:
    """Returns a context in which something is given up after so many seconds, and an event that tells of it.

    After the context, nothing is given up any more, and the event does not change.
    """
    late, lock, over = threading.Event(), threading.Lock(), False
    if timeout is None:
        yield late
        return

    def end() -> None:
        with lock:
            if not over:
                late.set()
                give_up()

    timer = threading.Timer(max(timeout, 0.0), end)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        with lock:
            over = True
        timer.cancel()
