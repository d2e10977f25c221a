"""The task that holds variables: a parameter server.

It keeps leaves of variables by their names, answers reads, and applies the updates of closures, each as one program
under a lock, so that nobody sees half of one. It remembers which closures it has applied: a closure that runs again,
because its first worker was lost, is not applied twice.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np

from replicax._base.errors import UnavailableError
from replicax._parameter_server.arrays import Array, on_host, own
from replicax._parameter_server.plans import UpdateProgram, loaded_update
from replicax._transport.handlers import Answer, Request
from replicax._variables.scattering import SCATTER

_COMBINE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "assign_add": jax.jit(operator.add, donate_argnums=0),
    "assign_sub": jax.jit(operator.sub, donate_argnums=0),
}
_SCATTER = {name: jax.jit(scatter, donate_argnums=0) for name, scatter in SCATTER.items()}


class _Leaf:
    """A leaf, or a part of one.

    Answers share the array's memory. While one of them is on its way, XLA gives a program that takes the array over
    memory of its own for the new value.

    Attributes:
        array: its value.
        version: counts the updates.
    """

    __slots__ = ("array", "version")

    def __init__(self, array: jax.Array):
        self.array, self.version = array, 0

    def put(self, array: jax.Array) -> None:
        """Replaces the value."""
        self.array = array
        self.version += 1


class _Owner:
    """What one coordinator has here."""

    def __init__(self) -> None:
        self.leaves: dict[str, _Leaf] = {}
        self.programs: dict[str, UpdateProgram] = {}
        self.applied: dict[int, list[Array]] = {}  # the answers to closures, by their numbers
        self.done = 0  # closures with lower numbers have ended
        self._most = _REMEMBERED  # answers, before those to closures that have ended are forgotten
        self._held = 0  # bytes of the answers

    def remember(self, closure: int, answers: list[Array]) -> None:
        """Keeps the answer to a closure, until it is known to have ended."""
        self.applied[closure] = answers
        self._held += sum(answer.nbytes for answer in answers)

    def forget_done(self) -> None:
        """Forgets answers to closures that have ended, when there are many or large ones."""
        if len(self.applied) > self._most or self._held > _LARGE:
            self.applied = {number: answers for number, answers in self.applied.items() if number >= self.done}
            self._held = sum(answer.nbytes for answers in self.applied.values() for answer in answers)
            self._most = max(_REMEMBERED, 2 * len(self.applied))

    def leaf(self, name: str) -> _Leaf:
        """Returns a leaf by its name."""
        if name not in self.leaves:
            raise UnavailableError(
                f"This parameter server has no variable {name!r}: it was started anew after the variable was made. "
                "Start the coordinator's program again; it goes on from its last checkpoint."
            )
        return self.leaves[name]


class ParameterServer:
    """The variables of one task, and what is done with them."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}
        self._lock = threading.RLock()

    def methods(self) -> dict[str, Callable[[Request], Answer]]:
        """Returns what other tasks may call, by name."""
        calls = (self.begin, self.create, self.drop, self.fetch, self.combine, self.scatter, self.program, self.update)
        return {f"ps.{call.__name__}": _with_64_bits(call) for call in calls}

    def begin(self, request: Request) -> Answer:
        """Makes room for a coordinator's variables, which go with the connection to it."""
        name = request.head["owner"]
        with self._lock:
            self._owners[name] = _Owner()
        request.on_close(lambda: self._forget(name))
        return {"platform": jax.default_backend()}, ()

    def _forget(self, owner: str) -> None:
        with self._lock:
            self._owners.pop(owner, None)

    def _owner(self, request: Request) -> _Owner:
        name = request.head["owner"]
        if name not in self._owners:
            raise UnavailableError(
                "This parameter server knows nothing of the coordinator that asks: it was started anew, or took the "
                "coordinator for lost. Start the coordinator's program again."
            )
        return self._owners[name]

    def create(self, request: Request) -> Answer:
        """Keeps new leaves."""
        arrays = own(request.arrays, request.caller.local)
        with self._lock:
            owner = self._owner(request)
            owner.leaves.update((name, _Leaf(array)) for name, array in zip(request.head["names"], arrays))
        return {}, ()

    def drop(self, request: Request) -> Answer:
        """Forgets leaves and programs."""
        with self._lock:
            owner = self._owner(request)
            for name in request.head["names"]:
                owner.leaves.pop(name, None)
            for key in request.head["programs"]:
                owner.programs.pop(key, None)
        return {}, ()

    def fetch(self, request: Request) -> Answer:
        """Returns whole leaves and, behind them, rows of others, as they are together at one moment."""
        head = request.head
        with self._lock:
            owner = self._owner(request)
            read = [owner.leaf(name) for name in head["read"]]
            gathered = [owner.leaf(name) for name in head.get("gather", ())]
            arrays = [on_host(leaf.array) for leaf in read]
            arrays += [np.take(np.asarray(leaf.array), ids, axis=0) for leaf, ids in zip(gathered, request.arrays)]
            versions = [leaf.version for leaf in (*read, *gathered)] if head.get("versions") else []
        return {"versions": versions}, arrays

    def combine(self, request: Request) -> Answer:
        """Assigns, adds or subtracts arrays; returns the new values if they are asked for."""
        head, method = request.head, request.head["method"]
        with self._lock:
            owner = self._owner(request)
            leaves = [owner.leaf(name) for name in head["names"]]
            arrays = own(request.arrays, request.caller.local) if method == "assign" else request.arrays
            for leaf, array in zip(leaves, arrays):
                leaf.put(array if method == "assign" else _COMBINE[method](leaf.array, array))
            return {}, [on_host(leaf.array) for leaf in leaves] if head["answers"] else ()

    def scatter(self, request: Request) -> Answer:
        """Combines rows with those at some indices."""
        ids, rows = request.arrays
        with self._lock:
            leaf = self._owner(request).leaf(request.head["name"])
            leaf.put(_SCATTER[request.head["method"]](leaf.array, ids, rows))
        return {}, ()

    def program(self, request: Request) -> Answer:
        """Keeps the update program of a function."""
        program = loaded_update(request.head, request.arrays)
        with self._lock:
            self._owner(request).programs[request.head["key"]] = program
        return {}, ()

    def update(self, request: Request) -> Answer:
        """Applies what a closure has computed, once; returns what the closure returns of the new values."""
        head = request.head
        with self._lock:
            owner = self._owner(request)
            closure: int = head["closure"]
            owner.done = max(owner.done, head["done"])
            owner.forget_done()
            if closure < owner.done:
                return {"late": True}, ()
            if closure not in owner.applied:
                program = owner.programs[head["program"]]
                written = [owner.leaf(name) for name in program.writes]
                expected = head.get("versions") or {}
                if any(owner.leaf(name).version != version for name, version in expected.items()):
                    return {"changed": True}, ()
                owner.remember(closure, self._apply(program, owner, written, request.arrays))
            return {}, owner.applied[closure]

    def _apply(
        self, program: UpdateProgram, owner: _Owner, written: Sequence[_Leaf], shipped: Sequence[np.ndarray]
    ) -> list[Array]:
        read = [owner.leaf(name).array for name in program.reads]
        new, answers = program([leaf.array for leaf in written], read, shipped)
        for leaf, array in zip(written, new):
            leaf.put(array)
        return [on_host(answer) for answer in answers]


def _with_64_bits(method: Callable[[Request], Answer]) -> Callable[[Request], Answer]:
    """Returns a method that keeps the types of arrays, whatever this process has for defaults."""

    def call(request: Request) -> Answer:
        with jax.enable_x64(True):
            return method(request)

    return call


_REMEMBERED = 1024  # answers
_LARGE = 1 << 24  # bytes
