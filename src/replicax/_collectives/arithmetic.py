"""The arithmetic of reducing and gathering: on the components themselves, and on one replica's while traced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from replicax._base import doc_pages
from replicax._base.array_conversion import as_array
from replicax._base.errors import InvalidArgumentError
from replicax._base.indexed_slices import IndexedSlices, dynamic_arrays, with_arrays
from replicax._base.messages import received
from replicax._base.thread_state import has_64_bit_types
from replicax._base.types import Leaf, ReduceOp, check_reduction_axis
from replicax._tracing import frames
from replicax._values import (
    AXIS,
    Kind,
    Mirrored,
    PerReplica,
    component_count,
    components_of,
    counted_form,
    is_array,
    mesh_of,
    traced_component,
)

Reducible: TypeAlias = jax.Array | IndexedSlices  # a replica's part of a sum
Axis: TypeAlias = int | tuple[int, ...]  # along which components are reduced


def mean_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype of a mean: floating point of integers, 64 bits wide for 32-bit ones if JAX has such types."""
    if not (jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)):
        return dtype
    dtype = np.dtype(dtype)
    return np.dtype(np.float64 if dtype.itemsize >= 4 and has_64_bit_types() else np.float32)


def divided(total: jax.Array, count: ArrayLike, dtype: np.dtype) -> jax.Array:
    """Returns `total / count` in the dtype of a mean of `dtype`."""
    target = mean_dtype(dtype)
    return total.astype(target) / jnp.asarray(count).astype(target)


def is_wider(dtype: np.dtype, narrow: np.dtype | None) -> bool:
    """Returns whether `narrow` is asked for and narrower than this dtype, both being real floating point."""
    return narrow is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > narrow.itemsize


def narrowed(op: ReduceOp, leaf: jax.Array, count: int, narrow: np.dtype | None) -> jax.Array:
    """Returns one replica's part of a sum or mean that is computed in a narrower dtype.

    A mean is divided before it is added up, so that no sum is larger than the largest value: float16 ends at 65504.
    """
    return (leaf / count if op is ReduceOp.MEAN else leaf).astype(narrow)


def check_numeric(dtype: np.dtype) -> None:
    """Raises `InvalidArgumentError` for dtypes that cannot be added up."""
    if jnp.issubdtype(dtype, jnp.bool_) or not (
        jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.floating)
    ):
        raise InvalidArgumentError(
            f"Values of dtype {dtype} cannot be added up; cast them to a numeric dtype first, such as int32 or float32."
        )


def check_arrays(parts: Sequence[Leaf]) -> None:
    """Raise `TypeError` unless all components are arrays, or all are `IndexedSlices`."""
    sparse = isinstance(parts[0], IndexedSlices)
    for part in parts:
        if not (isinstance(part, IndexedSlices) if sparse else is_array(part)):
            raise TypeError(
                f"The replicas' values are no arrays but {received(part)}. Return arrays from "
                "the replica function: jnp.asarray(...)."
            )


def check_alike(parts: Sequence[Kind], free_axis: int | None = None) -> None:
    """Raises `InvalidArgumentError` if the arrays differ in dtype, or in shape other than along `free_axis`."""
    dtypes = [str(part.dtype) for part in parts]
    if len(set(dtypes)) > 1:
        raise InvalidArgumentError(f"The replicas' values differ in dtype: {_each(dtypes)}.")
    shapes = [tuple(part.shape) for part in parts]
    ranks = {len(shape) for shape in shapes}
    if len(ranks) > 1:
        raise InvalidArgumentError(f"The replicas' values differ in rank, their shapes are: {_each(shapes)}.")
    fixed = {tuple(n for i, n in enumerate(shape) if i != free_axis) for shape in shapes}
    if len(fixed) > 1:
        where = "" if free_axis is None else f" in another dimension than {free_axis}"
        raise InvalidArgumentError(f"The replicas' values differ in shape{where}: {_each(shapes)}.")


def check_static(value: PerReplica) -> None:
    """Raises `InvalidArgumentError` if the replicas' arrays differ in shape, for strategies that need equal ones."""
    if counted_form(value) is not None:  # its program has one shape
        return
    shapes = components_of(value).local_shapes()
    ids = range(len(shapes)) if (mesh := mesh_of(value)) is None else mesh.local_ids
    others_differ = components_of(value).others_differ()
    if others_differ or len(set(shapes)) > 1:
        raise InvalidArgumentError(
            "The strategy has one program for all replicas, which needs the same shapes on each, but they are: "
            f"{_each(shapes, ids)}{', and others on other hosts' if others_differ else ''}. Where it is the "
            "last batch of a dataset, drop it, `dataset.batch(batch_size, drop_remainder=True)` with a batch size that "
            f"{component_count(value)} (the number of replicas) divides, or pad it. "
            f"See {doc_pages.page('explanation/uneven-batches')}."
        )


def _each(things: Sequence[object], ids: Sequence[int] | None = None) -> str:
    return ", ".join(f"replica {i}: {thing}" for i, thing in zip(ids or range(len(things)), things))


def gather_axis(axis: int, ndim: int) -> int:
    """Returns `axis` counted from the start; raises `InvalidArgumentError` for scalars or out of range."""
    if ndim == 0:
        raise InvalidArgumentError("Scalars cannot be concatenated: give them a dimension first, value[None].")
    if not -ndim <= axis < ndim:
        raise InvalidArgumentError(f"Expected concatenating dimensions in the range [{-ndim}, {ndim}), but got {axis}.")
    return axis % ndim


def add(parts: Sequence[jax.Array]) -> jax.Array:
    """Returns the sum of the components, on the first one's device."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def reduce_parts(
    op: ReduceOp,
    parts: Sequence[Leaf],
    add: Callable[[Sequence[jax.Array]], jax.Array] = add,
    narrow: np.dtype | None = None,
) -> Reducible:
    """Returns the elementwise sum or mean, computed in `narrow` if that is narrower; concatenates sparse components."""
    check_arrays(parts)
    if isinstance(parts[0], IndexedSlices):
        values = jnp.concatenate([part.values for part in parts])
        indices = jnp.concatenate([jnp.asarray(part.indices) for part in parts])
        scaled = values / len(parts) if op is ReduceOp.MEAN else values
        return IndexedSlices(scaled, indices, parts[0].dense_shape)
    for part in parts:
        check_numeric(part.dtype)
    check_alike(parts)
    dtype = parts[0].dtype
    if len(parts) > 1 and is_wider(dtype, narrow):
        return add([narrowed(op, as_array(part), len(parts), narrow) for part in parts]).astype(dtype)
    total = add([as_array(part) for part in parts])
    return divided(total, len(parts), dtype) if op is ReduceOp.MEAN else total


def axes_of(axis: Axis) -> tuple[int, ...]:
    """Returns the axes that a reduction is along."""
    return axis if isinstance(axis, tuple) else (axis,)


def count_along(shape: Sequence[int], axis: Axis) -> int:
    """Returns the number of elements that a reduction along `axis` combines into one."""
    return math.prod(shape[one] for one in axes_of(axis))


def reduce_along(op: ReduceOp, parts: Sequence[ArrayLike], axis: Axis) -> jax.Array:
    """Reduces each component along `axis`, then all of them; the mean weighs every element equally."""
    check_reduction_axis(axis)
    sums = []
    if any(part is None for part in parts):
        check_arrays(parts)
    arrays = [as_array(part) for part in parts]
    for part in arrays:
        check_numeric(part.dtype)
        for one in axes_of(axis):
            if not -part.ndim <= one < part.ndim:
                raise ValueError(
                    f"Invalid reduction dimension {one} for input with {part.ndim} dimensions (shape {part.shape})."
                )
        sums.append(jnp.sum(part, axis=axis, dtype=part.dtype))
    check_alike(sums)
    total = add(sums)
    if op is ReduceOp.SUM:
        return total
    return divided(total, sum(count_along(part.shape, axis) for part in arrays), arrays[0].dtype)


def sum_of_rows(stacked: jax.Array, axes: tuple[int, ...] = ()) -> jax.Array:
    """Returns the sum over the rows, and over these axes of each row."""
    return jnp.sum(stacked, axis=(0, *(a + 1 for a in axes)), dtype=stacked.dtype)


def reduce_rows(op: ReduceOp, stacked: jax.Array, counts: jax.Array, axis: Axis | None) -> jax.Array:
    """Returns the sum or mean of the rows that count of a padded batch's parts, of which a program knows no shapes.

    Raises:
        ValueError: it is not along the axis of the rows.
    """
    row = jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype)
    check_numeric(row.dtype)
    if axis is not None:  # checks the axis, and raises in the components' terms
        jax.eval_shape(lambda x: reduce_along(op, [x], axis), row)
    axes = tuple(a % len(row.shape) for a in axes_of(axis)) if axis is not None else ()
    if 0 not in axes:
        raise ValueError(
            "The replicas' parts of a padded batch (InputOptions(pad_last_batch=True)) may have different numbers of "
            f"rows in each call, so that they can be reduced along axis 0 alone, got axis={axis}. Reduce the rows in "
            "the replica function, or return the value from the compiled function and reduce it there."
        )
    shape = (*stacked.shape[:2], *[1] * (stacked.ndim - 2))
    mask = lax.broadcasted_iota(counts.dtype, shape, 1) < counts.reshape(-1, *[1] * (stacked.ndim - 1))
    total = sum_of_rows(jnp.where(mask, stacked, jnp.zeros_like(stacked)), axes)
    inner = count_along(row.shape, tuple(a for a in axes if a))
    return divided(total, jnp.sum(counts) * inner, row.dtype) if op is ReduceOp.MEAN else total


# One replica's view, inside of `shard_map`: values are its own component.


def local_sum(leaf: jax.Array, groups: Sequence[Sequence[int]] | None = None) -> jax.Array:
    """Returns the sum over the replicas, or over those of each group by itself.

    A single replica's value is returned as it is: XLA has no all-reduce over one replica on several devices.
    """
    if lax.axis_size(AXIS) == 1:
        return leaf
    several_axes = len(jax.sharding.get_abstract_mesh().axis_names) > 1
    # XLA's compiler for the CPU, up to the one of JAX 0.12, aborts the process over such a sum in bfloat16.
    wide = leaf.dtype == jnp.bfloat16 and several_axes and jax.default_backend() == "cpu"
    total: jax.Array = lax.psum(leaf.astype(jnp.float32) if wide else leaf, AXIS, axis_index_groups=groups)
    return total.astype(leaf.dtype) if wide else total


def first_component(leaf: Leaf) -> Leaf:
    """Returns replica 0's component of a distributed value, anywhere; another value as it is."""
    if not isinstance(leaf, (PerReplica, Mirrored)):
        return leaf
    if traced_component(leaf) is None:
        return leaf.values[0]
    return traced_component(leaf) if isinstance(leaf, Mirrored) else first_replica(traced_component(leaf))


def first_replica(leaf: Leaf) -> Leaf:
    """Returns replica 0's value on every replica, inside of compiled code."""
    if isinstance(leaf, IndexedSlices):
        return with_arrays(leaf, [first_replica(array) for array in dynamic_arrays(leaf)])
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(first_replica(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    only = jnp.where(lax.axis_index(AXIS) == 0, leaf, jnp.zeros_like(leaf))
    return local_sum(only).astype(leaf.dtype)  # the sum of booleans is an integer


def local_gather(leaf: jax.Array, axis: int, groups: Sequence[Sequence[int]] | None = None) -> jax.Array:
    """Returns the concatenation over the replicas, or over those of each group by itself."""
    axis = gather_axis(axis, leaf.ndim)
    if lax.axis_size(AXIS) == 1:
        return leaf
    if (gathers := frames.frame().gathers) is not None:
        of_all: jax.Array = gathers(leaf, axis)
        return of_all
    return gathered_alike(leaf, axis, groups)


def gathered_alike(leaf: jax.Array, axis: int, groups: Sequence[Sequence[int]] | None = None) -> jax.Array:
    """Returns the concatenation of values of one shape; an empty one as it is, since XLA does not gather it."""
    if leaf.shape[axis] == 0:
        return leaf
    of_all: jax.Array = lax.all_gather(leaf, AXIS, axis=axis, tiled=True, axis_index_groups=groups)
    return of_all


def reduce_dense(
    op: ReduceOp,
    leaves: Sequence[jax.Array],
    size: int,
    add_up: Callable[[list[jax.Array]], Sequence[jax.Array]],
    narrow: np.dtype | None = None,
) -> list[jax.Array]:
    """Returns the sums or means over the replicas of one replica's dense leaves.

    `add_up` gets those that are wider than `narrow` in that dtype.
    """
    for leaf in leaves:
        check_numeric(leaf.dtype)
    narrow_ones = [size > 1 and is_wider(leaf.dtype, narrow) for leaf in leaves]
    sent = [narrowed(op, leaf, size, narrow) if narrows else leaf for leaf, narrows in zip(leaves, narrow_ones)]
    results = []
    for leaf, total, narrows in zip(leaves, add_up(sent) if sent else (), narrow_ones):
        if narrows:
            results.append(total.astype(leaf.dtype))
        else:
            results.append(divided(total, size, leaf.dtype) if op is ReduceOp.MEAN else total)
    return results


def local_reduce(
    op: ReduceOp,
    leaves: Sequence[Reducible],
    size: int,
    add_up: Callable[[list[jax.Array]], Sequence[jax.Array]],
    narrow: np.dtype | None = None,
) -> list[Reducible]:
    """Does as `reduce_dense` for leaves some of which may be sparse; those are gathered."""

    def gathered(slices: IndexedSlices) -> IndexedSlices:
        values = slices.values / size if op is ReduceOp.MEAN else slices.values
        return IndexedSlices(local_gather(values, 0), local_gather(slices.indices, 0), slices.dense_shape)

    dense = iter(reduce_dense(op, [x for x in leaves if not isinstance(x, IndexedSlices)], size, add_up, narrow))
    return [gathered(leaf) if isinstance(leaf, IndexedSlices) else next(dense) for leaf in leaves]
