"""Convolutions and pooling, in any number of spatial dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np

from replicax.tf._host import jnp, lax, on_jax
from replicax.tf._operations import operations
from replicax.tf._ops import as_shape, convert_to_tensor
from replicax.tf._types import ShapeLike, TensorLike

_SPATIAL = "DHW"

_T = TypeVar("_T")
# "SAME", "VALID", or numbers of elements before and after each axis.
_Padding: TypeAlias = "str | Sequence[Sequence[int]]"
_Pads: TypeAlias = "str | Sequence[tuple[int, int]]"  # as JAX takes it


class _Layout:
    """The layout of a batch: N, the spatial axes, and C last or second."""

    def __init__(self, data_format: str | None, n: int):
        spatial = _SPATIAL[-n:]
        self.name = data_format or f"N{spatial}C"
        if self.name not in (f"N{spatial}C", f"NC{spatial}"):
            raise ValueError(f"data_format must be 'N{spatial}C' or 'NC{spatial}', got {data_format!r}.")
        self.n, self.first = n, self.name.startswith("NC")
        self.filters = f"{spatial}IO"

    def sizes(self, value: TensorLike, what: str) -> tuple[int, ...]:
        """Returns one number for each spatial dimension, given one number, one for each, or one for each axis of the
        batch.
        """
        numbers = as_shape(1 if value is None else value)
        if len(numbers) == 1:
            return numbers * self.n
        if len(numbers) == self.n + 2:
            outer = (numbers[0], numbers[1 if self.first else -1])
            if outer != (1, 1):
                raise ValueError(f"{what} of the batch and of the channels must be 1, got {list(numbers)}.")
            return numbers[2:] if self.first else numbers[1:-1]
        if len(numbers) != self.n:
            raise ValueError(f"{what} must have 1, {self.n} or {self.n + 2} numbers, got {list(numbers)}.")
        return numbers

    def around(self, sizes: tuple[_T, ...], outer: _T) -> tuple[_T, ...]:
        """Returns a tuple with `inner` for the spatial axes and `outer` for the others."""
        return (outer, outer, *sizes) if self.first else (outer, *sizes, outer)

    def padding(self, padding: _Padding) -> Any:
        """Returns "SAME", "VALID", or pairs of numbers for the spatial axes."""
        if isinstance(padding, str):
            if padding.upper() not in ("SAME", "VALID"):
                raise ValueError(f'padding must be "SAME", "VALID" or a list of pairs, got {padding!r}.')
            return padding.upper()
        pairs = [tuple(int(n) for n in p) for p in padding]
        if len(pairs) == self.n + 2:
            pairs = pairs[2:] if self.first else pairs[1:-1]
        return pairs


def _dimensions(x: TensorLike, expected: int | None) -> tuple[jax.Array, int]:
    tensor = convert_to_tensor(x)
    n = tensor.ndim - 2
    if (expected is not None and n != expected) or n not in (1, 2, 3):
        raise ValueError(f"The input must have {(expected or 2) + 2} dimensions, got shape {tuple(tensor.shape)}.")
    return tensor, n


def _convolve(
    x: jax.Array,
    filters: jax.Array,
    strides: TensorLike,
    padding: _Padding,
    layout: _Layout,
    dilations: TensorLike,
    groups: int = 0,
) -> jax.Array:
    channels = x.shape[1 if layout.first else -1]
    return lax.conv_general_dilated(
        x,
        filters,
        layout.sizes(strides, "strides"),
        layout.padding(padding),
        rhs_dilation=layout.sizes(dilations, "dilations"),
        dimension_numbers=(layout.name, layout.filters, layout.name),
        feature_group_count=groups or channels // filters.shape[-2],
    )


def convolution(
    input: TensorLike,
    filters: TensorLike,
    strides: TensorLike | None = None,
    padding: _Padding = "VALID",
    data_format: str | None = None,
    dilations: TensorLike | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the convolution of `[batch, *spatial, in]` and filters `[*spatial, in, out]`, of one to three
    dimensions.
    """
    x, n = _dimensions(input, None)
    return _convolve(x, convert_to_tensor(filters), strides, padding, _Layout(data_format, n), dilations)


def conv1d(
    input: TensorLike,
    filters: TensorLike,
    stride: TensorLike,
    padding: _Padding,
    data_format: str = "NWC",
    dilations: TensorLike | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the convolution of `[batch, width, in]` and filters `[width, in, out]`."""
    x, n = _dimensions(input, 1)
    return _convolve(x, convert_to_tensor(filters), stride, padding, _Layout(data_format, n), dilations)


def _conv(n: int, data_format: str, doc: str) -> Callable[..., jax.Array]:
    default = data_format

    def op(
        input: TensorLike,
        filters: TensorLike,
        strides: TensorLike,
        padding: _Padding,
        data_format: str = default,
        dilations: TensorLike | None = None,
        name: str | None = None,
    ) -> jax.Array:
        x, _ = _dimensions(input, n)
        return _convolve(x, convert_to_tensor(filters), strides, padding, _Layout(data_format, n), dilations)

    op.__doc__, op.__name__ = doc, f"conv{n}d"
    return op


conv2d = _conv(
    2, "NHWC", "Returns the convolution of `[batch, height, width, in]` and filters `[height, width, in, out]`."
)
conv3d = _conv(
    3, "NDHWC", "Returns the convolution of `[batch, depth, height, width, in]` and filters `[..., in, out]`."
)


def atrous_conv2d(
    value: TensorLike, filters: TensorLike, rate: TensorLike, padding: _Padding, name: str | None = None
) -> jax.Array:
    """Computes `conv2d` with filters dilated by `rate`."""
    return conv2d(value, filters, 1, padding, dilations=rate)


def depthwise_conv2d(
    input: TensorLike,
    filter: TensorLike,
    strides: TensorLike,
    padding: _Padding,
    data_format: str | None = None,
    dilations: TensorLike | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns a separate convolution of each channel, with filters `[height, width, in, multiplier]`."""
    (x, _), filters = _dimensions(input, 2), convert_to_tensor(filter)
    height, width, channels, times = filters.shape
    filters = filters.reshape(height, width, 1, channels * times)
    return _convolve(x, filters, strides, padding, _Layout(data_format, 2), dilations, groups=channels)


def separable_conv2d(
    input: TensorLike,
    depthwise_filter: TensorLike,
    pointwise_filter: TensorLike,
    strides: TensorLike,
    padding: _Padding,
    data_format: str | None = None,
    dilations: TensorLike | None = None,
    name: str | None = None,
) -> jax.Array:
    """Computes `depthwise_conv2d`, and then a convolution with filters `[1, 1, in, out]`."""
    x = depthwise_conv2d(input, depthwise_filter, strides, padding, data_format, dilations)
    return conv2d(x, pointwise_filter, 1, "VALID", data_format or "NHWC")


@on_jax
def _transposed(
    x: jax.Array,
    filters: TensorLike,
    output_shape: ShapeLike,
    strides: TensorLike,
    padding: _Padding,
    data_format: str | None,
    dilations: TensorLike,
    n: int,
) -> jax.Array:
    """Returns the transposed linear map of a convolution of tensors of `output_shape`."""
    kernel, layout = convert_to_tensor(filters), _Layout(data_format, n)
    shape = jax.core.ShapedArray(as_shape(output_shape), x.dtype)

    def forward(y: jax.Array) -> jax.Array:
        return _convolve(y, kernel, strides, padding, layout, dilations)

    expected = jax.eval_shape(forward, shape).shape
    if expected != x.shape:
        raise ValueError(f"output_shape {list(shape.shape)} needs an input of shape {expected}, got {tuple(x.shape)}.")
    result: jax.Array = jax.linear_transpose(forward, shape)(x)[0]
    return result


def conv_transpose(
    input: TensorLike,
    filters: TensorLike,
    output_shape: ShapeLike,
    strides: TensorLike,
    padding: _Padding = "SAME",
    data_format: str | None = None,
    dilations: TensorLike | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the transpose of a convolution, with filters `[*spatial, out, in]`, of one to three dimensions."""
    x, n = _dimensions(input, None)
    return _transposed(x, filters, output_shape, strides, padding, data_format, dilations, n)


def _transpose(n: int, data_format: str) -> Callable[..., jax.Array]:
    default = data_format

    def op(
        input: TensorLike,
        filters: TensorLike,
        output_shape: ShapeLike,
        strides: TensorLike,
        padding: _Padding = "SAME",
        data_format: str = default,
        dilations: TensorLike | None = None,
        name: str | None = None,
    ) -> jax.Array:
        x, _ = _dimensions(input, n)
        return _transposed(x, filters, output_shape, strides, padding, data_format, dilations, n)

    op.__doc__ = f"Returns the transpose of `conv{n}d`, with filters `[*spatial, out, in]` and the shape of the result."
    op.__name__ = f"conv{n}d_transpose"
    return op


conv1d_transpose = _transpose(1, "NWC")
conv2d_transpose = _transpose(2, "NHWC")
conv3d_transpose = _transpose(3, "NDHWC")


# Pooling.


def _max(
    x: jax.Array, window: tuple[int, ...], strides: tuple[int, ...], padding: _Pads, dilations: tuple[int, ...]
) -> jax.Array:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    least = np.asarray(-np.inf if floating else jnp.iinfo(x.dtype).min, x.dtype)
    result: jax.Array = lax.reduce_window(x, least, jax.lax.max, window, strides, padding, window_dilation=dilations)
    return result


def _mean(
    x: jax.Array, window: tuple[int, ...], strides: tuple[int, ...], padding: _Pads, dilations: tuple[int, ...]
) -> jax.Array:
    """Averages over windows; pixels of the padding do not count."""
    zero = np.zeros((), x.dtype)
    total, count = (
        lax.reduce_window(y, zero, jax.lax.add, window, strides, padding, window_dilation=dilations)
        for y in (x, jnp.ones_like(x))
    )
    result: jax.Array = total / count
    return result


def _pool(
    compute: Callable[..., jax.Array],
    x: jax.Array,
    ksize: TensorLike,
    strides: TensorLike,
    padding: _Padding,
    layout: _Layout,
    dilations: TensorLike | None = None,
) -> jax.Array:
    pads = layout.padding(padding)
    return compute(
        x,
        layout.around(layout.sizes(ksize, "ksize"), 1),
        layout.around(layout.sizes(strides, "strides"), 1),
        pads if isinstance(pads, str) else layout.around(tuple(pads), (0, 0)),
        layout.around(layout.sizes(dilations, "dilations"), 1),
    )


def pool(
    input: TensorLike,
    window_shape: TensorLike,
    pooling_type: str,
    strides: TensorLike | None = None,
    padding: _Padding = "VALID",
    data_format: str | None = None,
    dilations: TensorLike | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the maximum ("MAX") or the mean ("AVG") of windows of one to three spatial dimensions."""
    x, n = _dimensions(input, None)
    kinds = {"MAX": _max, "AVG": _mean}
    if pooling_type not in kinds:
        raise ValueError(f'pooling_type must be "MAX" or "AVG", got {pooling_type!r}.')
    return _pool(kinds[pooling_type], x, window_shape, strides, padding, _Layout(data_format, n), dilations)


def _pooling(
    compute: Callable[..., jax.Array], noun: str, n: int | None, data_format: str | None
) -> Callable[..., jax.Array]:
    default = data_format

    def op(
        input: TensorLike,
        ksize: TensorLike,
        strides: TensorLike,
        padding: _Padding,
        data_format: str | None = default,
        name: str | None = None,
    ) -> jax.Array:
        x, found = _dimensions(input, n)
        return _pool(compute, x, ksize, strides, padding, _Layout(data_format, found))

    op.__doc__ = f"Returns the {noun} of windows of {n or 'one to three'} spatial dimensions."
    return op


_FORMATS = {"": (None, None), "1d": (1, "NWC"), "2d": (2, "NHWC"), "3d": (3, "NDHWC")}
POOLING = {
    f"{name}_pool{suffix}": _pooling(compute, noun, n, data_format)
    for name, compute, noun in (("max", _max, "maximum"), ("avg", _mean, "mean"))
    for suffix, (n, data_format) in _FORMATS.items()
}


operations(globals())
