"""The methods of `Dataset` that take a function of elements."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import numpy as np  # noqa: F401  for the examples

from replicax._base.types import Tree
from replicax._data import worker_processes
from replicax._data.base import Base
from replicax._data.elements import positive
from replicax._data.functions import ElementFunction, MapOptions
from replicax._data.nodes.functions import Filter, IgnoreErrors, Interleave, Map, Scan, TakeWhile
from replicax._data.parallel_map import Threads
from replicax._data.specs import AUTOTUNE

D = TypeVar("D", bound=Base)

# The default number of inputs that `interleave` reads at a time: fixed, so that the order is the same everywhere.
_CYCLE_LENGTH = 8


def map(
    self: D,
    map_func: Callable[..., Tree],
    num_parallel_calls: int | None = None,
    deterministic: bool | None = None,
    synchronous: bool | None = None,
    use_unbounded_threadpool: bool | None = False,
    name: str | None = None,
    *,
    use_processes: bool | None = None,
) -> D:
    """Returns `map_func` of each element. After `batch` it is called once a batch, which is much faster.

    Args:
        map_func: takes an element, a tuple as several arguments, and returns an element.
        num_parallel_calls: in how many threads it is called. AUTOTUNE stands for one a core where that pays: where
            calls wait, or make large arrays, while Python's lock is free; and for one thread else. By default it is
            called in turn, without threads.
        deterministic: False where results of several threads may come in any order.
        synchronous: True for no threads, which is the default here.
        use_unbounded_threadpool: accepted for compatibility.
        use_processes: True where other processes are to call `map_func`, as many as `num_parallel_calls` says: for
            functions that hold Python's lock, such as those of NumPy on small arrays. They get it by value at the
            beginning of each pass, and need cloudpickle; what it changes in them does not come back. The first
            element waits some seconds for them. With None, functions of `tf.data` get those that the environment
            asks for (`replicax docs how-to/tf-data#in-other-processes`); False is for none.

    Raises:
        ValueError: `synchronous` or `use_processes` does not go with `num_parallel_calls`.
        TypeError: at iteration, if `map_func` cannot be sent to another process.
        InvalidArgumentError: `num_parallel_calls` is not positive.

    >>> from replicax.data import Dataset
    >>> list(Dataset.range(3).map(lambda x: x * 2).as_numpy_iterator())[-1].item()
    4
    """
    if synchronous and num_parallel_calls is not None:
        raise ValueError(
            f"`synchronous` is not supported with `num_parallel_calls`, which is {num_parallel_calls}: drop one."
        )
    if use_processes and num_parallel_calls is None:
        raise ValueError("`use_processes` needs `num_parallel_calls`: how many processes, or AUTOTUNE.")
    function = self._functions("map", "map_func", map_func)
    threads = None
    if num_parallel_calls == AUTOTUNE:
        threads = Threads(os.cpu_count() or 1, tries=True)
    elif num_parallel_calls is not None:
        threads = Threads(positive("num_parallel_calls", num_parallel_calls))
    if threads is not None and use_processes is not False:
        _set_processes(function, threads, bool(use_processes))
    options = MapOptions(threads, in_order=deterministic is None or bool(deterministic))
    return self._then(Map(self._node, function, options, self._of_items))


def filter(self: D, predicate: Callable[..., Tree], name: str | None = None) -> D:
    """Returns the elements for which `predicate` is true, a scalar of bool.

    >>> from replicax.data import Dataset
    >>> [int(x) for x in Dataset.range(5).filter(lambda x: x % 2 == 0)]
    [0, 2, 4]
    """
    return self._then(Filter(self._node, self._functions("filter", "predicate", predicate, with_element=True)))


def take_while(self: D, predicate: Callable[..., Tree], name: str | None = None) -> D:
    """Returns the elements up to the first for which `predicate` is false.

    >>> from replicax.data import Dataset
    >>> list(Dataset.range(10).take_while(lambda x: x < 2).as_numpy_iterator())
    [np.int64(0), np.int64(1)]
    """
    function = self._functions("take_while", "predicate", predicate, with_element=True)
    return self._then(TakeWhile(self._node, function))


def scan(
    self: D, initial_state: Tree, scan_func: Callable[[Tree, Tree], tuple[Tree, Tree]], name: str | None = None
) -> D:
    """Returns what `scan_func` makes of each element and a state, which it hands on.

    Args:
        initial_state: an array or a structure of arrays.
        scan_func: takes the state and an element, and returns the next state and an element.

    Raises:
        TypeError: at iteration, if `scan_func` returns no pair, or a state of another structure or dtype.

    >>> from replicax.data import Dataset
    >>> sums = Dataset.range(4).scan(np.int64(0), lambda total, x: (total + x, total + x))
    >>> [int(x) for x in sums]
    [0, 1, 3, 6]
    """
    return self._then(Scan(self._node, initial_state, self._functions("scan", "scan_func", scan_func)))


def flat_map(self: D, map_func: Callable[..., Base], name: str | None = None) -> D:
    """Returns the elements of the datasets that `map_func` makes of each element, one dataset after the other.

    Raises:
        TypeError: at iteration, if `map_func` returns no dataset.

    >>> from replicax.data import Dataset
    >>> [int(x) for x in Dataset.range(3).flat_map(lambda n: Dataset.range(n))]
    [0, 0, 1]
    """
    return self._then(Interleave(self._node, self._functions("flat_map", "map_func", map_func), 1, 1))


def interleave(
    self: D,
    map_func: Callable[..., Base],
    cycle_length: int | None = None,
    block_length: int | None = None,
    num_parallel_calls: int | None = None,
    deterministic: bool | None = None,
    name: str | None = None,
) -> D:
    """Returns the elements of the datasets that `map_func` makes, taken from `cycle_length` of them in turn.

    Args:
        map_func: takes an element, and returns a dataset.
        cycle_length: how many datasets are open at a time; 8 by default, and for AUTOTUNE.
        block_length: how many elements in a row are taken from a dataset; 1 by default.
        num_parallel_calls, deterministic: accepted for compatibility.

    Raises:
        InvalidArgumentError: `cycle_length` or `block_length` is not positive.
        TypeError: at iteration, if `map_func` returns no dataset.

    >>> from replicax.data import Dataset
    >>> tens = Dataset.range(10, 30, 10)
    >>> [int(x) for x in tens.interleave(lambda n: Dataset.range(n, n + 3), cycle_length=2)]
    [10, 20, 11, 21, 12, 22]
    """
    cycle = _CYCLE_LENGTH if cycle_length in (None, AUTOTUNE) else positive("cycle_length", cycle_length)
    block = 1 if block_length is None else positive("block_length", block_length)
    return self._then(Interleave(self._node, self._functions("interleave", "map_func", map_func), cycle, block))


def ignore_errors(self: D, log_warning: bool = False, name: str | None = None) -> D:
    """Returns the elements that come without an exception.

    What fails is left out where it fails: an element of `map`, the rest of a damaged file. What comes after it
    goes on, and `batch` has full batches of the others. A generator has ended, in Python, and elements side by
    side in `zip` are left out together.

    Args:
        log_warning: whether to log each exception.

    >>> from replicax.data import Dataset
    >>> [int(x) for x in Dataset.range(3).map(lambda x: 6 // (int(x) - 1)).ignore_errors()]
    [-6, 6]
    """
    return self._then(IgnoreErrors(self._node, log_warning))


def _set_processes(function: ElementFunction, threads: Threads, asked: bool) -> None:
    """Have other processes call a function, if the caller or the environment asks for it."""
    count = worker_processes.count_in_environment()
    if asked and count != 0:
        tuned = count or worker_processes.autotuned_count()
        function.use_processes(tuned if threads.tries else threads.most, at_once=True)
    elif count and threads.tries and function.is_of_tensors:
        function.use_processes(count, at_once=False)
