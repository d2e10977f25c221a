"""`TypeSpec`: what is known of a value before it is there, and how two of these fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from replicax._base.messages import received


class TypeSpec:
    """The base of specs: what a value is like, such as the shape and dtype of a tensor.

    A subclass has `value_type`, and `_serialize()` returns what the spec consists of: the arguments of its class.

    >>> import replicax as rx
    >>> one, other = rx.TensorSpec([2, 3]), rx.TensorSpec([2, None])
    >>> one.is_subtype_of(other), other.is_subtype_of(one)
    (True, False)
    """

    __slots__ = ()

    @property
    def value_type(self) -> type:
        """The class of the values that it describes.

        >>> import jax, replicax as rx
        >>> rx.TensorSpec((2,)).value_type is jax.Array
        True
        """
        raise NotImplementedError(f"{type(self).__name__}.value_type")

    def _serialize(self) -> tuple[Any, ...]:
        """Returns what the spec consists of."""
        raise NotImplementedError(f"{type(self).__name__}._serialize")

    @classmethod
    def _deserialize(cls, serialization: Any) -> Self:
        """Returns the spec that consists of these parts."""
        return cls(*serialization)

    def is_compatible_with(self, spec_or_value: Any) -> bool:
        """Returns whether a value, or a value of another spec, can be one that this spec describes.

        >>> import replicax as rx
        >>> rx.TensorSpec((None,)).is_compatible_with(rx.TensorSpec((2,)))
        True
        """
        other = spec_or_value
        if not isinstance(other, TypeSpec):
            if not isinstance(other, self.value_type):
                return False
            other = type(self).from_value(other)  # type: ignore[attr-defined]
        return type(other) is type(self) and _compatible(self._serialize(), other._serialize())

    def is_subtype_of(self, other: Any) -> bool:
        """Returns whether every value of this spec is one of the other.

        >>> import replicax as rx
        >>> rx.TensorSpec((None,)).is_subtype_of(rx.TensorSpec((2,)))
        False
        """
        common = self.most_specific_common_supertype([other])
        return common is not None and _key(common) == _key(other)

    def most_specific_common_supertype(self, others: Sequence[Any]) -> Self | None:
        """Returns the narrowest spec of which this and the others are subtypes; None if there is none.

        >>> import replicax as rx
        >>> rx.TensorSpec((2, 3)).most_specific_common_supertype([rx.TensorSpec((2, 4))])
        TensorSpec(shape=(2, None), dtype=float32, name=None)
        """
        common = self._serialize()
        for other in others:
            if type(other) is not type(self):
                return None
            try:
                common = _common(common, other._serialize())
            except _Differs:
                return None
        return self._deserialize(common)

    def most_specific_compatible_type(self, other: Any) -> Self:
        """Returns the narrowest spec with which both are compatible; raises `ValueError` if there is none.

        >>> import replicax as rx
        >>> rx.TensorSpec((2, 3)).most_specific_compatible_type(rx.TensorSpec((4, 3)))
        TensorSpec(shape=(None, 3), dtype=float32, name=None)
        """
        if not isinstance(other, TypeSpec):
            raise ValueError(f"Expected a TypeSpec, got {received(other)}.")
        common = self.most_specific_common_supertype([other])
        if common is None:
            raise ValueError(f"No TypeSpec is compatible with both {self} and {other}")
        return common

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TypeSpec):
            return NotImplemented
        return _key(self) == _key(other)

    def __hash__(self) -> int:
        return hash(_key(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._serialize()!r}"

    def __reduce__(self) -> tuple[Any, ...]:
        return self._deserialize, (self._serialize(),)


class _Differs(Exception):
    """Two specs have no common supertype."""


def _is_shape(part: Any) -> bool:
    return hasattr(part, "is_compatible_with") and hasattr(part, "as_list")


def _compatible(one: Any, other: Any) -> bool:
    """Returns whether the parts of two specs fit."""
    if _is_shape(one) or isinstance(one, TypeSpec):
        return type(one) is type(other) and bool(one.is_compatible_with(other))
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(_compatible(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_compatible, one, other))
    return bool(one == other)


def _common(one: Any, other: Any) -> Any:
    """Returns the narrowest parts that cover those of two specs; raises `_Differs` if there are none."""
    if type(one) is not type(other):
        raise _Differs
    if _is_shape(one):
        if None in (one.rank, other.rank) or one.rank != other.rank:
            return type(one)(None)
        return type(one)([a if a == b else None for a, b in zip(one, other)])
    if isinstance(one, TypeSpec):
        if (found := one.most_specific_common_supertype([other])) is None:
            raise _Differs
        return found
    if isinstance(one, dict) and list(one) == list(other):
        return {key: _common(one[key], other[key]) for key in one}
    if isinstance(one, (list, tuple)) and len(one) == len(other):
        parts = list(map(_common, one, other))
        if isinstance(one, list):
            return parts
        return type(one)(*parts) if hasattr(one, "_fields") else tuple(parts)
    if isinstance(one, (dict, list, tuple)) or one != other:
        raise _Differs
    return one


def _key(spec: TypeSpec) -> tuple[type, Any]:
    """Return the class of a spec and its parts, to compare and hash."""
    return type(spec), _plain(spec._serialize())


def _plain(part: Any) -> Any:
    """Returns the parts of a spec in a form that can be compared and hashed."""
    if _is_shape(part):
        return ("shape", None if part.rank is None else tuple(part))
    if isinstance(part, dict):
        return tuple((key, _plain(value)) for key, value in part.items())
    if isinstance(part, (list, tuple)):
        return (type(part).__name__, *map(_plain, part))
    return part
