"""Random numbers with a hidden state, as in TensorFlow: each replica draws different, reproducible numbers."""

from __future__ import annotations

import enum
from typing import SupportsInt

import jax
import numpy as np

from replicax.tf import _draws
from replicax.tf import _random_keys as keys
from replicax.tf._core import Variable, as_dtype, thread_state
from replicax.tf._ops import as_new_shape, convert_to_tensor
from replicax.tf._types import DTypeLike, ShapeLike, TensorLike


class Algorithm(enum.Enum):
    """Names of random number generators; JAX's own is used, whatever the name."""

    PHILOX = 1
    THREEFRY = 2
    AUTO_SELECT = 3


class Generator:
    """A stream of random numbers. If it is created in a strategy's scope, each replica has a stream of its own."""

    def __init__(
        self, copy_from: Generator | Variable | None = None, state: TensorLike | None = None, alg: object = None
    ):
        if isinstance(copy_from, Variable):
            self._state = copy_from
            return
        if copy_from is not None:
            state = copy_from.state.value()
        if state is None:
            raise ValueError("Pass a state, or create a generator with Generator.from_seed(seed).")
        self._state = _variable(state)

    @classmethod
    def from_seed(cls, seed: int, alg: object = None) -> Generator:
        """Returns a generator whose stream depends on `seed` alone."""
        return cls(state=[seed, 0])

    @classmethod
    def from_state(cls, state: TensorLike, alg: object = None) -> Generator:
        """Returns a generator that continues from a state."""
        return cls(state=state)

    @classmethod
    def from_non_deterministic_state(cls, alg: object = None) -> Generator:
        """Returns a generator with a stream of its own in each run."""
        return cls.from_seed(int(np.random.SeedSequence().generate_state(1)[0]))

    def _tracked(self) -> dict[str, Variable]:
        return {"_state_var": self._state}  # what a checkpoint saves

    @property
    def state(self) -> Variable:
        """The variable with the seed and the number of draws."""
        return self._state

    @property
    def algorithm(self) -> int:
        """The number of the algorithm."""
        return Algorithm.THREEFRY.value

    @property
    def key(self) -> jax.Array:
        """The seed."""
        result: jax.Array = self._state.value()[0]
        return result

    def reset(self, state: TensorLike) -> None:
        """Continues from a state."""
        self._state.assign(_as_state(state))

    def reset_from_seed(self, seed: int) -> None:
        """Starts the stream of `seed`."""
        self.reset([seed, 0])

    def skip(self, delta: int) -> None:
        """Skips `delta` draws."""
        with thread_state.entered(assigns_alike=True):
            self._state.assign_add(np.asarray([0, delta], np.uint32))

    def split(self, count: int = 1) -> list[Generator]:
        """Returns `count` generators with streams of their own."""
        seeds = np.asarray(self._draw(_draws.full_of, (count, 2), np.dtype(np.uint32)))
        return [type(self)(state=seed) for seed in seeds]

    def make_seeds(self, count: int = 1) -> jax.Array:
        """Returns seeds `[2, count]`; each column is a seed for the stateless functions."""
        return self._draw(_draws.full_of, (2, count), np.dtype(np.uint32)).astype(np.int64)

    def _draw(
        self, sample: _draws.Draw, shape: tuple[int, ...], dtype: np.dtype, *parameters: jax.Array | np.ndarray
    ) -> jax.Array:
        # Two programs, since a state that the drawing program returned would be lost if it ran out of memory.
        words, state = keys.of_state(self._state.value(), keys.replica())
        drawn = _draws.settle(_draws.now(sample, words, shape, dtype, *parameters))
        with thread_state.entered(assigns_alike=True):  # each replica draws once, so that all states are the same
            self._state.assign(state, read_value=False)
        return drawn

    def normal(
        self,
        shape: ShapeLike,
        mean: TensorLike = 0.0,
        stddev: TensorLike = 1.0,
        dtype: DTypeLike = np.float32,
        name: str | None = None,
    ) -> jax.Array:
        """Draws normally distributed numbers."""
        return _draws.normal(self._draw, shape, mean, stddev, dtype)

    def truncated_normal(
        self,
        shape: ShapeLike,
        mean: TensorLike = 0.0,
        stddev: TensorLike = 1.0,
        dtype: DTypeLike = np.float32,
        name: str | None = None,
    ) -> jax.Array:
        """Draws normally distributed numbers within two standard deviations of the mean."""
        return _draws.truncated(self._draw, shape, mean, stddev, dtype)

    def uniform(
        self,
        shape: ShapeLike,
        minval: TensorLike = 0,
        maxval: TensorLike | None = None,
        dtype: DTypeLike = np.float32,
        name: str | None = None,
    ) -> jax.Array:
        """Draws uniformly distributed numbers from `minval` up to, not including, `maxval` (1 by default)."""
        return _draws.uniform(self._draw, shape, minval, maxval, dtype)

    def uniform_full_int(self, shape: ShapeLike, dtype: DTypeLike = np.uint64, name: str | None = None) -> jax.Array:
        """Draws integers from the full range of the dtype."""
        dtype = np.dtype(as_dtype(dtype))
        return self._draw(_draws.full_of, as_new_shape(shape), dtype)

    def binomial(
        self,
        shape: ShapeLike,
        counts: TensorLike,
        probs: TensorLike,
        dtype: DTypeLike = np.int32,
        name: str | None = None,
    ) -> jax.Array:
        """Draws from binomial distributions: the number of successes in `counts` trials with probability `probs`."""
        return _draws.binomial(self._draw, shape, counts, probs, dtype)


def _as_state(state: TensorLike) -> np.ndarray:
    """Converts integers to the words of a state; only the lower 32 bits are used."""
    return (np.asarray(state).astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)[:2]


def _variable(state: TensorLike) -> Variable:
    return Variable(lambda: _as_state(state), trainable=False, name="generator", copies_may_differ=True)


# The functions of the module, which draw with counters of their own (see `_random_keys`).

_global: dict[str, Generator] = {}  # the global generator, once it was set or requested


def get_global_generator() -> Generator:
    """Returns one generator for the whole program. As in TensorFlow, the functions of this module do not draw from
    it.
    """
    if not _global:
        seed = keys.global_seed()
        _global["by default"] = Generator.from_non_deterministic_state() if seed is None else Generator.from_seed(seed)
    return next(iter(_global.values()))


def set_global_generator(generator: Generator) -> None:
    """Sets what `get_global_generator` returns."""
    _global.clear()
    _global["set"] = generator


def set_seed(seed: int | None) -> None:
    """Sets the seed of the functions of this module, and of datasets that are shuffled without a seed.

    Each eager call draws different numbers, while two functions with the same code draw the same numbers. A call with a
    seed of its own draws the same numbers in eager code and in each function. All streams start again, also those of
    functions that were compiled before. With None the numbers differ in each run of a program.
    """
    keys.set_seed(seed)
    _global.pop("by default", None)


def normal(
    shape: ShapeLike,
    mean: TensorLike = 0.0,
    stddev: TensorLike = 1.0,
    dtype: DTypeLike = np.float32,
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws normally distributed numbers."""
    return _draws.normal(_draws.of_op("normal", as_dtype(dtype), seed), shape, mean, stddev, dtype)


def truncated_normal(
    shape: ShapeLike,
    mean: TensorLike = 0.0,
    stddev: TensorLike = 1.0,
    dtype: DTypeLike = np.float32,
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws normally distributed numbers within two standard deviations of the mean."""
    return _draws.truncated(_draws.of_op("truncated_normal", as_dtype(dtype), seed), shape, mean, stddev, dtype)


def uniform(
    shape: ShapeLike,
    minval: TensorLike = 0,
    maxval: TensorLike | None = None,
    dtype: DTypeLike = np.float32,
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws uniformly distributed numbers from `minval` up to, not including, `maxval` (1 by default)."""
    return _draws.uniform(_draws.of_op("uniform", as_dtype(dtype), seed), shape, minval, maxval, dtype)


def gamma(
    shape: ShapeLike,
    alpha: TensorLike,
    beta: TensorLike | None = None,
    dtype: DTypeLike = np.float32,
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws `shape` numbers from each of the gamma distributions."""
    return _draws.gamma(_draws.of_op("gamma", as_dtype(dtype), seed), shape, alpha, beta, dtype)


def poisson(
    shape: ShapeLike,
    lam: TensorLike,
    dtype: DTypeLike = np.float32,
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws `shape` numbers from each of the Poisson distributions."""
    return _draws.poisson(_draws.of_op("poisson", as_dtype(dtype), seed), shape, lam, dtype)


def categorical(
    logits: TensorLike,
    num_samples: TensorLike,
    dtype: DTypeLike | None = None,
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws classes `[batch, num_samples]` from logits `[batch, classes]`."""
    return _draws.categorical(_draws.of_op("categorical", dtype, seed), logits, num_samples, dtype)


def shuffle(value: TensorLike, seed: SupportsInt | None = None, name: str | None = None) -> jax.Array:
    """Returns the rows in random order."""
    return _draws.shuffled(_draws.of_op("shuffle", None, seed), value)


# Stateless functions: the numbers depend on `seed` (two integers) alone.


def stateless_uniform(
    shape: ShapeLike,
    seed: TensorLike,
    minval: TensorLike = 0,
    maxval: TensorLike | None = None,
    dtype: DTypeLike = np.float32,
    name: str | None = None,
    alg: object = "auto_select",
) -> jax.Array:
    """Draws uniformly distributed numbers that depend on `seed` (two integers) alone."""
    return _draws.uniform(_draws.of_seed(seed), shape, minval, maxval, dtype)


def stateless_normal(
    shape: ShapeLike,
    seed: TensorLike,
    mean: TensorLike = 0.0,
    stddev: TensorLike = 1.0,
    dtype: DTypeLike = np.float32,
    name: str | None = None,
    alg: object = "auto_select",
) -> jax.Array:
    """Draws normally distributed numbers that depend on `seed` (two integers) alone."""
    return _draws.normal(_draws.of_seed(seed), shape, mean, stddev, dtype)


def stateless_truncated_normal(
    shape: ShapeLike,
    seed: TensorLike,
    mean: TensorLike = 0.0,
    stddev: TensorLike = 1.0,
    dtype: DTypeLike = np.float32,
    name: str | None = None,
    alg: object = "auto_select",
) -> jax.Array:
    """Draws normal numbers within two standard deviations that depend on `seed` (two integers) alone."""
    return _draws.truncated(_draws.of_seed(seed), shape, mean, stddev, dtype)


def stateless_gamma(
    shape: ShapeLike,
    seed: TensorLike,
    alpha: TensorLike,
    beta: TensorLike | None = None,
    dtype: DTypeLike = np.float32,
    name: str | None = None,
) -> jax.Array:
    """Draws from gamma distributions by `seed` (two integers) alone; the shape ends with alpha's."""
    return _draws.gamma(_draws.of_seed(seed), shape, alpha, beta, dtype, whole=True)


def stateless_poisson(
    shape: ShapeLike, seed: TensorLike, lam: TensorLike, dtype: DTypeLike = np.int32, name: str | None = None
) -> jax.Array:
    """Draws from Poisson distributions by `seed` (two integers) alone; the shape ends with lam's."""
    return _draws.poisson(_draws.of_seed(seed), shape, lam, dtype, whole=True)


def stateless_binomial(
    shape: ShapeLike,
    seed: TensorLike,
    counts: TensorLike,
    probs: TensorLike,
    output_dtype: DTypeLike = np.int32,
    name: str | None = None,
) -> jax.Array:
    """Draws from binomial distributions of `counts` trials by `seed` (two integers) alone."""
    return _draws.binomial(_draws.of_seed(seed), shape, counts, probs, output_dtype)


def stateless_categorical(
    logits: TensorLike, num_samples: TensorLike, seed: TensorLike, dtype: DTypeLike = np.int64, name: str | None = None
) -> jax.Array:
    """Draws classes by their logits, depending on `seed` (two integers) alone."""
    return _draws.categorical(_draws.of_seed(seed), logits, num_samples, dtype)


def stateless_shuffle(
    value: TensorLike, seed: TensorLike, alg: object = "auto_select", name: str | None = None
) -> jax.Array:
    """Returns the rows in an order that depends on `seed` (two integers) alone."""
    return _draws.shuffled(_draws.of_seed(seed), value)


def split(seed: TensorLike, num: int = 2, alg: object = "auto_select") -> jax.Array:
    """Returns `[num, 2]` seeds that depend on `seed` (two integers) alone."""
    split_keys = jax.random.split(keys.wrapped(_draws.words(seed)), num)
    return jax.random.key_data(split_keys).view(np.int32).astype(convert_to_tensor(seed).dtype)


def fold_in(seed: TensorLike, data: TensorLike, alg: object = "auto_select") -> jax.Array:
    """Returns a seed that depends on `seed` (two integers) and on a number."""
    key = jax.random.fold_in(keys.wrapped(_draws.words(seed)), convert_to_tensor(data))
    return jax.random.key_data(key).view(np.int32).astype(convert_to_tensor(seed).dtype)


RANDOM = """Algorithm Generator categorical fold_in gamma get_global_generator normal poisson set_global_generator
set_seed shuffle split stateless_binomial stateless_categorical stateless_gamma stateless_normal stateless_poisson
stateless_truncated_normal stateless_uniform truncated_normal uniform"""
