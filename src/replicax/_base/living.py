"""The objects of a kind that live, each with the place in the user's code where it was made."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

from replicax._base.tracebacks import Origin, origin

_T = TypeVar("_T")


class Living(Generic[_T]):
    """Objects for as long as they live, in the order in which they were made. They need not be hashable.

    Threads add objects while others go through them. There is no lock, which a finalizer that makes an object, or a
    forked child, would find held: an entry is complete when it is added, and a copy of the entries is gone through.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[_T], Origin]] = {}
        self._numbers = itertools.count()

    def add(self, made: _T) -> None:
        """Adds an object, once it is made."""
        number, entries = next(self._numbers), self._entries
        entries[number] = weakref.ref(made, lambda _: entries.pop(number, None)), origin()

    def __iter__(self) -> Iterator[tuple[_T, Origin]]:
        for reference, place in self._entries.copy().values():
            if (living := reference()) is not None:
                yield living, place
