"""`tf.float32` and its like: numpy's dtypes, with TensorFlow's questions about them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from replicax import _specs


class _DTypeType(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return type.__instancecheck__(cls, value) or isinstance(value, np.dtype)


class DType(metaclass=_DTypeType):
    """A dtype. It equals numpy's, which a tensor's `dtype` is, and stands for it wherever one is expected."""

    __slots__ = ("dtype",)

    def __init__(self, type_value: Any):
        self.dtype = np.dtype(_specs.as_dtype(type_value))

    @property
    def __numpy_dtype__(self) -> np.dtype:
        return self.dtype

    @property
    def name(self) -> str:
        """Such as "float32"; "string" for strings."""
        return "string" if self.dtype == np.dtype(object) else self.dtype.name

    @property
    def size(self) -> int:
        """The bytes of one element; 0 for strings."""
        return 0 if self.dtype == np.dtype(object) else self.dtype.itemsize

    @property
    def as_numpy_dtype(self) -> Any:
        """The type of one element, as numpy has it."""
        return self.dtype.type

    @property
    def base_dtype(self) -> DType:
        """The dtype itself."""
        return self

    @property
    def real_dtype(self) -> DType:
        """The dtype of a complex number's parts; else the dtype itself."""
        return DType(np.finfo(self.dtype).dtype) if self.is_complex else self

    @property
    def is_floating(self) -> bool:
        """Whether it has numbers with a point that are not complex."""
        return bool(jnp.issubdtype(self.dtype, jnp.floating))

    @property
    def is_integer(self) -> bool:
        """Whether it has whole numbers, with a sign or without."""
        return bool(jnp.issubdtype(self.dtype, jnp.integer))

    @property
    def is_unsigned(self) -> bool:
        """Whether it has whole numbers without a sign."""
        return bool(jnp.issubdtype(self.dtype, jnp.unsignedinteger))

    @property
    def is_complex(self) -> bool:
        """Whether it has complex numbers."""
        return self.dtype.kind == "c"

    @property
    def is_bool(self) -> bool:
        """Whether it is that of truth values."""
        return self.dtype.kind == "b"

    @property
    def is_numeric(self) -> bool:
        """Whether it has numbers."""
        return self.is_floating or self.is_integer or self.is_complex

    @property
    def min(self) -> Any:
        """The smallest number; `TypeError` where there is no order."""
        return self._info("minimum").min

    @property
    def max(self) -> Any:
        """The largest number; `TypeError` where there is no order."""
        return self._info("maximum").max

    def _info(self, what: str) -> Any:
        if not (self.is_floating or self.is_integer):
            raise TypeError(f"Cannot find {what} value of {self}.")
        return (jnp.finfo if self.is_floating else jnp.iinfo)(self.dtype)

    def is_compatible_with(self, other: Any) -> bool:
        """Whether it is the same dtype."""
        return self == other

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dtype, name)

    def __eq__(self, other: object) -> bool:
        return bool(self.dtype == (other.dtype if type(other) is DType else other))

    def __hash__(self) -> int:
        return hash(self.dtype)

    def __str__(self) -> str:
        return f"<dtype: '{self.name}'>"

    def __repr__(self) -> str:
        return f"tf.{self.name}"

    def __reduce__(self) -> Any:
        return DType, (self.name,)


def as_dtype(type_value: Any) -> DType:
    """A dtype from a name, a type or numpy's dtype; `TypeError` where it is none."""
    try:
        return type_value if type(type_value) is DType else DType(type_value)
    except TypeError:
        raise TypeError(f"Cannot convert the argument `type_value`: {type_value!r} to a TensorFlow DType.") from None


_NAMES = """bfloat16 bool complex64 complex128 float16 float32 float64 int8 int16 int32 int64 string uint8 uint16 uint32
uint64"""
DTYPES: dict[str, DType] = {name: DType(name) for name in _NAMES.split()}
DTYPES |= {"double": DTYPES["float64"], "half": DTYPES["float16"]}
