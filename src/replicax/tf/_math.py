"""Elementwise operations and reductions: tables in which each row is a call of JAX."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from replicax.tf._core import IndexedSlices, as_dtype
from replicax.tf._dressing import magnitude
from replicax.tf._host import HostTensor, jnp, lax
from replicax.tf._op_tables import (
    binary,
    elementwise,
    largest,
    namespace_of,
    no_nan,
    of_dtype,
    pair,
    reduction,
    smallest,
    tensors,
)
from replicax.tf._operations import fitting, of_broadcast, on_values, operations
from replicax.tf._ops import as_axis, axes_of, convert_to_tensor
from replicax.tf._static import static
from replicax.tf._types import DTypeLike, ShapeLike, TensorLike


def _floats(x: TensorLike, y: TensorLike) -> tuple[jax.Array, jax.Array]:
    """Converts integers to float64 for division, small ones to float32."""
    left, right = tensors(x, y)
    if jnp.issubdtype(left.dtype, jnp.integer):
        wide = np.float32 if left.dtype.itemsize < 4 else np.float64
        left, right = left.astype(wide), right.astype(wide)
    return left, right


def _broadcast(*operands: jax.Array) -> list[jax.Array]:
    """Broadcasts operands one by one, so that a tape knows which of them depend on watched values."""
    shape = jnp.broadcast_shapes(*(x.shape for x in operands))
    return [jnp.broadcast_to(x, shape) for x in operands]


def _without(compute: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Computes 0 where the first operand is 0, whatever the second is."""
    return lambda x, y: jnp.where(x == 0, jnp.zeros_like(x), compute(x, jnp.where(x == 0, jnp.ones_like(y), y)))


# At points where a function is not differentiable, gradients are TensorFlow's; programs that start from zeros reach
# such points. JAX's are a half for each of two equal operands of maximum and minimum.


def _of_both(
    compute: Callable[[jax.Array, jax.Array], jax.Array], first: Callable[[jax.Array, jax.Array], jax.Array]
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns `compute(x, y)`, with its gradient given to x where `first(x, y)`, and else to y."""

    def one(x: Any, y: Any) -> jax.Array:
        on_host = type(x) is HostTensor and type(y) is HostTensor  # where there are no gradients
        if on_host or not jnp.issubdtype(jnp.result_type(x, y), jnp.floating):
            return compute(x, y)
        return jnp.where(first(x, y) | jnp.isnan(x), x, y)

    return fitting(one, of_broadcast)


larger = _of_both(jnp.maximum, jnp.greater_equal)
smaller = _of_both(jnp.minimum, jnp.less_equal)


def _floor_of_quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.floor(x / y) if jnp.issubdtype(jnp.result_type(x, y), jnp.floating) else jnp.floor_divide(x, y)


_UNARY: dict[str, tuple[Callable[[jax.Array], jax.Array], str]] = {
    "abs": (magnitude, "Returns the absolute value."),
    "acos": (jnp.arccos, "Returns the angle whose cosine this is."),
    "acosh": (jnp.arccosh, "Returns the inverse of cosh."),
    "asin": (jnp.arcsin, "Returns the angle whose sine this is."),
    "asinh": (jnp.arcsinh, "Returns the inverse of sinh."),
    "atan": (jnp.arctan, "Returns the angle whose tangent this is."),
    "atanh": (jnp.arctanh, "Returns the inverse of tanh."),
    "bessel_i0": (
        lambda x: lax.bessel_i0e(x) * jnp.exp(jnp.abs(x)),
        "Returns the modified Bessel function of order 0.",
    ),
    "bessel_i0e": (lax.bessel_i0e, "Returns the modified Bessel function of order 0, scaled by exp(-|x|)."),
    "bessel_i1": (
        lambda x: lax.bessel_i1e(x) * jnp.exp(jnp.abs(x)),
        "Returns the modified Bessel function of order 1.",
    ),
    "bessel_i1e": (lax.bessel_i1e, "Returns the modified Bessel function of order 1, scaled by exp(-|x|)."),
    "ceil": (jnp.ceil, "Rounds up to an integer."),
    "conj": (jnp.conj, "Returns the complex conjugate."),
    "cos": (jnp.cos, "Returns the cosine."),
    "cosh": (jnp.cosh, "Returns the hyperbolic cosine."),
    "digamma": (lax.digamma, "Returns the derivative of lgamma."),
    "erf": (lax.erf, "Returns the error function."),
    "erfc": (lax.erfc, "Returns 1 - erf(x)."),
    "erfcinv": (lambda x: lax.erf_inv(1 - x), "Returns the inverse of erfc."),
    "erfinv": (lax.erf_inv, "Returns the inverse of erf."),
    "exp": (jnp.exp, "Returns the exponential."),
    "expm1": (jnp.expm1, "Returns exp(x) - 1, exact near 0."),
    "floor": (jnp.floor, "Rounds down to an integer."),
    "is_finite": (jnp.isfinite, "Returns whether elements are neither infinite nor NaN."),
    "is_inf": (jnp.isinf, "Returns whether elements are infinite."),
    "is_nan": (jnp.isnan, "Returns whether elements are NaN."),
    "lgamma": (lax.lgamma, "Returns the logarithm of the absolute value of the gamma function."),
    "log": (jnp.log, "Returns the natural logarithm."),
    "log1p": (jnp.log1p, "Returns log(1 + x), exact near 0."),
    "log_sigmoid": (jax.nn.log_sigmoid, "Returns the logarithm of the logistic function."),
    "logical_not": (jnp.logical_not, "Returns whether elements are false."),
    "ndtri": (
        lambda x: lax.erf_inv(2 * x - 1) * np.sqrt(2).astype(x.dtype),
        "Returns quantiles of the normal distribution.",
    ),
    "negative": (jnp.negative, "Returns -x."),
    "reciprocal": (lambda x: (1 / x).astype(x.dtype), "Returns 1 / x."),
    "reciprocal_no_nan": (lambda x: no_nan(jnp.divide)(jnp.ones_like(x), x), "Returns 1 / x, and 0 where x is 0."),
    "rint": (jnp.rint, "Rounds to the nearest integer; halves to the even one."),
    "round": (jnp.round, "Rounds to the nearest integer; halves to the even one."),
    "rsqrt": (lax.rsqrt, "Returns 1 / sqrt(x)."),
    "sigmoid": (jax.nn.sigmoid, "Returns the logistic function."),
    "sign": (jnp.sign, "Returns the sign: -1, 0 or 1."),
    "sin": (jnp.sin, "Returns the sine."),
    "sinh": (jnp.sinh, "Returns the hyperbolic sine."),
    "sqrt": (jnp.sqrt, "Returns the square root."),
    "square": (jnp.square, "Returns x squared."),
    "tan": (jnp.tan, "Returns the tangent."),
    "tanh": (jnp.tanh, "Returns the hyperbolic tangent."),
}

_BINARY: dict[str, tuple[Callable[[jax.Array, jax.Array], jax.Array], str]] = {
    "add": (jnp.add, "Returns x + y."),
    "equal": (jnp.equal, "Returns x == y, elementwise."),
    "floordiv": (_floor_of_quotient, "Returns x // y."),
    "floormod": (jnp.mod, "Returns x % y, with the sign of y."),
    "greater": (jnp.greater, "Returns x > y."),
    "greater_equal": (jnp.greater_equal, "Returns x >= y."),
    "less": (jnp.less, "Returns x < y."),
    "less_equal": (jnp.less_equal, "Returns x <= y."),
    "logical_and": (jnp.logical_and, "Returns whether both are true."),
    "logical_or": (jnp.logical_or, "Returns whether at least one of both is true."),
    "logical_xor": (jnp.logical_xor, "Returns whether exactly one of both is true."),
    "maximum": (larger, "Returns the larger of x and y."),
    "minimum": (smaller, "Returns the smaller of x and y."),
    "multiply": (jnp.multiply, "Returns x * y."),
    "not_equal": (jnp.not_equal, "Returns x != y, elementwise."),
    "pow": (jnp.power, "Returns x to the power of y."),
    "squared_difference": (lambda x, y: jnp.square(x - y), "Returns (x - y) squared."),
    "subtract": (jnp.subtract, "Returns x - y."),
}
_OF_TENSORS: dict[str, tuple[Callable[[jax.Array, jax.Array], jax.Array], str]] = {
    "divide_no_nan": (no_nan(jnp.divide), "Returns x / y, and 0 where y is 0."),
    "multiply_no_nan": (
        lambda x, y: jnp.where((y == 0) & ~jnp.isfinite(x), jnp.zeros_like(x), x) * y,
        "Returns x * y, and 0 where y is 0.",
    ),
    "truncatediv": (lambda x, y: lax.div(*_broadcast(x, y)), "Returns x / y, rounded towards 0."),
    "truncatemod": (lambda x, y: lax.rem(*_broadcast(x, y)), "Returns the remainder of x / y, with the sign of x."),
    "xdivy": (_without(jnp.divide), "Returns x / y, and 0 where x is 0."),
    "xlog1py": (_without(lambda x, y: x * jnp.log1p(y)), "Returns x * log(1 + y), and 0 where x is 0."),
    "xlogy": (_without(lambda x, y: x * jnp.log(y)), "Returns x * log(y), and 0 where x is 0."),
}


def _norm(tensor: jax.Array, axis: int | Sequence[int] | None, keepdims: bool) -> jax.Array:
    return jnp.sqrt(jnp.sum(tensor * jnp.conj(tensor), axis=axis, keepdims=keepdims))


_LOGICAL = {
    "reduce_all": reduction(jnp.all, "Returns whether all elements along the axes are true.", logical=True),
    "reduce_any": reduction(jnp.any, "Returns whether any element along the axes is true.", logical=True),
}
_REDUCTIONS: dict[str, tuple[Callable[..., jax.Array], str, bool]] = {
    "reduce_euclidean_norm": (_norm, "Returns the Euclidean norm along the axes.", True),
    "reduce_logsumexp": (jax.nn.logsumexp, "Returns log(sum(exp(x))) along the axes.", True),
    "reduce_max": (largest, "Returns the maximum along the axes.", True),
    "reduce_mean": (jnp.mean, "Returns the mean along the axes, in the tensor's dtype (truncated for integers).", True),
    "reduce_min": (smallest, "Returns the minimum along the axes.", True),
    "reduce_prod": (jnp.prod, "Returns the product along the axes.", True),
    "reduce_std": (jnp.std, "Returns the standard deviation along the axes.", False),
    "reduce_sum": (jnp.sum, "Returns the sum along the axes, of all elements by default.", True),
    "reduce_variance": (jnp.var, "Returns the variance along the axes.", False),
}

# Also used to compute with shapes (see `static`).
_WITH_SHAPES = {
    "add", "floordiv", "floormod", "maximum", "minimum", "multiply", "reduce_max", "reduce_min", "reduce_prod",
    "reduce_sum", "subtract",
}  # fmt: skip

TABLE: dict[str, Callable[..., jax.Array]] = {
    **{name: elementwise(*row) for name, row in _UNARY.items()},
    **{name: binary(*row) for name, row in _BINARY.items()},
    **{name: binary(*row, operands=tensors) for name, row in _OF_TENSORS.items()},
    **{name: reduction(*row) for name, row in _REDUCTIONS.items()},
    **_LOGICAL,
    "divide": binary(jnp.divide, "Returns x / y; integers are converted to floating-point numbers.", _floats),
    "truediv": binary(jnp.divide, "Returns x / y; integers are converted to floating-point numbers.", _floats),
    "realdiv": binary(jnp.divide, "Returns x / y.", tensors),
    "mod": binary(jnp.mod, "Returns x % y, with the sign of y."),
}
namespace_of({name: static(op) if name in _WITH_SHAPES else op for name, op in TABLE.items()}, globals())


@on_values(2)
def atan2(y: TensorLike, x: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the angle of the point (x, y)."""
    return jnp.arctan2(*tensors(y, x))


@on_values(2)
def nextafter(x1: TensorLike, x2: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the next number after x1 in the direction of x2."""
    return jnp.nextafter(*tensors(x1, x2))


def igamma(a: TensorLike, x: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the lower regularized incomplete gamma function."""
    return lax.igamma(*_broadcast(*tensors(a, x)))


def igammac(a: TensorLike, x: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the upper regularized incomplete gamma function."""
    return lax.igammac(*_broadcast(*tensors(a, x)))


def betainc(a: TensorLike, b: TensorLike, x: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the regularized incomplete beta function."""
    return lax.betainc(*_broadcast(*(convert_to_tensor(v) for v in (a, b, x))))


def polygamma(a: TensorLike, x: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the derivative of order `a` of digamma."""
    return lax.polygamma(*_broadcast(*tensors(a, x)))


@on_values(2)
def zeta(x: TensorLike, q: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the Hurwitz zeta function."""
    return lax.zeta(*_broadcast(*tensors(x, q)))


def lbeta(x: TensorLike, name: str | None = None) -> jax.Array:
    """Returns log(|Beta|) along the last axis."""
    tensor = convert_to_tensor(x)
    return jnp.sum(lax.lgamma(tensor), -1) - lax.lgamma(jnp.sum(tensor, -1))


@on_values(1)
def real(input: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the real part."""
    return jnp.real(convert_to_tensor(input))


@on_values(1)
def imag(input: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the imaginary part."""
    return jnp.imag(convert_to_tensor(input))


@on_values(1)
def angle(input: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the angle of complex numbers."""
    return jnp.angle(convert_to_tensor(input))


def add_n(inputs: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the sum of tensors."""
    terms = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    total = convert_to_tensor(terms[0])
    for value in terms[1:]:
        total = total + convert_to_tensor(value)
    return total


def accumulate_n(
    inputs: TensorLike, shape: ShapeLike | None = None, tensor_dtype: DTypeLike | None = None, name: str | None = None
) -> jax.Array:
    """Returns the sum of tensors."""
    return add_n(inputs)


@on_values(2)
def scalar_mul(scalar: TensorLike, x: TensorLike | IndexedSlices, name: str | None = None) -> jax.Array | IndexedSlices:
    """Returns the tensor times a number."""
    return elementwise(lambda x: jnp.multiply(*pair(scalar, x)), "")(x)


def count_nonzero(
    input: TensorLike,
    axis: TensorLike | None = None,
    keepdims: bool | None = None,
    dtype: DTypeLike = np.int64,
    name: str | None = None,
) -> jax.Array:
    """Counts the elements along the axes that are not 0."""
    there = convert_to_tensor(input) != 0
    return jnp.sum(there.astype(as_dtype(dtype)), axis=as_axis(axis), keepdims=bool(keepdims)).astype(as_dtype(dtype))


def zero_fraction(value: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the fraction of elements that are 0, float32."""
    return jnp.mean(convert_to_tensor(value) == 0, dtype=np.float32)


def polyval(coeffs: Iterable[TensorLike], x: TensorLike, name: str | None = None) -> jax.Array:
    """Evaluates a polynomial at x; the coefficient of the highest power comes first."""
    at = convert_to_tensor(x)
    total = jnp.zeros_like(at)
    for coefficient in coeffs:
        total = total * at + convert_to_tensor(coefficient, None if hasattr(coefficient, "dtype") else at.dtype)
    return total


# Operations along one axis.


def _cumulative(
    compute: Callable[..., jax.Array], neutral: Callable[[np.dtype], ArrayLike], doc: str
) -> Callable[..., jax.Array]:
    def op(
        x: TensorLike, axis: TensorLike = 0, exclusive: bool = False, reverse: bool = False, name: str | None = None
    ) -> jax.Array:
        tensor = convert_to_tensor(x)
        (along,) = axes_of(tensor, axis)
        if exclusive and tensor.shape[along]:  # exclusive: shifted by one element, after a neutral one
            start = jnp.full_like(lax.slice_in_dim(tensor, 0, 1, axis=along), neutral(tensor.dtype))
            n = tensor.shape[along]
            rest = lax.slice_in_dim(tensor, 1 if reverse else 0, n if reverse else n - 1, axis=along)
            tensor = lax.concatenate([rest, start] if reverse else [start, rest], along)
        return compute(tensor, axis=along, reverse=reverse)

    op.__doc__ = doc
    return op


cumsum = _cumulative(lax.cumsum, lambda dtype: 0, "Returns the cumulative sum.")
cumprod = _cumulative(lax.cumprod, lambda dtype: 1, "Returns the cumulative product.")
cumulative_logsumexp = _cumulative(
    lax.cumlogsumexp, lambda dtype: jnp.finfo(dtype).min, "Returns the cumulative log(sum(exp(x)))."
)


def is_non_decreasing(x: TensorLike, name: str | None = None) -> jax.Array:
    """Returns whether no element is smaller than the one before it."""
    flat = convert_to_tensor(x).reshape(-1)
    return jnp.all(flat[1:] >= flat[:-1])


def is_strictly_increasing(x: TensorLike, name: str | None = None) -> jax.Array:
    """Returns whether each element is larger than the one before it."""
    flat = convert_to_tensor(x).reshape(-1)
    return jnp.all(flat[1:] > flat[:-1])


def invert_permutation(x: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the inverse of a permutation."""
    order = convert_to_tensor(x)
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))


# Clipping.


@on_values(1)
def clip_by_value(
    t: TensorLike | IndexedSlices, clip_value_min: Any, clip_value_max: Any, name: str | None = None
) -> jax.Array | IndexedSlices:
    """Clips the elements to the range between two values."""

    def clip(x: jax.Array) -> jax.Array:
        low, high = (
            v.astype(x.dtype) if hasattr(v, "dtype") else convert_to_tensor(v, x.dtype)
            for v in (clip_value_min, clip_value_max)
        )
        return larger(smaller(x, high), low)

    return elementwise(clip, "")(t)


def clip_by_norm(
    t: TensorLike | IndexedSlices, clip_norm: TensorLike, axes: TensorLike | None = None, name: str | None = None
) -> Any:
    """Scales the tensor down if its norm (along the axes) is more than `clip_norm`."""

    def clip(x: jax.Array) -> jax.Array:
        square = jnp.sum(x * x, axis=as_axis(axes), keepdims=True)
        norm = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), square)
        limit = of_dtype(clip_norm, x.dtype)
        return x * limit / larger(norm, limit)

    return elementwise(clip, "")(t)


def _each(
    t_list: Sequence[TensorLike | IndexedSlices | None], compute: Callable[[jax.Array], jax.Array]
) -> list[jax.Array | IndexedSlices | None]:
    if not isinstance(t_list, (list, tuple)):
        raise TypeError(f"t_list should be a sequence of tensors, got {type(t_list).__name__}.")
    return [None if t is None else elementwise(compute, "")(t) for t in t_list]


def global_norm(t_list: Sequence[TensorLike | IndexedSlices | None], name: str | None = None) -> jax.Array:
    """Returns the norm of all tensors of a list together; None is skipped."""
    sums = _each(t_list, lambda x: jnp.sum(jnp.square(x)))
    squares = [t.values if isinstance(t, IndexedSlices) else t for t in sums if t is not None]
    return jnp.sqrt(builtins.sum(squares[1:], squares[0])) if squares else convert_to_tensor(0.0)


def clip_by_global_norm(
    t_list: Sequence[TensorLike | IndexedSlices | None],
    clip_norm: TensorLike,
    use_norm: TensorLike | None = None,
    name: str | None = None,
) -> tuple[list[jax.Array | IndexedSlices | None], jax.Array]:
    """Returns the tensors, scaled down together if their common norm is more than `clip_norm`, and that norm.

    If the norm is not finite, all become NaN.
    """
    norm = global_norm(t_list) if use_norm is None else convert_to_tensor(use_norm)
    limit = of_dtype(clip_norm, norm.dtype)
    scale = limit * smaller(1 / norm, 1 / limit) + (norm - norm)
    return _each(t_list, lambda x: x * scale.astype(x.dtype)), norm


# Bits.


BITWISE = {
    "bitwise_and": binary(jnp.bitwise_and, "Returns the bits that both have."),
    "bitwise_or": binary(jnp.bitwise_or, "Returns the bits that at least one of both has."),
    "bitwise_xor": binary(jnp.bitwise_xor, "Returns the bits that exactly one of both has."),
    "invert": elementwise(jnp.invert, "Returns all bits turned round."),
    "left_shift": binary(jnp.left_shift, "Shifts the bits to the left."),
    "right_shift": binary(jnp.right_shift, "Shifts the bits to the right."),
}

operations(globals())
