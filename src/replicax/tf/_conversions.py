"""`tf.register_tensor_conversion_function`: how a program's own classes become tensors."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from replicax.tf._core import as_dtype
from replicax.tf._types import DTypeLike, TensorLike


class _Conversion(NamedTuple):
    priority: int
    number: int
    kinds: type | tuple[type, ...]
    function: Callable[..., TensorLike]


# All conversions, in the order in which they are tried: by priority, and by when they were registered.
registered: list[_Conversion] = []


def register_tensor_conversion_function(
    base_type: type | tuple[type, ...], conversion_func: Callable[..., TensorLike], priority: int = 100
) -> None:
    """Has `convert_to_tensor`, and all operations, convert the objects of a class by a function.

    Args:
        base_type: the class, or a tuple of classes; objects of their subclasses are converted too.
        conversion_func: called with the object, and by keyword with `dtype`, `name` and `as_ref`. It returns a tensor,
            or NotImplemented for the next function that is registered for the class.
        priority: functions with a smaller number come first.

    Raises:
        TypeError: the class is one of numbers or of NumPy's arrays, or the function is none.
    """
    kinds = base_type if isinstance(base_type, tuple) else (base_type,)
    if not kinds or not all(isinstance(kind, type) for kind in kinds):
        raise TypeError(f"Argument `base_type` must be a type or a tuple of types. Obtained: {base_type}")
    if any(issubclass(kind, (numbers.Number, np.ndarray, np.generic)) for kind in kinds):
        raise TypeError("Cannot register conversions for Python numeric types and NumPy scalars and arrays.")
    if not callable(conversion_func):
        raise TypeError(f"Argument `conversion_func` must be callable. Received {conversion_func}.")
    registered.append(_Conversion(priority, len(registered), base_type, conversion_func))
    registered.sort(key=lambda each: each[:2])
    _for_kind.cache_clear()


@functools.cache
def _for_kind(kind: type) -> tuple[Callable[..., TensorLike], ...]:
    # Lists have a conversion of their own, which comes before later ones of the same priority.
    most = 99 if issubclass(kind, (list, tuple)) else math.inf
    return tuple(each.function for each in registered if each.priority <= most and issubclass(kind, each.kinds))


def converted(value: TensorLike, dtype: DTypeLike | None = None, name: str | None = None) -> TensorLike:
    """Returns a value as the function converts it that is registered for its class; without one the value itself.

    Raises:
        RuntimeError: the tensor has another dtype than the one that was asked for.
    """
    for function in _for_kind(type(value)):  # type: ignore[arg-type]  # a class is hashable
        found = function(value, dtype=dtype, name=name, as_ref=False)
        if found is NotImplemented:
            continue
        if dtype is not None and getattr(found, "dtype", None) != as_dtype(dtype):
            raise RuntimeError(
                f"Conversion function {function!r} for type {type(value)} returned incompatible dtype: requested = "
                f"{as_dtype(dtype)}, actual = {getattr(found, 'dtype', None)}"
            )
        return found
    return value
