"""Which records were read together: what parses one of them is likely to be asked for the others too.

To parse many records at once takes a small part of the time that they take one by one. So a function of a dataset that
parses single records, in whatever order they come, has their neighbors in the file parsed with them.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

_GROUP = 64  # records that are parsed together
_LARGEST = 1 << 14  # bytes of a record, on average, up to which that is worthwhile
_MOST_BYTES = 1 << 25  # of records whose neighbors are known

_lock = threading.Lock()
_blocks: collections.deque[RecordBlock] = collections.deque()
_places: dict[int, tuple[RecordBlock, int]] = {}  # by the id of a record, which its block keeps alive
_bytes = 0


class RecordBlock:
    """Records that were read together."""

    def __init__(self, records: Sequence[bytes]):
        self.records = records
        self.size = sum(map(len, records))
        self._found: dict[tuple[Hashable, int], list[Any]] = {}  # what groups gave, and how often it was asked for

    def of(self, place: int, key: Hashable, compute: Callable[[Sequence[bytes]], Any]) -> tuple[Any, int]:
        """Returns what `compute` returns for the records around one of them, and its place among these."""
        group, within = divmod(place, _GROUP)
        entry = self._found.get((key, group))
        records = self.records[group * _GROUP : (group + 1) * _GROUP]
        if entry is None:
            entry = self._found[key, group] = [compute(records), 0]
        entry[1] += 1
        if entry[1] >= len(records):
            self._found.pop((key, group), None)
        return entry[0], within


def note(records: Sequence[bytes]) -> None:
    """Notes that records were read together."""
    global _bytes
    block = RecordBlock(records)
    if len(records) < 2 or block.size > _LARGEST * len(records):
        return
    with _lock:
        _blocks.append(block)
        _places.update((id(record), (block, place)) for place, record in enumerate(records))
        _bytes += block.size
        while _bytes > _MOST_BYTES and len(_blocks) > 1:
            oldest = _blocks.popleft()
            _bytes -= oldest.size
            for record in oldest.records:
                _places.pop(id(record), None)


def find(record: bytes) -> tuple[RecordBlock, int] | None:
    """Returns the block of a record and its place there, None where it is not known."""
    found = _places.get(id(record))
    return found if found is not None and found[0].records[found[1]] is record else None
