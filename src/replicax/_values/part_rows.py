"""How many rows of a batch each replica has, where the arguments of a replica function tell that the numbers differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from replicax._base import doc_pages, nest, tracebacks
from replicax._base.types import Leaf, ReduceOp, Tree
from replicax._values.arrays import is_array
from replicax._values.forms import Counted, Padded, Parts, Shape, Stacked
from replicax._values.per_replica import PerReplica, components_of


class PartRows(NamedTuple):
    """The rows of the replicas' parts of a batch, which are not equally many.

    Attributes:
        counts: of all replicas; None if they are an input of the program, or if the arguments disagree.
        padded: whether the parts are padded, so that the counts are an input of the program.
    """

    counts: tuple[int, ...] | None
    padded: bool = False

    def __str__(self) -> str:
        if self.counts is None:
            return "numbers of rows that may differ" if self.padded else "arguments with different numbers of rows"
        return f"{', '.join(map(str, self.counts))} rows"


def part_rows(arguments: Tree) -> PartRows | None:
    """Return the rows of the replicas' parts; None if all have as many rows, or if nothing is known of them."""
    values = [leaf for leaf in nest.leaves(arguments) if isinstance(leaf, PerReplica)]
    if any(isinstance(form := components_of(value).form, Counted) and form.shapes() is None for value in values):
        return PartRows(None, padded=True)
    counts_of_values = [
        counts for leaf in nest.leaves(arguments, _has_rows) if (counts := _row_counts(leaf)) is not None
    ]
    if all(len(set(counts)) == 1 for counts in counts_of_values):
        return None
    shares = {tuple(count / (sum(counts) or 1) for count in counts) for counts in counts_of_values}
    return PartRows(counts_of_values[0] if len(shares) == 1 else None)


def _has_rows(value: Tree) -> bool:
    """Return whether a value is a leaf, or a ragged or sparse tensor, whose arrays have other dimensions than rows."""
    return nest.is_leaf(value) or hasattr(type(value), "_replicax_rows")


def _row_counts(leaf: Leaf) -> tuple[int, ...] | None:
    """Return the number of rows of each replica's component; None if the value does not tell."""
    surplus = 0
    if hasattr(type(leaf), "_replicax_rows"):
        leaf, surplus = leaf._replicax_rows()
    shapes = _component_shapes(leaf) if isinstance(leaf, PerReplica) else None
    return tuple(shape[0] - surplus for shape in shapes) if shapes is not None and all(shapes) else None


def _component_shapes(value: PerReplica) -> Sequence[Shape] | None:
    """Return the shapes of all replicas' components; None if they are not known or not all components are arrays."""
    form, mesh = components_of(value).form, components_of(value).mesh
    size = len(value.values) if mesh is None else mesh.size
    if isinstance(form, Padded):
        return form.shapes
    if isinstance(form, Counted):
        return form.shapes()
    if isinstance(form, Stacked):
        return [np.shape(form.array)[1:]] * size if hasattr(form.array, "shape") else None
    if not isinstance(form, Parts):
        return None
    kinds = form.components if form.kinds is None else form.kinds
    are_arrays = all(is_array(part) for part in form.components)
    return [tuple(kind.shape) for kind in kinds] if are_arrays and len(kinds) == size else None


def mark_results(results: Tree, rows: PartRows | None, sum_warning: str | None = None) -> Tree:
    """Return the results of a replica function, after marking the distributed ones for `warn_of_reduction`.

    Args:
        results: what the replicas returned.
        rows: the rows that the results come from.
        sum_warning: the warning to give if the results are added up.
    """
    if rows is not None or sum_warning is not None:
        for leaf in nest.leaves(results):
            if isinstance(leaf, PerReplica):
                components_of(leaf).mark = sum_warning if rows is None else rows
    return results


def warn_of_reduction(op: ReduceOp, marks: Sequence[object]) -> None:
    """Warn if the reduction of a value that `mark_results` has given these marks is probably a mistake."""
    if op is ReduceOp.MEAN:
        warn_of_mean((mark for mark in marks if isinstance(mark, PartRows)), "strategy.reduce('MEAN', ..., axis=None)")
    for warning in marks:
        if isinstance(warning, str):
            tracebacks.warn(warning)
            return


def warn_of_mean(rows: Iterable[PartRows | None], call: str) -> None:
    """Warn that a mean over replicas may differ from the mean over the rows of the batch, if parts are uneven."""
    for uneven in rows:
        if uneven is not None:
            tracebacks.warn(
                f"`{call}` gives every replica the same weight, but the replicas have {uneven}: the result "
                "may differ from the mean over the rows of the batch. Let each replica compute its share of that mean, "
                "`replicax.share_of_mean(values)`, or its sum divided by the number of rows of the whole batch, and "
                f"reduce the shares with SUM. See {doc_pages.page('explanation/uneven-batches')}."
            )
            return


def rows_of(value: Leaf) -> PartRows | None:
    """Return the rows that a result of a replica function comes from, if `mark_results` has marked it."""
    mark = components_of(value).mark if isinstance(value, PerReplica) else None
    return mark if isinstance(mark, PartRows) else None
