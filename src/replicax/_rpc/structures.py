"""Structures of tensors and specs as JSON, which tells a client what a function takes and returns."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax

from replicax._base import nest
from replicax._base.messages import received
from replicax._base.specs import TensorSpec
from replicax._base.types import Leaf, Tree


def is_leaf(value: Tree) -> bool:
    """Returns whether a value is a tensor, a variable or a spec, for `is_leaf=` of `jax.tree` functions."""
    return isinstance(value, TensorSpec) or nest.is_leaf(value)


def leaves(structure: Tree) -> list[Leaf]:
    """Returns the tensors or specs of a structure, those of dicts in the order of their keys, as TensorFlow does."""
    found: list[Leaf] = jax.tree.leaves(structure, is_leaf=is_leaf)
    return found


def described(structure: Tree) -> Any:
    """Returns a structure as JSON, with each leaf replaced by its number among `leaves`.

    Raises:
        TypeError: it has other parts than dicts, lists, tuples, named tuples, None, and tensors.
    """
    values, tree = jax.tree.flatten(structure, is_leaf=is_leaf)
    return _described(jax.tree.unflatten(tree, range(len(values))))


def _described(part: Tree) -> Any:
    if part is None or type(part) is int:
        return part
    if type(part) is dict and all(isinstance(key, (str, int)) for key in part):
        return {"dict": [[key, _described(child)] for key, child in part.items()]}
    if nest.is_namedtuple(part):
        return {"named": [type(part).__name__, *part._fields], "children": [_described(child) for child in part]}
    if type(part) in (list, tuple):
        return {type(part).__name__: [_described(child) for child in part]}
    raise TypeError(
        "Functions for remote calls take and return dicts, lists, tuples and named tuples of tensors, got "
        f"{received(part)}."
    )


def rebuilt(description: Any, values: Sequence[Leaf]) -> Tree:
    """Returns the structure that `described` has described, with these leaves.

    Named tuples have a class of their own, which is no pytree of the class that was described.
    """
    if description is None:
        return None
    if isinstance(description, int):
        return values[description]
    if "dict" in description:
        return {key: rebuilt(child, values) for key, child in description["dict"]}
    if "named" in description:
        name, *fields = description["named"]
        return collections.namedtuple(name, fields)(*(rebuilt(child, values) for child in description["children"]))
    ((kind, children),) = description.items()
    return (list if kind == "list" else tuple)(rebuilt(child, values) for child in children)
