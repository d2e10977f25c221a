"""Blocks of consecutive elements, for programs that take several steps in a call.

Each leaf has the elements' leaves along a new first axis; of a PerReplica leaf each component has. Where the elements
come from the host they are put together there, so that they go to the devices in one transfer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from replicax._base import nest
from replicax._base.types import Leaf, Tree
from replicax._data.elements import flatten, structure_of
from replicax._values import PerReplica, global_array, is_text, mesh_of, of_array


class Block:
    """Consecutive elements, stacked along a new first axis."""

    def __init__(self, element: Tree, count: int):
        self.element, self.count = element, count

    def elements(self) -> list[Tree]:
        """Returns them one by one."""
        return [nest.map_values(functools.partial(_row, place), self.element) for place in range(self.count)]


class Demand:
    """The number of elements that the user of an iterator takes at a time, told to the thread that makes them."""

    def __init__(self) -> None:
        self._now = 1, 0  # replaced as a whole, since another thread reads it

    def ask(self, size: int, position: int) -> None:
        """Notes that from `position` on elements are taken `size` at a time."""
        before, start = self._now
        if before != size or (position - start) % size:
            self._now = size, position

    def at(self, position: int) -> tuple[int, bool]:
        """Returns how many elements to make together at `position`, and whether they are as many as are asked for."""
        size, start = self._now
        left = size - (position - start) % size
        return left, left == size


def stack_on_host(parts: Sequence[Sequence[Tree]]) -> list[Tree] | None:
    """Stacks each replica's parts of several elements; returns None where they differ in shape or are no arrays.

    >>> stack_on_host([[np.int32(0), np.int32(1)], [np.int32(2), np.int32(3)]])
    [array([0, 2], dtype=int32), array([1, 3], dtype=int32)]
    """
    flat = [flatten(part) for element in parts for part in element]
    structure = flat[0][1]
    columns = [leaves for leaves, tree in flat if tree == structure]
    arrays = [a for leaves in columns for a in leaves]
    if len(columns) < len(flat) or not arrays or not all(isinstance(a, (np.ndarray, np.generic)) for a in arrays):
        return None
    kinds = [[(a.shape, a.dtype) for a in leaves] for leaves in columns]
    if any(map(is_text, arrays)) or any(of_one != kinds[0] for of_one in kinds):
        return None
    replicas = len(parts[0])
    return [structure.unflatten(list(map(np.stack, zip(*columns[i::replicas])))) for i in range(replicas)]


def stack_on_devices(elements: Sequence[Tree]) -> Tree:
    """Stacks elements that are on devices; returns None where they differ in shape or are no arrays."""
    structure = structure_of(elements[0])
    if any(structure_of(element) != structure for element in elements):
        return None
    flat = [nest.values(element) for element in elements]
    arrays = [[_array(leaf) for leaf in leaves] for leaves in flat]
    kinds = [[None if a is None else (a.shape, a.dtype) for a in leaves] for leaves in arrays]
    if any(None in of_one or of_one != kinds[0] for of_one in kinds):
        return None
    stacked = iter(_stacking(_sharding(leaf))(list(column)) for leaf, column in zip(flat[0], zip(*arrays)))
    return nest.map_values(lambda leaf: _of_array(next(stacked), leaf), elements[0])


def _array(leaf: Leaf) -> jax.Array | None:
    if isinstance(leaf, PerReplica):
        return global_array(leaf) if mesh_of(leaf) is not None else None
    return leaf if isinstance(leaf, jax.Array) else None


def _of_array(array: jax.Array, leaf: Leaf) -> Leaf:
    return of_array(PerReplica, array, mesh_of(leaf)) if isinstance(leaf, PerReplica) else array


def _sharding(leaf: Leaf) -> Sharding | None:
    """Returns the sharding of a PerReplica leaf; None for a plain array."""
    mesh = mesh_of(leaf) if isinstance(leaf, PerReplica) else None
    return None if mesh is None else mesh.stacked


@functools.cache
def _stacking(sharding: Sharding | None) -> Callable[[list[jax.Array]], jax.Array]:
    return jax.jit(functools.partial(jnp.stack, axis=_axis(sharding)), out_shardings=sharding)


def _axis(sharding: Sharding | None) -> int:
    return 0 if sharding is None else 1  # axis 0 of a PerReplica leaf is that of the replicas


def _row(place: int, leaf: Leaf) -> Leaf:
    return _of_array(_row_of(_sharding(leaf))(_array(leaf), place), leaf)


@functools.cache
def _row_of(sharding: Sharding | None) -> Callable[[jax.Array | None, int], jax.Array]:
    function = functools.partial(jax.lax.dynamic_index_in_dim, axis=_axis(sharding), keepdims=False)
    return jax.jit(function, out_shardings=sharding)
