"""A pool of buffers for batches on the host, and arrays that nobody will change any more.

A large array that is made anew for each batch costs more than to fill it: the system hands out its pages one by one.
Here a buffer goes back to its pool when nobody holds an array in it any more, whoever that was: a view, a numpy array
of a JAX array, or JAX itself, whose arrays on CPU devices lie in the host's memory where that is aligned.

So JAX arrays may share memory with arrays of the host. An array is *settled* if its contents cannot change meanwhile:
those of a pool once they are filled, and those of JAX. What users hand in is not, such as the buffer that a generator
fills again and again; before it goes to the devices it is copied.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence

import jax
import numpy as np
from numpy.typing import DTypeLike

from replicax._base import jax_internals
from replicax._base.thread_state import has_64_bit_types
from replicax._base.types import Leaf

# The alignment of arrays whose memory JAX shares, in bytes.
_ALIGNED = 64
# The smallest buffer, in bytes.
_LEAST = 1 << 12
# The most unused buffers of one size that a pool keeps: of large ones, of small ones, and what is small, in bytes.
_KEPT, _KEPT_SMALL, SMALL = 8, 32, 1 << 20

# The size in bytes from which an array is worth a buffer of a pool; of smaller ones `shuffle` may keep many.
LARGE = 1 << 16

_Buffers = collections.deque[np.ndarray]


class _Lease:
    """Lends a buffer to the arrays that are views of it: it is their base, and is collected with the last one."""

    __slots__ = ("__array_interface__", "_buffer", "_buffers")

    def __init__(self, buffers: _Buffers, buffer: np.ndarray):
        self._buffers, self._buffer = buffers, buffer
        self.__array_interface__ = buffer.__array_interface__

    def __del__(self) -> None:
        self._buffers.append(self._buffer)  # a full deque drops the oldest one


class Pool:
    """Unused buffers for arrays, by their size, which is a power of two."""

    def __init__(self) -> None:
        self._buffers: dict[int, _Buffers] = {}

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Returns an array to be filled, and then handed to `settle`."""
        dtype = np.dtype(dtype)
        size = dtype.itemsize
        for n in shape:
            size *= n
        room = max(_LEAST, 1 << (size - 1).bit_length())
        buffers = self._buffers.get(room)
        if buffers is None:
            kept = _KEPT if room > SMALL else _KEPT_SMALL
            buffers = self._buffers.setdefault(room, collections.deque(maxlen=kept))
        try:
            buffer = buffers.pop()
        except IndexError:
            buffer = _new_buffer(room)
        array: np.ndarray = np.asarray(_Lease(buffers, buffer))[:size].view(dtype).reshape(shape)
        return array

    def settled(self, array: Leaf) -> Leaf:
        """Returns the array if it is settled, or else a settled copy. Strings and other objects stay as they are."""
        if not isinstance(array, np.ndarray) or array.dtype.hasobject or is_settled(array):
            return array
        copy = self.empty(array.shape, array.dtype)
        np.copyto(copy, array)
        return settle(copy)

    def on_device(self, array: np.ndarray, device: jax.Device, wide: bool | None = None) -> jax.Array:
        """Returns an array of numbers as a JAX array on one device, free to move; `wide` as of `keeps_bits`."""
        settled = self.settled(array)
        wide = keeps_bits(array) if wide is None else wide
        return jax_internals.from_host_to(device)(array.shape, array.dtype, lambda _: settled, wide)

    def rows(self, array: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Returns the rows of an array with these numbers, which are in range; settled."""
        if array.dtype.hasobject:
            return array.take(numbers, axis=0)
        found = self.empty((len(numbers), *array.shape[1:]), array.dtype)
        if array.flags.c_contiguous:
            # Other modes than "clip" fill a copy of `out` first.
            array.take(numbers, axis=0, out=found, mode="clip")
        else:
            found[...] = array[numbers]  # `take` would copy all of the array
        return settle(found)


def keeps_bits(*arrays: Leaf) -> bool:
    """Return whether one of these arrays has a 64-bit dtype that JAX has to be told to keep.

    Where `jax_explicit_x64_dtypes` allows 64-bit dtypes, JAX makes them on demand. It cuts them off where it moves
    arrays, both NumPy's and its own.
    """
    wide = any(isinstance(x, (np.ndarray, np.generic, jax.Array)) and x.dtype.itemsize >= 8 for x in arrays)
    return wide and has_64_bit_types()


def put(
    arrays: Sequence[Leaf],
    where: jax.Device | jax.sharding.Sharding | Sequence[jax.sharding.Sharding],
    **options: bool,
) -> list[jax.Array]:
    """Call `jax.device_put`, and keep 64-bit dtypes where JAX allows them."""
    with jax.enable_x64(True) if keeps_bits(*arrays) else contextlib.nullcontext():
        placed: list[jax.Array] = jax.device_put(list(arrays), where, **options)
        return placed


def _new_buffer(room: int) -> np.ndarray:
    whole = np.empty(room + _ALIGNED, np.uint8)
    start = -whole.ctypes.data % _ALIGNED
    return whole[start : start + room]


_nowhere: _Buffers = collections.deque(maxlen=0)


def kept(array: Leaf) -> Leaf:
    """Does as `Pool.settled` for arrays of which many are kept: a copy has just its size, and its buffer is used once.

    A small copy is not settled: that would cost more than to copy it again, and so does to find out whether it is.
    """
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        return array
    if array.nbytes < LARGE:
        copy = array.copy()
        copy.flags.writeable = False
        return copy
    if is_settled(array):
        return array
    copy = np.asarray(_Lease(_nowhere, _new_buffer(array.nbytes))).view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return settle(copy)


def lend(buffer: np.ndarray, unused: _Buffers) -> np.ndarray:
    """Returns an array in a buffer, which is appended to `unused` once nobody holds it or a view of it."""
    return np.asarray(_Lease(unused, buffer))


def settle(array: np.ndarray) -> np.ndarray:
    """Makes an array of a pool read-only, once it has been filled, and returns it."""
    base: object = array
    while isinstance(base, np.ndarray):
        base.flags.writeable = False
        base = base.base
    return array


def is_settled(array: np.ndarray) -> bool:
    """Returns whether the contents of an array cannot change any more."""
    base: object = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return False
        base = base.base
    return isinstance(base, _Lease) or (isinstance(base, memoryview) and isinstance(base.obj, jax.Array))
