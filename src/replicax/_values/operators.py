"""Operators and conversions of objects with the value of an array: variables and mirrored values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import numpy as np
from jax.typing import DTypeLike

from replicax._base import array_conversion
from replicax._base.types import Leaf, Tree


class ArrayOperators:
    """Lets an object be used in place of the array that `_operand` returns."""

    __slots__ = ()

    __array_priority__ = 100

    def _operand(self) -> Tree:
        """Return the array."""
        raise NotImplementedError

    def _check_other(self, other: object) -> None:
        """Raise if the object is no operand beside this one."""

    def __jax_array__(self) -> Leaf:
        return self._operand()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._operand(), dtype=dtype)

    def __getitem__(self, index: Tree) -> Leaf:
        array = self._operand()
        return array if index is Ellipsis else array[index]

    def __len__(self) -> int:
        return len(self._operand())

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self._operand())

    def __float__(self) -> float:
        return float(self._operand())

    def __int__(self) -> int:
        return int(self._operand())

    def __complex__(self) -> complex:
        return complex(self._operand())

    def __bool__(self) -> bool:
        return bool(self._operand())

    def __index__(self) -> int:
        return operator.index(self._operand())

    def __format__(self, spec: str) -> str:
        return format(self._operand(), spec) if spec else str(self)

    def __neg__(self) -> Leaf:
        return -self._operand()

    def __pos__(self) -> Leaf:
        return +self._operand()

    def __abs__(self) -> Leaf:
        return abs(self._operand())

    def __invert__(self) -> Leaf:
        return ~self._operand()


def _binary(name: str) -> Callable[[ArrayOperators, Leaf], Leaf]:
    def method(self: ArrayOperators, other: Leaf) -> Leaf:
        self._check_other(other)
        array = self._operand()
        if isinstance(other, ArrayOperators):
            other = other._operand()
        elif isinstance(other, (list, tuple, np.ndarray)):
            other = array_conversion.beside(other, array)
        return getattr(array, name)(other)

    method.__name__ = name
    return method


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow matmul rmatmul "
    "and rand or ror xor rxor lshift rlshift rshift rrshift eq ne lt le gt ge"
)


for _name in _OPERATORS.split():
    setattr(ArrayOperators, f"__{_name}__", _binary(f"__{_name}__"))
