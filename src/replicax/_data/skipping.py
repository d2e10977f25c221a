"""Skipping of elements that a restored iterator has behind it: those that nobody looks at are not made.

While a reading skips, its sources and functions give a `Later` in place of each element: how to make it. What orders
elements (`shuffle`, `repeat`, `interleave`) hands these on like elements. Skipped ones are dropped; those that are left
in the buffers of `shuffle` are made when they come out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from replicax._base import doc_pages, tracebacks
from replicax._base.types import Tree

# The number of elements from which on a message says what makes them all again.
MANY = 10_000


class Later(functools.partial[Tree]):
    """An element that is not made yet: calling it makes it."""


def made(element: Tree) -> Tree:
    """Returns an element, which is made here if it was to be made later."""
    return element() if type(element) is Later else element


def applied(function: Callable[[Tree], Tree], element: Tree) -> Tree:
    """Returns the function of an element that may have to be made."""
    return function(made(element))


def all_made(elements: Iterable[Tree]) -> list[Tree]:
    """Returns elements, of which some may have to be made."""
    return [made(element) for element in elements]


class Skip:
    """The skipping of the first `count` elements of a reading: whether it goes on."""

    def __init__(self, count: int):
        self.on, self.count = True, count

    def over(self, elements: Iterator[Tree]) -> Iterator[Tree]:
        """Returns those of the elements, made while `on`, that come after the skipped ones; made now.

        An exception in place of an element comes up, and does not end it.
        """
        left = self.count

        def skipped() -> Iterator[Tree]:
            nonlocal left
            for _ in elements:
                left -= 1
                if not left:
                    return
            left = 0
            yield from ()

        def parts() -> Iterator[Iterator[Tree]]:
            while left:
                yield skipped()  # one more after each exception
            self.on = False
            yield elements

        return map(made, itertools.chain.from_iterable(parts()))


def warn_of_making(count: int, what: str) -> None:
    """Says that `count` elements are made once more, because `what` cannot leave them out."""
    if count >= MANY:
        tracebacks.warn(
            f"An iterator goes on after its element {count:,}. To come there, the elements before are made once more, "
            f"since {what} cannot leave them out. See {doc_pages.page('how-to/exact-resume')} for sources that can."
        )


def deferred(
    skip: Skip,
    function: Callable[[Any], Tree] | None,
    elements: Iterator[Any],
    rest: Callable[[Iterator[Any]], Iterator[Tree]],
) -> Iterator[Tree]:
    """Returns each element as a `Later` while elements are skipped, and then those of `rest`.

    An exception in place of an element does not end it.

    Args:
        skip: says whether they are skipped.
        function: makes an element of one of `elements`; None where these are the elements.
        elements: what the elements are made of.
        rest: gives the elements after the skipped ones, made of what is left of `elements`.
    """
    ended = False

    def later() -> Iterator[Tree]:
        nonlocal ended
        for element in elements:
            yield element if function is None else Later(applied, function, element)
            if not skip.on:
                return
        ended = True

    def parts() -> Iterator[Iterator[Tree]]:
        while skip.on and not ended:
            yield later()  # one more after each exception
        yield rest(map(made, elements))

    return itertools.chain.from_iterable(parts())


def applied_to_each(skip: Skip | None, function: Callable[[Any], Tree], elements: Iterator[Any]) -> Iterator[Tree]:
    """Returns the function of each element, called later for those that are skipped."""
    if skip is None:
        return map(function, elements)
    return deferred(skip, function, elements, functools.partial(map, function))
