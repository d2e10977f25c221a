"""Tensors as strings (`tf.io.serialize_tensor`, `tf.make_tensor_proto`), raw bytes, base64, and examples in JSON."""

from __future__ import annotations

import base64
import builtins
import re
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import numpy as np

from replicax.tf import _dtypes, _features, _wire
from replicax.tf._core import DataLossError, InvalidArgumentError, Probe, as_dtype, as_host, as_strings
from replicax.tf._ops import as_array, as_shape, convert_to_tensor, known
from replicax.tf._parse import strings_of
from replicax.tf._types import DTypeLike, ShapeLike, TensorLike

if TYPE_CHECKING:
    from replicax.tf._protos import TensorProto

_STRING = np.dtype(object)
# The fields of `TensorProto` with values one by one, by dtype, where another dtype is stored than the tensor's.
_FIELDS = {"float32": "float_val", "float64": "double_val", "int64": "int64_val", "bool": "bool_val",
           "uint32": "uint32_val", "uint64": "uint64_val", "float16": "half_val", "bfloat16": "half_val",
           "complex64": "scomplex_val", "complex128": "dcomplex_val"}  # fmt: skip


def serialize_tensor(tensor: TensorLike, name: str | None = None) -> np.ndarray:
    """Returns a tensor as a string, a serialized `TensorProto` as TensorFlow writes it."""
    array = np.asarray(known(convert_to_tensor(tensor), "A tensor as a string", "Serialize it outside of a function."))
    return as_strings(_proto(array).SerializeToString())


def parse_tensor(serialized: TensorLike, out_type: DTypeLike, name: str | None = None) -> jax.Array | np.ndarray:
    """Returns the tensor that `serialize_tensor` made a string of.

    Raises:
        InvalidArgumentError: the string is no tensor, or has one of another dtype.
    """
    from replicax.tf import _protos

    data, dtype = strings_of(serialized).item(), as_dtype(out_type)
    if isinstance(data, Probe):  # of any rank
        return np.zeros([1 + data.size] * (1 + data.size), dtype)
    try:
        proto = _protos.TensorProto.FromString(data)
        array = make_ndarray(proto)
    except Exception as error:  # protobuf's own, or a dtype or size that does not fit
        text = base64.b64encode(data[:60]).decode()
        raise InvalidArgumentError(f"Could not parse `serialized` as TensorProto, base64: {text}") from error
    if array.dtype != dtype:
        names = (
            _features.TYPE_NAMES.get({np.dtype(np.float32): _wire.FLOAT}.get(d, -1), d) for d in (array.dtype, dtype)
        )
        raise InvalidArgumentError("Type mismatch between parsed tensor ({}) and dtype ({})".format(*names))
    return as_strings(array) if dtype == _STRING else convert_to_tensor(array)


def make_tensor_proto(
    values: TensorLike,
    dtype: DTypeLike | None = None,
    shape: ShapeLike | None = None,
    verify_shape: bool = False,
    allow_broadcast: bool = False,
) -> TensorProto:
    """Returns a `TensorProto` of values: an array, a number, a string or a nested list of them.

    Args:
        values: what the tensor contains.
        dtype: its dtype; by default that of `values`, int32 and float32 for Python's numbers.
        shape: its shape; a single value fills it.
        verify_shape: whether `values` must have this shape already.
        allow_broadcast: whether they are broadcast to it.
    """
    array = as_host(values)
    if dtype is not None and as_dtype(dtype) != array.dtype:
        array = array.astype(as_dtype(dtype))
    if shape is not None:
        wanted = as_shape(shape)
        if verify_shape and array.shape != wanted:
            raise TypeError(f"Expected Tensor's shape: {wanted}, but got {array.shape}.")
        array = np.broadcast_to(array, wanted) if allow_broadcast or array.size == 1 else array.reshape(wanted)
    return _proto(array)


def _proto(array: np.ndarray) -> TensorProto:
    from replicax.tf import _protos

    proto = _protos.TensorProto(dtype=_dtypes.DType.as_datatype_enum.fget(array.dtype))  # type: ignore[attr-defined]
    proto.tensor_shape.SetInParent()
    for size in array.shape:
        proto.tensor_shape.dim.add(size=size)
    if array.dtype == _STRING:
        proto.string_val.extend(array.ravel().tolist())
    else:
        proto.tensor_content = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return proto


def make_ndarray(tensor: TensorProto) -> np.ndarray:
    """Returns the numpy array of a `TensorProto`, TensorFlow's too."""
    dtype = _dtypes.as_dtype(int(tensor.dtype))
    shape = [int(dim.size) for dim in tensor.tensor_shape.dim]
    if tensor.tensor_content:
        return np.frombuffer(tensor.tensor_content, dtype.newbyteorder("<")).astype(dtype).reshape(shape)
    if dtype == _STRING:
        found = _features.default_of(list(tensor.string_val), _wire.BYTES)
    else:
        field = _FIELDS.get(dtype.name, "int_val")
        found = np.array(list(getattr(tensor, field)), np.uint16 if field == "half_val" else None)
        if field == "half_val":
            found = found.view(dtype)
        elif dtype.kind == "c":
            found = found[::2] + 1j * found[1::2]
    size = int(np.prod(shape))
    if 0 < len(found) < size:  # the last value stands for those that follow
        found = np.concatenate([found, np.repeat(found[-1:], size - len(found))])
    if not len(found) and size:
        found = np.full(size, b"" if dtype == _STRING else 0, dtype)
    return found.astype(dtype).reshape(shape)


def _each(function: Callable[[bytes], bytes], input: TensorLike) -> np.ndarray:
    strings = strings_of(input)
    return as_strings(_features.default_of([function(x) for x in strings.ravel()], _wire.BYTES).reshape(strings.shape))


def encode_base64(input: TensorLike, pad: bool = False, name: str | None = None) -> np.ndarray:
    """Encodes strings in base64 for the web, with `-` and `_`; with `pad` filled up with `=`."""
    return _each(lambda x: base64.urlsafe_b64encode(x).rstrip(b"" if pad else b"="), input)


def decode_base64(input: TensorLike, name: str | None = None) -> np.ndarray:
    """Decodes strings from base64 for the web; raises InvalidArgumentError for other characters."""

    def decoded(text: bytes) -> bytes:
        plain = text.rstrip(b"=")
        if re.fullmatch(rb"[A-Za-z0-9_-]*", plain) is None or len(plain) % 4 == 1:
            raise InvalidArgumentError(f"Invalid character found in base64: {text[:40]!r}.")
        return base64.urlsafe_b64decode(plain + b"=" * (-len(plain) % 4))

    return _each(decoded, input)


def decode_raw(
    input_bytes: TensorLike,
    out_type: DTypeLike,
    little_endian: bool = True,
    fixed_length: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the bytes of strings as numbers, along a new last dimension.

    Args:
        input_bytes: strings of one length.
        out_type: the dtype of the numbers.
        little_endian: whether the lowest byte of a number comes first.
        fixed_length: how many bytes of each string are used; those that are missing are zeros.
    """
    strings, dtype = strings_of(input_bytes), np.dtype(as_dtype(out_type))
    texts = strings.ravel().tolist()
    if texts and isinstance(texts[0], Probe):
        texts = [bytes((1 + probe.size) * dtype.itemsize) for probe in texts]
    length = len(texts[0]) if fixed_length is None and texts else fixed_length or 0
    if length % dtype.itemsize or (fixed_length is not None and fixed_length <= 0):
        raise InvalidArgumentError(
            f"Input to DecodeRaw has length {length} that is not a multiple of {dtype.itemsize}, the size of "
            f"{dtype.name}."
        )
    if fixed_length is None and any(len(text) != length for text in texts):
        raise InvalidArgumentError(f"DecodeRaw requires input strings of one size, but not all have {length} bytes.")
    content = b"".join(text[:length].ljust(length, b"\0") for text in texts)
    if little_endian:
        found = np.frombuffer(content, dtype)
    else:
        found = np.frombuffer(content, dtype).byteswap()
    return as_array(found.reshape(*strings.shape, length // dtype.itemsize))


def decode_compressed(bytes: TensorLike, compression_type: str = "", name: str | None = None) -> np.ndarray:
    """Decompresses strings; `compression_type` is "ZLIB", "GZIP" or "" for those that are not compressed."""
    if compression_type not in ("", "ZLIB", "GZIP"):
        raise InvalidArgumentError(f"Only ZLIB, GZIP or NONE are supported compressions, got {compression_type!r}.")

    def decoded(text: builtins.bytes) -> builtins.bytes:
        try:
            return zlib.decompress(text, 31 if compression_type == "GZIP" else 15) if compression_type else text
        except zlib.error as error:
            raise DataLossError(f"Invalid {compression_type} data: {error}") from error

    return _each(decoded, bytes)


def decode_json_example(json_examples: TensorLike, name: str | None = None) -> np.ndarray:
    """Returns serialized `tf.train.Example`s of those in the JSON form of protocol buffers."""
    from google.protobuf import json_format

    from replicax.tf import _protos

    def decoded(text: bytes) -> bytes:
        try:
            found: bytes = json_format.Parse(text, _protos.Example()).SerializeToString()
        except (json_format.ParseError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(f"Error while parsing JSON: {error}") from error
        return found

    return _each(decoded, json_examples)
