"""Placing a round of input: from each local replica's arrays on the host to one value on the replicas' devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import jax

from replicax._base import nest
from replicax._base.array_conversion import as_array
from replicax._base.types import Leaf, Tree
from replicax._data.elements import as_tensor
from replicax._input.agreement import Kind, Round, Worker
from replicax._values import PerReplica, ReplicaMesh, from_host, is_array, is_text, of_array, of_kinds


class Placement:
    """Places the input of a strategy on the devices of its mesh.

    Args:
        mesh: the replicas' devices.
        check: called with each element that is placed; it raises where a strategy does not take it.
    """

    def __init__(self, mesh: ReplicaMesh, check: Callable[[Tree], None] | None = None):
        self._mesh, self._check = mesh, check

    @property
    def worker(self) -> Worker:
        """The rank of this process among those that share the replicas, and their number."""
        return Worker() if self._mesh.all_local else Worker(jax.process_count(), jax.process_index())

    def place(self, this_round: Round, fetch_to_device: bool) -> Tree:
        """Returns one element of a distributed dataset, made of each local replica's host arrays.

        Args:
            this_round: a host structure for each local replica, and what the other workers' are like.
            fetch_to_device: False leaves the arrays in the host's memory.
        """
        kinds = self._kinds_of_leaves(this_round)

        def place(leaves: Sequence[Leaf]) -> Tree:
            return self._leaf(leaves, next(kinds, leaves), this_round.alike, fetch_to_device)

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
