"""Placing a round of input: from each local replica's arrays on the host to one value on the replicas' devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import nest
from replicax._base.array_conversion import as_array
from replicax._base.types import Leaf, Tree
from replicax._data.composites import refuse_composites
from replicax._data.elements import as_tensor
from replicax._input.agreement import Kind, Round, Worker
from replicax._values import (
    PerReplica,
    ReplicaMesh,
    RowCounts,
    filled,
    from_host,
    is_array,
    is_numeric,
    is_text,
    of_array,
    of_counted,
    of_kinds,
)


class Placement:
    """Places the input of a strategy on the devices of its mesh.

    Args:
        mesh: the replicas' devices.
        check: called with each element that is placed; it raises where a strategy does not take it.
        pads: whether parts are padded where that is asked for; replicas must take PerReplica values then.
    """

    def __init__(self, mesh: ReplicaMesh, check: Callable[[Tree], None] | None = None, pads: bool = False):
        self._mesh, self._check, self._pads = mesh, check, pads

    @property
    def worker(self) -> Worker:
        """The rank of this process among those that share the replicas, and their number."""
        return Worker() if self._mesh.all_local else Worker(jax.process_count(), jax.process_index())

    def place(self, this_round: Round, fetch_to_device: bool, most_rows: int = 0) -> Tree:
        """Returns one element of a distributed dataset, made of each local replica's host arrays.

        Args:
            this_round: a host structure for each local replica, and what the other workers' are like.
            fetch_to_device: False leaves the arrays in the host's memory.
            most_rows: the number of rows to which parts are padded; 0 for none.
        """
        if self._pads and most_rows:
            refuse_composites(this_round.parts, "padded (`pad_last_batch`)")
        kinds = self._kinds_of_leaves(this_round)
        counts: dict[tuple[int, ...], RowCounts] = {}

        def place(leaves: Sequence[Leaf]) -> Tree:
            of_all = next(kinds, leaves)
            if self._pads and most_rows and fetch_to_device and all(is_numeric(leaf) and leaf.ndim for leaf in leaves):
                rows = tuple(rows_of_all(leaves, of_all, self._mesh))
                if rows not in counts:
                    array = self._mesh.spread(np.array(rows, np.int32), self._mesh.mirrored)
                    counts[rows] = RowCounts(array, rows)
                return of_counted(self._mesh.stack(with_rows(leaves, most_rows)), counts[rows], self._mesh)
            return self._leaf(leaves, of_all, this_round.alike, fetch_to_device)

        with self._mesh.placing:
            element = nest.merge(list(this_round.parts), place)
        if self._check is not None:
            self._check(element)
        return element

    def _kinds_of_leaves(self, this_round: Round) -> Iterator[Sequence[Kind]]:
        """Yields for each leaf the kinds of all replicas' parts, where the workers told them."""
        told = self._mesh.by_replica(this_round.kinds_of_workers) if this_round.kinds_of_workers else []
        return itertools.zip_longest(*told, fillvalue=Kind((), ""))

    def _leaf(self, leaves: Sequence[Leaf], of_all: Sequence[Leaf], alike: bool, fetch_to_device: bool) -> Leaf:
        """Returns one leaf of the element, of its local parts and what has the shapes and dtypes of all parts."""
        mesh = self._mesh
        if all(leaf is None for leaf in leaves):  # None is a part of the structure
            return None
        if any(not is_array(leaf) or is_text(leaf) for leaf in leaves):
            leaves = [as_tensor(leaf) if is_array(leaf) else leaf for leaf in leaves]
            return leaves[0] if mesh.size == 1 else PerReplica(leaves, mesh)
        if not fetch_to_device:
            with jax.default_device(mesh.local_devices[0]):
                arrays = [as_array(leaf) for leaf in leaves]
            return self._in_parts(arrays, of_all, alike)
        if mesh.size > 1 and alike and all(leaf.shape == leaves[0].shape for leaf in leaves):
            return of_array(PerReplica, mesh.stack(leaves), mesh)
        if mesh.size > 1 and (value := from_host(leaves, of_all, mesh)) is not None:
            return value
        return self._in_parts(mesh.components(leaves), of_all, alike)

    def _in_parts(self, components: Sequence[jax.Array], of_all: Sequence[Leaf], alike: bool) -> Leaf:
        mesh = self._mesh
        if mesh.size == 1:
            return components[0]
        if alike and not mesh.all_local:
            of_all = list(components[:1]) * mesh.size
        return of_kinds(components, of_all, mesh)


def with_rows(parts: Sequence[Leaf], most: int) -> list[Leaf]:
    """Returns parts padded to so many rows, with rows that there are, of which a program computes nothing unusual."""
    spare = next((part[-1:] for part in reversed(parts) if len(part)), None)

    def padded(part: Leaf) -> Leaf:
        if len(part) == most:
            return part
        if spare is None:
            return filled(part, (most, *part.shape[1:]))
        library = np if isinstance(part, np.ndarray) else jnp
        last = part[-1:] if len(part) else spare
        return library.concatenate([part, library.broadcast_to(last, (most - len(part), *part.shape[1:]))])

    return [*map(padded, parts)]


def rows_of_all(leaves: Sequence[Leaf], of_all: Sequence[Leaf], mesh: ReplicaMesh) -> list[int]:
    """Returns the number of rows of each replica's part, of those here and what has the shapes of all, if it is told.

    If it is not, the parts of all replicas are of one shape.
    """
    if len(of_all) != mesh.size:
        of_all = [leaves[0]] * mesh.size
    return [kind.shape[0] for kind in of_all]
