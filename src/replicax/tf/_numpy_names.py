"""`tf.experimental.numpy`: NumPy's functions on tensors, which are those of `jax.numpy`."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.tf import _random
from replicax.tf._absent import missing_from
from replicax.tf._types import DTypeLike, ShapeLike


def experimental_enable_numpy_behavior(prefer_float32: bool = False, dtype_conversion_mode: str = "legacy") -> None:
    """Nothing: tensors have NumPy's methods, and operands of different dtypes are promoted."""


def _rand(*size: int) -> jax.Array:
    return _random.uniform(size)


def _randn(*size: int) -> jax.Array:
    return _random.normal(size)


def _uniform(low: float = 0.0, high: float = 1.0, size: ShapeLike | None = ()) -> jax.Array:
    return _random.uniform(size if size is not None else (), low, high)


def _standard_normal(size: ShapeLike | None = ()) -> jax.Array:
    return _random.normal(size if size is not None else ())


def _randint(low: int, high: int | None = None, size: ShapeLike | None = (), dtype: DTypeLike = np.int64) -> jax.Array:
    low, high = (0, low) if high is None else (low, high)
    return _random.uniform(size if size is not None else (), low, high, dtype=dtype)


random = types.ModuleType("replicax.tf.experimental.numpy.random", "Random numbers, by the names of NumPy.")
random.__dict__.update(
    rand=_rand,
    randint=_randint,
    randn=_randn,
    random=lambda size=(): _uniform(size=size),
    seed=_random.set_seed,
    standard_normal=_standard_normal,
    uniform=_uniform,
    __getattr__=missing_from("experimental.numpy.random"),
)

numpy = types.ModuleType("replicax.tf.experimental.numpy", "NumPy's functions on tensors.")
numpy.__dict__.update(
    experimental_enable_numpy_behavior=experimental_enable_numpy_behavior, ndarray=jax.Array, random=random
)


def _of_jax(name: str) -> Any:
    if not name.startswith("_") and hasattr(jnp, name):
        return getattr(jnp, name)
    return missing_from("experimental.numpy")(name)


numpy.__dict__["__getattr__"] = _of_jax
