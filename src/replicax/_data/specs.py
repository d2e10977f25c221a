"""What is known of a dataset's elements before they are there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from replicax._errors import InvalidArgumentError
from replicax._specs import TensorSpec, spec_of

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2

Maker = Callable[[], Iterator[Any]]


class Probing(threading.local):
    """Whether this thread only looks at a dataset's first element, which must not count as one of its passes."""

    on = False


probing = Probing()


def shown_spec(element: Any) -> Any:
    """The spec that an element shows. Its first dimensions count as unknown: those of the next may differ."""
    return jax.tree.map(lambda a: TensorSpec((None, *a.shape[1:]) if a.ndim else (), a.dtype), element)


def first_spec(make: Maker) -> Any:
    """The spec that the first element shows."""
    probing.on = True
    try:
        for element in make():
            return shown_spec(element)
    finally:
        probing.on = False
    raise InvalidArgumentError(
        "element_spec cannot be told: it would be read off the first element, and there is none."
    )


def result_spec(call: Callable[[Any], Any], spec: Any, make: Maker) -> Any:
    """The spec of `call`'s results, from calls on zeros: a dimension is unknown if it changes with an unknown one."""
    unknown = any(not s.shape.is_fully_defined() for s in jax.tree.leaves(spec))
    try:
        return jax.tree.map(
            common_spec, *[spec_of(call(_zeros(spec, size))) for size in ((2, 3) if unknown else (2, 2))]
        )
    except Exception:  # whatever a function may raise that was not meant for zeros: see what it does on data
        return first_spec(make)


def _zeros(spec: Any, size: int) -> Any:
    def zeros(s: TensorSpec) -> np.ndarray:
        shape = [size if d is None else d for d in s.shape.as_list()]
        return np.full(shape, b"", object) if s.dtype == np.dtype(object) else np.zeros(shape, s.dtype)

    return jax.tree.map(zeros, spec)


def common_spec(a: TensorSpec, b: TensorSpec) -> TensorSpec:
    if a.shape.rank != b.shape.rank or None in (a.shape.rank, b.shape.rank):
        return TensorSpec(None, a.dtype)
    return TensorSpec([x if x == y else None for x, y in zip(a.shape, b.shape)], a.dtype)


def with_batch(spec: Any, size: int | None) -> Any:
    def grow(s: TensorSpec) -> TensorSpec:
        return TensorSpec(None if s.shape.rank is None else (size, *s.shape), s.dtype)

    return jax.tree.map(grow, spec)


def without_batch(spec: Any) -> Any:
    return jax.tree.map(lambda s: TensorSpec(s.shape[1:], s.dtype), spec)
