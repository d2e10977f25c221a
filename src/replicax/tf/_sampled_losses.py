"""Losses over many classes that compare the true ones with a few sampled ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np

from replicax.tf import _candidates
from replicax.tf._host import jnp, lax
from replicax.tf._indexing import gather
from replicax.tf._nn import sigmoid_cross_entropy_with_logits, softmax_cross_entropy_with_logits
from replicax.tf._operations import operations
from replicax.tf._ops import convert_to_tensor
from replicax.tf._types import TensorLike

_Sampled: TypeAlias = "Sequence[TensorLike] | None"


def sampled_softmax_loss(
    weights: TensorLike,
    biases: TensorLike,
    labels: TensorLike,
    inputs: TensorLike,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: _Sampled = None,
    remove_accidental_hits: bool = True,
    seed: int | None = None,
    name: str | None = "sampled_softmax_loss",
) -> jax.Array:
    """Returns the cross entropy of each example over its true classes and sampled ones: a loss for training alone.

    Args:
        weights: `[num_classes, width]`, or a list of tables that are joined.
        biases: `[num_classes]`.
        labels: the true classes, integers `[batch, num_true]`.
        inputs: `[batch, width]`.
        num_sampled: how many classes to sample for the batch.
        num_classes: the number of classes.
        num_true: the number of true classes of an example.
        sampled_values: what a sampler returned; by default of `log_uniform_candidate_sampler`, without repetition.
        remove_accidental_hits: whether samples that are true classes of an example are left out of its loss.
        seed: of the default sampler.

    Returns:
        `[batch]`.
    """
    logits, targets = _logits(
        weights, biases, labels, inputs, (num_sampled, num_classes, num_true), sampled_values, remove_accidental_hits,
        seed,
    )  # fmt: skip
    return softmax_cross_entropy_with_logits(targets, logits)


def nce_loss(
    weights: TensorLike,
    biases: TensorLike,
    labels: TensorLike,
    inputs: TensorLike,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: _Sampled = None,
    remove_accidental_hits: bool = False,
    name: str | None = "nce_loss",
) -> jax.Array:
    """Returns the noise-contrastive estimation loss of each example, `[batch]`; arguments as `sampled_softmax_loss`."""
    logits, targets = _logits(
        weights, biases, labels, inputs, (num_sampled, num_classes, num_true), sampled_values, remove_accidental_hits,
        None,
    )  # fmt: skip
    return jnp.sum(sigmoid_cross_entropy_with_logits(targets, logits), 1)


def _logits(
    weights: TensorLike,
    biases: TensorLike,
    labels: TensorLike,
    inputs: TensorLike,
    sizes: tuple[int, int, int],
    sampled_values: _Sampled,
    without_hits: bool,
    seed: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the logits of the true classes and of the samples, less the logarithm of how often each is expected,
    and what they should be.
    """
    num_sampled, num_classes, num_true = sizes
    x, true = convert_to_tensor(inputs), convert_to_tensor(labels).astype(np.int64)
    if sampled_values is None:
        sampler = _candidates.log_uniform_candidate_sampler
        sampled_values = sampler(true, num_true, num_sampled, True, num_classes, seed)
    sampled, true_count, sampled_count = (lax.stop_gradient(convert_to_tensor(value)) for value in sampled_values)
    table = jnp.concatenate(list(map(convert_to_tensor, weights))) if isinstance(weights, (list, tuple)) else weights
    # One lookup for all: its gradient is one update of the table.
    ids = jnp.concatenate([true.reshape(-1), sampled.astype(np.int64)])
    rows, offsets = gather(table, ids), gather(biases, ids)
    count = true.shape[0] * num_true
    of_true = jnp.sum(x[:, None, :] * rows[:count].reshape(-1, num_true, rows.shape[-1]), -1)
    of_true = of_true + offsets[:count].reshape(-1, num_true) - jnp.log(true_count).astype(x.dtype)
    of_sampled = x @ rows[count:].T + offsets[count:]
    if without_hits:
        hits = jnp.any(true[:, :, None] == sampled[None, None, :], 1) & _candidates.last_of_each(sampled)
        of_sampled = of_sampled + jnp.where(hits, np.finfo(x.dtype).min, 0).astype(x.dtype)
    of_sampled = of_sampled - jnp.log(sampled_count).astype(x.dtype)
    logits = jnp.concatenate([of_true, of_sampled], 1)
    targets = [jnp.full(of_true.shape, 1 / num_true, x.dtype), jnp.zeros(of_sampled.shape, x.dtype)]
    return logits, jnp.concatenate(targets, 1)


operations(globals())
