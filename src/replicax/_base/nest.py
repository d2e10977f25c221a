"""Mapping and flattening structures: dicts, lists, tuples, named tuples, and whatever else is registered as a pytree.

Objects of attrs classes are structures too, as in TensorFlow: their classes are registered when the first is seen.

`jax.tree` sorts the keys of dicts and wants every replica's structure flattened alike; here order is kept,
and a difference between replicas is an error that says where.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from replicax._base.types import Leaf, Tree


class LeafBase:
    """A base for classes that are leaves of structures although JAX may know them as pytrees.

    Objects of other classes are asked by their method `_replicax_leaf`, if they have one.
    """

    __slots__ = ()


def is_leaf(value: Tree) -> bool:
    """Returns whether JAX is not to look into an object; for `is_leaf=` of `jax.tree` functions."""
    if isinstance(value, LeafBase):
        return True
    kind: Any = type(value)
    if hasattr(kind, "__attrs_attrs__"):
        _register_attrs(kind)
    return hasattr(kind, "_replicax_leaf") and bool(value._replicax_leaf())


def _is_attrs_class(kind: Any) -> bool:
    """Return whether a class is one of attrs, without a `__new__` such as exceptions have."""
    return hasattr(kind, "__attrs_attrs__") and kind.__new__ is object.__new__


def attrs_fields(value: Tree) -> dict[str, Tree] | None:
    """Return the fields of an object of an attrs class, by name; None for other objects."""
    kind: Any = type(value)
    if not _is_attrs_class(kind):
        return None
    return {field.name: getattr(value, field.name) for field in kind.__attrs_attrs__ if hasattr(value, field.name)}


def with_attrs_fields(kind: type, names: Iterable[str], children: Iterable[Tree]) -> Tree:
    """Return an object of an attrs class with these fields. Its constructor, which may check them, is not called."""
    value: Tree = object.__new__(kind)
    for name, child in zip(names, children):
        object.__setattr__(value, name, child)  # which frozen classes allow
    return value


@functools.cache
def _register_attrs(kind: Any) -> None:
    """Make a class of attrs a pytree, unless the program has."""

    def flatten(value: Tree) -> tuple[list[tuple[object, Tree]], tuple[str, ...]]:
        fields = attrs_fields(value) or {}
        return [(jax.tree_util.GetAttrKey(name), child) for name, child in fields.items()], tuple(fields)

    def unflatten(names: tuple[str, ...], children: Iterable[Tree]) -> Tree:
        return with_attrs_fields(kind, names, children)

    if _is_attrs_class(kind) and jax.tree_util.all_leaves([object.__new__(kind)]):
        jax.tree_util.register_pytree_with_keys(kind, flatten, unflatten)


def is_namedtuple(value: Tree) -> bool:
    """Returns whether `value` is an instance of a named tuple class."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _one_level(value: Tree) -> tuple[list[Tree], jax.tree_util.PyTreeDef] | None:
    """Returns children and tree of a registered pytree node, None for a leaf."""
    children, tree = jax.tree.flatten(value, is_leaf=lambda node: node is not value)
    if len(children) == 1 and children[0] is value:
        return None
    return children, tree


def map_structure(fn: Callable[[Leaf], object], nest: Tree, stop: Callable[[Tree], bool] = is_leaf) -> Tree:
    """Applies `fn` to every leaf and returns the results in the same structure; `stop` tells leaves from structures."""
    if nest is None or stop(nest):
        return fn(nest)
    if type(nest) is dict:
        return {key: map_structure(fn, child, stop) for key, child in nest.items()}
    if is_namedtuple(nest):
        return type(nest)(*(map_structure(fn, child, stop) for child in nest))
    if type(nest) in (list, tuple):
        return type(nest)(map_structure(fn, child, stop) for child in nest)
    if isinstance(nest, (np.ndarray, jax.Array)) or (level := _one_level(nest)) is None:
        return fn(nest)
    children, tree = level
    return jax.tree.unflatten(tree, [map_structure(fn, child, stop) for child in children])


def leaves(nest: Tree, stop: Callable[[Tree], bool] = is_leaf) -> list[Leaf]:
    """Returns every leaf, None included, in the order of the structure; `stop` tells leaves from structures."""
    found: list[Leaf] = []
    map_structure(found.append, nest, stop)
    return found


def values(nest: Tree) -> list[Leaf]:
    """Returns every leaf but None, which for JAX, too, is a part of the structure."""
    return [leaf for leaf in leaves(nest) if leaf is not None]


def map_values(fn: Callable[[Leaf], object], nest: Tree) -> Tree:
    """Applies `fn` to every leaf but None and returns the results in the same structure."""
    return map_structure(lambda leaf: None if leaf is None else fn(leaf), nest)


def merge(nests: Sequence[Tree], fn: Callable[[Sequence[Leaf]], object]) -> Tree:
    """Returns one structure for several alike: `fn` of the leaves at the same path in each.

    Raises:
        AssertionError: the structures differ; the message says how.
    """
    first = nests[0]
    if first is None or is_leaf(first):
        return fn(nests)
    if isinstance(first, dict) and type(first) is dict:
        _check_types(nests)
        for other in nests[1:]:
            assert set(other) == set(first), f"v[0].keys: {set(first)}  v[i].keys: {set(other)}"
        return {key: merge([nest[key] for nest in nests], fn) for key in first}
    if isinstance(first, (list, tuple)) and (type(first) in (list, tuple) or is_namedtuple(first)):
        _check_types(nests)
        for other in nests[1:]:
            assert len(other) == len(first), f"len(v) == {len(other)}, len(v0) == {len(first)}, v: {other}, v0: {first}"
        children = [merge(group, fn) for group in zip(*nests)]
        return type(first)(*children) if is_namedtuple(first) else type(first)(children)
    if isinstance(first, (np.ndarray, jax.Array)) or (level := _one_level(first)) is None:
        return fn(nests)
    _check_types(nests)
    levels = [level, *(_one_level(nest) for nest in nests[1:])]
    trees = [found[1] for found in levels if found]
    assert all(tree == trees[0] for tree in trees), f"the replicas' structures differ: {trees}"
    return jax.tree.unflatten(trees[0], [merge(group, fn) for group in zip(*(found[0] for found in levels if found))])


def _check_types(nests: Sequence[Tree]) -> None:
    kinds = {type(nest) for nest in nests}
    assert len(kinds) == 1, "the replicas' structures differ: one has a " + ", another a ".join(
        sorted(k.__name__ for k in kinds)
    )


def is_same(one: Leaf, other: Leaf) -> bool:
    """Returns whether two leaves are one object, or values of one type that are equal."""
    return one is other or (type(one) is type(other) and bool(np.all(one == other)))
