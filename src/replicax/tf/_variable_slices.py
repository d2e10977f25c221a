"""Assigning to slices of variables: `v[1].assign(5.0)`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from replicax.tf._core import InvalidArgumentError, Leaf, Tree, Variable, convert_dtype
from replicax.tf._ops import as_index
from replicax.tf._types import TensorLike

# By the ids of tensors that were read with an index: the tensor, the variable and the index. Tensors are not hashable.
_slices: dict[int, tuple[weakref.ref[Any], weakref.ref[Variable], Tree]] = {}


def note_part(part: Leaf, variable: Any, index: Tree) -> None:
    """Remember that a tensor is a slice of a variable, for as long as the tensor lives."""
    if isinstance(part, jax.Array):
        key = id(part)
        _slices[key] = weakref.ref(part, lambda _: _slices.pop(key, None)), weakref.ref(variable), index


def _assign_of(tensor: jax.Array) -> Callable[..., Tree]:
    """Return the method `assign` of a tensor that is a slice of a variable; other tensors have none."""
    reference, variable, index = _slices.get(id(tensor), (None, None, None))
    if reference is None or variable is None or reference() is not tensor or (target := variable()) is None:
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute 'assign'", name="assign", obj=tensor)
    return functools.partial(_assign, target, index, tensor.shape)


def _assign(
    variable: Variable, index: Tree, shape: tuple[int, ...], value: TensorLike, name: str | None = None
) -> Tree:
    """Assign a value to a slice of a variable and return the variable's new value.

    Args:
        variable: the variable.
        index: the index of the slice.
        shape: the shape of the slice.
        value: a tensor of the variable's dtype, or numbers, of a shape that can be broadcast to the slice's.
        name: accepted for compatibility.
    """
    index = as_index(index)
    updates = convert_dtype(value, variable.dtype)
    _check_bounds(variable, index)
    if updates.ndim > len(shape) or any(n not in (1, m) for n, m in zip(updates.shape[::-1], shape[::-1])):
        raise InvalidArgumentError(
            f"Cannot broadcast input shape {updates.shape} into final shape {shape}, a slice of {variable.name}"
        )
    return variable._assign_parts("assign of a slice", variable.value().at[index].set(updates))


def _check_bounds(variable: Variable, index: Tree) -> None:
    """Raise if an index is out of range; indices that are known only in a compiled program are not checked."""
    if any(isinstance(part, jax.core.Tracer) for part in (index if isinstance(index, tuple) else (index,))):
        return
    try:
        np.broadcast_to(np.int8(0), tuple(variable.shape))[index]
    except IndexError as error:
        raise InvalidArgumentError(f"slice index out of bounds of {variable.name}: {error}") from error


def dress(kinds: list[Any]) -> None:
    """Give tensors of these classes the method `assign`, which slices of variables have."""
    for kind in kinds:
        kind.assign = property(_assign_of)
