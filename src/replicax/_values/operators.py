"""Operators and conversions of objects with the value of an array: variables and mirrored values."""

from __future__ import annotations

import contextlib
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

    # Methods of the table below, for type checkers.
    __len__: Callable[[], int]
    __iter__: Callable[[], Iterator[Leaf]]
    __float__: Callable[[], float]
    __int__: Callable[[], int]
    __complex__: Callable[[], complex]
    __bool__: Callable[[], bool]
    __index__: Callable[[], int]
    __neg__: Callable[[], Leaf]
    __pos__: Callable[[], Leaf]
    __abs__: Callable[[], Leaf]
    __invert__: Callable[[], Leaf]

    def _operand(self) -> Tree:
        """Return the array."""
        raise NotImplementedError

    def _check_other(self, other: object) -> None:
        """Raise if the object is no operand beside this one."""

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the array is computed and read."""
        return contextlib.nullcontext()

    def __jax_array__(self) -> Leaf:
        return self._operand()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._operand(), dtype=dtype)

    def __getitem__(self, index: Tree) -> Leaf:
        array = self._operand()
        return array if index is Ellipsis else array[index]

    def __format__(self, spec: str) -> str:
        return format(self._operand(), spec) if spec else str(self)


def _unary(name: str, operation: Callable[[Leaf], Leaf]) -> Callable[[ArrayOperators], Leaf]:
    def method(self: ArrayOperators) -> Leaf:
        with self._waiting():
            return operation(self._operand())

    method.__name__ = name
    return method


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


_UNARY: dict[str, Callable[[Leaf], Leaf]] = {
    **{"len": len, "iter": iter, "float": float, "int": int, "complex": complex, "bool": bool, "index": operator.index},
    **{"neg": operator.neg, "pos": operator.pos, "abs": abs, "invert": operator.invert},
}
_BINARY = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow matmul rmatmul "
    "and rand or ror xor rxor lshift rlshift rshift rrshift eq ne lt le gt ge"
)
for _name, _operation in _UNARY.items():
    setattr(ArrayOperators, f"__{_name}__", _unary(f"__{_name}__", _operation))
for _name in _BINARY.split():
    setattr(ArrayOperators, f"__{_name}__", _binary(f"__{_name}__"))
