"""`tf.strings`: hashes, n-grams, and characters of Unicode."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np

from replicax.tf import _hashes
from replicax.tf._core import InvalidArgumentError, RaggedTensor, as_strings
from replicax.tf._features import default_of
from replicax.tf._ops import convert_to_tensor, known, string_tensor
from replicax.tf._parse import strings_of
from replicax.tf._strings import _shown
from replicax.tf._tables import on_values
from replicax.tf._types import Composed, Rows, TensorLike
from replicax.tf._wire import BYTES

_T = TypeVar("_T")


def _bucket(hashed: Callable[[np.ndarray], np.ndarray], input: TensorLike, num_buckets: int) -> Composed:
    if num_buckets < 1:
        raise InvalidArgumentError(f"Value for attr 'num_buckets' of {num_buckets} must be at least minimum 1")

    def bucket(values: TensorLike) -> jax.Array:
        found = _hashes.of_strings(hashed, strings_of(values)) % np.uint64(num_buckets)
        return convert_to_tensor(np.asarray(found).astype(np.int64))

    return on_values(bucket, input)


def to_hash_bucket(input: TensorLike, num_buckets: int, name: str | None = None) -> Composed:
    """Returns the numbers of the buckets that strings fall into, int64, by TensorFlow's oldest hash."""
    return _bucket(_hashes.murmur64, input, num_buckets)


def to_hash_bucket_fast(input: TensorLike, num_buckets: int, name: str | None = None) -> Composed:
    """Returns the numbers of the buckets that strings fall into, int64, by FarmHash's Fingerprint64."""
    return _bucket(_hashes.fingerprint64, input, num_buckets)


def to_hash_bucket_strong(input: TensorLike, num_buckets: int, key: Sequence[int], name: str | None = None) -> Composed:
    """Returns the numbers of the buckets that strings fall into, int64, by SipHash with a key of two numbers."""
    if len(key) != 2:
        raise InvalidArgumentError(f"Key must have 2 elements, got {len(key)}.")
    return _bucket(_hashes.siphash(key), input, num_buckets)


def _objects(values: Sequence[bytes], shape: Sequence[int] = (-1,)) -> jax.Array:
    return string_tensor(default_of(list(values), BYTES).reshape(shape))


def format(
    template: str, inputs: TensorLike, placeholder: str = "{}", summarize: int = 3, name: str | None = None
) -> np.ndarray:
    """Returns a text with tensors in the places of `{}`, as `tf.print` shows them."""
    tensors = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    pieces = template.split(placeholder)
    if len(pieces) - 1 != len(tensors):
        raise ValueError(
            f"The template expects {len(pieces) - 1} tensors, but the inputs only has {len(tensors)}. Please ensure "
            "the number of placeholders in template matches inputs length."
        )
    shown = [str(_shown(known(convert_to_tensor(x), "Text", "Use tf.print."), summarize)) for x in tensors]
    return as_strings("".join(a + b for a, b in zip(pieces, [*shown, ""])).encode())


def ngrams(
    data: TensorLike,
    ngram_width: int | Sequence[int],
    separator: str = " ",
    pad_values: str | bytes | Sequence[str | bytes] | None = None,
    padding_width: int | None = None,
    preserve_short_sequences: bool = False,
    name: str | None = None,
) -> Rows:
    """Joins each run of `ngram_width` strings of the last dimension.

    Args:
        data: strings, a tensor or a RaggedTensor.
        ngram_width: how many strings are joined; several widths one after the other.
        separator: what stands between them.
        pad_values: what is added at both ends, or a pair of strings for the beginning and the end.
        padding_width: how many are added at each end at most; by default one less than the width.
        preserve_short_sequences: whether a row that is shorter than the smallest width becomes one string.

    Returns:
        a tensor or, for ragged `data`, a RaggedTensor.
    """
    widths = [ngram_width] if isinstance(ngram_width, int) else list(ngram_width)
    if any(width < 1 for width in widths):
        raise ValueError(f"All ngram_widths must be greater than 0. Received: {ngram_width}")
    if pad_values is None and padding_width is not None:
        raise ValueError("pad_values must be provided if padding_width is set.")
    pair = (pad_values, pad_values) if isinstance(pad_values, (str, bytes)) else pad_values
    ends = None if pair is None else [end.encode() if isinstance(end, str) else end for end in pair]
    between = separator.encode()

    def of_row(row: list[bytes]) -> list[bytes]:
        found: list[bytes] = []
        for width in widths:
            added = 0 if ends is None else width - 1 if padding_width is None else min(padding_width, width - 1)
            padded = [*[ends[0]] * added, *row, *[ends[1]] * added] if ends is not None else row
            found += [between.join(padded[i : i + width]) for i in range(len(padded) - width + 1)]
        short = preserve_short_sequences and not found and row
        return [between.join(row)] if short else found

    if isinstance(data, RaggedTensor):
        return _rows_mapped(data, of_row)
    array = strings_of(data)
    rows = [of_row(row.tolist()) for row in array.reshape(-1, array.shape[-1])]
    if len({len(row) for row in rows}) > 1:
        raise InvalidArgumentError("The rows have different numbers of n-grams.")
    width = len(rows[0]) if rows else 0
    return _objects([x for row in rows for x in row], (*array.shape[:-1], width))


def _rows_mapped(data: RaggedTensor, of_row: Callable[[list[bytes]], list[bytes]]) -> RaggedTensor:
    """Returns a RaggedTensor whose innermost rows are replaced."""
    if isinstance(data.values, RaggedTensor):
        return RaggedTensor(_rows_mapped(data.values, of_row), data.row_splits)
    values, splits = np.asarray(data.values).tolist(), np.asarray(data.row_splits)
    rows = [of_row(values[i:j]) for i, j in itertools.pairwise(splits.tolist())]
    return _ragged([x for row in rows for x in row], list(map(len, rows)))


def _ragged(values: list[bytes], lengths: list[int]) -> RaggedTensor:
    flat = _objects(values) if not values or isinstance(values[0], bytes) else convert_to_tensor(np.array(values))
    return RaggedTensor(flat, convert_to_tensor(np.cumsum([0, *lengths], dtype=np.int64)))


def unsorted_segment_join(
    inputs: TensorLike, segment_ids: TensorLike, num_segments: int, separator: str = "", name: str | None = None
) -> jax.Array:
    """Joins the strings of each segment, in their order."""
    strings, segments = strings_of(inputs), np.asarray(known(segment_ids, "A segment", "Join outside of functions."))
    parts: list[list[bytes]] = [[] for _ in range(int(num_segments))]
    for segment, string in zip(segments.ravel().tolist(), strings.ravel().tolist()):
        if segment >= 0:
            parts[segment].append(string)
    return _objects([separator.encode().join(part) for part in parts])


# --- Unicode ---

_ENCODINGS = {"UTF-8": "utf-8", "UTF-16-BE": "utf-16-be", "UTF-32-BE": "utf-32-be"}


def _decoded(text: bytes, encoding: str, errors: str, replacement: int) -> str:
    """Returns the characters of encoded text; each invalid sequence is replaced, or left out, or an error."""
    codec = _ENCODINGS.get(encoding.upper(), encoding)
    try:
        return text.decode(codec)
    except UnicodeDecodeError as error:
        if errors == "strict":
            raise InvalidArgumentError(f"Invalid formatting on input string: {text[:60]!r}") from error
    return text.decode(codec, "replace").replace("\ufffd", "" if errors == "ignore" else chr(replacement))


def _encoded(text: str, encoding: str) -> bytes:
    return text.encode(_ENCODINGS.get(encoding.upper(), encoding), "replace")


def _per_string(
    input: TensorLike, of_one: Callable[[bytes], list[_T]], tensor: Callable[[list[_T]], jax.Array]
) -> Rows:
    """Returns a list of each string: of one string a vector, of several a RaggedTensor."""
    array = strings_of(input)
    if not array.ndim:
        return tensor(of_one(array.item()))
    rows = [of_one(x) for x in array.ravel().tolist()]
    values = tensor([x for row in rows for x in row])
    ragged = RaggedTensor(values, convert_to_tensor(np.cumsum([0, *map(len, rows)], dtype=np.int64)))
    for size in array.shape[:0:-1]:  # the inner dimensions, each of one length
        ragged = RaggedTensor(ragged, convert_to_tensor(np.arange(0, ragged.nrows() + 1, size, dtype=np.int64)))
    return ragged


def _offsets(text: str, encoding: str) -> list[int]:
    sizes = [len(_encoded(x, encoding)) for x in text]
    return [0, *itertools.accumulate(sizes)][: len(sizes)]


def unicode_split(
    input: TensorLike, input_encoding: str, errors: str = "replace", replacement_char: int = 65533,
    name: str | None = None,
) -> Rows:  # fmt: skip
    """Splits strings into their characters: one string to a vector, several strings to a RaggedTensor."""

    def split(x: bytes) -> list[bytes]:
        return [_encoded(c, input_encoding) for c in _decoded(x, input_encoding, errors, replacement_char)]

    return on_ragged(lambda x: _per_string(x, split, _objects), input)


def unicode_split_with_offsets(
    input: TensorLike, input_encoding: str, errors: str = "replace", replacement_char: int = 65533,
    name: str | None = None,
) -> tuple[Rows, Rows]:  # fmt: skip
    """Splits strings into their characters, and returns at which byte each begins."""
    return unicode_split(input, input_encoding, errors, replacement_char), _starts(
        input, input_encoding, errors, replacement_char
    )


def unicode_decode(
    input: TensorLike, input_encoding: str, errors: str = "replace", replacement_char: int = 65533,
    replace_control_characters: bool = False, name: str | None = None,
) -> Rows:  # fmt: skip
    """Returns the code points of strings, int32: of one string a vector, of several a RaggedTensor."""

    def points(x: bytes) -> list[int]:
        found = [ord(c) for c in _decoded(x, input_encoding, errors, replacement_char)]
        return [replacement_char if replace_control_characters and p < 32 else p for p in found]

    return on_ragged(
        lambda x: _per_string(x, points, lambda found: convert_to_tensor(np.array(found, np.int32))), input
    )


def unicode_decode_with_offsets(
    input: TensorLike, input_encoding: str, errors: str = "replace", replacement_char: int = 65533,
    replace_control_characters: bool = False, name: str | None = None,
) -> tuple[Rows, Rows]:  # fmt: skip
    """Returns the code points of strings, and at which byte each begins."""
    decoded = unicode_decode(input, input_encoding, errors, replacement_char, replace_control_characters)
    return decoded, _starts(input, input_encoding, errors, replacement_char)


def _starts(input: TensorLike, encoding: str, errors: str, replacement: int) -> Rows:
    def starts(x: bytes) -> list[int]:
        return _offsets(_decoded(x, encoding, errors, replacement), encoding)

    return _per_string(input, starts, lambda found: convert_to_tensor(np.array(found, np.int64)))


def unicode_encode(
    input: TensorLike,
    output_encoding: str,
    errors: str = "replace",
    replacement_char: int = 65533,
    name: str | None = None,
) -> Rows:
    """Encodes code points, the last dimension of a tensor or RaggedTensor, as strings."""

    def text(points: list[int]) -> bytes:
        return _encoded("".join(map(chr, points)), output_encoding)

    if isinstance(input, RaggedTensor):
        if isinstance(input.values, RaggedTensor):
            return RaggedTensor(unicode_encode(input.values, output_encoding), input.row_splits)
        values, splits = np.asarray(input.values).tolist(), np.asarray(input.row_splits).tolist()
        return _objects([text(values[i:j]) for i, j in itertools.pairwise(splits)])
    array = np.asarray(known(convert_to_tensor(input), "Text", "Encode it outside of functions."))
    rows = [text(row) for row in array.reshape(-1, array.shape[-1]).tolist()]
    return _objects(rows, array.shape[:-1])


def unicode_transcode(
    input: TensorLike, input_encoding: str, output_encoding: str, errors: str = "replace",
    replacement_char: int = 65533, replace_control_characters: bool = False, name: str | None = None,
) -> Composed:  # fmt: skip
    """Returns strings in another encoding."""

    def transcoded(values: TensorLike) -> jax.Array:
        array = strings_of(values)
        texts = [_decoded(x, input_encoding, errors, replacement_char) for x in array.ravel().tolist()]
        if replace_control_characters:
            mend = chr(replacement_char)
            texts = ["".join(mend if unicodedata.category(c) == "Cc" else c for c in text) for text in texts]
        return _objects([_encoded(x, output_encoding) for x in texts], array.shape)

    return on_values(transcoded, input)


def on_ragged(compute: Callable[[TensorLike], Rows], input: TensorLike) -> Rows:
    """Returns a function of a tensor; of the values of a ragged one, one dimension further inside."""
    if isinstance(input, RaggedTensor):
        return RaggedTensor(on_ragged(compute, input.values), input.row_splits)
    return compute(input)


TEXT = """format ngrams to_hash_bucket to_hash_bucket_fast to_hash_bucket_strong unicode_decode
unicode_decode_with_offsets unicode_encode unicode_split unicode_split_with_offsets unicode_transcode
unsorted_segment_join"""
