"""Operations under TensorFlow's names, each a call of JAX. Arguments may be variables, numpy arrays and Python numbers.

Numbers become float32 and int32 tensors, as in TensorFlow; numpy arrays keep their dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _blocks, _context, _conversion, _errors, _levels, _staging
from replicax._indexed_slices import IndexedSlices
from replicax._specs import TensorShape, as_dtype
from replicax._values import DistributedValues, Mirrored, PerReplica
from replicax._variables import Variable


def convert_to_tensor(value: Any, dtype: Any = None, dtype_hint: Any = None, name: str | None = None) -> Any:
    """A tensor of a number, a nest of numbers, an array or a variable."""
    if isinstance(value, Variable):
        value = value.value()
    if isinstance(value, PerReplica):
        raise ValueError(_errors.NOT_A_TENSOR)
    if isinstance(value, (Mirrored, IndexedSlices)):
        value = value.__jax_array__()
    if isinstance(value, jax.Array):
        if dtype is not None and value.dtype != as_dtype(dtype):
            raise ValueError(
                f"Tensor conversion requested dtype {np.dtype(as_dtype(dtype)).name} for Tensor with dtype "
                f"{value.dtype}: {value!r}"
            )
        return value
    if isinstance(value, (list, tuple)) and any(isinstance(x, (jax.Array, Variable)) for x in value):
        return jnp.stack([convert_to_tensor(x, dtype) for x in value])
    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        return np.vectorize(lambda x: x.encode() if isinstance(x, str) else x, otypes=[object])(array)
    if dtype is not None:
        return jnp.asarray(array, dtype=as_dtype(dtype))
    if not isinstance(value, (np.ndarray, np.generic)):
        narrow = {
            np.dtype(np.float64): np.float32,
            np.dtype(np.int64): np.int32,
            np.dtype(np.complex128): np.complex128,
        }
        array = array.astype(narrow.get(array.dtype, array.dtype))
    return _context.as_array(array)


def constant(value: Any, dtype: Any = None, shape: Any = None, name: str | None = None) -> Any:
    """A tensor of these values, repeated to fill `shape` where that is given."""
    if isinstance(value, jax.Array):
        return value if dtype is None else value.astype(as_dtype(dtype))
    tensor = convert_to_tensor(value, dtype)
    return tensor if shape is None else jnp.broadcast_to(tensor, tuple(shape))


def identity(input: Any, name: str | None = None) -> Any:
    """A new tensor with the same value."""
    return jnp.array(convert_to_tensor(input), copy=True)


def cast(x: Any, dtype: Any, name: str | None = None) -> Any:
    """The tensor in another dtype."""
    return convert_to_tensor(x).astype(as_dtype(dtype))


def is_tensor(x: Any) -> bool:
    """Whether `x` is a tensor or a variable."""
    return isinstance(x, (jax.Array, Variable))


def _shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, (int, np.integer)):
        return (int(shape),)
    return tuple(int(n) for n in (shape.tolist() if hasattr(shape, "tolist") else shape))


def zeros(shape: Any, dtype: Any = np.float32, name: str | None = None) -> Any:
    """Zeros."""
    return jnp.zeros(_shape(shape), as_dtype(dtype))


def ones(shape: Any, dtype: Any = np.float32, name: str | None = None) -> Any:
    """Ones."""
    return jnp.ones(_shape(shape), as_dtype(dtype))


def fill(dims: Any, value: Any, name: str | None = None) -> Any:
    """One value everywhere."""
    return jnp.broadcast_to(convert_to_tensor(value), _shape(dims))


def range(start: Any, limit: Any = None, delta: Any = 1, dtype: Any = None, name: str = "range") -> Any:
    """Numbers from `start` to before `limit`, int32 or float32 by default.

    In code that AutoGraph converts, `for i in range(n)` may have an `n` that only the compiled program knows.
    """
    start, limit = (0, start) if limit is None else (start, limit)
    if any(isinstance(x, jax.core.Tracer) for x in (start, limit, delta)) and _conversion.is_on():
        return _blocks.DynamicRange(start, limit, delta, None if dtype is None else as_dtype(dtype))
    values = [
        x.item() if hasattr(x, "item") and not isinstance(x, jax.core.Tracer) else x for x in (start, limit, delta)
    ]
    if dtype is None:
        dtype = np.float32 if any(isinstance(x, float) for x in values) else np.int32
    return jnp.arange(values[0], values[1], values[2], dtype=as_dtype(dtype))


def shape(input: Any, out_type: Any = np.int32, name: str | None = None) -> Any:
    """The shape, as a tensor; in compiled code as a numpy array, so that the program can depend on it."""
    sizes = np.asarray(convert_to_tensor(input).shape, dtype=as_dtype(out_type))
    return sizes if _levels.is_tracing() else jnp.asarray(sizes)


def reshape(tensor: Any, shape: Any, name: str | None = None) -> Any:
    """The tensor in another shape."""
    return jnp.reshape(convert_to_tensor(tensor), _shape(shape))


def matmul(a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False, name: str | None = None) -> Any:
    """The product of matrices."""
    a, b = convert_to_tensor(a), convert_to_tensor(b)
    a = jnp.swapaxes(a, -1, -2) if transpose_a else a
    return jnp.matmul(a, jnp.swapaxes(b, -1, -2) if transpose_b else b)


def concat(values: Any, axis: int, name: str = "concat") -> Any:
    """The tensors one after the other along `axis`."""
    return jnp.concatenate([convert_to_tensor(value) for value in values], axis)


def stack(values: Any, axis: int = 0, name: str = "stack") -> Any:
    """The tensors along a new axis."""
    return jnp.stack([convert_to_tensor(value) for value in values], axis)


def add_n(inputs: Any, name: str | None = None) -> Any:
    """The sum of tensors."""
    total = convert_to_tensor(inputs[0])
    for value in inputs[1:]:
        total = total + convert_to_tensor(value)
    return total


def _extreme(compute: Callable[..., Any]) -> Callable[..., Any]:
    """`jnp.max` and `jnp.min` fail on 64-bit integers where JAX has 64-bit types only on request (0.10 to 0.12)."""

    def reduce(tensor: Any, axis: Any, keepdims: bool) -> Any:
        axes = tuple(np.arange(tensor.ndim)) if axis is None else tuple(np.atleast_1d(axis) % tensor.ndim)
        result = compute(tensor, axes=tuple(int(a) for a in axes))
        return jnp.expand_dims(result, axes) if keepdims else result

    return reduce


def _reduction(compute: Callable[..., Any], doc: str, keep_dtype: bool = True) -> Callable[..., Any]:
    def op(input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None) -> Any:
        tensor = convert_to_tensor(input_tensor)
        axis = tuple(axis) if isinstance(axis, list) else axis
        result = compute(tensor, axis=axis, keepdims=keepdims)
        return result.astype(tensor.dtype) if keep_dtype else result

    op.__doc__ = doc
    return op


reduce_sum = _reduction(jnp.sum, "The sum along the axes, of all elements by default.")
reduce_mean = _reduction(jnp.mean, "The mean along the axes, in the tensor's dtype (cut off for integers).")
reduce_max = _reduction(_extreme(jax.lax.reduce_max), "The maximum along the axes.")
reduce_min = _reduction(_extreme(jax.lax.reduce_min), "The minimum along the axes.")
reduce_prod = _reduction(jnp.prod, "The product along the axes.")
reduce_any = _reduction(jnp.any, "Whether any element is true.")
reduce_all = _reduction(jnp.all, "Whether all elements are true.")


def _elementwise(compute: Callable[..., Any], doc: str, count: int = 1) -> Callable[..., Any]:
    if count == 1:

        def one(x: Any, name: str | None = None) -> Any:
            return compute(convert_to_tensor(x))

        one.__doc__ = doc
        return one

    def two(x: Any, y: Any, name: str | None = None) -> Any:
        for value in (x, y):
            if isinstance(value, PerReplica):
                in_variable = any(
                    isinstance(other, DistributedValues) and isinstance(other, Variable) for other in (x, y)
                )
                raise (AttributeError if in_variable else ValueError)(_errors.NOT_A_TENSOR)
        x, y = (v if isinstance(v, (int, float, complex)) else convert_to_tensor(v) for v in (x, y))
        return compute(x, y)

    two.__doc__ = doc
    return two


add = _elementwise(jnp.add, "x + y.", 2)
subtract = _elementwise(jnp.subtract, "x - y.", 2)
multiply = _elementwise(jnp.multiply, "x * y.", 2)
divide = _elementwise(jnp.divide, "x / y.", 2)
maximum = _elementwise(jnp.maximum, "The larger of x and y.", 2)
minimum = _elementwise(jnp.minimum, "The smaller of x and y.", 2)
equal = _elementwise(jnp.equal, "x == y, elementwise.", 2)
pow = _elementwise(jnp.power, "x to the power of y.", 2)
square = _elementwise(jnp.square, "x squared.")
sqrt = _elementwise(jnp.sqrt, "The square root.")
exp = _elementwise(jnp.exp, "The exponential.")
log = _elementwise(jnp.log, "The natural logarithm.")
abs = _elementwise(jnp.abs, "The absolute value.")
sigmoid = _elementwise(jax.nn.sigmoid, "The logistic function.")
tanh = _elementwise(jnp.tanh, "The hyperbolic tangent.")
relu = _elementwise(jax.nn.relu, "The positive part.")
softmax = _elementwise(jax.nn.softmax, "Softmax along the last axis.")
zeros_like = _elementwise(jnp.zeros_like, "Zeros of the same shape and dtype.")
ones_like = _elementwise(jnp.ones_like, "Ones of the same shape and dtype.")


def one_hot(indices: Any, depth: int, dtype: Any = np.float32, name: str | None = None) -> Any:
    """Vectors of `depth` elements with a 1 at each index."""
    return jax.nn.one_hot(convert_to_tensor(indices), depth, dtype=as_dtype(dtype))


def argmax(input: Any, axis: int | None = None, output_type: Any = np.int64, name: str | None = None) -> Any:
    """Where the largest element along `axis` (0 by default) stands."""
    result = jnp.argmax(convert_to_tensor(input), axis=0 if axis is None else axis)
    return result.astype(as_dtype(output_type)) if _context.has_64_bit_types() else result


def cond(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any], name: str | None = None) -> Any:
    """`true_fn()` or `false_fn()`, also where the condition is known only when compiled code runs."""
    pred, name = convert_to_tensor(pred), name or "the result"
    true_fn, false_fn = _conversion.converted(true_fn), _conversion.converted(false_fn)
    if not isinstance(pred, jax.core.Tracer):
        return true_fn() if bool(pred) else false_fn()
    return _staging.cond(pred, lambda: (true_fn(),), lambda: (false_fn(),), (name,))[0]


def print(
    *inputs: Any, output_stream: Any = None, summarize: int = 3, sep: str = " ", end: str = "\n", name: Any = None
):
    """Prints when the program runs, in compiled code too; by default to the standard error stream."""
    values = [convert_to_tensor(x) if isinstance(x, (jax.Array, Variable)) else x for x in inputs]
    arrays = [x for x in values if isinstance(x, jax.Array)]

    def show(*concrete: Any) -> None:
        rest = iter(concrete)
        texts = [str(np.asarray(next(rest))) if isinstance(x, jax.Array) else str(x) for x in values]
        (output_stream or sys.stderr).write(sep.join(texts) + end)

    if _levels.is_tracing():
        jax.debug.callback(show, *arrays)
    else:
        show(*arrays)


def get_shape(self: Any) -> TensorShape:
    """The static shape."""
    return TensorShape(self.shape)
