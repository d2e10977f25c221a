"""Serialized `tf.train.Example`s, parsed many at a time, in the wire format of protocol buffers.

An example is an entry for each feature: its name, and a list of bytes, floats or integers. The entries of all records
of a batch are found together: the k-th one of each record begins where the one before it ends, so that a few operations
of NumPy step over the k-th entries of all of them. The names are compared with those of the first record's entries, all
at once; where they differ, because features are missing or in another order, a dictionary is asked. The values of one
type are decoded together, for all features. What is laid out in an unusual way (a list in pieces, or not packed, or a
map in several parts) is rewritten first, one record at a time.

https://protobuf.dev/programming-guides/encoding describes the format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

BYTES, FLOAT, INT64 = 1, 2, 3  # the numbers of the lists among the fields of `Feature`
_PAST = bytes(16)  # behind the last record: what is cut off is seen when positions are compared
_LAYOUTS = 32  # how many layouts of different sizes the records of a batch are tried with


class WireError(ValueError):
    """The bytes of a record are not those of the message that was expected; `record` is its number."""

    def __init__(self, record: int):
        super().__init__(record)
        self.record = record


class Spans(NamedTuple):
    """Where the values of some features are in records.

    Attributes:
        data: all records, and behind them what was rewritten.
        kinds: `[features, records]`: BYTES, FLOAT or INT64; 0 for a feature that has no list, -1 for a missing one.
        starts: `[features, records]`: where packed numbers begin, or the fields of a list of bytes.
        stops: `[features, records]`: where they end.
    """

    data: bytes
    kinds: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


# --- one record ------------------------------------------------------------------------------------------------------


def varint(data: bytes, place: int) -> tuple[int, int]:
    """Returns the number that begins at a place, and the place after it; raises IndexError past the end."""
    byte = data[place]
    if byte < 128:
        return byte, place + 1
    number = shift = 0
    while True:
        byte = data[place]
        number |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return number & (1 << 64) - 1, place
        if shift > 63:
            raise ValueError("a number of more than 10 bytes")


def fields(data: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields the fields of a message: number and wire type, and where what it contains begins and ends."""
    while start < stop:
        tag, start = varint(data, start)
        wire = tag & 7
        if wire == 2:
            size, start = varint(data, start)
            end = start + size
        elif wire == 0:
            _, end = varint(data, start)
        elif wire in (1, 5):
            end = start + (8 if wire == 1 else 4)
        else:
            raise ValueError(f"wire type {wire}")
        if end > stop or not tag >> 3:
            raise ValueError("a field that is longer than its message")
        yield tag >> 3, wire, start, end
        start = end


def _messages(data: bytes, start: int, stop: int, number: int) -> Iterator[tuple[int, int]]:
    """Yields the spans of the messages, or bytes, that are the field of this number."""
    return ((begin, end) for n, wire, begin, end in fields(data, start, stop) if n == number and wire == 2)


def entries(data: bytes, start: int, stop: int, number: int = 1) -> Iterator[tuple[bytes, int, int]]:
    """Yields the key, and the span of the value, of each entry of a map that is the field of this number."""
    for begin, end in _messages(data, start, stop, number):
        key, place = b"", (end, end)
        for n, wire, first, last in fields(data, begin, end):
            if n == 1 and wire == 2:
                key = data[first:last]
            elif n == 2 and wire == 2:
                place = first, last
        yield key, *place


def feature_values(data: bytes, start: int, stop: int) -> tuple[int, list[bytes] | bytes]:
    """Returns the kind of a feature, and its values: a list of bytes, or packed floats or integers as bytes."""
    kind, parts = 0, list[bytes]()
    for number, wire, begin, end in fields(data, start, stop):
        if wire != 2 or number not in (BYTES, FLOAT, INT64):
            continue
        if number != kind:  # the last alternative counts
            kind, parts = number, []
        for n, how, first, last in fields(data, begin, end):
            if n == 1 and how in ((2,), (2, 5), (2, 0))[number - 1]:
                parts.append(data[first:last])
    return kind, parts if kind == BYTES else b"".join(parts)


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def example_features(data: bytes) -> dict[bytes, tuple[int, list[bytes] | bytes]]:
    """Returns what `feature_values` does for each feature of an example; raises ValueError or IndexError."""
    return {
        name: feature_values(data, start, stop)
        for begin, end in _messages(data, 0, len(data), 1)
        for name, start, stop in entries(data, begin, end)
    }


# --- many records ----------------------------------------------------------------------------------------------------


def _sizes(data: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray | int]:
    """Returns the numbers that begin at these places, below 2**28, and in how many bytes each is written."""
    first = data.take(places, mode="clip")
    if np.maximum.reduce(first, None, initial=0) < 128:
        return first, 1
    total, length = (first & 127).astype(np.intp), np.ones(first.shape, np.intp)
    goes_on = first > 127
    for n in range(1, 4):
        byte = data.take(places + n, mode="clip")
        total += np.where(goes_on, byte & 127, 0).astype(np.intp) << 7 * n
        length += goes_on
        goes_on = goes_on & (byte > 127)
    return np.where(goes_on, 1 << 28, total), length


def _steps(data: np.ndarray, starts: np.ndarray, stops: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the contents of the first `count` fields of each message begin, and where the fields end."""
    inner, ends = np.empty((2, count, len(starts)), np.intp)
    place, behind_tag = starts, data[1:]
    for k in range(count):
        size = behind_tag.take(place, mode="clip")
        if np.maximum.reduce(size, initial=0) < 128:
            np.add(place, 2, out=inner[k])
        else:
            size, written = _sizes(data, place + 1)
            np.add(place, written, out=inner[k])
            inner[k] += 1
        place = np.add(inner[k], size, out=ends[k])
    return inner, ends


class Names:
    """The names of the features that are wanted, by their numbers; and those of the first record that was seen last."""

    def __init__(self, names: Sequence[str]):
        self.numbers = {name.encode(): i for i, name in enumerate(names)}
        self.layout = _Layout([], self.numbers)

    def spans(self, records: list[bytes]) -> Spans:
        """Returns where the values of the wanted features are in serialized examples; raises WireError."""
        search = _Search(self, records)
        self.layout = search.run(self.layout)
        return search.spans()


class _Layout:
    """The names of the entries of a record, in order, and what the entries begin with."""

    def __init__(self, names: list[bytes], numbers: dict[bytes, int]):
        heads = [b"\n" + _number(len(name)) + name + b"\x12" for name in names]
        self.size = len(heads)
        self.numbers = np.array([numbers.get(name, -1) for name in names], np.intp)
        self.lengths = np.array([len(head) for head in heads], np.intp)
        self.bytes = np.frombuffer(b"".join(heads), np.uint8)[:, None]
        self.entry = np.repeat(np.arange(self.size), self.lengths)
        self.begins = self.lengths.cumsum() - self.lengths
        self.within = np.arange(len(self.bytes))[:, None] - np.repeat(self.begins, self.lengths)[:, None]

    def fits(self, data: np.ndarray, inner: np.ndarray) -> np.ndarray:
        """Returns `[entries, records]`: whether the entries that begin at `inner` have these names."""
        places = inner[self.entry]
        places += self.within
        same = data.take(places, mode="clip") == self.bytes
        return np.logical_and.reduceat(same, self.begins, axis=0) if self.size else np.ones(inner.shape, bool)


class _Search:
    """The search for the features of records."""

    def __init__(self, names: Names, records: list[bytes]):
        self.numbers, self.records = names.numbers, records
        self.bytes = b"".join([*records, _PAST])
        self.data = np.frombuffer(self.bytes, np.uint8)
        lengths = np.fromiter(map(len, records), np.intp, len(records))
        self.stops = lengths.cumsum()
        shape = len(names.numbers), len(records)
        self.kinds, self.places = np.full(shape, -1, np.int8), np.zeros((2, *shape), np.intp)
        begins = self.stops - lengths
        size, written = _sizes(self.data, begins + 1)
        self.starts = begins + 1 + written  # of the features, which are the only field of an example
        self.unusual = (self.data.take(begins, mode="clip") != 10) | (self.starts + size != self.stops) | (lengths < 2)

    def run(self, layout: _Layout) -> _Layout:
        """Looks into all records; the first of them may be laid out as told. Returns the layout that came last."""
        left = np.flatnonzero(~self.unusual)
        for _ in range(_LAYOUTS):
            fits = self._look(layout, left)
            left = left[~fits & ~self.unusual[left]]
            if not len(left):
                break
            layout = self._layout_of(int(left[0]), layout)
        self.unusual[left] = True
        return layout

    def spans(self) -> Spans:
        """Returns where the values are, once those records were rewritten that are laid out in an unusual way."""
        more, size = [self.bytes], len(self.bytes)
        for record in np.flatnonzero(self.unusual).tolist():
            self.kinds[:, record] = -1
            try:
                found = example_features(self.records[record])
            except (ValueError, IndexError) as error:
                raise WireError(record) from error
            for name, (kind, values) in found.items():
                if (number := self.numbers.get(name)) is None:
                    continue
                if isinstance(values, list):
                    values = b"".join(b"\n" + _number(len(part)) + part for part in values)
                more.append(values)
                self.kinds[number, record], self.places[:, number, record] = kind, (size, size + len(values))
                size += len(values)
        return Spans(b"".join([*more, _PAST]) if len(more) > 1 else self.bytes, self.kinds, *self.places)

    def _layout_of(self, record: int, otherwise: _Layout) -> _Layout:
        try:
            found = entries(self.bytes, int(self.starts[record]), int(self.stops[record]))
            return _Layout([name for name, _, _ in found], self.numbers)
        except (ValueError, IndexError):
            self.unusual[record] = True  # damaged, which shows when it is rewritten
            return otherwise

    def _look(self, layout: _Layout, records: np.ndarray) -> np.ndarray:
        """Looks into the records that have as many entries as the layout; returns which of them these are."""
        data = self.data
        begins, ends = _steps(data, self.starts[records], self.stops[records], layout.size)
        last = ends[-1] if layout.size else self.starts[records]
        fits = (last == self.stops[records]) & ~self.unusual[records]
        if not fits.all():
            records, begins, ends = records[fits], begins[:, fits], ends[:, fits]
        same = layout.fits(data, begins)
        if same.all():
            wanted = layout.numbers >= 0
            feature = np.repeat(layout.numbers[wanted], len(records))
            begins += layout.lengths[:, None]
            self._keep(feature, np.tile(records, int(wanted.sum())), begins[wanted].ravel(), ends[wanted].ravel())
        else:
            numbers = np.repeat(layout.numbers[:, None], len(records), axis=1)
            begins += np.where(same, layout.lengths[:, None], 0)
            for k, r in np.argwhere(~same).tolist():
                numbers[k, r], begins[k, r] = self._named(int(begins[k, r]), int(records[r]))
            wanted = numbers >= 0
            self._keep(numbers[wanted], np.where(wanted, records, 0)[wanted], begins[wanted], ends[wanted])
        return fits

    def _named(self, place: int, record: int) -> tuple[int, int]:
        """Returns the number of the feature at a place, -1 for others, and where its value begins."""
        data = self.bytes
        size = data[place + 1]
        if data[place] != 10 or size > 127 or data[place + 2 + size] != 18:
            self.unusual[record] = True
            return -1, place
        stop = place + 2 + size
        return self.numbers.get(data[place + 2 : stop], -1), stop + 1

    def _keep(self, feature: np.ndarray, record: np.ndarray, place: np.ndarray, stop: np.ndarray) -> None:
        """Keeps the spans of features of records; the lengths of their values stand at `place`."""
        data = self.data
        size, written = _sizes(data, place)
        place = place + written
        wrong = place + size != stop
        kind = data.take(place, mode="clip")
        empty = place == stop
        size, written = _sizes(data, place + 1)
        place = place + 1 + written
        wrong |= ((place + size != stop) | (kind & 7 != 2) | (kind > 31) | (kind < 8)) & ~empty
        kind = np.where(empty, 0, kind >> 3)
        # Packed numbers are one field.
        packed = (kind > BYTES) & (place < stop)
        size, written = _sizes(data, place + 1)
        start = place + 1 + written
        wrong |= packed & ((start + size != stop) | (data.take(place, mode="clip") != 10))
        self.unusual[record[wrong]] = True
        self.kinds[feature, record] = kind
        self.places[0, feature, record] = np.where(packed, start, np.minimum(place, stop))
        self.places[1, feature, record] = stop


# --- values ----------------------------------------------------------------------------------------------------------


def _all_places(starts: np.ndarray, counts: np.ndarray, size: int = 1) -> np.ndarray:
    """Returns the places of `counts[i]` things of this size from `starts[i]` on, one after the other."""
    if (counts == 1).all():
        return starts
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    return np.repeat(starts, counts) + size * within


def floats(data: bytes, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the packed floats of all spans one after the other, and how many each has."""
    counts = (stops - starts) >> 2
    if ((stops - starts) & 3).any():
        raise ValueError("packed floats have 4 bytes each")
    anywhere = np.ndarray((len(data) - 3,), "<f4", data, strides=(1,))
    return anywhere[_all_places(starts, counts, 4)].astype(np.float32, copy=False), counts


def integers(data: bytes, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the packed integers of all spans one after the other, and how many each has."""
    lengths = stops - starts
    found = np.frombuffer(data, np.uint8).take(_all_places(starts, lengths))
    last = found < 128
    before = np.concatenate([[0], last.cumsum()])
    borders = np.concatenate([[0], lengths.cumsum()])
    if not last[borders[1:][lengths > 0] - 1].all():
        raise ValueError("an integer that is cut off")
    ends = np.flatnonzero(last)
    begins = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    sizes = ends - begins + 1
    found = (found & 127).astype(np.uint64)
    values = found[begins]
    for n in range(1, int(sizes.max(initial=1))):
        values |= np.where(sizes > n, found.take(begins + n, mode="clip"), 0).astype(np.uint64) << np.uint64(7 * n)
    return values.view(np.int64), np.diff(before[borders])


def strings(data: bytes, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the strings of all spans one after the other, and how many each has."""
    view = np.frombuffer(data, np.uint8)
    counts = np.zeros(len(starts), np.intp)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    number, place = np.flatnonzero(starts < stops), starts[starts < stops]
    while len(number):
        size, written = _sizes(view, place + 1)
        begin = place + 1 + written
        place = begin + size
        if (view.take(begin - 1 - written) != 10).any() or (place > stops[number]).any():
            raise ValueError("a list of bytes has other fields")
        found.append((number, begin, place))
        counts[number] += 1
        number, place = number[more := place < stops[number]], place[more]
    if not found:
        return np.empty(0, object), counts
    number, begin, end = found[0] if len(found) == 1 else map(np.concatenate, zip(*found))
    if len(found) > 1:
        order = np.argsort(number, kind="stable")
        begin, end = begin[order], end[order]
    values = np.empty(len(begin), object)
    values[:] = [data[i:j] for i, j in zip(begin.tolist(), end.tolist())]
    return values, counts
