"""Elements made in a thread ahead of their use, as many as a bounded buffer holds.

Waking a thread takes longer than making a small element. So where elements are at hand, and nobody sees when they are
made, a buffer holds some more than asked for, and its thread makes several of them each time it is woken.

The thread knows the buffer and the source, never the iterator. So an iterator that nobody holds any more is collected,
which stops the thread.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax

from replicax._base import thread_state
from replicax._base.host_memory import SMALL
from replicax._base.types import Tree

Lock: TypeAlias = contextlib.AbstractContextManager[bool]  # an `RLock`, whose class has no public name
_Item: TypeAlias = tuple[Tree, BaseException | None]  # an element, or the exception in its place


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
        self._inherited: thread_state.inherit
        self.thread = threading.Thread(
            target=lambda: self._inherited.run(self._fill), name="replicax-input", daemon=True
        )

    def start(self) -> None:
        """Starts the thread."""
        self._inherited = thread_state.inherit(outlives=True)
        _running.add(self)
        try:
            self.thread.start()
        except BaseException:  # no more threads, or Ctrl-C while it starts: nobody will take from it
            _running.discard(self)
            self.stop()
            raise

    def _fill(self) -> None:
        thread_state.current.reads_ahead = True
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
