"""Elements made in threads: ahead of their use, as many as a bounded buffer holds, or several at a time for `map`.

Waking a thread takes longer than making a small element. So where elements are at hand, and nobody sees when they are
made, a buffer holds some more than asked for, and its thread makes several of them each time it is woken.

The thread knows the buffer and the source, never the iterator. So an iterator that nobody holds any more is collected,
which stops the thread.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import jax

from replicax._base.host_memory import LARGE, SMALL
from replicax._base.types import Tree

Lock: TypeAlias = contextlib.AbstractContextManager[bool]  # an `RLock`, whose class has no public name
_Future: TypeAlias = concurrent.futures.Future[Tree]
_Item: TypeAlias = tuple[Tree, BaseException | None]  # an element, or the exception in its place


class _Advancing(threading.local):
    """The iterators, by their locks, for which this thread makes an element, and the worker whose iterators they are.

    Workers are those of a cluster with parameter servers, which may all be in this process; None elsewhere.
    """

    def __init__(self) -> None:
        self.locks: tuple[Lock, ...] = ()
        self.worker: int | None = None


advancing = _Advancing()


@contextlib.contextmanager
def on_behalf_of(locks: tuple[Lock, ...]) -> Iterator[None]:
    """Returns a context in which this thread makes elements of the iterators that have these locks."""
    before, advancing.locks = advancing.locks, locks
    try:
        yield
    finally:
        advancing.locks = before


SPARE = 7  # how many more small elements are held, where they are at hand


class Buffer:
    """A bounded queue that a thread fills. Its holder may take from it and stop it; the thread ends by itself.

    Args:
        make: gives the elements; it gets a function that tells whether the buffer was closed.
        size: how many elements are held.
        at_hand: whether a few more may be, while they are small; they are made once no more than `size` are left.
    """

    def __init__(self, make: Callable[[Callable[[], bool]], Iterator[Tree]], size: int, at_hand: bool = False):
        self._make = make
        self._size, self._at_hand = size, at_hand
        self._spare = 0  # how many more than `size` there is room for
        # SimpleQueue is written in C: Python's conditions take several times as long, once for each batch, while the
        # devices may need the core. `stop` may run anywhere, also in a garbage collection during this thread's `put`.
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()  # None: the end
        self._orders: queue.SimpleQueue[int] = queue.SimpleQueue()  # how many elements to make
        self._orders.put(size)
        self._to_make = 0  # of the last order
        self._ordered = size  # how many that are not taken yet
        self._lock = threading.Lock()  # several threads may take
        self._stopped = False  # nothing more will be taken out
        self._locks: tuple[Lock, ...] = ()  # of the iterators for which it makes elements
        self._worker: int | None = None
        self.thread = threading.Thread(target=self._fill, name="replicax-input", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._locks, self._worker = advancing.locks, advancing.worker
        _running.add(self)
        try:
            self.thread.start()
        except BaseException:  # no more threads, or Ctrl-C while it starts: nobody will take from it
            _running.discard(self)
            self.stop()
            raise

    def _fill(self) -> None:
        advancing.locks, advancing.worker = self._locks, self._worker
        elements = None
        try:
            elements = self._make(lambda: self._stopped)
            while self._is_wanted():
                element = next(elements)
                self._spare = SPARE if self._at_hand and is_small(element) else 0
                self._put((element, None))
                del element
        except StopIteration:
            pass
        except BaseException as e:  # whatever it is, it is raised where `next` waits for it
            self._put((None, e))
        finally:
            # A generator ends in its own thread and before the thread does, with whatever it has open.
            del elements
            self._put(None)
            _running.discard(self)

    def _is_wanted(self) -> bool:
        """Waits until one more element is ordered; returns whether anybody wants it."""
        if not self._to_make:
            self._to_make = self._orders.get()
        self._to_make -= 1
        return not self._stopped

    def _put(self, item: _Item | None) -> None:
        self._items.put(item)
        if self._stopped:
            self._clear()

    def take(self) -> Tree:
        """Returns the next element; raises StopIteration at the end, and the source's exception in its place."""
        self._order(taken=1)  # before it is taken: after an interrupt some more may be made, but never less
        item = self._next()
        self._order(taken=0)  # the first element has told whether they are small
        if item is None:
            self._items.put(None)  # for whoever asks again
            raise StopIteration
        element, error = item
        del item
        if error is None:
            return element
        try:
            raise error
        finally:
            del error  # its traceback holds this frame: a cycle, which would keep the iterator

    def _order(self, taken: int) -> None:
        with self._lock:
            self._ordered -= taken
            if self._ordered < self._size + bool(self._spare):
                more = self._size + self._spare - self._ordered
                self._orders.put(more)
                self._ordered += more

    def _next(self) -> _Item | None:
        while True:
            try:
                # With a timeout: an interrupt that comes just before the wait is seen only after it.
                return self._items.get(timeout=0.2)
            except queue.Empty:
                pass

    def stop(self) -> None:
        """Lets the thread end as soon as it has the element at which it is."""
        self._stopped = True
        self._orders.put(0)
        self._clear()

    def _clear(self) -> None:
        """Drops what nobody will take, and ends whoever waits for it."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._items.get_nowait()
        self._items.put(None)

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread to end. One that is about to start, and was stopped, makes nothing: that is no wait."""
        if self.thread is not threading.current_thread():
            with contextlib.suppress(RuntimeError):  # not started yet
                self.thread.join(timeout)


def is_small(element: Tree) -> bool:
    """Returns whether a structure of arrays has at most `SMALL` bytes."""
    return sum(getattr(leaf, "nbytes", math.inf) for leaf in jax.tree.leaves(element)) <= SMALL


# The buffers whose threads run.
_running: set[Buffer] = set()


@atexit.register
def _stop_at_exit() -> None:
    # A daemon thread inside JAX would crash the interpreter as it goes down. One second is for a source that hangs.
    deadline = time.monotonic() + 1
    buffers = list(_running)
    for buffer in buffers:
        buffer.stop()
    for buffer in buffers:
        buffer.join(max(0.0, deadline - time.monotonic()))


class Prefetched(Iterator[Tree]):
    """The elements of `make`, made in a thread that starts when the first is asked for."""

    def __init__(self, make: Callable[[], Iterator[Tree]], size: int):
        self._buffer = Buffer(lambda stopped: make(), size)
        weakref.finalize(self, self._buffer.stop).atexit = False

    def __next__(self) -> Tree:
        if self._buffer.thread.ident is None:
            self._buffer.start()
        return self._buffer.take()


class Threads(NamedTuple):
    """In how many threads a function is called; with `tries`, in one where more are not worth it."""

    most: int
    tries: bool = False


class _Trial:
    """The first calls of a function in one thread: whether calls in several threads are worth it.

    They are where the function waits, for a file or a network, and where it makes large arrays: Python's lock is free
    meanwhile. Calls that do neither would wait for each other, and each waiting costs.
    """

    CALLS = 4

    def __init__(self) -> None:
        self._calls = 0
        self._clock = self._cpu = 0.0
        self._is_large = False

    def called(self, function: Callable[[Tree], Tree], element: Tree) -> Tree:
        """Calls the function."""
        clock, cpu = time.perf_counter(), time.thread_time()
        try:
            result = function(element)
            self._is_large |= sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(result)) >= LARGE
            return result
        finally:
            self._clock += time.perf_counter() - clock
            self._cpu += time.thread_time() - cpu
            self._calls += 1

    @property
    def is_over(self) -> bool:
        """Whether there were as many calls as it takes."""
        return self._calls >= self.CALLS

    @property
    def favors_threads(self) -> bool:
        """Whether several threads are worth it."""
        return self._is_large or self._cpu < 0.5 * self._clock


class ParallelMap(Iterator[Tree]):
    """`function` of each element, called in threads, which end with the iterator.

    Results come in the order of the elements or, where `in_order` is False, as they are computed. An error is raised in
    place of its result, and the iterator goes on after it. How many threads there are changes no result.
    """

    def __init__(self, function: Callable[[Tree], Tree], elements: Iterator[Tree], threads: Threads, in_order: bool):
        self._function, self._elements, self._in_order = function, elements, in_order
        self._most = threads.most
        self._trial = _Trial() if threads.tries and threads.most > 1 else None
        self._calls: collections.deque[_Future] = collections.deque()
        self._ended = False
        self._start(1 if self._trial else threads.most)

    def _start(self, threads: int) -> None:
        self._threads = threads
        self._executor = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="replicax-map")
        # Without waiting: the garbage collector may run in one of these threads.
        self._close = weakref.finalize(self, self._executor.shutdown, wait=False, cancel_futures=True)
        self._close.atexit = False

    def _end_trial(self, trial: _Trial) -> None:
        self._trial = None
        if trial.favors_threads:
            self._close.detach()
            self._executor.shutdown(wait=False)  # calls that wait are still made
            self._start(self._most)

    def __next__(self) -> Tree:
        if self._trial is not None and self._trial.is_over:
            self._end_trial(self._trial)
        while not self._ended and len(self._calls) < 2 * self._threads:
            self._call_next()
        if not self._calls:
            self._close()
            raise StopIteration
        if not self._in_order:
            done = concurrent.futures.wait(self._calls, return_when=concurrent.futures.FIRST_COMPLETED).done
            first = next(call for call in self._calls if call in done)
            self._calls.remove(first)
            self._calls.appendleft(first)
        return self._calls.popleft().result()

    def _called(self, locks: tuple[Lock, ...], worker: int | None, element: Tree) -> Tree:
        advancing.worker = worker
        trial = self._trial
        with on_behalf_of(locks):
            return self._function(element) if trial is None else trial.called(self._function, element)

    def _call_next(self) -> None:
        try:
            element = next(self._elements)
            self._calls.append(self._executor.submit(self._called, advancing.locks, advancing.worker, element))
        except StopIteration:
            self._ended = True
        except Exception as e:  # raised in its place in the order
            failed: _Future = concurrent.futures.Future()
            failed.set_exception(e)
            self._calls.append(failed)
