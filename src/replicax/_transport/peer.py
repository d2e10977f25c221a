"""The other side of a service: calls of another task's methods.

A peer connects when it is first called, and again when the other side is back. One gRPC call, the greeting, lasts as
long as the connection; its end is how both sides notice that the other is gone. It has a TCP connection of its own, so
that the pings which find a stopped task do not wait behind arrays on a slow network. Calls go over lanes, and each
names the greeting: a task that was started again at the same address does not know it and refuses, so that no call
reaches a task that lacks what the caller takes for granted.
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
from replicax._transport.direct import DirectLane
from replicax._transport.errors import Refused, TimedOut, Unreachable, recalled
from replicax._transport.failures import another_task, failure
from replicax._transport.handlers import Answer, Caller, Request, handle
from replicax._transport.lanes import Lane, Lanes, limited
from replicax._transport.secret import job_secret
from replicax._transport.service import ANSWER, RAISED, UNKNOWN, Service, local_service, versions
from replicax._transport.wire import Bytes, Message, parsed

OnLost = Callable[[Exception], None]


class _Link:
    """One connection to a service, from the greeting to its end."""

    def __init__(self, greeting: Mapping[str, Any]):
        self.greeting = dict(greeting)
        self.lost: Exception | None = None
        self._lock = threading.Lock()
        self._watches: list[OnLost] = []

    def watch(self, on_lost: OnLost) -> None:
        """Call a function when the connection has ended."""
        with self._lock:
            if self.lost is None:
                self._watches.append(on_lost)
                return
        _tell([on_lost], self.gone())

    def end(self, error: Exception, tell: bool = True) -> None:
        """Marks the connection as ended, and tells those who watch it, in a thread: they may call other tasks."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost, watches, self._watches = error, self._watches, []
        if tell:
            _tell(watches, error, self.close)
        else:  # here: at the end of a program, a thread would be stopped in the middle of it
            self.close()

    def gone(self) -> Exception:
        """Returns the error of a call over a connection that has ended."""
        return Unreachable(str(self.lost))

    def call(self, method: str, head: Mapping[str, Any], arrays: Sequence[Any], until: _Until) -> Answer:
        """Calls a method."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the connection, and what goes over it."""
        raise NotImplementedError


def _tell(watches: Sequence[OnLost], error: Exception, first: Callable[[], None] = lambda: None) -> None:
    """Call functions with the error of a connection that has ended, in a thread."""

    def tell() -> None:
        first()
        for on_lost in watches:
            on_lost(error)

    threading.Thread(target=tell, name="replicax-watch", daemon=True).start()


class _LocalLink(_Link):
    """A connection to a service of this process: handlers are called as they are."""

    def __init__(self, service: Service):
        super().__init__(service.greeting())
        self._service = service
        self._caller = Caller(local=True)
        self._caller.on_close(lambda: self.end(Unreachable(f"The service of {service.where} has stopped.")))
        service.know(self._caller, uuid.uuid4().hex)

    def call(self, method: str, head: Mapping[str, Any], arrays: Sequence[Any], until: _Until) -> Answer:
        if self.lost is not None:
            raise self.gone()
        return handle(self._service.methods, method, Request(head, arrays, self._caller))

    def close(self) -> None:
        self._caller.close()


class _Channels:
    """Makes gRPC channels to one address."""

    def __init__(self, address: str, secret: bytes | None):
        self.address = address
        self.secret = secret
        self.greetings = self.made(grpc_settings.of_greetings())
        self.greet = self.greetings.unary_stream(f"/{grpc_settings.SERVICE}/greet")

    def made(self, options: list[tuple[str, Any]]) -> Any:
        """Returns a channel with a connection of its own."""
        grpc, target = grpc_settings.grpc(), grpc_settings.target(*parse(self.address))
        if self.secret is None:
            return grpc.insecure_channel(target, options)
        return grpc.secure_channel(target, grpc_settings.channel_credentials(self.secret), options)


class _RemoteLink(_Link):
    """A connection to another process. It comes about by a greeting, which lasts as long as the connection."""

    def __init__(self, channels: _Channels, timeout: float | None, wait: bool):
        self._address, self._secret = channels.address, channels.secret
        self._name = uuid.uuid4().hex
        told = {**versions(), "link": self._name}
        self._greeting = channels.greet(json.dumps(told).encode(), wait_for_ready=wait)
        super().__init__(self._greeted(timeout))
        self._calls = channels.made(grpc_settings.of_calls())
        streams = self._calls.stream_stream(f"/{grpc_settings.SERVICE}/lane")
        port: int | None = self.greeting.get("port")
        direct = None
        if port is not None:
            direct = functools.partial(DirectLane, parse(self._address)[0], port, self._secret, self._name)
        self._lanes = Lanes(self._where, direct, streams)
        self._greeting.add_done_callback(lambda ended: self.end(self._failure(ended)))

    def _failure(self, error: Any) -> Exception:
        return failure(error, self._address, self._where, self._secret)

    def _greeted(self, timeout: float | None) -> dict[str, Any]:
        """Returns what the service says of itself."""
        try:
            with limited(timeout, self._greeting.cancel) as late:
                found = dict(self._greeting.initial_metadata() or ())
                if grpc_settings.GREETING not in found:
                    with contextlib.suppress(Exception):
                        self._greeting.exception()  # waits for the end of the call
                    if late.is_set():
                        raise TimedOut(f"The task at {self._address} did not answer within {timeout:.3g} s.")
                    raise failure(self._greeting, self._address, self._address, self._secret)
        except BaseException:
            self._greeting.cancel()
            raise
        greeting: dict[str, Any] = json.loads(found[grpc_settings.GREETING])
        return greeting

    @property
    def _where(self) -> str:
        name = self.greeting.get("name")
        return f"{name} ({self._address})" if name else self._address

    def call(self, method: str, head: Mapping[str, Any], arrays: Sequence[Any], until: _Until) -> Answer:
        if self.lost is not None:
            raise self.gone()
        (kind, answer), values = parsed(self._sent(Message([self._name, method, head], arrays), method, until))
        if kind == RAISED:
            raise recalled(answer, values, self._where, trusted=self._secret is not None)
        if kind == UNKNOWN:
            raise self._ended("was started again, or was cut off")
        assert kind == ANSWER, kind
        return answer, values

    def _sent(self, message: Message, method: str, until: _Until) -> Bytes:
        """Returns the answer to a message."""
        lane = self._free_lane(until)
        with limited(until.left(), lane.close) as late:
            try:
                data = lane.call(message)
            except BaseException as error:
                self._lanes.drop(lane)
                if late.is_set():
                    raise TimedOut(
                        f"The task at {self._where} did not answer the call of {method!r} within {until.seconds:.3g} s."
                    ) from None
                if isinstance(error, (OSError, grpc_settings.grpc().RpcError)):
                    raise self._failed(error) from None
                raise
        if data is None:
            raise self._ended("has stopped its service")
        if late.is_set():  # too late for this call, and not for the next
            self._lanes.drop(lane)
        else:
            self._lanes.give_back(lane)
        return data

    def _free_lane(self, until: _Until) -> Lane:
        try:
            return self._lanes.take(until.left())
        except ValueError:  # gRPC's, of a channel that has been closed meanwhile
            if self.lost is None:
                raise
            raise self.gone() from None

    def _ended(self, why: str) -> Exception:
        """Returns the error of a call, after marking the connection as ended."""
        self.end(Unreachable(f"The task at {self._where} has ended the connection: it {why}."))
        return self.gone()

    def _failed(self, error: Any) -> Exception:
        if self.lost is not None:  # and with it the calls that were under way
            return self.gone()
        if isinstance(error, OSError):
            found: Exception = Unreachable(f"The task at {self._where} is gone or does not answer: {error}.")
        else:
            found = self._failure(error)
        if isinstance(found, Unreachable):
            self.end(found)
        return found

    def close(self) -> None:
        self._greeting.cancel()
        self._lanes.close()
        self._calls.close()


class _Until:
    """A point in time: so many seconds from now, or never."""

    def __init__(self, seconds: float | None):
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

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
    """A task that can be called, by any number of threads at the same time. The first call connects.

    Args:
        address: `"host:port"` of the task.
        job: the addresses of all tasks, from which `job_secret` sees whether a secret is needed.
        task: the task that should be there, such as `"ps 1"`. A connection to another task of the cluster is refused:
            all tasks have the same certificate, so TLS alone does not tell them apart.

    Raises:
        JobError: there is no secret where one is needed.
    """

    def __init__(self, address: str, *, job: Sequence[str] = (), task: str | None = None):
        self.address = address
        self._job, self._task = tuple(job), task
        self._link: _Link | None = None
        self._channels: _Channels | None = None
        self._closed = False
        self._lock = threading.Lock()  # of what follows
        self._opening = threading.Lock()  # held while a connection is made
        self._pending: list[OnLost] = []  # until there is a connection
        if local_service(address) is None:
            self._secret = job_secret([address, *job])

    @functools.cached_property
    def _secret(self) -> bytes | None:
        return job_secret([self.address, *self._job])

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
        until, link = _Until(timeout), self._link
        if link is None or link.lost is not None:
            link = self._connected(until, wait=False)
        return link.call(method, dict(head), arrays, until)

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
                    raise self._closed_error() from error
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
                raise self._closed_error()
            if self._link is not None and self._link.lost is None:
                return self._link
            link = self._new_link(until.left(_PATIENCE if wait else None), wait)
            with self._lock:
                self._link, pending, self._pending = link, self._pending, []
            for on_lost in pending:
                link.watch(on_lost)
            return link
        finally:
            self._opening.release()

    def _new_link(self, timeout: float | None, wait: bool) -> _Link:
        if (service := local_service(self.address)) is not None:
            return _LocalLink(service)
        if self._channels is None:
            self._channels = _Channels(self.address, self._secret)
        try:
            link = _RemoteLink(self._channels, timeout, wait)
            if wrong := another_task(link.greeting, self._task, self.address):
                link.close()
                raise Refused(wrong)
            return link
        except Refused:  # else gRPC tries again and again by itself
            self._channels.greetings.close()
            self._channels = None
            raise
        except ValueError as error:
            raise self._closed_error() if self._closed else error from None

    def _closed_error(self) -> Unreachable:
        return Unreachable(f"The connection to {self.address} was closed here.")

    def watch(self, on_lost: OnLost) -> None:
        """Has a function called once, in a thread, when the task is gone: ended, restarted, stopped or cut off.

        Where the peer has not been connected yet, that is the connection which comes first.
        """
        with self._lock:
            link = self._link
            if link is None:
                self._pending.append(on_lost)
        if link is not None:
            link.watch(on_lost)

    def close(self) -> None:
        """Ends the connection. Watches are not told, and calls fail from now on."""
        self._closed = True
        with self._lock:
            link, self._pending = self._link, []
        if link is not None:
            link.end(self._closed_error(), tell=False)
        if self._channels is not None:
            self._channels.greetings.close()


_PATIENCE = 0.5  # seconds from one look at why a task cannot be reached to the next
