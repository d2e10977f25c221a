"""Leaves of elements that consist of several arrays, such as ragged and sparse tensors: their rows.

Each kind registers what it does for the functions here. They are the same for arrays, as far as arrays allow it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from replicax._base.errors import InvalidArgumentError
from replicax._base.specs import TensorSpec
from replicax._base.types import Leaf, Tree


class Composite:
    """The base class of composite leaves: a pytree, whose own leaves do not have its rows."""

    def _replicax_rows(self) -> tuple[Leaf, int]:
        """Return the array whose length tells the number of rows, and the difference of both; None for no array."""
        return None, 0


def is_composite(value: object) -> bool:
    """Returns whether a value is a composite leaf. JAX's BCOO is one too, whose rows are not supported."""
    return isinstance(value, Composite) or type(value).__name__ == "BCOO"


def has_composites(element: Tree) -> bool:
    """Returns whether a leaf of an element is composite."""
    if type(element) is np.ndarray or (type(element) is tuple and all(type(part) is np.ndarray for part in element)):
        return False  # the common cases, without a walk
    return any(map(is_composite, leaves(element)))


def leaves(element: Tree) -> list[Leaf]:
    """Returns the leaves of an element, composite ones whole."""
    found: list[Leaf] = jax.tree.leaves(element, is_leaf=is_composite)
    return found


def on_rows(function: Callable[..., Tree], element: Tree, *others: Tree) -> Tree:
    """Applies a function to the leaves of elements, composite ones whole."""
    return jax.tree.map(function, element, *others, is_leaf=is_composite)


def refuse_composites(element: Tree, what: str) -> None:
    """Raises InvalidArgumentError if a leaf of an element is composite."""
    if has_composites(element):
        leaf = next(filter(is_composite, leaves(element)))
        raise InvalidArgumentError(
            f"A {type(leaf).__name__} cannot be {what}. Make it dense first: `to_tensor()` of a ragged one, "
            "`tf.sparse.to_dense` of a sparse one, `todense()` of JAX's."
        )


def _array(leaf: Leaf) -> Leaf:
    """Returns a leaf that is an array; raises InvalidArgumentError for a composite one of an unknown kind."""
    if is_composite(leaf):
        raise InvalidArgumentError(
            f"The rows of a {type(leaf).__name__} cannot be batched, split or cut. Make it dense first, in `map`: "
            "`batch.todense()`."
        )
    return leaf


@functools.singledispatch
def row_count(leaf: Leaf) -> int | None:
    """Returns the number of rows; None for a scalar."""
    return int(leaf.shape[0]) if _array(leaf).ndim else None


@functools.singledispatch
def row(leaf: Leaf, number: int) -> Leaf:
    """Returns one row, which is an element."""
    return _array(leaf)[number, ...]


@functools.singledispatch
def rows_between(leaf: Leaf, start: int, stop: int | None) -> Leaf:
    """Returns the rows from `start` up to `stop`, as a leaf of the same kind."""
    return _array(leaf)[start:stop]


@functools.singledispatch
def rows_at(leaf: Leaf, numbers: np.ndarray) -> Leaf:
    """Returns the rows with these numbers, as a leaf of the same kind."""
    return _array(leaf)[numbers]


@functools.singledispatch
def stacked(leaf: Leaf, *others: Leaf) -> Leaf:
    """Returns elements of one kind as the rows of a batch."""
    check_shapes([_array(leaf), *others])
    return np.stack([leaf, *others])


@functools.singledispatch
def joined(leaf: Leaf, *others: Leaf) -> Leaf:
    """Returns the rows of batches of one kind as those of one batch."""
    return np.concatenate([_array(leaf), *others])


@functools.singledispatch
def spec_of_batch(spec: Tree, size: int | None) -> Tree:
    """Returns the spec of a batch of `size` elements of this spec, None for any number."""
    return TensorSpec(None if spec.shape.rank is None else (size, *spec.shape), spec.dtype)


@functools.singledispatch
def spec_of_row(spec: Tree) -> Tree:
    """Returns the spec of the rows of what has this spec."""
    return TensorSpec(spec.shape[1:], spec.dtype)


def check_shapes(arrays: Sequence[np.ndarray], component: str = "") -> None:
    """Raises InvalidArgumentError if arrays differ in shape; `component` says which part of the elements they are."""
    shapes = [array.shape for array in arrays]
    if shapes.count(shapes[0]) == len(shapes):
        return
    for i, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise InvalidArgumentError(
                f"Cannot batch tensors with different shapes{component}. First element had shape "
                f"{list(shapes[0])} and element {i} had shape {list(shape)}. Use `padded_batch`, or "
                "`map` the elements to one shape."
            )
