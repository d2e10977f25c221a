"""The other side of a service: calls of another task's methods.

A peer connects when it is first called, and again when the other side is back. One gRPC call, the greeting, lasts as
long as the connection; its end is how both sides notice that the other is gone. What is called belongs to one greeting:
a task that was started again at the same address does not know it and refuses, so that no call reaches a task that
lacks what the caller takes for granted.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from replicax._job.channel import parse
from replicax._transport import grpc_settings
from replicax._transport.errors import Refused, TimedOut, Unreachable, recalled
from replicax._transport.failures import failure
from replicax._transport.handlers import Answer, Caller, Request, handle, instance
from replicax._transport.secret import job_secret
from replicax._transport.service import ANSWER, RAISED, UNKNOWN, WAITS, Service, local_service, versions
from replicax._transport.wire import LARGE, Message, gathered, parsed

OnLost = Callable[[Exception], None]


def connect(address: str, *, job: Sequence[str] = ()) -> Peer:
    """Returns the peer at an address, at once: it connects when it is first called.

    Args:
        address: `"host:port"` of the other task.
        job: the addresses of all tasks, from which `job_secret` sees whether a secret is needed.

    Raises:
        JobError: there is no secret where one is needed.
    """
    return Peer(address, job)


class Watch:
    """What `Peer.watch` returns."""

    def __init__(self, on_lost: OnLost):
        self._on_lost: OnLost | None = on_lost

    def cancel(self) -> None:
        """Has the function not be called any more."""
        self._on_lost = None

    def fire(self, error: Exception) -> None:
        """Calls the function, once."""
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost(error)


class _Link:
    """One connection to a service, from the greeting to its end."""

    def __init__(self, greeting: Mapping[str, Any]):
        self.greeting = dict(greeting)
        self.lost: Exception | None = None
        self._lock = threading.Lock()
        self._watches: list[Watch] = []

    def watch(self, watch: Watch) -> None:
        """Fires a watch when the connection has ended."""
        with self._lock:
            if self.lost is None:
                self._watches.append(watch)
                return
        _fire([watch], self.lost)

    def end(self, error: Exception, tell: bool = True) -> None:
        """Marks the connection as ended, and tells those who watch it, in a thread: they may call other tasks."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost, watches, self._watches = error, self._watches, []
        if watches and tell:
            _fire(watches, error)

    def call(self, method: str, head: Mapping[str, Any], arrays: Sequence[Any], timeout: float | None) -> Answer:
        """Calls a method."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the connection."""
        raise NotImplementedError


def _fire(watches: Sequence[Watch], error: Exception) -> None:
    def fire() -> None:
        for watch in watches:
            watch.fire(error)

    threading.Thread(target=fire, name="replicax-watch", daemon=True).start()


class _LocalLink(_Link):
    """A connection to a service of this process: handlers are called as they are."""

    def __init__(self, service: Service):
        super().__init__(service.greeting())
        self._service = service
        self._caller = Caller(instance())
        self._caller.on_close(lambda: self.end(Unreachable(f"The service of {service.where} has stopped.")))
        service.know(self._caller, uuid.uuid4().hex)

    def call(self, method: str, head: Mapping[str, Any], arrays: Sequence[Any], timeout: float | None) -> Answer:
        if self.lost is not None:
            raise self.lost
        return handle(self._service.methods, method, Request(head, arrays, self._caller))

    def close(self) -> None:
        self._caller.close()


class _Counts:
    """How many bytes of messages went to a peer and came from it."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        self._lock = threading.Lock()

    def add(self, sent: int = 0, received: int = 0) -> None:
        """Adds to both."""
        with self._lock:
            self.sent += sent
            self.received += received


class _Channel:
    """A gRPC channel and its methods."""

    def __init__(self, address: str, secret: bytes | None, counts: _Counts):
        grpc = grpc_settings.grpc()
        target = grpc_settings.target(*parse(address))
        self.address = address
        self.secret = secret
        if secret is None:
            self._channel = grpc.insecure_channel(target, grpc_settings.CHANNEL_OPTIONS)
        else:
            credentials = grpc_settings.channel_credentials(secret)
            self._channel = grpc.secure_channel(target, credentials, grpc_settings.CHANNEL_OPTIONS)
        self.greet = self._channel.unary_stream(f"/{grpc_settings.SERVICE}/greet")
        self.call = self._channel.unary_unary(f"/{grpc_settings.SERVICE}/call")
        self.send = self._channel.stream_unary(f"/{grpc_settings.SERVICE}/send")
        self.fetch = self._channel.unary_stream(f"/{grpc_settings.SERVICE}/fetch")
        self.error: type[Any] = grpc.RpcError
        self.counts = counts

    def close(self) -> None:
        """Ends all calls."""
        self._channel.close()


class _RemoteLink(_Link):
    """A connection to another process. It comes about by a greeting, which lasts as long as the connection."""

    def __init__(self, channel: _Channel, timeout: float | None, wait: bool):
        self._channel = channel
        self._name = uuid.uuid4().hex
        told = {**versions(), "instance": instance(), "link": self._name}
        self._greeting = channel.greet(json.dumps(told).encode(), wait_for_ready=wait)
        super().__init__(self._greeted(timeout))
        self._greeting.add_done_callback(
            lambda ended: self.end(failure(ended, channel.address, self._where, channel.secret))
        )

    def _greeted(self, timeout: float | None) -> dict[str, Any]:
        """Returns what the service says of itself."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._greeting.cancel()

        timer = threading.Timer(threading.TIMEOUT_MAX if timeout is None else max(timeout, 0.0), give_up)
        timer.daemon = True
        if timeout is not None:
            timer.start()
        try:
            found = dict(self._greeting.initial_metadata() or ())
            if grpc_settings.GREETING not in found:
                with contextlib.suppress(Exception):
                    self._greeting.exception()  # waits for the end of the call
                if late.is_set():
                    raise TimedOut(f"The task at {self._channel.address} did not answer within {timeout:g} s.")
                raise failure(self._greeting, self._channel.address, self._channel.address, self._channel.secret)
        except BaseException:
            self._greeting.cancel()
            raise
        finally:
            timer.cancel()
        greeting: dict[str, Any] = json.loads(found[grpc_settings.GREETING])
        return greeting

    @property
    def _where(self) -> str:
        name = self.greeting.get("name")
        return f"{name} ({self._channel.address})" if name else self._channel.address

    def call(self, method: str, head: Mapping[str, Any], arrays: Sequence[Any], timeout: float | None) -> Answer:
        if self.lost is not None:
            raise self.lost
        channel, until = self._channel, _Until(timeout)
        message = Message([self._name, method, head], arrays)
        channel.counts.add(sent=message.size)
        try:
            data: bytes | memoryview
            if message.size <= LARGE:
                data = channel.call(message.joined(), timeout)
            else:
                data = channel.send(message.parts(), timeout)
            channel.counts.add(received=len(data))
            (kind, answer), values = parsed(data)
            if kind == WAITS:
                request = json.dumps([self._name, answer["number"]]).encode()
                data = gathered(channel.fetch(request, until.left()))
                channel.counts.add(received=len(data))
                (kind, answer), values = parsed(data)
        except channel.error as error:
            raise self._failed(error, method, timeout) from None
        if kind == RAISED:
            raise recalled(answer, values, self._where, trusted=channel.secret is not None)
        if kind == UNKNOWN:
            gone = Unreachable(
                f"The task at {self._where} has ended the connection: it was started again, or was cut off."
            )
            self.end(gone)
            raise gone
        assert kind == ANSWER, kind
        return answer, values

    def _failed(self, error: Any, method: str, timeout: float | None) -> Exception:
        found = failure(error, self._channel.address, self._where, self._channel.secret)
        if isinstance(found, TimedOut):
            return TimedOut(f"The task at {self._where} did not answer the call of {method!r} within {timeout:.3g} s.")
        if isinstance(found, Unreachable):
            self.end(found)
            self._greeting.cancel()
        return found

    def close(self) -> None:
        self._greeting.cancel()


class _Until:
    """A point in time: so many seconds from now, or never."""

    def __init__(self, timeout: float | None):
        self._end = None if timeout is None else time.monotonic() + timeout

    def left(self, most: float | None = None) -> float | None:
        """Returns the seconds that are left, 0 if none are; at most so many."""
        if self._end is None:
            return most
        left = max(self._end - time.monotonic(), 0.0)
        return left if most is None else min(left, most)

    @property
    def over(self) -> bool:
        """True when no time is left."""
        return self.left() == 0.0


class Peer:
    """A task that can be called. Any number of threads may call at the same time.

    Attributes:
        address: the task's address.
    """

    def __init__(self, address: str, job: Sequence[str]):
        self.address = address
        self._job = tuple(job)
        self._link: _Link | None = None
        self._channel: _Channel | None = None
        self._counts = _Counts()
        self._closed = False
        self._lock = threading.Lock()  # of what follows
        self._opening = threading.Lock()  # held while a connection is made
        self._pending: list[Watch] = []  # until there is a connection
        if local_service(address) is None:
            self._secret = job_secret([address, *job])

    @functools.cached_property
    def _secret(self) -> bytes | None:
        return job_secret([self.address, *self._job])

    @property
    def sent(self) -> int:
        """Bytes of the messages sent so far; tasks of one process send none."""
        return self._counts.sent

    @property
    def received(self) -> int:
        """Bytes of the messages received so far."""
        return self._counts.received

    def call(
        self,
        method: str,
        head: Mapping[str, Any] = MappingProxyType({}),
        arrays: Sequence[Any] = (),
        timeout: float | None = None,
    ) -> Answer:
        """Calls a method of the other task, and returns what it answers.

        Args:
            method: the name of the method.
            head: JSON values.
            arrays: arrays of any dtype of JAX, typed PRNG keys, and arrays of bytes or str.
            timeout: seconds that the call may take; None for no limit. Not for a task of the same process.

        Raises:
            Unreachable: the task is not there, or was lost during the call, which may have happened or not.
            Refused: it takes no calls of this process.
            TimedOut: there was no answer in time.
            Exception: what the handler raised.
        """
        link = self._link
        if link is None or link.lost is not None:
            link = self._connected(_Until(timeout), wait=False)
        return link.call(method, dict(head), arrays, timeout)

    def wait_until_ready(self, timeout: float | None = None) -> dict[str, Any]:
        """Waits until the task can be called, and returns what it says of itself, such as its `"instance"`.

        Raises:
            TimedOut: it could not be reached in time. The message says why.
            Refused: it takes no calls of this process.
        """
        until = _Until(timeout)
        reason: Exception | None = None
        while not until.over:
            try:
                return dict(self._connected(until, wait=False).greeting)
            except Unreachable as error:
                if self._closed:
                    raise
                reason = error
            except TimedOut as error:
                reason = reason or error
            with contextlib.suppress(TimedOut, Unreachable):  # and then sees why
                return dict(self._connected(until, wait=True).greeting)
        why = str(reason or "").rstrip(".") or f"The task at {self.address} did not answer"
        raise TimedOut(f"{why}; that was tried for {timeout:g} s.") from reason

    def _connected(self, until: _Until, wait: bool) -> _Link:
        """Returns the connection, after making it where there is none. `wait`: waits a little for the other side."""
        left = until.left()
        if not self._opening.acquire(timeout=-1 if left is None else left):
            raise TimedOut(f"The task at {self.address} did not answer in time.")
        try:
            if self._closed:
                raise Unreachable(f"The connection to {self.address} was closed here.")
            if self._link is not None and self._link.lost is None:
                return self._link
            link = self._new_link(until.left(_PATIENCE if wait else None), wait)
            with self._lock:
                self._link, pending, self._pending = link, self._pending, []
            for watch in pending:
                link.watch(watch)
            return link
        finally:
            self._opening.release()

    def _new_link(self, timeout: float | None, wait: bool) -> _Link:
        if (service := local_service(self.address)) is not None:
            return _LocalLink(service)
        if self._channel is None:
            self._channel = _Channel(self.address, self._secret, self._counts)
        try:
            return _RemoteLink(self._channel, timeout, wait)
        except Refused:  # else gRPC tries again and again by itself
            self._channel.close()
            self._channel = None
            raise

    def watch(self, on_lost: OnLost) -> Watch:
        """Has a function called once, in a thread, when the task is gone: ended, restarted, stopped or cut off.

        Where the peer has not been connected yet, that is the connection which comes first.
        """
        watch = Watch(on_lost)
        with self._lock:
            link = self._link
            if link is None:
                self._pending.append(watch)
        if link is not None:
            link.watch(watch)
        return watch

    def close(self) -> None:
        """Ends the connection. Watches are not told, and calls fail from now on."""
        self._closed = True
        with self._lock:
            link, self._pending = self._link, []
        if link is not None:
            link.end(Unreachable(f"The connection to {self.address} was closed here."), tell=False)
            link.close()
        if self._channel is not None:
            self._channel.close()


_PATIENCE = 0.5  # seconds from one look at why a task cannot be reached to the next
