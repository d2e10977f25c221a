"""`tf.nest`: structures of dicts, lists, tuples, named tuples and objects of attrs classes.

Everything else is a leaf, None and shapes too.

Unlike in `jax.tree`, the leaves of every kind of dict are sorted by key, and values of several tensors
(`IndexedSlices`, `PerReplica`) are leaves, unless `expand_composites` is True.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from replicax.tf._core import IndexedSlices, Leaf, PerReplica, TensorShape, Tree, mesh_of, nest, shown


def _is_namedtuple(value: Tree) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _children(value: Tree, expand: bool = False) -> list[tuple[Any, Tree]] | None:
    """Returns the keys and children of a structure, or None for a leaf."""
    if isinstance(value, TensorShape):  # a tuple because JAX needs one; in TensorFlow it is a leaf
        return None
    if isinstance(value, Mapping):
        try:
            keys = sorted(value)
        except TypeError:
            raise TypeError(f"nest only supports dicts with sortable keys, got {list(value)!r}.") from None
        return [(key, value[key]) for key in keys]
    if _is_namedtuple(value):
        return list(zip(value._fields, value))
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if (fields := nest.attrs_fields(value)) is not None:
        return list(fields.items())
    if expand and isinstance(value, PerReplica):
        return list(enumerate(value.values))
    if expand and isinstance(value, IndexedSlices):
        shape = [] if value.dense_shape is None else [("dense_shape", value.dense_shape)]
        return [("values", value.values), ("indices", value.indices), *shape]
    return None


def _rebuilt(value: Tree, children: list[Tree]) -> Tree:
    """Returns a structure like `value` with other children, in the order of `_children`."""
    if isinstance(value, Mapping):
        new = dict(zip(sorted(value), children))
        ordered = {key: new[key] for key in value}
        if hasattr(value, "default_factory"):
            return type(value)(value.default_factory, ordered)  # type: ignore[call-arg]
        return ordered if type(value) is dict else type(value)(ordered)  # type: ignore[call-arg]
    if _is_namedtuple(value):
        return type(value)(*children)
    if isinstance(value, PerReplica):
        return PerReplica(children, mesh_of(value))
    if (fields := nest.attrs_fields(value)) is not None:
        return nest.with_attrs_fields(type(value), fields, children)
    return type(value)(*children) if isinstance(value, IndexedSlices) else type(value)(children)


def is_nested(seq: object) -> bool:
    """Returns whether a value is a structure: a dict, a list, a tuple or an object of an attrs class."""
    return _children(seq) is not None


def flatten(structure: Tree, expand_composites: bool = False) -> list[Leaf]:
    """Returns all leaves, those of dicts in the order of sorted keys."""
    return list(_leaves(structure, expand_composites))


def _leaves(structure: Tree, expand: bool) -> Iterator[Leaf]:
    children = _children(structure, expand)
    if children is None:
        yield structure
    else:
        for _, child in children:
            yield from _leaves(child, expand)


def map_structure(func: Callable[..., Leaf], *structure: Tree, **kwargs: bool) -> Tree:
    """Calls `func` with the corresponding leaves of the structures, and returns a structure like the first one.

    Args:
        func: called with a leaf of each structure.
        structure: one or more structures.
        kwargs: `check_types` and `expand_composites`, as of `assert_same_structure`.

    Raises:
        ValueError, TypeError: the structures differ, see `assert_same_structure`.
    """
    check_types, expand = kwargs.pop("check_types", True), kwargs.pop("expand_composites", False)
    if kwargs or not callable(func) or not structure:
        problem = (
            f"an unknown argument {next(iter(kwargs))!r}"
            if kwargs
            else f"{shown(func)} and {len(structure)} structures"
        )
        raise ValueError(f"map_structure takes a function and one or more structures, got {problem}.")
    for other in structure[1:]:
        assert_same_structure(structure[0], other, check_types, expand)
    groups = zip(*(flatten(s, expand) for s in structure))
    return _filled(structure[0], iter([func(*group) for group in groups]), expand)


def _filled(structure: Tree, leaves: Iterator[Leaf], expand: bool) -> Tree:
    children = _children(structure, expand)
    if children is None:
        return next(leaves)
    return _rebuilt(structure, [_filled(child, leaves, expand) for _, child in children])


def pack_sequence_as(structure: Tree, flat_sequence: object, expand_composites: bool = False) -> Tree:
    """Returns the leaves in a structure like `structure`.

    Raises:
        TypeError: `flat_sequence` is not a flat sequence.
        ValueError: the number of leaves differs.
    """
    if not isinstance(flat_sequence, (list, tuple)):
        raise TypeError(f"flat_sequence must be a list or a tuple, got {type(flat_sequence).__name__}.")
    count = len(flatten(structure, expand_composites))
    if not is_nested(structure) and count != len(flat_sequence):
        raise ValueError(f"The target structure is a leaf, but the sequence has {len(flat_sequence)} elements.")
    if count != len(flat_sequence):
        raise ValueError(
            f"Could not pack sequence. Structure had {count} atoms, but flat_sequence had {len(flat_sequence)} items. "
            f"Structure: {structure}, flat_sequence: {flat_sequence}."
        )
    return _filled(structure, iter(flat_sequence), expand_composites)


def assert_same_structure(nest1: Tree, nest2: Tree, check_types: bool = True, expand_composites: bool = False) -> None:
    """Raises if two structures differ.

    Raises:
        ValueError: one has other keys or another number of elements, or a leaf where the other has none.
        TypeError: with `check_types`, the classes of lists, tuples and dicts differ.
    """
    _compare(nest1, nest2, check_types, expand_composites, "")


def _compare(one: Tree, other: Tree, check_types: bool, expand: bool, where: str) -> None:
    parts, others = _children(one, expand), _children(other, expand)
    place = f" at {where}" if where else ""
    if (parts is None) != (others is None):
        which = ("first", "second") if others is None else ("second", "first")
        raise ValueError(
            f"The two structures don't have the same nested structure{place}. The {which[0]} has a structure where "
            f"the {which[1]} has a leaf: {one!r} and {other!r}."
        )
    if parts is None or others is None:
        return
    if check_types and not _same_type(one, other):
        raise TypeError(
            f"The two structures don't have the same sequence type{place}: {type(one).__name__} and "
            f"{type(other).__name__}."
        )
    if len(parts) != len(others):
        raise ValueError(
            f"The two structures don't have the same number of elements{place}: {len(parts)} and {len(others)}, in "
            f"{one!r} and {other!r}."
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping) and set(one) != set(other):
        raise ValueError(f"The two dictionaries don't have the same set of keys{place}: {list(one)} and {list(other)}.")
    for (key, a), (_, b) in zip(parts, others):
        _compare(a, b, check_types, expand, f"{where}[{key!r}]")


def _same_type(one: Tree, other: Tree) -> bool:
    if _is_namedtuple(one) and _is_namedtuple(other):
        return type(one).__name__ == type(other).__name__ and one._fields == other._fields
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return True
    return type(one) is type(other)
