"""Structures of the replicas' results as one structure of distributed values, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from replicax._base import nest as _nest
from replicax._base.indexed_slices import IndexedSlices
from replicax._values.arrays import ARRAYS
from replicax._values.mesh import ReplicaMesh
from replicax._values.per_replica import Mirrored, PerReplica, Value, made_forms


def arrays_of(nest: Any) -> list[Any]:
    """The arrays in a structure, whatever forms its values have: what a gradient tape may know them by."""
    found: list[Any] = []
    for leaf in _nest.leaves(nest):
        forms = [leaf]
        if isinstance(leaf, Value):
            forms = made_forms(leaf)
        for form in forms:
            found += [form.values, form.indices] if isinstance(form, IndexedSlices) else [form]
    return [array for array in found if isinstance(array, jax.Array)]


def regroup(results: Sequence[Any], mesh: ReplicaMesh, merging: bool = False) -> Any:
    """One structure from each replica's: leaves become PerReplica, unless all replicas gave the very same object.

    Where they are put together to be merged, no array counts as the same in another process.
    """

    def group(values: Sequence[Any]) -> Any:
        alike = all(value is values[0] for value in values)
        if alike and not (merging and not mesh.all_local and isinstance(values[0], (*ARRAYS, IndexedSlices))):
            return values[0]
        return PerReplica(values, mesh)

    return _nest.merge(results, group)


def select(replica: int, nest: Any) -> Any:
    """The structure as that replica (counted among the local ones) sees it: PerReplica leaves by their component."""
    return _nest.map_structure(lambda x: x.values[replica] if isinstance(x, (PerReplica, Mirrored)) else x, nest)
