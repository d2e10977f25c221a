"""Lookups in tables of which each replica has a part, and sums of their gradients: rows are sent in place of tables.

The replicas tell each other which rows they look up. If each has some rows of the table, it answers with those that are
its own; if each has some columns, with its columns of all rows. A gradient comes back in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._base import jax_internals
from replicax._base.jaxprs import Atom, kind_of
from replicax._collectives import sharding
from replicax._values import AXIS, Kind, ReplicaMesh


def is_worthwhile(eqn: jex.JaxprEqn, axis: int, count: int) -> bool:
    """Returns whether an equation looks up rows that are fewer bytes to send than the table.

    Args:
        eqn: any equation.
        axis: along which each replica has a part of its first operand.
        count: the number of replicas.
    """
    if eqn.primitive.name != "gather" or eqn.params["dimension_numbers"].operand_batching_dims:
        return False
    table, rows, size = kind_of(eqn.invars[0]), kind_of(eqn.outvars[0]), eqn.params["slice_sizes"][axis]
    if not jnp.issubdtype(table.dtype, jnp.number):
        return False
    numbered = axis in eqn.params["dimension_numbers"].start_index_map
    if numbered and size == 1:
        return bool(rows.size * count < table.size)
    return bool(_is_all(size, table.shape[axis], numbered, eqn.params["mode"]) and rows.size < table.size)


def _is_all(size: int, length: int, numbered: bool, mode: lax.GatherScatterMode) -> bool:
    """Returns whether slices span an axis. If ids say where they begin, that is 0, unless such slices are dropped."""
    return size == length and not (numbered and mode == lax.GatherScatterMode.FILL_OR_DROP)


def look_up(eqn: jex.JaxprEqn, part: jax.Array, axis: int, ids: jax.Array, mesh: ReplicaMesh) -> jax.Array:
    """Returns the result of a lookup, computed from parts of the table.

    Args:
        eqn: the lookup.
        part, axis: this replica's part, and the axis along which the table is divided.
        ids: the second operands of all replicas.
        mesh: the replicas'.
    """
    numbers, sizes, mode = (eqn.params[name] for name in ("dimension_numbers", "slice_sizes", "mode"))
    shape: Sequence[int] = kind_of(eqn.invars[0]).shape
    fill: float | None = eqn.params["fill_value"]
    offsets = tuple(d + 1 for d in numbers.offset_dims)
    of_all = numbers._replace(offset_dims=offsets)
    if sizes[axis] == shape[axis]:
        sizes = tuple(part.shape[axis] if d == axis else size for d, size in enumerate(sizes))
        rows = lax.gather(part, ids, of_all, sizes, mode=mode, fill_value=fill)
        kept = [d for d in range(part.ndim) if d not in numbers.collapsed_slice_dims]
        columns: jax.Array = lax.all_to_all(rows, AXIS, 0, offsets[kept.index(axis)], tiled=True)
        return columns[0]
    place, length = numbers.start_index_map.index(axis), part.shape[axis]
    if mode != lax.GatherScatterMode.FILL_OR_DROP:  # XLA clips also those that are promised to be in the table
        ids = _clipped(ids, numbers.start_index_map, shape, sizes)
    numbered = ids[..., place]
    local = numbered - lax.axis_index(AXIS) * length
    own = (local >= 0) & (local < length)
    rows = lax.gather(
        part, ids.at[..., place].set(jnp.clip(local, 0, length - 1)), of_all, sizes, mode=mode, fill_value=fill
    )
    rows = jnp.where(jnp.expand_dims(own, offsets), rows, jnp.zeros_like(rows))
    found = sharding.scattered(rows, 0, mesh)[0]
    if mode != lax.GatherScatterMode.FILL_OR_DROP:
        return found
    mine = lax.dynamic_index_in_dim(numbered, lax.axis_index(AXIS), keepdims=False)
    exists = jnp.expand_dims((mine >= 0) & (mine < shape[axis]), numbers.offset_dims)
    return jnp.where(exists, found, _fill_value(found.dtype) if fill is None else fill)


def _clipped(ids: jax.Array, dims: Sequence[int], shape: Sequence[int], sizes: Sequence[int]) -> jax.Array:
    """Returns ids so that whole slices of these sizes are in the table."""
    return jnp.clip(ids, 0, np.array([shape[d] - sizes[d] for d in dims], ids.dtype))


def _fill_value(dtype: np.dtype) -> float:
    """Returns what JAX gives for rows that are not in the table."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    return np.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.signedinteger) else np.iinfo(dtype).max


def of_all_replicas(ids: jax.Array) -> jax.Array:
    """Returns the ids that all replicas look up; of a dtype in which they can be shifted."""
    if not jnp.issubdtype(ids.dtype, jnp.signedinteger) or ids.dtype.itemsize < 4:
        ids = ids.astype(jnp.int32)
    every: jax.Array = lax.all_gather(ids, AXIS)
    return every


class Rows(NamedTuple):
    """What is added to rows of an array of zeros: the equation that does it (`scatter-add`), and its operands."""

    eqn: jex.JaxprEqn
    ids: Atom
    updates: jax.Array

    def array(self, ids: jax.Array) -> jax.Array:
        """Returns the whole array."""
        shape, params = kind_of(self.eqn.outvars[0]).shape, self.eqn.params
        return _added(shape, ids, self.updates, params["dimension_numbers"], params["mode"])


def _added(
    shape: Sequence[int],
    ids: jax.Array,
    updates: jax.Array,
    numbers: lax.ScatterDimensionNumbers,
    mode: lax.GatherScatterMode,
) -> jax.Array:
    """Returns an array of zeros to which rows are added, in 32 bits at least.

    The program may cast the sums of rows to a narrower dtype, where here the rows are cast: many additions to one row
    in bfloat16 would stop growing at 256 times what is added.
    """
    zeros = jnp.zeros(shape, jnp.promote_types(updates.dtype, jnp.float32))
    total: jax.Array = lax.scatter_add(zeros, ids, updates.astype(zeros.dtype), numbers, mode=mode)
    return total.astype(updates.dtype)


Gradients: TypeAlias = Mapping[jex.Var, Sequence[jex.JaxprEqn]]
SCALED = frozenset({"mul", "div", "neg", "convert_element_type", "copy", "copy_p"})  # of rows, and perhaps a number
ADDED = frozenset({"add", "add_any"})


def zeros_of(jaxpr: jex.Jaxpr) -> set[jex.Var]:
    """Returns the variables of a jaxpr that are arrays of zeros."""
    made = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "broadcast_in_dim")
    return {e.outvars[0] for e in made if isinstance(e.invars[0], jex.Literal) and np.all(e.invars[0].val == 0)}


def gradients(jaxpr: jex.Jaxpr) -> Gradients:
    """Returns the variables that are sums of `scatter-add`s to zeros, times numbers, with those equations."""
    found: dict[jex.Var, Sequence[jex.JaxprEqn]] = {}
    zeros = zeros_of(jaxpr)
    for eqn in jaxpr.eqns:
        if len(eqn.outvars) != 1:
            continue
        (out,), name = eqn.outvars, eqn.primitive.name
        if name == "scatter-add" and not eqn.params["dimension_numbers"].operand_batching_dims:
            if (
                isinstance(eqn.invars[0], jex.Var)
                and eqn.invars[0] in zeros
                and jnp.issubdtype(kind_of(out).dtype, jnp.inexact)
            ):
                found[out] = [eqn]
        elif name in SCALED or name in ADDED:
            first, *others = eqn.invars if name != "mul" else sorted(eqn.invars, key=lambda x: -kind_of(x).ndim)
            if isinstance(first, jex.Literal) or first not in found:
                continue
            if name in ADDED:
                (other,) = others
                if isinstance(other, jex.Var) and other in found:
                    found[out] = [*found[first], *found[other]]
            elif all(kind_of(x).ndim == 0 for x in others) and jnp.issubdtype(kind_of(out).dtype, jnp.inexact):
                found[out] = found[first]
    return found


def scaled(eqn: jex.JaxprEqn, operands: Sequence[Sequence[Rows | jax.Array]]) -> list[Rows | jax.Array]:
    """Computes an equation of an array, given by its terms, and perhaps a number; returns the terms of the result."""
    at = max(range(len(operands)), key=lambda i: kind_of(eqn.invars[i]).ndim)

    def of_array(array: jax.Array) -> jax.Array:
        others = [array if i == at else operand[0] for i, operand in enumerate(operands)]
        result: jax.Array
        (result,) = jax_internals.rebind(eqn, eqn.params, others)
        return result

    return [x._replace(updates=of_array(x.updates)) if isinstance(x, Rows) else of_array(x) for x in operands[at]]


def is_sum_worthwhile(eqns: Sequence[jex.JaxprEqn], axis: int, count: int) -> bool:
    """Returns whether rows, which these `scatter-add`s add, are fewer bytes to send than the array.

    Of the sum over the replicas, of which there are `count`, parts along an axis are wanted.
    """
    sent, table = 0, kind_of(eqns[0].outvars[0])
    for eqn in eqns:
        numbers, updates = eqn.params["dimension_numbers"], kind_of(eqn.invars[2])
        size, numbered = _window(eqn)[axis], axis in numbers.scatter_dims_to_operand_dims
        if numbered and size == 1:
            sent += updates.size * count
        elif _is_all(size, table.shape[axis], numbered, eqn.params["mode"]):
            sent += updates.size
        else:
            return False
    return bool(sent < table.size)


def _window(eqn: jex.JaxprEqn) -> list[int]:
    """Returns the size along each dimension of the array of what a `scatter-add` adds at one place."""
    numbers, updates = eqn.params["dimension_numbers"], kind_of(eqn.invars[2])
    sizes = iter([updates.shape[d] for d in numbers.update_window_dims])
    return [1 if d in numbers.inserted_window_dims else next(sizes) for d in range(kind_of(eqn.outvars[0]).ndim)]


def part_of_sum(rows: Rows, ids: jax.Array, kind: Kind, axis: int) -> jax.Array:
    """Returns this replica's part, along an axis, of the sum over the replicas of what is added to rows.

    Args:
        rows: this replica's.
        ids: those of all replicas.
        kind: the shape and dtype of the whole array.
        axis: the axis.
    """
    numbers, mode, updates = rows.eqn.params["dimension_numbers"], rows.eqn.params["mode"], rows.updates
    shape, windows = list(kind.shape), _window(rows.eqn)
    shape[axis] //= lax.axis_size(AXIS)
    of_all = numbers._replace(update_window_dims=tuple(d + 1 for d in numbers.update_window_dims))
    if mode == lax.GatherScatterMode.CLIP:
        ids = _clipped(ids, numbers.scatter_dims_to_operand_dims, kind.shape, windows)
    if windows[axis] < kind.shape[axis]:
        place = numbers.scatter_dims_to_operand_dims.index(axis)
        local = ids[..., place] - lax.axis_index(AXIS) * shape[axis]
        ids = ids.at[..., place].set(jnp.where(local < 0, shape[axis], local))  # what is not its own is out of bounds
        updates = lax.all_gather(updates, AXIS)
    else:
        kept = [d for d in range(len(shape)) if d not in numbers.inserted_window_dims]
        window = numbers.update_window_dims[kept.index(axis)]
        updates = lax.all_to_all(updates[None], AXIS, window + 1, 0, tiled=True)
    return _added(shape, ids, updates, of_all, lax.GatherScatterMode.FILL_OR_DROP)
