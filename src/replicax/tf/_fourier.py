"""Fourier and cosine transforms: `tf.signal.fft` and its kin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from replicax.tf._host import jnp
from replicax.tf._operations import operations
from replicax.tf._ops import convert_to_tensor, known
from replicax.tf._types import TensorLike

_DIMENSIONS = ("", "one dimension", "two dimensions", "three dimensions")


def _lengths(fft_length: TensorLike) -> list[int] | None:
    if fft_length is None:
        return None
    lengths = known(fft_length, "The length of a transform", "Give Python numbers.")
    found: list[int] = np.atleast_1d(lengths).tolist()
    return found


def _complex(name: str, rank: int) -> Callable[..., jax.Array]:
    """Returns the transform of complex tensors over their last `rank` axes."""
    axes = tuple(range(-rank, 0))

    def transform(input: TensorLike, name: str | None = None) -> jax.Array:
        result: jax.Array = compute(convert_to_tensor(input), axes=axes)
        return result

    compute = getattr(jnp.fft, name)
    inverse = "inverse " if name.startswith("i") else ""
    transform.__doc__ = f"Returns the {inverse}Fourier transform over {_DIMENSIONS[rank]}, the innermost."
    return transform


def _real(name: str, rank: int) -> Callable[..., jax.Array]:
    """Returns the transform from, or to, real tensors over their last `rank` axes."""
    axes = tuple(range(-rank, 0))

    def transform(input_tensor: TensorLike, fft_length: TensorLike = None, name: str | None = None) -> jax.Array:
        result: jax.Array = compute(convert_to_tensor(input_tensor), _lengths(fft_length), axes)
        return result

    compute = getattr(jnp.fft, name)
    ways = "inverse Fourier transform to real numbers" if name.startswith("i") else "Fourier transform of real numbers"
    transform.__doc__ = f"Returns the {ways} over {_DIMENSIONS[rank]}, the innermost, of the lengths `fft_length`."
    return transform


def _over_axes(name: str) -> Callable[..., jax.Array]:
    """Returns the transform over given axes."""

    def transform(
        input_tensor: TensorLike,
        fft_length: TensorLike = None,
        axes: TensorLike = None,
        norm: str | None = None,
        name: str | None = None,
    ) -> jax.Array:
        result: jax.Array = compute(convert_to_tensor(input_tensor), _lengths(fft_length), _lengths(axes), norm)
        return result

    compute = getattr(jnp.fft, name)
    transform.__doc__ = "Returns the transform over `axes`, by default all, of the lengths `fft_length`."
    return transform


def _shifted(compute: Callable[..., jax.Array], doc: str) -> Callable[..., jax.Array]:
    def shift(x: TensorLike, axes: TensorLike = None, name: str | None = None) -> jax.Array:
        return compute(convert_to_tensor(x), None if axes is None else tuple(_lengths(axes) or ()))

    shift.__doc__ = doc
    return shift


def dct(
    input: TensorLike,
    type: int = 2,
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the discrete cosine transform of type 1, 2, 3 or 4 over the last axis.

    Args:
        input: real numbers.
        type: which transform.
        n: to how many numbers the axis is cut or padded first.
        axis: -1.
        norm: "ortho" makes the transform orthonormal; not for type 1.
        name: accepted for compatibility.
    """
    x = convert_to_tensor(input)
    _check(type, axis, norm, n)
    if n is not None:
        x = x[..., :n] if n <= x.shape[-1] else _padded(x, n)
    return _TYPES[type](x, norm == "ortho")


def idct(
    input: TensorLike,
    type: int = 2,
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the inverse of `dct`, times twice the length unless `norm` is "ortho"."""
    if n is not None:
        raise ValueError("`n != None` is not implemented for the inverse of the cosine transform.")
    _check(type, axis, norm, n)
    return dct(input, {1: 1, 2: 3, 3: 2, 4: 4}[type], None, axis, norm)


def _check(type: int, axis: int, norm: str | None, n: int | None) -> None:
    if axis != -1:
        raise NotImplementedError(f"axis must be -1. Received: {axis}")
    if n is not None and n < 1:
        raise ValueError(f"n should be a positive integer or None. Received: {n}")
    if type not in _TYPES:
        raise ValueError(f"Types I, II, III and IV (I)DCT are supported. Received: type={type}")
    if norm not in (None, "ortho"):
        raise ValueError(f"Unknown normalization. Received: norm={norm}")
    if type == 1 and norm == "ortho":
        raise ValueError("Normalization is not supported for the Type-I DCT.")


def _padded(x: jax.Array, length: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])])


def _turned(x: jax.Array, sign: int) -> np.ndarray:
    """Returns the factors of a shift by half a sample, for each frequency of a transform of twice the length."""
    kind = np.complex128 if x.dtype == np.float64 else np.complex64
    result: np.ndarray = np.exp(sign * 0.5j * np.pi * np.arange(x.shape[-1]) / x.shape[-1]).astype(kind)
    return result


def _first_and_rest(x: jax.Array, first: float, rest: float) -> jax.Array:
    return x * np.array([first] + [rest] * (x.shape[-1] - 1), x.dtype)


def _dct1(x: jax.Array, ortho: bool) -> jax.Array:
    return jnp.real(jnp.fft.rfft(jnp.concatenate([x, jnp.flip(x[..., 1:-1], -1)], -1)))


def _dct2(x: jax.Array, ortho: bool) -> jax.Array:
    size = x.shape[-1]
    found = 2 * jnp.real(jnp.fft.rfft(x, 2 * size)[..., :size] * _turned(x, -1))
    return _first_and_rest(found, 0.5 / size**0.5, (0.5 / size) ** 0.5) if ortho else found


def _dct3(x: jax.Array, ortho: bool) -> jax.Array:
    size = x.shape[-1]
    if ortho:
        x = _first_and_rest(x, 1 / size**0.5, (0.5 / size) ** 0.5)
    return 2 * size * jnp.fft.irfft(x * _turned(x, 1), 2 * size)[..., :size]


def _dct4(x: jax.Array, ortho: bool) -> jax.Array:
    size = x.shape[-1]
    found = _dct2(_padded(x, 2 * size), False)[..., 1::2]
    return found * np.array((0.5 / size) ** 0.5, x.dtype) if ortho else found


_TYPES = {1: _dct1, 2: _dct2, 3: _dct3, 4: _dct4}

FOURIER: dict[str, Any] = {
    "dct": dct,
    "fft": _complex("fftn", 1),
    "fft2d": _complex("fftn", 2),
    "fft3d": _complex("fftn", 3),
    "fftnd": _over_axes("fftn"),
    "fftshift": _shifted(jnp.fft.fftshift, "Moves the frequency 0 to the middle of the axes, by default of all."),
    "idct": idct,
    "ifft": _complex("ifftn", 1),
    "ifft2d": _complex("ifftn", 2),
    "ifft3d": _complex("ifftn", 3),
    "ifftnd": _over_axes("ifftn"),
    "ifftshift": _shifted(jnp.fft.ifftshift, "Moves the frequency 0 back from the middle: the inverse of `fftshift`."),
    "irfft": _real("irfftn", 1),
    "irfft2d": _real("irfftn", 2),
    "irfft3d": _real("irfftn", 3),
    "irfftnd": _over_axes("irfftn"),
    "rfft": _real("rfftn", 1),
    "rfft2d": _real("rfftn", 2),
    "rfft3d": _real("rfftn", 3),
    "rfftnd": _over_axes("rfftn"),
}
operations(globals())
