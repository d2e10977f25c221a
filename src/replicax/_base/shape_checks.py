"""What `TensorShape` says about ranks and about other shapes: checks that raise errors, and what two shapes share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


class Dimension:
    """One dimension of a shape as `TensorShape.dims` lists it: `value` is its size, None where it is not known.

    It can be used as an integer where its size is known. Arithmetic with one that is not known gives such a one.

    >>> int(Dimension(3)), Dimension(3) == 3, Dimension(3) + 1, Dimension(None) * 2
    (3, True, Dimension(4), Dimension(None))
    """

    __slots__ = ("_value",)

    def __init__(self, value: Any):
        size = _size(value)
        self._value: int | None = None if size is None else operator.index(size)

    @property
    def value(self) -> int | None:
        """The size, or None."""
        return self._value

    def __index__(self) -> int:
        if self._value is None:
            raise TypeError("The size of this dimension is not known.")
        return self._value

    __int__ = __index__

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.__index__(), dtype)

    def __eq__(self, other: object) -> Any:
        found = _size(other)
        return None if None in (self._value, found) else self._value == found

    def __ne__(self, other: object) -> Any:
        found = _size(other)
        return None if None in (self._value, found) else self._value != found

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return f"Dimension({self._value})"

    def __str__(self) -> str:
        return "?" if self._value is None else str(self._value)


def _size(value: Any) -> Any:
    return value.value if isinstance(value, Dimension) else value


def _calculating(compute: Callable[[int, int], int], swapped: bool) -> Callable[[Dimension, Any], Dimension]:
    def method(self: Dimension, other: Any) -> Dimension:
        one, two = self.value, _size(other)
        if one is None or two is None:
            return Dimension(None)
        return Dimension(compute(two, one) if swapped else compute(one, two))

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(Dimension, f"__{_name}__", _calculating(getattr(operator, _name), False))
    setattr(Dimension, f"__r{_name}__", _calculating(getattr(operator, _name), True))


class ShapeChecks:
    """The methods of `TensorShape` that compare it with a rank or with another shape."""

    @property
    def dims(self: Any) -> list[Dimension] | None:
        """The dimensions as objects with a `value`; None where the rank is not known."""
        return None if self.rank is None else [Dimension(n) for n in self.as_list()]

    def with_rank(self: Any, rank: int | None) -> Any:
        """Returns the shape, which must have this rank; one of unknown rank becomes one of unknown dimensions.

        Raises:
            ValueError: the shape has another rank.
        """
        if rank is None:
            return self
        self.assert_has_rank(rank)
        return type(self)([None] * rank) if self.rank is None else self

    def with_rank_at_least(self: Any, rank: int) -> Any:
        """Returns the shape; raises `ValueError` if its rank is known and smaller."""
        if self.rank is not None and self.rank < rank:
            raise ValueError(f"Shape {self} must have rank at least {rank}")
        return self

    def with_rank_at_most(self: Any, rank: int) -> Any:
        """Returns the shape; raises `ValueError` if its rank is known and larger."""
        if self.rank is not None and self.rank > rank:
            raise ValueError(f"Shape {self} must have rank at most {rank}")
        return self

    def assert_has_rank(self: Any, rank: int) -> None:
        """Raises `ValueError` if the rank is known and another one."""
        if self.rank not in (None, rank):
            raise ValueError(f"Shape {self} must have rank {rank}")

    def assert_same_rank(self: Any, other: Any) -> None:
        """Raises `ValueError` if both ranks are known and differ."""
        other = type(self)(other)
        if None not in (self.rank, other.rank) and self.rank != other.rank:
            raise ValueError(f"Shapes {self} and {other} must have the same rank")

    def assert_is_fully_defined(self: Any) -> None:
        """Raises `ValueError` if a dimension, or the rank, is not known."""
        if not self.is_fully_defined():
            raise ValueError(f"Shape {self} is not fully defined")

    def merge_with(self: Any, other: Any) -> Any:
        """Returns the shape with what is known of either; raises `ValueError` if they are not compatible."""
        other = type(self)(other)
        if not self.is_compatible_with(other):
            raise ValueError(f"Shapes {self} and {other} are not compatible")
        if self.rank is None or other.rank is None:
            return other if self.rank is None else self
        return type(self)([b if a is None else a for a, b in zip(self.as_list(), other.as_list())])

    def most_specific_compatible_shape(self: Any, other: Any) -> Any:
        """Returns the shape with what both have in common: the dimensions that differ are not known."""
        other = type(self)(other)
        if self.rank is None or self.rank != other.rank:
            return type(self)(None)
        return type(self)([a if a == b else None for a, b in zip(self.as_list(), other.as_list())])

    def is_subtype_of(self: Any, other: Any) -> bool:
        """Returns whether every tensor of this shape has the other one, too."""
        if not isinstance(other, type(self)):
            return False
        return other.rank is None or (
            self.rank == other.rank and all(b is None or a == b for a, b in zip(self.as_list(), other.as_list()))
        )

    def most_specific_common_supertype(self: Any, others: Iterable[Any]) -> Any:
        """Returns the shape with what it has in common with all others; None if one of them is no shape."""
        found = self
        for other in others:
            if not isinstance(other, type(self)):
                return None
            found = found.most_specific_compatible_shape(other)
        return found
