"""The connection of a process and those that it has started: messages over a socket."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable

_LENGTH = struct.Struct("<Q")
# A process that has ended is an error at the sender's, and no signal, which some programs let end them.
_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)
_SILENCE = 1.0  # seconds without a byte after which a link looks at the other process


class Lost(Exception):
    """The other process has ended, or no longer runs."""


class Link:
    """One end of a connection, which one thread uses at a time. Its methods raise `Lost` if there is no other end.

    Args:
        end: the socket.
        check: called again and again while the link waits; raises `Lost` if the other process does not run.
    """

    def __init__(self, end: socket.socket, check: Callable[[], None] | None = None):
        self._socket, self._check = end, check

    def send(self, message: bytes) -> None:
        """Sends a message."""
        for part in (_LENGTH.pack(len(message)), message):
            with memoryview(part) as view:
                sent = 0
                while sent < len(view):
                    self._wait(select.POLLOUT)
                    try:
                        sent += self._socket.send(view[sent:], _FLAGS)
                    except BlockingIOError:
                        continue
                    except OSError as error:
                        raise Lost from error

    def _wait(self, event: int) -> None:
        if self._check is None:  # the socket blocks
            return
        poll = select.poll()
        poll.register(self._socket, event)
        while not poll.poll(1000 * _SILENCE):
            self._check()

    def receive(self) -> bytes | bytearray:
        """Waits for a message and returns it."""
        (length,) = _LENGTH.unpack(self._received(_LENGTH.size))
        return self._received(length)

    def _received(self, length: int) -> bytearray:
        message, at = bytearray(length), 0
        with memoryview(message) as view:
            while at < length:
                self._wait(select.POLLIN)
                try:
                    count = self._socket.recv_into(view[at:])
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise Lost from error
                if not count:
                    raise Lost
                at += count
        return message

    def has_message(self, seconds: float = 0.0) -> bool:
        """Returns whether there is a message, or no other end; waits for that so long."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


def pair(check: Callable[[], None]) -> tuple[Link, socket.socket]:
    """Returns a link, and the socket of its other end; `check` is as in `Link`."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)  # a process that is stopped takes nothing
    return Link(ours, check), theirs


def inherited(descriptor: int) -> Link:
    """Returns the link of which this process was started with the descriptor."""
    return Link(socket.socket(fileno=descriptor))


def is_possible() -> bool:
    """Returns whether processes can be started with such a link on this system."""
    return os.name == "posix"
