"""Structures of the replicas' results as one structure of distributed values, and back."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from replicax._base import nest as _nest
from replicax._base.indexed_slices import IndexedSlices
from replicax._base.types import Leaf, Tree
from replicax._values.arrays import ARRAYS
from replicax._values.mesh import ReplicaMesh
from replicax._values.per_replica import Mirrored, PerReplica, Value, components_of


def arrays_of(nest: Tree) -> list[jax.Array]:
    """Returns the arrays in a structure, in all forms of its values, by which a gradient tape may know them."""
    found: list[Leaf] = []
    for leaf in _nest.leaves(nest):
        for form in components_of(leaf).arrays() if isinstance(leaf, Value) else [leaf]:
            found += [form.values, form.indices] if isinstance(form, IndexedSlices) else [form]
    return [array for array in found if isinstance(array, jax.Array)]


def regroup(results: Sequence[Tree], mesh: ReplicaMesh, merging: bool = False) -> Tree:
    """Returns one structure of each replica's: leaves become PerReplica, unless all replicas gave the very same object.

    With `merging`, and other processes, arrays become PerReplica even so: the other processes have others.
    """

    def group(values: Sequence[Leaf]) -> Leaf:
        alike = all(value is values[0] for value in values)
        if alike and not (merging and not mesh.all_local and isinstance(values[0], (*ARRAYS, IndexedSlices))):
            return values[0]
        return PerReplica(values, mesh)

    return _nest.merge(results, group)


def select(replica: int, nest: Tree) -> Tree:
    """Returns the structure as one of the local replicas sees it: its component of each distributed value."""
    return _nest.map_structure(lambda x: x.values[replica] if isinstance(x, (PerReplica, Mirrored)) else x, nest)
