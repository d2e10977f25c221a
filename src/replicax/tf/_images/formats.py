"""PNG, GIF, WebP and BMP files: read and written by Pillow, as TensorFlow's numbers and shapes."""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from typing import TYPE_CHECKING

import jax
import numpy as np

from replicax.tf._core import InvalidArgumentError, Probe, as_dtype
from replicax.tf._images import jpeg, libraries, png_chunks
from replicax.tf._images.jpeg import content_of
from replicax.tf._ops import as_array, convert_to_tensor, known
from replicax.tf._types import DTypeLike, TensorLike

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

_SIGNATURES = {png_chunks.SIGNATURE: "PNG", b"GIF8": "GIF", b"BM": "BMP", b"RIFF": "WebP"}
_WRONG_OP = "Trying to decode BMP format using a wrong op. Use tf.io.decode_bmp or tf.io.decode_image."
# The weights of red, green and blue in gray, as libpng has them.
_GRAY = np.asarray([9797, 19234, 3737], np.int64)


def format_of(content: bytes) -> str:
    """Returns the name of a file's format."""
    if jpeg.is_jpeg_file(content):
        return "JPEG"
    found = next((name for begin, name in _SIGNATURES.items() if content.startswith(begin)), None)
    if found is None or (found == "WebP" and content[8:12] != b"WEBP"):
        raise InvalidArgumentError("Unknown image file format. One of JPEG, PNG, GIF, BMP, WebP required.")
    return found


def _open(content: bytes, whole_stream: bool = False) -> ImageFile:
    image: ImageFile = libraries.pillow().open(io.BytesIO(content))
    if whole_stream:  # so that the decoder sees the checksum behind the pixels
        image.decodermaxblock = max(len(content), image.decodermaxblock)
    image.load()
    return image


def _check_channels(channels: int) -> None:
    if channels not in (0, 1, 3, 4):
        raise InvalidArgumentError(f"`channels` must be 0, 1, 3 or 4 but got {channels}")


# PNG


def _png(content: bytes, channels: int, wide: bool) -> np.ndarray:
    """Returns the pixels of a PNG file; `wide` for 16 bits a number."""
    image: Image = _open(content, whole_stream=True)
    bits = content[24]
    if image.mode == "P":
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    elif image.mode == "1":
        image = image.convert("L")
    elif channels == 4 and "transparency" in image.info:
        image = image.convert("RGBA")
    pixels = np.asarray(image)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if bits == 16 and content[25] == 4:  # gray and alpha, of which Pillow makes colors
        pixels = pixels[..., [0, 3]]
    if bits == 16 and (wide or (channels == 1 and pixels.shape[-1] > 2)):  # gray is made of all bits
        pixels = _all_bits(content, pixels)
    elif bits == 16 and pixels.dtype == np.uint16:
        pixels = (pixels >> 8).astype(np.uint8)
    # libpng fills alpha up with the most that the file's bits allow.
    pixels = _with_channels(pixels, channels or pixels.shape[-1], (1 << min(bits, 8 * pixels.itemsize)) - 1)
    if wide:
        return pixels if bits == 16 else pixels.astype(np.uint16) * np.uint16(257)
    return (pixels >> 8).astype(np.uint8) if pixels.dtype == np.uint16 else pixels


def _all_bits(content: bytes, high: np.ndarray) -> np.ndarray:
    """Returns the pixels of a PNG file of 16 bits, of which Pillow gives the high bytes of colors."""
    if high.dtype == np.uint16:
        return high
    if content[25] == 4:
        raise InvalidArgumentError("A PNG file of gray and alpha with 16 bits each can be decoded as uint8 only.")
    image = libraries.pillow().open(io.BytesIO(content))
    image.tile = [tile._replace(args=f"{image.mode};16L") for tile in image.tile]  # the other byte of each number
    result: np.ndarray = high.astype(np.uint16) << 8 | np.asarray(image)
    return result


def _with_channels(pixels: np.ndarray, channels: int, opaque: int = 255) -> np.ndarray:
    """Returns the pixels with so many channels: gray or colors, with alpha or without."""
    colors, alpha = pixels[..., : 3 if pixels.shape[-1] > 2 else 1], pixels[..., -1:]
    if channels < 3 and colors.shape[-1] == 3:
        rounding = 1 << 14 if pixels.dtype == np.uint16 else 0
        colors = (np.sum(colors * _GRAY, -1, keepdims=True) + rounding >> 15).astype(pixels.dtype)
    elif channels > 2 and colors.shape[-1] == 1:
        colors = np.repeat(colors, 3, -1)
    if channels % 2:
        return colors
    return np.concatenate([colors, alpha if pixels.shape[-1] % 2 == 0 else np.full_like(alpha, opaque)], -1)


# BMP


def _bmp(content: bytes, channels: int) -> np.ndarray:
    """Returns the pixels of a BMP file; numbers of a palette stay numbers, as in TensorFlow."""
    if channels == 1:
        raise InvalidArgumentError(f"`channels` must be 0, 3 or 4 for BMP, but got {channels}")
    if len(content) < 32:
        raise InvalidArgumentError(f"Incomplete bmp content, requires at least 32 bytes, got {len(content)}.")
    begin, width, height = (struct.unpack_from("<i", content, at)[0] for at in (10, 18, 22))
    bits = struct.unpack_from("<H", content, 28)[0]
    own, rows = bits // 8, abs(height)
    if own not in (1, 3, 4) or width <= 0 or not rows:
        raise InvalidArgumentError(f"A BMP file of {bits} bits a pixel, {width} x {height}, cannot be decoded.")
    stride = -(-own * width // 4) * 4
    if begin + rows * stride > len(content):
        raise InvalidArgumentError(f"Incomplete bmp content, requires at least {begin + rows * stride} bytes.")
    lines = np.frombuffer(content, np.uint8, rows * stride, begin).reshape(rows, stride)
    pixels = lines[:: -1 if height > 0 else 1, : own * width].reshape(rows, width, own)
    if own > 1:  # blue, green, red
        pixels = pixels[..., [2, 1, 0, 3][:own]]
    return _with_channels(pixels, channels or own)


# Several frames


def _frames(content: bytes, mode: str) -> np.ndarray:
    image = _open(content)
    frames = []
    for number in range(getattr(image, "n_frames", 1)):
        image.seek(number)
        frames.append(np.asarray(image.convert(mode)))
    return np.stack(frames)


def _gif(content: bytes, channels: int) -> np.ndarray:
    if channels not in (0, 3):
        raise InvalidArgumentError(f"channels must be 0 or 3 for GIF, got {channels}")
    return _frames(content, "RGB")


def _webp(content: bytes, channels: int) -> np.ndarray:
    if channels not in (0, 3, 4):
        raise InvalidArgumentError("WebP only supports 3 or 4 channels")
    own = 4 if _open(content).mode == "RGBA" else 3
    if channels not in (0, own):
        raise InvalidArgumentError(f"Number of channels requested does not match input: {channels} and {own}.")
    return _frames(content, "RGB" if own == 3 else "RGBA")


def _pixels(content: bytes, channels: int, wide: bool = False) -> np.ndarray:
    """Returns the pixels of a file of any format; those with frames have one more dimension in front."""
    kind = format_of(content)
    if kind == "JPEG":
        return jpeg.decoded(content, channels)
    libraries.pillow()  # raises ImportError where it is missing
    try:
        if kind == "PNG":
            return _png(png_chunks.check(content), channels, wide)
        return {"BMP": _bmp, "GIF": _gif, "WebP": _webp}[kind](content, channels)
    except InvalidArgumentError:
        raise
    except Exception as error:  # for damaged files Pillow raises IndexError, struct.error and others
        raise InvalidArgumentError(f"Invalid {kind} data, size {len(content)}: {error}") from error


def _converted(pixels: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns pixels in another dtype: uint8, uint16 or floats from 0 to 1."""
    if pixels.dtype == dtype:
        return pixels
    if dtype == np.uint16:
        return pixels.astype(np.uint16) << 8
    return (pixels.astype(np.float32) / np.float32(np.iinfo(pixels.dtype).max)).astype(dtype)


def _single(pixels: np.ndarray, op: str) -> np.ndarray:
    """Returns the only frame of a GIF file."""
    if len(pixels) > 1:
        raise InvalidArgumentError(
            f"Got {len(pixels)} frames, but animated gifs can only be decoded by tf.io.decode_gif or "
            f"tf.io.decode_image, not by {op}."
        )
    first: np.ndarray = pixels[0]
    return first


def _decoded(op: str, contents: TensorLike, channels: int, dtype: DTypeLike) -> jax.Array:
    """Decodes a file that may be in another format than the operation's name says."""
    content, dtype = content_of(contents), np.dtype(as_dtype(dtype))
    _check_channels(channels)
    if isinstance(content, Probe):
        return jpeg.made_up(content, channels, dtype, several=op.endswith("webp"))
    if (kind := format_of(content)) == "BMP" and not op.endswith("bmp"):
        raise InvalidArgumentError(_WRONG_OP)
    pixels = _pixels(content, channels, wide=dtype == np.uint16)
    return as_array(_converted(_single(pixels, op) if kind == "GIF" else pixels, dtype))


def decode_jpeg(
    contents: TensorLike,
    channels: int = 0,
    ratio: int = 1,
    fancy_upscaling: bool = True,
    try_recover_truncated: bool = False,
    acceptable_fraction: float = 1,
    dct_method: str = "",
    name: str | None = None,
) -> jax.Array:
    """Decodes a JPEG file to `[height, width, channels]` of uint8, with the pixels that TensorFlow gives.

    Args:
        contents: the file.
        channels: 1 for gray, 3 for RGB, 0 for what the file has.
        ratio: 1, 2, 4 or 8, by which the image is made smaller while it is decoded.
        fancy_upscaling: whether colors are interpolated, where the file has fewer of them than pixels.
        try_recover_truncated: whether a file may end early.
        acceptable_fraction: accepted for compatibility.
        dct_method: "INTEGER_FAST", which is the default, or "INTEGER_ACCURATE".
    """
    content = content_of(contents)
    if not jpeg.is_jpeg_file(content):
        return _decoded("tf.io.decode_jpeg", contents, channels, np.uint8)
    _check_channels(channels)
    found = jpeg.decoded(content, channels, ratio, fancy_upscaling, try_recover_truncated, dct_method)
    return as_array(found)


def decode_png(
    contents: TensorLike, channels: int = 0, dtype: DTypeLike = np.uint8, name: str | None = None
) -> jax.Array:
    """Decodes a PNG file to `[height, width, channels]` of uint8 or uint16; `channels` 0 are those of the file."""
    if as_dtype(dtype) not in (np.uint8, np.uint16):
        raise InvalidArgumentError(f"decode_png gives uint8 or uint16, not {np.dtype(as_dtype(dtype))}.")
    return _decoded("tf.io.decode_png", contents, channels, dtype)


def decode_bmp(contents: TensorLike, channels: int = 0, name: str | None = None) -> jax.Array:
    """Decodes a BMP file to `[height, width, channels]` of uint8."""
    content = content_of(contents)
    if (kind := format_of(content)) in ("JPEG", "PNG", "GIF"):
        raise InvalidArgumentError(f"Trying to decode {kind} format using DecodeBmp op. Use tf.io.decode_image.")
    return _decoded("tf.io.decode_bmp", contents, channels, np.uint8)


def decode_gif(contents: TensorLike, name: str | None = None) -> jax.Array:
    """Decodes a GIF file to `[frames, height, width, 3]` of uint8."""
    if (content := content_of(contents))[:2] == b"BM":
        raise InvalidArgumentError(_WRONG_OP)
    if isinstance(content, Probe):
        return jpeg.made_up(content, 3, several=True)
    pixels = _pixels(content, 3)
    return as_array(pixels if pixels.ndim == 4 else pixels[None])


def decode_webp(
    contents: TensorLike, channels: int = 0, dtype: DTypeLike = np.uint8, name: str | None = None
) -> jax.Array:
    """Decodes a WebP file to `[frames, height, width, channels]` of uint8."""
    if as_dtype(dtype) != np.uint8:
        raise InvalidArgumentError(f"decode_webp gives uint8, not {np.dtype(as_dtype(dtype))}.")
    return _decoded("tf.io.decode_webp", contents, channels, dtype)


def decode_image(
    contents: TensorLike,
    channels: int | None = None,
    dtype: DTypeLike = np.uint8,
    name: str | None = None,
    expand_animations: bool = True,
) -> jax.Array:
    """Decodes a file of any format to `[height, width, channels]`.

    Args:
        contents: a JPEG, PNG, BMP, GIF or WebP file.
        channels: how many there are in the result; by default those of the file.
        dtype: uint8, uint16, or a dtype of floats, which are from 0 to 1.
        expand_animations: whether GIF and WebP files give `[frames, height, width, channels]`; else the first frame.
    """
    content, dtype = content_of(contents), np.dtype(as_dtype(dtype))
    _check_channels(channels or 0)
    if isinstance(content, Probe):  # whether there are several frames is not known
        return jpeg.made_up(content, channels or 0, dtype, several=expand_animations and content.size > 0)
    kind = format_of(content)
    if kind == "WebP" and dtype != np.uint8:
        raise InvalidArgumentError(f"WebP only supports uint8 for dtype, got {dtype}.")
    pixels = _pixels(content, channels or 0, wide=kind == "PNG" and dtype != np.uint8)
    return as_array(_converted(pixels[0] if pixels.ndim == 4 and not expand_animations else pixels, dtype))


def encode_png(image: TensorLike, compression: int = -1, name: str | None = None) -> jax.Array:
    """Returns a PNG file of an image of uint8 or uint16, `[height, width, 1 to 4]`; of a batch, a file for each."""
    pixels = known(convert_to_tensor(image), "An image to be encoded", "Encode outside of compiled code.")
    if pixels.dtype not in (np.uint8, np.uint16):
        raise InvalidArgumentError(f"encode_png takes uint8 or uint16, got {pixels.dtype}.")
    if pixels.ndim < 3 or pixels.shape[-1] not in (1, 2, 3, 4):
        raise InvalidArgumentError(f"image must have 1, 2, 3, or 4 channels, got shape {list(pixels.shape)}.")
    if not -1 <= compression <= 9:
        raise InvalidArgumentError(f"compression should be in [-1,9], got {compression}")
    if pixels.ndim == 3:
        return convert_to_tensor(_png_file(pixels, compression))
    found = np.empty(pixels.shape[:-3], object)
    for at in np.ndindex(found.shape):
        found[at] = _png_file(pixels[at], compression)
    return convert_to_tensor(found)


def _png_file(pixels: np.ndarray, compression: int) -> bytes:
    height, width, channels = pixels.shape
    rows = np.ascontiguousarray(pixels.astype(pixels.dtype.newbyteorder(">"))).view(np.uint8).reshape(height, -1)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), rows], 1).tobytes()  # each begins with its filter, none
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", width, height, pixels.itemsize * 8, kind, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(lines, compression)), (b"IEND", b"")
    return png_chunks.SIGNATURE + b"".join(itertools.starmap(png_chunks.write_chunk, chunks))
