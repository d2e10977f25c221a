"""Shapes of tensors, as tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from replicax.tf._core import RaggedTensor, SparseTensor, TensorShape, array_conversion, as_dtype, frames
from replicax.tf._host import jnp
from replicax.tf._ops import as_array, as_shape, convert_to_tensor, known
from replicax.tf._types import DTypeLike, ShapeLike, TensorLike


def shape(input: TensorLike, out_type: DTypeLike | None = None, name: str | None = None) -> jax.Array | np.ndarray:
    """Returns the shape as a tensor; in compiled code as a numpy array, which can be used as a shape."""
    if isinstance(input, RaggedTensor):
        raise ValueError(
            f"`shape` takes no RaggedTensor, got one of shape {list(input.shape)}: use x.nrows(), x.row_lengths() or "
            "x.bounding_shape()."
        )
    sizes = np.array(_sizes(input), object)
    if array_conversion.has_symbolic_sizes(sizes):
        return sizes
    array = np.asarray(sizes, np.int32 if out_type is None else as_dtype(out_type))
    return array if frames.is_tracing() else as_array(array)


def _sizes(input: TensorLike) -> list[Any]:
    """Return the size of each dimension of a dense or sparse tensor."""
    if isinstance(input, SparseTensor):
        return [int(n) for n in known(input.dense_shape, "The shape of a SparseTensor", "Call it in eager code.")]
    return [*convert_to_tensor(input).shape]


def shape_n(
    input: Sequence[TensorLike], out_type: DTypeLike = np.int32, name: str | None = None
) -> list[jax.Array | np.ndarray]:
    """Returns the shape of each tensor."""
    return [shape(x, out_type) for x in input]


def size(input: TensorLike, out_type: DTypeLike | None = None, name: str | None = None) -> jax.Array | np.ndarray:
    """Returns the number of elements as a tensor; in compiled code as a numpy number."""
    size: Any = input.flat_values.size if isinstance(input, RaggedTensor) else math.prod(_sizes(input))
    if array_conversion.has_symbolic_sizes(size):
        return size  # type: ignore[no-any-return]
    count = np.asarray(size, np.int32 if out_type is None else as_dtype(out_type))
    return count[()] if frames.is_tracing() else as_array(count)


def rank(input: TensorLike, name: str | None = None) -> jax.Array | np.int32:
    """Returns the rank as a tensor; in compiled code as a numpy number."""
    count = np.int32(len(input.shape) if isinstance(input, RaggedTensor) else len(_sizes(input)))
    return count if frames.is_tracing() else jnp.asarray(count)


def broadcast_static_shape(shape_x: Iterable[int], shape_y: Iterable[int]) -> TensorShape:
    """Returns the shape that results from broadcasting two shapes."""
    return TensorShape(np.broadcast_shapes(tuple(shape_x), tuple(shape_y)))


def broadcast_dynamic_shape(shape_x: ShapeLike, shape_y: ShapeLike) -> jax.Array | np.ndarray:
    """Returns the shape that results from broadcasting two shapes, as a tensor."""
    array = np.asarray(np.broadcast_shapes(as_shape(shape_x), as_shape(shape_y)), np.int32)
    return array if frames.is_tracing() else as_array(array)
