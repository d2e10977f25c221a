"""Random numbers with a hidden state, as in TensorFlow: each replica draws different, reproducible numbers."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from typing import SupportsInt, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base.specs import as_dtype
from replicax._variables.variable import Variable
from replicax.tf import _random_keys as keys
from replicax.tf._ops import as_new_shape, convert_to_tensor, of_dtype
from replicax.tf._types import DTypeLike, ShapeLike, TensorLike

_Draw: TypeAlias = Callable[..., jax.Array]


class Algorithm(enum.Enum):
    """Names of random number generators; JAX's own is used, whatever the name."""

    PHILOX = 1
    THREEFRY = 2
    AUTO_SELECT = 3


# Numbers from a key's words. Each kind is one program for each shape and dtype, called alone or within another.


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _drawn(
    sample: _Draw, words: jax.Array, shape: tuple[int, ...] | None, dtype: np.dtype | None, *parameters: jax.Array
) -> jax.Array:
    return sample(keys.wrapped(words), shape, dtype, *parameters)


# The functions below draw with this function. They call it with the arguments of `_drawn` except the words, after these
# have been checked, so that a call that fails does not advance a counter.


def _of_op(op: str, dtype: DTypeLike | None, seed: SupportsInt | None) -> _Draw:
    return lambda sample, *arguments: _drawn(sample, keys.of_op(op, dtype, seed), *arguments)


def _of_seed(seed: TensorLike) -> _Draw:
    return lambda sample, *arguments: _drawn(sample, _words(seed), *arguments)


def _flat(draw: _Draw, key: jax.Array, shape: tuple[int, ...], *parameters: object) -> jax.Array:
    """Draws the same numbers as `draw(key, shape)`, for which XLA takes several times as long to compile."""
    return draw(key, (math.prod(shape),), *parameters).reshape(shape)


def _normal_of(
    key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, mean: jax.Array, stddev: jax.Array
) -> jax.Array:
    if dtype == np.float64:  # `jax.random.normal` fails for it, as `jax.random.truncated_normal` does, see below
        part = _flat(jax.random.uniform, key, shape, dtype, np.nextafter(-1.0, 0.0), 1.0)
        drawn = math.sqrt(2) * jax.lax.erf_inv(part)
    else:
        drawn = _flat(jax.random.normal, key, shape, dtype)
    return drawn * stddev + mean


def _normal(
    draw: _Draw, shape: ShapeLike, mean: TensorLike = 0.0, stddev: TensorLike = 1.0, dtype: DTypeLike = np.float32
) -> jax.Array:
    dtype = as_dtype(dtype)
    return draw(_normal_of, as_new_shape(shape), dtype, _like(mean, dtype), _like(stddev, dtype))


def _truncated_of(
    key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, mean: jax.Array, stddev: jax.Array
) -> jax.Array:
    # `jax.random.truncated_normal` fails for float64 if `jax_enable_x64` is off (JAX 0.10 to 0.12).
    within = math.erf(math.sqrt(2))  # the part of a normal distribution within two standard deviations
    part = _flat(jax.random.uniform, key, shape, dtype, -within, within)
    return math.sqrt(2) * jax.lax.erf_inv(part) * stddev + mean


def _truncated(
    draw: _Draw, shape: ShapeLike, mean: TensorLike = 0.0, stddev: TensorLike = 1.0, dtype: DTypeLike = np.float32
) -> jax.Array:
    dtype = as_dtype(dtype)
    return draw(_truncated_of, as_new_shape(shape), dtype, _like(mean, dtype), _like(stddev, dtype))


def _uniform_of(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, low: jax.Array, high: jax.Array) -> jax.Array:
    if not jnp.issubdtype(dtype, jnp.integer):
        return jnp.maximum(low, _flat(jax.random.uniform, key, shape, dtype) * (high - low) + low)
    if np.dtype(dtype).itemsize < 8:
        draw = _flat if low.ndim == high.ndim == 0 else lambda draw, *arguments: draw(*arguments)
        return draw(jax.random.randint, key, shape, low, high, dtype)
    # `randint` cuts wide bounds off if `jax_enable_x64` is off (JAX 0.10 to 0.12).
    span = jnp.maximum(high - low, 1).astype(np.uint64)
    return low + (_flat(jax.random.bits, key, shape, np.uint64) % span).astype(dtype)


def _uniform(
    draw: _Draw,
    shape: ShapeLike,
    minval: TensorLike = 0,
    maxval: TensorLike | None = None,
    dtype: DTypeLike = np.float32,
) -> jax.Array:
    dtype = as_dtype(dtype)
    if maxval is None:
        if jnp.issubdtype(dtype, jnp.integer):
            raise ValueError(f"Must specify maxval for integer dtype {dtype}.")
        maxval = 1
    return draw(_uniform_of, as_new_shape(shape), dtype, _like(minval, dtype), _like(maxval, dtype))


def _full_of(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    bits = _flat(jax.random.bits, key, shape, np.dtype(f"u{dtype.itemsize}"))
    return jax.lax.bitcast_convert_type(bits, dtype)


def _gamma_of(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, alpha: jax.Array, beta: jax.Array) -> jax.Array:
    return jax.random.gamma(key, alpha, shape, dtype) / beta


def _gamma(
    draw: _Draw,
    shape: ShapeLike,
    alpha: TensorLike,
    beta: TensorLike | None = None,
    dtype: DTypeLike = np.float32,
    whole: bool = False,
) -> jax.Array:
    """Draws `shape` numbers from each distribution, unless `shape` is the `whole` shape."""
    dtype = as_dtype(dtype)
    alphas, betas = _like(alpha, dtype), _like(1 if beta is None else beta, dtype)
    drawn = as_new_shape(shape) + (() if whole else np.broadcast_shapes(alphas.shape, betas.shape))
    return draw(_gamma_of, drawn, dtype, alphas, betas)


def _poisson_of(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, lam: jax.Array) -> jax.Array:
    return jax.random.poisson(key, lam, shape, np.int32).astype(dtype)


def _poisson(
    draw: _Draw, shape: ShapeLike, lam: TensorLike, dtype: DTypeLike = np.float32, whole: bool = False
) -> jax.Array:
    rates = _like(lam, np.float32)
    return draw(_poisson_of, as_new_shape(shape) + (() if whole else rates.shape), as_dtype(dtype), rates)


def _categorical_of(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, logits: jax.Array) -> jax.Array:
    return jax.random.categorical(key, logits[:, None, :], shape=shape).astype(dtype)


def _categorical(
    draw: _Draw, logits: TensorLike, num_samples: TensorLike, dtype: DTypeLike | None = np.int64
) -> jax.Array:
    """Draws classes `[batch, num_samples]` from logits `[batch, classes]`."""
    scores, (count,) = convert_to_tensor(logits), as_new_shape([num_samples])
    dtype = np.dtype(np.int64) if dtype is None else as_dtype(dtype)
    return draw(_categorical_of, (scores.shape[0], count), dtype, scores)


def _binomial_of(
    key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, counts: jax.Array, probs: jax.Array
) -> jax.Array:
    return jax.random.binomial(key, counts, probs, shape).astype(dtype)


def _binomial(
    draw: _Draw, shape: ShapeLike, counts: TensorLike, probs: TensorLike, dtype: DTypeLike = np.int32
) -> jax.Array:
    parameters = _like(counts, np.float32), _like(probs, np.float32)
    return draw(_binomial_of, as_new_shape(shape), as_dtype(dtype), *parameters)


def _shuffled_of(key: jax.Array, shape: None, dtype: None, value: jax.Array) -> jax.Array:
    return jax.random.permutation(key, value)


def _shuffled(draw: _Draw, value: TensorLike) -> jax.Array:
    return draw(_shuffled_of, None, None, convert_to_tensor(value))


def _like(value: TensorLike, dtype: np.dtype | type) -> jax.Array | np.ndarray:
    """Converts a parameter to the dtype of the drawn numbers. Values on the host stay there, as inputs of the
    program.
    """
    value = convert_to_tensor(value) if isinstance(value, Variable) else value
    if isinstance(value, jax.Array):
        return value if value.dtype == dtype else value.astype(dtype)
    return np.asarray(value).astype(dtype) if np.dtype(dtype).itemsize < 8 else of_dtype(value, dtype)


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
        return self._state.value()[0]

    def reset(self, state: TensorLike) -> None:
        """Continues from a state."""
        self._state.assign(_as_state(state))

    def reset_from_seed(self, seed: int) -> None:
        """Starts the stream of `seed`."""
        self.reset([seed, 0])

    def skip(self, delta: int) -> None:
        """Skips `delta` draws."""
        self._state.assign_add(np.asarray([0, delta], np.uint32))

    def split(self, count: int = 1) -> list[Generator]:
        """Returns `count` generators with streams of their own."""
        seeds = np.asarray(self._draw(_full_of, (count, 2), np.dtype(np.uint32)))
        return [type(self)(state=seed) for seed in seeds]

    def make_seeds(self, count: int = 1) -> jax.Array:
        """Returns seeds `[2, count]`; each column is a seed for the stateless functions."""
        return self._draw(_full_of, (2, count), np.dtype(np.uint32)).astype(np.int64)

    def _draw(
        self, sample: _Draw, shape: tuple[int, ...], dtype: np.dtype, *parameters: jax.Array | np.ndarray
    ) -> jax.Array:
        # Two programs, since a state that the drawing program returned would be lost if it ran out of memory.
        words, state = keys.of_state(self._state.value(), keys.replica())
        drawn = _drawn(sample, words, shape, dtype, *parameters)
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
        return _normal(self._draw, shape, mean, stddev, dtype)

    def truncated_normal(
        self,
        shape: ShapeLike,
        mean: TensorLike = 0.0,
        stddev: TensorLike = 1.0,
        dtype: DTypeLike = np.float32,
        name: str | None = None,
    ) -> jax.Array:
        """Draws normally distributed numbers within two standard deviations of the mean."""
        return _truncated(self._draw, shape, mean, stddev, dtype)

    def uniform(
        self,
        shape: ShapeLike,
        minval: TensorLike = 0,
        maxval: TensorLike | None = None,
        dtype: DTypeLike = np.float32,
        name: str | None = None,
    ) -> jax.Array:
        """Draws uniformly distributed numbers from `minval` up to, not including, `maxval` (1 by default)."""
        return _uniform(self._draw, shape, minval, maxval, dtype)

    def uniform_full_int(self, shape: ShapeLike, dtype: DTypeLike = np.uint64, name: str | None = None) -> jax.Array:
        """Draws integers from the full range of the dtype."""
        dtype = np.dtype(as_dtype(dtype))
        return self._draw(_full_of, as_new_shape(shape), dtype)

    def binomial(
        self,
        shape: ShapeLike,
        counts: TensorLike,
        probs: TensorLike,
        dtype: DTypeLike = np.int32,
        name: str | None = None,
    ) -> jax.Array:
        """Draws from binomial distributions: the number of successes in `counts` trials with probability `probs`."""
        return _binomial(self._draw, shape, counts, probs, dtype)


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
    return _normal(_of_op("normal", as_dtype(dtype), seed), shape, mean, stddev, dtype)


def truncated_normal(
    shape: ShapeLike,
    mean: TensorLike = 0.0,
    stddev: TensorLike = 1.0,
    dtype: DTypeLike = np.float32,
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws normally distributed numbers within two standard deviations of the mean."""
    return _truncated(_of_op("truncated_normal", as_dtype(dtype), seed), shape, mean, stddev, dtype)


def uniform(
    shape: ShapeLike,
    minval: TensorLike = 0,
    maxval: TensorLike | None = None,
    dtype: DTypeLike = np.float32,
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws uniformly distributed numbers from `minval` up to, not including, `maxval` (1 by default)."""
    return _uniform(_of_op("uniform", as_dtype(dtype), seed), shape, minval, maxval, dtype)


def gamma(
    shape: ShapeLike,
    alpha: TensorLike,
    beta: TensorLike | None = None,
    dtype: DTypeLike = np.float32,
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws `shape` numbers from each of the gamma distributions."""
    return _gamma(_of_op("gamma", as_dtype(dtype), seed), shape, alpha, beta, dtype)


def poisson(
    shape: ShapeLike,
    lam: TensorLike,
    dtype: DTypeLike = np.float32,
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws `shape` numbers from each of the Poisson distributions."""
    return _poisson(_of_op("poisson", as_dtype(dtype), seed), shape, lam, dtype)


def categorical(
    logits: TensorLike,
    num_samples: TensorLike,
    dtype: DTypeLike | None = None,
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws classes `[batch, num_samples]` from logits `[batch, classes]`."""
    return _categorical(_of_op("categorical", dtype, seed), logits, num_samples, dtype)


def shuffle(value: TensorLike, seed: SupportsInt | None = None, name: str | None = None) -> jax.Array:
    """Returns the rows in random order."""
    return _shuffled(_of_op("shuffle", None, seed), value)


# Stateless functions: the numbers depend on `seed` (two integers) alone.


def _words(seed: TensorLike) -> jax.Array | np.ndarray:
    """Returns the words of a key, which are the two integers of `seed`."""
    words: jax.Array | np.ndarray
    if isinstance(seed, (list, tuple)) and all(isinstance(n, (int, np.integer)) for n in seed):
        words = np.asarray([int(n) & 0xFFFFFFFF for n in seed], np.uint32)
    else:
        words = convert_to_tensor(seed)
    if words.shape != (2,):
        raise ValueError(f"seed must have shape [2], got {list(words.shape)}.")
    return words


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
    return _uniform(_of_seed(seed), shape, minval, maxval, dtype)


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
    return _normal(_of_seed(seed), shape, mean, stddev, dtype)


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
    return _truncated(_of_seed(seed), shape, mean, stddev, dtype)


def stateless_gamma(
    shape: ShapeLike,
    seed: TensorLike,
    alpha: TensorLike,
    beta: TensorLike | None = None,
    dtype: DTypeLike = np.float32,
    name: str | None = None,
) -> jax.Array:
    """Draws from gamma distributions by `seed` (two integers) alone; the shape ends with alpha's."""
    return _gamma(_of_seed(seed), shape, alpha, beta, dtype, whole=True)


def stateless_poisson(
    shape: ShapeLike, seed: TensorLike, lam: TensorLike, dtype: DTypeLike = np.int32, name: str | None = None
) -> jax.Array:
    """Draws from Poisson distributions by `seed` (two integers) alone; the shape ends with lam's."""
    return _poisson(_of_seed(seed), shape, lam, dtype, whole=True)


def stateless_binomial(
    shape: ShapeLike,
    seed: TensorLike,
    counts: TensorLike,
    probs: TensorLike,
    output_dtype: DTypeLike = np.int32,
    name: str | None = None,
) -> jax.Array:
    """Draws from binomial distributions of `counts` trials by `seed` (two integers) alone."""
    return _binomial(_of_seed(seed), shape, counts, probs, output_dtype)


def stateless_categorical(
    logits: TensorLike, num_samples: TensorLike, seed: TensorLike, dtype: DTypeLike = np.int64, name: str | None = None
) -> jax.Array:
    """Draws classes by their logits, depending on `seed` (two integers) alone."""
    return _categorical(_of_seed(seed), logits, num_samples, dtype)


def stateless_shuffle(
    value: TensorLike, seed: TensorLike, alg: object = "auto_select", name: str | None = None
) -> jax.Array:
    """Returns the rows in an order that depends on `seed` (two integers) alone."""
    return _shuffled(_of_seed(seed), value)


def split(seed: TensorLike, num: int = 2, alg: object = "auto_select") -> jax.Array:
    """Returns `[num, 2]` seeds that depend on `seed` (two integers) alone."""
    split_keys = jax.random.split(keys.wrapped(_words(seed)), num)
    return jax.random.key_data(split_keys).view(np.int32).astype(convert_to_tensor(seed).dtype)


def fold_in(seed: TensorLike, data: TensorLike, alg: object = "auto_select") -> jax.Array:
    """Returns a seed that depends on `seed` (two integers) and on a number."""
    key = jax.random.fold_in(keys.wrapped(_words(seed)), convert_to_tensor(data))
    return jax.random.key_data(key).view(np.int32).astype(convert_to_tensor(seed).dtype)


RANDOM = """Algorithm Generator categorical fold_in gamma get_global_generator normal poisson set_global_generator
set_seed shuffle split stateless_binomial stateless_categorical stateless_gamma stateless_normal stateless_poisson
stateless_truncated_normal stateless_uniform truncated_normal uniform"""
