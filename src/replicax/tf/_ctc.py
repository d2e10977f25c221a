"""Connectionist temporal classification: `tf.nn.ctc_loss` and the greedy decoder."""

from __future__ import annotations

import jax
import numpy as np

from replicax.tf._core import SparseTensor
from replicax.tf._host import jnp, on_jax
from replicax.tf._ops import as_int, convert_to_tensor, known
from replicax.tf._types import TensorLike

_NEVER = -1e30  # the logarithm of a probability of nearly 0, with which differences are still numbers


@on_jax
def ctc_loss(
    labels: TensorLike,
    logits: TensorLike,
    label_length: TensorLike,
    logit_length: TensorLike,
    logits_time_major: bool = True,
    unique: TensorLike = None,
    blank_index: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the negative logarithm of the probability of each sequence of labels.

    Args:
        labels: `[batch, labels]`, or a SparseTensor, whose blank is the last class by default.
        logits: `[steps, batch, classes]`, or `[batch, steps, classes]` unless `logits_time_major`.
        label_length: `[batch]`; for a SparseTensor it may be None.
        logit_length: `[batch]`, how many steps count.
        logits_time_major: whether the first axis of the logits is that of the steps.
        unique: accepted for compatibility.
        blank_index: the class of no label; 0 for dense labels by default, and counted from the end if negative.
        name: accepted for compatibility.

    Returns:
        `[batch]`.
    """
    scores = convert_to_tensor(logits)
    scores = scores if logits_time_major else jnp.swapaxes(scores, 0, 1)
    steps, batch, classes = scores.shape
    if isinstance(labels, SparseTensor):
        labels, label_length = _dense(labels)
        blank_index = -1 if blank_index is None else blank_index
    blank = (blank_index or 0) % classes
    targets = convert_to_tensor(labels).astype(np.int32)
    lengths = convert_to_tensor(label_length).astype(np.int32)
    counted = jnp.full([batch], steps) if logit_length is None else convert_to_tensor(logit_length).astype(np.int32)
    return _losses(jax.nn.log_softmax(scores), targets, lengths, counted, blank)


def _dense(labels: SparseTensor) -> tuple[np.ndarray, np.ndarray]:
    """Returns labels as rows, and how many there are in each."""
    shape = np.asarray(labels.dense_shape).tolist()
    indices = np.asarray(labels.indices)
    rows = np.zeros(shape, np.int32)
    rows[indices[:, 0], indices[:, 1]] = np.asarray(labels.values)
    return rows, np.bincount(indices[:, 0], minlength=shape[0]).astype(np.int32)


def _losses(scores: jax.Array, targets: jax.Array, lengths: jax.Array, counted: jax.Array, blank: int) -> jax.Array:
    """Adds up the probabilities of all paths, from the first step to the last."""
    batch, count = targets.shape
    states = jnp.full([batch, 2 * count + 1], blank).at[:, 1::2].set(targets)  # blanks between the labels
    there = jnp.arange(2 * count + 1) <= 2 * lengths[:, None]
    # A path goes on to the next state, or passes over a blank between two labels that differ.
    passes = jnp.concatenate([jnp.zeros([batch, 2], bool), (states[:, 2:] != states[:, :-2])], 1)
    passes = jnp.logical_and(passes, jnp.arange(2 * count + 1) % 2 == 1)

    def shifted(paths: jax.Array, by: int) -> jax.Array:
        return jnp.concatenate([jnp.full([batch, by], _NEVER), paths[:, :-by]], 1)

    def step(paths: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        score, number = inputs
        over = jnp.where(passes, shifted(paths, 2), _NEVER) if count else jnp.full_like(paths, _NEVER)
        before = jnp.stack([paths, shifted(paths, 1), over])
        new = jax.nn.logsumexp(before, axis=0) + jnp.take_along_axis(score, states, 1)
        new = jnp.where(there, jnp.maximum(new, _NEVER), _NEVER)
        return jnp.where((number < counted)[:, None], new, paths), None

    start = jnp.full(states.shape, _NEVER).at[:, 0].set(0.0)
    first = jnp.where(jnp.arange(2 * count + 1) < 2, jnp.take_along_axis(scores[0], states, 1), _NEVER)
    start = jnp.where(jnp.logical_and(there, (counted > 0)[:, None]), first, start)
    paths, _ = jax.lax.scan(step, start, (scores[1:], jnp.arange(1, scores.shape[0])))
    last = jnp.take_along_axis(paths, 2 * lengths[:, None], 1)[:, 0]
    label = jnp.take_along_axis(paths, jnp.maximum(2 * lengths[:, None] - 1, 0), 1)[:, 0]
    return -jnp.where(lengths > 0, jnp.logaddexp(last, label), last)


def ctc_unique_labels(labels: TensorLike, name: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns the distinct labels of each row, and for each label its place among them; for `ctc_loss`."""
    rows = known(convert_to_tensor(labels), "Labels", "Give NumPy's.")
    found = [np.unique(row, return_index=True, return_inverse=True) for row in rows]
    distinct = np.zeros(rows.shape, np.int64)
    places = np.zeros(rows.shape, np.int32)
    for number, (values, first, inverse) in enumerate(found):
        order = np.argsort(first)
        distinct[number, : len(values)] = values[order]
        places[number] = np.argsort(order)[inverse]
    return convert_to_tensor(distinct), convert_to_tensor(places)


def collapse_repeated(
    labels: TensorLike, seq_length: TensorLike, name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns rows of labels without those that equal the label before, and how long they are now."""
    rows = known(convert_to_tensor(labels), "Labels", "Give NumPy's.")
    lengths = known(convert_to_tensor(seq_length), "seq_length", "Give NumPy's.")
    kept = [
        row[:size][np.concatenate([[True], row[1:size] != row[: size - 1]])[:size]] for row, size in zip(rows, lengths)
    ]
    sizes = np.array([len(row) for row in kept], np.asarray(lengths).dtype)
    padded = np.zeros((len(rows), max(sizes, default=0)), rows.dtype)
    for number, row in enumerate(kept):
        padded[number, : len(row)] = row
    return convert_to_tensor(padded), convert_to_tensor(sizes)


def ctc_greedy_decoder(
    inputs: TensorLike, sequence_length: TensorLike, merge_repeated: bool = True, blank_index: int | None = None
) -> tuple[list[SparseTensor], jax.Array]:
    """Returns the most likely class of each step, without blanks and, with `merge_repeated`, without repetitions.

    Args:
        inputs: logits `[steps, batch, classes]`.
        sequence_length: `[batch]`, how many steps count.
        merge_repeated: whether a class that stands in several steps one after the other counts once.
        blank_index: the class of no label, the last by default.

    Returns:
        A list of one SparseTensor of labels, and the negative sums of the logits, `[batch, 1]`.
    """
    scores = known(inputs, "The inputs of a decoder", "Decode outside of compiled code.")
    lengths = known(sequence_length, "sequence_length", "Decode outside of compiled code.")
    steps, batch, classes = scores.shape
    blank = classes - 1 if blank_index is None else as_int(blank_index, "blank_index") % classes
    best = scores.argmax(-1)
    rows, sums = [], []
    for number in range(batch):
        path = best[: lengths[number], number]
        sums.append(-scores[: lengths[number], number].max(-1).sum())
        new = (
            np.concatenate([[True], path[1:] != path[:-1]])[: len(path)] if merge_repeated else np.ones(len(path), bool)
        )
        rows.append(path[new & (path != blank)])
    indices = [[number, place] for number, row in enumerate(rows) for place in range(len(row))]
    shape = [batch, max(map(len, rows), default=0)]
    values = np.concatenate(rows).astype(np.int64) if rows else np.zeros(0, np.int64)
    labels = SparseTensor(np.array(indices, np.int64).reshape(-1, 2), values, np.array(shape, np.int64))
    return [labels], convert_to_tensor(np.array(sums, scores.dtype)[:, None])


CTC = "collapse_repeated ctc_greedy_decoder ctc_loss ctc_unique_labels"
