"""A function of elements, called in several threads."""

from __future__ import annotations

import collections
import concurrent.futures
import weakref
from collections.abc import Callable, Iterator

from replicax._base.types import Tree
from replicax._data.prefetch import Lock, advancing, on_behalf_of

_Future = concurrent.futures.Future[Tree]


class ParallelMap(Iterator[Tree]):
    """`function` of each element, called in `threads` threads, which end with the iterator.

    Results come in the order of the elements or, where `in_order` is False, as they are computed. An error is raised in
    place of its result, and the iterator goes on after it.
    """

    def __init__(self, function: Callable[[Tree], Tree], elements: Iterator[Tree], threads: int, in_order: bool):
        self._function, self._elements, self._threads, self._in_order = function, elements, threads, in_order
        self._executor = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="replicax-map")
        # Without waiting: the garbage collector may run in one of these threads.
        self._close = weakref.finalize(self, self._executor.shutdown, wait=False, cancel_futures=True)
        self._close.atexit = False
        self._calls: collections.deque[_Future] = collections.deque()
        self._ended = False

    def __next__(self) -> Tree:
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

    def _called(self, locks: tuple[Lock, ...], element: Tree) -> Tree:
        with on_behalf_of(locks):
            return self._function(element)

    def _call_next(self) -> None:
        try:
            self._calls.append(self._executor.submit(self._called, advancing.locks, next(self._elements)))
        except StopIteration:
            self._ended = True
        except Exception as e:  # raised in its place in the order
            failed: _Future = concurrent.futures.Future()
            failed.set_exception(e)
            self._calls.append(failed)
