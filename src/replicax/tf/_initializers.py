"""Initializers: objects that create a tensor of a shape, called as `initializer(shape, dtype)`."""

from __future__ import annotations

import jax
import numpy as np

from replicax.tf import _arrays, _random
from replicax.tf._ops import constant
from replicax.tf._types import DTypeLike, ShapeLike, TensorLike


class zeros_initializer:
    """An initializer with zeros."""

    def __call__(self, shape: ShapeLike, dtype: DTypeLike = np.float32, **kwargs: object) -> jax.Array:
        return _arrays.zeros(shape, dtype)


class ones_initializer:
    """An initializer with ones."""

    def __call__(self, shape: ShapeLike, dtype: DTypeLike = np.float32, **kwargs: object) -> jax.Array:
        return _arrays.ones(shape, dtype)


class constant_initializer:
    """An initializer with one value, or with a list of values that fills the shape."""

    def __init__(self, value: TensorLike = 0, support_partition: bool = False):
        self.value = value

    def __call__(self, shape: ShapeLike, dtype: DTypeLike | None = None, **kwargs: object) -> jax.Array:
        return constant(self.value, dtype, shape)


class random_normal_initializer:
    """An initializer with normally distributed numbers; with a seed, the same ones in each call."""

    def __init__(self, mean: TensorLike = 0.0, stddev: TensorLike = 0.05, seed: int | None = None):
        self.mean, self.stddev, self.seed = mean, stddev, seed

    def __call__(self, shape: ShapeLike, dtype: DTypeLike = np.float32, **kwargs: object) -> jax.Array:
        if self.seed is not None:
            return _random.stateless_normal(shape, [self.seed, 0], self.mean, self.stddev, dtype)
        return _random.normal(shape, self.mean, self.stddev, dtype)


class random_uniform_initializer:
    """An initializer with uniformly distributed numbers; with a seed, the same ones in each call."""

    def __init__(self, minval: TensorLike = -0.05, maxval: TensorLike = 0.05, seed: int | None = None):
        self.minval, self.maxval, self.seed = minval, maxval, seed

    def __call__(self, shape: ShapeLike, dtype: DTypeLike = np.float32, **kwargs: object) -> jax.Array:
        if self.seed is not None:
            return _random.stateless_uniform(shape, [self.seed, 0], self.minval, self.maxval, dtype)
        return _random.uniform(shape, self.minval, self.maxval, dtype)
