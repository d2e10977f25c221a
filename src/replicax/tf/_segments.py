"""Counting, ranking, and reductions over segments of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._base.errors import InvalidArgumentError
from replicax._base.specs import as_dtype
from replicax.tf._operations import operations
from replicax.tf._ops import as_int, check_range, convert_to_tensor, known


class TopKV2(NamedTuple):
    """The largest elements, and their indices."""

    values: Any
    indices: Any


def top_k(input: Any, k: Any = 1, sorted: bool = True, index_type: Any = np.int32, name: str | None = None) -> TopKV2:
    """Returns the `k` largest elements along the last axis in descending order, and their indices."""
    values, indices = lax.top_k(convert_to_tensor(input), as_int(k, "k"))
    return TopKV2(values, indices.astype(as_dtype(index_type)))


def in_top_k(targets: Any, predictions: Any, k: Any, name: str | None = None) -> Any:
    """Returns whether each target is among the `k` classes with the highest predictions, `[batch, classes]`; ties
    count.
    """
    targets, predictions = convert_to_tensor(targets), convert_to_tensor(predictions)
    own = jnp.take_along_axis(predictions, targets[:, None], 1, mode="fill", fill_value=np.nan)
    better = jnp.sum(predictions > own, 1)
    return (better < convert_to_tensor(k)) & jnp.isfinite(own[:, 0]) & jnp.all(jnp.isfinite(predictions), 1)


def bincount(
    arr: Any,
    weights: Any = None,
    minlength: Any = None,
    maxlength: Any = None,
    dtype: Any = np.int32,
    name: str | None = None,
    axis: Any = None,
    binary_output: bool = False,
) -> Any:
    """Counts each integer from 0 in `arr`, or sums its weights; along the last axis with `axis=-1`.

    In compiled code, give the same `minlength` and `maxlength`.
    """
    arr = convert_to_tensor(arr)
    if axis not in (None, 0, -1) or (axis == -1 and arr.ndim > 2):
        raise ValueError(f"axis must be None, 0 or -1, for a tensor of at most two dimensions, got {axis}.")
    low, high = (None if n is None else as_int(n, "The length") for n in (minlength, maxlength))
    if low is None or low != high:
        count = int(known(arr, "The largest number", "Give the same `minlength` and `maxlength`.").max(initial=-1)) + 1
        count = min(
            max(count, low or 0),
            count if high is None and low is None else high if high is not None else max(count, low or 0),
        )
    else:
        count = low
    kind = as_dtype(dtype) if weights is None else convert_to_tensor(weights).dtype
    amounts = jnp.ones(arr.shape, kind) if weights is None else convert_to_tensor(weights)

    check_range(arr, np.iinfo(np.int64).max, "arr")

    def of(numbers: Any, amounts: Any) -> Any:
        numbers = _from_0(numbers, count)
        if binary_output:
            return jnp.zeros(count, kind).at[numbers].set(1, mode="drop")
        return jnp.zeros(count, kind).at[numbers].add(amounts, mode="drop")

    if axis == -1 and arr.ndim == 2:
        return jax.vmap(of)(arr, amounts)
    return of(arr.reshape(-1), amounts.reshape(-1))


def confusion_matrix(
    labels: Any, predictions: Any, num_classes: Any = None, weights: Any = None, dtype: Any = np.int32, name: Any = None
) -> Any:
    """Returns the matrix `[num_classes, num_classes]` of counts by label (row) and prediction (column)."""
    labels, predictions = (convert_to_tensor(x).reshape(-1) for x in (labels, predictions))
    if num_classes is None:
        both = [known(x, "The largest class", "Give `num_classes`.") for x in (labels, predictions)]
        num_classes = max(x.max(initial=-1) for x in both) + 1
    n = as_int(num_classes, "num_classes")
    check_range(labels, n, "labels")
    check_range(predictions, n, "predictions")
    amounts = 1 if weights is None else convert_to_tensor(weights).reshape(-1).astype(as_dtype(dtype))
    places = _from_0(labels, n), _from_0(predictions, n)
    return jnp.zeros((n, n), as_dtype(dtype)).at[places].add(amounts, mode="drop")


def _from_0(places: Any, limit: int) -> Any:
    """Replaces negative segment ids, which would count from the end, by one beyond the end."""
    return jnp.where(places < 0, limit, places)


# Reductions of the rows of each segment.


def _mean(data: Any, ids: Any, num: int) -> Any:
    return _total(data, ids, num) / jnp.maximum(_counts(data, ids, num), 1).astype(data.dtype)


def _sqrt_n(data: Any, ids: Any, num: int) -> Any:
    return _total(data, ids, num) / jnp.sqrt(jnp.maximum(_counts(data, ids, num), 1)).astype(data.dtype)


def _total(data: Any, ids: Any, num: int) -> Any:
    return _spread(data, ids, num, 0, "add")


def _counts(data: Any, ids: Any, num: int) -> Any:
    counts = jnp.zeros(num, np.int32).at[_from_0(ids, num).reshape(-1)].add(1, mode="drop")
    return counts.reshape(num, *[1] * (data.ndim - ids.ndim))


def _spread(data: Any, ids: Any, num: int, start: Any, method: str) -> Any:
    rows = data.reshape(-1, *data.shape[ids.ndim :])
    ids = _from_0(ids, num).reshape(-1)  # rows with a negative id are omitted
    return getattr(jnp.full((num, *rows.shape[1:]), start, data.dtype).at[ids], method)(rows, mode="drop")


def _product(data: Any, ids: Any, num: int) -> Any:
    """Multiplies segments with a mask for each, since JAX has no gradient of scattered products."""
    rows = data.reshape(-1, *data.shape[ids.ndim :])
    mask = jnp.arange(num)[:, None] == ids.reshape(-1)
    mask = mask.reshape(*mask.shape, *[1] * (rows.ndim - 1))
    return jnp.prod(jnp.where(mask, rows, jnp.ones((), data.dtype)), 1).astype(data.dtype)


def _limit(dtype: Any, which: str) -> Any:
    return getattr(jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype), which)


_KINDS: dict[str, tuple[Callable[[Any, Any, int], Any], str]] = {
    "max": (lambda data, ids, num: _spread(data, ids, num, _limit(data.dtype, "min"), "max"), "maximum"),
    "mean": (_mean, "mean"),
    "min": (lambda data, ids, num: _spread(data, ids, num, _limit(data.dtype, "max"), "min"), "minimum"),
    "prod": (_product, "product"),
    "sum": (_total, "sum"),
    "sqrt_n": (_sqrt_n, "sum divided by the square root of the number"),
}


def _unsorted(kind: str) -> Callable[..., Any]:
    compute, noun = _KINDS[kind]

    def op(data: Any, segment_ids: Any, num_segments: Any, name: str | None = None) -> Any:
        count = as_int(num_segments, "num_segments")
        return compute(convert_to_tensor(data), convert_to_tensor(segment_ids), count)

    op.__doc__ = f"Returns the {noun} of the rows of each segment; rows with a negative id are omitted."
    return op


def _sorted(kind: str) -> Callable[..., Any]:
    compute, noun = _KINDS[kind]

    def op(data: Any, segment_ids: Any, name: str | None = None) -> Any:
        data, ids = convert_to_tensor(data), convert_to_tensor(segment_ids)
        instead = f"Use tf.math.unsorted_segment_{kind}, which is given their number."
        array = known(ids, "The number of segments", instead)
        if np.any(np.diff(array) < 0) or np.any(array < 0):
            raise InvalidArgumentError(f"Segment ids must be in ascending order from 0 on, got {array.tolist()}.")
        count = int(array.max(initial=-1)) + 1
        empty = 1 if kind == "prod" else 0
        result = jnp.where(_counts(data, ids, count) == 0, empty, compute(data, ids, count))
        return result.astype(data.dtype)

    op.__doc__ = f"Returns the {noun} of the rows of each segment, by ids in ascending order. Not in compiled code."
    return op


SEGMENTS = {f"segment_{kind}": _sorted(kind) for kind in ("max", "mean", "min", "prod", "sum")} | {
    f"unsorted_segment_{kind}": _unsorted(kind) for kind in _KINDS
}


operations(globals())
