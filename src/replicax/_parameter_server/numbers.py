"""The numbers of updates, by which parameter servers know which they have applied."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator


class Numbers:
    """Numbers that are given out in order, and closed in any order.

    >>> numbers = Numbers()
    >>> [numbers.open() for _ in range(3)], numbers.close(0), numbers.close(2), numbers.done
    ([0, 1, 2], None, None, 1)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = itertools.count()
        self._open: OrderedDict[int, None] = OrderedDict()  # a dict's first one is behind all that it has lost
        self._last = 0

    def open(self) -> int:
        """Returns a new number."""
        with self._lock:
            number = next(self._next)
            self._open[number] = None
            self._last = number + 1
            return number

    def close(self, number: int) -> None:
        """Notes that nothing with this number is to come any more."""
        with self._lock:
            self._open.pop(number, None)

    @property
    def done(self) -> int:
        """The least number that is still open: all before it are closed."""
        with self._lock:
            return next(iter(self._open), self._last)

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Returns a context with a number of its own."""
        number = self.open()
        try:
            yield number
        finally:
            self.close(number)
