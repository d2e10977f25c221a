"""Variables as arrays: arithmetic, indexing and conversion to other types, all of which work on the value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from replicax._base.types import Leaf, Tree
from replicax._tracing import lost_values
from replicax._values import Mirrored, PerReplica


class ArrayProtocol:
    """Makes an object that has a value usable in place of its value."""

    __array_priority__ = 100

    value: Callable[[], Tree]
    numpy: Callable[[], Tree]

    def __jax_array__(self) -> Leaf:
        return self.value()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def __getitem__(self, index: Tree) -> Leaf:
        value = self.value()
        return value if index is Ellipsis else value[index]

    def __len__(self) -> int:
        return len(self.value())

    def __iter__(self) -> Iterator[Leaf]:
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
        return operator.index(self.value())

    def __format__(self, spec: str) -> str:
        return format(self.value(), spec) if spec else str(self)

    def __neg__(self) -> Leaf:
        return -self.value()

    def __abs__(self) -> Leaf:
        return abs(self.value())

    def __invert__(self) -> Leaf:
        return ~self.value()


def _binary(name: str) -> Callable[[ArrayProtocol, Leaf], Leaf]:
    def method(self: ArrayProtocol, other: Leaf) -> Leaf:
        if isinstance(other, ArrayProtocol):
            other = other.value()
        elif isinstance(other, PerReplica):
            raise AttributeError(
                "A PerReplica value has no dtype and is no operand of arithmetic outside of a replica: pass it to "
                "`strategy.run` and compute there."
            )
        elif isinstance(other, (Mirrored, list, tuple, np.ndarray)):
            other = jnp.asarray(other)
        return getattr(self.value(), name)(other)

    method.__name__ = name
    return method


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul "
    "and rand or ror xor rxor eq ne lt le gt ge"
)


for _name in _OPERATORS.split():
    setattr(ArrayProtocol, f"__{_name}__", _binary(f"__{_name}__"))
