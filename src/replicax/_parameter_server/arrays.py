"""Arrays as they travel: NumPy's on the host, but for typed PRNG keys, which NumPy does not have."""

from __future__ import annotations

from collections.abc import Sequence

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


def own(arrays: Sequence[Array], local: bool) -> list[jax.Array]:
    """Returns arrays of a message as arrays of JAX that nobody else changes.

    One that is most of a message keeps its memory, and so the message. The others are copies.

    Args:
        arrays: all of the message.
        local: whether it came from this process, where somebody else may change them.
    """
    most = sum(array.nbytes for array in arrays) / 2
    return [_shared(array) if not local and array.nbytes > most else copied(array) for array in arrays]


def copied(array: Array) -> jax.Array:
    """Returns a copy, of the same dtype whatever the process has for defaults."""
    if is_key(array):
        return jax.random.clone(array)  # type: ignore[no-any-return]
    with jax.enable_x64(True):
        return jnp.array(array, dtype=array.dtype, copy=True)


def _shared(array: Array) -> jax.Array:
    """Returns an array of JAX in the same memory, where it is aligned; XLA copies it before it is donated."""
    if isinstance(array, jax.Array):
        return array
    with jax.enable_x64(True):  # else it would have another dtype
        return jax.device_put(array, may_alias=True)


def joined(parts: Sequence[Array]) -> Array:
    """Returns arrays one behind the other along axis 0."""
    if len(parts) == 1:
        return parts[0]
    return jnp.concatenate(parts) if is_key(parts[0]) else np.concatenate(parts)


def of_kind(array: Array, kind: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array that has come, as one of JAX, of this dtype whatever the process has for defaults."""
    return _shared(array) if is_key(array) or array.dtype == kind.dtype else jnp.asarray(array, kind.dtype)
