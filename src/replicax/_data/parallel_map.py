"""Functions of elements called side by side for `map`: in threads or in other processes, where that is best."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax

from replicax._base import thread_state
from replicax._base.host_memory import LARGE
from replicax._base.types import Tree
from replicax._data.elsewhere import Elsewhere, Item, Outcome, of_group

_Future: TypeAlias = concurrent.futures.Future[Tree]


_R = TypeVar("_R")


class Threads(NamedTuple):
    """In how many threads a function is called; with `tries`, in one where more are not worth it."""

    most: int
    tries: bool = False


class _Trial:
    """What the first calls of a function tell: whether calls in several threads are worth it.

    They are where the function waits, for a file or a network, and where it makes large arrays: Python's lock is free
    meanwhile. Calls that do neither would wait for each other, and each waiting costs.

    Other processes are for functions that do not wait.
    """

    CALLS = 4

    def __init__(self, elsewhere: Elsewhere | None) -> None:
        self._elsewhere = elsewhere
        self._calls = 0
        self._clock = self._cpu = 0.0
        self._is_large = False
        self.favors_threads = False

    def called(self, function: Callable[[Tree], Tree], element: Tree) -> Tree:
        """Calls the function."""
        clock, cpu = time.perf_counter(), time.thread_time()
        try:
            result = function(element)
            if self._calls < self.CALLS:
                self._is_large |= sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(result)) >= LARGE
            return result
        finally:
            self._note(time.perf_counter() - clock, time.thread_time() - cpu)

    def _note(self, clock: float, cpu: float) -> None:
        if self._calls < self.CALLS:  # in one thread: later ones may have waited for each other
            self._clock += clock
            self._cpu += cpu
            self._calls += 1
            if self._calls == self.CALLS:
                waits = self._cpu < 0.5 * self._clock
                self.favors_threads = waits or self._is_large
                if waits:
                    self._elsewhere = None
        if self._elsewhere is not None:
            self._elsewhere.note(cpu)


class ParallelMap(Iterator[Tree]):
    """`function` of each element, called in threads, which end with the iterator.

    Results come in the order of the elements or, where `in_order` is False, as they are computed. An error is raised in
    place of its result, and the iterator goes on after it. Where the calls are made changes no result.

    Args:
        function: the function.
        elements: the elements.
        threads: in how many threads it is called.
        in_order: whether the results come in order.
        elsewhere: the function in other processes, where there may be some.
    """

    def __init__(
        self,
        function: Callable[[Tree], Tree],
        elements: Iterator[Tree],
        threads: Threads,
        in_order: bool,
        elsewhere: Elsewhere | None = None,
    ):
        self._function, self._elements, self._in_order = function, elements, in_order
        self._most = threads.most
        self._trial = _Trial(elsewhere) if threads.tries else None
        self._elsewhere = elsewhere
        self._calls: collections.deque[_Future] = collections.deque()
        self._ended = False
        self._threads = 0
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._close: Any = None
        if not threads.tries:
            self._start(threads.most)

    def _start(self, threads: int) -> None:
        """Makes calls in so many threads from now on."""
        if self._executor is not None:
            self._close.detach()
            self._executor.shutdown(wait=False)  # calls that wait are still made
        self._threads = threads
        self._executor = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="replicax-map")
        # Without waiting: the garbage collector may run in one of these threads.
        self._close = weakref.finalize(self, self._executor.shutdown, wait=False, cancel_futures=True)
        self._close.atexit = False

    def _choose(self) -> None:
        """Goes to other processes, or to several threads, once that is best."""
        if self._elsewhere is not None and self._elsewhere.are_ready():
            self._function, self._trial = self._elsewhere, None
            self._start(self._elsewhere.count)
            self._elsewhere = None
        elif self._trial is not None and self._trial.favors_threads and self._threads < self._most:
            self._start(self._most)
        elif not self._threads and not thread_state.current.reads_ahead:
            self._start(1)  # which computes while the caller does something else

    def __next__(self) -> Tree:
        if not self._ended:
            self._choose()
        if self._executor is None:  # this thread does nothing else
            return self._called(next(self._elements))
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

    def _called(self, element: Tree) -> Tree:
        trial = self._trial
        return self._function(element) if trial is None else trial.called(self._function, element)

    def _call_next(self) -> None:
        assert self._executor is not None
        try:
            element = next(self._elements)
            inherited = thread_state.inherit(outlives=True)
            self._calls.append(self._executor.submit(inherited.run, self._called, element))
        except StopIteration:
            self._ended = True
        except Exception as e:  # raised in its place in the order
            failed: _Future = concurrent.futures.Future()
            failed.set_exception(e)
            self._calls.append(failed)


def in_threads(
    function: Callable[[Any], _R],
    items: Iterator[Any],
    threads: Threads,
    in_order: bool,
    together: int,
    elsewhere: Elsewhere | None,
) -> Iterator[_R]:
    """Returns the function of each item, called in threads.

    To hand an item to a thread takes longer than many functions of single elements. So a thread takes up to `together`
    at a time; not at the beginning, since the threads are to share few items too. An exception in place of an item, or
    of its result, comes up in that place.
    """

    def size(taken: int) -> int:
        most = together if elsewhere is None else max(together, elsewhere.together)
        return min(most, 1 + taken // (8 * threads.most))

    group_function = functools.partial(of_group, function)
    return _Each(ParallelMap(group_function, _groups(items, size), threads, in_order, elsewhere))


def _groups(items: Iterator[Any], size: Callable[[int], int]) -> Iterator[list[Outcome]]:
    taken, ended = 0, False
    while not ended:
        most = size(taken)
        group: list[Outcome] = []
        while len(group) < most:
            try:
                group.append((next(items), None))
            except StopIteration:
                ended = True
                break
            except Exception as error:
                group.append((None, error))
                break
            if not isinstance(group[-1][0], Item):  # several elements
                break
        taken += len(group)
        if group:
            yield group


class _Each(Iterator[Any]):
    """The results of groups one by one."""

    def __init__(self, groups: Iterator[list[Outcome]]):
        self._groups = groups
        self._ahead: Iterator[Outcome] = iter(())

    def __next__(self) -> Any:
        while (found := next(self._ahead, None)) is None:
            self._ahead = iter(next(self._groups))
        result, error = found
        if error is not None:
            try:
                raise error
            finally:
                del error, found  # its traceback holds this frame: a cycle, which would keep the iterator
        return result
