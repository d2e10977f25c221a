"""The forms in which a distributed value holds its components."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

from replicax._base.types import Leaf

Shape = tuple[int, ...]


class Kind(Protocol):
    """The shape and dtype of a component, such as the component itself has."""

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """The components of this process, which may differ in shape or be no arrays at all.

    Args:
        components: in order of replica id.
        kinds: of all replicas' components, where they are known.
        differ: whether components in other processes are known to differ in shape from those here.
    """

    components: tuple[Leaf, ...]
    kinds: Sequence[Kind] | None = None
    differ: bool = False


@dataclass(frozen=True, slots=True)
class Stacked:
    """One global array `[replicas, ...]`, sharded over its first axis: all processes know the components to be alike.

    `jax.tree.map` may have put another object in the array's place.
    """

    array: Leaf


@dataclass(frozen=True, slots=True)
class Replicated:
    """One global array of which every replica has a copy, or what `jax.tree.map` has put in its place."""

    array: Leaf


@dataclass(frozen=True, slots=True)
class Padded:
    """A stacked array of components that differ in shape, each filled up to the largest one, and all their shapes."""

    array: jax.Array
    shapes: tuple[Shape, ...]


class RowCounts:
    """How many rows each replica's part of one padded batch has, on all devices; all arrays of the batch share it.

    Args:
        array: int32 `[replicas]`, replicated.
    """

    __slots__ = ("array", "_host")

    def __init__(self, array: jax.Array, host: tuple[int, ...] | None = None):
        self.array, self._host = array, host

    @property
    def host(self) -> tuple[int, ...] | None:
        """The numbers; None where only the program that is being traced will know them."""
        if self._host is None and not isinstance(self.array, jax.core.Tracer):
            self._host = tuple(np.asarray(self.array.addressable_data(0)).tolist())
        return self._host


@dataclass(frozen=True, slots=True)
class Counted:
    """A stacked array of components whose first `counts` rows count; programs take any number of these.

    So one program computes full batches and the last one, see `_passes.padded_rows`.
    """

    array: jax.Array
    counts: RowCounts

    def shapes(self) -> list[Shape] | None:
        """Returns the shapes of all components; None where only the program will know them."""
        host, inner = self.counts.host, self.array.shape[2:]
        return None if host is None or isinstance(self.array, jax.core.Tracer) else [(n, *inner) for n in host]


@dataclass(frozen=True, slots=True)
class Traced:
    """The component of the replica whose function is being traced."""

    component: jax.Array


Form = Parts | Stacked | Replicated | Padded | Counted | Traced
