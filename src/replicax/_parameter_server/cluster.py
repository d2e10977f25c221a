"""A cluster with parameter servers, as its coordinator sees it: where new variables go."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

from replicax._base.errors import UnavailableError
from replicax._base.types import Tree
from replicax._cluster.spec import ClusterSpec
from replicax._job import state
from replicax._parameter_server.numbers import Numbers
from replicax._parameter_server.places import Part, Place, shards, whole
from replicax._parameter_server.servers import Servers
from replicax._parameter_server.variables import ServedStorage
from replicax._values.forms import Shape
from replicax._variables.storage import Leaves, Types


class Cluster:
    """The tasks of a cluster with parameter servers.

    Args:
        spec: their addresses.

    Attributes:
        name: the name by which servers and workers know this coordinator.
        servers: the parameter servers; waits for them when it is first asked for.
        worker_addresses: the workers', by index.
        addresses: those of all tasks.
        runner: runs the programs of this process that have to do with variables on servers.
        alone: returns a context in which no scheduled function runs.
        on_lost: called when a parameter server is lost.
        on_close: called when the connections are ended.
        numbers: of the updates of closures, and of functions that this process runs itself.
        is_closed: whether `close` was called, after which the servers no longer have the variables.
    """

    runner: Callable[[Any, Any, Sequence[Tree]], Tree]

    def __init__(self, spec: ClusterSpec):
        self.name = f"{os.getpid()}-{secrets.token_hex(8)}"
        self.addresses = [address for job in spec.jobs for address in spec.job_tasks(job) if address is not None]
        self.worker_addresses = [address for address in spec.job_tasks("worker") if address is not None]
        self.server_addresses = [address for address in spec.job_tasks("ps") if address is not None]
        self.numbers = Numbers()
        self.is_closed = False
        self.alone: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.on_lost: Callable[[UnavailableError], None] = lambda error: None
        self.on_close: Callable[[], None] = lambda: None
        self._lock = threading.RLock()
        self._servers: Servers | None = None
        self._count = 0  # of what was placed on servers in turn
        self._numbers = itertools.count()  # of leaves

    # The servers.

    @property
    def servers(self) -> Servers:
        with self._lock:
            if self._servers is None:
                servers = Servers(self.server_addresses, self.addresses, self.name)
                servers.begin(state.timeouts()["start"], lambda error: self.on_lost(error))
                self._servers = servers
            return self._servers

    def close(self) -> None:
        """Ends the connections: scheduled functions are cancelled, and the servers forget the variables."""
        self.is_closed = True
        self.on_close()
        with self._lock:
            if self._servers is not None:
                self._servers.close()

    # Where leaves go.

    def in_turn(self, shape: Shape) -> tuple[Part, ...]:
        """Returns the part of a new leaf that lies as a whole on the server whose turn it is."""
        with self._lock:
            self._count += 1
            return whole((self._count - 1) % len(self.server_addresses), shape)

    def shards(self, shape: Shape, count: int) -> tuple[Part, ...]:
        """Returns the parts of a new leaf that is divided, on servers in turn.

        Where each server gets as many, they begin with the first one: leaves of one shape lie alike then, as a table
        and an optimizer's averages of its gradients, and are updated without moving either.
        """
        servers = len(self.server_addresses)
        with self._lock:
            first = 0 if count % servers == 0 else self._count % servers
            self._count += count
        return shards(first, servers, shape[0], count)

    def new_storage(self, name: str, types: Types, leaves: Leaves, parts: Sequence[Sequence[Part]]) -> ServedStorage:
        """Returns a storage with these leaves, which are put on the servers."""
        places = []
        for kind, own in zip(types, parts):
            number = next(self._numbers)
            places.append(Place(tuple(f"{number}/{k}" for k in range(len(own))), kind, tuple(own)))
        self.servers.create(places, leaves)
        storage = ServedStorage(name, types, self, places)
        storage.owns_places()
        return storage


def aside(close: Callable[[], None]) -> None:
    """Closes what belongs to an object that is no more, in a thread, since that may come about under any lock.

    At the end of the process, it waits for that.
    """
    if threading.main_thread().is_alive():
        threading.Thread(target=close, name="replicax-close", daemon=True).start()
    else:
        close()
