"""Part of `Dataset`: functions of elements."""

from __future__ import annotations

import itertools
import logging
import operator
import os
from collections.abc import Callable, Iterator
from typing import Self, TypeVar

import jax
import numpy as np

from replicax._base.errors import InvalidArgumentError
from replicax._base.specs import TensorSpec
from replicax._base.types import Tree
from replicax._data import worker_processes
from replicax._data.base import Base
from replicax._data.calls import as_bool, as_tensors, call_user, fold
from replicax._data.composite_rows import RaggedRow, RaggedRowSpec, filled
from replicax._data.elements import Probe, host_structure, positive, tensors_of
from replicax._data.functions import ElementFunction, mapped
from replicax._data.parallel_map import Threads
from replicax._data.ragged import RaggedTensor
from replicax._data.reading import Maker, Reading, hands_on, replayed, skipped
from replicax._data.skipping import made
from replicax._data.specs import (
    AUTOTUNE,
    UNKNOWN_CARDINALITY,
    DatasetSpec,
    common_spec,
    first_spec,
    host_spec,
    same_kinds,
)

# The default number of inputs that `interleave` reads at a time: fixed, so that the order is the same everywhere.
_CYCLE_LENGTH = 8

_R = TypeVar("_R")


class Functions(Base):
    """Methods of `Dataset`."""

    def map(
        self,
        map_func: Callable[..., Tree],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        synchronous: bool | None = None,
        use_unbounded_threadpool: bool | None = False,
        name: str | None = None,
        *,
        use_processes: bool | None = None,
    ) -> Self:
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
        function = self._functions("`map_func` of `Dataset.map`", map_func)
        threads = None
        if num_parallel_calls == AUTOTUNE:
            threads = Threads(os.cpu_count() or 1, tries=True)
        elif num_parallel_calls is not None:
            threads = Threads(positive("num_parallel_calls", num_parallel_calls))
        if threads is not None and use_processes is not False:
            _set_processes(function, threads, bool(use_processes))
        in_order = deterministic is None or bool(deterministic)
        # A generator may wait for what happens in the program: it is asked for no more than one element ahead.
        ahead = threads is not None or not self._unsure

        @hands_on
        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            return mapped(function, reading, self._make(reading, start), start, threads, in_order, ahead)

        def find(probe: bool) -> Tree:
            return _result_spec(function, self._spec(True), make) if probe else None

        nodes = [] if function.node is None else [function.node]
        return self._derived(make, self._cardinality, find=find, nodes=nodes)

    def filter(self, predicate: Callable[..., Tree], name: str | None = None) -> Self:
        """Returns the elements for which `predicate` is true, a scalar of bool.

        >>> from replicax.data import Dataset
        >>> [int(x) for x in Dataset.range(5).filter(lambda x: x % 2 == 0)]
        [0, 2, 4]
        """
        return self._selected(filter, "filter", predicate)

    def take_while(self, predicate: Callable[..., Tree], name: str | None = None) -> Self:
        """Returns the elements up to the first for which `predicate` is false.

        >>> from replicax.data import Dataset
        >>> list(Dataset.range(10).take_while(lambda x: x < 2).as_numpy_iterator())
        [np.int64(0), np.int64(1)]
        """
        return self._selected(itertools.takewhile, "take_while", predicate)

    def _selected(
        self,
        select: Callable[[Callable[[tuple[Tree, np.ndarray]], bool], Iterator[Tree]], Iterator[Tree]],
        method: str,
        predicate: Callable[..., Tree],
    ) -> Self:
        function = self._functions(f"`predicate` of `Dataset.{method}`", predicate, with_element=True)
        ahead = not self._unsure

        @replayed
        def make(reading: Reading) -> Iterator[Tree]:
            pairs = mapped(function, reading, self._make(reading), 0, None, True, ahead)
            chosen = select(lambda pair: as_bool(np.asarray(pair[1])), pairs)
            return map(operator.itemgetter(0), chosen)

        nodes = [] if function.node is None else [function.node]
        return self._derived(make, UNKNOWN_CARDINALITY, batch_size=self._batch_size, nodes=nodes)

    def scan(
        self, initial_state: Tree, scan_func: Callable[[Tree, Tree], tuple[Tree, Tree]], name: str | None = None
    ) -> Self:
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
        first = as_tensors(initial_state)
        function = self._functions("`scan_func` of `Dataset.scan`", scan_func)

        @replayed
        def make(reading: Reading) -> Iterator[Tree]:
            state = first

            def step(element: Tree) -> Tree:
                nonlocal state
                found = function.called((state, element))
                if not isinstance(found, tuple | list) or len(found) != 2:
                    raise TypeError(
                        "`scan_func` should return a pair consisting of the new state and the output value, but it "
                        f"returned a {type(found).__name__}: {found!r:.80}"
                    )
                state = as_tensors(found[0])
                _check_state(first, state)
                return host_structure(found[1])

            return map(step, self._make(reading))

        return self._probed(make, first_spec, self._cardinality)

    def flat_map(self, map_func: Callable[..., Base], name: str | None = None) -> Self:
        """Returns the elements of the datasets that `map_func` makes of each element, one dataset after the other.

        Raises:
            TypeError: at iteration, if `map_func` returns no dataset.

        >>> from replicax.data import Dataset
        >>> [int(x) for x in Dataset.range(3).flat_map(lambda n: Dataset.range(n))]
        [0, 0, 1]
        """
        return self._interleaved("flat_map", map_func, 1, 1)

    def interleave(
        self,
        map_func: Callable[..., Base],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Self:
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
        return self._interleaved("interleave", map_func, cycle, block)

    def _interleaved(self, method: str, map_func: Callable[..., Base], cycle: int, block: int) -> Self:
        function = self._functions(f"`map_func` of `Dataset.{method}`", map_func)

        @skipped
        def make(reading: Reading) -> Iterator[Tree]:
            def opened(element: Tree) -> Iterator[Tree]:
                # Where the inputs were divided among workers already, all files of this dataset belong to this worker.
                part = reading.child((1, 0) if self._files else reading.share)
                dataset: Base = returned_dataset("map_func", function.called(made(element)))
                return dataset._make(part)

            inputs = reading.guarded(map(opened, self._make(reading)))
            slots = [next(inputs, None) for _ in range(cycle)]
            while any(slot is not None for slot in slots):
                for i, slot in enumerate(slots):
                    if slot is None:
                        continue
                    taken = 0
                    for element in itertools.islice(slot, block):
                        taken += 1
                        yield element
                    if taken < block:
                        slots[i] = next(inputs, None)

        return self._probed(make, first_spec, UNKNOWN_CARDINALITY)

    def reduce(self, initial_state: Tree, reduce_func: Callable[[Tree, Tree], Tree], name: str | None = None) -> Tree:
        """Returns the last of the states that `state = reduce_func(state, element)` goes through.

        >>> from replicax.data import Dataset
        >>> int(Dataset.range(4).reduce(np.int32(0), lambda total, x: total + x))
        6
        """
        return fold(self, initial_state, reduce_func)

    def apply(self, transformation_func: Callable[[Self], Self]) -> Self:
        """Returns `transformation_func` of this dataset.

        Raises:
            TypeError: `transformation_func` returns no dataset.

        >>> from replicax.data import Dataset
        >>> [int(x) for x in Dataset.range(5).apply(lambda dataset: dataset.skip(1).take(2))]
        [1, 2]
        """
        role, dataset = "`transformation_func` of `Dataset.apply`", self._with(self._options)
        return returned_dataset("transformation_func", call_user(role, transformation_func, dataset))

    def get_single_element(self, name: str | None = None) -> Tree:
        """Returns the only element.

        Raises:
            InvalidArgumentError: there is none, or more than one.

        >>> from replicax.data import Dataset
        >>> int(Dataset.range(5).reduce(np.int64(0), lambda s, x: s + x)), int(Dataset.range(1).get_single_element())
        (10, 0)
        """
        elements = list(itertools.islice(self._make(Reading(self._nodes)), 2))
        if len(elements) != 1:
            raise InvalidArgumentError(f"Dataset {'had more than one element' if elements else 'was empty'}.")
        return tensors_of(elements[0])

    def ignore_errors(self, log_warning: bool = False, name: str | None = None) -> Self:
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

        def note(error: Exception) -> None:
            if log_warning:
                logging.getLogger("replicax").warning("Left out an element of a dataset: %r", error)

        @replayed
        def make(reading: Reading) -> Iterator[Tree]:
            return self._make(reading.with_errors(note))

        def find(probe: bool) -> Tree:
            try:
                return self._spec(probe)
            except Exception:  # such as the first element's, of which the spec is told
                return first_spec(make)

        return self._derived(make, UNKNOWN_CARDINALITY, find=find, batch_size=self._batch_size)


def _set_processes(function: ElementFunction, threads: Threads, asked: bool) -> None:
    """Has other processes call a function, where the caller or the environment asks for it."""
    count = worker_processes.count_in_environment()
    if asked and count != 0:
        tuned = count or worker_processes.autotuned_count()
        function.use_processes(tuned if threads.tries else threads.most, at_once=True)
    elif count and threads.tries and function.is_of_tensors:
        function.use_processes(count, at_once=False)


def returned_dataset(name: str, value: _R) -> _R:
    """Returns the dataset that the function `name` returned; raises TypeError for anything else."""
    if not isinstance(value, Base):
        raise TypeError(f"`{name}` must return a Dataset here, got {type(value).__name__}. Use `map` for elements.")
    return value


def _check_state(first: Tree, state: Tree) -> None:
    expected, found = host_spec(first), host_spec(state)
    if not same_kinds(expected, found):
        raise TypeError(
            "`scan_func` must return a state of the initial one's structure and dtypes. Expected "
            f"{expected}, got {found}."
        )


def _result_spec(function: ElementFunction, spec: Tree, make: Maker) -> Tree:
    """Returns the spec of a function's results, from those for zeros and for ones.

    A dimension is unknown if it changes with that or with one that is unknown.
    """
    unknown = any(isinstance(s, DatasetSpec) or not s.shape.is_fully_defined() for s in jax.tree.leaves(spec))
    try:
        return common_spec(*[function.spec_of(_filled(spec, *how)) for how in ((2, 0), (3 if unknown else 2, 1))])
    except Exception:  # the function was not meant for such elements: see what it returns for the first one
        return first_spec(make)


def _filled(spec: Tree, size: int, value: int) -> Tree:
    """Returns an element of `spec` made of this number, with `size` for dimensions that are not known."""

    def full(s: TensorSpec | DatasetSpec | RaggedTensor) -> Tree:
        if isinstance(s, DatasetSpec):
            return Base._of_list([_filled(s.element_spec, size, value)] * size, s.element_spec)
        if isinstance(s, RaggedTensor):
            splits = s.row_splits.shape[0]
            return filled(s, size if splits is None else splits - 1, value)
        if isinstance(s, RaggedRowSpec):
            return filled(s, value, value).view(RaggedRow)
        shape = [size if d is None else d for d in s.shape.as_list()]
        out = np.empty(shape, s.dtype)
        out.fill(Probe.of_size(value) if s.dtype == np.dtype(object) else value)
        return out

    return jax.tree.map(full, spec, is_leaf=lambda s: isinstance(s, RaggedTensor))
