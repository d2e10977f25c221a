"""The task that runs scheduled functions: a worker.

It keeps the programs and datasets of a coordinator, and runs its closures one after the other. The next closure takes
its elements while the one before it computes.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from replicax._base.errors import FailedPreconditionError, OutOfRangeError
from replicax._base.types import Tree
from replicax._data.calls import ending
from replicax._data.iterators import ElementIterator, pull, push_back
from replicax._parameter_server import execution, scheduling
from replicax._parameter_server.datasets import kinds_of, made
from replicax._parameter_server.execution import Computed
from replicax._parameter_server.plans import WorkerPlan, unpack_plan
from replicax._parameter_server.servers import CutOffError, Servers
from replicax._parameter_server.shipping import unpacked
from replicax._parameter_server.worker_values import own_arrays
from replicax._tracing.dataset_reads import element_arrays
from replicax._transport.handlers import Answer, Request

_PATIENCE = 10.0  # seconds in which each parameter server has to be reached


class SessionEndedError(FailedPreconditionError):
    """The worker has ended the session, since it took the coordinator for lost."""


class _Turns:
    """Lets closures pass in the order of their turns, from 0."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next, self._closed = 0, False

    def wait_for(self, turn: int) -> None:
        """Waits for a turn."""
        with self._changed:
            while self._next < turn and not self._closed:
                self._changed.wait()
            if self._closed:
                raise SessionEndedError("The session has ended.")

    def passed(self, turn: int) -> None:
        """Lets the next turn begin."""
        with self._changed:
            self._next = max(self._next, turn + 1)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class _Session:
    """What one connection of a coordinator has here."""

    def __init__(self, index: int, servers: Servers):
        self.index, self.servers = index, servers
        self.plans: dict[str, WorkerPlan] = {}
        self.datasets: dict[str, object] = {}
        self.iterators: dict[str, ElementIterator] = {}
        self.values: dict[str, list[jax.Array]] = {}
        self.held: dict[int, list[Tree]] = {}  # elements of closures whose program is still to come
        self.undecided: dict[int, _Begun] = {}  # that wait for the coordinator's word
        self.pulls, self.runs = _Turns(), _Turns()
        self.failures = 0  # closures that were scheduled before so many failures are left out

    def close(self) -> None:
        """Ends what is under way."""
        self.pulls.close()
        self.runs.close()
        self.servers.close()


class Worker:
    """The closures of one task, and what they need."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._lock = threading.RLock()

    def methods(self) -> dict[str, Callable[[Request], Answer]]:
        """Returns what other tasks may call, by name."""
        calls = (self.begin, self.plan, self.dataset, self.value, self.iterator, self.peek, self.run, self.decide)
        return {f"worker.{call.__name__}": call for call in calls}

    def begin(self, request: Request) -> Answer:
        """Begins a session of a coordinator, which ends with the connection."""
        head = request.head
        for module in head["imports"]:
            importlib.import_module(module)
        name: str = head["session"]
        self._end(head["instead_of"])  # of which the coordinator takes no answers any more
        session = _Session(head["index"], Servers(head["servers"], head["job"], head["owner"], insists=True))
        try:
            session.servers.reach(_PATIENCE)
        except BaseException:
            session.close()
            raise
        with self._lock:
            self._sessions[name] = session
        request.on_close(lambda: self._end(name))
        return {"platform": jax.default_backend()}, ()

    def _end(self, name: str) -> None:
        with self._lock:
            session = self._sessions.pop(name, None)
        if session is not None:
            session.close()

    def _session(self, request: Request) -> _Session:
        session = self._sessions.get(request.head["session"])
        if session is None:
            raise SessionEndedError("The session has ended.")
        return session

    def plan(self, request: Request) -> Answer:
        """Keeps the program of a function."""
        session = self._keeping(request)
        session.plans[request.head["key"]] = unpack_plan(request.head, request.arrays)
        return {}, ()

    def _keeping(self, request: Request) -> _Session:
        """Returns the session, without what its coordinator has no more."""
        session = self._session(request)
        kept: tuple[dict[str, Any], ...] = (session.plans, session.datasets, session.iterators, session.values)
        for key in request.head["forget"]:
            for each in kept:
                each.pop(key, None)
        return session

    # Datasets.

    def dataset(self, request: Request) -> Answer:
        """Keeps a dataset, or the function that makes it."""
        session = self._keeping(request)
        with scheduling.on_worker(session.index):
            session.datasets[request.head["key"]] = made(unpacked(request.head, request.arrays))
        return {}, ()

    def value(self, request: Request) -> Answer:
        """Makes a value and keeps it."""
        session = self._keeping(request)
        with scheduling.on_worker(session.index):
            session.values[request.head["key"]] = own_arrays(unpacked(request.head, request.arrays))
        return {}, ()

    def iterator(self, request: Request) -> Answer:
        """Makes an iterator over a dataset."""
        session, head = self._keeping(request), request.head
        with scheduling.on_worker(session.index):
            session.iterators[head["key"]] = iter(session.datasets[head["dataset"]])  # type: ignore[call-overload]
        return {}, ()

    def peek(self, request: Request) -> Answer:
        """Returns the shapes and dtypes of an iterator's next element."""
        session = self._session(request)
        iterator = session.iterators[request.head["iterator"]]
        element = _pulled(session, iterator)
        _push_back(iterator, element)
        return {"kinds": kinds_of(element)}, ()

    # Closures.

    def run(self, request: Request) -> Answer:
        """Runs a closure, in its turn."""
        head, session = request.head, self._session(request)
        turn, closure = head["turn"], head["closure"]
        goes_on = False  # with another call in the same turn
        try:
            with _failing(session, head["failures"]):
                elements = _elements_in_turn(session, head)
                session.runs.wait_for(turn)
                if head["failures"] < session.failures:
                    _put_back(session, head, elements)
                    return {"cancelled": True}, ()
                if isinstance(elements, OutOfRangeError) and head["may_be_over"]:
                    return {"over": True}, ()
                if isinstance(elements, BaseException):
                    raise elements
                plan = session.plans[head["plan"]]
                if tuple(map(kinds_of, elements)) != plan.kinds:
                    goes_on = True
                    session.held[closure] = elements
                    return {"kinds": [kinds_of(element) for element in elements]}, ()
                arrays = list(request.arrays)
                for place, key, number in head["values"]:
                    arrays[place] = session.values[key][number]
                begun = _Begun(plan, closure, turn, elements, *_operands(session, plan, elements, arrays))
                if not plan.asks_first:
                    return self._run(session, begun, head["done"])
                answer = self._asked(session, begun)
                goes_on = True
                return answer
        finally:
            if not goes_on:
                session.runs.wait_for(turn)
                session.runs.passed(turn)

    def _run(self, session: _Session, begun: _Begun, done: int) -> Answer:
        ended = execution.run(begun.plan, begun.others, begun.args, session.servers, begun.closure, done)
        if ended is None:
            session.held[begun.closure] = begun.elements
            return {"changed": True}, ()
        results, operands = ended
        return {"results": len(results)}, [*results, *operands]

    def _asked(self, session: _Session, begun: _Begun) -> Answer:
        """Computes, and returns what the coordinator calls its functions with, before anything is updated."""
        begun.computed = execution.compute(begun.plan, begun.others, begun.args, session.servers)
        session.undecided[begun.closure] = begun
        return {"undecided": True}, begun.computed.operands

    def decide(self, request: Request) -> Answer:
        """Updates with what a closure has computed, or drops it; its turn ends with that."""
        head, session = request.head, self._session(request)
        begun = session.undecided.pop(head["closure"], None)
        session.held.pop(head["closure"], None)
        try:
            if not head["apply"]:  # it may not have come to its turn, nor to its elements
                session.pulls.wait_for(head["turn"])
                session.pulls.passed(head["turn"])
                session.runs.wait_for(head["turn"])
            if not head["apply"] or begun is None or begun.computed is None:
                session.failures = max(session.failures, head["failures"] + 1)
                return {}, ()
            with _failing(session, head["failures"]):
                results = execution.update(begun.plan, begun.computed, session.servers, begun.closure, head["done"])
            if results is None:
                session.held[begun.closure] = begun.elements
                return {"changed": True}, ()
            return {"results": len(results)}, results
        finally:
            session.runs.passed(head["turn"])


@dataclass
class _Begun:
    """A closure whose turn it is.

    Args:
        plan, closure, turn: its plan, its number and its turn.
        elements: those that it has taken.
        others, args: what it computes with.
        computed: by `execution.compute`.
    """

    plan: WorkerPlan
    closure: int
    turn: int
    elements: list[Tree]
    others: list[np.ndarray | jax.Array]
    args: Sequence[np.ndarray | jax.Array]
    computed: Computed | None = None


def _operands(
    session: _Session, plan: WorkerPlan, elements: list[Tree], arrays: Sequence[np.ndarray]
) -> tuple[list[np.ndarray | jax.Array], Sequence[np.ndarray | jax.Array]]:
    """Returns what a program takes beside what it reads: elements and the like, and the arguments of the call."""
    args, local = plan.split(arrays)
    others = [array for element in elements for array in element_arrays(element)]
    if plan.index_dtype is not None:
        others.append(np.asarray(session.index, plan.index_dtype))
    return [*others, *local], args


def _elements_in_turn(session: _Session, head: Mapping[str, Any]) -> list[Tree] | BaseException:
    """Returns the elements that a closure takes, or the exception that it fails with when it is its turn to run.

    It is not to fail now: closures before it may still have to run.
    """
    try:
        session.pulls.wait_for(head["turn"])
        return _elements(session, head) if head["failures"] >= session.failures else []
    except BaseException as error:
        return error
    finally:
        session.pulls.passed(head["turn"])


def _put_back(session: _Session, head: Mapping[str, Any], elements: list[Tree] | BaseException) -> None:
    """Has later closures take the elements of one that does not run."""
    if not isinstance(elements, BaseException):
        for key, element in reversed([*zip(head["iterators"], elements)]):
            _push_back(session.iterators[key], element)


def _elements(session: _Session, head: Mapping[str, Any]) -> list[Tree]:
    """Returns the elements that a closure takes: all of them, or none where one dataset has ended."""
    held = session.held.pop(head["closure"], None)
    if held is not None:
        return held
    taken: list[tuple[ElementIterator, Tree]] = []
    try:
        for key in head["iterators"]:
            iterator = session.iterators[key]
            taken.append((iterator, _pulled(session, iterator)))
    except BaseException:
        for iterator, element in reversed(taken):
            _push_back(iterator, element)
        raise
    return [element for _, element in taken]


@contextmanager
def _failing(session: _Session, failures: int) -> Iterator[None]:
    """Returns a context in which an exception has closures left out that were scheduled before it.

    That a server cannot be reached is no fault of the closure: it runs again, and those behind it run.
    """
    try:
        yield
    except CutOffError:
        raise
    except BaseException:
        session.failures = max(session.failures, failures + 1)
        raise


def _push_back(iterator: ElementIterator, element: Tree) -> None:
    push_back(iterator, element)


def _pulled(session: _Session, iterator: ElementIterator) -> Tree:
    with scheduling.on_worker(session.index):
        try:
            return pull(iterator)
        except StopIteration:
            raise ending(OutOfRangeError("End of sequence")) from None
