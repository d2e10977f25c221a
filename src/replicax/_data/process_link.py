"""The connection of a process and those that it has started: messages over a socket."""

from __future__ import annotations

import os
import select
import socket
import struct

_LENGTH = struct.Struct("<Q")
# A process that has ended is an error at the sender's, and no signal, which some programs let end them.
_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)


class Lost(Exception):
    """The other process has ended."""


class Link:
    """One end of a connection, which one thread uses at a time. Its methods raise `Lost` if there is no other end."""

    def __init__(self, end: socket.socket):
        self._socket = end

    def send(self, message: bytes) -> None:
        """Sends a message."""
        try:
            self._socket.sendall(_LENGTH.pack(len(message)), _FLAGS)
            self._socket.sendall(message, _FLAGS)
        except OSError as error:
            raise Lost from error

    def receive(self) -> bytes | bytearray:
        """Waits for a message and returns it."""
        (length,) = _LENGTH.unpack(self._received(_LENGTH.size))
        return self._received(length)

    def _received(self, length: int) -> bytearray:
        message, at = bytearray(length), 0
        with memoryview(message) as view:
            while at < length:
                try:
                    count = self._socket.recv_into(view[at:])
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


def pair() -> tuple[Link, socket.socket]:
    """Returns a link, and the socket of its other end."""
    ours, theirs = socket.socketpair()
    return Link(ours), theirs


def inherited(descriptor: int) -> Link:
    """Returns the link of which this process was started with the descriptor."""
    return Link(socket.socket(fileno=descriptor))


def is_possible() -> bool:
    """Returns whether processes can be started with such a link on this system."""
    return os.name == "posix"
