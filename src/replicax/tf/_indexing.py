"""Operations that select, scatter, sort and search elements."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from replicax.tf._core import InvalidArgumentError, as_dtype, as_strings
from replicax.tf._host import jnp, lax
from replicax.tf._math import clip_by_norm
from replicax.tf._op_tables import largest, pair, smallest, take
from replicax.tf._operations import on_values, operations
from replicax.tf._ops import (
    as_array,
    as_axis,
    as_int,
    as_shape,
    axes_of,
    check_range,
    convert_to_tensor,
    known,
    string_tensor,
)
from replicax.tf._types import DTypeLike, ShapeLike, TensorLike

_WEIGHTS = "In compiled code, use tf.where(mask, x, 0) or weights of 0 and 1, which keep the shape."


class Unique(NamedTuple):
    """The distinct elements, and for each element its index among them."""

    y: jax.Array
    idx: jax.Array


class UniqueWithCounts(NamedTuple):
    """The distinct elements, for each element its index among them, and the count of each distinct element."""

    y: jax.Array
    idx: jax.Array
    count: Any  # a method of tuples has this name


def gather(
    params: TensorLike,
    indices: TensorLike,
    validate_indices: object = None,
    axis: TensorLike = None,
    batch_dims: int = 0,
    name: str | None = None,
) -> jax.Array:
    """Returns the parts of `params` at `indices` along `axis`, by default the first one after the batch dimensions."""
    params, indices = convert_to_tensor(params), convert_to_tensor(indices)
    batch_dims = batch_dims + indices.ndim if batch_dims < 0 else batch_dims
    along = batch_dims if axis is None else axes_of(params, axis)[0]
    check_range(indices, params.shape[along], "gather")
    if params.dtype == np.dtype(object) and not batch_dims:  # strings, for which JAX has no arrays
        places = known(indices, "The places of strings", "Use it outside of compiled code.")
        return string_tensor(np.take(np.asarray(params), places, along))

    take_all = functools.partial(take, axis=along - batch_dims, mode="fill", fill_value=0)
    for _ in builtins.range(batch_dims):
        take_all = jax.vmap(take_all)
    return take_all(params, indices)


def gather_nd(
    params: TensorLike, indices: TensorLike, batch_dims: int = 0, name: str | None = None, bad_indices_policy: str = ""
) -> jax.Array:
    """Returns the elements or slices at `indices`, whose last dimension indexes the first dimensions of `params`."""
    params, indices = convert_to_tensor(params), convert_to_tensor(indices)
    for i in builtins.range(indices.shape[-1]):
        check_range(indices[..., i], params.shape[batch_dims + i], "gather_nd")

    def take(params: jax.Array, indices: jax.Array) -> jax.Array:
        return params.at[_places(indices)].get(mode="fill", fill_value=0)

    for _ in builtins.range(batch_dims):
        take = jax.vmap(take)
    return take(params, indices)


def _places(indices: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(indices[..., i] for i in builtins.range(indices.shape[-1]))


def _scatter(method: str, tensor: TensorLike, indices: TensorLike, updates: TensorLike) -> jax.Array:
    tensor, indices = convert_to_tensor(tensor), convert_to_tensor(indices)
    for i in builtins.range(indices.shape[-1]):
        check_range(indices[..., i], tensor.shape[i], "scatter")
    updates = convert_to_tensor(updates, None if hasattr(updates, "dtype") else tensor.dtype)
    result: jax.Array = getattr(tensor.at[_places(indices)], method)(updates)
    return result


def tensor_scatter_nd_update(
    tensor: TensorLike, indices: TensorLike, updates: TensorLike, name: str | None = None
) -> jax.Array:
    """Returns the tensor with `updates` at `indices`."""
    return _scatter("set", tensor, indices, updates)


def _scattering(method: str, doc: str) -> Callable[..., jax.Array]:
    def op(
        tensor: TensorLike,
        indices: TensorLike,
        updates: TensorLike,
        bad_indices_policy: str = "",
        name: str | None = None,
    ) -> jax.Array:
        return _scatter(method, tensor, indices, updates)

    op.__doc__ = doc
    return op


tensor_scatter_nd_add = _scattering("add", "Returns the tensor with `updates` added at `indices`.")
tensor_scatter_nd_sub = _scattering("subtract", "Returns the tensor with `updates` subtracted at `indices`.")
tensor_scatter_nd_max = _scattering(
    "max", "Returns the tensor with the larger of its elements and `updates` at `indices`."
)
tensor_scatter_nd_min = _scattering(
    "min", "Returns the tensor with the smaller of its elements and `updates` at `indices`."
)


def scatter_nd(
    indices: TensorLike,
    updates: TensorLike,
    shape: ShapeLike,
    bad_indices_policy: str = "",
    name: str | None = None,
) -> jax.Array:
    """Returns zeros of a shape, with `updates` added at `indices`."""
    updates = convert_to_tensor(updates)
    return tensor_scatter_nd_add(jnp.zeros(as_shape(shape), updates.dtype), indices, updates)


def boolean_mask(
    tensor: TensorLike, mask: TensorLike, axis: TensorLike = None, name: str = "boolean_mask"
) -> jax.Array:
    """Returns the parts for which the mask is true; in compiled code the mask must be known while tracing."""
    tensor = convert_to_tensor(tensor)
    array = known(convert_to_tensor(mask), "The mask of tf.boolean_mask", _WEIGHTS)
    if array.ndim == 0:
        raise ValueError("mask cannot be scalar.")
    (first,) = axes_of(tensor, 0 if axis is None else axis)
    if tensor.shape[first : first + array.ndim] != array.shape:
        raise ValueError(
            f"Shapes {tensor.shape[first:]} and {array.shape} are incompatible: the mask's must come first."
        )
    return tensor[(builtins.slice(None),) * first + np.nonzero(array)]


@on_values(3)
def where(condition: TensorLike, x: TensorLike = None, y: TensorLike = None, name: str | None = None) -> jax.Array:
    """Returns `x` where the condition is true, else `y`; without both, the indices `[n, rank]` at which it is true."""
    if (x is None) != (y is None):
        raise ValueError("x and y must both be non-None or both be None.")
    condition = convert_to_tensor(condition)
    if x is None:
        instead = "In compiled code, use tf.where(condition, x, y), which keeps the shape."
        return as_array(np.argwhere(known(condition, "The condition of tf.where", instead)))
    return jnp.where(condition.astype(bool), *pair(x, y))


def _order(direction: str) -> bool:
    if direction not in ("ASCENDING", "DESCENDING"):
        raise ValueError(f'direction must be "ASCENDING" or "DESCENDING", got {direction!r}.')
    return direction == "DESCENDING"


def sort(values: TensorLike, axis: TensorLike = -1, direction: str = "ASCENDING", name: str | None = None) -> jax.Array:
    """Returns the elements sorted along an axis."""
    return jnp.sort(convert_to_tensor(values), axis=as_axis(axis), descending=_order(direction))


def argsort(
    values: TensorLike,
    axis: TensorLike = -1,
    direction: str = "ASCENDING",
    stable: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns the int32 indices that sort the elements along an axis. The sort is stable."""
    return jnp.argsort(convert_to_tensor(values), axis=as_axis(axis), descending=_order(direction)).astype(np.int32)


def _arg_extreme(
    compute: Callable[..., jax.Array], extreme: Callable[..., jax.Array], doc: str
) -> Callable[..., jax.Array]:
    def op(
        input: TensorLike, axis: TensorLike = None, output_type: DTypeLike = np.int64, name: str | None = None
    ) -> jax.Array:
        tensor = convert_to_tensor(input)
        (place,) = axes_of(tensor, 0 if axis is None else axis)
        if tensor.dtype in (
            np.int64,
            np.uint64,
            np.float64,
            np.bool_,
        ):  # `jnp.argmax` accepts these only if `jax_enable_x64` is on
            best = extreme(tensor.astype(np.int64) if tensor.dtype == np.bool_ else tensor, axis=place, keepdims=True)
            tensor, first = ((tensor == best) | (tensor != tensor)).astype(np.int32), lax.argmax
        else:
            first = compute
        return first(tensor, place, np.int32).astype(as_dtype(output_type))

    op.__doc__ = doc
    return op


argmax = _arg_extreme(lax.argmax, largest, "Returns the index of the largest element along `axis` (0 by default).")
argmin = _arg_extreme(lax.argmin, smallest, "Returns the index of the smallest element along `axis` (0 by default).")


def _uniques(x: TensorLike, out_idx: DTypeLike) -> tuple[Any, jax.Array, jax.Array]:
    array = known(convert_to_tensor(x), "The input of tf.unique", "Call it outside of compiled code.")
    if array.ndim != 1:
        raise InvalidArgumentError(f"unique expects a 1D vector, got shape {array.shape}.")
    values, first, inverse, counts = np.unique(array, True, True, True, equal_nan=False)
    order = np.argsort(first)  # TensorFlow keeps the order of first occurrence
    place = np.argsort(order)
    dtype = as_dtype(out_idx)
    ours = as_array if array.dtype != object else as_strings
    return ours(values[order]), as_array(place[inverse].astype(dtype)), as_array(counts[order].astype(dtype))


def unique(x: TensorLike, out_idx: DTypeLike = np.int32, name: str | None = None) -> Unique:
    """Returns the distinct elements of a vector in order of first occurrence, and for each element its index among
    them.
    """
    return Unique(*_uniques(x, out_idx)[:2])


def unique_with_counts(x: TensorLike, out_idx: DTypeLike = np.int32, name: str | None = None) -> UniqueWithCounts:
    """Returns the results of `unique`, and the count of each distinct element."""
    return UniqueWithCounts(*_uniques(x, out_idx))


def searchsorted(
    sorted_sequence: TensorLike,
    values: TensorLike,
    side: str = "left",
    out_type: DTypeLike = np.int32,
    name: str | None = None,
) -> jax.Array:
    """Returns the indices at which to insert values into sorted rows: `[..., n]` and `[..., m]` give `[..., m]`."""
    rows, wanted = pair(sorted_sequence, values)
    search: Callable[[jax.Array, jax.Array], jax.Array]
    search = lambda row, value: jnp.searchsorted(row, value, side=side)  # noqa: E731
    for _ in builtins.range(rows.ndim - 1):
        search = jax.vmap(search)
    return search(rows, wanted).astype(as_dtype(out_type))


def unravel_index(indices: TensorLike, dims: ShapeLike, name: str | None = None) -> jax.Array:
    """Returns the coordinates `[rank, ...]` of flat indices."""
    indices = convert_to_tensor(indices)
    return jnp.stack([x.astype(indices.dtype) for x in jnp.unravel_index(indices, as_shape(dims))])


def dynamic_partition(
    data: TensorLike, partitions: TensorLike, num_partitions: TensorLike, name: str | None = None
) -> list[jax.Array]:
    """Divides the rows of `data` by partition. Not in compiled code, since shapes depend on the partitions."""
    data = convert_to_tensor(data)
    groups = known(convert_to_tensor(partitions), "The partitions", "Use a mask for each partition.")
    return [data[np.nonzero(groups == i)] for i in builtins.range(as_int(num_partitions, "num_partitions"))]


def dynamic_stitch(indices: Sequence[TensorLike], data: Sequence[TensorLike], name: str | None = None) -> jax.Array:
    """Merges tensors: `data[m][i]` becomes row `indices[m][i]`; of several for one row, the last is used."""
    places = [
        known(convert_to_tensor(x), "The indices", "Use tf.tensor_scatter_nd_update.").reshape(-1) for x in indices
    ]
    parts = [convert_to_tensor(x) for x in data]
    ranks = [np.ndim(convert_to_tensor(x)) for x in indices]
    rows = jnp.concatenate([x.reshape((-1, *x.shape[rank:])) for x, rank in zip(parts, ranks)])
    where_from = np.zeros(builtins.max(int(p.max(initial=-1)) for p in places) + 1, np.int64)
    for number, place in enumerate(np.concatenate(places)):
        where_from[place] = number
    return rows[where_from]


def embedding_lookup(
    params: TensorLike, ids: TensorLike, max_norm: TensorLike = None, name: str | None = None
) -> jax.Array:
    """Returns the rows of a table, or of a list of tables, at `ids`, each scaled down to `max_norm` if that is
    given.
    """
    table = jnp.concatenate([convert_to_tensor(p) for p in params]) if isinstance(params, (list, tuple)) else params
    rows = gather(table, ids)
    if max_norm is None:
        return rows
    axes = tuple(builtins.range(jnp.ndim(convert_to_tensor(ids)), rows.ndim))
    result: jax.Array = clip_by_norm(rows, max_norm, axes)
    return result


operations(globals())
