"""Messages between the processes of a job, and between launchers: lines of JSON over TCP, and the addresses of both.

Framing and limits are the same for all. The processes of a job use `Channel`, a socket that never blocks, in a thread;
launchers run an event loop and have connections of asyncio (`launch/_connection.py`). Both send something about once a
second, and take who is silent for too long for lost. TCP's own keepalive is not used: the system of a machine answers
it for a process that is stopped, and whatever it finds, silence shows as well.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from replicax._base.errors import JobError

HEARTBEAT = "REPLICAX_HEARTBEAT_TIMEOUT"
HEARTBEAT_SECONDS = 30.0  # its default: of processes of a job, of launchers, and of tasks of a cluster
LONGEST = 1 << 24  # bytes of a line; who sends more is not one of us
LONGEST_OF_A_STRANGER = 1 << 20  # the same of one that has not said who it is,
SPEAKS = 10.0  # seconds that it has to say so,
STRANGERS = 256  # and the most of these; one more, and the oldest is closed
STOOD_STILL = 2.0  # seconds of delay that show that a process was stopped itself

Message = dict[str, Any]


def seconds_from_environment(name: str, default: float, or_none: bool = False) -> float | None:
    """Returns the time limit that an environment variable sets, perhaps "none"; JobError if that is no time."""
    text = os.environ.get(name, "").strip().lower()
    if not text:
        return default
    if text == "none" and or_none:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        none = ", or 'none' for no limit" if or_none else ""
        raise JobError(f"{name} is a number of seconds above 0{none}; got {text!r}.")
    return seconds


def beat_interval(timeout: float) -> float:
    """Returns the seconds from one word to the next, where who is silent for `timeout` seconds is taken for lost."""
    return min(1.0, timeout / 6)


def encoded(message: Message) -> bytes:
    """Returns the line that is sent for a message."""
    return json.dumps(message).encode() + b"\n"


class Messages:
    """Cuts the bytes that arrive over a connection into messages, of lines of so many bytes at the longest."""

    def __init__(self, longest: int):
        self.longest = longest
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yields the messages that are complete with these bytes; ValueError at what no process of ours sends."""
        *lines, last = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += last
        for line in lines:
            try:
                message = json.loads(line)
            except RecursionError as error:
                raise ValueError("too deep a message") from error
            if not isinstance(message, dict):
                raise ValueError("no message at all")
            yield message
        if len(self._rest) > self.longest:
            raise ValueError("too long a message")


class Channel:
    """One connection. `closed` is true once the other side is gone or has sent what no process of a job sends."""

    def __init__(self, connection: socket.socket, longest: int = LONGEST):
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it has ended already
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.incoming = Messages(longest)
        self.closed = False
        self._outgoing = b""

    def send(self, message: Message) -> None:
        """Sends as much as goes at once; `flush` sends the rest later."""
        self._outgoing += encoded(message)
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
        """True while something waits to be sent."""
        return bool(self._outgoing) and not self.closed

    def receive(self) -> list[Message]:
        """Returns the messages that have arrived."""
        messages: list[Message] = []
        read = 0
        try:
            while not self.closed and read < self.incoming.longest:
                data = self.socket.recv(1 << 16)
                read += len(data)
                self.closed = not data
                for message in self.incoming.feed(data):
                    messages.append(message)  # also those in front of what is none
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self.closed = True
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


def send_rest(channels: Collection[Channel], seconds: float) -> None:
    """Sends what waits to be sent, for so long at most."""
    end = time.monotonic() + seconds
    while any(channel.unsent for channel in channels) and time.monotonic() < end:
        wait(channels, [], 0.1)
        for channel in channels:
            channel.flush()


def parse(address: str) -> tuple[str, int]:
    """Splits `"host:port"` or `"[::1]:port"`; ValueError if the address does not read so.

    >>> parse("10.0.0.1:2222"), parse("[::1]:80")
    (('10.0.0.1', 2222), ('::1', 80))
    """
    match = re.fullmatch(r"(?:\[([\da-fA-F:.]+(?:%[^\s\[\]/]+)?)\]|([^:/\s\[\]]+)):([0-9]{1,5})", address)
    if match is None or not 0 < int(match[3]) < 65536 or not _is_encodable(match[1] or match[2]):
        raise ValueError(
            f"An address reads HOST:PORT, such as '10.0.0.1:2222' or '[::1]:2222', with a port from 1 to 65535; got "
            f"{address!r}."
        )
    return match[1] or match[2], int(match[3])


def _is_encodable(host: str) -> bool:
    """Returns whether a host's name can be looked up: the parts between its dots have 1 to 63 characters."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def connected_host(host: str) -> str:
    """Returns the host to connect to: what is at localhost listens at 127.0.0.1, and not at ::1.

    >>> connected_host("localhost"), connected_host("::1")
    ('127.0.0.1', '::1')
    """
    return "127.0.0.1" if host == "localhost" else host


def interface(host: str) -> str:
    """Returns the address to listen at so that others reach `host`: its own if this machine has it, else any interface.

    A name may stand for the loopback on its own machine (127.0.1.1 in Debian's /etc/hosts) and for something else on
    the others, so a name that stands for the loopback here is not trusted, nor one that stands for several addresses.

    >>> interface("localhost"), interface("127.0.0.1"), interface("::1"), interface("192.0.2.1")
    ('127.0.0.1', '127.0.0.1', '::1', '0.0.0.0')
    """
    host = connected_host(host)
    try:
        addresses = [ipaddress.ip_address(host)]
    except ValueError:
        addresses = [address for address in resolved(host) if not address.is_loopback]
    fourth = [address for address in addresses if address.version == 4]
    if len(own := list(filter(is_own, map(str, fourth or addresses)))) == 1:
        return own[0]
    return "0.0.0.0" if fourth or not addresses else "::"


def is_own(address: str) -> bool:
    """Returns whether this machine has an address."""
    try:
        listen(address, 0).close()
    except OSError:
        return False
    return True


def resolved(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Returns the addresses of a host by its name or address; none if it is not known."""
    try:
        return looked_up(name)
    except (OSError, UnicodeError):  # not known yet, or no name at all
        return []


def looked_up(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Returns the addresses of a host by its name or address; raises what the system says if it is not known."""
    found = {str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    return [ipaddress.ip_address(address) for address in sorted(found)]


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an interface."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def join_address(host: str, port: int) -> str:
    """Returns host and port as one string.

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


def _start(function: Callable[..., None], *args: object) -> None:
    threading.Thread(target=function, args=args, name="job-relay", daemon=True).start()
