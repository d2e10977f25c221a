"""What the methods of variables make of a leaf and of the value that they are given."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._base.errors import InvalidArgumentError
from replicax._base.types import Leaf

# For each method, the new value of a leaf, from its old value and the argument.
COMBINE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "assign": lambda old, new: new,
    "assign_add": operator.add,
    "assign_sub": operator.sub,
}


def _divide(array: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """Divide rows of an array; integers as in C, one row after the other, since a product may be too large."""
    if not jnp.issubdtype(array.dtype, jnp.integer):
        return array.at[indices].divide(rows)
    rows = jnp.broadcast_to(rows, (*indices.shape, *array.shape[1:]))

    def divide_row(array: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        index, divisor = row
        return array.at[index].set(lax.div(array[index], divisor)), None

    return lax.scan(divide_row, array, (indices.reshape(-1), rows.reshape(-1, *array.shape[1:])))[0]


# For each method, the new value of an array, from its old value, indices along axis 0 and the rows for them.
SCATTER: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "scatter_add": lambda x, i, u: x.at[i].add(u),
    "scatter_sub": lambda x, i, u: x.at[i].add(-u),
    "scatter_mul": lambda x, i, u: x.at[i].multiply(u),
    "scatter_div": _divide,
    "scatter_update": lambda x, i, u: x.at[i].set(u),
    "scatter_max": lambda x, i, u: x.at[i].max(u),
    "scatter_min": lambda x, i, u: x.at[i].min(u),
}


def combine(method: str, old: Sequence[jax.Array], new: Sequence[Leaf]) -> list[jax.Array]:
    """Return the new leaves of a variable; the old ones of a variable that has only shapes."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in old):
        return list(old)
    if method in SCATTER:
        return [SCATTER[method](leaf, rows.indices, rows.values) for leaf, rows in zip(old, new)]
    return list(map(COMBINE[method], old, new))


def check_arithmetic(method: str, dtype: np.dtype, name: str) -> None:
    """Raise `InvalidArgumentError` for arithmetic with bools, and for the maximum or minimum of complex numbers."""
    if method.endswith(("assign", "update")):
        return
    if dtype == np.bool_ or (method.endswith(("max", "min")) and jnp.issubdtype(dtype, jnp.complexfloating)):
        raise InvalidArgumentError(f"{method} of {name}: a variable of dtype {dtype} can only be assigned")
