"""Records whose neighbors were parsed with them: each takes its row of what they have become."""

from __future__ import annotations

import itertools
import types

import numpy as np

from replicax.tf import _host
from replicax.tf._core import Strings, calls, tensors_of
from replicax.tf._types import Composed

_VIEWED = 8  # bytes of a row up to which it is a view


class ParsedRows:
    """The values of records that were parsed together, one record's or a few ones' to be taken by themselves.

    A row of a few bytes is a view of its column, which takes less than a copy. It keeps the column, which is not much
    more than the row's own array object; larger rows are copied, so that they can outlive it.
    """

    def __init__(self, columns: dict[str, np.ndarray], count: int):
        self._keys, self._columns = list(columns), list(columns.values())
        self._types = [Strings if column.dtype.hasobject else _host.HostTensor for column in self._columns]
        self._copied: list[int] = []
        for place, column in enumerate(self._columns):
            if column.dtype.hasobject or column.nbytes > _VIEWED * count:
                self._copied.append(place)
            else:
                self._columns[place] = own = column.copy()  # it was part of a larger array
                own.flags.writeable = False

    def tensors(self, which: slice | tuple[int | types.EllipsisType, ...]) -> dict[str, Composed]:
        """Returns the tensors of some of the records, where `which` is an index of NumPy for a view."""
        arrays = list(map(np.ndarray.__getitem__, self._columns, itertools.repeat(which)))
        for place in self._copied:
            arrays[place] = own = arrays[place].copy()
            if not own.dtype.hasobject:
                own.flags.writeable = False
        if not _host.is_on():
            return shown(dict(zip(self._keys, arrays)))
        tensors = list(map(np.ndarray.view, arrays, self._types))
        calls.hand_out(tensors, arrays)
        found: dict[str, Composed] = dict(zip(self._keys, tensors))  # type: ignore[arg-type]  # see `_host.hosted`
        return found


def shown(arrays: dict[str, np.ndarray]) -> dict[str, Composed]:
    """Returns arrays as `as_element` does, all at once."""
    if _host.is_on():
        return {key: _host.hosted(array) for key, array in arrays.items()}
    found: dict[str, Composed] = tensors_of(arrays)
    return found
