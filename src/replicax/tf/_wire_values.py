"""The values of many features of one type, decoded together from the wire format of protocol buffers.

Most features have one short value in each record. Those take a few operations of NumPy, on the 8 bytes at each place.
"""

from __future__ import annotations

import itertools

import numpy as np

from replicax.tf._wire import BYTES, FLOAT, INT64, words_of

_GOES_ON = np.uint64(0x8080808080808080)  # the bits which say that a number has another byte
_INSIDE = np.array([(1 << 8 * length) - 1 for length in range(9)], np.uint64)  # the bits of so many bytes
# How pairs of numbers become one with twice the bits: the bits of the lower number of each pair, those of the higher
# one once it is moved next to it, by how much that is, and how many bytes there are at least where there is a pair.
_PAIRS = [
    (np.uint64(low), np.uint64(low << bits), np.uint64(shift), least)
    for low, bits, shift, least in [
        (0x007F007F007F007F, 7, 1, 2),
        (0x00003FFF00003FFF, 14, 2, 3),
        (0x000000000FFFFFFF, 28, 4, 5),
    ]
]


def single_values(kind: int, data: bytes, starts: np.ndarray, stops: np.ndarray) -> np.ndarray | None:
    """Returns the values of spans that have one each; None where they have not, or one is long.

    There are 8 more bytes behind the last span.
    """
    lengths = stops - starts
    least, most = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    if kind == FLOAT and least == most == 4:
        return _floats_at(data, starts)
    if kind == INT64 and least > 0 and most <= 8:
        return _single_integers(words_of(data)[starts], lengths, most)
    if kind == BYTES and least >= 2 and most < 130:
        view = np.frombuffer(data, np.uint8)
        if (view.take(starts) == 10).all() and (view.take(starts + 1) == lengths - 2).all():
            return _between(data, starts + 2, stops)
    return None


def _single_integers(words: np.ndarray, lengths: np.ndarray, most: int) -> np.ndarray | None:
    inside = _INSIDE.take(lengths)
    words &= inside
    if ((words & _GOES_ON) != (inside >> np.uint64(8)) & _GOES_ON).any():
        return None
    for lower, higher, shift, least in _PAIRS:
        words = (words & lower) | ((words >> shift) & higher) if most >= least else words & lower
    return words.view(np.int64)


def _floats_at(data: bytes, places: np.ndarray) -> np.ndarray:
    anywhere = np.ndarray((len(data) - 3,), "<f4", data, strides=(1,))
    result: np.ndarray = anywhere[places].astype(np.float32, copy=False)
    return result


def _between(data: bytes, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns pieces of data as an array of strings."""
    values = np.empty(len(begins), object)
    values[:] = [data[i:j] for i, j in zip(begins.tolist(), ends.tolist())]
    return values


def _all_places(starts: np.ndarray, counts: np.ndarray, size: int = 1) -> np.ndarray:
    """Returns the places of `counts[i]` things of this size from `starts[i]` on, one after the other."""
    if (counts == 1).all():
        return starts
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    result: np.ndarray = np.repeat(starts, counts) + size * within
    return result


def floats(data: bytes, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the packed floats of all spans one after the other, and how many each has."""
    counts = (stops - starts) >> 2
    if ((stops - starts) & 3).any():
        raise ValueError("packed floats have 4 bytes each")
    return _floats_at(data, _all_places(starts, counts, 4)), counts


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
    from replicax.tf import _protos

    parse = _protos.BytesList.FromString
    try:
        lists = [parse(data[i:j]).value for i, j in zip(starts.tolist(), stops.tolist())]
    except _protos.DecodeError as error:
        raise ValueError("a list of bytes has other fields") from error
    counts = np.fromiter(map(len, lists), np.intp, len(lists))
    values = np.empty(int(counts.sum()), object)
    values[:] = list(itertools.chain.from_iterable(lists))
    return values, counts
