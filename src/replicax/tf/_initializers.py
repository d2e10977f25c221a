"""Initializers: objects that create a tensor of a shape, called as `initializer(shape, dtype)`."""

from __future__ import annotations

from typing import Any

import numpy as np

from replicax.tf import _arrays, _random
from replicax.tf._ops import constant


class zeros_initializer:
    """An initializer with zeros."""

    def __call__(self, shape: Any, dtype: Any = np.float32, **kwargs: Any) -> Any:
        return _arrays.zeros(shape, dtype)


class ones_initializer:
    """An initializer with ones."""

    def __call__(self, shape: Any, dtype: Any = np.float32, **kwargs: Any) -> Any:
        return _arrays.ones(shape, dtype)


class constant_initializer:
    """An initializer with one value, or with a list of values that fills the shape."""

    def __init__(self, value: Any = 0, support_partition: bool = False):
        self.value = value

    def __call__(self, shape: Any, dtype: Any = None, **kwargs: Any) -> Any:
        return constant(self.value, dtype, shape)


class random_normal_initializer:
    """An initializer with normally distributed numbers; with a seed, the same ones in each call."""

    def __init__(self, mean: Any = 0.0, stddev: Any = 0.05, seed: Any = None):
        self.mean, self.stddev, self.seed = mean, stddev, seed

    def __call__(self, shape: Any, dtype: Any = np.float32, **kwargs: Any) -> Any:
        if self.seed is not None:
            return _random.stateless_normal(shape, [self.seed, 0], self.mean, self.stddev, dtype)
        return _random.normal(shape, self.mean, self.stddev, dtype)


class random_uniform_initializer:
    """An initializer with uniformly distributed numbers; with a seed, the same ones in each call."""

    def __init__(self, minval: Any = -0.05, maxval: Any = 0.05, seed: Any = None):
        self.minval, self.maxval, self.seed = minval, maxval, seed

    def __call__(self, shape: Any, dtype: Any = np.float32, **kwargs: Any) -> Any:
        if self.seed is not None:
            return _random.stateless_uniform(shape, [self.seed, 0], self.minval, self.maxval, dtype)
        return _random.uniform(shape, self.minval, self.maxval, dtype)
