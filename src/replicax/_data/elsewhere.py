"""Groups of items that other processes compute, each an element with its number or several together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from replicax._base.types import Tree
from replicax._data.reading import Draws
from replicax._data.worker_processes import Processes


class Item(NamedTuple):
    """An element with its number in the dataset."""

    number: int
    element: Tree


# An item, or what was computed of it, or the exception in its place.
Outcome: TypeAlias = tuple[Any, Exception | None]


def of_group(function: Callable[[Any], Any], group: list[Outcome]) -> list[Outcome]:
    """Return the function of each item of a group."""
    found: list[Outcome] = []
    for item, error in group:
        try:
            found.append((function(item) if error is None else None, error))
        except Exception as failure:
            found.append((None, failure))
    return found


class Elsewhere:
    """A function of groups of items that other processes call.

    Args:
        goes: tells whether they may compute the function of an element.
        processes: the processes.
        draws: the random numbers of the reading.
        here: the function of an item in this process.
    """

    def __init__(
        self, goes: Callable[[Tree], bool], processes: Processes, draws: Draws | None, here: Callable[[Any], Any]
    ):
        self._goes, self._processes, self._draws, self._here = goes, processes, draws, here
        self.count = processes.count

    def are_ready(self) -> bool:
        """Returns whether the processes take calls."""
        return self._processes.are_ready()

    def note(self, seconds: float) -> None:
        """Notes how long calls in this process took the processor."""
        self._processes.note(seconds)

    @property
    def together(self) -> int:
        """How many elements a process takes at a time."""
        return self._processes.together

    def __call__(self, group: list[Outcome]) -> list[Outcome]:
        goes = [error is None and isinstance(item, Item) and self._goes(item.element) for item, error in group]
        elements = [tuple(item) for (item, _), there in zip(group, goes) if there]
        results = self._processes.call(self._draws, elements) if elements else []
        is_lost = results is None  # the elements are computed here, which says nothing about the function
        answers = iter([None] * len(elements) if results is None else results)
        found: list[Outcome] = []
        rows = 0  # of a block, whose elements follow
        for member, there in zip(group, goes):
            if there and rows:
                rows -= 1
                continue
            answer = next(answers) if there else None
            if answer is not None:
                found.append((answer, None))
                rows = (answer[1] or 1) - 1
                continue
            found += of_group(self._here, [member])
            if there and not is_lost and found[-1][1] is None:
                self._processes.give_up("other processes cannot do all that it does")
        return found
