"""Embeddings of sparse ids: `tf.nn.embedding_lookup_sparse` and `safe_embedding_lookup_sparse`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from replicax.tf import _operations
from replicax.tf._core import InvalidArgumentError, RaggedTensor, SparseTensor
from replicax.tf._ops import convert_to_tensor, known
from replicax.tf._types import TensorLike


def _table(params: TensorLike) -> jax.Array:
    parts = params if isinstance(params, (list, tuple)) else [params]
    if len(parts) != 1:
        raise NotImplementedError("Embeddings are one table here: join the parts with tf.concat.")
    return convert_to_tensor(parts[0])


def _rows(sparse: TensorLike) -> tuple[jax.Array, jax.Array, int]:
    """Returns the rows of ids, the ids, and the number of rows up to the last one that has ids."""
    if isinstance(sparse, RaggedTensor):
        return sparse.value_rowids(), sparse.values, sparse.nrows()
    if not isinstance(sparse, SparseTensor):
        raise TypeError(f"sp_ids must be SparseTensor or RaggedTensor, got {type(sparse).__name__}")
    rows = sparse.indices[:, 0]
    if isinstance(rows, jax.core.Tracer):
        return rows, sparse.values, int(known(sparse.dense_shape, "The number of rows", "It must be known.")[0])
    return rows, sparse.values, int(np.asarray(rows).max(initial=-1)) + 1


def embedding_lookup_sparse(
    params: TensorLike,
    sp_ids: SparseTensor | RaggedTensor,
    sp_weights: SparseTensor | RaggedTensor | None,
    combiner: str | None = None,
    max_norm: float | None = None,
    name: str | None = None,
    allow_fast_lookup: bool = False,
) -> jax.Array:
    """Returns for each row of ids their embeddings combined: the sum, the mean, or the sum by the root of the squares.

    Args:
        params: the embeddings, `[vocabulary, ...]`.
        sp_ids: integers, a SparseTensor `[batch, n]` or a RaggedTensor.
        sp_weights: a weight for each id, at the same places; None for 1.
        combiner: `"mean"` (the default), `"sqrtn"` or `"sum"`.
        max_norm: the largest norm of an embedding; longer ones are scaled.
    """
    combiner = combiner or "mean"
    if combiner not in ("mean", "sqrtn", "sum"):
        raise ValueError(f"combiner must be one of 'mean', 'sqrtn' or 'sum', got {combiner}")
    rows, ids, count = _rows(sp_ids)
    weights = None if sp_weights is None else sp_weights.values
    return _combined(_table(params), rows, ids, weights, count, combiner, max_norm)


def _combined(
    table: jax.Array,
    rows: ArrayLike,
    ids: ArrayLike,
    weights: ArrayLike | None,
    count: int,
    combiner: str,
    max_norm: float | None,
) -> jax.Array:
    if not isinstance(ids, jax.core.Tracer) and np.size(ids):
        array = np.asarray(ids)
        if array.min() < 0 or array.max() >= table.shape[0]:
            wrong = array[(array < 0) | (array >= table.shape[0])][0]
            raise InvalidArgumentError(f"indices = {wrong} is not in [0, {table.shape[0]})")
    found = table[jnp.asarray(ids)]
    if max_norm is not None:
        norms = jnp.sqrt(jnp.sum(found**2, tuple(range(1, found.ndim)), keepdims=True))
        found = found * (max_norm / jnp.maximum(norms, max_norm))
    segments = jnp.asarray(rows)
    factors = jnp.ones(segments.shape, table.dtype) if weights is None else jnp.asarray(weights).astype(table.dtype)
    wide = factors.reshape(-1, *[1] * (found.ndim - 1))
    total = jax.ops.segment_sum(found * wide, segments, count)
    if combiner == "sum":
        return total
    by = jax.ops.segment_sum(wide if combiner == "mean" else wide**2, segments, count)
    by = by if combiner == "mean" else jnp.sqrt(by)
    return jnp.where(by == 0, 0, total / jnp.where(by == 0, 1, by))


def safe_embedding_lookup_sparse(
    embedding_weights: TensorLike,
    sparse_ids: SparseTensor | RaggedTensor,
    sparse_weights: SparseTensor | RaggedTensor | None = None,
    combiner: str = "mean",
    default_id: int | None = None,
    max_norm: float | None = None,
    name: str | None = None,
    allow_fast_lookup: bool = False,
) -> jax.Array:
    """Returns `embedding_lookup_sparse`, without negative ids and weights that are not positive; outside of compiled
    code.

    A row without ids has the embedding of `default_id`, or zeros. The last dimension of the ids is combined.
    """
    table = _table(embedding_weights)
    if isinstance(sparse_ids, RaggedTensor):
        shape, indices = [sparse_ids.nrows()], np.asarray(sparse_ids.value_rowids())[:, None]
    else:
        instead = "Look up outside of compiled code, or use embedding_lookup_sparse."
        shape = [int(n) for n in known(sparse_ids.dense_shape, "The number of ids", instead)][:-1]
        indices = np.asarray(known(sparse_ids.indices, "The number of ids", instead))[:, :-1]
    ids = np.asarray(known(sparse_ids.values, "The number of ids", "Look up outside of compiled code."))
    rows = np.ravel_multi_index(tuple(indices.T), shape) if len(indices) else np.zeros(0, np.int64)
    kept = ids >= 0
    weights: np.ndarray | None = None
    if sparse_weights is not None:
        weights = np.asarray(sparse_weights.values)
        kept &= weights > 0 if combiner != "sum" else True
        weights = weights[kept]
    ids, rows, count = ids[kept], rows[kept], int(np.prod(shape))
    if default_id is not None:
        empty = np.setdiff1d(np.arange(count), rows)
        ids, rows = np.append(ids, np.full(len(empty), default_id)), np.append(rows, empty)
        weights = None if weights is None else np.append(weights, np.ones(len(empty), weights.dtype))
    found = _combined(table, rows, ids, weights, count, combiner, max_norm)
    return found.reshape(*shape, *table.shape[1:])


_operations.operations(globals(), takes_composites=True)
