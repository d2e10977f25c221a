"""The connections between the launchers of several machines, with the framing and limits of `_job.channel`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable

from replicax._base import doc_pages
from replicax._job.channel import (
    LONGEST,
    LONGEST_OF_A_STRANGER,
    SPEAKS,
    STOOD_STILL,
    STRANGERS,
    Message,
    Messages,
    beat_interval,
    encoded,
    interface,
    is_own,
    join_address,
    looked_up,
)
from replicax._launch._environment import LaunchError
from replicax._launch._leader import FROM_LEADER, Leader, checked

_RETRY = 0.25
_ALIVE = {"op": "alive"}


class Connection:
    """A member's connection to the leader, or the leader's to a member or a stranger."""

    def __init__(self, writer: asyncio.StreamWriter):
        self._writer = writer
        self.known = False  # a launcher of this job is at the other end
        self.strange = False  # it has sent what no launcher sends
        self.host: str = writer.get_extra_info("sockname")[0]
        self.tasks: tuple[asyncio.Task[None], ...] = ()  # a member's
        self._heard = time.monotonic()
        self._incoming = Messages(LONGEST_OF_A_STRANGER)

    def send(self, message: Message) -> None:
        """Sends a message, without waiting."""
        if not self._writer.is_closing():
            self._writer.write(encoded(message))

    send_to_leader = send

    async def messages(self, reader: asyncio.StreamReader, receive: Callable[[Message], object]) -> None:
        """Passes on what comes, until the connection ends or something comes that no launcher sends."""
        try:
            while data := await reader.read(1 << 16):
                self._heard = time.monotonic()
                for message in self._incoming.feed(data):
                    if message != _ALIVE:
                        receive(message)
                if self.known:
                    self._incoming.longest = LONGEST
        except OSError:
            pass  # it has ended
        except ValueError:
            self.strange = True

    async def beat(
        self, timeout: float, silent: Callable[[float], None], heard: Callable[[], None] = lambda: None
    ) -> None:
        """Sends heartbeats, and calls `silent` with the seconds since the last word if they exceed `timeout`.

        It calls `heard` where they do not.
        """
        interval = beat_interval(timeout)
        looked = time.monotonic()
        while True:
            await asyncio.sleep(interval)
            now = time.monotonic()
            stood_still, looked = now - looked - interval, now
            if stood_still > STOOD_STILL:  # this process was stopped: what the other one has sent is still to be read
                self._heard += stood_still
            self.send(_ALIVE)
            if now - self._heard > timeout:
                silent(now - self._heard)
            else:
                heard()

    def abort(self) -> None:
        """Ends the connection at once."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Closes the connection when everything is sent."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), 5.0)


class Listener:
    """Accepts the connections of members on other machines, and closes those of anything else (strangers).

    A member that is silent for `timeout` seconds is given up. On entering the context: LaunchError where it cannot
    listen at that address.
    """

    def __init__(self, leader: Leader, host: str, port: int, timeout: float):
        self._leader = leader
        self._address = host, port
        self._timeout = timeout
        self._connections: dict[Connection, None] = {}  # the oldest first

    async def __aenter__(self) -> None:
        host, port = self._address
        where = join_address(host, port)
        try:
            addresses = looked_up(host)
        except OSError as error:
            raise LaunchError(
                f"The coordinator's name {host} is not known on this machine: {error.strerror or error}."
            ) from None
        if not any(is_own(str(address)) for address in addresses):
            raise LaunchError(
                f"The coordinator {where} is not an address of this machine. --coordinator names the machine where "
                f"--worker-rank 0 is started. "
                f"See {doc_pages.page('how-to/launch#several-machines')}."
            )
        at = interface(host)
        try:
            self._server = await asyncio.start_server(self._serve, None if at in ("0.0.0.0", "::") else at, port)
        except OSError as error:
            raise LaunchError(
                f"Cannot listen at the coordinator's address {where}: {error.strerror or error}. Another launcher may "
                f"be using that port; give --coordinator another one on all machines."
            ) from None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer)
        self._connections[connection] = None
        strangers = [other for other in self._connections if not other.known]
        if len(strangers) > STRANGERS + self._leader.workers:
            strangers[0].abort()

        loop = asyncio.get_running_loop()
        tasks: list[asyncio.TimerHandle | asyncio.Task[None]] = [loop.call_later(SPEAKS, connection.abort)]

        def receive(message: Message) -> None:
            if self._leader.receive(connection, message) and not connection.known:
                connection.known = True
                tasks.pop().cancel()
                heard = functools.partial(self._leader.heard, connection)
                tasks.append(asyncio.create_task(connection.beat(self._timeout, silent, heard)))

        def silent(seconds: float) -> None:
            # The connection stays: a launcher that is continued reads there what has become of the job.
            self._leader.lost(connection, f"its launcher has not answered for {seconds:.0f} s")

        try:
            await connection.messages(reader, receive)
        finally:
            tasks.pop().cancel()
            del self._connections[connection]
            self._leader.left(connection)
            await connection.close()

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        await asyncio.gather(*(connection.close() for connection in self._connections))


async def connect(
    host: str, port: int, start_timeout: float, timeout: float, inbox: asyncio.Queue[Message]
) -> Connection:
    """Connects to the leader, trying until it is there; LaunchError if nobody answers for `start_timeout` seconds.

    The inbox gets the leader's messages and, when the connection ends or the leader has been silent for `timeout`
    seconds, one whose "op" is "lost" and whose "how" says which.
    """
    deadline = time.monotonic() + start_timeout
    while True:
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.01)):
                reader, writer = await asyncio.open_connection(host, port)
            break
        except OSError as error:  # TimeoutError is one too
            if time.monotonic() + _RETRY > deadline:
                unknown = isinstance(error, socket.gaierror)  # whose number is none of the system's
                told = error.strerror or str(error) or "no answer"
                reason = os.strerror(error.errno) if error.errno and not unknown else told
                raise LaunchError(
                    f"Nobody answers at the coordinator's address {join_address(host, port)} for {start_timeout:g} s "
                    f"({reason}). Is `replicax launch ... --worker-rank 0` running there, and is the port open? "
                    f"See {doc_pages.page('how-to/launch#several-machines')}."
                ) from None
            await asyncio.sleep(_RETRY)

    connection = Connection(writer)
    _follow(connection, reader, timeout, inbox)
    return connection


def _follow(
    connection: Connection, reader: asyncio.StreamReader, timeout: float, inbox: asyncio.Queue[Message]
) -> None:
    """Puts what the leader says into the inbox, until the connection ends or the leader is silent."""

    def receive(message: Message) -> None:
        inbox.put_nowait(checked(message, FROM_LEADER))
        connection.known = True

    async def listen() -> None:
        await connection.messages(reader, receive)
        watching.cancel()
        inbox.put_nowait({"op": "lost", "how": "has gone" if connection.known or not connection.strange else ""})

    def silent(seconds: float) -> None:
        listening.cancel()
        watching.cancel()
        inbox.put_nowait({"op": "lost", "how": f"has not answered for {seconds:.0f} s"})

    listening = asyncio.create_task(listen())
    watching = asyncio.create_task(connection.beat(timeout, silent))
    connection.tasks = listening, watching  # or nobody would hold them
