"""Operations that select, scatter, sort and search elements."""

from __future__ import annotations

import builtins
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base.errors import InvalidArgumentError
from replicax._base.specs import as_dtype
from replicax._data.elements import as_strings
from replicax.tf._math import clip_by_norm
from replicax.tf._operations import operations
from replicax.tf._ops import (
    as_array,
    as_axis,
    as_int,
    as_shape,
    axes_of,
    check_range,
    convert_to_tensor,
    known,
    largest,
    pair,
    smallest,
)

_WEIGHTS = "In compiled code, use tf.where(mask, x, 0) or weights of 0 and 1, which keep the shape."


class Unique(NamedTuple):
    """The distinct elements, and for each element its index among them."""

    y: Any
    idx: Any


class UniqueWithCounts(NamedTuple):
    """The distinct elements, for each element its index among them, and the count of each distinct element."""

    y: Any
    idx: Any
    count: Any


def gather(
    params: Any,
    indices: Any,
    validate_indices: Any = None,
    axis: Any = None,
    batch_dims: int = 0,
    name: str | None = None,
) -> Any:
    """Returns the parts of `params` at `indices` along `axis`, by default the first one after the batch dimensions."""
    params, indices = convert_to_tensor(params), convert_to_tensor(indices)
    batch_dims = batch_dims + indices.ndim if batch_dims < 0 else batch_dims
    axis = batch_dims if axis is None else axes_of(params, axis)[0]
    check_range(indices, params.shape[axis], "gather")
    if isinstance(params, np.ndarray) and not batch_dims:  # strings, for which JAX has no arrays
        places = known(indices, "The places of strings", "Use it outside of compiled code.")
        return as_strings(np.take(np.asarray(params), places, axis))

    def take(params: Any, indices: Any) -> Any:
        return jnp.take(params, indices, axis=axis - batch_dims, mode="fill", fill_value=0)

    for _ in builtins.range(batch_dims):
        take = jax.vmap(take)
    return take(params, indices)


def gather_nd(
    params: Any, indices: Any, batch_dims: int = 0, name: str | None = None, bad_indices_policy: str = ""
) -> Any:
    """Returns the elements or slices at `indices`, whose last dimension indexes the first dimensions of `params`."""
    params, indices = convert_to_tensor(params), convert_to_tensor(indices)
    for i in builtins.range(indices.shape[-1]):
        check_range(indices[..., i], params.shape[batch_dims + i], "gather_nd")

    def take(params: Any, indices: Any) -> Any:
        return params.at[_places(indices)].get(mode="fill", fill_value=0)

    for _ in builtins.range(batch_dims):
        take = jax.vmap(take)
    return take(params, indices)


def _places(indices: Any) -> tuple[Any, ...]:
    return tuple(indices[..., i] for i in builtins.range(indices.shape[-1]))


def _scatter(method: str, tensor: Any, indices: Any, updates: Any) -> Any:
    tensor, indices = convert_to_tensor(tensor), convert_to_tensor(indices)
    for i in builtins.range(indices.shape[-1]):
        check_range(indices[..., i], tensor.shape[i], "scatter")
    updates = convert_to_tensor(updates, None if hasattr(updates, "dtype") else tensor.dtype)
    return getattr(tensor.at[_places(indices)], method)(updates)


def tensor_scatter_nd_update(tensor: Any, indices: Any, updates: Any, name: str | None = None) -> Any:
    """Returns the tensor with `updates` at `indices`."""
    return _scatter("set", tensor, indices, updates)


def _scattering(method: str, doc: str) -> Any:
    def op(tensor: Any, indices: Any, updates: Any, bad_indices_policy: str = "", name: str | None = None) -> Any:
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


def scatter_nd(indices: Any, updates: Any, shape: Any, bad_indices_policy: str = "", name: str | None = None) -> Any:
    """Returns zeros of a shape, with `updates` added at `indices`."""
    updates = convert_to_tensor(updates)
    return tensor_scatter_nd_add(jnp.zeros(as_shape(shape), updates.dtype), indices, updates)


def boolean_mask(tensor: Any, mask: Any, axis: Any = None, name: str = "boolean_mask") -> Any:
    """Returns the parts for which the mask is true; in compiled code the mask must be known while tracing."""
    tensor = convert_to_tensor(tensor)
    array = known(convert_to_tensor(mask), "The mask of tf.boolean_mask", _WEIGHTS)
    if array.ndim == 0:
        raise ValueError("mask cannot be scalar.")
    (axis,) = axes_of(tensor, 0 if axis is None else axis)
    if tensor.shape[axis : axis + array.ndim] != array.shape:
        raise ValueError(
            f"Shapes {tensor.shape[axis:]} and {array.shape} are incompatible: the mask's must come first."
        )
    return tensor[(builtins.slice(None),) * axis + np.nonzero(array)]


def where(condition: Any, x: Any = None, y: Any = None, name: str | None = None) -> Any:
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


def sort(values: Any, axis: int = -1, direction: str = "ASCENDING", name: str | None = None) -> Any:
    """Returns the elements sorted along an axis."""
    return jnp.sort(convert_to_tensor(values), axis=as_axis(axis), descending=_order(direction))


def argsort(
    values: Any, axis: int = -1, direction: str = "ASCENDING", stable: bool = False, name: str | None = None
) -> Any:
    """Returns the int32 indices that sort the elements along an axis. The sort is stable."""
    return jnp.argsort(convert_to_tensor(values), axis=as_axis(axis), descending=_order(direction)).astype(np.int32)


def _arg_extreme(compute: Any, extreme: Any, doc: str) -> Any:
    def op(input: Any, axis: Any = None, output_type: Any = np.int64, name: str | None = None) -> Any:
        tensor = convert_to_tensor(input)
        (axis,) = axes_of(tensor, 0 if axis is None else axis)
        if tensor.dtype in (
            np.int64,
            np.uint64,
            np.float64,
            np.bool_,
        ):  # `jnp.argmax` accepts these only if `jax_enable_x64` is on
            best = extreme(tensor.astype(np.int64) if tensor.dtype == np.bool_ else tensor, axis=axis, keepdims=True)
            tensor, first = ((tensor == best) | (tensor != tensor)).astype(np.int32), jax.lax.argmax
        else:
            first = compute
        return first(tensor, axis, np.int32).astype(as_dtype(output_type))

    op.__doc__ = doc
    return op


argmax = _arg_extreme(jax.lax.argmax, largest, "Returns the index of the largest element along `axis` (0 by default).")
argmin = _arg_extreme(
    jax.lax.argmin, smallest, "Returns the index of the smallest element along `axis` (0 by default)."
)


def _uniques(x: Any, out_idx: Any) -> tuple[Any, Any, Any]:
    array = known(convert_to_tensor(x), "The input of tf.unique", "Call it outside of compiled code.")
    if array.ndim != 1:
        raise InvalidArgumentError(f"unique expects a 1D vector, got shape {array.shape}.")
    values, first, inverse, counts = np.unique(array, True, True, True, equal_nan=False)
    order = np.argsort(first)  # TensorFlow keeps the order of first occurrence
    place = np.argsort(order)
    dtype = as_dtype(out_idx)
    ours = as_array if array.dtype != object else np.asarray
    return ours(values[order]), as_array(place[inverse].astype(dtype)), as_array(counts[order].astype(dtype))


def unique(x: Any, out_idx: Any = np.int32, name: str | None = None) -> Unique:
    """Returns the distinct elements of a vector in order of first occurrence, and for each element its index among
    them.
    """
    return Unique(*_uniques(x, out_idx)[:2])


def unique_with_counts(x: Any, out_idx: Any = np.int32, name: str | None = None) -> UniqueWithCounts:
    """Returns the results of `unique`, and the count of each distinct element."""
    return UniqueWithCounts(*_uniques(x, out_idx))


def searchsorted(
    sorted_sequence: Any, values: Any, side: str = "left", out_type: Any = np.int32, name: str | None = None
) -> Any:
    """Returns the indices at which to insert values into sorted rows: `[..., n]` and `[..., m]` give `[..., m]`."""
    rows, values = pair(sorted_sequence, values)
    search = lambda row, value: jnp.searchsorted(row, value, side=side)  # noqa: E731
    for _ in builtins.range(rows.ndim - 1):
        search = jax.vmap(search)
    return search(rows, values).astype(as_dtype(out_type))


def unravel_index(indices: Any, dims: Any, name: str | None = None) -> Any:
    """Returns the coordinates `[rank, ...]` of flat indices."""
    indices = convert_to_tensor(indices)
    return jnp.stack([x.astype(indices.dtype) for x in jnp.unravel_index(indices, as_shape(dims))])


def dynamic_partition(data: Any, partitions: Any, num_partitions: int, name: str | None = None) -> list[Any]:
    """Divides the rows of `data` by partition. Not in compiled code, since shapes depend on the partitions."""
    data = convert_to_tensor(data)
    groups = known(convert_to_tensor(partitions), "The partitions", "Use a mask for each partition.")
    return [data[np.nonzero(groups == i)] for i in builtins.range(as_int(num_partitions, "num_partitions"))]


def dynamic_stitch(indices: Any, data: Any, name: str | None = None) -> Any:
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


def embedding_lookup(params: Any, ids: Any, max_norm: Any = None, name: str | None = None) -> Any:
    """Returns the rows of a table, or of a list of tables, at `ids`, each scaled down to `max_norm` if that is
    given.
    """
    table = jnp.concatenate([convert_to_tensor(p) for p in params]) if isinstance(params, (list, tuple)) else params
    rows = gather(table, ids)
    if max_norm is None:
        return rows
    axes = tuple(builtins.range(jnp.ndim(convert_to_tensor(ids)), rows.ndim))
    return clip_by_norm(rows, max_norm, axes)


operations(globals())
