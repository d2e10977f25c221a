"""Arguments, results and defaults of functions, as the record of a saved model has them."""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from replicax._base import json_values, nest
from replicax._base.specs import TensorSpec, as_dtype
from replicax._base.types import Tree


class Place(NamedTuple):
    """Stands for a tensor: the number of its array among a function's arguments or results, and its spec."""

    number: int
    spec: TensorSpec


class _Unknown:
    """The default of a parameter that could not be saved."""

    def __repr__(self) -> str:
        return "<captured_default_value>"


UNKNOWN = _Unknown()


def encoded(value: Tree) -> Any:
    """Returns a structure of places, specs and plain values as JSON; raises `TypeError` where it has other values."""
    return json_values.encoded(value, _encoded_leaf)


def _encoded_leaf(value: Any) -> dict[str, Any] | None:
    if isinstance(value, Place):
        return {"place": [value.number, *_parts(value.spec)]}
    if isinstance(value, TensorSpec):
        return {"spec": _parts(value)}
    if value is UNKNOWN:
        return {"unknown": None}
    if isinstance(value, np.dtype):
        return {"dtype_itself": value.name}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if nest.is_namedtuple(value):
        fields = {name: json_values.encoded(item, _encoded_leaf) for name, item in value._asdict().items()}
        return {"named": [type(value).__name__, fields]}
    return None


def decoded(told: Any) -> Tree:
    """Returns the structure that `encoded` was given; named tuples are of classes of their own."""
    return json_values.decoded(told, _DECODERS)


def _parts(spec: TensorSpec) -> list[Any]:
    shape = None if spec.shape.rank is None else spec.shape.as_list()
    return [shape, "string" if spec.dtype == np.dtype(object) else spec.dtype.name, spec.name]


def _named(told: Sequence[Any]) -> Tree:
    name, fields = told
    return namedtuple(name, fields)(**{field: decoded(item) for field, item in fields.items()})  # type: ignore[misc]


_DECODERS: json_values.Decoders = {
    "place": lambda told: Place(told[0], TensorSpec(*told[1:])),
    "spec": lambda told: TensorSpec(*told),
    "unknown": lambda told: UNKNOWN,
    "dtype_itself": as_dtype,
    "complex": lambda told: complex(*told),
    "named": _named,
}


def placed(nested: Tree, arrays: Sequence[jax.Array]) -> Tree:
    """Returns a structure with arrays for its places."""
    return mapped(lambda leaf: arrays[leaf.number] if isinstance(leaf, Place) else leaf, nested)


def mapped(fn: Callable[[Any], Any], nested: Tree) -> Tree:
    """Applies `fn` to every leaf of dicts, lists and tuples, None and places included."""
    if isinstance(nested, dict):
        return {key: mapped(fn, item) for key, item in nested.items()}
    if isinstance(nested, (list, tuple)) and not isinstance(nested, Place):
        items = [mapped(fn, item) for item in nested]
        return type(nested)(*items) if nest.is_namedtuple(nested) else type(nested)(items)
    return fn(nested)


def places(nested: Tree) -> list[Place]:
    """Returns the places in a structure."""
    found: list[Place] = []
    mapped(lambda leaf: found.append(leaf) if isinstance(leaf, Place) else None, nested)
    return found


# The parameters of Python functions.


def encoded_parameters(signature: inspect.Signature) -> list[list[Any]]:
    """Returns name, kind and default of each parameter as JSON; no default is an empty list."""
    return [[p.name, p.kind.name, _encoded_default(p.default)] for p in signature.parameters.values()]


def _encoded_default(default: Any) -> list[Any]:
    if default is inspect.Parameter.empty:
        return []
    try:
        return [encoded(default)]
    except TypeError:
        return [encoded(UNKNOWN)]


def decoded_signature(parameters: Sequence[Sequence[Any]]) -> inspect.Signature:
    """Returns the signature that `encoded_parameters` was given."""
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(name, inspect._ParameterKind[kind], default=decoded(default[0]) if default else empty)
            for name, kind, default in parameters
        ]
    )
