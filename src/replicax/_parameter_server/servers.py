"""The parameter servers of a cluster, as the tasks see them that read and update what lies there."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from replicax._base import doc_pages
from replicax._base.errors import FailedPreconditionError, UnavailableError
from replicax._parameter_server.arrays import Array, joined, on_host
from replicax._parameter_server.places import Place
from replicax._transport.errors import TimedOut, Unreachable
from replicax._transport.handlers import Answer
from replicax._transport.peer import Peer
from replicax._transport.service import local_service

_Arrays = Sequence[np.ndarray | jax.Array]
_T = TypeVar("_T")


class CutOffError(FailedPreconditionError):
    """A worker cannot reach a parameter server, which may well be there."""


class Call(NamedTuple):
    """A call of one server."""

    method: str
    head: Mapping[str, object]
    arrays: _Arrays = ()


class Servers:
    """All parameter servers of a cluster.

    Args:
        addresses: theirs, by index.
        job: the addresses of all tasks of the cluster.
        owner: the name of the coordinator whose variables they are.
        insists: whether a call is made again when the connection breaks, as workers do: servers answer it as the first
            time. Without, a broken connection is the end, since servers forget a coordinator with the connection to it.
    """

    def __init__(self, addresses: Sequence[str], job: Sequence[str], owner: str, insists: bool = False):
        self._insists = insists
        self._peers = [Peer(address, job=job, task=f"ps {number}") for number, address in enumerate(addresses)]
        self._owner = owner
        self._pool = concurrent.futures.ThreadPoolExecutor(len(addresses), "replicax-ps")
        self._dead: deque[Place] = deque()  # leaves of variables that are no more
        self._dead_programs: deque[str] = deque()
        self.lost: UnavailableError | None = None
        self.platforms: list[str] = []  # on which they compute

    def __len__(self) -> int:
        return len(self._peers)

    # Their beginning and their end.

    def begin(self, timeout: float | None, on_lost: Callable[[UnavailableError], None]) -> None:
        """Waits for all servers, and makes room there for the coordinator's variables."""
        try:
            for number, peer in enumerate(self._peers):
                peer.wait_until_ready(timeout)
                peer.watch(lambda error, number=number: self._note_lost(number, error, on_lost))  # type: ignore[misc]
            answers = self.all({number: Call("begin", {}) for number in range(len(self))})
        except BaseException:
            self.close()
            raise
        self.platforms = [answers[number][0]["platform"] for number in range(len(self))]

    def _note_lost(self, number: int, error: Exception, on_lost: Callable[[UnavailableError], None]) -> None:
        self.lost = self.lost or self._unavailable(number, error)
        on_lost(self.lost)

    def _unavailable(self, number: int, error: Exception) -> UnavailableError:
        lost = UnavailableError(
            f"Parameter server {number} at {self._peers[number].address} is gone, and its variables with it: {error} "
            "Start the program again; it goes on from its last checkpoint. "
            f"See {doc_pages.page('how-to/parameter-servers#when-tasks-fail')}."
        )
        lost.__cause__ = error
        return lost

    def reach(self, timeout: float) -> None:
        """Connects a worker with all servers.

        Raises:
            CutOffError: one of them cannot be reached within so many seconds.
        """
        for number, peer in enumerate(self._peers):
            try:
                peer.wait_until_ready(timeout)
            except (Unreachable, TimedOut) as error:
                raise self._cut_off(number, error) from error

    def _cut_off(self, number: int, error: Exception) -> CutOffError:
        return CutOffError(f"It cannot reach parameter server {number} at {self._peers[number].address}: {error}")

    def is_local(self, number: int) -> bool:
        """Returns whether a server is in this process."""
        return local_service(self._peers[number].address) is not None

    def close(self) -> None:
        """Ends the connections; the servers forget the coordinator's variables."""
        for peer in self._peers:
            peer.close()
        self._pool.shutdown(wait=False)

    # Calls.

    def all(self, calls: Mapping[int, Call]) -> dict[int, Answer]:
        """Calls several servers at the same time; returns their answers by the servers' numbers."""
        if len(calls) == 1:
            ((number, call),) = calls.items()
            return {number: self._call(number, call)}
        futures = {number: self._pool.submit(self._call, number, call) for number, call in calls.items()}
        concurrent.futures.wait(futures.values())
        return {number: future.result() for number, future in futures.items()}

    def _call(self, number: int, call: Call) -> Answer:
        if self.lost is not None:
            raise self.lost.with_traceback(None)  # else that of each call before would be part of it
        peer, method, head = self._peers[number], f"ps.{call.method}", {"owner": self._owner, **call.head}
        try:
            try:
                return peer.call(method, head, call.arrays)
            except Unreachable:
                if not self._insists:
                    raise
                return peer.call(method, head, call.arrays)
        except Unreachable as error:
            raise (self._cut_off if self._insists else self._unavailable)(number, error) from error
        except UnavailableError as error:  # it says itself what it has lost
            raise UnavailableError(f"Parameter server {number} at {peer.address}: {error}") from error

    def add_programs(self, calls: Mapping[int, Call]) -> None:
        """Sends the update programs of a function."""
        self._drop_dead()
        self.all(calls)

    def create(self, places: Sequence[Place], arrays: _Arrays) -> None:
        """Makes leaves."""
        self._drop_dead()
        self._for_parts("create", places, arrays, {})

    def read(self, places: Sequence[Place]) -> list[Array]:
        """Returns whole leaves."""
        names = self._names(places)
        answers = self.all({server: Call("fetch", {"read": found}) for server, found in names.items()})
        return self._assembled(places, answers)

    def fetch(
        self, reads: Sequence[Place], gathers: Sequence[tuple[Place, np.ndarray]], versions: bool
    ) -> tuple[list[Array], list[np.ndarray], dict[str, int]]:
        """Returns whole leaves, and rows of others, each server's as they are there at one moment.

        Args:
            reads: the leaves to return whole.
            gathers: leaves, and ids of rows of them, in a vector; each id is that of a row.
            versions: whether to tell how often the parts were updated that were read, by the parts' names.
        """
        whole = self._names(reads)
        # By the servers: the number of a gather, the part's name, which of its rows are there, and their ids there.
        wanted: dict[int, list[tuple[int, str, np.ndarray | slice, np.ndarray]]] = {}
        for number, (place, ids) in enumerate(gathers):
            for name, part in zip(place.names, place.parts):
                own = np.flatnonzero((ids >= part.start) & (ids < part.stop)) if place.is_sharded else slice(None)
                if not place.is_sharded or len(own):  # type: ignore[arg-type]
                    wanted.setdefault(part.server, []).append((number, name, own, ids[own] - part.start))
        calls = {}
        for server in whole.keys() | wanted.keys():
            asked = wanted.get(server, [])
            head = {"read": whole.get(server, []), "gather": [name for _, name, _, _ in asked], "versions": versions}
            calls[server] = Call("fetch", head, [ids for *_, ids in asked])
        first: dict[int, Answer] = {}
        rows = [np.empty((len(ids), *place.kind.shape[1:]), place.kind.dtype) for place, ids in gathers]
        found: dict[str, int] = {}
        for server, (answer, arrays) in self.all(calls).items():
            names, asked = whole.get(server, []), wanted.get(server, [])
            first[server] = answer, arrays[: len(names)]
            for (number, _, own, _), array in zip(asked, arrays[len(names) :]):
                if isinstance(own, slice):
                    rows[number] = array
                else:
                    rows[number][own] = array
            found.update(zip([*names, *(name for _, name, _, _ in asked)], answer["versions"]))
        return self._assembled(reads, first), rows, found

    def combine(self, method: str, places: Sequence[Place], arrays: _Arrays, answers: bool) -> list[Array]:
        """Assigns, adds or subtracts arrays; returns the new values if they are asked for."""
        found = self._for_parts("combine", places, arrays, {"method": method, "answers": answers})
        return self._assembled(places, found) if answers else []

    def scatter(self, method: str, place: Place, ids: np.ndarray, rows: np.ndarray) -> None:
        """Combines rows with those at some indices, which count from the end where they are negative."""
        size = place.kind.shape[0]
        ids = np.where(ids < 0, ids + size, ids).reshape(-1)
        rows = np.broadcast_to(rows, (*np.shape(ids), *place.kind.shape[1:]))
        for number, part in enumerate(place.parts):
            own = (ids >= part.start) & (ids < part.stop)
            if own.any():
                head = {"method": method, "name": place.names[number]}
                self.all({part.server: Call("scatter", head, [ids[own] - part.start, rows[own]])})

    def drop(self, places: Iterable[Place]) -> None:
        """Notes that variables are no more; the servers are told later, since this may be called at any moment."""
        self._dead.extend(places)

    def drop_program(self, key: str) -> None:
        """Notes that the program of a function is no more."""
        self._dead_programs.append(key)

    def _drop_dead(self) -> None:
        names, programs = self._names(_emptied(self._dead)), _emptied(self._dead_programs)
        servers = range(len(self)) if programs else names
        calls = {n: Call("drop", {"names": names.get(n, []), "programs": programs}) for n in servers}
        if calls:
            self.all(calls)

    # Leaves and their parts.

    @staticmethod
    def _names(places: Sequence[Place]) -> dict[int, list[str]]:
        """Returns the names of all parts, by their servers."""
        found: dict[int, list[str]] = {}
        for place in places:
            for name, part in zip(place.names, place.parts):
                found.setdefault(part.server, []).append(name)
        return found

    def _for_parts(
        self, method: str, places: Sequence[Place], arrays: _Arrays, head: Mapping[str, object]
    ) -> dict[int, Answer]:
        """Calls the servers with the parts of arrays that belong there."""
        pieces: dict[int, list[np.ndarray | jax.Array]] = {}
        for place, array in zip(places, arrays):
            if place.is_sharded:
                array = on_host(array)  # slicing an array of JAX would compile a program for each part
            for part in place.parts:
                piece = array[part.start : part.stop] if place.is_sharded else array
                pieces.setdefault(part.server, []).append(piece)
        names = self._names(places)
        return self.all({n: Call(method, {**head, "names": names[n]}, pieces[n]) for n in names})

    @staticmethod
    def _assembled(places: Sequence[Place], answers: Mapping[int, Answer]) -> list[Array]:
        """Returns leaves, put together of the parts in the servers' answers."""
        queues = {server: iter(arrays) for server, (_, arrays) in answers.items()}
        found = []
        for place in places:
            parts = [next(queues[part.server]) for part in place.parts]
            found.append(joined(parts))
        return found


def _emptied(entries: deque[_T]) -> list[_T]:
    """Returns what it takes out of a deque, which other threads may fill and empty meanwhile."""
    found = []
    with contextlib.suppress(IndexError):
        while True:
            found.append(entries.popleft())
    return found
