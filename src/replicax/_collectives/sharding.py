"""Arrays of which each replica has a part; see `_passes.sharded_eval` for programs computed on the parts.

An array is *cut* for n replicas by raveling it, filling it up with zeros to a multiple of n, and giving each replica
one piece in order. What is small stays whole on each: its parts would save little memory and cost a program as much as
large ones, while whole arrays can stand in packs (see `_variables.packed_storage`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._collectives.all_reduce import AS_FEW_AS_POSSIBLE, Packing, after
from replicax._values import AXIS

FEWEST = 1 + (1 << 14) // 4  # elements: in float32 what is too large for a pack of variables


def is_cut(kind: Any, count: int) -> bool:
    """Whether an array of this shape and dtype is cut for so many replicas."""
    if jnp.issubdtype(kind.dtype, jax.dtypes.extended) or len(kind.shape) == 0:
        return False
    return kind.size >= max(count, FEWEST) and count > 1


def length(kind: Any, count: int) -> int:
    """How many elements each part has."""
    return -(-kind.size // count)


def as_rows(array: Any, count: int) -> Any:
    """An array `[count, length]` whose rows are the parts."""
    module: Any = np if isinstance(array, np.ndarray) else jnp
    flat = module.ravel(array)
    padding = length(array, count) * count - array.size
    return module.reshape(module.pad(flat, (0, padding)) if padding else flat, (count, -1))


def of_rows(rows: Any, shape: Sequence[int]) -> Any:
    """The array whose parts are the rows."""
    size = int(np.prod(shape, dtype=np.int64))
    flat = jnp.ravel(rows)
    return jnp.reshape(flat if flat.size == size else lax.slice(flat, (0,), (size,)), shape)


class Part:
    """One replica's part of an array of this shape, inside of `shard_map`."""

    def __init__(self, part: Any, shape: Sequence[int], known: Any = None):
        self.part, self.shape = part, tuple(shape)
        self._whole = known

    def whole(self) -> Any:
        """The array, from all replicas."""
        if self._whole is None:
            self._whole = of_rows(lax.all_gather(self.part, AXIS), self.shape)
        return self._whole


class Same:
    """An array that is the same at each place."""

    def __init__(self, value: Any, shape: Sequence[int]):
        self.value, self.shape = value, tuple(shape)


def own_part(value: Any, count: int) -> Any:
    """This replica's part of a value, as an array."""
    if isinstance(value, Part):
        return value.part
    if isinstance(value, Same):
        size = int(np.prod(value.shape, dtype=np.int64))
        return jnp.broadcast_to(value.value, (-(-size // count),))
    return lax.dynamic_index_in_dim(as_rows(value, count), lax.axis_index(AXIS), keepdims=False)


def whole(value: Any) -> Any:
    """A value as an array with all its elements."""
    if isinstance(value, Part):
        return value.whole()
    return jnp.broadcast_to(value.value, value.shape) if isinstance(value, Same) else value


def known_part(array: Any, count: int) -> Any:
    """This replica's part of an array that all replicas have; what is not cut as it is."""
    return Part(own_part(array, count), array.shape, array) if is_cut(array, count) else array


def sums(
    leaves: Sequence[Any],
    count: int,
    packing: Packing,
    scatter: Callable[[Any], Any],
) -> list[Any]:
    """This replica's parts of the sums over the replicas of leaves that are cut.

    Those of one pack are the columns of one array `[count, ...]`, of which `scatter` leaves each replica the sum of one
    row.
    """
    results: list[Any] = [None] * len(leaves)
    before: Any = None
    for group in reversed(packing.groups(leaves)):
        columns = [as_rows(leaves[i], count) for i in group]
        block = columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=1)
        total = scatter(block if before is None else after(before, block))
        before = total if packing.apart and total.size else before
        start = 0
        for i, column in zip(group, columns):
            results[i] = lax.slice(total, (start,), (start + column.shape[1],))
            start += column.shape[1]
    return results


def gathered(
    values: Sequence[Any],
    packing: Packing = AS_FEW_AS_POSSIBLE,
) -> list[Any]:
    """The whole arrays of some values, the parts of one pack in one message; a pack is of one dtype."""
    results = [None if isinstance(value, Part) else whole(value) for value in values]
    parts = [i for i, value in enumerate(values) if isinstance(value, Part)]
    before: Any = None
    for group in packing.groups([jax.ShapeDtypeStruct(values[i].shape, values[i].part.dtype) for i in parts]):
        own = [values[parts[j]] for j in group]
        sent = own[0].part if len(own) == 1 else jnp.concatenate([x.part for x in own])
        rows = lax.all_gather(sent if before is None else after(before, sent), AXIS)
        before = rows if packing.apart and rows.size else before
        start = 0
        for j, value in zip(group, own):
            end = start + value.part.size
            results[parts[j]] = of_rows(lax.slice(rows, (0, start), (rows.shape[0], end)), value.shape)
            start = end
    return results
