"""Layouts of new variables over the devices of each replica that do not come from an initial value.

A strategy's rules give layouts by name. An optimizer's state is split in the same way as its variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import jax
from jax.sharding import PartitionSpec

from replicax._base import nest
from replicax._base.types import Tree
from replicax._variables.storage import MirroredStorage
from replicax._variables.variable import Variable

Path: TypeAlias = tuple[object, ...]
PathsAndTypes: TypeAlias = Sequence[tuple[Path, jax.ShapeDtypeStruct]]


class LayoutsOf(Protocol):
    """Returns the layouts of a variable's leaves, None for those that are whole."""

    def __call__(self, name: str, leaves: PathsAndTypes) -> list[PartitionSpec | None]: ...


class _Leaf(NamedTuple):
    shape: tuple[int, ...]
    layout: PartitionSpec | None


def alike(variables: Tree, leaves: PathsAndTypes) -> list[PartitionSpec | None]:
    """Returns the layouts of an optimizer's state: a leaf is split as the variable of its shape where its path ends."""

    def leaves_of(variable: Variable) -> Tree:
        storage, signature = variable._storage, variable._signature
        layouts = storage.home.layouts if isinstance(storage, MirroredStorage) else None
        pairs = zip(signature.types, layouts or [None] * len(signature.types))
        return signature.unflatten([_Leaf(kind.shape, layout) for kind, layout in pairs])

    values = nest.map_values(leaves_of, variables)
    known = dict(jax.tree.leaves_with_path(values, is_leaf=lambda node: isinstance(node, _Leaf)))
    layouts = []
    for path, kind in leaves:
        ends = (known.get(path[start:]) for start in range(len(path) + 1))
        layouts.append(next((leaf.layout for leaf in ends if leaf is not None and leaf.shape == kind.shape), None))
    return layouts


def paths_and_types(tree: jax.tree_util.PyTreeDef, types: Sequence[jax.ShapeDtypeStruct]) -> PathsAndTypes:
    """Returns the leaves of a structure with their paths."""
    return jax.tree.leaves_with_path(jax.tree.unflatten(tree, types))
