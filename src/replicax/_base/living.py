"""The objects of a kind that live, each with the place in the user's code where it was made."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

from replicax._base.tracebacks import Origin, origin

_T = TypeVar("_T")


class Living(Generic[_T]):
    """Objects for as long as they live, in the order in which they were made. They need not be hashable."""

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[int, _T] = weakref.WeakValueDictionary()
        self._origins: dict[int, Origin] = {}
        self._numbers = itertools.count()

    def add(self, made: _T) -> None:
        """Adds an object that is being made."""
        number = next(self._numbers)
        self._objects[number] = made
        self._origins[number] = origin()
        weakref.finalize(made, self._origins.pop, number, None).atexit = False

    def __iter__(self) -> Iterator[tuple[_T, Origin]]:
        for number, living in sorted(self._objects.items()):
            yield living, self._origins[number]
