"""Serialized `tf.train.Example`s, parsed many at a time, in the wire format of protocol buffers.

An example is an entry for each feature: its name, and a list of bytes, floats or integers. The entries of all records
of a batch are found together: the k-th one of each record begins where the one before it ends, so that a few operations
of NumPy step over the k-th entries of all of them. The names are compared with those of the first record's entries, all
at once, and so is what short values of the expected types begin with; where names differ, because features are missing
or in another order, a dictionary is asked. What is laid out in an unusual way (a list in pieces, or not packed, or a
map in several parts) is rewritten first, one record at a time.

https://protobuf.dev/programming-guides/encoding describes the format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

BYTES, FLOAT, INT64 = 1, 2, 3  # the numbers of the lists among the fields of `Feature`
LISTS = "", "bytes_list", "float_list", "int64_list"  # their names
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


def words_of(data: bytes) -> np.ndarray:
    """Returns the 8 bytes at each place of data as one number: a view."""
    return np.ndarray((max(len(data) - 7, 0),), "<u8", data, strides=(1,))


class _Words:
    """The 8 bytes at each place of data as one number. They are laid out side by side where many are asked for."""

    def __init__(self, data: bytes):
        self._anywhere = words_of(data)

    def at(self, places: np.ndarray) -> np.ndarray:
        if len(self._anywhere) < 16 * places.size:
            self._anywhere = self._anywhere.astype(np.uint64, copy=not self._anywhere.flags.c_contiguous)
        if self._anywhere.flags.c_contiguous:
            return self._anywhere.take(places, mode="clip")
        result: np.ndarray = self._anywhere[np.minimum(places, len(self._anywhere) - 1)]
        return result


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


def entries(data: bytes, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
    """Yields the key, and the span of the value, of each entry of a map that is the first field."""
    for number, how, begin, end in fields(data, start, stop):
        if number != 1 or how != 2:
            continue
        key, place = b"", (end, end)
        for n, wire, first, last in fields(data, begin, end):
            if n == 1 and wire == 2:
                key = data[first:last]
            elif n == 2 and wire == 2:
                place = first, last
        yield key, *place


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def example_features(data: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Yields the name of each feature of an example, its kind, and the packed numbers or the fields of its list.

    Raises:
        ValueError: the data are no example.
    """
    from replicax.tf import _protos

    try:
        features = _protos.Example.FromString(data).features.feature
    except _protos.DecodeError as error:
        raise ValueError(str(error)) from error
    for name, feature in features.items():
        if (kind := feature.WhichOneof("kind")) is None:
            yield name, 0, b""
            continue
        content: bytes = getattr(feature, kind).SerializeToString()
        number = LISTS.index(kind)
        yield name, number, content if number == BYTES or not content else content[varint(content, 1)[1] :]


# --- many records ----------------------------------------------------------------------------------------------------


def sizes_at(data: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray | int]:
    """Returns the numbers that begin at these places, below 2**28, and in how many bytes each is written."""
    first = data.take(places, mode="clip")
    if np.maximum.reduce(first, None, initial=0) < 128:
        return first, 1
    goes_on = first > 127
    total, length = (first & 127).astype(np.intp), goes_on + np.intp(1)
    for n in range(1, 4):
        byte = data.take(places + n, mode="clip")
        total += np.where(goes_on, byte & 127, 0).astype(np.intp) << 7 * n
        goes_on = goes_on & (byte > 127)
        if not goes_on.any():
            return total, length
        length += goes_on
    return np.where(goes_on, 1 << 28, total), length


def _steps(data: np.ndarray, starts: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the contents of the first `count` fields of each message begin, and where the fields end."""
    ends, sizes = np.empty((count, len(starts)), np.intp), np.empty((count, len(starts)), np.uint8)
    if 2 * count < len(data):
        place = starts  # where the k-th field begins, less the `2 * k` bytes of the tags and sizes before it
        for k in range(count):
            data[2 * k + 1 :].take(place, mode="clip", out=sizes[k])
            place = np.add(place, sizes[k], out=ends[k])
        if np.maximum.reduce(sizes, None, initial=0) < 128:
            ends += np.arange(2, 2 * count + 2, 2)[:, None]
            return ends - sizes, ends
    inner, place = np.empty_like(ends), starts
    for k in range(count):
        size, written = sizes_at(data, place + 1)
        np.add(place, written, out=inner[k])
        inner[k] += 1
        place = np.add(inner[k], size, out=ends[k])
    return inner, ends


class Names:
    """The names of the features that are wanted, by their numbers; and those of the first record that was seen last.

    Args:
        names: the names.
        kinds: the kind of values that each is expected to have.
    """

    def __init__(self, names: Sequence[str], kinds: np.ndarray):
        self.numbers = {name.encode(): i for i, name in enumerate(names)}
        self.kinds = kinds
        self.layout = _Layout([], self)

    def spans(self, records: list[bytes]) -> Spans:
        """Returns where the values of the wanted features are in serialized examples; raises WireError."""
        search = _Search(self, records)
        self.layout = search.run(self.layout)
        return search.spans()


class _Layout:
    """The names of the entries of a record, in order, and what the entries begin with."""

    def __init__(self, names: list[bytes], wanted: Names):
        heads = [b"\n" + _number(len(name)) + name + b"\x12" for name in names]
        self.size = len(heads)
        self.numbers = np.array([wanted.numbers.get(name, -1) for name in names], np.intp)
        self.lengths = np.array([len(head) for head in heads], np.intp)
        # A head is compared by its words, of which the last one may begin in the one before, or go on after the head.
        places = [[*range(0, len(head) - 7, 8), max(len(head) - 8, 0)] for head in heads]
        pairs = [(head[place : place + 8], place) for head, own in zip(heads, places) for place in own]
        self._words = np.array([int.from_bytes(word, "little") for word, _ in pairs], np.uint64)[:, None]
        self._masks = np.array([(1 << 8 * len(word)) - 1 for word, _ in pairs], np.uint64)[:, None]
        self._within = np.array([place for _, place in pairs], np.intp)[:, None]
        counts = np.array([len(own) for own in places], np.intp)
        self._entry, self._begins = np.repeat(np.arange(self.size), counts), counts.cumsum() - counts
        # The entries that are wanted, and what the values of each begin with if they are as expected: see `_expected`.
        self.wanted = np.flatnonzero(self.numbers >= 0)
        self.features = self.numbers[self.wanted]
        self.kinds = wanted.kinds[self.features, None]
        self.expected = [
            np.array(column, np.uint64)[:, None] for column in zip(*map(_expected, self.kinds[:, 0].tolist()))
        ]

    def fits(self, words: _Words, inner: np.ndarray) -> np.ndarray | None:
        """Returns `[entries, records]`: whether the entries that begin at `inner` have these names; None if all do."""
        found = words.at(inner[self._entry] + self._within)
        found &= self._masks
        same = found == self._words
        return None if same.all() else np.logical_and.reduceat(same, self._begins, axis=0)


# The size of a feature in bytes, with its own length, up to which all lengths in it are in one byte each.
_SHORT = 128


def _expected(kind: int) -> tuple[int, int, int, int]:
    """Returns what a feature of a kind begins with, as a word of 8 bytes, which depends on its size.

    That is `size * factor + summand` in the bits of the mask, for sizes from 5 up to `_SHORT`; and how many bytes there
    are before the values. They are the length of the feature, the tag of the list and its length, and for packed
    numbers those of the one field in it.
    """
    parts = [(1, -1), (0, kind << 3 | 2), (1, -3)] + ([(0, 10), (1, -5)] if kind != BYTES else [])
    factor = sum(times << 8 * i for i, (times, _) in enumerate(parts))
    summand = sum(more << 8 * i for i, (_, more) in enumerate(parts))
    return factor, summand % (1 << 64), (1 << 8 * len(parts)) - 1, len(parts)


class _Search:
    """The search for the features of records."""

    def __init__(self, names: Names, records: list[bytes]):
        self.names, self.numbers, self.records = names, names.numbers, records
        self.bytes = b"".join([*records, _PAST])
        self.words = _Words(self.bytes)
        self.data = np.frombuffer(self.bytes, np.uint8)
        lengths = np.fromiter(map(len, records), np.intp, len(records))
        self.stops = lengths.cumsum()
        shape = len(names.numbers), len(records)
        self.kinds, self.places = np.full(shape, -1, np.int8), np.zeros((2, *shape), np.intp)
        begins = self.stops - lengths
        size, written = sizes_at(self.data, begins + 1)
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
                found = list(example_features(self.records[record]))
            except ValueError as error:
                raise WireError(record) from error
            for name, kind, values in found:
                if (number := self.numbers.get(name.encode())) is not None:
                    more.append(values)
                    self.kinds[number, record], self.places[:, number, record] = kind, (size, size + len(values))
                    size += len(values)
        return Spans(b"".join([*more, _PAST]) if len(more) > 1 else self.bytes, self.kinds, *self.places)

    def _layout_of(self, record: int, otherwise: _Layout) -> _Layout:
        try:
            found = entries(self.bytes, int(self.starts[record]), int(self.stops[record]))
            return _Layout([name for name, _, _ in found], self.names)
        except (ValueError, IndexError):
            self.unusual[record] = True  # damaged, which shows when it is rewritten
            return otherwise

    def _look(self, layout: _Layout, records: np.ndarray) -> np.ndarray:
        """Looks into the records that have as many entries as the layout; returns which of them these are."""
        starts, stops = self.starts[records], self.stops[records]
        begins, ends = _steps(self.data, starts, layout.size)
        last = ends[-1] if layout.size else starts
        fits: np.ndarray = (last == stops) & ~self.unusual[records]
        if not fits.all():
            records, begins, ends = records[fits], begins[:, fits], ends[:, fits]
        same = layout.fits(self.words, begins)
        if same is None:
            begins += layout.lengths[:, None]
            self._keep_alike(layout, records, begins[layout.wanted], ends[layout.wanted])
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
        stop = place + 2 + size
        if data[place] != 10 or size > 127 or data[stop : stop + 1] != b"\x12":  # a damaged size points past the end
            self.unusual[record] = True
            return -1, place
        return self.numbers.get(data[place + 2 : stop], -1), stop + 1

    def _keep_alike(self, layout: _Layout, records: np.ndarray, places: np.ndarray, stops: np.ndarray) -> None:
        """Does as `_keep` for `[features, records]` of one layout, at once where they are short and as expected."""
        features, sizes = layout.features, stops - places
        if sizes.size and sizes.min() >= 5 and sizes.max() <= _SHORT:
            factor, summand, mask, before = layout.expected
            wrong = self.words.at(places) ^ (sizes.astype(np.uint64) * factor + summand)
            wrong &= mask
            if not wrong.any():
                where: Any = features if len(records) == len(self.records) else np.ix_(features, records)
                self.kinds[where] = layout.kinds
                self.places[0][where], self.places[1][where] = places + before.astype(np.intp), stops
                return
        feature = np.repeat(features, len(records))
        self._keep(feature, np.tile(records, len(features)), places.ravel(), stops.ravel())

    def _keep(self, feature: np.ndarray, record: np.ndarray, place: np.ndarray, stop: np.ndarray) -> None:
        """Keeps the spans of features of records; the lengths of their values stand at `place`."""
        data = self.data
        size, written = sizes_at(data, place)
        place = place + written
        wrong = place + size != stop
        kind = data.take(place, mode="clip")
        empty = place == stop
        size, written = sizes_at(data, place + 1)
        place = place + 1 + written
        wrong |= ((place + size != stop) | (kind & 7 != 2) | (kind > 31) | (kind < 8)) & ~empty
        kind = np.where(empty, 0, kind >> 3)
        # Packed numbers are one field.
        packed = (kind > BYTES) & (place < stop)
        size, written = sizes_at(data, place + 1)
        start = place + 1 + written
        wrong |= packed & ((start + size != stop) | (data.take(place, mode="clip") != 10))
        self.unusual[record[wrong]] = True
        self.kinds[feature, record] = kind
        self.places[0, feature, record] = np.where(packed, start, np.minimum(place, stop))
        self.places[1, feature, record] = stop
