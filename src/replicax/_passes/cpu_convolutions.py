"""Convolutions of programs for the CPU in the forms of which XLA makes fast code.

Its fast convolutions take dimensions in one order only: batch, space, features. It brings others to that order, such as
those of gradients, but only where they stand in a program's outermost computation. In branches and loops it makes 100
times slower code of them.

The gradient of a transposed convolution's kernel is a convolution of dilated inputs with a kernel as large as an image,
of which XLA's code is many times slower than of the same with both in each other's place.

Other convolutions of dilated inputs, which are transposed convolutions and gradients of strided ones, are computed with
the zeros that the dilation puts in. Without them they are one convolution with a part of the kernel for each phase, the
positions of the result that see the same zeros.

The gradient of a kernel sums over the images. XLA sums over all of them in one product, whose factors are larger than
the caches; in parts of a few images it takes half of the time or less. benchmarks/convolutions.py measures all three.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._base import jax_internals
from replicax._base.jaxprs import kind_of
from replicax._passes.interpret import Rule


def _in_order(eqn: jex.JaxprEqn, operands: list[jax.Array]) -> list[jax.Array]:
    """Computes the equation of a convolution by one whose dimensions are in that order: a rule."""
    return [_ordered(eqn, eqn.params, *operands)]


def _ordered(eqn: jex.JaxprEqn, params: dict[str, Any], left: jax.Array, right: jax.Array) -> jax.Array:
    """Convolves with these parameters in place of the equation's own, with dimensions in that order."""
    numbers = params["dimension_numbers"]
    space = range(1, len(numbers.lhs_spec) - 1)
    ordered = lax.ConvDimensionNumbers(
        (0, len(space) + 1, *space), (len(space) + 1, len(space), *(i - 1 for i in space)), (0, len(space) + 1, *space)
    )
    batch, features, *rest = numbers.lhs_spec
    left = lax.transpose(left, (batch, *rest, features))
    out, features, *rest = numbers.rhs_spec
    right = lax.transpose(right, (*rest, features, out))
    (result,) = jax_internals.rebind(eqn, {**params, "dimension_numbers": ordered}, [left, right])
    places = dict(zip(numbers.out_spec, ordered.out_spec))
    return lax.transpose(result, [places[i] for i in range(result.ndim)])


def order_for(eqn: jex.JaxprEqn) -> Rule[jax.Array] | None:
    """Return the rule for a convolution in a branch or a loop, None for other equations."""
    return _in_order if eqn.primitive.name == "conv_general_dilated" else None


# Fewer features in the result are not worth the convolutions of phases, which have a cost of their own.
_LEAST_FEATURES = 8


def rule_for(eqn: jex.JaxprEqn) -> Rule[jax.Array] | None:
    """Returns what computes an equation if it is a convolution that has a faster form, None for others."""
    if eqn.primitive.name != "conv_general_dilated":
        return None
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return None
    image, kernel, out = (kind_of(atom).shape for atom in (*eqn.invars, *eqn.outvars))
    # Symbolic dimensions cannot be compared, and what is empty is left to XLA.
    if len(out) < 3 or not all(isinstance(n, int) and n for n in (*image, *kernel, *out)):
        return None
    of_kernel = math.prod(kernel[i] for i in numbers.rhs_spec[2:]) > math.prod(out[i] for i in numbers.out_spec[2:])
    if max(params["lhs_dilation"]) == 1:
        return _in_parts if of_kernel and _images_of_part(eqn, eqn.params, kernel) else None
    if max(params["window_strides"]) > 1 or max(params["rhs_dilation"]) > 1:
        return None
    if of_kernel:
        return _exchanged  # of a transposed convolution
    return _in_phases if out[numbers.out_spec[1]] >= _LEAST_FEATURES else None


# A part of a kernel's gradient sums over at least so many images, and over so many positions of the result.
_IMAGES, _POSITIONS = 8, 2048


def _images_of_part(eqn: jex.JaxprEqn, params: dict[str, Any], kernel: tuple[int, ...]) -> int:
    """Returns the number of images in a part of a kernel's gradient, 0 where it is better computed at once.

    The gradient is a convolution whose features are the images, and its kernel the gradient of the results.
    """
    numbers = params["dimension_numbers"]
    if not numbers.lhs_spec[1] == numbers.rhs_spec[1] == 0 or any(min(pair) < 0 for pair in params["padding"]):
        return 0  # the features are not images, which come first; or XLA may read beyond them, see `_in_phases`
    out_features, images, *space = (kernel[i] for i in numbers.rhs_spec)
    if out_features < _LEAST_FEATURES or kind_of(eqn.outvars[0]).dtype not in (np.float32, np.float64):
        return 0  # sums of parts would be rounded to fewer bits
    most = min(max(_IMAGES, _POSITIONS // math.prod(space)), images // 2)
    part = next((n for n in range(most, 0, -1) if images % n == 0), 0)
    return part if 2 * part >= _IMAGES else 0


def _in_parts(eqn: jex.JaxprEqn, operands: list[jax.Array]) -> list[jax.Array]:
    """Computes the gradient of a kernel as a sum over parts of the images."""
    return [_sum_of_parts(eqn, eqn.params, *operands)]


def _sum_of_parts(eqn: jex.JaxprEqn, params: dict[str, Any], left: jax.Array, right: jax.Array) -> jax.Array:
    numbers, kind = params["dimension_numbers"], kind_of(eqn.outvars[0])
    images = _images_of_part(eqn, params, right.shape)
    if not images:
        return _ordered(eqn, params, left, right)

    def parts(x: jax.Array, axis: int) -> jax.Array:
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, images, *x.shape[axis + 1 :]), axis, 0)

    def add(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + _ordered(eqn, params, *part), None

    pairs = parts(left, numbers.lhs_spec[1]), parts(right, numbers.rhs_spec[1])
    return lax.scan(add, jnp.zeros(kind.shape, kind.dtype), pairs)[0]


def _exchanged(eqn: jex.JaxprEqn, operands: list[jax.Array]) -> list[jax.Array]:
    """Computes a convolution with its operands exchanged, from the result's end to its beginning."""
    left, right = operands
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    out = kind_of(eqn.outvars[0]).shape
    padding = []
    dims = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:])
    for (a, b, c), dilation, (low, _) in zip(dims, params["lhs_dilation"], params["padding"]):
        before = out[c] - 1 - low
        padding.append((before, out[c] - right.shape[b] - before + dilation * (left.shape[a] - 1)))
    features, batch, *space = numbers.out_spec
    exchanged = {
        "padding": tuple(padding),
        "lhs_dilation": params["rhs_dilation"],
        "rhs_dilation": params["lhs_dilation"],
        "dimension_numbers": lax.ConvDimensionNumbers(numbers.rhs_spec, numbers.lhs_spec, (batch, features, *space)),
    }
    return [lax.rev(_sum_of_parts(eqn, {**params, **exchanged}, right, left), space)]


def _in_phases(eqn: jex.JaxprEqn, operands: list[jax.Array]) -> list[jax.Array]:
    """Computes the convolution of a dilated input without the zeros in it, one phase of the result at a time.

    The phases of a dimension with dilation d are d: phase p has the positions p, p + d, ... of the result, for which
    every d-th tap of the kernel meets an element of the input, and the others meet zeros.
    """
    left, right = operands
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    kind = kind_of(eqn.outvars[0])
    dilations = params["lhs_dilation"]
    dims = list(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:]))
    sizes = [-(-kind.shape[out] // dilation) for (_, _, out), dilation in zip(dims, dilations)]
    of_phase = list(kind.shape)
    for (_, _, out), size in zip(dims, sizes):
        of_phase[out] = size

    def computed(phase: tuple[int, ...]) -> jax.Array:
        image, kernel, padding = left, right, []
        for (a, b, _), p, size, dilation, (low, _) in zip(dims, phase, sizes, dilations, params["padding"]):
            first = (low - p) % dilation
            taps = len(range(first, right.shape[b], dilation))
            before = (low - p - first) // dilation
            after = size - 1 + taps - left.shape[a] - before
            # XLA (of JAX 0.10.2) reads beyond an image that a small kernel has a negative padding for.
            start, stop = max(-before, 0), left.shape[a] - max(-after, 0)
            if not taps or start >= stop:
                return jnp.zeros(of_phase, kind.dtype)
            image = lax.slice_in_dim(image, start, stop, axis=a)
            kernel = lax.slice_in_dim(kernel, first, None, dilation, b)
            padding.append((max(before, 0), max(after, 0)))
        changed = {"padding": tuple(padding), "lhs_dilation": (1,) * len(dims)}
        result: jax.Array = jax_internals.rebind(eqn, {**params, **changed}, [image, kernel])[0]
        return result

    result = jnp.stack([computed(phase) for phase in itertools.product(*map(range, dilations))])
    result = result.reshape(*dilations, *of_phase)
    # Each dimension of phases goes behind the dimension whose positions they are.
    order: list[int] = []
    for i in range(len(of_phase)):
        order.append(len(dims) + i)
        order += [j for j, (_, _, out) in enumerate(dims) if out == i]
    widened = list(of_phase)
    for (_, _, out), dilation in zip(dims, dilations):
        widened[out] *= dilation
    result = result.transpose(order).reshape(widened)
    return [lax.slice(result, [0] * len(widened), kind.shape)]
