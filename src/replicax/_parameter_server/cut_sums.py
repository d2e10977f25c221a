"""Sums of rows that a server adds to an array in their places, in place of adding an array that is mostly zeros.

Rows that are not named stay as they are, even where a factor is infinite or NaN and zeros times it would not be zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from replicax._parameter_server.cut_rules import Node, Step, pairs_of, scatter_pairs, scatters_rows

Steps = Mapping[Node, Step]
_Scale = tuple[Callable[..., Any], Node | None]  # an operation on rows and, if it is not None, a scalar


class Term(NamedTuple):
    """Rows that are added to zeros, and what is done to them then.

    Args:
        node: the sum.
        ids: the ids of the rows, or pairs of these and the rows.
        rows: the rows, None where `ids` has them.
        scales: the operations.
    """

    node: Node
    ids: Node
    rows: Node | None
    scales: tuple[_Scale, ...]


class Addition(NamedTuple):
    """An array to which rows are added.

    Args:
        base: the array.
        terms: the rows.
        through: the nodes that need not be computed.
    """

    base: Node
    terms: tuple[Term, ...]
    through: tuple[Node, ...]

    @property
    def needs(self) -> list[Node]:
        """What it is computed from."""
        found = [self.base]
        for term in self.terms:
            found += [
                node for node in (term.ids, term.rows, *(scalar for _, scalar in term.scales)) if node is not None
            ]
        return found

    def compute(self, value_of: Callable[[Node], Any]) -> Any:
        """Returns the sum."""
        total = value_of(self.base)
        for term in self.terms:
            op = term.node.value.op
            assert op is not None
            found = value_of(term.ids)
            ids, rows = found if term.rows is None else pairs_of(op, found, value_of(term.rows))
            for scale, scalar in term.scales:
                rows = scale(rows) if scalar is None else scale(rows, value_of(scalar))
            (total,) = scatter_pairs(op, total, ids, rows)
        return total


def additions(steps: Steps, targets: Sequence[Node]) -> dict[Node, Addition]:
    """Finds the sums of which no part is needed for anything else, of a program that computes the targets."""
    sums: dict[Node, tuple[tuple[Term, ...], tuple[Node, ...]]] = {}  # what is rows alone
    found: dict[Node, Addition] = {}
    for node, step in steps.items():
        if (alone := _rows_alone(step, sums, steps)) is not None:
            sums[node] = alone[0], (*alone[1], node)
        elif step.op.name in ("add", "add_any", "sub") and (added := _added(step, sums)) is not None:
            found[node] = added
    while True:
        used = _computed(steps, found, targets)
        dense = [node for node, added in found.items() if node in used and not used.isdisjoint(added.through)]
        if not dense:
            return {node: added for node, added in found.items() if node in used}
        for node in dense:
            del found[node]


def needs_of(node: Node, steps: Steps, sums: Mapping[Node, Addition]) -> Iterable[Node]:
    """Returns what a server computes a node from."""
    if node in sums:
        return sums[node].needs
    return steps[node].operands if node in steps else ()


def _computed(steps: Steps, sums: Mapping[Node, Addition], targets: Sequence[Node]) -> set[Node]:
    computed, waiting = set[Node](), list(targets)
    while waiting:
        node = waiting.pop()
        if node not in computed:
            computed.add(node)
            waiting += needs_of(node, steps, sums)
    return computed


_Sums = Mapping[Node, tuple[tuple[Term, ...], tuple[Node, ...]]]


def _rows_alone(step: Step, sums: _Sums, steps: Steps) -> tuple[tuple[Term, ...], tuple[Node, ...]] | None:
    """Returns the rows that a node is the sum of, if it is nothing else."""
    op, name = step.op, step.op.name
    (result,) = op.outputs if len(op.outputs) == 1 else (None,)
    if name == "scatter-add" and result is not None and scatters_rows(op) and result.aval.dtype.itemsize >= 4:
        own = Term(Node(result, step.operands[0].rows), step.operands[1], (*step.operands, None)[2], ())
        base = sums.get(step.operands[0])
        if base is not None or _is_zero(step.operands[0]):
            return (*(base[0] if base else ()), own), base[1] if base else ()
    if name in ("add", "add_any") and all(operand in sums for operand in step.operands):
        (one, through), (other, passed) = (sums[operand] for operand in step.operands)
        return (*one, *other), (*through, *passed)
    scaled = _scale(step, sums, steps)
    if scaled is None:
        return None
    terms, through = sums[step.operands[scaled[0]]]
    return tuple(term._replace(scales=(*term.scales, scaled[1])) for term in terms), through


def _scale(step: Step, sums: _Sums, steps: Steps) -> tuple[int, _Scale] | None:
    """Returns which operand is rows, and what is done to them."""
    op = step.op
    if op.name in ("neg", "copy") and step.operands[0] in sums:
        return 0, (lambda rows: op.compute([rows])[0], None)
    if op.name not in ("mul", "div"):
        return None
    if step.operands[0] in sums and (scalar := _scalar(step.operands[1], steps)):
        return 0, (lambda rows, scalar: op.compute([rows, scalar])[0], scalar)
    if op.name == "mul" and step.operands[1] in sums and (scalar := _scalar(step.operands[0], steps)):
        return 1, (lambda rows, scalar: op.compute([scalar, rows])[0], scalar)
    return None


def _scalar(node: Node, steps: Steps) -> Node | None:
    """Returns the scalar of which each element of a node is a copy."""
    if node.value.aval.shape == ():
        return node
    op = node.value.op
    if node in steps and op is not None and op.name == "broadcast_in_dim" and op.inputs[0].aval.shape == ():
        return Node(op.inputs[0])
    return None


def _added(step: Step, sums: _Sums) -> Addition | None:
    one, other = step.operands
    if other in sums and one not in sums and one.value.aval.shape == other.value.aval.shape:
        terms, through = sums[other]
        if step.op.name == "sub":
            terms = tuple(term._replace(scales=(*term.scales, (jnp.negative, None))) for term in terms)
        return Addition(one, terms, through)
    if one in sums and other not in sums and step.op.name != "sub" and one.value.aval.shape == other.value.aval.shape:
        return Addition(other, *sums[one])
    return None


def _is_zero(node: Node) -> bool:
    """Returns whether all elements of a node are the constant 0."""
    value = node.value
    while value.op is not None and value.op.name in ("broadcast_in_dim", "copy", "reshape"):
        value = value.op.inputs[0]
    return value.is_constant and value.aval.shape == () and not np.asarray(value.whole_constant()).any()
