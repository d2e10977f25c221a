"""What tools read of variables: where their arrays are, and the paths of their leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.tree_util import tree_flatten_with_path

from replicax._values import ReplicaMesh
from replicax._variables.storage import CentralStorage, Storage
from replicax._variables.variable import Variable, living


def storage_of(variable: Variable) -> Storage:
    """Return the storage of a variable's arrays."""
    return variable._storage


def mesh_of(variable: Variable) -> ReplicaMesh | None:
    """Return the mesh of the variable's strategy; None if it has none."""
    return variable._mesh


def leaves_of(variable: Variable) -> list[tuple[tuple[Any, ...], jax.ShapeDtypeStruct]]:
    """Return the path of each leaf in the variable's pytree, and its shape and dtype."""
    return tree_flatten_with_path(variable._treedef.unflatten(variable._types))[0]


@contextlib.contextmanager
def abstract_storages() -> Iterator[None]:
    """Return a context in which all variables have shapes in place of arrays, but for those that live once."""
    before = [(variable, variable._storage) for variable, _ in living if "_storage" in vars(variable)]
    try:
        for variable, storage in before:
            if not isinstance(storage, CentralStorage):
                variable._storage = variable._abstract_storage()
        yield
    finally:
        for variable, storage in before:
            variable._storage = storage
