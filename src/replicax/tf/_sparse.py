"""`tf.sparse`: operations on sparse tensors.

How many values there are depends on data, so these operations run outside of compiled code; but for `to_dense`,
`map_values` and `sparse_dense_matmul`, which keep the number of values, and have gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from replicax.tf import _hashes, _operations
from replicax.tf._core import InvalidArgumentError, SparseTensor, as_strings, as_tensor
from replicax.tf._ops import as_element, convert_to_tensor, known
from replicax.tf._parse import strings_of
from replicax.tf._types import TensorLike

_STRING = np.dtype(object)


def _parts(sp_input: object) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Returns the indices, values and shape of a sparse tensor on the host."""
    if not isinstance(sp_input, SparseTensor):
        raise TypeError(f"Input must be a SparseTensor, got {type(sp_input).__name__}.")
    instead = "Use it outside of compiled code: the number of values depends on data."
    arrays = [np.asarray(known(x, "A sparse tensor", instead)) for x in jax.tree.leaves(sp_input)]
    return arrays[0], arrays[1], arrays[2].tolist()


def _made(indices: np.ndarray, values: np.ndarray, shape: Sequence[int]) -> SparseTensor:
    parts = indices.reshape(-1, len(shape)).astype(np.int64), values, np.array(shape, np.int64)
    return SparseTensor(*map(as_element, parts))


def _flat(indices: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns the places of indices in the array laid out in rows."""
    strides = np.append(np.cumprod(np.array(shape[::-1], np.int64))[::-1][1:], 1) if len(shape) else np.empty(0)
    found: np.ndarray = indices @ strides.astype(np.int64)
    return found


def to_dense(
    sp_input: SparseTensor,
    default_value: TensorLike = None,
    validate_indices: bool = True,
    name: str | None = None,
) -> jax.Array:
    """Returns the array, with `default_value` where there is no value; 0 or an empty string by default.

    Raises:
        InvalidArgumentError: `validate_indices`, and indices are not in order, come twice, or lie outside of the shape.
    """
    if isinstance(sp_input.values, jax.core.Tracer) or isinstance(sp_input.indices, jax.core.Tracer):
        shape = [int(n) for n in known(sp_input.dense_shape, "The shape", "It must be known in compiled code.")]
        full = jnp.full(shape, convert_to_tensor(0 if default_value is None else default_value), sp_input.values.dtype)
        return full.at[tuple(sp_input.indices[:, i] for i in range(len(shape)))].set(sp_input.values)
    indices, values, shape = _parts(sp_input)
    if validate_indices and len(indices):
        if (indices < 0).any() or (indices >= shape).any():
            wrong = indices[((indices < 0) | (indices >= shape)).any(1)][0]
            raise InvalidArgumentError(f"Index {wrong.tolist()} is out of bounds: dense shape is {shape}")
        steps = np.diff(_flat(indices, shape))
        if (steps <= 0).any():
            at = int(np.argmax(steps <= 0)) + 1
            what = "is repeated" if steps[at - 1] == 0 else "is out of order"
            raise InvalidArgumentError(
                f"indices[{at}] = {indices[at].tolist()} {what}. Many sparse ops require sorted indices. Use "
                "`tf.sparse.reorder` to create a correctly ordered copy."
            )
    filler = (b"" if values.dtype == _STRING else 0) if default_value is None else default_value
    filler = filler.encode() if isinstance(filler, str) else np.asarray(filler)[()]
    dense = np.full(shape, filler, values.dtype)
    dense[tuple(indices.T)] = values
    differentiable = values.dtype != _STRING and jnp.issubdtype(values.dtype, jnp.inexact)
    if differentiable and isinstance(sp_input.values, jax.Array):  # with a gradient
        return jnp.asarray(dense).at[tuple(indices.T)].set(sp_input.values) if len(indices) else as_tensor(dense)
    return as_element(dense)


def from_dense(tensor: TensorLike, name: str | None = None) -> SparseTensor:
    """Returns the values of an array that are not 0 or empty strings."""
    array = np.asarray(known(convert_to_tensor(tensor), "A sparse tensor", "Make it outside of compiled code."))
    indices = np.argwhere(array != (b"" if array.dtype == _STRING else 0))
    return _made(indices, array[tuple(indices.T)], array.shape)


def reorder(sp_input: SparseTensor, name: str | None = None) -> SparseTensor:
    """Returns it with the indices in row-major order."""
    indices, values, shape = _parts(sp_input)
    order = np.lexsort(indices.T[::-1])
    return _made(indices[order], values[order], shape)


def reshape(sp_input: SparseTensor, shape: TensorLike, name: str | None = None) -> SparseTensor:
    """Returns it in another shape, of which one dimension may be -1."""
    indices, values, old = _parts(sp_input)
    new = np.asarray(shape).tolist()
    count = int(np.prod(old))
    if -1 in new:
        new[new.index(-1)] = count // max(1, -int(np.prod(new)))
    if int(np.prod(new)) != count:
        raise InvalidArgumentError(
            f"Input to reshape is a tensor with {count} dense values, but the requested shape has {int(np.prod(new))}"
        )
    return _made(np.stack(np.unravel_index(_flat(indices, old), new), -1), values, new)


def slice(sp_input: SparseTensor, start: TensorLike, size: TensorLike, name: str | None = None) -> SparseTensor:
    """Returns the part of a size from `start` on."""
    indices, values, shape = _parts(sp_input)
    first = np.asarray(start, np.int64)
    sizes = np.clip(np.minimum(np.asarray(size, np.int64), np.array(shape) - first), 0, None)
    inside = ((indices >= first) & (indices < first + sizes)).all(1)
    return _made(indices[inside] - first, values[inside], sizes.tolist())


def split(sp_input: SparseTensor, num_split: int, axis: int, name: str | None = None) -> list[SparseTensor]:
    """Returns the parts of an axis cut into `num_split`."""
    shape = _parts(sp_input)[2]
    sizes = [len(part) for part in np.array_split(np.arange(shape[axis]), num_split)]
    starts = np.cumsum([0, *sizes])
    parts = []
    for begin, count in zip(starts.tolist(), sizes):
        first, size = [0] * len(shape), list(shape)
        first[axis], size[axis] = begin, count
        parts.append(slice(sp_input, first, size))
    return parts


def concat(
    axis: int, sp_inputs: Sequence[SparseTensor], expand_nonconcat_dims: bool = False, name: str | None = None
) -> SparseTensor:
    """Joins sparse tensors along an axis; with `expand_nonconcat_dims` others grow to the largest."""
    parts = [_parts(x) for x in sp_inputs]
    axis = axis % len(parts[0][2])
    shapes = np.array([shape for _, _, shape in parts])
    others = np.delete(shapes, axis, 1)
    if not expand_nonconcat_dims and (others != others[0]).any():
        raise InvalidArgumentError(f"Concat dimensions must match, got shapes {shapes.tolist()}.")
    shape = shapes.max(0)
    shape[axis] = shapes[:, axis].sum()
    offsets = shapes[:, axis].cumsum() - shapes[:, axis]
    moved = [indices + np.eye(len(shape), dtype=np.int64)[axis] * n for (indices, _, _), n in zip(parts, offsets)]
    joined = _made(np.concatenate(moved), np.concatenate([values for _, values, _ in parts]), shape.tolist())
    return reorder(joined)


def expand_dims(sp_input: SparseTensor, axis: int | None = None, name: str | None = None) -> SparseTensor:
    """Returns it with a dimension of size 1 at `axis`, by default the last one."""
    indices, values, shape = _parts(sp_input)
    rank = len(shape)
    place = rank if axis is None else axis + rank + 1 if axis < 0 else axis
    if not 0 <= place <= rank:
        raise InvalidArgumentError(f"Tried to expand dim index {axis} for a sparse tensor with {rank} dimensions.")
    return _made(np.insert(indices, place, 0, 1), values, [*shape[:place], 1, *shape[place:]])


def transpose(sp_input: SparseTensor, perm: TensorLike = None, name: str | None = None) -> SparseTensor:
    """Returns it with its dimensions in another order, by default reversed."""
    indices, values, shape = _parts(sp_input)
    order = np.arange(len(shape))[::-1] if perm is None else np.asarray(perm)
    return reorder(_made(indices[:, order], values, np.array(shape)[order].tolist()))


def retain(sp_input: SparseTensor, to_retain: TensorLike) -> SparseTensor:
    """Returns it with those values for which a vector of bools is true."""
    indices, values, shape = _parts(sp_input)
    kept = np.asarray(to_retain, bool)
    return _made(indices[kept], values[kept], shape)


def reset_shape(sp_input: SparseTensor, new_shape: TensorLike = None) -> SparseTensor:
    """Returns it with a larger shape; by default with the smallest that has all values."""
    indices, values, shape = _parts(sp_input)
    tight = (indices.max(0, initial=-1) + 1).tolist() if len(indices) else [0] * len(shape)
    new = tight if new_shape is None else np.asarray(new_shape).tolist()
    if len(new) != len(shape) or (new_shape is not None and any(a < b for a, b in zip(new, shape))):
        raise InvalidArgumentError(f"The new shape {new} is smaller than {shape}, or has another rank.")
    return _made(indices, values, new)


def map_values(op: Callable[..., jax.Array], *args: object, **kwargs: object) -> SparseTensor:
    """Returns `op` of the values, at the same places; further sparse arguments have the same places."""
    whole = [x for x in (*args, *kwargs.values()) if isinstance(x, SparseTensor)]
    if not whole:
        raise ValueError("No SparseTensor in argument list of map_values")

    def inner(x: object) -> object:
        return x.values if isinstance(x, SparseTensor) else x

    return whole[0].with_values(op(*map(inner, args), **{key: inner(x) for key, x in kwargs.items()}))


def sparse_dense_matmul(
    sp_a: TensorLike,
    b: SparseTensor | TensorLike,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns the product of a sparse matrix and a dense one, either of them transposed where asked; differentiable."""
    if isinstance(b, SparseTensor):
        return sparse_dense_matmul(b, sp_a, not adjoint_b, not adjoint_a).T
    dense = convert_to_tensor(b)
    dense = jnp.conj(dense.T) if adjoint_b else dense
    if not isinstance(sp_a, SparseTensor):
        raise TypeError(f"One of the matrices must be a SparseTensor, got {type(sp_a).__name__}.")
    row, column = sp_a.indices[:, 0], sp_a.indices[:, 1]
    count = int(known(sp_a.dense_shape, "The shape", "It must be known in compiled code.")[1 if adjoint_a else 0])
    values = jnp.asarray(sp_a.values)
    if adjoint_a:
        row, column, values = column, row, jnp.conj(values)
    return jax.ops.segment_sum(values[:, None] * dense[column], row, count)


def reduce_sum(
    sp_input: SparseTensor, axis: TensorLike = None, keepdims: bool | None = None, output_is_sparse: bool = False,
    name: str | None = None,
) -> jax.Array | SparseTensor:  # fmt: skip
    """Returns the sums along axes, a dense tensor; or a sparse one, with `output_is_sparse`."""
    return _reduced(np.add, sp_input, axis, keepdims, output_is_sparse)


def reduce_max(
    sp_input: SparseTensor, axis: TensorLike = None, keepdims: bool | None = None, output_is_sparse: bool = False,
    name: str | None = None,
) -> jax.Array | SparseTensor:  # fmt: skip
    """Returns the largest of the values along axes, 0 where there are none; a dense tensor or a sparse one."""
    return _reduced(np.maximum, sp_input, axis, keepdims, output_is_sparse)


def _reduced(
    combine: np.ufunc, sp_input: SparseTensor, axis: TensorLike, keepdims: bool | None, sparse: bool
) -> jax.Array | SparseTensor:
    indices, values, shape = _parts(sp_input)
    rank = len(shape)
    axes = {a % rank for a in np.ravel(np.arange(rank) if axis is None else np.asarray(axis)).tolist()}
    kept = [i for i in range(rank) if i not in axes]
    sizes = [shape[i] for i in kept]
    places, group = np.unique(_flat(indices[:, kept], sizes), return_inverse=True)
    totals = np.zeros(len(places), values.dtype)
    if len(places):
        order = np.argsort(group, kind="stable")
        starts = np.searchsorted(group[order], np.arange(len(places)))
        totals = combine.reduceat(values[order], starts, dtype=values.dtype)  # NumPy adds up int32 as int64
    if not (kept or keepdims or sparse):
        total: jax.Array = as_tensor(totals.sum(dtype=values.dtype))
        return total
    rows = np.stack(np.unravel_index(places, sizes), -1) if kept else np.zeros((len(places), 0), np.int64)
    if keepdims:
        whole = np.zeros((len(places), rank), np.int64)
        whole[:, kept] = rows
        rows, sizes = whole, [1 if i in axes else n for i, n in enumerate(shape)]
    found = _made(rows, totals, sizes)
    return found if sparse else to_dense(found)


def add(a: TensorLike | SparseTensor, b: TensorLike | SparseTensor, threshold: float = 0) -> jax.Array | SparseTensor:
    """Returns the sum of two tensors, sparse where both are; sums of at most `threshold` are left out."""
    if not (isinstance(a, SparseTensor) and isinstance(b, SparseTensor)):
        dense = [to_dense(x) if isinstance(x, SparseTensor) else convert_to_tensor(x) for x in (a, b)]
        return dense[0] + dense[1]
    (first, x, shape), (second, y, _) = _parts(a), _parts(b)
    indices = np.concatenate([first, second])
    places, group = np.unique(_flat(indices, shape), return_inverse=True)
    total = np.zeros(len(places), x.dtype)
    np.add.at(total, group, np.concatenate([x, y]))
    kept = np.abs(total) > threshold if threshold else np.ones(len(total), bool)
    return _made(np.stack(np.unravel_index(places[kept], shape), -1), total[kept], shape)


def fill_empty_rows(
    sp_input: SparseTensor, default_value: TensorLike, name: str | None = None
) -> tuple[SparseTensor, jax.Array]:
    """Returns it with `default_value` in the first column of empty rows, and which rows these are."""
    indices, values, shape = _parts(sp_input)
    empty = np.ones(shape[0], bool)
    empty[indices[:, 0]] = False
    added = np.zeros((int(empty.sum()), len(shape)), np.int64)
    added[:, 0] = np.flatnonzero(empty)
    filler = default_value.encode() if isinstance(default_value, str) else np.asarray(default_value)[()]
    filled = np.concatenate([values, np.full(len(added), filler, values.dtype)])
    return reorder(_made(np.concatenate([indices, added]), filled, shape)), convert_to_tensor(empty)


def to_indicator(sp_input: SparseTensor, vocab_size: int, name: str | None = None) -> jax.Array:
    """Returns bools `[..., vocab_size]`: True at each value, which is an integer, of a row."""
    indices, values, shape = _parts(sp_input)
    out = np.zeros([*shape[:-1], int(vocab_size)], bool)
    out[(*indices[:, :-1].T, values)] = True
    return convert_to_tensor(out)


def cross_hashed(
    inputs: Sequence[TensorLike], num_buckets: int = 0, hash_key: int | None = None, name: str | None = None
) -> SparseTensor:
    """Returns the hashes of all combinations of the values of each row, int64.

    Args:
        inputs: strings or integers, `[batch, n]`, dense or sparse.
        num_buckets: hashes are taken modulo this number, where it is not 0.
        hash_key: TensorFlow's by default.
    """
    if not inputs:
        raise ValueError("A crossing needs one input at least, got none.")
    values, counts = zip(*map(_rows_of, inputs))  # the numbers of all rows, and how many each row has
    if len({len(count) for count in counts}) > 1:
        raise InvalidArgumentError(f"Expected batches of one size, got {[len(count) for count in counts]} rows.")
    each = np.prod(counts, axis=0, dtype=np.int64)
    rows = np.repeat(np.arange(len(each)), each)
    within = np.arange(len(rows)) - np.repeat(each.cumsum() - each, each)
    columns: list[np.ndarray] = []
    rest = within
    for numbers, count in zip(values[::-1], counts[::-1]):  # the last column changes first
        begin = count.cumsum() - count
        columns.insert(0, numbers[begin[rows] + rest % count[rows]])
        rest = rest // count[rows]
    key = _hashes._DECAF if hash_key is None else int(hash_key)
    found = _hashes.crossed(columns, key)
    found = found % np.uint64(num_buckets) if num_buckets else found & np.uint64(2**63 - 1)
    return _made(np.stack([rows, within], 1), found.astype(np.int64), [len(each), int(each.max(initial=0))])


def _rows_of(x: TensorLike) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of all rows of strings or integers one after another, and how many each row has."""
    if isinstance(x, SparseTensor):
        indices, values, shape = _parts(x)
        order, counts = np.argsort(indices[:, 0], kind="stable"), np.bincount(indices[:, 0], minlength=shape[0])
        return _numbers(values[order]), counts
    rows = np.asarray(known(convert_to_tensor(x), "A crossing", "Cross outside of compiled code."))
    return _numbers(rows).reshape(-1), np.full(len(rows), math.prod(rows.shape[1:]))


def _numbers(values: np.ndarray) -> np.ndarray:
    if values.dtype == _STRING:
        return _hashes.of_strings(_hashes.fingerprint64, strings_of(as_strings(values)))
    return values.astype(np.int64).view(np.uint64)


_operations.operations(globals(), takes_composites=True)

SPARSE = """add concat cross_hashed expand_dims fill_empty_rows from_dense map_values reduce_max reduce_sum reorder
reset_shape reshape retain slice sparse_dense_matmul split to_dense to_indicator transpose"""
