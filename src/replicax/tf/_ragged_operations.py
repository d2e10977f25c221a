"""Operations on ragged and sparse tensors: reductions, lookups and joins, and the error of all others.

`_operations.operation` calls `compute` where an argument is ragged or sparse. Elementwise operations follow the rule of
`_composites`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from replicax.tf import _arrays, _casts, _composites, _indexing, _math, _operations, _ragged
from replicax.tf._core import InvalidArgumentError, RaggedTensor, SparseTensor, as_tensor, select_rows
from replicax.tf._host import jnp
from replicax.tf._ops import as_axis, check_range, convert_to_tensor, known
from replicax.tf._segments import SEGMENTS
from replicax.tf._types import Composed, Rows, TensorLike

# Operations on one tensor that TensorFlow computes with the values of a SparseTensor.
_ON_SPARSE = {
    "abs", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e", "cast", "erf", "negative", "sign", "sin",
    "sqrt", "square", "tan", "tanh",
}  # fmt: skip
_OPS = _math.TABLE
_HOST = "The lengths of rows are known outside of compiled code."


def compute(
    op: Callable[..., Rows], name: str, args: tuple[TensorLike, ...], kwargs: dict[str, TensorLike]
) -> Composed | None:
    """Compute an operation with ragged or sparse arguments, which may be elements of lists.

    Raises:
        ValueError: the operation takes no ragged, or no sparse, tensors.
    """
    args, kwargs = tuple(map(_operations.value_of, args)), {key: _operations.value_of(x) for key, x in kwargs.items()}
    parts = _operations.parts_of(args, kwargs)
    if sparse := [x for x in parts if isinstance(x, SparseTensor)]:
        first = args[0] if args else None
        if name == "divide" and isinstance(first, SparseTensor):
            scaled: SparseTensor = first / args[1]  # type: ignore[operator, assignment]  # see `_ragged_operators`
            return scaled
        if name not in _ON_SPARSE or first is not sparse[0]:
            raise ValueError(
                f"`{name}` takes no SparseTensor, got one of shape {list(sparse[0].shape)}. Use an operation of "
                "tf.sparse, compute with the values: tf.sparse.map_values(function, x), or make it dense: "
                "tf.sparse.to_dense(x)."
            )
        return sparse[0].with_values(op(sparse[0].values, *args[1:], **kwargs))
    if name in _RAGGED:
        return _RAGGED[name](*args, **kwargs)
    ragged = [x for x in parts if isinstance(x, RaggedTensor)]
    if getattr(op, "operands", 0):
        call = inspect.signature(op).bind(*args, **kwargs)
        if _is_elementwise(op, name, call, len(ragged)):
            return _composites.on_values(op, name, call)
    raise _refusal(name, ragged[0])


def _refusal(name: str, ragged: RaggedTensor, condition: str = "") -> ValueError:
    """Return the error of an operation that takes no ragged tensor, or none under a condition."""
    return ValueError(
        f"`{name}` takes no RaggedTensor{condition}, got one of shape {list(ragged.shape)}. Compute with the values of "
        "all rows: tf.ragged.map_flat_values(function, x), or pad the rows: x.to_tensor()."
    )


def _is_elementwise(op: Callable[..., Rows], name: str, call: inspect.BoundArguments, count: int) -> bool:
    """Return whether an operation computes each element by itself; `count` is the number of ragged arguments."""
    operands = _composites.operands_of(op, call)
    if name == "where" and None in map(operands.get, ("x", "y")):
        return False
    if name == "one_hot" and call.arguments.get("axis") not in (None, -1):
        return False
    return sum(isinstance(x, RaggedTensor) for x in operands.values()) == count


# Reductions.


def _reduction(kind: str) -> Callable[..., Rows]:
    """Return the reduction of a ragged tensor by an operation on segments."""

    def reduce(
        input_tensor: RaggedTensor, axis: TensorLike = None, keepdims: bool | None = False, name: str | None = None
    ) -> Rows:
        if input_tensor.dtype in (np.bool_, np.object_):
            raise InvalidArgumentError(
                f"reduce_{kind} takes numbers, got a RaggedTensor of dtype {input_tensor.dtype}: use tf.cast."
            )
        return _reduce(kind, input_tensor, as_axis(axis), bool(keepdims))

    return reduce


def _reduce(kind: str, x: Rows, axis: int | tuple[int, ...] | None, keepdims: bool) -> Rows:
    """Return the reduction of a ragged or dense tensor along an axis, or along several, the innermost first."""
    plain = _OPS[f"reduce_{kind}"]
    if not isinstance(x, RaggedTensor):
        return plain(x, axis, keepdims)
    rank = len(x.shape)
    if axis is None:
        whole = plain(x.flat_values)
        return whole.reshape((1,) * rank) if keepdims else whole
    axes = (axis,) if isinstance(axis, int) else axis
    for a in axes:
        if not -rank <= a < rank:
            raise ValueError(f"axis={a} out of bounds: expected {-rank}<=axis<{rank}")
    for a in sorted({a % rank for a in axes}, reverse=True):
        x = _reduce_axis(kind, x, a, keepdims)
    return x


def _reduce_axis(kind: str, x: Rows, axis: int, keepdims: bool) -> Rows:
    if not isinstance(x, RaggedTensor):
        return _reduce(kind, x, axis, keepdims)
    if axis > 1:
        return x.with_values(_reduce_axis(kind, x.values, axis - 1, keepdims))
    if axis == 1:
        segments, count = x.value_rowids(), x.nrows()
    else:
        segments, count = _columns(x)
    reduced = _over_segments(SEGMENTS[f"unsorted_segment_{kind}"], x.values, segments, count)
    return _arrays.expand_dims(reduced, axis) if keepdims else reduced


def _columns(x: RaggedTensor) -> tuple[np.ndarray, int]:
    """Return the place of each value in its row, and the number of values of the longest row."""
    splits = known(x.row_splits, "The length of the longest row", _HOST)
    lengths = np.diff(splits)
    return np.arange(lengths.sum()) - np.repeat(splits[:-1], lengths), int(lengths.max(initial=0))


def _over_segments(combine: Callable[..., Rows], values: Rows, segments: ArrayLike, count: int) -> Rows:
    """Combine the values of each segment; rows are combined element by element, up to the longest one."""
    if not isinstance(values, RaggedTensor):
        return combine(values, segments, count)
    rows = known(segments, "The rows of a segment", _HOST)
    columns, _ = _columns(values)
    lengths = np.zeros(count, np.int64)
    np.maximum.at(lengths, rows, np.diff(np.asarray(values.row_splits)))
    splits = np.append(0, lengths.cumsum())
    inner = splits[rows][values.value_rowids()] + columns
    return RaggedTensor(_over_segments(combine, values.values, inner, int(splits[-1])), as_tensor(splits))


def reduce_mean(
    input_tensor: RaggedTensor, axis: TensorLike = None, keepdims: bool | None = False, name: str | None = None
) -> Rows:
    total, count = (_OPS["reduce_sum"](x, axis, keepdims) for x in (input_tensor, _arrays.ones_like(input_tensor)))
    return _OPS["divide"](total, count)


def reduce_any(
    input_tensor: RaggedTensor, axis: TensorLike = None, keepdims: bool | None = False, name: str | None = None
) -> Rows:
    return _OPS["not_equal"](_OPS["reduce_sum"](_is_true(input_tensor), axis, keepdims), 0)


def reduce_all(
    input_tensor: RaggedTensor, axis: TensorLike = None, keepdims: bool | None = False, name: str | None = None
) -> Rows:
    return _OPS["not_equal"](_OPS["reduce_min"](_is_true(input_tensor), axis, keepdims), 0)


def _is_true(x: RaggedTensor) -> Rows:
    return _casts.cast(_casts.cast(x, np.bool_), np.int32)


def reduce_variance(
    input_tensor: RaggedTensor, axis: TensorLike = None, keepdims: bool | None = False, name: str | None = None
) -> Rows:
    square = _OPS["reduce_mean"](_OPS["square"](input_tensor), axis, keepdims)
    return _OPS["maximum"](_OPS["subtract"](square, _OPS["square"](reduce_mean(input_tensor, axis, keepdims))), 0)


def reduce_std(
    input_tensor: RaggedTensor, axis: TensorLike = None, keepdims: bool | None = False, name: str | None = None
) -> Rows:
    return _OPS["sqrt"](reduce_variance(input_tensor, axis, keepdims))


# Lookups.


def gather(
    params: Any,
    indices: Any,
    validate_indices: object = None,
    axis: TensorLike = None,
    batch_dims: int = 0,
    name: str | None = None,
) -> Rows:
    """Return the rows of a table at ragged indices, or the rows of a ragged tensor."""
    ragged: RaggedTensor = params if isinstance(params, RaggedTensor) else indices
    if batch_dims or as_axis(axis) not in (None, 0):
        raise _refusal("gather", ragged, " with an axis or batch_dims")
    if isinstance(indices, RaggedTensor):
        return indices.with_flat_values(gather(params, indices.flat_values) if ragged is params else
                                        _indexing.gather(params, indices.flat_values))  # fmt: skip
    for splits in params.nested_row_splits:
        known(splits, "The length of a row", _HOST)
    places = known(convert_to_tensor(indices), "The number of a row", _HOST)
    check_range(convert_to_tensor(places), params.nrows(), "gather")
    if not places.ndim:
        row: Rows = params[int(places)]
        return row
    rows: RaggedTensor = select_rows(params, places.reshape(-1))
    for size in places.shape[:0:-1]:
        rows = RaggedTensor.from_uniform_row_length(rows, size)
    return rows


def embedding_lookup(params: Rows, ids: RaggedTensor, max_norm: TensorLike = None, name: str | None = None) -> Rows:
    """Return the rows of a table at ragged ids."""
    if not isinstance(ids, RaggedTensor):
        raise _refusal("embedding_lookup", params, " as its table")
    if ids.dtype not in (np.int32, np.int64):
        raise ValueError(
            f"The values contained by the inputs have type {ids.dtype} and cannot be processed. All values should be "
            "indices, either of type `int32` or `int64`."
        )
    return ids.with_flat_values(_indexing.embedding_lookup(params, ids.flat_values, max_norm))


# Joins and shapes.


def concat(values: Sequence[TensorLike], axis: TensorLike, name: str = "concat") -> Rows:
    """Join ragged and dense tensors along an axis."""
    parts = [x if isinstance(x, RaggedTensor) else convert_to_tensor(x) for x in values]
    rank = len(next(x for x in parts if isinstance(x, RaggedTensor)).shape)
    for x in parts:
        if len(x.shape) != rank:
            raise ValueError(f"concat: Shape {tuple(x.shape)} must have rank {rank}, as the RaggedTensors have.")
    along = as_axis(axis)
    if not -rank <= along < rank:
        raise ValueError(f"axis={along} out of bounds: expected {-rank}<=axis<{rank}")
    return _join(parts, along % rank)


def _join(parts: Sequence[Rows], axis: int) -> Rows:
    if not any(isinstance(x, RaggedTensor) for x in parts):
        return _arrays.concat(parts, axis)
    if axis == 0:
        return _ragged.concatenated(parts)
    ragged = [x if isinstance(x, RaggedTensor) else RaggedTensor.from_tensor(x) for x in parts]
    if len({x.nrows() for x in ragged}) > 1:
        raise InvalidArgumentError(
            f"concat: Input tensors have incompatible shapes: expected one number of rows, got "
            f"{[x.nrows() for x in ragged]}."
        )
    if axis > 1:
        _composites.check_splits([RaggedTensor(x.row_splits[:0], x.row_splits) for x in ragged], "concat")
        return ragged[0].with_values(_join([x.values for x in ragged], axis - 1))
    rows = [x.value_rowids() for x in ragged]
    xp = np if all(isinstance(x, np.ndarray) for x in rows) else jnp
    order = xp.argsort(xp.concatenate(rows), stable=True)  # keeps the order of the parts in a row
    values, splits = _ragged.concatenated([x.values for x in ragged]), sum(x.row_splits for x in ragged)
    return RaggedTensor(
        gather(values, order) if isinstance(values, RaggedTensor) else _indexing.gather(values, order), splits
    )


def stack(values: Sequence[TensorLike], axis: int = 0, name: str = "stack") -> Rows:
    """Stack ragged and dense tensors."""
    return _ragged.stack(values, axis)


def add_n(inputs: Sequence[Rows] | Rows, name: str | None = None) -> Rows:
    """Return the sum of ragged tensors."""
    terms: Sequence[Rows] = inputs if isinstance(inputs, (list, tuple)) else [inputs]  # type: ignore[list-item]
    total: Rows = functools.reduce(_OPS["add"], terms)
    return total


def expand_dims(input: RaggedTensor, axis: TensorLike, name: str | None = None) -> Rows:
    """Return a ragged tensor with a dimension of size 1 at `axis`."""
    rank, along = len(input.shape), as_axis(axis)
    if not -rank - 1 <= along <= rank:
        raise ValueError(f"axis={along} out of bounds: expected {-rank - 1}<=axis<{rank + 1}")
    return _expand(input, along % (rank + 1))


def _expand(x: Rows, axis: int) -> Rows:
    if not isinstance(x, RaggedTensor):
        return _arrays.expand_dims(x, axis)
    if axis > 1:
        return x.with_values(_expand(x.values, axis - 1))
    splits = np.array([0, x.nrows()]) if axis == 0 else np.arange(x.nrows() + 1)
    return RaggedTensor(x, as_tensor(splits))


_RAGGED: dict[str, Callable[..., Rows]] = {
    **{f"reduce_{kind}": _reduction(kind) for kind in ("max", "min", "prod", "sum")},
    **{
        form.__name__: form
        for form in (reduce_mean, reduce_any, reduce_all, reduce_variance, reduce_std, gather, embedding_lookup, concat,
                     stack, add_n, expand_dims)
    },
}  # fmt: skip
