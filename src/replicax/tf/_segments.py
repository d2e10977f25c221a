"""Counting, ranking, and reductions over segments of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from replicax.tf._core import InvalidArgumentError, as_dtype
from replicax.tf._host import jnp, lax
from replicax.tf._operations import operations
from replicax.tf._ops import as_int, check_range, convert_to_tensor, known
from replicax.tf._types import DTypeLike, TensorLike


class TopKV2(NamedTuple):
    """The largest elements, and their indices."""

    values: jax.Array
    indices: jax.Array


def top_k(
    input: TensorLike, k: TensorLike = 1, sorted: bool = True, index_type: DTypeLike = np.int32, name: str | None = None
) -> TopKV2:
    """Returns the `k` largest elements along the last axis in descending order, and their indices."""
    values, indices = lax.top_k(convert_to_tensor(input), as_int(k, "k"))
    return TopKV2(values, indices.astype(as_dtype(index_type)))


def in_top_k(targets: TensorLike, predictions: TensorLike, k: TensorLike, name: str | None = None) -> jax.Array:
    """Returns whether each target is among the `k` classes with the highest predictions, `[batch, classes]`; ties
    count.
    """
    classes, scores = convert_to_tensor(targets), convert_to_tensor(predictions)
    own = jnp.take_along_axis(scores, classes[:, None], 1, mode="fill", fill_value=np.nan)
    better = jnp.sum(scores > own, 1)
    return (better < convert_to_tensor(k)) & jnp.isfinite(own[:, 0]) & jnp.all(jnp.isfinite(scores), 1)


def bincount(
    arr: TensorLike,
    weights: TensorLike | None = None,
    minlength: TensorLike | None = None,
    maxlength: TensorLike | None = None,
    dtype: DTypeLike = np.int32,
    name: str | None = None,
    axis: int | None = None,
    binary_output: bool = False,
) -> jax.Array:
    """Counts each integer from 0 in `arr`, or sums its weights; along the last axis with `axis=-1`.

    In compiled code, give the same `minlength` and `maxlength`.
    """
    array = convert_to_tensor(arr)
    if axis not in (None, 0, -1) or (axis == -1 and array.ndim > 2):
        raise ValueError(f"axis must be None, 0 or -1, for a tensor of at most two dimensions, got {axis}.")
    low, high = (None if n is None else as_int(n, "The length") for n in (minlength, maxlength))
    if low is None or low != high:
        count = (
            int(known(array, "The largest number", "Give the same `minlength` and `maxlength`.").max(initial=-1)) + 1
        )
        count = min(
            max(count, low or 0),
            count if high is None and low is None else high if high is not None else max(count, low or 0),
        )
    else:
        count = low
    kind = as_dtype(dtype) if weights is None else convert_to_tensor(weights).dtype
    amounts = jnp.ones(array.shape, kind) if weights is None else convert_to_tensor(weights)

    check_range(array, np.iinfo(np.int64).max, "arr")

    def of(numbers: jax.Array, amounts: jax.Array) -> jax.Array:
        numbers = _from_0(numbers, count)
        if binary_output:
            return jnp.zeros(count, kind).at[numbers].set(1, mode="drop")
        return jnp.zeros(count, kind).at[numbers].add(amounts, mode="drop")

    if axis == -1 and array.ndim == 2:
        return jax.vmap(of)(array, amounts)
    return of(array.reshape(-1), amounts.reshape(-1))


def confusion_matrix(
    labels: TensorLike,
    predictions: TensorLike,
    num_classes: TensorLike | None = None,
    weights: TensorLike | None = None,
    dtype: DTypeLike = np.int32,
    name: str | None = None,
) -> jax.Array:
    """Returns the matrix `[num_classes, num_classes]` of counts by label (row) and prediction (column)."""
    rows, columns = (convert_to_tensor(x).reshape(-1) for x in (labels, predictions))
    if num_classes is None:
        both = [known(x, "The largest class", "Give `num_classes`.") for x in (rows, columns)]
        num_classes = max(x.max(initial=-1) for x in both) + 1
    n = as_int(num_classes, "num_classes")
    check_range(rows, n, "labels")
    check_range(columns, n, "predictions")
    amounts = 1 if weights is None else convert_to_tensor(weights).reshape(-1).astype(as_dtype(dtype))
    places = _from_0(rows, n), _from_0(columns, n)
    return jnp.zeros((n, n), as_dtype(dtype)).at[places].add(amounts, mode="drop")


def _from_0(places: jax.Array, limit: int) -> jax.Array:
    """Replaces negative segment ids, which would count from the end, by one beyond the end."""
    return jnp.where(places < 0, limit, places)


# Reductions of the rows of each segment.


def _mean(data: jax.Array, ids: jax.Array, num: int) -> jax.Array:
    return _total(data, ids, num) / jnp.maximum(_counts(data, ids, num), 1).astype(data.dtype)


def _sqrt_n(data: jax.Array, ids: jax.Array, num: int) -> jax.Array:
    return _total(data, ids, num) / jnp.sqrt(jnp.maximum(_counts(data, ids, num), 1)).astype(data.dtype)


def _total(data: jax.Array, ids: jax.Array, num: int) -> jax.Array:
    return _spread(data, ids, num, 0, "add")


def _counts(data: jax.Array, ids: jax.Array, num: int) -> jax.Array:
    counts = jnp.zeros(num, np.int32).at[_from_0(ids, num).reshape(-1)].add(1, mode="drop")
    return counts.reshape(num, *[1] * (data.ndim - ids.ndim))


def _spread(data: jax.Array, ids: jax.Array, num: int, start: ArrayLike, method: str) -> jax.Array:
    rows = data.reshape(-1, *data.shape[ids.ndim :])
    whole = jnp.full((num, *rows.shape[1:]), start, data.dtype)
    if rows.shape[0] == 0:  # JAX would drop the data, and a tape would find no gradient
        return whole + jnp.sum(rows, 0).astype(data.dtype)
    ids = _from_0(ids, num).reshape(-1)  # rows with a negative id are omitted
    result: jax.Array = getattr(whole.at[ids], method)(rows, mode="drop")
    return result


def _product(data: jax.Array, ids: jax.Array, num: int) -> jax.Array:
    """Multiplies segments with a mask for each, since JAX has no gradient of scattered products."""
    rows = data.reshape(-1, *data.shape[ids.ndim :])
    mask = jnp.arange(num)[:, None] == ids.reshape(-1)
    mask = mask.reshape(*mask.shape, *[1] * (rows.ndim - 1))
    return jnp.prod(jnp.where(mask, rows, jnp.ones((), data.dtype)), 1).astype(data.dtype)


def _limit(dtype: np.dtype, which: Literal["min", "max"]) -> Any:
    return getattr(jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype), which)


_KINDS: dict[str, tuple[Callable[[jax.Array, jax.Array, int], jax.Array], str]] = {
    "max": (lambda data, ids, num: _spread(data, ids, num, _limit(data.dtype, "min"), "max"), "maximum"),
    "mean": (_mean, "mean"),
    "min": (lambda data, ids, num: _spread(data, ids, num, _limit(data.dtype, "max"), "min"), "minimum"),
    "prod": (_product, "product"),
    "sum": (_total, "sum"),
    "sqrt_n": (_sqrt_n, "sum divided by the square root of the number"),
}


def _unsorted(kind: str) -> Callable[..., jax.Array]:
    compute, noun = _KINDS[kind]

    def op(data: TensorLike, segment_ids: TensorLike, num_segments: TensorLike, name: str | None = None) -> jax.Array:
        count = as_int(num_segments, "num_segments")
        return compute(convert_to_tensor(data), convert_to_tensor(segment_ids), count)

    op.__doc__ = f"Returns the {noun} of the rows of each segment; rows with a negative id are omitted."
    return op


def _sorted(kind: str) -> Callable[..., jax.Array]:
    compute, noun = _KINDS[kind]

    def op(data: TensorLike, segment_ids: TensorLike, name: str | None = None) -> jax.Array:
        rows, ids = convert_to_tensor(data), convert_to_tensor(segment_ids)
        instead = f"Use tf.math.unsorted_segment_{kind}, which is given their number."
        array = known(ids, "The number of segments", instead)
        if np.any(np.diff(array) < 0) or np.any(array < 0):
            raise InvalidArgumentError(f"Segment ids must be in ascending order from 0 on, got {array.tolist()}.")
        count = int(array.max(initial=-1)) + 1
        empty = 1 if kind == "prod" else 0
        result = jnp.where(_counts(rows, ids, count) == 0, empty, compute(rows, ids, count))
        return result.astype(rows.dtype)

    op.__doc__ = f"Returns the {noun} of the rows of each segment, by ids in ascending order. Not in compiled code."
    return op


SEGMENTS = {f"segment_{kind}": _sorted(kind) for kind in ("max", "mean", "min", "prod", "sum")} | {
    f"unsorted_segment_{kind}": _unsorted(kind) for kind in _KINDS
}


operations(globals())
