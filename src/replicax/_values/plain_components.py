"""Plain arrays that are known to be this worker's component of a value whose components differ in shape.

Where each worker has one replica, `run` returns that replica's component as a plain array. A compiled function that it
is passed to cannot tell from its shape whether the other workers' arrays have the same one. Of components that are
known to differ every worker takes note, so that such a call runs eagerly on all of them.
"""

from __future__ import annotations

import weakref

import jax

_differing: dict[int, weakref.ref[jax.Array]] = {}  # by id


def note_differing(component: jax.Array) -> jax.Array:
    """Takes note that other workers' components may differ in shape from this one, and returns it."""
    key = id(component)
    _differing[key] = weakref.ref(component, lambda _: _differing.pop(key, None))
    return component


def is_differing(component: object) -> bool:
    """Returns whether `note_differing` was called with this array."""
    return id(component) in _differing
