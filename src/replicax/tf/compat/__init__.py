"""`tf.compat`: names of other versions, and conversion of bytes and text."""

from __future__ import annotations

import importlib
import os
from typing import Any

from replicax.tf._absent import missing_from as _missing_from
from replicax.tf.compat import v1 as v1


def as_bytes(bytes_or_text: str | bytes | bytearray, encoding: str = "utf-8") -> bytes:
    """Converts bytes or text to bytes."""
    if isinstance(bytes_or_text, str):
        return bytes_or_text.encode(encoding)
    if not isinstance(bytes_or_text, (bytes, bytearray)):
        raise TypeError(f"Expected binary or unicode string, got {bytes_or_text!r}.")
    return bytes(bytes_or_text)


def as_text(bytes_or_text: str | bytes | bytearray, encoding: str = "utf-8") -> str:
    """Converts bytes or text to text."""
    if isinstance(bytes_or_text, (bytes, bytearray)):
        return bytes(bytes_or_text).decode(encoding)
    if not isinstance(bytes_or_text, str):
        raise TypeError(f"Expected binary or unicode string, got {bytes_or_text!r}.")
    return bytes_or_text


as_str = as_text


def as_str_any(value: object, encoding: str = "utf-8") -> str:
    """Converts bytes to text, and other values with `str`."""
    return as_text(value, encoding) if isinstance(value, bytes) else str(value)


def path_to_str(path: Any) -> Any:
    """Returns a path as text."""
    return os.fspath(path) if hasattr(path, "__fspath__") else path


def dimension_value(dimension: int | None) -> int | None:
    """Returns a dimension as an int, or None."""
    return dimension


_missing = _missing_from("compat")


def __getattr__(name: str) -> Any:
    return importlib.import_module("replicax.tf") if name == "v2" else _missing(name)
