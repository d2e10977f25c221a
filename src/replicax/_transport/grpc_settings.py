"""gRPC as the transport uses it: imported where it is needed alone, so that processes can be forked before that."""

from __future__ import annotations

import functools
import importlib
import queue
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

from replicax._job.channel import (
    HEARTBEAT,
    HEARTBEAT_SECONDS,
    connected_host,
    join_address,
    seconds_from_environment,
)
from replicax._transport.secret import HOST_NAME, identity, missing

SERVICE = "replicax.Tasks"
GREETING = "replicax-greeting-bin"  # the metadata in which a service answers a greeting

# A task counts as lost if it does not answer for REPLICAX_HEARTBEAT_TIMEOUT seconds: a ping's interval and the silence
# after it. gRPC answers pings in threads of its own, without Python's lock, so that a task which computes for minutes
# is alive; a stopped task (SIGSTOP) is not. A shorter timeout allows at least _SILENCE. Pings wait behind earlier
# messages. So connections with arrays, and a service, whose options hold for all connections, allow at least _MUCH.
_PING, _SILENCE, _MUCH, _MOST = 2000, 3000, 20_000, 2**31 - 1  # milliseconds


def _keepalive(least: int) -> list[tuple[str, Any]]:
    seconds = seconds_from_environment(HEARTBEAT, HEARTBEAT_SECONDS) or HEARTBEAT_SECONDS
    silence = min(max(least, int(seconds * 1000) - _PING), _MOST)
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", _PING),
        ("grpc.keepalive_timeout_ms", silence),
        ("grpc.http2.ping_timeout_ms", silence),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _PING // 2),
        ("grpc.http2.max_ping_strikes", 0),
    ]


# A client's attempt to connect ends after the first time. A service closes a connection that has not proved within the
# second time that it knows the secret: silent strangers could otherwise take up all files that the process may open.
# The second time is the shorter one, so that files become free while a client still waits. gRPC looks once a second.
_ATTEMPT, _STRANGER = 5000, 3000  # milliseconds

_OF_CHANNELS: list[tuple[str, Any]] = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.min_reconnect_backoff_ms", _ATTEMPT),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),  # a task that is started again may have another address
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # each channel has a connection of its own
    ("grpc.ssl_target_name_override", HOST_NAME),
]


def of_server() -> list[tuple[str, Any]]:
    """Returns the options of a service."""
    return [*_keepalive(_MUCH), ("grpc.so_reuseport", 0), ("grpc.server_handshake_timeout_ms", _STRANGER)]


def of_calls() -> list[tuple[str, Any]]:
    """Returns the options of a channel for calls."""
    return [*_keepalive(_MUCH), *_OF_CHANNELS]


def of_greetings() -> list[tuple[str, Any]]:
    """Returns the options of a channel for greetings, by which a caller notices that a task is lost."""
    return [*_keepalive(_SILENCE), *_OF_CHANNELS]


def grpc() -> Any:
    """Returns the module `grpc`."""
    try:
        return importlib.import_module("grpc")
    except ImportError as error:
        raise missing("grpcio") from error


def server_credentials(secret: bytes) -> Any:
    """Returns credentials of a server that takes clients with the same secret only."""
    key, certificate = identity(secret)
    return grpc().ssl_server_credentials([(key, certificate)], certificate, require_client_auth=True)


@functools.lru_cache(maxsize=8)
def channel_credentials(secret: bytes) -> Any:
    """Returns credentials of a client that takes servers with the same secret only."""
    key, certificate = identity(secret)
    return grpc().ssl_channel_credentials(certificate, key, certificate)


def target(host: str, port: int) -> str:
    """Returns an address as gRPC takes it."""
    return join_address(connected_host(host), port)


class Threads(futures.Executor):
    """Runs each function in a thread at once; threads are used again, and none keeps the process from ending.

    The standard pool has a greatest number, behind which calls would wait for others that wait for them, and Python
    waits for its threads at the end of the program.
    """

    def __init__(self, name: str):
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._ended = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """Runs a function in a thread."""
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._ended:
                raise RuntimeError("the service has stopped")
            more = not self._idle
            if not more:
                self._idle -= 1
        if more:  # first, since nothing must be left to do where no thread can be started
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        self._work.put(run)
        return future

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # and what it holds
            with self._lock:
                if self._ended:
                    return
                self._idle += 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads that have nothing to do, and the others when they are done; waits for none."""
        with self._lock:
            self._ended, idle, self._idle = True, self._idle, 0
        for _ in range(idle):
            self._work.put(None)
