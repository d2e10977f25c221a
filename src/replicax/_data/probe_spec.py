"""The spec of a function's results, found by calls on elements made for that."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from replicax._base.specs import TensorSpec
from replicax._base.types import Tree
from replicax._data.base import Base
from replicax._data.reading import Maker
from replicax._data.specs import DatasetSpec, common_spec, first_spec, host_spec


def result_spec(call: Callable[[Tree], Tree], spec: Tree, make: Maker) -> Tree:
    """Returns the spec of `call`'s results, from calls on zeros and on ones.

    A dimension is unknown if it changes with that or with one that is unknown.
    """
    unknown = any(isinstance(s, DatasetSpec) or not s.shape.is_fully_defined() for s in jax.tree.leaves(spec))
    try:
        return common_spec(*[host_spec(call(_filled(spec, *how))) for how in ((2, 0), (3 if unknown else 2, 1))])
    except Exception:  # the function was not meant for such elements: see what it returns for the first one
        return first_spec(make)


def _filled(spec: Tree, size: int, value: int) -> Tree:
    """Returns an element of `spec` made of this number, with `size` for dimensions that are not known."""

    def full(s: TensorSpec | DatasetSpec) -> Tree:
        if isinstance(s, DatasetSpec):
            return Base._of_list([_filled(s.element_spec, size, value)] * size, s.element_spec)
        shape = [size if d is None else d for d in s.shape.as_list()]
        return np.full(shape, b"", object) if s.dtype == np.dtype(object) else np.full(shape, value, s.dtype)

    return jax.tree.map(full, spec)
