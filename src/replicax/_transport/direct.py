"""Lanes over TLS connections of their own: arrays are sent from where they lie, and received where they stay.

gRPC's streams copy each array several times on either side. So gRPC carries greetings, and the pings that find lost
tasks, and messages use connections to a second port, with the same certificate on both sides. The answer to a greeting
names the port. A connection begins with the name of the greeting, 32 characters, which the other side returns in
reverse; a program that echoes whatever it receives is not mistaken for it. Messages follow, each behind its length in
eight bytes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import ssl
import struct
import sys
import tempfile
import threading
from collections.abc import Callable

from replicax._job.channel import SPEAKS, connected_host, listen
from replicax._transport.handlers import Caller
from replicax._transport.secret import HOST_NAME, identity, sealed
from replicax._transport.wire import Bytes, Message, room_for

_SIZE = struct.Struct("<Q")
_NAME = 32  # characters
_STRANGERS = 64  # connections that have not said yet who they are
_TURN = 1.0  # seconds that one more waits for its turn, and then it is closed: many callers may come at once
_ENDED = "the connection has ended"
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # seconds, seconds, probes: within a minute


@functools.lru_cache(maxsize=8)
def _context(secret: bytes, server: bool) -> ssl.SSLContext:
    """Returns the TLS settings of one side, which accepts only a peer with the same secret."""
    key, certificate = identity(secret)
    password = secrets.token_hex().encode()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    with tempfile.TemporaryDirectory() as folder:  # private to this user; Python loads keys only from files
        path = os.path.join(folder, "identity")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(sealed(key, password) + certificate)  # the file stays if the process is killed here
        context.load_cert_chain(path, password=password)
    if server:
        context.num_tickets = 0  # connections are not resumed
    return context


def _prepare(connection: socket.socket) -> None:
    """Has a connection send small messages at once, and probe the other side while it is idle."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _over_tls(connection: socket.socket, secret: bytes | None, server: bool) -> socket.socket:
    if secret is None:
        return connection
    name = None if server else HOST_NAME
    return _context(secret, server).wrap_socket(connection, server_side=server, server_hostname=name)


def _send(connection: socket.socket, message: Message) -> None:
    for piece in message.pieces(_SIZE.pack(message.size)):
        connection.sendall(piece)


def _read(connection: socket.socket, room: memoryview) -> memoryview:
    """Fills some memory, and returns it; ConnectionError where the connection ends before."""
    filled = 0
    while filled < len(room):
        count = connection.recv_into(room[filled:])
        if not count:
            raise ConnectionResetError(_ENDED)
        filled += count
    return room


def _read_short(connection: socket.socket, size: int) -> bytes:
    return bytes(_read(connection, memoryview(bytearray(size))))


def _received(connection: socket.socket) -> memoryview:
    """Returns the next message."""
    (size,) = _SIZE.unpack(_read_short(connection, _SIZE.size))
    return _read(connection, room_for(size))


def _cut(connection: socket.socket) -> None:
    """Shuts a connection down, so that a thread which waits for it wakes up and sees its end."""
    with contextlib.suppress(OSError):  # not `SSLSocket.shutdown`, which drops the TLS state that the thread uses
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class DirectLane:
    """The caller's side of a connection.

    Args:
        host, port: where the other side listens.
        secret: the job's secret, if there is one.
        name: the name of the greeting.
        patience: seconds that each step may take until the other side has answered.

    Raises:
        OSError: it cannot be reached there, or who listens there is not the other side.
    """

    def __init__(self, host: str, port: int, secret: bytes | None, name: str, patience: float):
        self._lock = threading.Lock()
        self._busy = self._closed = False
        connection = socket.create_connection((connected_host(host), port), timeout=patience)
        try:
            _prepare(connection)
            self._connection = connection = _over_tls(connection, secret, server=False)
            connection.sendall(name.encode("ascii"))
            if _read_short(connection, _NAME) != name[::-1].encode("ascii"):
                raise ConnectionRefusedError("another program listens there")
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise

    def call(self, message: Message) -> Bytes:
        """Sends a message and returns the answer.

        Raises:
            OSError: the connection has ended.
        """
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("the connection was closed")
            self._busy = True
        try:
            _send(self._connection, message)
            return _received(self._connection)
        except ssl.SSLEOFError:  # of a message that is being sent; its text is "EOF occurred in violation of protocol"
            raise ConnectionResetError(_ENDED) from None
        finally:
            self._end_call()

    def _end_call(self) -> None:
        with self._lock:
            self._busy = False
            if self._closed:
                self._connection.close()

    def close(self) -> None:
        """Ends the lane, from any thread; a call that is under way fails."""
        with self._lock:
            self._closed = True
            _cut(self._connection)
            if not self._busy:
                self._connection.close()


class Listener:
    """The other side: takes connections at a port of its own, and answers what comes over them.

    Args:
        host: the address at which it listens.
        secret: the job's secret, if there is one.
        admit: returns the caller whose greeting has a name; None if there is none.
        answer: returns the answer to a message; an exception ends the connection.
        start: runs a function in a thread.

    Attributes:
        port: where it listens, once it has started.
    """

    def __init__(
        self,
        host: str,
        secret: bytes | None,
        *,
        admit: Callable[[str], Caller | None],
        answer: Callable[[Bytes], Message],
        start: Callable[..., object],
    ):
        self._host, self._secret, self._admit, self._answer, self._start = host, secret, admit, answer, start
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._stopped = threading.Event()
        self._socket: socket.socket | None = None
        self.port: int | None = None

    def start(self) -> None:
        """Begins to take connections."""
        self._socket = listen(self._host, 0)
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, args=[self._socket], name="replicax-lanes", daemon=True).start()

    def stop(self) -> None:
        """Takes no more connections. Those that are there end with their greetings."""
        self._stopped.set()
        if self._socket is not None:
            _cut(self._socket)
            self._socket.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:  # it was stopped; or the process has too many files open, for now
                self._stopped.wait(0.1)
                continue
            if not self._strangers.acquire(timeout=_TURN):
                connection.close()
                continue
            try:
                self._start(self._serve, connection)
            except RuntimeError:  # the service was stopped meanwhile, or no thread can be started
                self._strangers.release()
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the caller is gone, or a stranger
            connection, caller = self._admitted(connection)
            closing = threading.Lock()  # not closed during `cut`, which might then shut down a newer file of its number

            def cut() -> None:
                with closing:
                    _cut(connection)

            caller.on_close(cut)
            try:
                self._answer_calls(connection)
            finally:
                caller.forget(cut)
                cut()  # `close` would not end a connection that a forked process has open, too
                with closing:
                    connection.close()

    def _admitted(self, connection: socket.socket) -> tuple[socket.socket, Caller]:
        """Returns the connection for messages and its caller; closes a stranger's connection and raises OSError."""
        try:
            connection.settimeout(SPEAKS)
            _prepare(connection)
            connection = _over_tls(connection, self._secret, server=True)
            name = _read_short(connection, _NAME)
            caller = self._admit(name.decode("latin-1"))
            if caller is None:
                raise ConnectionRefusedError("there is no greeting of that name")
            connection.sendall(name[::-1])
            connection.settimeout(None)
            return connection, caller
        except BaseException:
            connection.close()
            raise
        finally:
            self._strangers.release()

    def _answer_calls(self, connection: socket.socket) -> None:
        try:
            while True:
                request = _received(connection)
                answer = self._answer(request)
                if self._stopped.is_set():
                    return  # the connection is about to be cut, and nobody gets an answer of a service that has stopped
                del request  # it is not kept until the next one comes, nor is the answer
                _send(connection, answer)
                del answer
        except OSError:
            raise
        except Exception as error:  # what came is no message, or what was to be sent could not be made
            print(f"replicax: the connection of a caller was ended: {error!r}", file=sys.stderr, flush=True)
