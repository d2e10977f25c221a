"""Operations that make tensors and change their shapes."""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterable, Sequence
from types import EllipsisType
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from replicax.tf import _host, _operations
from replicax.tf._core import (
    InvalidArgumentError,
    TensorShape,
    array_conversion,
    as_dtype,
    thread_state,
    traced_block,
)
from replicax.tf._host import jnp, lax
from replicax.tf._op_tables import beside, of_dtype
from replicax.tf._ops import (
    as_array,
    as_axis,
    as_int,
    as_new_shape,
    as_shape,
    convert_to_tensor,
    identity,
    is_known,
    is_tensor,
    known,
    string_tensor,
)
from replicax.tf._static import static
from replicax.tf._types import DTypeLike, ShapeLike, TensorLike

# Creating tensors.


def zeros(shape: ShapeLike, dtype: DTypeLike = np.float32, name: str | None = None, layout: object = None) -> jax.Array:
    """Returns zeros."""
    return _filled(0, shape, dtype)


def ones(shape: ShapeLike, dtype: DTypeLike = np.float32, name: str | None = None, layout: object = None) -> jax.Array:
    """Returns ones."""
    return _filled(1, shape, dtype)


def _filled(value: int, shape: ShapeLike, dtype: DTypeLike) -> jax.Array:
    sizes, of_dtype = as_new_shape(shape), np.dtype(as_dtype(dtype))
    if of_dtype.hasobject and not value:
        return string_tensor(np.full(sizes, b"", object))
    if _host.is_on() or of_dtype.hasobject or not array_conversion.is_eager_on_cpu(sizes):
        return jnp.full(sizes, value, of_dtype)
    return array_conversion.sharing(np.full(sizes, value, of_dtype))  # JAX would compile a program for each shape


@_operations.on_values(1)
def zeros_like(
    input: TensorLike, dtype: DTypeLike | None = None, name: str | None = None, layout: object = None
) -> jax.Array:
    """Returns zeros of the same shape, and of the same dtype by default."""
    return jnp.zeros_like(convert_to_tensor(input), None if dtype is None else as_dtype(dtype))


@_operations.on_values(1)
def ones_like(
    input: TensorLike, dtype: DTypeLike | None = None, name: str | None = None, layout: object = None
) -> jax.Array:
    """Returns ones of the same shape, and of the same dtype by default."""
    return jnp.ones_like(convert_to_tensor(input), None if dtype is None else as_dtype(dtype))


def fill(dims: ShapeLike, value: TensorLike, name: str | None = None, layout: object = None) -> jax.Array | np.ndarray:
    """Returns a tensor filled with one value."""
    tensor = convert_to_tensor(value)
    result: jax.Array | np.ndarray = (np if tensor.dtype == np.dtype(object) else jnp).broadcast_to(
        tensor, as_new_shape(dims)
    )
    return result


def eye(
    num_rows: TensorLike,
    num_columns: TensorLike | None = None,
    batch_shape: ShapeLike | None = None,
    dtype: DTypeLike = np.float32,
    name: str | None = None,
) -> jax.Array:
    """Returns identity matrices, `[*batch_shape, num_rows, num_columns]`."""
    rows = as_int(num_rows, "num_rows")
    columns = rows if num_columns is None else as_int(num_columns, "num_columns")
    matrix = jnp.eye(rows, columns, dtype=as_dtype(dtype))
    return matrix if batch_shape is None else jnp.broadcast_to(matrix, (*as_shape(batch_shape), rows, columns))


def range(
    start: ArrayLike,
    limit: ArrayLike | None = None,
    delta: ArrayLike = 1,
    dtype: DTypeLike | None = None,
    name: str = "range",
) -> jax.Array | traced_block.DynamicRange:
    """Returns the numbers from `start` up to, not including, `limit`; int32 or float32 unless an argument is a tensor.

    In code that AutoGraph converts, `for i in range(n)` may have a tracer as `n`.
    """
    start, limit = (0, start) if limit is None else (start, limit)
    if thread_state.current.autograph and any(not is_known(x) for x in (start, limit, delta)):
        return traced_block.DynamicRange(start, limit, delta, None if dtype is None else as_dtype(dtype))
    values = [
        known(x, "A bound of tf.range", "Give a number that does not depend on tensors.") for x in (start, limit, delta)
    ]
    if builtins.any(map(array_conversion.has_symbolic_sizes, values)):
        start, limit, delta = (v.item() for v in values)
        numbers = traced_block.DynamicRange(start, limit, delta, np.int32 if dtype is None else as_dtype(dtype))
        return numbers if thread_state.current.autograph else numbers.__jax_array__()
    if values[2] == 0:
        raise InvalidArgumentError("Requires delta != 0: 0")
    if dtype is None:
        given = [
            v.dtype if hasattr(x, "dtype") else np.dtype("f4" if v.dtype.kind == "f" else "i4")
            for x, v in zip((start, limit, delta), values)
        ]
        dtype = builtins.max(given, key=[np.dtype(t) for t in ("i4", "i8", "f4", "f8")].index)
    return as_array(np.arange(*(v.item() for v in values)).astype(as_dtype(dtype)))


def linspace(start: TensorLike, stop: TensorLike, num: TensorLike, name: str | None = None, axis: int = 0) -> jax.Array:
    """Returns `num` numbers from `start` to `stop`, both included, along a new axis; float64 for integers."""
    first = convert_to_tensor(start)
    first = first.astype(np.float64) if jnp.issubdtype(first.dtype, jnp.integer) else first
    last = of_dtype(convert_to_tensor(stop) if is_tensor(stop) else stop, first.dtype)
    return jnp.linspace(first, last, as_int(num, "num"), axis=axis, dtype=first.dtype)


def meshgrid(*args: TensorLike, indexing: str = "xy", name: str | None = None) -> list[jax.Array]:
    """Returns the coordinates of a grid, one tensor for each axis."""
    return list(jnp.meshgrid(*(convert_to_tensor(x).reshape(-1) for x in args), indexing=indexing))


@_operations.on_values(1)
def one_hot(
    indices: TensorLike,
    depth: TensorLike,
    on_value: TensorLike | None = None,
    off_value: TensorLike | None = None,
    axis: int | None = None,
    dtype: DTypeLike | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns vectors of `depth` elements with `on_value` (1) at each index and `off_value` (0) elsewhere."""
    given = [convert_to_tensor(x) for x in (on_value, off_value) if x is not None]
    dtype = as_dtype(dtype if dtype is not None else given[0].dtype if given else np.float32)
    on, off = (of_dtype(default if x is None else x, dtype) for x, default in ((on_value, 1), (off_value, 0)))
    hot = jax.nn.one_hot(
        convert_to_tensor(indices), as_int(depth, "depth"), dtype=np.bool_, axis=-1 if axis is None else axis
    )
    return jnp.where(hot, on, off)


def sequence_mask(
    lengths: TensorLike, maxlen: TensorLike | None = None, dtype: DTypeLike = np.bool_, name: str | None = None
) -> jax.Array:
    """Returns bools `[*lengths.shape, maxlen]`, true for the first `length` elements of each row."""
    ends = convert_to_tensor(lengths)
    if maxlen is None:
        maxlen = np.max(known(ends, "The largest of the lengths", "Give `maxlen`."), initial=0)
    row = jnp.arange(as_int(maxlen, "maxlen"), dtype=ends.dtype)
    return (row < ends[..., None]).astype(as_dtype(dtype))


# Shapes and values that are known.


def ensure_shape(x: TensorLike, shape: Iterable[int | None] | int | None, name: str | None = None) -> jax.Array:
    """Returns the tensor if it has the given shape; raises `InvalidArgumentError` otherwise."""
    tensor, expected = convert_to_tensor(x), TensorShape(shape)
    if not expected.is_compatible_with(tensor.shape):
        raise InvalidArgumentError(
            f"Shape of tensor {tuple(tensor.shape)} is not compatible with expected shape {expected}."
        )
    return tensor


def get_static_value(tensor: TensorLike, partial: bool = False) -> np.ndarray | np.generic | None:
    """Returns the value as a numpy array, or None if it is not known while tracing."""
    value = convert_to_tensor(tensor)
    return None if isinstance(value, jax.core.Tracer) else np.asarray(value)[()]


# Changing shapes.


def reshape(tensor: TensorLike, shape: ShapeLike, name: str | None = None) -> jax.Array:
    """Returns the tensor in another shape, in which one dimension may be -1."""
    array, dims = convert_to_tensor(tensor), as_shape(shape)
    if 0 in dims and dims.count(-1) == 1:  # the sizes other than 0 decide, since the number of elements does not
        given = math.prod(n for n in dims if n not in (0, -1))
        dims = tuple(math.prod(n for n in array.shape if n != 0) // given if n == -1 else n for n in dims)
    return _operations.fitting(jnp.reshape, _operations.of_reshape)(array, dims)


def broadcast_to(input: TensorLike, shape: ShapeLike, name: str | None = None) -> jax.Array:
    """Returns the tensor repeated to fill a shape."""
    return _operations.fitting(jnp.broadcast_to, _operations.of_broadcast_to)(convert_to_tensor(input), as_shape(shape))


def expand_dims(input: TensorLike, axis: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the tensor with a dimension of size 1 at `axis`."""
    return _operations.fitting(jnp.expand_dims, _operations.of_expand_dims)(convert_to_tensor(input), as_axis(axis))


def squeeze(input: TensorLike, axis: TensorLike | None = None, name: str | None = None) -> jax.Array:
    """Returns the tensor without its dimensions of size 1, or without those at `axis`."""
    axes = as_axis(axis)
    return _operations.fitting(jnp.squeeze, _operations.of_squeeze)(
        convert_to_tensor(input), None if axes == () else axes
    )


def transpose(
    a: TensorLike, perm: TensorLike | None = None, conjugate: bool = False, name: str = "transpose"
) -> jax.Array:
    """Returns the tensor with its axes in another order, reversed by default."""
    tensor = jnp.transpose(convert_to_tensor(a), None if perm is None else as_shape(perm))
    return jnp.conj(tensor) if conjugate else tensor


@static
def concat(values: TensorLike, axis: TensorLike, name: str = "concat") -> jax.Array:
    """Returns the tensors concatenated along `axis`."""
    values = values if isinstance(values, (list, tuple)) else [values]
    return _operations.fitting(jnp.concatenate, _operations.of_concat)(_alike(values), axis=as_axis(axis))


@static
def stack(values: Sequence[TensorLike], axis: int = 0, name: str = "stack") -> jax.Array:
    """Returns the tensors stacked along a new axis."""
    return _operations.fitting(jnp.stack, _operations.of_stack)(_alike(values), axis=axis)


def _alike(values: Sequence[TensorLike]) -> list[jax.Array]:
    """Converts Python numbers and lists to the dtype of the tensors that are given with them."""
    dtypes: list[np.dtype] = [getattr(x, "dtype") for x in values if hasattr(x, "dtype")]  # noqa: B009
    if not dtypes or len(dtypes) == len(values):
        return [convert_to_tensor(x) for x in values]
    return [convert_to_tensor(x) if hasattr(x, "dtype") else convert_to_tensor(x, dtypes[0]) for x in values]


def parallel_stack(values: Sequence[TensorLike], name: str = "parallel_stack") -> jax.Array:
    """Returns the tensors stacked along a new first axis."""
    return stack(values)


def unstack(value: TensorLike, num: int | None = None, axis: int = 0, name: str = "unstack") -> list[jax.Array]:
    """Returns the slices of a tensor along an axis, without that axis."""
    tensor = convert_to_tensor(value)
    if num is not None and num != tensor.shape[axis]:
        raise InvalidArgumentError(f"Cannot unstack {tensor.shape[axis]} parts along axis {axis} as {num}.")
    return [part.squeeze(axis) for part in jnp.split(tensor, tensor.shape[axis], axis)] if tensor.shape[axis] else []


def split(
    value: TensorLike, num_or_size_splits: TensorLike, axis: TensorLike = 0, num: int | None = None, name: str = "split"
) -> list[jax.Array]:
    """Splits a tensor along an axis into a number of equal parts, or into parts of given sizes, one of which may be
    -1.
    """
    tensor, along = convert_to_tensor(value), as_axis(axis)
    splits = known(num_or_size_splits, "The number of splits", "Give Python numbers.")
    if splits.ndim == 0:
        if tensor.shape[along] % int(splits):
            raise InvalidArgumentError(
                f"Dimension size, {tensor.shape[along]}, must be evenly divisible by {int(splits)}."
            )
        return jnp.split(tensor, int(splits), along)
    sizes = [int(n) for n in splits]
    if -1 in sizes:
        sizes[sizes.index(-1)] = tensor.shape[along] - sum(n for n in sizes if n != -1)
    if sum(sizes) != tensor.shape[along] or builtins.min(sizes, default=0) < 0:
        raise InvalidArgumentError(
            f"Sizes {splits.tolist()} do not add up to the {tensor.shape[along]} elements of axis {along}."
        )
    return jnp.split(tensor, np.cumsum(sizes)[:-1].tolist(), along)


def tile(input: TensorLike, multiples: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the tensor repeated `multiples` times along each axis."""
    tensor, times = convert_to_tensor(input), as_shape(multiples)
    if len(times) != tensor.ndim:
        raise InvalidArgumentError(
            f"multiples must have a number for each of the {tensor.ndim} dimensions, got {list(times)}."
        )
    return jnp.tile(tensor, times)


def repeat(input: TensorLike, repeats: TensorLike, axis: int | None = None, name: str | None = None) -> jax.Array:
    """Repeats each element along an axis; without an axis those of the flattened tensor."""
    counts = known(repeats, "The number of repeats", "Give Python numbers.")
    return jnp.repeat(convert_to_tensor(input), int(counts) if counts.ndim == 0 else counts, axis=as_axis(axis))


def pad(
    tensor: TensorLike,
    paddings: TensorLike,
    mode: str = "CONSTANT",
    constant_values: TensorLike = 0,
    name: str | None = None,
) -> jax.Array:
    """Pads before and after each axis; `paddings` is `[rank, 2]`, `mode` "CONSTANT", "REFLECT" or "SYMMETRIC"."""
    widths = [tuple(int(n) for n in row) for row in known(paddings, "The padding", "Give Python numbers.")]
    modes: dict[str, dict[str, ArrayLike]] = {"CONSTANT": {}, "REFLECT": {}, "SYMMETRIC": {}}
    if mode.upper() not in modes:
        raise ValueError(f"mode must be one of {sorted(modes)}, got {mode!r}.")
    array = convert_to_tensor(tensor)
    if [*map(len, widths)] != [2] * array.ndim:
        raise InvalidArgumentError(f"paddings must be [{array.ndim}, 2] for a tensor of shape {array.shape}: {widths}")
    modes["CONSTANT"]["constant_values"] = beside(constant_values, array)
    most = {"REFLECT": 1, "SYMMETRIC": 0}.get(mode.upper())
    if most is not None and any(builtins.max(pair) > n - most for pair, n in zip(widths, array.shape)):
        raise InvalidArgumentError(f"{mode} pads with a tensor's elements: {widths} is too much for {array.shape}.")
    return jnp.pad(array, widths, mode.lower(), **modes[mode.upper()])  # type: ignore[arg-type]


def reverse(tensor: TensorLike, axis: TensorLike, name: str | None = None) -> jax.Array:
    """Reverses the order of elements along the axes."""
    return jnp.flip(convert_to_tensor(tensor), as_axis(axis))


def reverse_sequence(
    input: TensorLike,
    seq_lengths: TensorLike,
    seq_axis: int | None = None,
    batch_axis: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Reverses the first `seq_lengths[i]` elements of row `i`; the rest stay."""
    tensor, lengths = convert_to_tensor(input), convert_to_tensor(seq_lengths)
    rows = jnp.moveaxis(tensor, (batch_axis or 0, 1 if seq_axis is None else seq_axis), (0, 1))
    steps = jnp.arange(rows.shape[1], dtype=lengths.dtype)
    order = jnp.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)
    turned = jax.vmap(lambda row, places: row[places])(rows, order)
    return jnp.moveaxis(turned, (0, 1), (batch_axis or 0, 1 if seq_axis is None else seq_axis))


def roll(input: TensorLike, shift: TensorLike, axis: TensorLike, name: str | None = None) -> jax.Array:
    """Shifts elements along the axes; those at the end move to the front."""
    steps = convert_to_tensor(shift)
    return jnp.roll(convert_to_tensor(input), as_axis(steps) if is_known(steps) else steps, as_axis(axis))


def slice(
    input_: TensorLike, begin: jax.Array | Sequence[TensorLike], size: TensorLike, name: str | None = None
) -> jax.Array:
    """Returns `size` elements of each axis, starting at `begin`; -1 stands for all remaining ones."""
    tensor, sizes = convert_to_tensor(input_), as_shape(size)
    if not all(map(is_known, jax.tree.leaves(begin))):
        begins: Any = list(begin)
        what = "The begin of a slice of size -1", "Give the size."
        sizes = tuple(
            n - int(known(b, *what)) if length < 0 else length for b, length, n in zip(begins, sizes, tensor.shape)
        )
        return lax.dynamic_slice(tensor, begins, sizes)
    begins = as_shape(begin)
    ends = [n if length < 0 else b + length for b, length, n in zip(begins, sizes, tensor.shape)]
    if any(b < 0 or e > n for b, e, n in zip(begins, ends, tensor.shape)):
        raise InvalidArgumentError(
            f"A slice from {list(begins)} of size {list(sizes)} does not fit into {tuple(tensor.shape)}."
        )
    return lax.slice(tensor, begins, ends)


def strided_slice(
    input_: TensorLike,
    begin: TensorLike,
    end: TensorLike,
    strides: TensorLike | None = None,
    begin_mask: int = 0,
    end_mask: int = 0,
    ellipsis_mask: int = 0,
    new_axis_mask: int = 0,
    shrink_axis_mask: int = 0,
    var: object = None,
    name: str | None = None,
) -> jax.Array:
    """Returns `input_[begin:end:strides]` for each axis; bit `i` of a mask is for axis `i`."""
    begins, ends = as_shape(begin), as_shape(end)
    index: list[int | builtins.slice | EllipsisType | None] = []
    for i, (first, last, step) in enumerate(
        zip(begins, ends, as_shape(strides) if strides is not None else [1] * len(begins))
    ):
        bit = 1 << i
        if ellipsis_mask & bit:
            index.append(Ellipsis)
        elif new_axis_mask & bit:
            index.append(None)
        elif shrink_axis_mask & bit:
            index.append(first)
        else:
            index.append(builtins.slice(None if begin_mask & bit else first, None if end_mask & bit else last, step))
    return convert_to_tensor(input_)[tuple(index)]


def identity_n(input: Sequence[TensorLike], name: str | None = None) -> list[jax.Array]:
    """Returns new tensors with the same values."""
    return [identity(x) for x in input]


def space_to_depth(input: TensorLike, block_size: int, data_format: str = "NHWC", name: str | None = None) -> jax.Array:
    """Moves blocks of `block_size` x `block_size` pixels into the channels of one pixel, for NHWC."""
    x, b = _nhwc(input, data_format), block_size
    n, h, w, c = x.shape
    x = x.reshape(n, h // b, b, w // b, b, c).transpose(0, 1, 3, 2, 4, 5).reshape(n, h // b, w // b, b * b * c)
    return jnp.moveaxis(x, -1, 1) if data_format == "NCHW" else x


def depth_to_space(input: TensorLike, block_size: int, data_format: str = "NHWC", name: str | None = None) -> jax.Array:
    """Moves channels into blocks of `block_size` x `block_size` pixels: the reverse of `space_to_depth`."""
    x, b = _nhwc(input, data_format), block_size
    n, h, w, c = x.shape
    x = x.reshape(n, h, w, b, b, c // b**2).transpose(0, 1, 3, 2, 4, 5).reshape(n, h * b, w * b, c // b**2)
    return jnp.moveaxis(x, -1, 1) if data_format == "NCHW" else x


def _nhwc(input: TensorLike, data_format: str) -> jax.Array:
    if data_format not in ("NHWC", "NCHW"):
        raise ValueError(f'data_format must be "NHWC" or "NCHW", got {data_format!r}.')
    x = convert_to_tensor(input)
    return jnp.moveaxis(x, 1, -1) if data_format == "NCHW" else x


_operations.operations(globals())
