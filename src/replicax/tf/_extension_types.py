"""`tf.experimental.ExtensionType`: classes of fields that are tensors, or values that are the same in every call.

An extension type is a frozen dataclass and a pytree. Fields that are tensors, or have tensors in them, are its
children; all others belong to its structure, so a function is traced again when one of them changes.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, Self, TypeAlias, dataclass_transform

import jax
import numpy as np

from replicax.tf._core import TensorShape, Tree, TypeSpec, as_dtype
from replicax.tf._dtypes import DType
from replicax.tf._host import Tensor
from replicax.tf._ops import convert_to_tensor
from replicax.tf._type_specs import type_spec_from_value

# The names of the fields that are children, and the other fields.
_Structure: TypeAlias = "tuple[tuple[str, ...], tuple[tuple[str, Tree], ...]]"


@dataclass_transform(frozen_default=True)
class ExtensionType:
    """The base of classes with typed fields, of which those that are tensors may differ from call to call.

    Fields are declared with annotations, as in a dataclass: `tf.Tensor`, other extension types, `tf.RaggedTensor` and
    the like, `tf.TensorShape`, `tf.DType`, numbers, strings, `tuple[X, ...]`, `Mapping[str, X]` and unions of these.
    Arguments are converted: an argument of a field of type `tf.Tensor` becomes a tensor. A method `__validate__` is
    called when an object is made.

    >>> import replicax.tf as tf
    >>> class Interval(tf.experimental.ExtensionType):
    ...     low: tf.Tensor
    ...     high: tf.Tensor
    ...     unit: str = "m"
    >>> tf.function(lambda i: i.high - i.low)(Interval([1.0, 2.0], 5.0)).numpy().tolist()
    [4.0, 3.0]
    """

    Spec: typing.ClassVar[type[ExtensionTypeSpec]]

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        own_init = "__init__" in vars(cls)
        dataclasses.dataclass(init=not own_init, repr=False, eq=False)(cls)
        scope = sys._getframe(1)  # where the class is written: names in annotations may be local there
        names = {**scope.f_globals, **scope.f_locals} if scope.f_locals is not scope.f_globals else scope.f_globals
        cls.__init__ = _constructor(cls, cls.__init__, names)  # type: ignore[method-assign]
        cls.Spec = type("Spec", (ExtensionTypeSpec,), {"_of": cls, "__qualname__": f"{cls.__qualname__}.Spec"})
        jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, _unflattener(cls))

    def __validate__(self) -> None:
        """Raises an error if the fields do not fit together; subclasses have their own."""

    def __setattr__(self, name: str, value: object) -> None:
        if "_made" in vars(self):
            raise AttributeError(f"Cannot mutate attribute `{name}` outside the custom constructor of ExtensionType.")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"Cannot mutate attribute `{name}` outside the custom constructor of ExtensionType.")

    def __repr__(self) -> str:
        fields = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in dataclasses.fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({fields})"

    def __eq__(self, other: object) -> jax.Array | bool:  # type: ignore[override]
        if type(other) is not type(self):
            return False
        (ours, structure), (theirs, other_structure) = jax.tree.flatten(self), jax.tree.flatten(other)
        pairs = list(zip(ours, theirs))
        same: bool = structure == other_structure  # type: ignore[operator]
        if not same or any(np.shape(a) != np.shape(b) for a, b in pairs):
            return False
        return convert_to_tensor(all(bool(np.all(a == b)) for a, b in pairs))

    __hash__ = None  # type: ignore[assignment]


class ExtensionTypeSpec(TypeSpec):
    """The spec of an extension type: specs of the fields that are tensors, and the values of the others."""

    _of: type[ExtensionType]

    def __init__(self, *args: Tree, **fields: Tree) -> None:
        names = [each.name for each in dataclasses.fields(self._of)]  # type: ignore[arg-type]
        self._fields_of = {**dict(zip(names, args)), **fields}

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["_fields_of"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__qualname__} has no field {name!r}", name=name) from None

    @property
    def value_type(self) -> type:
        """The extension type."""
        return self._of

    @classmethod
    def from_value(cls, value: ExtensionType) -> Self:
        """Returns the spec of an object."""
        return cls(**{name: _spec(each) for name, each in as_dict(value).items()})

    def _serialize(self) -> tuple[object, ...]:
        return tuple(self._fields_of.items())

    @classmethod
    def _deserialize(cls, serialization: Iterable[tuple[str, Tree]]) -> Self:
        return cls(**dict(serialization))

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{k}={v!r}' for k, v in self._fields_of.items())})"


def as_dict(value: ExtensionType) -> dict[str, Tree]:
    """Returns the fields of an object by name."""
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}  # type: ignore[arg-type]


def _spec(value: Tree) -> Tree:
    if isinstance(value, (tuple, list)) and not isinstance(value, TensorShape):
        return tuple(map(_spec, value))
    if isinstance(value, dict):
        return {key: _spec(each) for key, each in value.items()}
    return type_spec_from_value(value) if _holds_tensors(value) else value


def _holds_tensors(value: Tree) -> bool:
    """Returns whether a value of a field is a tensor, or may have tensors in it."""
    if isinstance(value, (tuple, list)) and not isinstance(value, TensorShape):
        return any(map(_holds_tensors, value))
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    plain = (bool, int, float, complex, str, bytes, type(None), TensorShape, np.dtype, TypeSpec, type)
    return not isinstance(value, plain)


def _constructor(cls: type[ExtensionType], init: Callable[..., None], names: dict[str, object]) -> Callable[..., None]:
    """Returns `__init__` of an extension type, which converts the fields, validates them and lets nothing be set."""

    @functools.wraps(init)
    def __init__(self: ExtensionType, *args: Tree, **kwargs: Tree) -> None:
        init(self, *args, **kwargs)
        if type(self) is not cls:
            return  # called by the constructor of a subclass
        hints = typing.get_type_hints(cls, localns=names)
        for each in dataclasses.fields(cls):  # type: ignore[arg-type]
            value = _converted(getattr(self, each.name), hints[each.name], each.name)
            object.__setattr__(self, each.name, value)
        self.__validate__()
        object.__setattr__(self, "_made", True)

    return __init__


def _converted(value: Tree, hint: Any, field: str) -> Tree:
    """Returns an argument as the type that a field declares; raises `TypeError` if it is none of it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Tensor:
        return value if isinstance(value, TypeSpec) else convert_to_tensor(value)
    if hint is TensorShape:
        return TensorShape(value)
    if hint is DType:
        return as_dtype(value)
    if origin in (typing.Union, types.UnionType):
        for each in sorted(inner, key=lambda kind: kind is Tensor):  # a tensor can be made of nearly anything
            try:
                return _converted(value, each, field)
            except (TypeError, ValueError):
                continue
    elif origin is tuple and isinstance(value, (tuple, list)):
        kinds = [inner[0]] * len(value) if inner[-1:] == (...,) else inner
        if len(kinds) == len(value):
            return tuple(_converted(each, kind, field) for each, kind in zip(value, kinds))
    elif origin in (dict, collections.abc.Mapping) and isinstance(value, collections.abc.Mapping):
        return {key: _converted(each, inner[1], field) for key, each in value.items()}
    elif (
        origin is typing.Literal
        and value in inner
        or hint is Any
        or isinstance(hint, type)
        and (isinstance(value, hint) or hint is float and type(value) is int)
    ):
        return value
    wanted = getattr(hint, "__name__", str(hint))
    raise TypeError(f"{field}: expected {wanted!r}, got {type(value).__name__!r}")


def _flatten_with_keys(value: ExtensionType) -> tuple[list[tuple[jax.tree_util.GetAttrKey, Tree]], _Structure]:
    children, plain = [], []
    for each in dataclasses.fields(value):  # type: ignore[arg-type]
        part = getattr(value, each.name)
        if _holds_tensors(part):
            children.append((jax.tree_util.GetAttrKey(each.name), part))
        else:
            plain.append((each.name, tuple(part.items()) if isinstance(part, dict) else part))
    names = tuple(key.name for key, _ in children)
    return children, (names, tuple(plain))


def _unflattener(cls: type[ExtensionType]) -> Callable[[_Structure, Iterable[Tree]], ExtensionType]:
    def unflatten(structure: _Structure, children: Iterable[Tree]) -> ExtensionType:
        value = object.__new__(cls)
        names, plain = structure
        for name, part in (*zip(names, children), *plain):
            object.__setattr__(value, name, part)
        object.__setattr__(value, "_made", True)
        return value

    return unflatten


class BatchableExtensionType(ExtensionType):
    """An extension type whose tensors have a batch dimension in common, as elements of datasets have."""
