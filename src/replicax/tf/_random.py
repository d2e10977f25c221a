"""Random numbers with a hidden state, as TensorFlow has them: replicas draw different ones, reproducibly."""

from __future__ import annotations

import enum
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _context, _private
from replicax._specs import as_dtype
from replicax._variables import ResourceVariable, Variable
from replicax.tf._ops import as_int, as_shape, convert_to_tensor, of_dtype


class Algorithm(enum.Enum):
    """Names of random number generators; JAX's own is taken, whatever the name."""

    PHILOX = 1
    THREEFRY = 2
    AUTO_SELECT = 3


# From a key to numbers.


def _normal(key: Any, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = np.float32) -> Any:
    dtype = as_dtype(dtype)
    if dtype == np.float64:  # `jax.random.normal` fails for it, as `jax.random.truncated_normal` does, see below
        part = jax.random.uniform(key, as_shape(shape), dtype, np.nextafter(-1.0, 0.0), 1.0)
        drawn = math.sqrt(2) * jax.lax.erf_inv(part)
    else:
        drawn = jax.random.normal(key, as_shape(shape), dtype)
    return drawn * _like(stddev, dtype) + _like(mean, dtype)


def _truncated(key: Any, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = np.float32) -> Any:
    dtype = as_dtype(dtype)
    # `jax.random.truncated_normal` fails for float64 where 64-bit types are had only on request (0.10 to 0.12).
    within = math.erf(math.sqrt(2))  # the part of a normal distribution within two standard deviations
    part = jax.random.uniform(key, as_shape(shape), dtype, -within, within)
    return math.sqrt(2) * jax.lax.erf_inv(part) * _like(stddev, dtype) + _like(mean, dtype)


def _uniform(key: Any, shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = np.float32) -> Any:
    dtype = as_dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        if maxval is None:
            raise ValueError(f"Must specify maxval for integer dtype {dtype}.")
        low, high = _like(minval, dtype), _like(maxval, dtype)
        if np.dtype(dtype).itemsize < 8:
            return jax.random.randint(key, as_shape(shape), low, high, dtype)
        # `randint` cuts wide bounds off where 64-bit types are had only on request (0.10 to 0.12).
        span = jnp.maximum(high - low, 1).astype(np.uint64)
        return low + (jax.random.bits(key, as_shape(shape), np.uint64) % span).astype(dtype)
    low, high = _like(minval, dtype), _like(1 if maxval is None else maxval, dtype)
    return jax.random.uniform(key, as_shape(shape), dtype, low, high)


def _gamma(key: Any, shape: Any, alpha: Any, beta: Any = None, dtype: Any = np.float32) -> Any:
    """`shape` draws for each of the distributions."""
    alpha = jnp.asarray(alpha, as_dtype(dtype))
    beta = jnp.asarray(1 if beta is None else beta, alpha.dtype)
    shape = as_shape(shape) + np.broadcast_shapes(alpha.shape, beta.shape)
    return jax.random.gamma(key, alpha, shape, alpha.dtype) / beta


def _poisson(key: Any, shape: Any, lam: Any, dtype: Any = np.float32) -> Any:
    lam = jnp.asarray(lam, np.float32)
    return jax.random.poisson(key, lam, as_shape(shape) + lam.shape, np.int32).astype(as_dtype(dtype))


def _categorical(key: Any, logits: Any, num_samples: Any, dtype: Any = np.int64) -> Any:
    """`[batch, num_samples]` classes from logits `[batch, classes]`."""
    logits, count = convert_to_tensor(logits), as_int(num_samples, "num_samples")
    classes = jax.random.categorical(key, logits[:, None, :], shape=(logits.shape[0], count))
    return classes.astype(np.int64 if dtype is None else as_dtype(dtype))


def _binomial(key: Any, shape: Any, counts: Any, probs: Any, dtype: Any = np.int32) -> Any:
    counts, probs = jnp.asarray(counts, np.float32), jnp.asarray(probs, np.float32)
    return jax.random.binomial(key, counts, probs, as_shape(shape)).astype(as_dtype(dtype))


def _like(value: Any, dtype: Any) -> Any:
    return of_dtype(convert_to_tensor(value) if isinstance(value, Variable) else value, dtype)


class Generator:
    """A stream of random numbers. Made in a strategy's scope, it gives each replica a stream of its own."""

    def __init__(self, copy_from: Any = None, state: Any = None, alg: Any = None):
        if isinstance(copy_from, Variable):
            self._state = copy_from
            return
        if copy_from is not None:
            state = copy_from.state.value()
        if state is None:
            raise ValueError("Give a state, or make a generator with Generator.from_seed(seed).")
        self._state = _variable(state)

    @classmethod
    def from_seed(cls, seed: int, alg: Any = None) -> Generator:
        """A generator whose stream is fixed by `seed`."""
        return cls(state=[seed, 0])

    @classmethod
    def from_state(cls, state: Any, alg: Any = None) -> Generator:
        """A generator that goes on from a state."""
        return cls(state=state)

    @classmethod
    def from_non_deterministic_state(cls, alg: Any = None) -> Generator:
        """A generator with a stream of its own in each run."""
        return cls.from_seed(int(np.random.SeedSequence().generate_state(1)[0]))

    def _tracked(self) -> dict[str, Any]:
        return {"_state_var": self._state}  # what a checkpoint saves

    @property
    def state(self) -> Any:
        """The variable with the seed and the number of draws."""
        return self._state

    @property
    def algorithm(self) -> int:
        """The number of the algorithm."""
        return Algorithm.THREEFRY.value

    @property
    def key(self) -> Any:
        """The seed."""
        return self._state.value()[0]

    def reset(self, state: Any) -> None:
        """Goes on from a state."""
        self._state.assign(_as_state(state))

    def reset_from_seed(self, seed: int) -> None:
        """Starts the stream that `seed` fixes."""
        self.reset([seed, 0])

    def skip(self, delta: int) -> None:
        """Leaves out `delta` draws."""
        self._state.assign_add(np.asarray([0, delta], np.uint32))

    def split(self, count: int = 1) -> list[Generator]:
        """So many generators with streams of their own."""
        seeds = np.asarray(jax.random.bits(self._key(), (count, 2), np.uint32))
        return [type(self)(state=seed) for seed in seeds]

    def make_seeds(self, count: int = 1) -> Any:
        """`[2, count]` seeds, of which each column is one for the stateless functions."""
        return jax.random.bits(self._key(), (2, count), np.uint32).astype(np.int64)

    def _key(self) -> Any:
        state = self._state.value()
        self._state.assign_add(np.asarray([0, 1], np.uint32))
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), state[0]), state[1])
        replica_context = _context.get_replica_context()
        replica = 0 if replica_context is None else replica_context.replica_id_in_sync_group
        return jax.random.fold_in(key, replica)

    def normal(self, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = np.float32, name: Any = None) -> Any:
        """Normally distributed numbers."""
        return _normal(self._key(), shape, mean, stddev, dtype)

    def truncated_normal(
        self, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = np.float32, name: Any = None
    ) -> Any:
        """Normally distributed numbers, none further than two standard deviations from the mean."""
        return _truncated(self._key(), shape, mean, stddev, dtype)

    def uniform(
        self, shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = np.float32, name: Any = None
    ) -> Any:
        """Uniformly distributed numbers from `minval` to before `maxval` (1 by default)."""
        return _uniform(self._key(), shape, minval, maxval, dtype)

    def uniform_full_int(self, shape: Any, dtype: Any = np.uint64, name: Any = None) -> Any:
        """Integers of all values that the dtype has."""
        dtype = np.dtype(as_dtype(dtype))
        bits = jax.random.bits(self._key(), as_shape(shape), np.dtype(f"u{dtype.itemsize}"))
        return jax.lax.bitcast_convert_type(bits, dtype)

    def binomial(self, shape: Any, counts: Any, probs: Any, dtype: Any = np.int32, name: Any = None) -> Any:
        """How many of `counts` trials succeed, each with a probability."""
        return _binomial(self._key(), shape, counts, probs, dtype)


def _as_state(state: Any) -> np.ndarray:
    """Whole numbers, of which the lower 32 bits count."""
    return (np.asarray(state).astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)[:2]


def _variable(state: Any) -> Variable:
    return Variable(lambda: _as_state(state), trainable=False, name="generator")


# The module's own generators: one, and one more for each `seed` that a call names.

_generators: dict[int | None, Generator] = {}
_seed: list[int] = []


def _generator(seed: int | None = None) -> Generator:
    if seed not in _generators:
        if seed is not None:
            sequence = np.random.SeedSequence([*_seed, abs(int(seed)), int(seed < 0)])
        else:
            sequence = np.random.SeedSequence(_seed[0] if _seed else None)
        start = int(sequence.generate_state(1)[0]) if seed is not None or not _seed else _seed[0]
        with _private.at_once():  # the first call may be traced
            state = ResourceVariable(_as_state([start, 0]), trainable=False, name="seed")
        _generators[seed] = Generator(state)
    return _generators[seed]


def get_global_generator() -> Generator:
    """The generator of the functions of this module."""
    return _generator()


def set_global_generator(generator: Generator) -> None:
    """Has the functions of this module draw from this generator."""
    _generators[None] = generator


def set_seed(seed: int) -> None:
    """Fixes the stream of the functions of this module."""
    _seed[:] = [int(seed)]
    _generators.clear()


def normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = np.float32, seed: Any = None, name: Any = None):
    """Normally distributed numbers."""
    return _normal(_generator(seed)._key(), shape, mean, stddev, dtype)


def truncated_normal(
    shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = np.float32, seed: Any = None, name: Any = None
) -> Any:
    """Normally distributed numbers, none further than two standard deviations from the mean."""
    return _truncated(_generator(seed)._key(), shape, mean, stddev, dtype)


def uniform(
    shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = np.float32, seed: Any = None, name: Any = None
):
    """Uniformly distributed numbers from `minval` to before `maxval` (1 by default)."""
    return _uniform(_generator(seed)._key(), shape, minval, maxval, dtype)


def gamma(shape: Any, alpha: Any, beta: Any = None, dtype: Any = np.float32, seed: Any = None, name: Any = None) -> Any:
    """`shape` draws from each of the gamma distributions."""
    return _gamma(_generator(seed)._key(), shape, alpha, beta, dtype)


def poisson(shape: Any, lam: Any, dtype: Any = np.float32, seed: Any = None, name: Any = None) -> Any:
    """`shape` draws from each of the Poisson distributions."""
    return _poisson(_generator(seed)._key(), shape, lam, dtype)


def categorical(logits: Any, num_samples: Any, dtype: Any = None, seed: Any = None, name: Any = None) -> Any:
    """`[batch, num_samples]` classes drawn by their logits, `[batch, classes]`."""
    return _categorical(_generator(seed)._key(), logits, num_samples, dtype)


def shuffle(value: Any, seed: Any = None, name: Any = None) -> Any:
    """The rows in a random order."""
    return jax.random.permutation(_generator(seed)._key(), convert_to_tensor(value))


# Without a state: what they give depends on `seed`, two integers, alone.


def _stateless_key(seed: Any) -> Any:
    seed = convert_to_tensor(seed)
    if seed.shape != (2,):
        raise ValueError(f"seed must have shape [2], got {list(seed.shape)}.")
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed[0]), seed[1])


def stateless_uniform(
    shape: Any,
    seed: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = np.float32,
    name: Any = None,
    alg: Any = "auto_select",
) -> Any:
    """Uniformly distributed numbers that depend on `seed` (two integers) alone."""
    return _uniform(_stateless_key(seed), shape, minval, maxval, dtype)


def stateless_normal(
    shape: Any,
    seed: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = np.float32,
    name: Any = None,
    alg: Any = "auto_select",
) -> Any:
    """Normally distributed numbers that depend on `seed` (two integers) alone."""
    return _normal(_stateless_key(seed), shape, mean, stddev, dtype)


def stateless_truncated_normal(
    shape: Any,
    seed: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = np.float32,
    name: Any = None,
    alg: Any = "auto_select",
) -> Any:
    """Normally distributed numbers within two standard deviations that depend on `seed` (two integers) alone."""
    return _truncated(_stateless_key(seed), shape, mean, stddev, dtype)


def stateless_gamma(
    shape: Any, seed: Any, alpha: Any, beta: Any = None, dtype: Any = np.float32, name: Any = None
) -> Any:
    """Draws from gamma distributions that depend on `seed` (two integers) alone; their shape ends with alpha's."""
    alpha = jnp.asarray(alpha, as_dtype(dtype))
    beta = jnp.asarray(1 if beta is None else beta, alpha.dtype)
    return jax.random.gamma(_stateless_key(seed), alpha, as_shape(shape), alpha.dtype) / beta


def stateless_poisson(shape: Any, seed: Any, lam: Any, dtype: Any = np.int32, name: Any = None) -> Any:
    """Draws from Poisson distributions that depend on `seed` (two integers) alone; their shape ends with lam's."""
    lam = jnp.asarray(lam, np.float32)
    return jax.random.poisson(_stateless_key(seed), lam, as_shape(shape), np.int32).astype(as_dtype(dtype))


def stateless_binomial(
    shape: Any, seed: Any, counts: Any, probs: Any, output_dtype: Any = np.int32, name: Any = None
) -> Any:
    """How many of `counts` trials succeed, which depends on `seed` (two integers) alone."""
    return _binomial(_stateless_key(seed), shape, counts, probs, output_dtype)


def stateless_categorical(logits: Any, num_samples: Any, seed: Any, dtype: Any = np.int64, name: Any = None) -> Any:
    """Classes drawn by their logits, which depend on `seed` (two integers) alone."""
    return _categorical(_stateless_key(seed), logits, num_samples, dtype)


def stateless_shuffle(value: Any, seed: Any, alg: Any = "auto_select", name: Any = None) -> Any:
    """The rows in an order that depends on `seed` (two integers) alone."""
    return jax.random.permutation(_stateless_key(seed), convert_to_tensor(value))


def split(seed: Any, num: int = 2, alg: Any = "auto_select") -> Any:
    """`[num, 2]` seeds that depend on `seed` (two integers) alone."""
    keys = jax.random.split(_stateless_key(seed), num)
    return jax.random.key_data(keys).view(np.int32).astype(convert_to_tensor(seed).dtype)


def fold_in(seed: Any, data: Any, alg: Any = "auto_select") -> Any:
    """A seed that depends on `seed` (two integers) and on a number."""
    key = jax.random.fold_in(_stateless_key(seed), convert_to_tensor(data))
    return jax.random.key_data(key).view(np.int32).astype(convert_to_tensor(seed).dtype)


RANDOM = """Algorithm Generator categorical fold_in gamma get_global_generator normal poisson set_global_generator
set_seed shuffle split stateless_binomial stateless_categorical stateless_gamma stateless_normal stateless_poisson
stateless_truncated_normal stateless_uniform truncated_normal uniform"""
