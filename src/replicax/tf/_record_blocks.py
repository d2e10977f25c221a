"""Which records were read together: what parses one of them is likely to be asked for the others too.

To parse many records at once takes a small part of the time that they take one by one. So a function of a dataset that
parses single records, or a few at a time, has their neighbors in the file parsed with them, as long as it asks for one
of eight at least.
What is kept for that is bounded by its bytes, and stays after a dataset has ended, for the next pass.
"""

from __future__ import annotations

import collections
import contextlib
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

GROUP = 128  # records that are parsed together
_LARGEST = 1 << 14  # bytes of a record, or of what it becomes, up to which that is worthwhile
_MOST_BYTES = 1 << 25  # of records whose neighbors are known
_MOST_FOUND = 1 << 24  # bytes of what they have become
_SPARSE = 8  # one of so many neighbors has to be asked for
_TRIED = 8 * GROUP  # calls before that is judged

_lock = threading.Lock()
_blocks: collections.deque[_Block] = collections.deque()
_places: dict[int, tuple[_Block, int]] = {}  # by the id of a record, which its block keeps alive
_bytes = 0
_is_used = False  # whether anything has asked for neighbors yet; most programs never do
_recent: collections.deque[Sequence[bytes]] = collections.deque(maxlen=4)  # what was read last, until then


class _Block:
    """Records that were read together."""

    def __init__(self, records: Sequence[bytes], size: int):
        self.records, self.size = records, size


def note(records: Sequence[bytes]) -> None:
    """Notes that records were read together."""
    global _bytes
    size = sum(map(len, records))
    if len(records) < 2 or size > _LARGEST * len(records):
        return
    if not _is_used:
        _recent.append(records)
        return
    block = _Block(records, size)
    with _lock:
        _blocks.append(block)
        _places.update((id(record), (block, place)) for place, record in enumerate(records))
        _bytes += size
        while _bytes > _MOST_BYTES and len(_blocks) > 1:
            oldest = _blocks.popleft()
            _bytes -= oldest.size
            for record in oldest.records:
                _places.pop(id(record), None)


def _begin() -> None:
    global _is_used
    _is_used = True
    with contextlib.suppress(IndexError):  # other threads may take from it as well
        while True:
            note(_recent.popleft())


class Neighbors:
    """What a function of several records gives for those around a record.

    Args:
        compute: the function.
        size: the bytes of what it gives for one record.
    """

    def __init__(self, compute: Callable[[Sequence[bytes]], Any], size: int):
        _begin()
        self._compute = compute
        self._most = _MOST_FOUND // (GROUP * max(size, 1)) if size <= _LARGEST else 0
        self._groups: collections.OrderedDict[tuple[_Block, int, int], list[Any]] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._computed = self._asked = 0

    def of(self, record: bytes, *more: bytes) -> tuple[Any, int] | None:
        """Returns what the function gives for the records around one of them, and its place among these.

        None where its neighbors are not known, or are not worth the time; and where `more`, fewer than a group, are
        not those that come after it among them.
        """
        found = _places.get(id(record))
        if not self._most or found is None or found[0].records[found[1]] is not record:
            return None
        (block, place), count = found, 1 + len(more)
        # Those who ask for several at a time, one batch after the other, get groups of whole batches.
        size, first = GROUP - GROUP % count, place % count
        group, within = divmod(place - first, size)
        start = first + group * size
        if more and not _same(block.records[place + 1 : start + size], more):
            return None
        key = block, start, size
        with self._lock:
            self._asked += count
            if (entry := self._groups.get(key)) is None:
                if self._computed * GROUP > _SPARSE * (self._asked + _TRIED):
                    return None
                self._computed += 1
                records = block.records[start : start + size]
                entry = self._groups[key] = [self._compute(records), len(records) - len(records) % count]
                while len(self._groups) > self._most:
                    self._groups.popitem(last=False)
            else:
                self._groups.move_to_end(key)
            entry[1] -= count
            if entry[1] <= 0:  # it was asked for each of them
                self._groups.pop(key, None)
        return entry[0], within


def _same(records: Sequence[bytes], wanted: Sequence[bytes]) -> bool:
    """Returns whether records begin with the wanted ones, the very same objects."""
    return len(records) >= len(wanted) and all(map(operator.is_, records, wanted))
