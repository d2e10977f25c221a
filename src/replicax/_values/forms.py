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


@dataclass(frozen=True, slots=True)
class Traced:
    """The component of the replica whose function is being traced."""

    component: jax.Array


Form = Parts | Stacked | Replicated | Padded | Traced
