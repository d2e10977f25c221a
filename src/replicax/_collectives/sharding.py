"""Arrays of which each replica has a part; see `_passes.sharded_eval` for programs computed on the parts.

An array is *cut* for n replicas by raveling it, filling it up with zeros to a multiple of n, and giving each replica
one piece in order. What is small stays whole on each: its parts would save little memory and cost a program as much as
large ones, while whole arrays can stand in packs (see `_variables.packed_storage`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from replicax._collectives import arithmetic
from replicax._collectives.all_reduce import Packing, after, never
from replicax._values import AXIS, Kind, ReplicaMesh, filled, partition

_Array = TypeVar("_Array", np.ndarray, jax.Array)

FEWEST = 1 + (1 << 14) // 4  # elements: in float32 what is too large for a pack of variables


def is_cut(kind: Kind, count: int) -> bool:
    """Returns whether an array of this shape and dtype is cut for so many replicas."""
    if jnp.issubdtype(kind.dtype, jax.dtypes.extended) or len(kind.shape) == 0:
        return False
    return kind.size >= max(count, FEWEST) and count > 1


Rule: TypeAlias = Callable[[Sequence[int], np.dtype], Sequence[int]]  # a partitioner: shards along each axis


def cut_axis(kind: Kind, count: int, rule: Rule | None = None, split: Sequence[int] = ()) -> int | None:
    """Returns the axis along which an array is divided among so many replicas; None if it stays whole on each.

    That is the first axis that can be divided: then a part is in one piece. Of arrays with more than two axes the first
    may be the layers of a stack, which a loop takes one by one, and comes last.

    Args:
        kind: its shape and dtype.
        count: the number of replicas.
        rule: a partitioner, which says whether and along which axis; by default what is not small is divided.
        split: in how many parts each axis is split over a replica's devices, 1 for those left out at the end. An axis
            that is not split is divided if there is one.

    Raises:
        ValueError: the partitioner returns another number of shards than one for each axis.
    """
    shape = kind.shape
    if count < 2 or not shape or jnp.issubdtype(kind.dtype, jax.dtypes.extended):
        return None
    if rule is None:
        wanted = [] if kind.size < FEWEST else [0]
    else:
        counts = list(rule(tuple(shape), kind.dtype))
        if len(counts) != len(shape):
            raise ValueError(
                "The partitioner that is given as `shard_variables` must return a number of shards for each dimension "
                f"of a variable; for the shape {tuple(shape)} it has returned {counts!r}."
            )
        wanted = [axis for axis, shards in enumerate(counts) if shards > 1]
    if not wanted:
        return None
    axes = [*range(1, len(shape)), 0] if len(shape) > 2 else [*range(len(shape))]
    candidates = axes if rule is None else [*wanted, *axes]
    parts = [*split, *[1] * (len(shape) - len(split))]
    candidates.sort(key=lambda axis: parts[axis] > 1)
    return next((axis for axis in candidates if shape[axis] and shape[axis] % (count * parts[axis]) == 0), None)


def gathered_along(part: jax.Array, axis: int, layout: PartitionSpec | None = None) -> jax.Array:
    """Returns the array of which each replica has a part along an axis, inside of `shard_map`.

    By a layout each device of a replica gathers what it has of the array. Otherwise XLA gathers all of it on each.
    """
    if layout is None:
        whole_array: jax.Array = lax.all_gather(part, AXIS, axis=axis, tiled=True)
        return whole_array
    along, kept = _apart(layout, axis)
    return _on_each_device(lambda part: lax.all_gather(part, (AXIS, *along), axis=axis, tiled=True), layout, kept)(part)


def _on_each_device(
    fn: Callable[[jax.Array], jax.Array], before: PartitionSpec, after: PartitionSpec
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function of one replica's array that computes `fn` on what each of its devices has, by layouts."""
    names = set(jax.sharding.get_abstract_mesh().axis_names) - {AXIS}
    mapped: Callable[[jax.Array], jax.Array] = jax.shard_map(
        fn, in_specs=before, out_specs=after, axis_names=names, check_vma=False
    )
    return mapped


def _apart(layout: PartitionSpec, axis: int) -> tuple[tuple[str, ...], PartitionSpec]:
    """Returns the names that a layout has for an axis, and the layout without them."""
    entries = [*layout, *[None] * (axis + 1 - len(layout))]
    names, entries[axis] = partition.axes_of(entries[axis]), None
    return names, PartitionSpec(*entries)


def own_along(array: jax.Array, axis: int) -> jax.Array:
    """Returns this replica's part, along an axis, of an array that all replicas have."""
    size = array.shape[axis] // lax.axis_size(AXIS)
    return lax.dynamic_slice_in_dim(array, lax.axis_index(AXIS) * size, size, axis)


def behind(before: jax.Array, part: jax.Array, mesh: ReplicaMesh) -> jax.Array:
    """Returns a part that XLA gathers, or computes, only when `before` is there.

    On CPU devices XLA drops optimization barriers before it decides on the order.
    """
    if mesh.platform == "cpu":
        return jnp.where(never(before), jnp.zeros_like(part), part)
    held: tuple[jax.Array, jax.Array] = lax.optimization_barrier((part, before))
    return held[0]


def scattered(leaf: jax.Array, axis: int, mesh: ReplicaMesh, layout: PartitionSpec | None = None) -> jax.Array:
    """Returns this replica's part, along an axis, of the sum over the replicas; by a layout as `gathered_along`."""
    if layout is not None:
        _, kept = _apart(layout, axis)
        return _on_each_device(lambda leaf: scattered(leaf, axis, mesh), kept, kept)(leaf)
    if mesh.platform == "cpu":
        # Gloo gives up a reduce-scatter when a process is 30 seconds late, whatever limit JAX is given.
        if not mesh.all_local:
            return own_along(arithmetic.local_sum(leaf), axis)
        if leaf.dtype == jnp.bfloat16 and mesh.logical_axes:  # as in `arithmetic.local_sum`
            return scattered(leaf.astype(jnp.float32), axis, mesh).astype(leaf.dtype)
    part: jax.Array = lax.psum_scatter(leaf, AXIS, scatter_dimension=axis, tiled=True)
    return part


def length(kind: Kind, count: int) -> int:
    """Returns the number of elements of each part."""
    return -(-kind.size // count)


def as_rows(array: _Array, count: int) -> _Array:
    """Returns an array `[count, length]` whose rows are the parts."""
    return filled(array.ravel(), (count * length(array, count),)).reshape((count, -1))


def of_rows(rows: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns the array whose parts are the rows."""
    size = math.prod(shape)
    flat = jnp.ravel(rows)
    return jnp.reshape(flat if flat.size == size else lax.slice(flat, (0,), (size,)), shape)


class Part:
    """One replica's part of an array of this shape, inside of `shard_map`."""

    def __init__(self, part: jax.Array, shape: Sequence[int], known: jax.Array | None = None):
        self.part, self.shape = part, tuple(shape)
        self._whole = known

    def whole(self) -> jax.Array:
        """Returns the array, from all replicas."""
        if self._whole is None:
            self._whole = of_rows(lax.all_gather(self.part, AXIS), self.shape)
        return self._whole


class Same:
    """An array of which all elements are one number."""

    def __init__(self, value: jax.Array, shape: Sequence[int]):
        self.value, self.shape = value, tuple(shape)


Value: TypeAlias = jax.Array | Part | Same


def own_part(value: Value, count: int) -> jax.Array:
    """Returns this replica's part of a value, as an array."""
    if isinstance(value, Part):
        return value.part
    if isinstance(value, Same):
        return jnp.broadcast_to(value.value, (-(-math.prod(value.shape) // count),))
    return own_row(as_rows(value, count))


def own_row(rows: jax.Array) -> jax.Array:
    """Returns this replica's row of an array that all replicas have."""
    row: jax.Array = lax.dynamic_index_in_dim(rows, lax.axis_index(AXIS), keepdims=False)
    return row


def whole(value: Value) -> jax.Array:
    """Returns a value as an array with all its elements."""
    if isinstance(value, Part):
        return value.whole()
    return jnp.broadcast_to(value.value, value.shape) if isinstance(value, Same) else value


def known_part(array: jax.Array, count: int) -> Value:
    """Returns an array that all replicas have as this replica's part of it; as it is if it is not cut."""
    return Part(own_part(array, count), array.shape, array) if is_cut(array, count) else array


def sums(
    leaves: Sequence[jax.Array], count: int, packing: Packing, scatter: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
    """Returns this replica's parts of the sums over the replicas of leaves that are cut.

    The leaves of one message are the columns of an array `[count, ...]`; `scatter` adds it up over the replicas and
    returns this replica's row.
    """
    results: dict[int, jax.Array] = {}
    before: jax.Array | None = None
    for group in reversed(packing.groups(leaves)):
        columns = [as_rows(leaves[i], count) for i in group]
        block = jnp.concatenate(columns, axis=1)
        total = scatter(block if before is None else after(before, block))
        before = total if packing.apart and total.size else before
        start = 0
        for i, column in zip(group, columns):
            results[i] = lax.slice(total, (start,), (start + column.shape[1],))
            start += column.shape[1]
    return [results[i] for i in range(len(leaves))]


def gathered(values: Sequence[Value], packing: Packing) -> list[jax.Array]:
    """Returns the whole arrays of some values, the parts of one pack in one message; a pack is of one dtype."""
    parts = {i: value for i, value in enumerate(values) if isinstance(value, Part)}
    results = {i: whole(value) for i, value in enumerate(values) if i not in parts}
    places = list(parts)
    before: jax.Array | None = None
    for group in packing.groups([jax.ShapeDtypeStruct(value.shape, value.part.dtype) for value in parts.values()]):
        own = {places[j]: parts[places[j]] for j in group}
        sent = jnp.concatenate([value.part for value in own.values()])
        rows = lax.all_gather(sent if before is None else after(before, sent), AXIS)
        before = rows if packing.apart and rows.size else before
        start = 0
        for i, value in own.items():
            end = start + value.part.size
            results[i] = of_rows(lax.slice(rows, (0, start), (rows.shape[0], end)), value.shape)
            start = end
    return [results[i] for i in range(len(values))]
