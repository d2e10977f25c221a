"""`tf.ragged`: RaggedTensors of nested lists, of several tensors, and operations on their values."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.tf._composites import check_splits
from replicax.tf._core import (
    InvalidArgumentError,
    RaggedTensor,
    RaggedTensorSpec,
    Tree,
    as_dtype,
    as_tensor,
    is_composite,
)
from replicax.tf._features import default_of
from replicax.tf._ops import convert_to_tensor, known, string_tensor
from replicax.tf._types import DTypeLike, Rows, ShapeLike, TensorLike
from replicax.tf._wire import BYTES


def constant(
    pylist: Sequence[object],
    dtype: DTypeLike | None = None,
    ragged_rank: int | None = None,
    inner_shape: ShapeLike | None = None,
    name: str | None = None,
    row_splits_dtype: DTypeLike = np.int64,
) -> Rows:
    """Returns a RaggedTensor of nested lists.

    Args:
        pylist: lists of numbers or strings, all nested as deep.
        dtype: by default int32, float32 or string.
        ragged_rank: the number of ragged dimensions; by default all but the first, and those of `inner_shape`.
        inner_shape: the shape of the values inside of the ragged dimensions.
        row_splits_dtype: the dtype of the splits.
    """
    depth = _depth(pylist)
    inner = 0 if inner_shape is None else np.asarray(inner_shape).size
    rank = max(0, depth - 1 - inner) if ragged_rank is None else ragged_rank
    splits = list[np.ndarray]()
    level: Any = pylist
    values: Rows
    for _ in builtins.range(rank):
        lengths = [len(row) for row in level]
        splits.append(np.cumsum([0, *lengths]))
        level = [item for row in level for item in row]
    strings = dtype is not None and as_dtype(dtype) == np.dtype(object)
    values = string_tensor(default_of(level, BYTES)) if strings else convert_to_tensor(
        np.zeros(0, as_dtype(dtype or np.float32)) if not len(level) else level, None if not len(level) else dtype
    )  # fmt: skip
    for row in reversed(splits):
        values = RaggedTensor(values, as_tensor(row.astype(as_dtype(row_splits_dtype))))
    return values


def _depth(value: object) -> int:
    """Returns how deep lists are nested."""
    if isinstance(value, np.ndarray):
        return value.ndim if value.dtype != object else 1 + max(map(_depth, value), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, (list, tuple)) else 0


def stack(values: Sequence[TensorLike], axis: int = 0, name: str | None = None) -> RaggedTensor:
    """Stacks tensors that may have different lengths along the new first dimension (or, with axis 1, the second)."""
    rows = [x if isinstance(x, RaggedTensor) else convert_to_tensor(x) for x in values]
    if axis not in (0, 1) or not rows:
        raise NotImplementedError(f"tf.ragged.stack takes at least one tensor, and axis 0 or 1, got axis {axis}.")
    if axis == 1:
        lists = [list(x) for x in rows]
        return stack([stack(list(group)) for group in zip(*lists)])
    lengths = [x.nrows() if isinstance(x, RaggedTensor) else np.shape(x)[0] for x in rows]
    return RaggedTensor(concatenated(rows), as_tensor(np.cumsum([0, *lengths], dtype=np.int64)))


def concatenated(parts: Sequence[Rows]) -> Rows:
    """Join ragged and dense tensors along the first dimension."""
    from replicax.tf._arrays import concat

    if not any(isinstance(x, RaggedTensor) for x in parts):
        return concat(list(parts), 0)
    ragged = [x if isinstance(x, RaggedTensor) else RaggedTensor.from_tensor(x) for x in parts]
    traced = any(isinstance(x.row_splits, jax.core.Tracer) for x in ragged)
    splits = [x.row_splits if traced else np.asarray(x.row_splits) for x in ragged]
    offsets = itertools.accumulate(row[-1] for row in splits[:-1])
    joined = (jnp if traced else np).concatenate([splits[0], *(row[1:] + n for row, n in zip(splits[1:], offsets))])
    return RaggedTensor(concatenated([x.values for x in ragged]), joined if traced else as_tensor(joined))


def map_flat_values(op: Callable[..., Rows], *args: object, **kwargs: object) -> Rows:
    """Returns `op` of the values of RaggedTensors, in the same rows."""
    ragged = [x for x in (*args, *kwargs.values()) if isinstance(x, RaggedTensor)]
    if not ragged:
        return op(*args, **kwargs)
    check_splits(ragged, "map_flat_values")

    def inner(x: object) -> object:
        return x.flat_values if isinstance(x, RaggedTensor) else x

    return ragged[0].with_flat_values(op(*map(inner, args), **{key: inner(x) for key, x in kwargs.items()}))


def map_rows(fn: Callable[[Tree], Tree], elems: Tree, signature: Tree) -> Tree:
    """Call a function for each row of a structure of ragged and dense tensors, and stack the results.

    Args:
        fn: called with a row of the structure.
        elems: the structure.
        signature: the specs or dtypes of the results of `fn`, a RaggedTensorSpec where their lengths differ; by default
            the results have the structure of `elems`, and are ragged where `elems` is.

    Raises:
        InvalidArgumentError: a result is a scalar, and the signature has a RaggedTensorSpec.
        ValueError: the tensors have different numbers of rows, or the results do not fit the signature.
    """
    leaves, structure = jax.tree.flatten(elems, is_leaf=is_composite)
    leaves = [x if isinstance(x, RaggedTensor) else convert_to_tensor(x) for x in leaves]
    for splits in (splits for x in leaves if isinstance(x, RaggedTensor) for splits in x.nested_row_splits):
        known(splits, "The length of a row", "Call tf.map_fn of a ragged tensor outside of compiled code.")
    counts = {len(x) for x in leaves}
    if len(counts) != 1:
        raise ValueError(f"map_fn: all elements must have the same number of rows, got {sorted(counts)}.")
    specs, form = jax.tree.flatten(elems if signature is None else signature, is_leaf=is_composite)
    rows = [fn(jax.tree.unflatten(structure, [x[i] for x in leaves])) for i in builtins.range(counts.pop())]
    results = [jax.tree.leaves(row, is_leaf=is_composite) for row in rows]
    for result in results:
        if len(result) != len(specs):
            raise ValueError(
                f"map_fn: `fn` returned {len(result)} tensors for a row, and its signature has {len(specs)}: give "
                "fn_output_signature."
            )
    stacked = [_stack_as(spec, [result[k] for result in results]) for k, spec in enumerate(specs)]
    return jax.tree.unflatten(jax.tree.structure(rows[0], is_leaf=is_composite) if rows else form, stacked)


def _stack_as(spec: object, rows: list[Rows]) -> Rows:
    """Return the rows as a RaggedTensor if `spec`, a spec, a dtype or a tensor, is ragged; else as a dense tensor."""
    from replicax.tf._arrays import stack as stack_dense

    ragged = isinstance(spec, (RaggedTensor, RaggedTensorSpec))
    if not rows:
        dtype = as_dtype(getattr(spec, "dtype", spec))
        shape = [] if ragged else [n or 0 for n in getattr(spec, "shape", ())]
        empty = convert_to_tensor(np.zeros([0, *shape], dtype))
        return RaggedTensor(empty, as_tensor(np.zeros(1, np.int64))) if ragged else empty
    if not ragged:
        return stack_dense(rows)
    for row in rows:
        if not isinstance(row, RaggedTensor) and np.ndim(row) == 0:
            raise InvalidArgumentError(
                "map_fn: Ragged values must have rank >= 1, got a scalar for a row: give the dtype of the scalars as "
                "fn_output_signature."
            )
    return stack(rows)


def range(
    starts: TensorLike,
    limits: TensorLike = None,
    deltas: TensorLike = 1,
    dtype: DTypeLike | None = None,
    name: str | None = None,
    row_splits_dtype: DTypeLike = np.int64,
) -> RaggedTensor:
    """Returns rows of numbers from `starts` to `limits`; from 0 to `starts`, where there are no limits."""
    if limits is None:
        starts, limits = 0, starts
    ends = [
        np.asarray(known(convert_to_tensor(x), "A range", "Use it outside of functions.")) for x in (starts, limits)
    ]
    columns = np.broadcast_arrays(*ends, np.asarray(deltas))
    rows = [np.arange(*triple) for triple in zip(*(np.atleast_1d(column).tolist() for column in columns))]
    kind = np.result_type(*ends) if dtype is None else as_dtype(dtype)
    splits = np.cumsum([0, *map(len, rows)]).astype(as_dtype(row_splits_dtype))
    return RaggedTensor(as_tensor(np.concatenate([np.empty(0, kind), *rows]).astype(kind)), as_tensor(splits))


def boolean_mask(data: TensorLike, mask: TensorLike, name: str | None = None) -> Rows:
    """Returns the elements for which a mask of the same shape is true, each in its row."""
    if not isinstance(mask, RaggedTensor):
        array = np.asarray(known(convert_to_tensor(mask), "A mask", "Use it outside of functions."), bool)
        if array.ndim == 1:
            return _chosen(data, np.flatnonzero(array))
        rows = data if isinstance(data, RaggedTensor) else RaggedTensor.from_tensor(convert_to_tensor(data))
        return boolean_mask(rows, RaggedTensor.from_tensor(convert_to_tensor(array)))
    if not isinstance(data, RaggedTensor):
        raise ValueError(f"boolean_mask: a ragged mask needs ragged data, got {type(data).__name__}.")
    inside = boolean_mask(data.values, mask.values)
    kept, splits = np.asarray(mask.flat_values, bool), np.asarray(mask.row_splits)
    if isinstance(mask.values, RaggedTensor):
        return RaggedTensor(inside, mask.row_splits)
    counts = np.append(0, kept.cumsum())[splits]
    return RaggedTensor(inside, as_tensor(counts.astype(splits.dtype)))


def _chosen(data: TensorLike, rows: np.ndarray) -> Rows:
    if not isinstance(data, RaggedTensor):
        return convert_to_tensor(data)[rows]
    return stack([data[int(i)] for i in rows])


def row_splits_to_segment_ids(splits: TensorLike, name: str | None = None, out_type: DTypeLike | None = None) -> Rows:
    """Returns the row of each value."""
    lengths = np.diff(np.asarray(known(splits, "Splits", "Use them outside of functions.")))
    ids = np.repeat(np.arange(len(lengths)), lengths)
    result: Rows = as_tensor(ids.astype(np.int64 if out_type is None else as_dtype(out_type)))
    return result


RAGGED = "boolean_mask constant map_flat_values range row_splits_to_segment_ids stack"
