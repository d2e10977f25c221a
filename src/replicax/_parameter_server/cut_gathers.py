"""Lookups of whole rows of a leaf: a worker asks for the rows in place of the whole leaf."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax._parameter_server.cut_graph import Op, Value, same_value
from replicax._parameter_server.cut_rules import widened

_LARGEST = 2**31 - 1  # the last id of 32 bits
_WORTH = 1024  # bytes: for fewer, ids are not computed beforehand


@dataclass(frozen=True)
class Lookup:
    """An operation that takes whole rows of a leaf.

    Args:
        leaf: the number of the leaf.
        op: the operation.
        source: what the ids come from; None where they are constants.
        shape: the shape of the ids.
        ids: returns valid ids of the source's array.
        finished: returns the operation's result of the rows and the source's array.
    """

    leaf: int
    op: Op
    source: Value | None
    shape: tuple[int, ...]
    ids: Callable[[Any], Any]
    finished: Callable[[Any, Any], Any]

    @property
    def key(self) -> tuple[object, ...]:
        """Tells rows apart: lookups of the same rows share a key."""
        return self.leaf, self.op.name, self.shape, self.op if self.source is None else self.source

    @property
    def needs(self) -> list[Value]:
        """What the rows are asked for with."""
        return [] if self.source is None else [self.source]


def lookup_of(op: Op, leaf_of: Mapping[Value, int]) -> Lookup | None:
    """Returns an operation as a lookup, None where it is none, or where the ids depend on leaves of variables."""
    if op.name not in ("gather", "dynamic_slice", "slice") or len(op.outputs) != 1:
        return None
    table, converted = same_value(op.inputs[0]), list[Op]()
    while table.op is not None and table.op.name == "convert_element_type":
        converted.insert(0, table.op)
        table = same_value(table.op.inputs[0])
    if jax.dtypes.issubdtype(table.aval.dtype, jax.dtypes.prng_key):
        return None  # NumPy has no such rows
    if table not in leaf_of or not table.aval.shape or not 0 < table.aval.shape[0] <= _LARGEST:
        return None
    made = {"gather": _gather, "dynamic_slice": _dynamic_slice, "slice": _slice}[op.name](op)
    if made is None or not all(value.leaves == 0 and value.pure for value in op.inputs[1:]):
        return None
    source, shape, ids, masked = made

    def finished(rows: Any, given: Any) -> Any:
        for convert in converted:
            (rows,) = convert.compute([rows])
        return masked(rows, given)

    return Lookup(leaf_of[table], op, source, shape, ids, finished)


_Made = tuple[Value | None, tuple[int, ...], Callable[[Any], Any], Callable[[Any, Any], Any]]


def _gather(op: Op) -> _Made | None:
    (table, ids), params = op.inputs, op.eqn.params
    d, size, dtype = params["dimension_numbers"], table.aval.shape[0], op.outputs[0].aval.dtype
    many = ids.aval.ndim - 1
    if not (
        tuple(d.start_index_map) == tuple(d.collapsed_slice_dims) == (0,)
        and not d.operand_batching_dims
        and ids.aval.shape[-1] == 1
        and tuple(params["slice_sizes"]) == (1, *table.aval.shape[1:])
        and tuple(d.offset_dims) == tuple(range(many, many + table.aval.ndim - 1))
        and jnp.issubdtype(dtype, jnp.number)
    ):
        return None
    fills = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP

    def masked(rows: Any, given: Any) -> Any:
        if not fills:
            return rows
        fill = params["fill_value"] if params["fill_value"] is not None else _fill(dtype)
        given = widened(given[..., 0])
        valid = (given >= 0) & (given < size)
        return jnp.where(valid[(..., *[None] * (rows.ndim - many))], rows, jnp.asarray(fill, dtype))

    def valid_ids(given: Any) -> Any:
        return jnp.clip(widened(given[..., 0]), 0, size - 1).astype(jnp.int32)

    return ids, ids.aval.shape[:-1], valid_ids, masked


def _fill(dtype: Any) -> Any:
    """Returns what JAX fills in for rows that there are not."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    limits = jnp.iinfo(dtype)
    return limits.min if jnp.issubdtype(dtype, jnp.signedinteger) else limits.max


def _dynamic_slice(op: Op) -> _Made | None:
    sizes, shape = tuple(op.eqn.params["slice_sizes"]), op.inputs[0].aval.shape
    if sizes[1:] != shape[1:] or len(op.inputs) != 1 + len(shape):
        return None
    count, last = sizes[0], shape[0] - sizes[0]

    def ids(start: Any) -> Any:
        return jnp.clip(widened(start), 0, last).astype(jnp.int32) + jnp.arange(count, dtype=jnp.int32)

    start = op.inputs[1]
    if start.is_constant:
        array = start.whole_constant()
        return None, (count,), lambda _: ids(jnp.asarray(array)), lambda rows, _: rows
    return start, (count,), ids, lambda rows, _: rows


def _slice(op: Op) -> _Made | None:
    params, shape = op.eqn.params, op.inputs[0].aval.shape
    steps = params["strides"] or (1,) * len(shape)
    whole = all(start == 0 for start in params["start_indices"][1:]) and tuple(params["limit_indices"][1:]) == shape[1:]
    if not whole or any(step != 1 for step in steps[1:]):
        return None
    start, stop, step = params["start_indices"][0], params["limit_indices"][0], steps[0]
    count = len(range(start, stop, step))
    return None, (count,), lambda _: jnp.arange(start, stop, step, dtype=jnp.int32), lambda rows, _: rows


def pays(lookups: Sequence[Lookup], table: Value) -> bool:
    """Returns whether the rows of some lookups are clearly less than the whole table."""
    row = max(1, table.nbytes // max(1, table.aval.shape[0]))
    counts = {lookup.key: math.prod(lookup.shape) for lookup in lookups}
    return sum(counts.values()) * (row + 4) + _WORTH < table.nbytes
