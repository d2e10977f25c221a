"""The task that holds variables: a parameter server.

It keeps leaves of variables by their names, answers reads, and applies the updates of closures, each as one program
under a lock, so that nobody sees half of one; how those of several servers go together, `execution` says. It remembers
which closures it has applied: a closure that runs again, because its first worker was lost, is not applied twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from replicax._base.errors import FailedPreconditionError, UnavailableError
from replicax._parameter_server.arrays import Array, on_host, own
from replicax._parameter_server.plans import UpdateProgram, unpack_update
from replicax._transport.handlers import Answer, Request
from replicax._variables.leaves import COMBINE, SCATTER

_COMBINE = {name: jax.jit(COMBINE[name], donate_argnums=0) for name in ("assign_add", "assign_sub")}
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
        self.kept: dict[int, dict[str, _Kept]] = {}  # updates to be applied later, by closures and attempts
        self.applied: dict[int, _Applied] = {}  # by the closures' numbers
        self.done = 0  # closures with lower numbers have ended
        self._most, self._most_bytes = _REMEMBERED, _LARGE  # before what has ended is forgotten
        self._bytes = 0  # of the answers

    def remember(self, closure: int, applied: _Applied) -> None:
        """Keeps the answer to a closure, until it is known to have ended."""
        self.applied[closure] = applied
        self._bytes += _bytes_of(applied.answers)

    def is_late(self, closure: int, done: int) -> bool:
        """Returns whether a closure is known to have ended; forgets what was kept for such, when that is much."""
        self.done = max(self.done, done)
        for ended in [number for number in self.kept if number < self.done]:
            del self.kept[ended]
        if len(self.applied) > self._most or self._bytes > self._most_bytes:
            self.applied = {number: applied for number, applied in self.applied.items() if number >= self.done}
            self._bytes = sum(_bytes_of(applied.answers) for applied in self.applied.values())
            self._most = max(_REMEMBERED, 2 * len(self.applied))
            self._most_bytes = max(_LARGE, 2 * self._bytes)
        return closure < self.done

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
        variables = (self.begin, self.create, self.drop, self.fetch, self.combine, self.scatter)
        closures = (self.program, self.update, self.keep, self.apply)
        return {f"ps.{call.__name__}": _with_64_bits(call) for call in (*variables, *closures)}

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
        program = unpack_update(request.head, request.arrays)
        with self._lock:
            self._owner(request).programs[request.head["key"]] = program
        return {}, ()

    def update(self, request: Request) -> Answer:
        """Applies what a closure has computed, once; returns what the closure returns of the new values."""
        with self._lock:
            owner, number = self._owner(request), request.head["closure"]
            if owner.is_late(number, request.head["done"]):
                return {"late": True}, ()
            if number not in owner.applied:
                kept = _Kept.of(request, owner)
                if kept.is_changed(owner):
                    return {"changed": True}, ()
                owner.remember(number, kept.applied(owner))
            return owner.applied[number].answer

    def keep(self, request: Request) -> Answer:
        """Keeps an update of several servers until it is known that the last of them has applied its part."""
        with self._lock:
            owner, number = self._owner(request), request.head["closure"]
            if owner.is_late(number, request.head["done"]) or number in owner.applied:
                return {}, ()
            kept = _Kept.of(request, owner)
            if kept.is_changed(owner):
                return {"changed": True}, ()
            owner.kept.setdefault(number, {})[kept.attempt] = kept
        return {}, ()

    def apply(self, request: Request) -> Answer:
        """Applies an update that was kept, once; answers as `update` does."""
        with self._lock:
            owner, number = self._owner(request), request.head["closure"]
            if owner.is_late(number, request.head["done"]):
                return {"late": True}, ()
            if number not in owner.applied:
                kept = owner.kept.pop(number)[request.head["attempt"]]
                if kept.is_changed(owner):
                    raise FailedPreconditionError(
                        "Variables on several parameter servers were updated in part: the coordinator's program "
                        "assigned one of them while a scheduled function replaced it by what it had computed of all "
                        "of its old value. Do so after `join`."
                    )
                owner.remember(number, kept.applied(owner))
            return owner.applied[number].answer


class _Applied(NamedTuple):
    """An update that was applied.

    Args:
        attempt: which one of those of the closure, which may have run again.
        answers: what the closure returns of the new values.
    """

    attempt: str
    answers: list[Array]

    @property
    def answer(self) -> Answer:
        return {"attempt": self.attempt}, self.answers


class _Kept(NamedTuple):
    """An update of one attempt to run a closure.

    Args:
        attempt: its name.
        program: what updates the leaves.
        arrays: what it takes.
        versions: of leaves that must not have been replaced since they were read.
    """

    attempt: str
    program: UpdateProgram
    arrays: Sequence[np.ndarray]
    versions: Mapping[str, int]

    @classmethod
    def of(cls, request: Request, owner: _Owner) -> _Kept:
        """Returns the update that a request asks for."""
        head = request.head
        program = owner.programs[head["program"]]
        for name in (*program.update.writes, *program.update.reads):
            owner.leaf(name)  # raises now what would else come out when others have applied their part
        return cls(head.get("attempt", ""), program, request.arrays, head["versions"])

    def is_changed(self, owner: _Owner) -> bool:
        """Returns whether somebody has replaced a leaf of which the new value was computed."""
        return any(owner.leaf(name).version != version for name, version in self.versions.items())

    def applied(self, owner: _Owner) -> _Applied:
        """Updates the leaves."""
        written = [owner.leaf(name) for name in self.program.update.writes]
        read = [owner.leaf(name).array for name in self.program.update.reads]
        new, answers = self.program([leaf.array for leaf in written], read, self.arrays)
        for leaf, array in zip(written, new):
            leaf.put(array)
        return _Applied(self.attempt, [on_host(answer) for answer in answers])


def _bytes_of(answers: Sequence[Array]) -> int:
    return sum(answer.nbytes for answer in answers)


def _with_64_bits(method: Callable[[Request], Answer]) -> Callable[[Request], Answer]:
    """Returns a method that keeps the types of arrays, whatever this process has for defaults."""

    def call(request: Request) -> Answer:
        with jax.enable_x64(True):
            return method(request)

    return call


_REMEMBERED = 1024  # answers
_LARGE = 1 << 24  # bytes
