"""Samplers of classes that are not the true ones: what sampled losses compare the true classes with.

A sampler returns the sampled classes and, for these and the true ones, how often each is expected among the samples.
Drawing without repetition draws until there are enough different classes, as TensorFlow does; the expected counts then
follow from the number of draws that this took.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, SupportsInt, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from replicax.tf import _draws
from replicax.tf import _random_keys as keys
from replicax.tf._core import InvalidArgumentError, ResourceVariable, context, hide
from replicax.tf._gfile import GFile
from replicax.tf._host import as_jax, settled
from replicax.tf._operations import operations
from replicax.tf._ops import convert_to_tensor, known
from replicax.tf._types import TensorLike


class Candidates(NamedTuple):
    """What a sampler returns.

    Attributes:
        sampled_candidates: the classes, int64 `[num_sampled]`.
        true_expected_count: how often each true class is expected among them, float32 of the shape of `true_classes`.
        sampled_expected_count: the same for each sampled class, `[num_sampled]`.
    """

    sampled_candidates: jax.Array
    true_expected_count: jax.Array
    sampled_expected_count: jax.Array


class AccidentalHits(NamedTuple):
    """Which sampled classes are true classes: rows of true classes, positions of samples, and what to add to logits."""

    indices: jax.Array
    ids: jax.Array
    weights: jax.Array


# How a class is drawn, and its probability; `weights` is None or the probabilities of all classes.
_Ids: TypeAlias = Callable[..., jax.Array]
_Probability: TypeAlias = Callable[..., jax.Array]


def _log_uniform_ids(key: jax.Array, count: int, classes: int, weights: None) -> jax.Array:
    # Numbers of 32 bits would leave out classes beyond the first millions.
    part = jax.random.uniform(key, (count,), np.float64 if classes > 1 << 20 else np.float32)
    return (jnp.exp(part * np.log(classes + 1).astype(part.dtype)).astype(np.int32) - 1) % classes


def _log_uniform_probability(ids: jax.Array, classes: int, weights: None) -> jax.Array:
    return jnp.log1p(1 / (ids.astype(np.float32) + 1)) / math.log(classes + 1)


def _uniform_ids(key: jax.Array, count: int, classes: int, weights: None) -> jax.Array:
    return jax.random.randint(key, (count,), 0, classes, np.int32)


def _uniform_probability(ids: jax.Array, classes: int, weights: None) -> jax.Array:
    return jnp.full(ids.shape, 1 / classes, np.float32)


def _unigram_ids(key: jax.Array, count: int, classes: int, weights: jax.Array) -> jax.Array:
    sums = jnp.cumsum(weights)
    found = jnp.searchsorted(sums, jax.random.uniform(key, (count,)) * sums[-1], side="right")
    return jnp.minimum(found, classes - 1).astype(np.int32)


def _unigram_probability(ids: jax.Array, classes: int, weights: jax.Array) -> jax.Array:
    return jnp.where((ids >= 0) & (ids < classes), weights.at[ids].get(mode="clip"), 0) / weights.sum()


_LOG_UNIFORM = _log_uniform_ids, _log_uniform_probability
_UNIFORM = _uniform_ids, _uniform_probability
_UNIGRAM = _unigram_ids, _unigram_probability


_State: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _different(ids: Callable[[jax.Array], jax.Array], key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Draws `count` at a time until that many are different; returns them, and the number of draws until then."""

    def more(state: _State) -> _State:
        key, found, have, draws = state
        key, of_these = jax.random.split(key)
        drawn = ids(of_these)
        both = jnp.concatenate([found, drawn])
        order = jnp.argsort(both, stable=True)
        first = jnp.concatenate([jnp.ones(1, bool), both[order][1:] != both[order][:-1]])
        new = jnp.zeros(2 * count, bool).at[order].set(first)[count:]
        having = have + jnp.cumsum(new, dtype=np.int32)
        found = found.at[jnp.where(new, having - 1, count)].set(drawn, mode="drop")
        enough = having >= count
        draws += jnp.where(enough[-1], jnp.argmax(enough) + 1, count).astype(np.int32)
        return key, found, having[-1], draws

    nothing = -1 - jnp.arange(count, dtype=np.int32)  # different from each other, and no classes
    start = key, nothing, jnp.zeros((), np.int32), jnp.zeros((), np.int32)
    _, found, _, draws = jax.lax.while_loop(lambda state: state[2] < count, more, start)
    return found, draws


@functools.cache
def _sampler(
    distribution: tuple[_Ids, _Probability], count: int, classes: int, unique: bool
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns what draws from a key: one program for these arguments."""
    draw, probability = distribution

    def sample(
        key: jax.Array, shape: None, dtype: None, true: jax.Array, weights: jax.Array | None = None
    ) -> tuple[jax.Array, ...]:
        def ids(key: jax.Array) -> jax.Array:
            return draw(key, count, classes, weights)

        found, draws = _different(ids, key, count) if unique else (ids(key), jnp.asarray(count, np.int32))

        def expected(ids: jax.Array) -> jax.Array:
            p = probability(ids, classes, weights).astype(np.float32)
            return jnp.where(draws == count, p * count, -jnp.expm1(draws * jnp.log1p(-p)))

        return found.astype(np.int64), expected(true), expected(found)

    return sample


def _sampled(
    op: str,
    distribution: tuple[_Ids, _Probability],
    true_classes: TensorLike,
    sizes: tuple[int, int, int],
    unique: bool,
    seed: SupportsInt | None,
    *weights: object,
) -> Candidates:
    num_true, count, classes = map(int, sizes)
    true = _true(true_classes, num_true)
    if count < 1 or classes < 1:
        raise InvalidArgumentError(f"num_sampled and range_max must be at least 1, got {count} and {classes}.")
    if classes > np.iinfo(np.int32).max:
        raise InvalidArgumentError(f"range_max must be below 2 ** 31, got {classes}.")
    if unique and classes < count:
        raise InvalidArgumentError(
            f"Sampler's range is too small. {count} different classes were requested of {classes} in all: pass a "
            "smaller num_sampled, or unique=False."
        )
    if not isinstance(true, jax.core.Tracer):
        _within(np.asarray(true), classes)
    sample = _sampler(distribution, count, classes, bool(unique))
    found = _draws.drawn(sample, keys.of_op(op, None, seed), None, None, *map(as_jax, [true, *weights]))
    return Candidates(*map(settled, found))


def _true(true_classes: TensorLike, num_true: int) -> jax.Array:
    true = convert_to_tensor(true_classes)
    if true.ndim != 2 or true.shape[1] != num_true:
        raise InvalidArgumentError(
            f"true_classes must have num_true columns, expected: {num_true} was: {true.shape[-1] if true.ndim else 0}. "
            f"Its shape is {list(true.shape)}, and has to be [batch, num_true]."
        )
    return true


def _within(true: np.ndarray, classes: int) -> None:
    wrong = true[(true < 0) | (true >= classes)]
    if wrong.size:
        raise InvalidArgumentError(f"`true_candidate` out of range [0, {classes}), received {wrong.flat[0]}")


def log_uniform_candidate_sampler(
    true_classes: TensorLike,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> Candidates:
    """Samples classes from Zipf's distribution: that of words which are numbered from the most frequent one.

    Args:
        true_classes: integers `[batch, num_true]`.
        num_true: the number of true classes of an example.
        num_sampled: how many classes to sample, for the whole batch.
        unique: whether they are all different.
        range_max: the number of classes.
        seed: as for `tf.random.normal`.

    Returns:
        `(sampled_candidates, true_expected_count, sampled_expected_count)`.

    Raises:
        InvalidArgumentError: there are fewer classes than different ones are to be sampled, or a true class is none.
    """
    sizes = num_true, num_sampled, range_max
    return _sampled("log_uniform_candidate_sampler", _LOG_UNIFORM, true_classes, sizes, unique, seed)


def uniform_candidate_sampler(
    true_classes: TensorLike,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> Candidates:
    """Samples classes that are all equally probable; else as `log_uniform_candidate_sampler`."""
    sizes = num_true, num_sampled, range_max
    return _sampled("uniform_candidate_sampler", _UNIFORM, true_classes, sizes, unique, seed)


def fixed_unigram_candidate_sampler(
    true_classes: TensorLike,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    vocab_file: str = "",
    distortion: float = 1.0,
    num_reserved_ids: int = 0,
    num_shards: int = 1,
    shard: int = 0,
    unigrams: Sequence[float] = (),
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> Candidates:
    """Samples classes by the given frequencies; else as `log_uniform_candidate_sampler`.

    Args:
        vocab_file: a file whose lines end with a comma and a frequency, one line for each class.
        distortion: the power to which frequencies are raised; 0 makes all classes equally probable.
        num_reserved_ids: how many classes without a frequency precede the others; they are never sampled.
        num_shards, shard: which classes to use: those whose number modulo `num_shards` is `shard`.
        unigrams: the frequencies, in place of a file.

    Raises:
        InvalidArgumentError: neither a file nor frequencies are given or both are, or there are more or fewer of them
            than classes.
    """
    if bool(vocab_file) == bool(len(unigrams)):
        raise InvalidArgumentError("Must provide either vocab_file or unigrams, and not both.")
    counts = _frequencies(vocab_file) if vocab_file else np.asarray(unigrams, np.float64)
    weights = np.concatenate([np.zeros(num_reserved_ids), counts**distortion])[shard::num_shards].astype(np.float32)
    if len(weights) != range_max:
        raise InvalidArgumentError(f"range is {range_max} must be equal to weights size {len(weights)}")
    sizes = num_true, num_sampled, range_max
    return _sampled("fixed_unigram_candidate_sampler", _UNIGRAM, true_classes, sizes, unique, seed, weights)


def _frequencies(path: str) -> np.ndarray:
    with GFile(path) as file:
        return np.asarray([float(row[-1]) for row in csv.reader(str(file.read()).splitlines()) if row])


class _Learned:
    """How often each class was a true one, for each place that calls the sampler with these arguments."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Hashable, ...], ResourceVariable] = {}

    def of(self, *key: object, classes: int) -> ResourceVariable:
        if key not in self._counts:
            with jax.ensure_compile_time_eval():
                counts = ResourceVariable(np.ones(classes, np.float32), trainable=False, name="unigrams")
            hide(counts)
            self._counts[key] = counts
        return self._counts[key]


_learned = _Learned()


def learned_unigram_candidate_sampler(
    true_classes: TensorLike,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> Candidates:
    """Samples classes by how often they were true classes in earlier calls; else as `log_uniform_candidate_sampler`.

    Calls with the same sizes and seed share their counts.

    Raises:
        NotImplementedError: it is called by several replicas, which would count apart.
    """
    replicas = context.get_replica_context()
    if replicas is not None and replicas.num_replicas_in_sync > 1:
        raise NotImplementedError(
            "learned_unigram_candidate_sampler counts classes, and not over several replicas: use "
            "tf.random.log_uniform_candidate_sampler, or fixed_unigram_candidate_sampler."
        )
    sizes = int(num_true), int(num_sampled), int(range_max)
    counts = _learned.of(*sizes, unique, seed, classes=sizes[2])
    op = "learned_unigram_candidate_sampler"
    result = _sampled(op, _UNIGRAM, true_classes, sizes, unique, seed, counts.value())
    true = convert_to_tensor(true_classes)
    counts.assign(counts.value().at[true.reshape(-1)].add(1.0), read_value=False)
    return result


def all_candidate_sampler(
    true_classes: TensorLike,
    num_true: int,
    num_sampled: int,
    unique: bool,
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> Candidates:
    """Returns the classes from 0 up to `num_sampled`, each of which is expected once: for tests, and exact losses."""
    true, count = _true(true_classes, int(num_true)), int(num_sampled)
    ones = np.ones(true.shape, np.float32), np.ones(count, np.float32)
    return Candidates(*[convert_to_tensor(part) for part in (np.arange(count), *ones)])


def last_of_each(sampled: jax.Array | np.ndarray) -> jax.Array:
    """Returns where the last sample of each class is: TensorFlow takes only that one for a hit."""
    order = jnp.argsort(sampled, stable=True)
    last = jnp.concatenate([sampled[order][1:] != sampled[order][:-1], jnp.ones(1, bool)])
    return jnp.zeros(sampled.shape, bool).at[order].set(last)


def compute_accidental_hits(
    true_classes: TensorLike,
    sampled_candidates: TensorLike,
    num_true: int,
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> AccidentalHits:
    """Returns which samples are true classes of an example: `(indices, ids, weights)`.

    How many there are depends on data, so it runs in eager code and in functions of datasets. Sampled losses leave
    accidental hits out in compiled code, too.

    Returns:
        Of each hit the row in `true_classes`, the position in `sampled_candidates`, and the lowest float32 number.
    """
    what = "The number of accidental hits", "Pass remove_accidental_hits=True to the loss instead."
    true = np.asarray(known(_true(true_classes, int(num_true)), *what))
    sampled = np.asarray(known(convert_to_tensor(sampled_candidates), *what))
    rows, _, positions = np.nonzero((true[:, :, None] == sampled) & np.asarray(last_of_each(sampled)))
    found = rows.astype(np.int32), positions, np.full(len(rows), np.finfo(np.float32).min)
    return AccidentalHits(*[convert_to_tensor(part) for part in found])


operations(globals())
SAMPLERS = """all_candidate_sampler fixed_unigram_candidate_sampler learned_unigram_candidate_sampler
log_uniform_candidate_sampler uniform_candidate_sampler"""
