"""The coordinator's connection to one worker, and the threads that hand closures to it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import threading
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, cast

from replicax._base import frontend
from replicax._base.errors import UnavailableError
from replicax._parameter_server.closures import Closure, ClosureQueue
from replicax._parameter_server.cluster import Cluster
from replicax._parameter_server.datasets import PerWorkerDistributedIterator
from replicax._parameter_server.planner import Plan, Planner, ScheduledCall
from replicax._parameter_server.remote_value import OVER
from replicax._parameter_server.scheduling import Kinds
from replicax._parameter_server.servers import CutOffError
from replicax._parameter_server.shipping import packed
from replicax._parameter_server.worker import SessionEndedError
from replicax._transport.errors import Unreachable
from replicax._transport.handlers import Answer
from replicax._transport.peer import Peer
from replicax._transport.service import local_service

_SLOTS = 2  # closures that a worker has at a time: one runs, the next is at hand
_PATIENCE = 1.0  # seconds between two looks whether the coordinator was closed meanwhile
MOST_LOST = 10  # workers that may be lost while they run one closure, before it is taken for the cause


class Sent(Protocol):
    """What a worker keeps, under its key."""

    key: str


class SentObject(Sent, Protocol):
    """What a worker makes of an object."""

    @property
    def source(self) -> object: ...


class _Gone(Exception):
    """The worker was lost; there may be a new session already."""


class _Session:
    """One connection to a worker, from its greeting to its end.

    Attributes:
        name: by which the worker knows it.
        platform: the kind of devices that the worker computes on.
        sent: the programs, datasets and the like that it has, by their keys.
        begun: the closures that it has, in the order of their turns.
        lost: whether it has ended.
        last: the closure that it ran then, if any.
    """

    def __init__(self, name: str, platform: str):
        self.name, self.platform = name, platform
        self.sent: dict[str, weakref.ref[object]] = {}
        self.turns = itertools.count()
        self.begun: list[Closure] = []
        self.lost = False
        self.last: list[Closure] = []
        self.taking = threading.Lock()  # held while a closure is taken and gets its turn
        self.sending = threading.RLock()  # held while programs and datasets are sent


_links: weakref.WeakSet[WorkerLink] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Ends all threads before Python does, which would stop them in the middle of compiled code and so crash."""
    for link in list(_links):
        link.end()


class WorkerLink:
    """A worker, as its coordinator sees it.

    Args:
        cluster: the cluster.
        queue: the closures.
        planner: makes programs for elements that were not expected.
        index: the worker's.

    Attributes:
        running: how many closures it has.
    """

    def __init__(self, cluster: Cluster, queue: ClosureQueue, planner: Planner, index: int):
        self.running = 0
        self._cluster, self._queue, self._planner, self._index = cluster, queue, planner, index
        self._peer = Peer(cluster.worker_addresses[index], job=cluster.addresses, task=f"worker {index}")
        self._is_local = local_service(self._peer.address) is not None
        self._session: _Session | None = None
        self._closed = threading.Event()
        self._opening = threading.Lock()
        self._changing = threading.Lock()  # held while it is noted that a session has begun or ended
        self._threads = [
            threading.Thread(target=self._serve, name=f"replicax-worker-{index}", daemon=True) for _ in range(_SLOTS)
        ]
        _links.add(self)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the connection."""
        self._closed.set()
        self._peer.close()

    def end(self) -> None:
        """Hands out nothing any more, and waits for the end of what runs in this process."""
        self._queue.stop()
        self.close()
        for thread in self._threads:
            thread.join()

    def __repr__(self) -> str:
        return f"worker {self._index} at {self._peer.address}"

    # The connection.

    def _open(self) -> _Session | None:
        """Returns the session with the worker, waiting until it is there; None when the coordinator was closed."""
        while not self._queue.stopped:
            with self._opening:
                if self._session is not None and not self._session.lost:
                    return self._session
                try:
                    self._peer.wait_until_ready(_PATIENCE)
                    session = self._begun()
                    with self._changing:
                        self._session = session
                        if not session.lost:
                            self._queue.joined(self)
                            return session
                except (UnavailableError, TimeoutError):
                    pass
                except Exception as error:  # it is there, and refuses
                    self._queue.refuses(self, str(error))
                    self._closed.wait(_PATIENCE)
        return None

    def _begun(self) -> _Session:
        name = uuid.uuid4().hex
        head = {
            "session": name,
            "instead_of": "" if self._session is None else self._session.name,
            "owner": self._cluster.name,
            "index": self._index,
            "servers": self._cluster.server_addresses,
            "job": self._cluster.addresses,
            "imports": [] if frontend.current.module is None else [frontend.current.module],
        }
        answer, _ = self._peer.call("worker.begin", head)
        session = _Session(name, answer["platform"])
        self._peer.watch(lambda error: self._lose(session))
        return session

    def _lose(self, session: _Session) -> None:
        with self._changing:  # else it might be noted when the next session has begun
            if not session.lost:
                session.last, session.lost = session.begun[:1], True
                self._queue.left(self)

    def _call(
        self, session: _Session, method: str, head: Mapping[str, object], arrays: Sequence[object] = ()
    ) -> Answer:
        if session.lost:
            raise _Gone
        try:
            return self._peer.call(f"worker.{method}", {"session": session.name, **head}, arrays)
        except Exception as error:
            if not session.lost and not isinstance(error, (Unreachable, SessionEndedError, CutOffError)):
                raise
            self._lose(session)  # whatever comes of a session that has ended
            raise _Gone from error

    # Closures.

    def _serve(self) -> None:
        """Hands closures to the worker, until the coordinator is closed."""
        while (session := self._open()) is not None:
            self._serve_one(session)

    def _serve_one(self, session: _Session) -> None:
        with contextlib.ExitStack() as stack:
            with session.taking:  # closures begin in the order in which they are taken
                closure = cast("ScheduledCall | None", self._queue.take(self))
                if closure is None:
                    return
                if closure.plan.worker.runs_alone:
                    stack.enter_context(self._queue.alone(closure))
                if session.lost:
                    return self._queue.put_back(closure, self)
                try:
                    begun = self._begin(session, closure)
                except BaseException as error:
                    return self._give_up(session, closure, error)
            try:
                self._run(session, closure, begun)
            except BaseException as error:
                closure.may_have_run |= isinstance(error, _Gone)
                self._give_up(session, closure, error)

    def _give_up(self, session: _Session, closure: Closure, error: BaseException) -> None:
        """Has a closure run again whose worker was lost, or fail."""
        if isinstance(error, _Gone):
            closure.lost += closure in (session.last or [closure])  # others only waited for their turn there
            if closure.lost < MOST_LOST:
                return self._queue.put_back(closure, self)
            error = UnavailableError(
                f"A scheduled function was lost {closure.lost} times, each time with the worker that ran it, at last "
                f"{self!r}. It may be what ends them, for want of memory for one."
            )
        self._queue.failed(closure, self, error)

    def _begin(self, session: _Session, closure: ScheduledCall) -> Mapping[str, object]:
        """Sends what the worker lacks for a closure, and gives it its turn; returns what the worker is told of it."""
        with session.sending:
            iterators = [self._sent_iterator(session, iterator) for iterator in closure.iterators()]
            for value in closure.values:
                self._send_object(session, "value", value)
            self._send_plan(session, closure.plan)
            session.begun.append(closure)
            return {
                "closure": closure.number,
                "failures": closure.failures,
                "may_be_over": closure.may_be_over,
                "iterators": iterators,
                "turn": next(session.turns),
            }

    def _run(self, session: _Session, closure: ScheduledCall, begun: Mapping[str, object]) -> None:
        answer, arrays = self._answer(session, closure, begun)
        if "changed" in answer:
            is_alone = closure.plan.worker.runs_alone
            with contextlib.nullcontext() if is_alone else self._queue.alone(closure):
                while "changed" in answer:  # no other closure changes anything now, but the coordinator's program may
                    answer, arrays = self._answer(session, closure, self._begin(session, closure))
        if "cancelled" in answer:
            return self._queue.left_out(closure, self)
        if "over" in answer:
            return self._queue.ended(closure, self, lambda: OVER)
        count = answer["results"]
        if len(arrays) > count:
            closure.plan.call_back(arrays[count:])
        self._queue.ended(closure, self, functools.partial(closure.plan.result, arrays[:count]))

    def _answer(self, session: _Session, closure: ScheduledCall, head: Mapping[str, object]) -> Answer:
        """Returns what the worker makes of a closure."""
        try:
            while True:
                with self._dropping(session, head):  # arguments may turn out to be such as cannot be sent
                    places, given = closure.arrays()
                    now = {"plan": closure.plan.key, "done": self._cluster.numbers.done, "values": places}
                    answer, arrays = self._call(session, "run", {**head, **now}, given)
                if "undecided" in answer:
                    with self._dropping(session, head):
                        closure.plan.call_back(arrays)
                    done = self._cluster.numbers.done
                    return self._call(session, "decide", {**head, "apply": True, "done": done})
                if "kinds" not in answer:
                    return answer, arrays
                kinds = _kinds(answer["kinds"])  # of the elements that came, for which the worker has no program
                with self._dropping(session, head):
                    closure.plan = self._planner.planned_again(closure, kinds)
                    self._send_plan(session, closure.plan)
        finally:
            session.begun.remove(closure)

    @contextlib.contextmanager
    def _dropping(self, session: _Session, head: Mapping[str, object]) -> Iterator[None]:
        """Returns a context in which an exception ends the turn of a closure, whose worker drops it."""
        try:
            yield
        except _Gone:
            raise
        except BaseException:
            self._call(session, "decide", {**head, "apply": False, "done": 0})
            raise

    # Programs and datasets.

    def _send(
        self,
        session: _Session,
        method: str,
        thing: Sent,
        head: Mapping[str, object],
        arrays: Sequence[object] = (),
    ) -> None:
        """Sends what the worker keeps from then on; it forgets what is no more here."""
        gone = [key for key, known in session.sent.items() if known() is None]
        self._call(session, method, {"key": thing.key, "forget": gone, **head}, arrays)
        session.sent[thing.key] = weakref.ref(thing)
        for key in gone:
            del session.sent[key]

    def _send_plan(self, session: _Session, plan: Plan) -> None:
        with session.sending:
            if plan.key not in session.sent:
                head, arrays = plan.for_worker(session.platform, self._is_local)
                self._send(session, "plan", plan, head, arrays)

    def _send_object(self, session: _Session, method: str, thing: SentObject) -> None:
        """Sends what workers make of a Python object, if the worker does not have it."""
        if thing.key not in session.sent:
            head, arrays = packed(thing.source, self._is_local)
            self._send(session, method, thing, head, arrays)

    def _sent_iterator(self, session: _Session, iterator: PerWorkerDistributedIterator) -> str:
        with session.sending:
            dataset = iterator.dataset
            self._send_object(session, "dataset", dataset)
            if iterator.key not in session.sent:
                self._send(session, "iterator", iterator, {"dataset": dataset.key})
        return iterator.key

    def kinds_of(self, iterator: PerWorkerDistributedIterator) -> Kinds | None:
        """Returns the shapes and dtypes of the worker's next element; None where the worker is lost meanwhile."""
        session = self._session
        if session is None:
            return None
        try:
            key = self._sent_iterator(session, iterator)
            answer, _ = self._call(session, "peek", {"iterator": key})
        except _Gone:
            return None
        return _kinds([answer["kinds"]])[0]


def _kinds(value: Sequence[Sequence[tuple[Sequence[int], str]]]) -> list[Kinds]:
    return [tuple((tuple(shape), dtype) for shape, dtype in element) for element in value]
