"""Messages between the processes of a job: lines of JSON over TCP, sent and received without ever blocking."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import selectors
import socket
import threading
from collections.abc import Iterable
from typing import Any

_LONGEST = 1 << 22  # bytes of a line; who sends more is not one of us


class Channel:
    """One connection. `closed` is true once the other side is gone or has sent what no process of a job sends."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.closed = False
        self._incoming = b""
        self._outgoing = b""

    def send(self, message: dict[str, Any]) -> None:
        """Sends as much as goes at once; `flush` sends the rest later."""
        self._outgoing += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what has not gone yet, as far as it goes at once."""
        try:
            while self._outgoing and not self.closed:
                self._outgoing = self._outgoing[self.socket.send(self._outgoing) :]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing = b""  # what the other side has sent may still be read

    @property
    def unsent(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outgoing) and not self.closed

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived."""
        read = 0
        try:
            while not self.closed and read < _LONGEST:
                data = self.socket.recv(1 << 16)
                self._incoming += data
                read += len(data)
                self.closed = not data
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        *lines, self._incoming = self._incoming.split(b"\n")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.closed = True
                break
            messages.append(message)
        self.closed = self.closed or len(self._incoming) > _LONGEST
        return messages

    def close(self) -> None:
        """Ends the connection."""
        self.closed = True
        self.socket.close()


def wait(channels: Iterable[Channel], others: Iterable[socket.socket], timeout: float) -> None:
    """Waits until one of the channels or sockets can be read, or written where something waits to be sent."""
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            if not channel.closed:
                selector.register(
                    channel.socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.unsent else 0)
                )
        for other in others:
            selector.register(other, selectors.EVENT_READ)
        selector.select(max(timeout, 0.0))


def parse(address: str) -> tuple[str, int]:
    """`"host:port"` or `"[::1]:port"` as host and port; ValueError where it does not read so.

    >>> parse("10.0.0.1:2222"), parse("[::1]:80")
    (('10.0.0.1', 2222), ('::1', 80))
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"An address reads HOST:PORT, such as '10.0.0.1:2222'; got {address!r}.")
    return host, int(port)


def interface(host: str) -> str:
    """The address to listen at so that others reach `host`: the loopback alone, or every interface."""
    found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    addresses = [ipaddress.ip_address(str(text).partition("%")[0]) for text in found]
    if all(address.is_loopback for address in addresses):
        return "127.0.0.1" if any(address.version == 4 for address in addresses) else "::1"
    return "0.0.0.0" if any(address.version == 4 for address in addresses) else "::"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an interface."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def join_address(host: str, port: int) -> str:
    """Host and port as one text.

    >>> join_address("::1", 80)
    '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Relay:
    """A local address whose connections are passed on to another one, and stay open when that one is gone.

    JAX's client of the coordination service aborts the process within milliseconds when the service is gone, with a
    trace of C++ frames that names nobody. Behind a relay it does not notice, and the monitor says what has happened.
    """

    def __init__(self, target: tuple[str, int]):
        self._target = target
        self._listener = listen("127.0.0.1", 0)
        self._kept: list[socket.socket] = []  # open as long as the process lives
        self.address = join_address(*self._listener.getsockname()[:2])
        _start(self._accept)

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(self._target, timeout=30)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self._kept += near, far
            for one in near, far:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _start(self._pass_on, near, far)
            _start(self._pass_on, far, near)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with contextlib.suppress(OSError):  # what can no longer be passed on is dropped
                    sink.sendall(data)


def _start(function: Any, *args: Any) -> None:
    threading.Thread(target=function, args=args, name="job-relay", daemon=True).start()
