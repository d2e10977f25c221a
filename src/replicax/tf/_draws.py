"""Random numbers drawn from a key: what the operations of `tf.random` and its generators have in common."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, SupportsInt, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from replicax.tf import _host
from replicax.tf import _random_keys as keys
from replicax.tf._core import Variable, array_conversion, as_dtype, devices, frames, jax_internals
from replicax.tf._host import as_jax, settled
from replicax.tf._op_tables import of_dtype
from replicax.tf._ops import as_new_shape, convert_to_tensor
from replicax.tf._types import DTypeLike, ShapeLike, TensorLike

Draw: TypeAlias = Callable[..., jax.Array]


# Numbers from a key's words. Each kind is one program for each shape and dtype, called alone or within another.


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def drawn(
    sample: Draw, words: jax.Array, shape: tuple[int, ...] | None, dtype: np.dtype | None, *parameters: jax.Array
) -> jax.Array:
    # If the words are constants, XLA computes few numbers while it compiles, without the fused operations of a compiled
    # program, and the last bits would differ from those in eager code.
    return sample(keys.wrapped(jax.lax.optimization_barrier(words)), shape, dtype, *parameters)


_ROUNDED = 1 << 20  # the largest number of numbers that is rounded up
_OFTEN = 100  # after so many draws a shape is worth a program of its own, whose calls are quicker
_draws: collections.Counter[tuple[Draw, tuple[int, ...], np.dtype | None]] = collections.Counter()
_FEW = 4096  # numbers of which two draws compile faster as one


def now(
    sample: Draw, words: jax.Array | np.ndarray, shape: tuple[int, ...] | None, dtype: np.dtype | None, *parameters: Any
) -> jax.Array | np.ndarray:
    """Returns what `drawn` returns, in eager code on a CPU without a program for each shape.

    The first numbers are the same however many are drawn. So it draws some more, up to the next of few sizes, and drops
    those that are over. Then it returns an array of NumPy.
    """
    count = math.prod(shape or ())  # no int where a dimension is not known while a function is traced
    if shape and isinstance(count, int) and sample in _LEADING and not any(np.ndim(p) for p in parameters):
        size, kind = (_rounded(count),), (sample, shape, dtype)
        few = shape != size and count <= _ROUNDED and _draws[kind] < _OFTEN
        if few and jax_internals.is_eager(frames.untaped_trace()) and _on_cpu(words):
            _draws[kind] += 1
            return np.asarray(drawn(sample, words, size, dtype, *parameters))[:count].reshape(shape)
    result: jax.Array | np.ndarray = drawn(sample, words, shape, dtype, *parameters)
    return result


# Functions of datasets that run in Python draw a few numbers for each element, with keys that count the elements. A
# call of a program costs more than such numbers, so one call draws for several elements.
_ELEMENTS = 64  # a power of two
_blocks: collections.OrderedDict[tuple[Any, ...], np.ndarray] = collections.OrderedDict()
_MOST_BLOCKS, _MOST_NUMBERS = 256, 16


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _drawn_for_each(
    sample: Draw, words: jax.Array, shape: tuple[int, ...], dtype: np.dtype | None, *parameters: jax.Array
) -> jax.Array:
    return jax.vmap(lambda own: sample(keys.wrapped(own), shape, dtype, *parameters))(words)


def _for_element(
    sample: Draw,
    words: tuple[int, int],
    shape: tuple[int, ...] | None,
    dtype: np.dtype | None,
    *parameters: Any,
) -> jax.Array | np.ndarray:
    """Returns numbers for an element in a function of a dataset that runs in Python, as its program would draw them."""
    count = math.prod(shape or ())
    varying = [p for p in parameters if not isinstance(p, np.ndarray) or p.ndim]
    if shape is None or sample not in _LEADING or count > _MOST_NUMBERS or varying:
        return now(sample, np.asarray(words, np.uint32), shape, dtype, *parameters)
    first, second = words[0] & -_ELEMENTS, words[1]
    kind = (sample, dtype, first, second, *[p.tobytes() for p in parameters])
    block = _blocks.get(kind)
    if block is None:
        of_each = np.asarray([[first + i, second] for i in range(_ELEMENTS)], np.uint32)
        block = np.asarray(_drawn_for_each(sample, of_each, (_MOST_NUMBERS,), dtype, *parameters))
        _blocks[kind] = block
        with contextlib.suppress(KeyError):  # another thread may have dropped it
            while len(_blocks) > _MOST_BLOCKS:
                _blocks.popitem(last=False)
    return block[words[0] - first, :count].reshape(shape)


def _rounded(count: int) -> int:
    """Returns the next size: of those from 32 on there are four between a power of two and the next."""
    step = 1 << max(3, count.bit_length() - 3)
    return max(16, -(-count // step) * step)


def _on_cpu(words: jax.Array | np.ndarray) -> bool:
    """Returns whether what is drawn comes to lie on the CPU, where NumPy reads it."""
    if isinstance(words, jax.Array):
        return not words.committed and next(iter(words.devices())).platform == "cpu"
    return bool(devices.default_device().platform == "cpu")


def settle(found: jax.Array | np.ndarray) -> jax.Array:
    """Returns what `now` returned as a tensor. It may share the memory, to which nobody writes."""
    if isinstance(found, jax.Array):
        return settled(found)
    if _host.is_on():
        return _host.hosted(found)
    return array_conversion.sharing(found)  # `jnp.asarray` would compile a program for each shape


# The functions below draw with this function. They call it with the arguments of `drawn` except the words, after these
# have been checked, so that a call that fails does not advance a counter.


def of_op(op: str, dtype: DTypeLike | None, seed: SupportsInt | None) -> Draw:
    def draw(sample: Draw, *arguments: Any) -> jax.Array:
        if not _host.is_on():
            return settle(now(sample, keys.of_op(op, dtype, seed), *map(as_jax, arguments)))
        words, parameters = keys.next_words(op, dtype, seed), map(as_jax, arguments)
        if isinstance(words, tuple):
            return settle(_for_element(sample, words, *parameters))
        return settle(now(sample, words, *parameters))

    return draw


def of_seed(seed: TensorLike) -> Draw:
    return lambda sample, *arguments: settle(now(sample, words(seed), *map(as_jax, arguments)))


def _flat(draw: Draw, key: jax.Array, shape: tuple[int, ...], *parameters: object) -> jax.Array:
    """Draws the same numbers as `draw(key, shape)`, for which XLA takes several times as long to compile."""
    return draw(key, (math.prod(shape),), *parameters).reshape(shape)


def _normal_of(
    key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, mean: jax.Array, stddev: jax.Array
) -> jax.Array:
    if dtype == np.float64:  # `jax.random.normal` fails for it, as `jax.random.truncated_normal` does, see below
        part = _flat(jax.random.uniform, key, shape, dtype, np.nextafter(-1.0, 0.0), 1.0)
        standard = math.sqrt(2) * jax.lax.erf_inv(part)
    else:
        standard = _flat(jax.random.normal, key, shape, dtype)
    return standard * stddev + mean


def normal(draw: Draw, shape: ShapeLike, mean: TensorLike, stddev: TensorLike, dtype: DTypeLike) -> jax.Array:
    dtype = as_dtype(dtype)
    return draw(_normal_of, as_new_shape(shape), dtype, _like(mean, dtype), _like(stddev, dtype))


def _truncated_of(
    key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, mean: jax.Array, stddev: jax.Array
) -> jax.Array:
    # `jax.random.truncated_normal` fails for float64 if `jax_enable_x64` is off (JAX 0.10 to 0.12).
    within = math.erf(math.sqrt(2))  # the part of a normal distribution within two standard deviations
    part = _flat(jax.random.uniform, key, shape, dtype, -within, within)
    return math.sqrt(2) * jax.lax.erf_inv(part) * stddev + mean


def truncated(draw: Draw, shape: ShapeLike, mean: TensorLike, stddev: TensorLike, dtype: DTypeLike) -> jax.Array:
    dtype = as_dtype(dtype)
    return draw(_truncated_of, as_new_shape(shape), dtype, _like(mean, dtype), _like(stddev, dtype))


def _uniform_of(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, low: jax.Array, high: jax.Array) -> jax.Array:
    if not jnp.issubdtype(dtype, jnp.integer):
        return jnp.maximum(low, _flat(jax.random.uniform, key, shape, dtype) * (high - low) + low)
    if np.dtype(dtype).itemsize < 8:
        if low.ndim == high.ndim == 0:
            return _flat(_integers_of, key, shape, dtype, low, high)
        return jax.random.randint(key, shape, low, high, dtype)
    # `randint` cuts wide bounds off if `jax_enable_x64` is off (JAX 0.10 to 0.12).
    span = jnp.maximum(high - low, 1).astype(np.uint64)
    return low + (_flat(jax.random.bits, key, shape, np.uint64) % span).astype(dtype)


def _integers_of(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, low: jax.Array, high: jax.Array) -> jax.Array:
    """Draws the numbers of `jax.random.randint`, which takes six times as long to compile."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    of_halves = jax.vmap if math.prod(shape) <= _FEW else lambda draw: functools.partial(jax.lax.map, draw)
    upper, lower = of_halves(lambda half: jax.random.bits(half, shape, unsigned))(jax.random.split(key))
    span = jnp.maximum(high.astype(unsigned) - low.astype(unsigned), 1)
    span = jnp.broadcast_to(jnp.where(high <= low, span.dtype.type(1), span), shape)
    root = jax.lax.rem(jnp.full(shape, 1 << (4 * dtype.itemsize), unsigned), span)
    drawn = jax.lax.rem(upper, span) * jax.lax.rem(root * root, span) + jax.lax.rem(lower, span)
    return low + jax.lax.rem(drawn, span).astype(dtype)


def uniform(
    draw: Draw,
    shape: ShapeLike,
    minval: TensorLike,
    maxval: TensorLike | None,
    dtype: DTypeLike,
) -> jax.Array:
    dtype = as_dtype(dtype)
    if maxval is None:
        if jnp.issubdtype(dtype, jnp.integer):
            raise ValueError(f"Must specify maxval for integer dtype {dtype}.")
        maxval = 1
    return draw(_uniform_of, as_new_shape(shape), dtype, _like(minval, dtype), _like(maxval, dtype))


def full_of(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    bits = _flat(jax.random.bits, key, shape, np.dtype(f"u{dtype.itemsize}"))
    return jax.lax.bitcast_convert_type(bits, dtype)


# The samplers whose numbers are the same however many are drawn.
_LEADING = (_normal_of, _truncated_of, _uniform_of, full_of)


def _gamma_of(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, alpha: jax.Array, beta: jax.Array) -> jax.Array:
    return jax.random.gamma(key, alpha, shape, dtype) / beta


def gamma(
    draw: Draw,
    shape: ShapeLike,
    alpha: TensorLike,
    beta: TensorLike | None,
    dtype: DTypeLike,
    whole: bool = False,
) -> jax.Array:
    """Draws `shape` numbers from each distribution, unless `shape` is the `whole` shape."""
    dtype = as_dtype(dtype)
    alphas, betas = _like(alpha, dtype), _like(1 if beta is None else beta, dtype)
    of_all = as_new_shape(shape) + (() if whole else np.broadcast_shapes(alphas.shape, betas.shape))
    return draw(_gamma_of, of_all, dtype, alphas, betas)


def _poisson_of(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, lam: jax.Array) -> jax.Array:
    return jax.random.poisson(key, lam, shape, np.int32).astype(dtype)


def poisson(draw: Draw, shape: ShapeLike, lam: TensorLike, dtype: DTypeLike, whole: bool = False) -> jax.Array:
    rates = _like(lam, np.float32)
    return draw(_poisson_of, as_new_shape(shape) + (() if whole else rates.shape), as_dtype(dtype), rates)


def _categorical_of(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, logits: jax.Array) -> jax.Array:
    return jax.random.categorical(key, logits[:, None, :], shape=shape).astype(dtype)


def categorical(draw: Draw, logits: TensorLike, num_samples: TensorLike, dtype: DTypeLike | None) -> jax.Array:
    """Draws classes `[batch, num_samples]` from logits `[batch, classes]`."""
    scores, (count,) = convert_to_tensor(logits), as_new_shape([num_samples])
    dtype = np.dtype(np.int64) if dtype is None else as_dtype(dtype)
    return draw(_categorical_of, (scores.shape[0], count), dtype, scores)


def _binomial_of(
    key: jax.Array, shape: tuple[int, ...], dtype: np.dtype, counts: jax.Array, probs: jax.Array
) -> jax.Array:
    return jax.random.binomial(key, counts, probs, shape).astype(dtype)


def binomial(draw: Draw, shape: ShapeLike, counts: TensorLike, probs: TensorLike, dtype: DTypeLike) -> jax.Array:
    parameters = _like(counts, np.float32), _like(probs, np.float32)
    return draw(_binomial_of, as_new_shape(shape), as_dtype(dtype), *parameters)


def _shuffled_of(key: jax.Array, shape: None, dtype: None, value: jax.Array) -> jax.Array:
    return jax.random.permutation(key, value)


def shuffled(draw: Draw, value: TensorLike) -> jax.Array:
    return draw(_shuffled_of, None, None, convert_to_tensor(value))


def _like(value: TensorLike, dtype: np.dtype | type) -> jax.Array | np.ndarray:
    """Converts a parameter to the dtype of the drawn numbers. Values on the host stay there, as inputs of the
    program.
    """
    if (type(value) is float or type(value) is int) and np.dtype(dtype).itemsize < 8:
        return _number(value, np.dtype(dtype))
    value = convert_to_tensor(value) if isinstance(value, Variable) else value
    if isinstance(value, jax.Array):
        return value if value.dtype == dtype else value.astype(dtype)
    return np.asarray(value).astype(dtype) if np.dtype(dtype).itemsize < 8 else of_dtype(value, dtype)


@functools.lru_cache(256)  # functions of elements pass the same numbers for each element
def _number(value: float, dtype: np.dtype) -> np.ndarray:
    return np.asarray(value).astype(dtype)


def words(seed: TensorLike) -> jax.Array | np.ndarray:
    """Returns the words of a key, which are the two integers of `seed`."""
    found: jax.Array | np.ndarray
    if isinstance(seed, (list, tuple)) and all(isinstance(n, (int, np.integer)) for n in seed):
        found = np.asarray([int(n) & 0xFFFFFFFF for n in seed], np.uint32)
    else:
        found = convert_to_tensor(seed)
    if found.shape != (2,):
        raise ValueError(f"seed must have shape [2], got {list(found.shape)}.")
    return found
