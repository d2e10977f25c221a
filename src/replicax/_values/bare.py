"""Plain arrays that are the only component of this process, known again by their identity."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax

from replicax._values.forms import Shape
from replicax._values.mesh import ReplicaMesh
from replicax._values.per_replica import PerReplica, global_array, of_array, of_padded

# Components that came bare out of compiled programs, by id: there is one of that shape on every replica of the mesh.
_bare: dict[int, tuple[weakref.ref, ReplicaMesh]] = {}

_uneven: dict[int, weakref.ref] = {}  # and those of which other replicas have some of other shapes


def bare(component: jax.Array, mesh: ReplicaMesh) -> jax.Array:
    """Registers an array as this process's only component, so that `of_bare` recognises it."""
    key = id(component)
    _bare[key] = weakref.ref(component, lambda _: _bare.pop(key, None)), mesh
    return component


def padded_bare(array: Any, shapes: Sequence[Shape], mesh: ReplicaMesh) -> Any:
    """Returns the only component of this process of the value that `of_padded` makes, for `is_uneven` to recognise."""
    (component,) = of_padded(array, shapes, mesh).values
    key = id(component)
    _uneven[key] = weakref.ref(component, lambda _: _uneven.pop(key, None))
    return component


def is_uneven(component: Any) -> bool:
    """Returns whether this came from `padded_bare`."""
    return id(component) in _uneven


def of_bare(component: Any, mesh: ReplicaMesh) -> PerReplica:
    """Returns the value whose only component here this is."""
    value = PerReplica([component], mesh)
    known = _bare.get(id(component))
    if known is None or known[1] is not mesh:
        return value
    return of_array(PerReplica, global_array(value), mesh)
