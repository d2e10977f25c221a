"""Memory for batches on the host that is used again, and arrays that nobody will change any more.

A large array that is made anew for each batch costs more than to fill it: the system hands out its pages one by one.
Here the memory goes back to its pool when nobody holds an array in it any more, whoever that was: a view, a numpy array
of a JAX array, or JAX itself, whose arrays on CPU devices lie in the host's memory where that is aligned.

So JAX arrays may share memory with arrays of the host. An array is *settled* if its contents cannot change meanwhile:
those of a pool once they are filled, and those of JAX. What users hand in is not, such as the buffer that a generator
fills again and again; before it goes to the devices it is copied.
"""

from __future__ import annotations

import collections
from typing import Any

import jax
import numpy as np

from replicax._base import jax_internals
from replicax._base.specs import has_64_bit_types

# What arrays begin at a multiple of for JAX to share their memory, in bytes.
_ALIGNED = 64
# Smaller arrays are not worth a place of their own size.
_LEAST = 1 << 12
# How many unused places of one size a pool keeps, and of small ones, of which buffers hold more.
_KEPT, _KEPT_SMALL, SMALL = 8, 32, 1 << 20

# Bytes of an array that is worth a place of a pool; of smaller ones many may be kept, as by `shuffle`.
LARGE = 1 << 16

_Places = collections.deque[np.ndarray]


class _Lease:
    """Lends a place to the arrays made of it, whose base it is: when the last one goes, so does this."""

    __slots__ = ("__array_interface__", "_place", "_places")

    def __init__(self, places: _Places, place: np.ndarray):
        self._places, self._place = places, place
        self.__array_interface__ = place.__array_interface__

    def __del__(self) -> None:
        self._places.append(self._place)  # a full deque drops the oldest one


class Pool:
    """Places for arrays, by their size: powers of two."""

    def __init__(self) -> None:
        self._places: dict[int, _Places] = {}

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array to be filled, and then handed to `settle`."""
        dtype = np.dtype(dtype)
        size = dtype.itemsize
        for n in shape:
            size *= n
        room = max(_LEAST, 1 << (size - 1).bit_length())
        places = self._places.get(room)
        if places is None:
            kept = _KEPT if room > SMALL else _KEPT_SMALL
            places = self._places.setdefault(room, collections.deque(maxlen=kept))
        try:
            place = places.pop()
        except IndexError:
            place = _new_place(room)
        return np.asarray(_Lease(places, place))[:size].view(dtype).reshape(shape)

    def settled(self, array: Any) -> Any:
        """The array itself if it is settled, or a copy of it that is. Strings and what is no array stay as they are."""
        if not isinstance(array, np.ndarray) or array.dtype.hasobject or is_settled(array):
            return array
        copy = self.empty(array.shape, array.dtype)
        np.copyto(copy, array)
        return settle(copy)

    def on_device(self, array: np.ndarray, device: jax.Device, wide: bool | None = None) -> jax.Array:
        """An array of numbers as a JAX array on one device, free to move; `wide` as of `keeps_bits`."""
        settled = self.settled(array)
        wide = keeps_bits(array) if wide is None else wide
        return jax_internals.onto(device)(array.shape, array.dtype, lambda _: settled, wide)

    def rows(self, array: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The rows of an array with these numbers, each of which there is; settled."""
        if array.dtype.hasobject:
            return array.take(numbers, axis=0)
        found = self.empty((len(numbers), *array.shape[1:]), array.dtype)
        if array.flags.c_contiguous:
            # Other modes than "clip" fill a copy of `out` first.
            array.take(numbers, axis=0, out=found, mode="clip")
        else:
            found[...] = array[numbers]  # `take` would copy all of the array
        return settle(found)


def keeps_bits(*arrays: Any) -> bool:
    """Whether one of these is an array of numpy whose 64 bits JAX has to be told to keep, being set to have such types.

    (Where `jax_explicit_x64_dtypes` allows them, JAX has them on demand, and cuts them off where it only moves arrays.)
    """
    wide = any(isinstance(array, (np.ndarray, np.generic)) and array.dtype.itemsize >= 8 for array in arrays)
    return wide and has_64_bit_types()


def put(arrays: list[Any], where: Any, **options: Any) -> list[Any]:
    """`jax.device_put`, which keeps numpy's 64 bits where JAX is set to have such types."""
    if not keeps_bits(*arrays):
        return jax.device_put(arrays, where, **options)
    with jax.enable_x64(True):
        return jax.device_put(arrays, where, **options)


def _new_place(room: int) -> np.ndarray:
    whole = np.empty(room + _ALIGNED, np.uint8)
    start = -whole.ctypes.data % _ALIGNED
    return whole[start : start + room]


_nowhere: _Places = collections.deque(maxlen=0)


def kept(array: Any) -> Any:
    """The same as `Pool.settled` for arrays of which many may be kept: a copy has its own size and is used once.

    A small copy is not settled, as that costs more than to copy it again.
    """
    if not isinstance(array, np.ndarray) or array.dtype.hasobject or is_settled(array):
        return array
    if array.nbytes < LARGE:
        copy = array.copy()
        copy.flags.writeable = False
        return copy
    copy = np.asarray(_Lease(_nowhere, _new_place(array.nbytes))).view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return settle(copy)


def settle(array: np.ndarray) -> np.ndarray:
    """Makes an array of a pool, which has been filled, one that cannot be written."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base.flags.writeable = False
        base = base.base
    return array


def is_settled(array: np.ndarray) -> bool:
    """Whether the contents of an array cannot change any more."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return False
        base = base.base
    return isinstance(base, _Lease) or (isinstance(base, memoryview) and isinstance(base.obj, jax.Array))
