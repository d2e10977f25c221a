"""Skipping of the elements that a restored iterator has behind it, without making them.

While elements are skipped, nodes hand on *recipes*: functions without arguments, each of which makes one element.
Nodes that order elements (`shuffle`, `repeat`, `interleave`) treat recipes like elements. The recipes of skipped
elements are dropped. Those that are left in the buffer of a `shuffle` are called when they come out.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Generic, TypeAlias, TypeVar

from replicax._base import doc_pages, tracebacks
from replicax._base.types import Tree

# The number of elements from which on a message says what makes them all again.
MANY = 10_000

_T = TypeVar("_T")

Recipe: TypeAlias = Callable[[], Tree]


def ready(element: Tree) -> Recipe:
    """Return the recipe of an element that is made already."""
    return functools.partial(_element, element)


def _element(element: Tree) -> Tree:
    return element


class Skip:
    """The skipping of the first `count` elements of a reading; `on` says whether it goes on."""

    def __init__(self, count: int):
        self.on, self.count = True, count

    def over(self, recipes: Iterator[Recipe]) -> Iterator[Tree]:
        """Return the elements after the skipped ones.

        An exception in place of a recipe comes up, and does not end the iterator.
        """
        left = self.count

        def skipped() -> Iterator[Recipe]:
            nonlocal left
            for _ in recipes:
                left -= 1
                if not left:
                    return
            left = 0
            yield from ()

        def parts() -> Iterator[Iterator[Recipe]]:
            while left:
                yield skipped()  # one more after each exception
            self.on = False
            yield recipes

        return map(operator.call, itertools.chain.from_iterable(parts()))


class Deferred(Iterator[Recipe], Generic[_T]):
    """Recipes of a node, made of what its input gives. Once the skip is over, `rest` makes the elements.

    An exception in place of a recipe does not end the iterator.

    Args:
        skip: the skipping.
        inputs: what the input gives, such as recipes.
        defer: makes a recipe of it.
        rest: makes the elements after the skipped ones of the rest of `inputs`.
    """

    def __init__(
        self,
        skip: Skip,
        inputs: Iterator[_T],
        defer: Callable[[_T], Recipe],
        rest: Callable[[Iterator[_T]], Iterator[Tree]],
    ):
        self._skip, self._inputs, self._defer, self._rest = skip, inputs, defer, rest
        self._elements: Iterator[Tree] | None = None

    def __next__(self) -> Recipe:
        if self._skip.on:
            return self._defer(next(self._inputs))
        if self._elements is None:
            self._elements = self._rest(self._inputs)
        return ready(next(self._elements))


def warn_of_making(count: int, what: str) -> None:
    """Warn that `count` elements are made once more, because `what` cannot leave them out."""
    if count >= MANY:
        tracebacks.warn(
            f"An iterator goes on after its element {count:,}. To come there, the elements before are made once more, "
            f"since {what} cannot leave them out. See {doc_pages.page('how-to/exact-resume')} for sources that can."
        )
