"""A padded batch among the arguments of a compiled replica function, whose program is for any number of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from replicax._base import doc_pages, nest
from replicax._base.messages import shown
from replicax._base.types import Leaf
from replicax._engine.replica_trace import ReplicaTrace
from replicax._passes.row_dims import NotExact, Rows, Sizes
from replicax._values import AXIS, Mirrored, PerReplica, RowCounts, counted_form


class PaddedBatch:
    """The padded values among the arguments of a call.

    Args:
        counts: how many rows of each replica's part count.
        sizes: how many rows there are, and another number for which the function is traced as well.
        places: which of the distributed arguments are padded.
    """

    def __init__(self, counts: RowCounts, sizes: Sizes, places: set[int]):
        self.counts, self.sizes, self.places = counts, sizes, places
        self.rows: list[Rows] = []  # for each output of the function's jaxpr, which of its axes are of rows

    def own_count(self, counts: jax.Array) -> jax.Array:
        """Returns how many rows of the replica's own part count."""
        own: jax.Array = counts[lax.axis_index(AXIS)]
        return own

    def _of_size(self, size: int, components: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns one replica's components with so many rows, to be traced with."""
        return [jnp.zeros((size, *x.shape[1:]), x.dtype) if i in self.places else x for i, x in enumerate(components)]

    def compare(self, trace: ReplicaTrace, others: Sequence[ReplicaTrace], components: Sequence[jax.Array]) -> None:
        """Prepares a trace for any number of rows, by comparison with two or three for other numbers, taken here.

        Raises:
            NotExact: its results depend on the number of rows in a way that no program can tell.
        """

        def taken(other: ReplicaTrace, few: int) -> ReplicaTrace:
            self._take(other, few, components)
            if [*map(id, trace.written)] != [*map(id, other.written)]:
                raise NotExact(f"the function assigns other variables with {few} rows")
            nest.merge([trace.outputs.result, other.outputs.result], _compare_results)
            return other

        first, alone, between = others
        self.rows = trace.serve_any_rows(
            taken(first, self.sizes.other),
            taken(alone, 1),
            self.sizes,
            components,
            lambda: taken(between, self.sizes.between.other),
        )
        for rows, _ in zip(self.rows, trace.outputs.leaves):
            if any(rows) and (rows[0] != 1 or any(rows[1:])):
                raise NotExact(
                    "the function returns an array that has not one row, along axis 0, for each of the batch"
                )

    def _take(self, other: ReplicaTrace, few: int, components: Sequence[jax.Array]) -> None:
        try:
            other.take(self._of_size(few, components))
        except Exception as error:
            raise NotExact(
                f"it takes {self.sizes.most} rows, and raises {type(error).__name__} with {few}, by which it is found "
                f"out what of it depends on their number ({error})"
            ) from error


def of_values(values: Sequence[PerReplica | Mirrored]) -> PaddedBatch:
    """Return what is padded among the distributed arguments of a call.

    Raises:
        NotExact: they are of several batches.
    """
    forms = {i: form for i, value in enumerate(values) if (form := counted_form(value)) is not None}
    counts = {id(form.counts): form.counts for form in forms.values()}
    sizes = {form.array.shape[1] for form in forms.values()}
    if len(counts) > 1 or len(sizes) > 1:
        raise NotExact("the function takes rows of several padded batches")
    (most,) = sizes
    return PaddedBatch(next(iter(counts.values())), Sizes.of(most), set(forms))


def _compare_results(leaves: Sequence[Leaf]) -> None:
    one, other = leaves
    if isinstance(one, (bool, int, float, complex, str)) and one != other:
        raise NotExact(f"the function returns {one!r}, and {other!r} with another number of rows: return an array")


def refusal(fn: object, error: NotExact) -> ValueError:
    """Return the error for the user of a replica function that cannot take padded batches."""
    where = f" at {error.where}" if error.where else ""
    return ValueError(
        f"{shown(fn)} cannot take padded batches (InputOptions(pad_last_batch=True)), since its results would not "
        f"be those without padding: {error}{where}. Leave pad_last_batch out, which compiles one more program for "
        "the last batch, or drop that with `batch(size, drop_remainder=True)`. "
        f"See {doc_pages.page('explanation/uneven-batches#one-program-for-all-batches')}."
    )
