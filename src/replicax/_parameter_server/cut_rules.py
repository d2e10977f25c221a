"""What a parameter server may compute, and how it does so for some rows of an array.

A *node* is a value as a server has it: whole, or some of its rows along axis 0, as those of a sharded variable that lie
there. A rule says which nodes an equation needs for a node of its result, and computes it of them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._base.jaxprs import AnyJaxpr, jaxprs_in
from replicax._parameter_server.cut_graph import Op, Value, is_pure_branch
from replicax._passes.primitives import COLLECTIVES, ELEMENTWISE, LOCAL_OF_AXES, REDUCTIONS, SCATTERS

SMALL = 1024  # bytes: up to here a server may do any operation on values that need nothing from a worker


class Rows(NamedTuple):
    """Rows along axis 0: those from `start` up to `stop` of `size`."""

    size: int
    start: int
    stop: int

    @property
    def many(self) -> int:
        """The number of these rows."""
        return self.stop - self.start


class Node(NamedTuple):
    """A value on a server.

    Args:
        value: the value.
        rows: which of its rows, None for all.
        pairs: whether it stands for what a scatter changes these rows by, as pairs of ids and rows.
    """

    value: Value
    rows: Rows | None = None
    pairs: bool = False


class Kind(enum.Enum):
    """Why a server may do an operation."""

    LIGHT = "element by element, or moves none"
    REDUCTION = "reduces what a server has"
    SCATTER = "changes some elements"
    LOOKUP = "takes some elements"
    SMALL = "small, and needs nothing from a worker"


class Step(NamedTuple):
    """An operation as a server does it.

    Args:
        kind: why it may.
        op: the equation.
        operands: what it needs.
        compute: returns all outputs of the equation for arrays in place of the operands.
    """

    kind: Kind
    op: Op
    operands: tuple[Node, ...]
    compute: Callable[[Sequence[Any]], list[Any]]


_LIGHT = ELEMENTWISE | {"broadcast_in_dim", "reshape", "squeeze", "copy_p", "iota", "transpose"}


def step_of(node: Node) -> Step | None:
    """Returns how a server computes a node, None where it cannot."""
    op = node.value.op
    if op is None or op.calls or node.pairs:
        return None
    return _whole(op) if node.rows is None else _rows(op, node.rows)


def _whole(op: Op) -> Step | None:
    operands = tuple(Node(value) for value in op.inputs)
    kind: Kind | None = None
    if op.name in _LIGHT:
        kind = Kind.LIGHT
    elif op.name in SCATTERS:
        kind = Kind.SCATTER
    elif op.name in ("gather", "dynamic_slice"):
        kind = Kind.LOOKUP
    elif op.name in REDUCTIONS or _is_product_of_all(op):
        kind = Kind.REDUCTION
    elif _is_small(op):
        kind = Kind.SMALL
    return None if kind is None else Step(kind, op, operands, op.compute)


def _is_product_of_all(op: Op) -> bool:
    """Returns whether an operation is the sum of the products of all elements of two arrays."""
    if op.name != "dot_general":
        return False
    (left, right), _ = op.eqn.params["dimension_numbers"]
    return tuple(left) == tuple(right) == tuple(range(op.inputs[0].aval.ndim)) and op.outputs[0].aval.shape == ()


def is_small(op: Op) -> bool:
    """Returns whether all operands and results are small."""
    return all(0 < value.nbytes <= SMALL or 0 in value.aval.shape for value in (*op.inputs, *op.outputs))


def _is_small(op: Op) -> bool:
    if not is_small(op) or op.name in COLLECTIVES | LOCAL_OF_AXES | {"ffi_call"}:
        return False
    return is_pure_branch(op.eqn) or not any(isinstance(x, AnyJaxpr) for x in jaxprs_in([*op.eqn.params.values()]))


# For rows: the shapes in an equation's parameters become those of the rows.


def _rows(op: Op, rows: Rows) -> Step | None:
    if len(op.outputs) != 1 or op.outputs[0].aval.shape[:1] != (rows.size,):
        return None
    if op.name in ELEMENTWISE or op.name == "copy_p":
        return _elementwise(op, rows)
    if op.name == "broadcast_in_dim":
        return _broadcast(op, rows)
    if op.name in SCATTERS:
        return _scatter(op, rows)
    if op.name == "iota":
        return _iota(op, rows)
    if op.inputs[0].aval.shape[:1] != (rows.size,) or len(op.inputs) != 1:
        return None
    params, operands = dict(op.eqn.params), (Node(op.inputs[0], rows),)
    if op.name in REDUCTIONS:
        return Step(Kind.REDUCTION, op, operands, op.compute) if 0 not in params["axes"] else None
    if op.name == "reshape" and params["dimensions"] is None:
        params["new_sizes"] = (rows.many, *params["new_sizes"][1:])
    elif not (
        (op.name == "squeeze" and 0 not in params["dimensions"])
        or (op.name == "transpose" and params["permutation"][0] == 0)
    ):
        return None
    return Step(Kind.LIGHT, op, operands, lambda arrays: op.compute(arrays, params))


def _elementwise(op: Op, rows: Rows) -> Step | None:
    operands = []
    for value in op.inputs:
        shape = value.aval.shape
        if shape and shape[0] not in (rows.size, 1):
            return None
        operands.append(Node(value, rows if shape and shape[0] == rows.size else None))  # JAX repeats single rows
    return Step(Kind.LIGHT, op, tuple(operands), op.compute)


def _broadcast(op: Op, rows: Rows) -> Step | None:
    if len(op.inputs) != 1:
        return None
    (value,), params = op.inputs, dict(op.eqn.params)
    params["shape"] = (rows.many, *params["shape"][1:])
    along = 0 in params["broadcast_dimensions"] and value.aval.shape[0] == rows.size
    return Step(Kind.LIGHT, op, (Node(value, rows if along else None),), lambda arrays: op.compute(arrays, params))


def _iota(op: Op, rows: Rows) -> Step | None:
    if op.inputs:
        return None
    params = dict(op.eqn.params)
    params["shape"] = (rows.many, *params["shape"][1:])

    def compute(arrays: Sequence[Any]) -> list[Any]:
        (counted,) = op.compute(arrays, params)
        return [counted + jnp.asarray(rows.start, counted.dtype) if params["dimension"] == 0 else counted]

    return Step(Kind.LIGHT, op, (), compute)


def _scatter(op: Op, rows: Rows) -> Step | None:
    if not scatters_rows(op):
        return None
    operands = (Node(op.inputs[0], rows), Node(op.outputs[0], rows, pairs=True))
    return Step(Kind.SCATTER, op, operands, lambda arrays: scatter_pairs(op, arrays[0], *arrays[1]))


def scatters_rows(op: Op) -> bool:
    """Returns whether an operation changes whole rows along axis 0, given by their ids."""
    if op.name == "dynamic_update_slice":
        return op.inputs[1].aval.shape[1:] == op.inputs[0].aval.shape[1:]
    base, ids, updates = (value.aval for value in op.inputs[:3])
    d = op.eqn.params["dimension_numbers"]
    many = ids.ndim - 1
    return (
        len(op.inputs) == 3
        and tuple(d.scatter_dims_to_operand_dims) == tuple(d.inserted_window_dims) == (0,)
        and not d.operand_batching_dims
        and ids.shape[-1] == 1
        and tuple(d.update_window_dims) == tuple(range(many, updates.ndim))
        and updates.shape == (*ids.shape[:-1], *base.shape[1:])
    )


def replaces(op: Op) -> bool:
    """Returns whether an operation that changes some elements does so whatever they were."""
    return op.name in ("scatter", "dynamic_update_slice")


def pair_operands(op: Op) -> list[Value]:
    """Returns what an operation that changes rows is given them by, see `pairs_of`."""
    return [op.inputs[2], op.inputs[1]] if op.name == "dynamic_update_slice" else op.inputs[1:]


def pairs_of(op: Op, ids: Any, updates: Any) -> tuple[Any, Any]:
    """Returns what an operation changes (see `scatters_rows`) as a vector of ids and an array of as many rows."""
    size = op.inputs[0].aval.shape[0]
    if op.name == "dynamic_update_slice":
        many = updates.shape[0]
        return jnp.clip(widened(ids), 0, size - many) + jnp.arange(many, dtype=widened(ids).dtype), updates
    count = int(np.prod(ids.shape))
    ids = widened(jnp.reshape(ids, (count,)))
    if op.eqn.params["mode"] == lax.GatherScatterMode.CLIP:
        ids = jnp.clip(ids, 0, max(size - 1, 0))
    return ids, jnp.reshape(updates, (count, *op.inputs[0].aval.shape[1:]))


def widened(ids: Any) -> Any:
    """Returns ids in a dtype that has room for those of any rows."""
    return jnp.asarray(ids, jnp.int32) if ids.dtype.itemsize < 4 else jnp.asarray(ids)


def scatter_pairs(op: Op, base: Any, ids: Any, updates: Any) -> list[Any]:
    """Does the operation on some rows, with ids from the first of them; leaves out ids that are not of these."""
    window, mode = tuple(range(1, base.ndim)), lax.GatherScatterMode.FILL_OR_DROP
    numbers = lax.ScatterDimensionNumbers(window, inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
    if op.name == "dynamic_update_slice":
        return [lax.scatter(base, ids[:, None], updates, numbers, mode=mode)]
    changed = {"dimension_numbers": numbers, "mode": mode, "indices_are_sorted": False, "unique_indices": False}
    return op.compute([base, ids[:, None], updates], {**op.eqn.params, **changed})


def constant_of(node: Node) -> Any:
    """Returns the constant of a node, as JAX takes it."""
    array = node.value.whole_constant()
    if node.rows is None:
        return array
    rows = slice(node.rows.start, node.rows.stop)
    return array[rows]
