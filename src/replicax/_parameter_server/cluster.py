"""A cluster with parameter servers, as its coordinator sees it: where new variables go."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from replicax._base.errors import UnavailableError
from replicax._base.types import Tree
from replicax._cluster.spec import ClusterSpec
from replicax._job import state
from replicax._parameter_server.cut_types import Part
from replicax._parameter_server.numbers import Numbers
from replicax._parameter_server.places import Place, shards, whole
from replicax._parameter_server.servers import Servers
from replicax._parameter_server.variables import ServedStorage
from replicax._values.forms import Shape
from replicax._variables.as_leaves import ARRAY
from replicax._variables.storage import Leaves, Types

_Placed = Sequence[tuple[Shape, tuple[Part, ...]]]


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
        numbers: of the updates of closures, and of functions that this process runs itself.
    """

    runner: Callable[[Any, Any, Sequence[Tree]], Tree]

    def __init__(self, spec: ClusterSpec):
        self.name = f"{os.getpid()}-{secrets.token_hex(8)}"
        self.addresses = [address for job in spec.jobs for address in spec.job_tasks(job) if address is not None]
        self.worker_addresses = [address for address in spec.job_tasks("worker") if address is not None]
        self.server_addresses = [address for address in spec.job_tasks("ps") if address is not None]
        self.numbers = Numbers()
        self.alone: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._lock = threading.RLock()
        self._servers: Servers | None = None
        self._count = 0  # of what was placed on servers in turn
        self._numbers = itertools.count()  # of leaves
        self._placed: list[tuple[Shape, tuple[Part, ...]]] = []  # leaves that are no scalars, as they were made
        self._listeners: list[Callable[[UnavailableError], None]] = []
        self._on_close: list[Callable[[], None]] = []

    # The servers.

    @property
    def servers(self) -> Servers:
        with self._lock:
            if self._servers is None:
                servers = Servers(self.server_addresses, self.addresses, self.name)
                servers.begin(state.timeouts()["start"], self._lost)
                self._servers = servers
            return self._servers

    def on_lost(self, listener: Callable[[UnavailableError], None]) -> None:
        """Has `listener` called when a parameter server is lost."""
        self._listeners.append(listener)

    def _lost(self, error: UnavailableError) -> None:
        for listener in list(self._listeners):
            listener(error)

    def close(self) -> None:
        """Ends the connections: scheduled functions are cancelled, and the servers forget the variables."""
        for listener in list(self._on_close):
            listener()
        with self._lock:
            if self._servers is not None:
                self._servers.close()

    def on_close(self, listener: Callable[[], None]) -> None:
        """Has `listener` called when the connections are ended."""
        self._on_close.append(listener)

    # Where leaves go.

    def in_turn(self) -> int:
        """Returns the number of the server whose turn it is."""
        with self._lock:
            self._count += 1
            return (self._count - 1) % len(self.server_addresses)

    def shards(self, shape: Shape, count: int) -> tuple[Part, ...]:
        """Returns the parts of a new leaf that is divided, on servers in turn.

        Where each server gets as many, they begin with the first one: leaves of one shape lie alike then, as a table
        and an optimizer's averages of its gradients, and are updated without moving either.
        """
        servers = len(self.server_addresses)
        with self._lock:
            first = 0 if count % servers == 0 else self._count % servers
            self._count += count
        parts = shards(first, servers, shape[0], count)
        self._placed.append((shape, parts))
        return parts

    def placed(self, tree: jax.tree_util.PyTreeDef, leaves: Leaves) -> list[tuple[Part, ...]]:
        """Returns the parts of the leaves of a new variable, each on one server.

        Leaves of a pytree that have the shapes of earlier leaves, in their order, lie with those: an optimizer's
        averages of gradients lie with the variables, and both are updated together.
        """
        if tree == ARRAY:
            return [self._placed_in_turn(leaves[0].shape)]
        found: dict[int, tuple[Part, ...]] = {}
        earlier = list(self._placed)

        def lie_with_earlier(node: Tree) -> bool:
            numbers = jax.tree.leaves(node)
            match = _matching([leaves[number].shape for number in numbers], earlier)
            if match is not None:
                found.update(zip(numbers, match))
            return match is not None

        jax.tree.leaves(tree.unflatten(range(len(leaves))), is_leaf=lie_with_earlier)
        return [found[n] if n in found else self._placed_in_turn(leaf.shape) for n, leaf in enumerate(leaves)]

    def _placed_in_turn(self, shape: Shape) -> tuple[Part, ...]:
        parts = whole(self.in_turn(), shape)
        if shape:
            self._placed.append((shape, parts))
        return parts

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


def _matching(shapes: Sequence[Shape], earlier: _Placed) -> list[tuple[Part, ...]] | None:
    """Returns where earlier leaves of these shapes lie that were made in this order; None if there are none."""
    remaining = iter(earlier)
    found = []
    for shape in shapes:
        parts = next((parts for other, parts in remaining if other == shape), None)
        if parts is None:
            return None
        found.append(parts)
    return found or None


def aside(close: Callable[[], None]) -> None:
    """Closes what belongs to an object that is no more, in a thread, since that may come about under any lock.

    At the end of the process, it waits for that.
    """
    if threading.main_thread().is_alive():
        threading.Thread(target=close, name="replicax-close", daemon=True).start()
    else:
        close()
