"""JAX's hash for random numbers, Threefry 2x32, as one run of operations on CPUs.

JAX writes it for CPUs as a loop, of which XLA makes many small programs: a call of `jax.random.normal` for a new shape
takes up to 2 seconds to compile. Without the loop XLA makes one program, for large or many-dimensional shapes in a
fraction of the time, which also runs several times as fast. The numbers are the same.
"""

from __future__ import annotations

import math

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)


def _rotated(x: jax.Array, by: int) -> jax.Array:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))


def hashed(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two words of the hash of two words under a key of two words, all of them uint32."""
    keys = key0, key1, key0 ^ key1 ^ _PARITY
    x0, x1 = x0 + key0, x1 + key1
    for number in range(5):
        for by in _ROTATIONS[number % 2]:
            x0 = x0 + x1
            x1 = x0 ^ _rotated(x1, by)
        x0 = x0 + keys[(number + 1) % 3]
        x1 = x1 + keys[(number + 2) % 3] + np.uint32(number + 1)
    return x0, x1


_SMALL = 4096  # hashes up to which there is a branch


def _alone(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the hash apart from what uses it.

    XLA would compute it anew for each use of a number, such as for each pixel of an image that is flipped by chance. It
    does not mix branches with what is around them, and repeats no divisions, which take less time where all is large.
    """
    shape = jnp.broadcast_shapes(key0.shape, key1.shape, x0.shape, x1.shape)
    words = tuple(jnp.broadcast_to(word, shape) for word in (key0, key1, x0, x1))
    if 0 < math.prod(shape) <= _SMALL:
        always = (words[0].ravel()[0] | np.uint32(1)) != 0
        result: tuple[jax.Array, jax.Array] = jax.lax.cond(
            always, lambda *words: hashed(*words), lambda *words: words[:2], *words
        )
        return result
    one = jnp.minimum(jnp.maximum(words[0], np.uint32(1)), np.uint32(1))
    x0, x1 = hashed(key0, key1, x0, x1)
    return jax.lax.div(x0, one), jax.lax.div(x1, one)


def compile_quickly() -> None:
    """Has JAX use this form on CPUs from now on, in its own functions and in Keras's as well."""
    rule = mlir.lower_fun(_alone, multiple_results=True)
    mlir.register_lowering(jax.extend.random.threefry2x32_p, rule, platform="cpu")
