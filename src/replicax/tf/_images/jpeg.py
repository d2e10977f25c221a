"""JPEG files: decoding by libjpeg-turbo, encoding by Pillow, both with TensorFlow's results."""

from __future__ import annotations

import io

import jax
import numpy as np

from replicax.tf._core import InvalidArgumentError, Probe, as_dtype, host_memory
from replicax.tf._images import host, libraries
from replicax.tf._ops import as_array, as_int, convert_to_tensor, known
from replicax.tf._parse import strings_of
from replicax.tf._types import DTypeLike, TensorLike

_METHODS = ("", "INTEGER_FAST", "INTEGER_ACCURATE")
_DOTS_PER_CM = 2.54
_PROBED = 1024  # the size of images that are made up, of which functions may cut windows


def content_of(contents: TensorLike) -> bytes:
    """Returns the bytes of one file."""
    strings = strings_of(contents)
    if strings.ndim:
        raise InvalidArgumentError(f"`contents` must be scalar but got shape{list(strings.shape)}: use tf.map_fn.")
    content: bytes = strings.item()
    if not content and not isinstance(content, Probe):
        raise InvalidArgumentError("Input is empty.")
    return content


def made_up(probe: Probe, channels: int, dtype: DTypeLike = np.uint8, several: bool = False) -> jax.Array:
    """Returns an image, or `several`, where a dataset asks for specs: sizes that are not known differ by the probe."""
    size = _PROBED + probe.size
    shape = size, size, channels or 3 + probe.size
    return as_array(np.zeros((1 + probe.size, *shape) if several else shape, as_dtype(dtype)))


def is_jpeg_file(content: bytes) -> bool:
    """Returns whether a file begins as JPEG files do."""
    return content[:3] == b"\xff\xd8\xff"


def _header(content: bytes) -> tuple[int, int, str]:
    """Returns the height, the width and the color space."""
    try:
        height, width, space, _ = libraries.simplejpeg().decode_jpeg_header(content)
    except ValueError as error:
        raise InvalidArgumentError(f"Invalid JPEG data, size {len(content)}: {error}") from error
    return height, width, space


def decoded(
    content: bytes,
    channels: int = 0,
    ratio: int = 1,
    fancy_upscaling: bool = True,
    try_recover_truncated: bool = False,
    dct_method: str = "",
) -> np.ndarray:
    """Returns the pixels of a JPEG file, `[height, width, channels]` of uint8."""
    if channels not in (0, 1, 3):
        raise InvalidArgumentError(f"JPEG does not support {channels} channels")
    if ratio not in (1, 2, 4, 8):
        raise InvalidArgumentError(f"ratio must be 1, 2, 4, or 8, got {ratio}")
    if dct_method not in _METHODS:
        raise InvalidArgumentError(f"dct_method must be one of {_METHODS}, got {dct_method!r}.")
    height, width, space = _header(content)
    options: dict[str, object] = {"fastdct": dct_method != "INTEGER_ACCURATE", "fastupsample": not fancy_upscaling}
    if ratio > 1:
        options |= {"min_height": -(-height // ratio), "min_width": -(-width // ratio), "min_factor": ratio}
    if space in ("CMYK", "YCCK"):
        if channels == 1:
            raise InvalidArgumentError("jpeg::Uncompress failed. Invalid JPEG data: CMYK has no gray channel.")
        inks = _pixels(content, "CMYK", (height, width, 4), options, try_recover_truncated).astype(np.uint32)
        return (inks[..., :3] * inks[..., 3:] // 255).astype(np.uint8)
    gray = channels == 1 or (channels == 0 and space.upper() == "GRAY")
    shape = height, width, 1 if gray else 3
    return _pixels(content, "GRAY" if gray else "RGB", shape, options, try_recover_truncated)


def _pixels(
    content: bytes, space: str, largest: tuple[int, int, int], options: dict[str, object], truncated: bool
) -> np.ndarray:
    """Decodes a file into memory of the pool; `largest` is the shape without a ratio."""
    decode = libraries.simplejpeg().decode_jpeg
    buffer = host.pool.empty(largest, np.uint8)
    options = options | {"buffer": buffer.reshape(-1)}
    try:
        try:
            found = decode(content, space, **options)
        except ValueError as error:
            if "Premature end" in str(error) and not truncated:
                raise
            found = decode(content, space, strict=False, **options)  # as libjpeg goes on after warnings
    except ValueError as error:
        raise InvalidArgumentError(f"jpeg::Uncompress failed. Invalid JPEG data or crop window: {error}") from error
    return host_memory.settle(buffer.reshape(-1)[: found.size].reshape(found.shape))


def decode_and_crop_jpeg(
    contents: TensorLike,
    crop_window: TensorLike,
    channels: int = 0,
    ratio: int = 1,
    fancy_upscaling: bool = True,
    try_recover_truncated: bool = False,
    acceptable_fraction: float = 1,
    dct_method: str = "",
    name: str | None = None,
) -> jax.Array:
    """Decodes a JPEG file and returns a window of it; `crop_window` is `[y, x, height, width]`."""
    window = known(convert_to_tensor(crop_window), "The window", "Crop outside of compiled code.")
    if window.shape != (4,):
        raise InvalidArgumentError(f"crop_window must have four elements, got shape {list(window.shape)}.")
    content = content_of(contents)
    y, x, height, width = map(int, window)
    if isinstance(content, Probe):
        return as_array(np.zeros((height, width, channels or 3 + content.size), np.uint8))
    pixels = decoded(content, channels, ratio, fancy_upscaling, try_recover_truncated, dct_method)
    if min(y, x) < 0 or min(height, width) <= 0 or y + height > pixels.shape[0] or x + width > pixels.shape[1]:
        raise InvalidArgumentError(
            f"jpeg::Uncompress failed. Invalid JPEG data or crop window: {window.tolist()} of an image of "
            f"{pixels.shape[0]} x {pixels.shape[1]}."
        )
    return as_array(np.ascontiguousarray(pixels[y : y + height, x : x + width]))


def is_jpeg(contents: TensorLike, name: str | None = None) -> jax.Array:
    """Returns whether a file begins as JPEG files do."""
    return as_array(np.asarray(is_jpeg_file(strings_of(contents).item())))


def extract_jpeg_shape(contents: TensorLike, output_type: DTypeLike = np.int32, name: str | None = None) -> jax.Array:
    """Returns `[height, width, channels]` of a JPEG file, without decoding it."""
    content = content_of(contents)
    height, width, space = (0, 0, "") if isinstance(content, Probe) else _header(content)
    channels = {"GRAY": 1, "CMYK": 4, "YCCK": 4}.get(space.upper(), 3)
    return as_array(np.asarray([height, width, channels], as_dtype(output_type)))


def encoded(
    pixels: np.ndarray, quality: int = 95, progressive: bool = False, optimize_size: bool = False,
    chroma_downsampling: bool = True, dpi: tuple[float, float] = (300, 300), xmp_metadata: str = "",
) -> bytes:  # fmt: skip
    """Returns a JPEG file of uint8 pixels `[height, width, channels]`."""
    if not 0 <= quality <= 100:
        raise InvalidArgumentError(f"quality must be in [0,100], got {quality}")
    if pixels.ndim != 3 or pixels.shape[-1] not in (1, 3):
        raise InvalidArgumentError(f"image must have 1 or 3 channels, got shape {list(pixels.shape)}")
    if pixels.dtype != np.uint8:
        raise InvalidArgumentError(f"JPEG files have uint8, got {pixels.dtype}: use tf.image.convert_image_dtype.")
    gray = pixels.shape[-1] == 1
    image = libraries.pillow().fromarray(pixels[..., 0] if gray else pixels)
    more: dict[str, object] = {"xmp": xmp_metadata.encode()} if xmp_metadata else {}
    file = io.BytesIO()
    image.save(
        file, "JPEG", quality=quality, progressive=progressive, optimize=optimize_size, dpi=dpi,
        subsampling=2 if chroma_downsampling and not gray else 0, **more,
    )  # fmt: skip
    return file.getvalue()


def encode_jpeg(
    image: TensorLike,
    format: str = "",
    quality: TensorLike = 95,
    progressive: bool = False,
    optimize_size: bool = False,
    chroma_downsampling: bool = True,
    density_unit: str = "in",
    x_density: int = 300,
    y_density: int = 300,
    xmp_metadata: str = "",
    name: str | None = None,
) -> jax.Array:
    """Returns a JPEG file of an image of uint8, `[height, width, 1 or 3]`.

    Args:
        image: the pixels.
        format: "grayscale" or "rgb"; by default what the number of channels says.
        quality: 0 to 100.
        progressive: whether the file shows a coarse image first.
        optimize_size: whether to make the file smaller, which takes longer.
        chroma_downsampling: whether to keep a quarter of the colors.
        density_unit: "in" or "cm".
        x_density: dots for each unit, horizontally.
        y_density: the same vertically.
        xmp_metadata: written into the file.
    """
    pixels = _known_image(image)
    channels = {"": pixels.shape[-1:], "grayscale": (1,), "rgb": (3,)}.get(format)
    if channels is None or density_unit not in ("in", "cm"):
        raise InvalidArgumentError(f"format={format!r} or density_unit={density_unit!r} is not a JPEG file's.")
    if pixels.shape[-1:] != channels:
        raise InvalidArgumentError(f"format {format!r} has {channels[0]} channels, got shape {list(pixels.shape)}.")
    scale = 1.0 if density_unit == "in" else _DOTS_PER_CM
    dpi = x_density * scale, y_density * scale
    chosen = as_int(quality, "The quality")
    return _text(encoded(pixels, chosen, progressive, optimize_size, chroma_downsampling, dpi, xmp_metadata))


def _known_image(image: TensorLike) -> np.ndarray:
    found = known(convert_to_tensor(image), "An image to be encoded", "Encode outside of compiled code.")
    return np.ascontiguousarray(found)


def _text(content: bytes) -> jax.Array:
    return convert_to_tensor(content)
