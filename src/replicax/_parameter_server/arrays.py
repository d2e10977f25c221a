"""Arrays as they travel: NumPy's on the host, but for typed PRNG keys, which NumPy does not have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

Array = np.ndarray | jax.Array


def is_key(array: Array) -> bool:
    """Returns whether an array has typed PRNG keys for elements."""
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def on_host(array: Array) -> Array:
    """Returns an array as it travels, without a copy where there need be none."""
    return array if is_key(array) else np.asarray(array)


def own(array: Array) -> jax.Array:
    """Returns a copy that nobody else holds: what comes in may be a view of a message."""
    if is_key(array):
        return jax.random.clone(array)  # type: ignore[no-any-return]
    return jnp.array(array, dtype=array.dtype, copy=True)


def of_kind(array: Array, kind: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array that has come, as one of JAX, of this dtype whatever the process has for defaults."""
    return jnp.asarray(array) if is_key(array) else jnp.asarray(array, kind.dtype)
