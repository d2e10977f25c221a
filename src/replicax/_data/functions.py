"""Functions of elements, as `Dataset.map` applies them: here, in threads or in other processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from replicax._base.host_memory import Pool
from replicax._base.types import Tree
from replicax._data.blocks import Blocks, row
from replicax._data.calls import call_name, call_on_element, explain, on_host
from replicax._data.elements import cut
from replicax._data.elsewhere import Elsewhere, Item
from replicax._data.parallel_map import Threads, in_threads
from replicax._data.reading import Draws, Memory, Reading
from replicax._data.skipping import Deferred, Recipe, Skip
from replicax._data.specs import host_spec
from replicax._data.worker_processes import Processes, job_of, nothing

# The results of a function: one with None, or several as a block with their number.
Results: TypeAlias = Iterator[tuple[Tree, int | None]]


class ElementFunction:
    """A user's function of elements, which runs in Python.

    Args:
        method: the method of `Dataset` that takes the function.
        argument: the name of its argument.
        function: the function.
        with_element: whether the result is a pair of the element and what the function returns.
    """

    together = 1  # how many single elements a thread takes at a time
    memories: tuple[Memory, ...] = ()  # what the function needs of the dataset's state
    is_of_tensors = False  # whether it computes with tensors, so that the environment may have other processes call it
    processes: Processes | None = None  # those that may call it

    def __init__(self, method: str, argument: str, function: Callable[..., Tree], with_element: bool = False):
        self._arguments = method, argument, function, with_element
        self.role = f"`{argument}` of `Dataset.{method}`"  # for errors, see `calls.call_user`
        self.name = call_name(method, function)  # of the node
        self.function, self.with_element = function, with_element
        self.pool = Pool()  # has memory for elements

    def use_processes(self, count: int, at_once: bool) -> None:
        """Has other processes call the function, as many as `count`; `at_once` as in `Processes`."""
        own = type(self), *self._arguments
        self.processes = Processes(self.role, functools.partial(job_of, own, self.preparation()), count, at_once)

    def preparation(self) -> Callable[[], object]:
        """Returns what a process calls before it gets the function."""
        return nothing

    def called(self, element: Tree) -> Tree:
        """Returns what the function returns for an element, such as a dataset."""
        return call_on_element(self.role, self.function, element, self.pool)

    def call(self, element: Tree) -> Tree:
        """Return what `called` returns; an exception names the function's node."""
        try:
            return self.called(element)
        except Exception as error:
            explain(error, self.name)
            raise

    def __call__(self, element: Tree, number: int = 0, draws: Draws | None = None) -> Tree:
        """Returns the function of one element, on the host; `number` is the element's in the dataset."""
        result = on_host(self.called(element))
        return (element, result) if self.with_element else result

    def draws(self, reading: Reading) -> Draws | None:
        """Returns what the calls of a reading need for their random numbers."""
        return None

    def spec_of(self, element: Tree) -> Tree:
        """Returns the spec of the function of an element."""
        return host_spec(self(element))

    def of_one(self, element: Tree, number: int, draws: Draws | None) -> Tree:
        """Return the function of one element; an exception names the element."""
        try:
            return self(element, number, draws)
        except Exception as error:
            explain(error, self.name, number)
            raise

    def results(self, elements: Iterator[Tree], start: int, draws: Draws | None, options: MapOptions) -> Results:
        """Return the function of each element; `start` is the number of the first of them."""

        def compute(item: Item) -> tuple[Tree, None]:
            return self.of_one(item.element, item.number, draws), None

        return self.compute_each(compute, Numbered(elements, start), draws, options)

    def compute_each(
        self,
        compute: Callable[[Any], tuple[Tree, int | None]],
        items: Iterator[Any],
        draws: Draws | None,
        options: MapOptions,
    ) -> Results:
        """Return `compute` of each item, called in threads or processes if they are asked for."""
        if options.threads is None:
            return map(compute, items)
        elsewhere = None
        if self.processes is not None:
            self.processes.begin()
            elsewhere = Elsewhere(self.may_go_elsewhere, self.processes, draws, compute)
        return in_threads(compute, items, options.threads, options.in_order, self.together, elsewhere)

    def may_go_elsewhere(self, element: Tree) -> bool:
        """Return whether other processes may compute the function of an element."""
        return True


class MapOptions(NamedTuple):
    """How a function is applied to elements.

    Attributes:
        threads: in which threads it is called; None for calls in turn.
        in_order: whether the results come in the order of the elements.
        ahead: whether elements may be taken before their results are asked for.
    """

    threads: Threads | None = None
    in_order: bool = True
    ahead: bool = True


def map_elements(
    function: ElementFunction, reading: Reading, elements: Iterator[Tree], start: int, options: MapOptions
) -> Iterator[Tree]:
    """Return the function of each element; `start` is the number of the first of them."""
    if reading.probing:
        return map(function, elements)
    return MappedElements(function.results(elements, start, function.draws(reading), options))


def map_recipes(
    function: ElementFunction, reading: Reading, skip: Skip, recipes: Iterator[Recipe], options: MapOptions
) -> Iterator[Recipe]:
    """Return recipes for the function of each element, given recipes for the elements."""
    draws, items = function.draws(reading), Numbered(recipes, 0)

    def defer(item: Item) -> Recipe:
        return lambda: function.of_one(item.element(), item.number, draws)

    def rest(inputs: Iterator[Item]) -> Iterator[Tree]:
        elements = map(_make, inputs)
        return MappedElements(function.results(elements, items.count, draws, options))

    return Deferred(skip, items, defer, rest)


def _make(item: Item) -> Tree:
    return item.element()


class Numbered(Iterator[Item]):
    """Elements with their numbers from `count` on; an exception in place of an element counts too."""

    def __init__(self, elements: Iterator[Tree], count: int):
        self._elements, self.count = elements, count

    def __next__(self) -> Item:
        self.count += 1
        return Item(self.count - 1, next(self._elements))


class MappedElements(Blocks):
    """The results of a function, one by one or as blocks."""

    def __init__(self, results: Results):
        self._results = results
        self._block: Tree = None  # results that were computed and not taken yet
        self._at = self._count = 0

    def __next__(self) -> Tree:
        found, count = self.next_block(1)
        return found if count is None else row(found, 0)

    def next_block(self, most: int) -> tuple[Tree, int | None]:
        if self._at == self._count:
            found, count = next(self._results)
            if count is None:
                return found, None
            self._block, self._at, self._count = found, 0, count
        begin, self._at = self._at, min(self._at + most, self._count)
        return cut(self._block, begin, self._at), self._at - begin
