"""What assignments make of the value before and of the value that is given."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base.errors import InvalidArgumentError

# By the names of methods, a leaf's new value, of what it was and what is given.
COMBINE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "assign": lambda old, new: new,
    "assign_add": operator.add,
    "assign_sub": operator.sub,
}


def combined(method: str, old: Sequence[jax.Array], new: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the new leaves; where a variable has only shapes, what it was."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in old):
        return list(old)
    return list(map(COMBINE[method], old, new))


def check_arithmetic(method: str, dtype: np.dtype, name: str) -> None:
    """Raise `InvalidArgumentError` for arithmetic with bools, and for the maximum or minimum of complex numbers."""
    if method.endswith(("assign", "update")):
        return
    if dtype == np.bool_ or (method.endswith(("max", "min")) and jnp.issubdtype(dtype, jnp.complexfloating)):
        raise InvalidArgumentError(f"{method} of {name}:0: a variable of dtype {dtype} can only be assigned")
