"""Arrays that a server computes only when an operation needs all their elements, such as sums of rows.

The gradient of a lookup is a scatter-add of rows into zeros. A server adds the rows to the table in their places,
without an array that is mostly zeros. Other rows stay as they are, even where a factor is infinite or NaN and zeros
times it would not be zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from replicax._parameter_server.cut_graph import Op, Value
from replicax._parameter_server.cut_rules import Step, pairs_of, scatter_pairs, scatters_rows


class Term(NamedTuple):
    """Rows that the scatter-add `op` adds at the indices `ids`."""

    op: Op
    ids: Any
    rows: Any


class Lazy:
    """An array that is computed when all its elements are needed.

    Args:
        make: computes the array.
        scalar: the value of each element, if all are equal.
        terms: the rows whose sum the array is, if it is zero elsewhere.
    """

    def __init__(self, make: Callable[[], Any], scalar: Any = None, terms: Sequence[Term] = ()):
        self._make, self.scalar, self.terms = make, scalar, terms

    @functools.cached_property
    def whole(self) -> Any:
        """The array."""
        return self._make()


def whole(value: Any) -> Any:
    """Return an array for an array, a `Lazy`, or a pair of ids and rows."""
    return value.whole if isinstance(value, Lazy) else value


def compute(step: Step, operands: Sequence[Any]) -> list[Any]:
    """Compute a step. Operands and results are arrays or `Lazy`; ids and rows are a pair."""

    def results() -> list[Any]:
        return step.compute([whole(operand) for operand in operands])

    op = step.op
    if op.name == "broadcast_in_dim" and op.inputs[0].aval.shape == ():
        return [Lazy(lambda: results()[0], scalar=whole(operands[0]))]
    if terms := _terms(step, operands):
        return [Lazy(lambda: results()[0], terms=terms)]
    if (total := _added(op, operands)) is not None:
        return [total]
    return results()


def _terms(step: Step, operands: Sequence[Any]) -> list[Term]:
    """Return the rows whose sum the result is; none if it is anything else."""
    op, name = step.op, step.op.name
    terms = [list(operand.terms) if isinstance(operand, Lazy) else [] for operand in operands]
    if name == "scatter-add" and scatters_rows(op) and op.outputs[0].aval.dtype.itemsize >= 4:
        if not terms[0] and not _is_zero(step.operands[0].value):
            return []
        ids, rows = operands[1] if step.operands[1].pairs else pairs_of(op, *map(whole, operands[1:]))
        return [*terms[0], Term(op, ids, rows)]
    if name in ("add", "add_any") and all(terms):
        return [*terms[0], *terms[1]]
    if name in ("neg", "copy"):
        return _map_rows(terms[0], lambda rows: op.compute([rows])[0])
    scalars = [_scalar(operand) for operand in operands]
    if name in ("mul", "div") and terms[0] and scalars[1] is not None:
        return _map_rows(terms[0], lambda rows: op.compute([rows, scalars[1]])[0])
    if name == "mul" and terms[1] and scalars[0] is not None:
        return _map_rows(terms[1], lambda rows: op.compute([scalars[0], rows])[0])
    return []


def _scalar(operand: Any) -> Any:
    """Return the value of each element; None if they differ."""
    if isinstance(operand, Lazy):
        return operand.scalar
    return operand if getattr(operand, "shape", None) == () else None


def _map_rows(terms: Sequence[Term], function: Callable[[Any], Any]) -> list[Term]:
    return [Term(op, ids, function(rows)) for op, ids, rows in terms]


def _added(op: Op, operands: Sequence[Any]) -> Any:
    """Return the sum of an array and of rows; None for other operations and operands."""
    if op.name not in ("add", "add_any", "sub") or op.inputs[0].aval.shape != op.inputs[1].aval.shape:
        return None
    for total, other in (operands, operands[::-1]):
        if isinstance(other, Lazy) and other.terms and (op.name != "sub" or other is operands[1]):
            total = whole(total)
            for term in _map_rows(other.terms, jnp.negative) if op.name == "sub" else other.terms:
                (total,) = scatter_pairs(term.op, total, term.ids, term.rows)
            return total
    return None


def _is_zero(value: Value) -> bool:
    """Return whether all elements of a value are the constant 0."""
    while value.op is not None and value.op.name in ("broadcast_in_dim", "copy", "reshape"):
        value = value.op.inputs[0]
    return value.is_constant and value.aval.shape == () and not np.asarray(value.constant).any()
