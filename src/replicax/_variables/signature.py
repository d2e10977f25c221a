"""The signatures of variables, to which values are converted before they are assigned."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import array_text, nest
from replicax._base.errors import InvalidArgumentError
from replicax._base.indexed_slices import IndexedSlices
from replicax._base.types import Leaf, Tree
from replicax._collectives.arithmetic import first_component
from replicax._values import Mirrored, PerReplica, global_array, is_whole, mesh_of, traced_component
from replicax._variables.array_protocol import ArrayProtocol
from replicax._variables.as_leaves import ARRAY, convert_dtype, convert_leaf
from replicax._variables.combine import SCATTER, check_arithmetic
from replicax._variables.homes import Converted
from replicax._variables.storage import Leaves, Types


@dataclasses.dataclass(frozen=True)
class Signature:
    """The name, shapes, dtypes and structure of a variable.

    Attributes:
        name: the variable's name, for errors.
        types: the shape and dtype of each leaf.
        tree: the structure of the value; `ARRAY` for one array.
    """

    name: str
    types: Types
    tree: jax.tree_util.PyTreeDef

    def unflatten(self, leaves: Sequence[object]) -> Tree:
        """Return a value with these leaves."""
        return jax.tree.unflatten(self.tree, leaves)

    def flatten(self, value: Tree) -> list[Leaf]:
        """Return the leaves of a value, distributed values as they are; raise `ValueError` for another structure."""
        if self.tree == ARRAY:
            return [value]
        if isinstance(value, ArrayProtocol):
            value = value.value()
        leaves, tree = jax.tree.flatten(value, is_leaf=nest.is_leaf)
        if tree != self.tree:
            raise ValueError(
                f"Cannot assign to variable '{self.name}': its structure is {self.tree}, the value's {tree}."
            )
        return leaves

    def convert(self, method: str, value: Tree) -> list[Leaf]:
        """Return the leaves of a method's argument with the variable's shapes and dtypes, or the rows to scatter.

        Raises:
            TypeError: a leaf cannot be converted, or has components for replicas.
            ValueError: another structure, shape or dtype.
        """
        leaves = self.convert_components(method, value)
        for leaf in leaves:
            if isinstance(leaf, (PerReplica, Mirrored)):
                raise TypeError(f"{self.name} takes one value, got a {type(leaf).__name__} value.")
        return leaves

    def convert_components(self, method: str, value: Tree) -> list[Leaf]:
        """Do as `convert`, but allow distributed values with components of the variable's shapes and dtypes."""
        if method in SCATTER:
            return [self.convert_rows(method, value)]
        return [self._convert_leaf(leaf, kind) for leaf, kind in zip(self.flatten(value), self.types)]

    def convert_first(self, value: Tree) -> Leaves:
        """Do as `convert` for `assign`, with the first component of distributed values."""
        if not isinstance(value, ArrayProtocol):
            value = nest.map_structure(first_component, value)
        return self.convert("assign", value)

    def _convert_leaf(self, leaf: Leaf, kind: jax.ShapeDtypeStruct) -> Converted:
        if not isinstance(leaf, (PerReplica, Mirrored)):
            return convert_leaf(leaf, kind, self.name)
        component = traced_component(leaf)
        if component is not None:
            shape, dtype = component.shape, component.dtype
        elif is_whole(leaf) and (array := global_array(leaf)) is not None:
            shape, dtype = array.shape[1:] if isinstance(leaf, PerReplica) else array.shape, array.dtype
        else:
            return type(leaf)([convert_leaf(part, kind, self.name) for part in leaf.values], mesh_of(leaf))
        if shape != kind.shape or dtype != kind.dtype:
            raise ValueError(
                f"Cannot assign value to variable ' {self.name}': its shape is {kind.shape} and its dtype "
                f"{kind.dtype}, the components of the assigned {type(leaf).__name__} value have shape {shape} and "
                f"dtype {dtype}."
            )
        return leaf

    def convert_rows(self, method: str, slices: IndexedSlices) -> IndexedSlices:
        """Return rows of the variable's dtype for a scatter method.

        Raises:
            TypeError: no `IndexedSlices`, or the variable holds a pytree.
            ValueError: rows of another dtype.
            InvalidArgumentError: rows of another shape, a divisor of 0, or, outside of compiled code, an index that is
                out of range.
        """
        if not isinstance(slices, IndexedSlices):
            raise TypeError(f"sparse_delta is not IndexedSlices: {slices!r}")
        kind = self.array_type(method)
        values = convert_dtype(slices.values, kind.dtype)
        check_arithmetic(method, kind.dtype, self.name)
        indices = as_indices(method, slices.indices, kind.shape, nd=False)
        if values.shape not in ((), (*indices.shape, *kind.shape[1:])):
            raise InvalidArgumentError(
                f"{method} of {self.name}: Must have updates.shape = indices.shape + params.shape[1:] or "
                f"updates.shape = [], got updates.shape {values.shape}, indices.shape {indices.shape}, params.shape "
                f"{kind.shape}"
            )
        if method == "scatter_div" and not isinstance(values, jax.core.Tracer) and not np.all(np.asarray(values)):
            raise InvalidArgumentError(f"{method} of {self.name}: updates must not contain 0, got {values}")
        return IndexedSlices(values, indices, slices.dense_shape)

    def array_type(self, method: str) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of a variable of one array; raise `TypeError` for a method that needs one."""
        if self.tree != ARRAY:
            raise TypeError(
                f"`{method}` is for variables of one array, and {self.name} holds a pytree: {self.tree}. Take the leaf "
                "of its value that you mean, and assign the changed pytree."
            )
        return self.types[0]

    def text(self, name: str, leaves: Leaves) -> str:
        """Return what `repr` shows of a variable, or of a component with that name."""
        if self.tree == ARRAY:
            return array_text.variable_text(name, self.types[0].shape, self.types[0].dtype, leaves[0])
        size = sum(kind.size * kind.dtype.itemsize for kind in self.types)
        return f"<Variable '{name}' pytree of {len(self.types)} arrays, {size} bytes>"


def as_indices(method: str, indices: Leaf, shape: tuple[int, ...], nd: bool) -> jax.Array:
    """Return indices of rows of an array of this shape, or with `nd` of its elements or slices, as an array.

    Raises:
        InvalidArgumentError: they are no integers, have too many dimensions, or one is out of range. Compiled code
            does not know them: it writes nothing for an index that is too large, and reads 0.
    """
    places = jnp.asarray(indices)
    if not jnp.issubdtype(places.dtype, jnp.integer):
        raise InvalidArgumentError(f"{method}: indices must be integers, got dtype {places.dtype}")
    depth = (places.shape[-1] if places.ndim else 0) if nd else 1
    if depth > len(shape) or (nd and not places.ndim):
        raise InvalidArgumentError(f"{method}: indices of shape {places.shape} do not fit a variable of shape {shape}")
    if not isinstance(places, jax.core.Tracer):
        numbers = np.asarray(places)
        wrong = numbers[(numbers < 0) | (numbers >= (np.array(shape[:depth], np.int64) if nd else shape[0]))]
        if wrong.size:
            raise InvalidArgumentError(f"{method}: indices[...] = {wrong[0]} is not in a variable of shape {shape}")
    return places
