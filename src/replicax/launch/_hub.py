"""How the launchers of several machines act as one.

Worker 0's launcher has the hub. Each launcher, that one included, is a member, and they exchange messages, over TCP as
lines of JSON:

    member to hub                                       hub to members
    join    my workers, and their addresses             start    the addresses of all workers
    failed  a worker of mine has failed, or a signal    stop     end your workers
            has come that asks to end
    done    how my workers have ended                   verdict  what to tell, and whether to begin again
                                                        refused  why there will be no start

After a verdict to begin again every member joins anew, with new ports. A launcher on a single machine is a hub with one
member. Nothing that comes over a connection is ever run.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

from replicax._channel import join_address
from replicax.launch._cluster import LaunchError
from replicax.launch._report import Outcome, exit_status, join_names, signal_name, verdict

Message = dict[str, Any]

_LONGEST_MESSAGE = 1 << 24
_RETRY = 0.25
_NAMED = 50  # missing workers that are named one by one
# A machine that is gone without a word (no power, no network) is noticed after about half a minute.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


class Peer(Protocol):
    """The other end of a connection."""

    def send(self, message: Message) -> None:
        """Sends a message, without waiting."""


class Hub:
    """Brings the members together, and decides.

    Args:
        workers: how many workers there are on all machines.
        max_restarts: how often to begin again after a failure.
        start_timeout: seconds for all members to join.
    """

    def __init__(self, workers: int, max_restarts: int, start_timeout: float):
        self._workers = workers
        self._max_restarts = max_restarts
        self._start_timeout = start_timeout
        self._attempt = 0
        self._finished = False
        self._gather()

    def _gather(self) -> None:
        self._running = False
        self._stopped = False
        self._interrupt: tuple[int, str] | None = None
        self._joined: dict[Peer, Message] = {}
        self._outcomes: dict[Peer, list[Outcome]] = {}
        self._deadline = asyncio.get_running_loop().call_later(self._start_timeout, self._give_up)

    def receive(self, peer: Peer, message: Message) -> None:
        """Takes a message from a member."""
        if message["op"] == "join":
            self._join(peer, message)
        elif peer in self._joined and self._running:
            if message["op"] == "failed":
                if message["interrupt"] is not None and self._interrupt is None:
                    self._interrupt = int(message["interrupt"]), self._host(peer)
                    self._stop(self._interrupt[0])
                elif not self._stopped:
                    self._stop()
            elif message["op"] == "done":
                now = time.time()
                self._done(peer, [Outcome.from_message(outcome, now) for outcome in message["outcomes"]])

    def lost(self, peer: Peer) -> None:
        """A connection has ended."""
        if not self._running:
            self._joined.pop(peer, None)
        elif peer in self._joined and peer not in self._outcomes:
            host, now = self._host(peer), time.time()
            if not self._stopped:
                self._stop()
            self._done(peer, [Outcome(worker, host, None, now) for worker in _numbers(self._joined[peer])])

    def close(self) -> None:
        """Sets the clock off."""
        self._deadline.cancel()

    def _host(self, peer: Peer) -> str:
        return self._joined[peer]["host"]

    def _join(self, peer: Peer, message: Message) -> None:
        mine = set(_numbers(message))
        taken = {number: other for other in self._joined for number in _numbers(self._joined[other])}
        problem = None
        if self._running or self._finished:
            problem = "All workers of this job have been started already."
        elif message["workers"] != self._workers:
            problem = f"It has --workers {message['workers']}, but the launcher of worker 0 has {self._workers}."
        elif both := sorted(mine & set(taken)):
            other = self._host(taken[both[0]])
            names = join_names([f"worker {number}" for number in both])
            problem = (
                f"Two launchers claim {names}: the one on {other} was first. Each machine has its own --worker-rank, "
                f"the number of the first worker that runs on it."
            )
        if problem:
            peer.send({"op": "refused", "message": problem})
            return
        self._joined[peer] = message
        if len(mine) + len(taken) == self._workers:
            self._deadline.cancel()
            self._running = True
            members = sorted(self._joined.values(), key=lambda member: member["first"])
            cluster = [address for member in members for address in member["addresses"]]
            self._tell_all({"op": "start", "cluster": cluster, "attempt": self._attempt})

    def _give_up(self) -> None:
        came = {number: self._host(peer) for peer in self._joined for number in _numbers(self._joined[peer])}
        absent = (f"worker {number}" for number in range(self._workers) if number not in came)
        missing = list(itertools.islice(absent, _NAMED))
        if (more := self._workers - len(came) - len(missing)) > 0:
            missing.append(f"{more} more")
        there = [f"worker {number} ({came[number]})" for number in sorted(came)]
        self._finished = True
        self._tell_all(
            {
                "op": "refused",
                "message": f"After {self._start_timeout:g} s nobody has come for {join_names(missing)}. Here are: "
                f"{join_names(there) or 'none'}. Start `replicax launch` on every machine with the same --workers and "
                f"--coordinator, and its own --worker-rank.",
            }
        )

    def _stop(self, interrupt: int | None = None) -> None:
        self._stopped = True
        self._tell_all({"op": "stop", "interrupt": interrupt})

    def _done(self, peer: Peer, outcomes: list[Outcome]) -> None:
        self._outcomes[peer] = outcomes
        if len(self._outcomes) < len(self._joined):
            return
        if self._interrupt is not None:
            number, host = self._interrupt
            where = f" on {host}" if len(self._joined) > 1 else ""
            status, text = exit_status(-number), f"interrupted by {signal_name(number)}{where}; all workers have ended."
            again = False
        else:
            everyone = sorted((o for some in self._outcomes.values() for o in some), key=lambda o: o.worker)
            status, text = verdict(everyone)
            again = status != 0 and self._attempt < self._max_restarts
        message = {
            "op": "verdict",
            "status": status,
            "text": text,
            "again": again,
            "attempt": self._attempt,
            "max_restarts": self._max_restarts,
        }
        members = list(self._joined)
        self._finished = not again
        if again:
            self._attempt += 1
            self._gather()
        for member in members:
            member.send(message)

    def _tell_all(self, message: Message) -> None:
        for peer in list(self._joined):
            peer.send(message)


def _numbers(join: Message) -> range:
    return range(join["first"], join["first"] + len(join["addresses"]))


class LocalLink:
    """A member's way to a hub in its own process, and the hub's way to it.

    Args:
        hub: the hub.
        inbox: gets what the hub sends.
    """

    def __init__(self, hub: Hub, inbox: asyncio.Queue[Message]):
        self._hub = hub
        self._inbox = inbox

    def send_to_hub(self, message: Message) -> None:
        """Gives the hub a message."""
        self._hub.receive(self, message)

    def send(self, message: Message) -> None:
        """Gives the member a message."""
        self._inbox.put_nowait(message)


class Connection:
    """A member's connection to the hub, or the hub's to a member.

    Args:
        writer: sends over the connection.
    """

    def __init__(self, writer: asyncio.StreamWriter):
        self._writer = writer
        self.host: str = writer.get_extra_info("sockname")[0]
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Message) -> None:
        """Sends a message, without waiting."""
        self._writer.write(json.dumps(message).encode() + b"\n")

    send_to_hub = send

    def listen(self, reader: asyncio.StreamReader, inbox: asyncio.Queue[Message]) -> None:
        """Puts what comes into the inbox and, when the connection ends, a message whose "op" is "lost"."""

        async def listen() -> None:
            await _messages(reader, inbox.put_nowait)
            inbox.put_nowait({"op": "lost"})

        self._listening = asyncio.create_task(listen())

    async def close(self) -> None:
        """Closes the connection when everything is sent."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), 5.0)


async def _messages(reader: asyncio.StreamReader, receive: Callable[[Message], None]) -> None:
    """Passes on what comes, until the connection ends or something comes that is no message."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        while line := await reader.readline():
            receive(json.loads(line))


class Listener:
    """Takes the connections of members on other machines.

    Args:
        hub: gets their messages.
        host: where to listen.
        port: the port there.

    Raises:
        LaunchError: on entering the context, where it cannot listen there.
    """

    def __init__(self, hub: Hub, host: str, port: int):
        self._hub = hub
        self._address = host, port
        self._connections: set[Connection] = set()

    async def __aenter__(self) -> None:
        host, port = self._address
        where = join_address(host, port)
        try:
            # A name may stand for a loopback address here (in /etc/hosts) and for another one on the other machines.
            probe = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            with socket.socket(probe[0], socket.SOCK_STREAM) as candidate:
                candidate.bind(probe[4])
        except OSError as error:
            raise LaunchError(
                f"The coordinator {where} is not an address of this machine ({error}). --coordinator names the machine "
                f"where --worker-rank 0 is started."
            ) from None
        try:
            self._server = await asyncio.start_server(
                self._serve, host if _is_address(host) else None, port, limit=_LONGEST_MESSAGE
            )
        except OSError as error:
            raise LaunchError(
                f"Cannot listen at the coordinator's address {where}: {error.strerror or error}. Another launcher may "
                f"be using that port; give --coordinator another one on all machines."
            ) from None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer)
        self._connections.add(connection)
        try:
            await _messages(reader, lambda message: self._hub.receive(connection, message))
        finally:
            self._connections.discard(connection)
            self._hub.lost(connection)
            await connection.close()

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        await asyncio.gather(*(connection.close() for connection in self._connections))


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return host == "localhost"


async def connect(host: str, port: int, timeout: float, inbox: asyncio.Queue[Message]) -> Connection:
    """Connects to the hub, trying until it is there.

    Args:
        host: the coordinator's machine.
        port: its port.
        timeout: seconds after which to give up.
        inbox: gets the hub's messages and, when the connection ends, one whose "op" is "lost".

    Raises:
        LaunchError: nobody answers.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.01)):
                reader, writer = await asyncio.open_connection(host, port, limit=_LONGEST_MESSAGE)
            break
        except OSError as error:  # TimeoutError is one too
            if time.monotonic() + _RETRY > deadline:
                reason = os.strerror(error.errno) if error.errno else str(error) or "no answer"
                raise LaunchError(
                    f"Nobody answers at the coordinator's address {join_address(host, port)} for {timeout:g} s "
                    f"({reason}). Is `replicax launch ... --worker-rank 0` running there, and is the port open?"
                ) from None
            await asyncio.sleep(_RETRY)

    connection = Connection(writer)
    connection.listen(reader, inbox)
    return connection
