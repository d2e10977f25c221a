"""`tf.float32` and the other dtypes: numpy's own, to which this module adds TensorFlow's attributes.

The dtype of a JAX array is a numpy dtype object. Programs written for TensorFlow evaluate `x.dtype is tf.float32` and
`x.dtype.is_floating`: so `tf.float32` has to be that object, and the object needs these attributes. A subclass or a
proxy is not possible, since numpy allows no subclasses and JAX checks the type itself. numpy's class does not accept
new attributes from Python, so `dress` writes into its dictionary. It adds only names that numpy does not define, so
that nothing in numpy changes its meaning.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from replicax.tf._core import specs


class _DTypeType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, np.dtype)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, np.dtype)

    def __call__(cls, type_value: object) -> np.dtype:
        return as_dtype(type_value)


class DType(metaclass=_DTypeType):
    """The class of dtypes, which are numpy's: `isinstance` holds for them, and a call is `as_dtype`.

    Importing `replicax.tf` adds these members to numpy's dtypes; `self` is one of them.
    """

    @property
    def size(self: Any) -> int:
        """The size of one element in bytes; 0 for strings."""
        return 0 if _is_string(self) else self.itemsize

    @property
    def as_numpy_dtype(self: Any) -> type:
        """The scalar type of numpy; `object` for strings."""
        return object if _is_string(self) else self.type

    @property
    def as_datatype_enum(self: Any) -> int:
        """TensorFlow's number of the dtype, which may be used wherever a dtype is expected.

        Raises:
            TypeError: TensorFlow has no such dtype.
        """
        try:
            return _NUMBERS[self]
        except KeyError:
            raise TypeError(f"TensorFlow has no dtype {self}.") from None

    @property
    def base_dtype(self: Any) -> np.dtype:
        """The dtype itself: there are no reference dtypes."""
        result: np.dtype = self
        return result

    @property
    def real_dtype(self: Any) -> np.dtype:
        """The dtype of a complex number's parts; else the dtype itself."""
        return jnp.finfo(self).dtype if self.is_complex else self

    @property
    def is_floating(self: Any) -> bool:
        """Whether it is a real floating-point dtype."""
        return bool(jnp.issubdtype(self, jnp.floating))

    @property
    def is_integer(self: Any) -> bool:
        """Whether it is an integer dtype, signed or unsigned."""
        return bool(jnp.issubdtype(self, jnp.integer))

    @property
    def is_unsigned(self: Any) -> bool:
        """Whether it is an unsigned integer dtype."""
        return bool(jnp.issubdtype(self, jnp.unsignedinteger))

    @property
    def is_complex(self: Any) -> bool:
        """Whether it is a complex dtype."""
        return bool(self.kind == "c")

    @property
    def is_bool(self: Any) -> bool:
        """Whether it is the dtype bool."""
        return bool(self.kind == "b")

    @property
    def is_numeric(self: Any) -> bool:
        """Whether it is a numeric dtype."""
        return bool(self.is_floating or self.is_integer or self.is_complex)

    @property
    def is_quantized(self: Any) -> bool:
        """Whether it is a quantized dtype, of which there are the names alone."""
        return self.names is not None and self in QUANTIZED.values()

    @property
    def is_numpy_compatible(self: Any) -> bool:
        """True: every dtype is numpy's."""
        return True

    @property
    def min(self: Any) -> int | float | np.floating:
        """The smallest number; raises `TypeError` for dtypes without an order."""
        return _limits(self, "minimum").min

    @property
    def max(self: Any) -> int | float | np.floating:
        """The largest number; raises `TypeError` for dtypes without an order."""
        return _limits(self, "maximum").max

    @property
    def limits(self: Any) -> tuple[int, int | float | np.floating]:
        """The range of the pixels of images of this dtype: 0 to 1, or to the largest integer.

        Raises:
            ValueError: TensorFlow has no images of this dtype.
        """
        if not (self.is_bool or self.is_integer or self in (np.float32, np.float64)):
            raise ValueError(f"{self} does not have defined limits.")
        return 0, self.max if self.is_integer else True if self.is_bool else 1

    def is_compatible_with(self: Any, other: object) -> bool:
        """Returns whether `other` is the same dtype, or a name or number of it."""
        return bool(self == as_dtype(other))

    is_subtype_of = is_compatible_with

    def most_specific_common_supertype(self: Any, types: Iterable[object]) -> np.dtype | None:
        """Returns the dtype itself if all of `types` are the same, else None."""
        return self if all(self == other for other in types) else None


def _is_string(dtype: np.dtype) -> bool:
    return bool(dtype == np.dtype(object))


def _limits(dtype: Any, what: str) -> jnp.finfo | jnp.iinfo:
    if not (dtype.is_floating or dtype.is_integer):
        raise TypeError(f"Cannot find {what} value of {dtype}.")
    return (jnp.finfo if dtype.is_floating else jnp.iinfo)(dtype)


def as_dtype(type_value: object) -> np.dtype:
    """Returns the dtype for a name, a type, TensorFlow's number or numpy's dtype; raises `TypeError` for other
    values.
    """
    dtype = None if type_value is None else specs.as_dtype(type_value)
    if not isinstance(dtype, np.dtype):
        raise TypeError(f"Cannot convert the argument `type_value`: {type_value!r} to a TensorFlow DType.")
    return dtype


_NAMES = """bfloat16 bool complex64 complex128 float16 float32 float64 int8 int16 int32 int64 string uint8 uint16 uint32
uint64"""
DTYPES: dict[str, np.dtype] = {name: specs.as_dtype(name) for name in _NAMES.split()}
# As NumPy has them: one field with the name.
_OF_INTEGERS = ("int8", "int16", "int32", "uint8", "uint16")
QUANTIZED = {f"q{name}": np.dtype([(f"q{name}", name)]) for name in _OF_INTEGERS}
DTYPES |= QUANTIZED
DTYPES |= {"double": DTYPES["float64"], "half": DTYPES["float16"]}

# The numbers of TensorFlow's `DataType`, except those of dtypes that replicax lacks.
_NUMBERED = """- float32 float64 int32 uint8 int16 int8 string complex64 int64 bool qint8 quint8 qint32 bfloat16
qint16 quint16 uint16 complex128 float16 - - uint32 uint64 float8_e5m2 float8_e4m3fn float8_e4m3fnuz
float8_e4m3b11fnuz float8_e5m2fnuz int4 uint4 int2 uint2 float4_e2m1fn"""
_BY_NUMBER = {i: DTYPES.get(name) or specs.as_dtype(name) for i, name in enumerate(_NUMBERED.split()) if name != "-"}
_NUMBERS = {dtype: i for i, dtype in _BY_NUMBER.items()}
# What names a dtype beside the names that the core knows: TensorFlow's numbers, Python's types, and further names.
ALIASES: dict[object, np.dtype] = {"float": DTYPES["float32"]}
ALIASES.update(_BY_NUMBER.items())
ALIASES.update((kind, np.dtype(dtype)) for kind, dtype in specs.PYTHON_DTYPES.items())
ALIASES.update(QUANTIZED)


def dress() -> None:
    """Adds the members of `DType` to numpy's dtypes.

    `np.dtype.__dict__` is a read-only view; the garbage collector returns the dictionary behind it. Python has to be
    told that the class has changed, since it caches failed look-ups of attributes.
    """
    (members,) = gc.get_referents(np.dtype.__dict__)
    members.update((name, value) for name, value in vars(DType).items() if not name.startswith("_"))
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(np.dtype))
