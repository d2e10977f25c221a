"""What tools read of variables: the paths of their leaves, and shapes in place of arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.tree_util import tree_flatten_with_path

from replicax._tracing.protocols import storage_of, tree_of, types_of
from replicax._variables.storage import CentralStorage
from replicax._variables.variable import Variable, living


def leaves_of(variable: Variable) -> list[tuple[tuple[Any, ...], jax.ShapeDtypeStruct]]:
    """Return the path of each leaf in the variable's pytree, and its shape and dtype."""
    return tree_flatten_with_path(tree_of(variable).unflatten(types_of(variable)))[0]


@contextlib.contextmanager
def abstract_storages() -> Iterator[None]:
    """Return a context in which all variables have shapes in place of arrays, but for those that live once."""
    before = [(variable, storage_of(variable)) for variable, _ in living if "_storage" in vars(variable)]
    try:
        for variable, storage in before:
            if not isinstance(storage, CentralStorage):
                variable._storage = variable._abstract_storage()
        yield
    finally:
        for variable, storage in before:
            variable._storage = storage
