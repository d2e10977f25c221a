"""Python values, arrays among them, as JSON can hold them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Encodes values of further kinds, and decodes them by the key of their entry; None for what it does not know.
Encoder = Callable[[Any], dict[str, Any] | None]
Decoders = dict[str, Callable[[Any], Any]]


def encoded(value: Any, further: Encoder = lambda value: None) -> Any:
    """Returns a value as JSON can hold it: None, numbers, strings, bytes, arrays, and dicts, lists and tuples of these.

    Args:
        value: the value.
        further: encodes values of other kinds: returns a dict with one entry, or None.

    Raises:
        TypeError: there is a value of another kind in it.
    """
    if (entry := further(value)) is not None:
        return entry
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {"dict": [[encoded(key, further), encoded(item, further)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [encoded(item, further) for item in value]}
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        array = np.asarray(value)
        head = {"shape": list(array.shape), "scalar": isinstance(value, np.generic)}
        if array.dtype == object:
            return {"objects": [encoded(item) for item in array.ravel()], **head}
        return {"array": base64.b64encode(array.tobytes()).decode(), "dtype": array.dtype.name, **head}
    raise TypeError(f"Only arrays, numbers, strings and bytes, and structures of these, can be saved; got {value!r}.")


def decoded(told: Any, further: Decoders | None = None) -> Any:
    """Returns the value that `encoded` was given.

    Args:
        told: what `encoded` returned.
        further: for the key of an entry that `encoded` had from its argument `further`, what decodes the entry.
    """
    if not isinstance(told, dict):
        return told
    for key, decode in (further or {}).items():
        if key in told:
            return decode(told[key])
    if "bytes" in told:
        return base64.b64decode(told["bytes"])
    if "dict" in told:
        return {decoded(key, further): decoded(value, further) for key, value in told["dict"]}
    if "list" in told:
        return [decoded(item, further) for item in told["list"]]
    if "tuple" in told:
        return tuple(decoded(item, further) for item in told["tuple"])
    if "objects" in told:
        array = np.empty(len(told["objects"]), object)
        array[:] = [decoded(item) for item in told["objects"]]
    else:
        array = np.frombuffer(base64.b64decode(told["array"]), jnp.dtype(told["dtype"])).copy()
    array = array.reshape(told["shape"])
    return array[()] if told["scalar"] else array
