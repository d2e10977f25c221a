"""Frames, windows and spectrograms: `tf.signal`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import numpy as np

from replicax.tf._core import as_dtype
from replicax.tf._fourier import dct
from replicax.tf._host import jnp, on_jax
from replicax.tf._op_tables import take
from replicax.tf._operations import operations
from replicax.tf._ops import as_int, convert_to_tensor
from replicax.tf._types import DTypeLike, TensorLike

_Window: TypeAlias = "Callable[..., jax.Array] | None"


# Windows


def _raised_cosine(length: TensorLike, periodic: bool, dtype: DTypeLike, mean: float, height: float) -> jax.Array:
    size = as_int(length, "the length of a window")
    if size == 1:
        return convert_to_tensor(np.ones(1), dtype)
    period = size + bool(periodic) * (1 - size % 2) - 1
    window = mean - height * np.cos(2 * np.pi * np.arange(size) / period)
    return convert_to_tensor(window.astype(as_dtype(dtype)))


def hann_window(
    window_length: TensorLike, periodic: bool = True, dtype: DTypeLike = np.float32, name: str | None = None
) -> jax.Array:
    """Returns a Hann window; `periodic` leaves out the last point, where the length is even."""
    return _raised_cosine(window_length, periodic, dtype, 0.5, 0.5)


def hamming_window(
    window_length: TensorLike, periodic: bool = True, dtype: DTypeLike = np.float32, name: str | None = None
) -> jax.Array:
    """Returns a Hamming window; `periodic` leaves out the last point, where the length is even."""
    return _raised_cosine(window_length, periodic, dtype, 0.54, 0.46)


def kaiser_window(
    window_length: TensorLike, beta: float = 12.0, dtype: DTypeLike = np.float32, name: str | None = None
) -> jax.Array:
    """Returns a Kaiser window; a larger `beta` makes it narrower."""
    window = np.kaiser(as_int(window_length, "the length of a window"), float(beta))
    return convert_to_tensor(window.astype(as_dtype(dtype)))


def kaiser_bessel_derived_window(
    window_length: TensorLike, beta: float = 12.0, dtype: DTypeLike = np.float32, name: str | None = None
) -> jax.Array:
    """Returns a window derived from a Kaiser window, for the cosine transform of overlapping frames."""
    sums = np.cumsum(np.kaiser(as_int(window_length, "the length of a window") // 2 + 1, float(beta)))
    half = np.sqrt(sums[:-1] / sums[-1])
    return convert_to_tensor(np.concatenate([half, half[::-1]]).astype(as_dtype(dtype)))


def vorbis_window(window_length: TensorLike, dtype: DTypeLike = np.float32, name: str | None = None) -> jax.Array:
    """Returns the window of the format Vorbis."""
    size = as_int(window_length, "the length of a window")
    window = np.sin(np.pi / 2 * np.sin(np.pi / size * (np.arange(size) + 0.5)) ** 2)
    return convert_to_tensor(window.astype(as_dtype(dtype)))


# Frames


def frame(
    signal: TensorLike,
    frame_length: TensorLike,
    frame_step: TensorLike,
    pad_end: bool = False,
    pad_value: TensorLike = 0,
    axis: int = -1,
    name: str | None = None,
) -> jax.Array:
    """Cuts an axis into frames, which overlap where the step is less than the length.

    Args:
        signal: `[..., samples, ...]`.
        frame_length: the number of samples in a frame.
        frame_step: how many samples further each frame begins.
        pad_end: whether further samples `pad_value` complete the last frames.
        pad_value: a scalar.
        axis: the axis of the samples.
        name: accepted for compatibility.

    Returns:
        `[..., frames, frame_length, ...]`.
    """
    samples, length, step = convert_to_tensor(signal), as_int(frame_length, "frame_length"), as_int(frame_step, "step")
    axis = axis % samples.ndim
    size = samples.shape[axis]
    count = -(-size // step) if pad_end else max(0, (size - length) // step + 1)
    places = np.arange(count)[:, None] * step + np.arange(length)[None, :]
    if pad_end:
        missing = max(0, (count - 1) * step + length - size) if count else 0
        widths = [(0, missing if i == axis else 0) for i in range(samples.ndim)]
        samples = jnp.pad(samples, widths, constant_values=convert_to_tensor(pad_value, samples.dtype))
    return take(samples, places, axis)


@on_jax
def overlap_and_add(signal: TensorLike, frame_step: TensorLike, name: str | None = None) -> jax.Array:
    """Adds up frames `[..., frames, frame_length]`, each `frame_step` further than the one before.

    Returns:
        `[..., samples]`.
    """
    frames, step = convert_to_tensor(signal), as_int(frame_step, "frame_step")
    count, length = frames.shape[-2:]
    places = np.arange(count)[:, None] * step + np.arange(length)[None, :]
    samples = jnp.zeros((*frames.shape[:-2], max(0, (count - 1) * step + length)), frames.dtype)
    return samples.at[..., places].add(frames)


def stft(
    signals: TensorLike,
    frame_length: TensorLike,
    frame_step: TensorLike,
    fft_length: TensorLike = None,
    window_fn: _Window = hann_window,
    pad_end: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns the Fourier transforms of overlapping frames: a complex spectrogram.

    Args:
        signals: `[..., samples]`, real numbers.
        frame_length: the number of samples in a frame.
        frame_step: how many samples further each frame begins.
        fft_length: the length of the transforms; by default the next power of 2.
        window_fn: called with the length and `dtype=`, returns what frames are multiplied by; None for nothing.
        pad_end: whether zeros complete the last frames.
        name: accepted for compatibility.

    Returns:
        `[..., frames, fft_length // 2 + 1]`.
    """
    frames, size = frame(signals, frame_length, frame_step, pad_end), as_int(frame_length, "frame_length")
    if window_fn is not None:
        frames = frames * window_fn(size, dtype=frames.dtype)
    return jnp.fft.rfft(frames, _power_of_2(size) if fft_length is None else as_int(fft_length, "fft_length"))


def _power_of_2(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def inverse_stft(
    stfts: TensorLike,
    frame_length: TensorLike,
    frame_step: TensorLike,
    fft_length: TensorLike = None,
    window_fn: _Window = hann_window,
    name: str | None = None,
) -> jax.Array:
    """Returns the samples of a spectrogram; see `inverse_stft_window_fn` for the window that gives those of `stft`."""
    size = as_int(frame_length, "frame_length")
    length = _power_of_2(size) if fft_length is None else as_int(fft_length, "fft_length")
    frames = jnp.fft.irfft(convert_to_tensor(stfts), length)[..., :size]
    if length < size:
        frames = jnp.pad(frames, [(0, 0)] * (frames.ndim - 1) + [(0, size - length)])
    if window_fn is not None:
        frames = frames * window_fn(size, dtype=frames.dtype)
    return overlap_and_add(frames, frame_step)


def inverse_stft_window_fn(
    frame_step: TensorLike, forward_window_fn: Callable[..., jax.Array] = hann_window, name: str | None = None
) -> Callable[..., jax.Array]:
    """Returns the window function with which `inverse_stft` gives the samples of `stft`."""
    step = as_int(frame_step, "frame_step")

    def inverse_window(frame_length: TensorLike, dtype: DTypeLike = np.float32) -> jax.Array:
        size = as_int(frame_length, "frame_length")
        window = convert_to_tensor(forward_window_fn(size, dtype=dtype))
        overlaps = -(-size // step)
        parts = jnp.reshape(jnp.pad(window * window, (0, overlaps * step - size)), (overlaps, step))
        sums = jnp.tile(jnp.sum(parts, axis=0), overlaps)
        return window / sums[:size]

    return inverse_window


# The mel scale


def linear_to_mel_weight_matrix(
    num_mel_bins: TensorLike = 20,
    num_spectrogram_bins: TensorLike = 129,
    sample_rate: TensorLike = 8000,
    lower_edge_hertz: float = 125.0,
    upper_edge_hertz: float = 3800.0,
    dtype: DTypeLike = np.float32,
    name: str | None = None,
) -> jax.Array:
    """Returns the matrix by which spectrograms are multiplied to have frequencies on the mel scale.

    Returns:
        `[num_spectrogram_bins, num_mel_bins]`.
    """
    bins, bands = as_int(num_spectrogram_bins, "num_spectrogram_bins"), as_int(num_mel_bins, "num_mel_bins")
    nyquist = float(sample_rate) / 2  # type: ignore[arg-type]
    if not 0 <= lower_edge_hertz < upper_edge_hertz <= nyquist:
        raise ValueError(
            f"The frequencies must be in order: 0 <= {lower_edge_hertz} < {upper_edge_hertz} <= {nyquist}, half of the "
            "sample rate."
        )
    mels = _mel(np.linspace(0.0, nyquist, bins)[1:, None])
    edges = np.linspace(_mel(lower_edge_hertz), _mel(upper_edge_hertz), bands + 2)
    lower, center, upper = edges[:-2], edges[1:-1], edges[2:]
    weights = np.maximum(0.0, np.minimum((mels - lower) / (center - lower), (upper - mels) / (upper - center)))
    return convert_to_tensor(np.pad(weights, [(1, 0), (0, 0)]).astype(as_dtype(dtype)))


def _mel(hertz: np.ndarray | float) -> np.ndarray:
    found: np.ndarray = 1127.0 * np.log1p(np.asarray(hertz) / 700.0)
    return found


def mfccs_from_log_mel_spectrograms(log_mel_spectrograms: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the mel-frequency cepstral coefficients of spectrograms `[..., num_mel_bins]`."""
    spectrograms = convert_to_tensor(log_mel_spectrograms)
    return dct(spectrograms) * np.array((2 * spectrograms.shape[-1]) ** -0.5, spectrograms.dtype)


operations(globals())
SIGNAL = """frame hamming_window hann_window inverse_stft inverse_stft_window_fn kaiser_bessel_derived_window
kaiser_window linear_to_mel_weight_matrix mfccs_from_log_mel_spectrograms overlap_and_add stft vorbis_window"""
