"""Variables as arrays: arithmetic, indexing and conversion to other types, all of which work on the value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from replicax._tracing import lost_values
from replicax._values import Mirrored, PerReplica


class ArrayProtocol:
    """Makes an object that has a value usable in place of its value."""

    __array_priority__ = 100

    value: Callable[[], Any]
    numpy: Callable[[], Any]

    def __jax_array__(self) -> Any:
        return self.value()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def __getitem__(self, index: Any) -> Any:
        value = self.value()
        return value if index is Ellipsis else value[index]

    def __len__(self) -> int:
        return len(self.value())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value())

    def __float__(self) -> float:
        with lost_values.explaining(self):
            return float(self.value())

    def __int__(self) -> int:
        with lost_values.explaining(self):
            return int(self.value())

    def __bool__(self) -> bool:
        with lost_values.explaining(self):
            return bool(self.value())

    def __index__(self) -> int:
        return self.value().__index__()

    def __format__(self, spec: str) -> str:
        return format(self.value(), spec) if spec else str(self)

    def __neg__(self) -> Any:
        return -self.value()

    def __abs__(self) -> Any:
        return abs(self.value())

    def __invert__(self) -> Any:
        return ~self.value()


def _binary(name: str) -> Callable[[Any, Any], Any]:
    def method(self: ArrayProtocol, other: Any) -> Any:
        if isinstance(other, ArrayProtocol):
            other = other.value()
        if isinstance(other, (PerReplica, Mirrored)):
            if isinstance(other, PerReplica):
                raise AttributeError(
                    "A PerReplica value has no dtype and is no operand of arithmetic outside of a replica: pass it to "
                    "`strategy.run` and compute there."
                )
            other = other.__jax_array__()
        value = self.value()
        if isinstance(other, (list, tuple, np.ndarray)):
            other = jnp.asarray(other)
        result = getattr(value, name)(other)
        return result

    method.__name__ = name
    return method


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul "
    "and rand or ror xor rxor eq ne lt le gt ge"
)


for _name in _OPERATORS.split():
    setattr(ArrayProtocol, f"__{_name}__", _binary(f"__{_name}__"))
