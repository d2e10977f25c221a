"""Plain arrays, and objects that stand for one: tests, padding to a common shape, and operators."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from replicax._base import array_conversion
from replicax._base.types import Leaf, Tree

Array: TypeAlias = np.ndarray | np.generic | jax.Array
ARRAYS = (np.ndarray, np.generic, jax.Array)  # the quickest to tell first
_Array = TypeVar("_Array", np.ndarray, jax.Array)


def part_of(array: _Array, shape: tuple[int, ...]) -> _Array:
    """Returns the leading part of an array that has this shape."""
    return array if array.shape == shape else array[tuple(slice(n) for n in shape)]


def filled(part: _Array, shape: tuple[int, ...]) -> _Array:
    """Returns `part` padded with zeros at the end of each dimension to this shape."""
    if part.shape == shape:
        return part
    padding = [(0, n - m) for m, n in zip(part.shape, shape)]
    return np.pad(part, padding) if isinstance(part, np.ndarray) else jnp.pad(part, padding)


def is_text(array: Array) -> bool:
    """Returns whether an array holds strings or objects, which JAX does not support."""
    return getattr(array.dtype, "kind", "V") in "OSU"


def is_array(value: object) -> TypeGuard[Array]:
    """Returns whether `value` is an array, of JAX (concrete or traced) or NumPy."""
    return isinstance(value, ARRAYS)


def is_numeric(value: object) -> TypeGuard[Array]:
    """Returns whether `value` is an array that JAX can take: not one of strings or objects."""
    return is_array(value) and not is_text(value)


def is_number(value: object) -> TypeGuard[Array | bool | int | float | complex]:
    """Returns whether `value` is such an array or one of Python's numbers."""
    return isinstance(value, (bool, int, float, complex)) or is_numeric(value)


def largest_of(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the smallest shape in which all of these fit."""
    return tuple(max(sizes) for sizes in zip(*shapes))


def is_global(array: object) -> bool:
    """Returns whether part of an array lies on devices of other processes."""
    return isinstance(array, jax.Array) and not array.is_fully_addressable


def holds_arrays(value: Tree) -> bool:
    """Return whether a pytree has arrays and numbers for leaves, and at least one leaf."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(is_array(leaf) or isinstance(leaf, (bool, int, float, complex)) for leaf in leaves)


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
