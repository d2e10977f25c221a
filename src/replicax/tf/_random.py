"""Random numbers with a hidden state, as TensorFlow has them: replicas draw different ones, reproducibly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _context
from replicax._specs import as_dtype
from replicax._variables import ResourceVariable, Variable
from replicax.tf._ops import _shape, convert_to_tensor


class Generator:
    """A stream of random numbers. Made in a strategy's scope, it gives each replica a stream of its own."""

    def __init__(self, state: Any):
        self._state = state

    @classmethod
    def from_seed(cls, seed: int, alg: Any = None) -> Generator:
        """A generator whose stream is fixed by `seed`."""
        return cls(Variable(lambda: np.asarray([seed, 0], np.uint32), trainable=False, name="generator"))

    @property
    def state(self) -> Any:
        """The variable with the seed and the number of draws."""
        return self._state

    def _key(self) -> Any:
        state = self._state.value()
        self._state.assign_add(np.asarray([0, 1], np.uint32))
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), state[0]), state[1])
        replica_context = _context.get_replica_context()
        replica = 0 if replica_context is None else replica_context.replica_id_in_sync_group
        return jax.random.fold_in(key, replica)

    def normal(self, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = np.float32, name: Any = None) -> Any:
        """Normally distributed numbers."""
        return jax.random.normal(self._key(), _shape(shape), as_dtype(dtype)) * stddev + mean

    def uniform(
        self, shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = np.float32, name: Any = None
    ) -> Any:
        """Uniformly distributed numbers from `minval` to before `maxval` (1 by default)."""
        return _uniform(self._key(), shape, minval, maxval, dtype)


def _uniform(key: Any, shape: Any, minval: Any, maxval: Any, dtype: Any) -> Any:
    dtype = as_dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, _shape(shape), minval, maxval, dtype)
    return jax.random.uniform(key, _shape(shape), dtype, minval, 1 if maxval is None else maxval)


_global: list[Generator] = []


def _global_generator() -> Generator:
    if not _global:
        set_seed(int(np.random.SeedSequence().generate_state(1)[0]))
    return _global[0]


def set_seed(seed: int) -> None:
    """Fixes the stream of the functions of this module."""
    _global[:] = [Generator(ResourceVariable(np.asarray([seed, 0], np.uint32), trainable=False, name="seed"))]


def normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = np.float32, seed: Any = None, name: Any = None):
    """Normally distributed numbers."""
    return _global_generator().normal(shape, mean, stddev, dtype)


def uniform(
    shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = np.float32, seed: Any = None, name: Any = None
):
    """Uniformly distributed numbers."""
    return _global_generator().uniform(shape, minval, maxval, dtype)


def stateless_uniform(
    shape: Any, seed: Any, minval: Any = 0, maxval: Any = None, dtype: Any = np.float32, name: Any = None
) -> Any:
    """Uniformly distributed numbers that depend on `seed` (two integers) alone."""
    return _uniform(_stateless_key(seed), shape, minval, maxval, dtype)


def stateless_normal(
    shape: Any, seed: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = np.float32, name: Any = None
) -> Any:
    """Normally distributed numbers that depend on `seed` (two integers) alone."""
    return jax.random.normal(_stateless_key(seed), _shape(shape), as_dtype(dtype)) * stddev + mean


def _stateless_key(seed: Any) -> Any:
    seed = convert_to_tensor(seed)
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed[0]), seed[1])
