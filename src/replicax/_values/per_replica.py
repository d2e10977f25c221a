"""Values that have one component for each replica.

`PerReplica` has three forms behind one class. *Stacked*: one global array of shape `[replicas, ...]`, sharded
over its first axis; it enters and leaves compiled code as it is. *Parts*: a tuple with the components of this
process, which may differ in shape or be no arrays at all. *Padded*: a stacked array of components that differ in
shape, each filled up to the largest one, and their shapes, for compiled code. `Mirrored` likewise is one fully
replicated array, or its copies. Each form is made from another when it is first asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import jax_internals, nest, pickling
from replicax._values import errors
from replicax._values.arrays import filled, is_array, is_text, largest_of, part_of
from replicax._values.mesh import AXIS, ReplicaMesh


def _can_be_padded(parts: Sequence[Any], kinds: Sequence[Any], mesh: ReplicaMesh) -> bool:
    """Whether these components can be, where `kinds` tell the shapes and dtypes of those of all replicas.

    All processes come to the same, since they compare what all of them know.
    """
    return (
        not mesh.logical_axes
        and len(kinds) == mesh.size
        and all(is_array(part) and not is_text(part) for part in parts)
        and not any(jax.dtypes.issubdtype(part.dtype, jax.dtypes.extended) for part in parts)
        and all(kind.dtype == kinds[0].dtype and kind.ndim == kinds[0].ndim for kind in kinds)
    )


class DistributedValues(nest.Leaf):
    """The base of values with a component for each replica: `PerReplica`, `Mirrored` and distributed variables."""

    __slots__ = ()

    _is_mirrored = False  # whether it is the same on every replica

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this process's replicas, in order."""
        raise NotImplementedError

    def _as_distributed(self) -> Any:
        """Returns the value as `PerReplica` or `Mirrored`; of a variable, its current value."""
        return self

    def _text(self, show) -> str:
        lines = ",\n".join(f"  {index}: {show(value)}" for index, value in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{lines}\n}}"

    def __str__(self) -> str:
        return self._text(str)

    def __repr__(self) -> str:
        return self._text(repr)


class Value(DistributedValues):
    """What `PerReplica` and `Mirrored` share: parts, a global array, and the mesh to go between them."""

    __slots__ = ("__weakref__", "_array", "_local", "_padded", "_parts", "kinds", "mesh", "ragged", "whole")

    kinds: Sequence[Any] | None  # what has the shapes and dtypes of all replicas' components, where that is known

    ragged: bool  # whether components in other processes are known to differ in shape from those here
    whole: bool  # whether it was made as one array, so that all processes know it to be one

    def __init__(self, values: Sequence[Any], mesh: ReplicaMesh | None = None, ragged: bool = False):
        self._parts: tuple[Any, ...] | None = tuple(values)
        self.ragged, self.whole, self.kinds = ragged, False, None
        self._array: Any = None
        self._local: Any = None
        self._padded: Any = None
        self.mesh = mesh

    @classmethod
    def of_array(cls, array: jax.Array, mesh: Any):
        """The value whose global form this array is."""
        self = cls.__new__(cls)
        self._parts, self._array, self._local, self.mesh, self.ragged = None, array, None, mesh, False
        self._padded, self.kinds, self.whole = None, None, True
        return self

    @classmethod
    def of_local(cls, component: Any, mesh: Any):
        """The value as one replica sees it while a replica function is traced: its own component, symbolically."""
        self = cls.__new__(cls)
        self._parts, self._array, self._local, self.mesh, self.ragged = None, None, component, mesh, False
        self._padded, self.kinds, self.whole = None, None, False
        return self

    def __copy__(self) -> Value:
        return self  # which nothing changes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (pickling.stored(self.values),)  # without devices, which another process need not have

    def uniform(self) -> bool:
        """Whether the components here are arrays of one shape and dtype."""
        parts = self._parts
        return (
            self.mesh is not None
            and parts is not None
            and not self.ragged
            and len(parts) == len(self.mesh.local_ids)
            and all(is_array(part) and not is_text(part) for part in parts)
            and all(part.shape == parts[0].shape and part.dtype == parts[0].dtype for part in parts)
        )

    def array(self) -> jax.Array | None:
        """The global form, None where the components have none (they differ in shape, or are no arrays)."""
        if self._array is not None and not isinstance(self._array, jax.Array):
            return None
        if self._array is None and self._local is None and self.uniform():
            assert self._parts is not None and self.mesh is not None
            if any(isinstance(part, jax.core.Tracer) for part in self._parts):
                return self._join_traced(self._parts)
            parts = [np.asarray(part) if isinstance(part, np.generic) else part for part in self._parts]
            with jax_internals.at_once():
                self._array = self._join(parts)
        return self._array

    def _join(self, parts: Sequence[Any]) -> jax.Array:
        raise NotImplementedError

    def _join_traced(self, parts: Sequence[Any]) -> jax.Array:
        raise NotImplementedError


# Components that came bare out of compiled programs, by id: there is one of that shape on every replica of the mesh.
_bare: dict[int, tuple[weakref.ref, ReplicaMesh]] = {}

_uneven: dict[int, weakref.ref] = {}  # and those of which other replicas have some of other shapes


class PerReplica(errors.NotATensor, Value):
    """A value with a component of its own for each replica.

    `values` is the tuple of the components of this process. It is no tensor: pass it to `Strategy.run`, in
    whose function it is the replica's component, or to `Strategy.reduce`. As a pytree it is its stacked array.

    >>> import replicax as rx
    >>> rx.PerReplica([1, 2])
    PerReplica:{
      0: 1,
      1: 2
    }
    """

    __slots__ = ()

    @classmethod
    def of_kinds(cls, values: Sequence[Any], kinds: Sequence[Any], mesh: ReplicaMesh) -> PerReplica:
        """The value with these components here, where `kinds` have the shapes and dtypes of those of all replicas."""
        self = cls(values, mesh)
        if not mesh.all_local:  # else they are there to be looked at
            self.know(kinds)
        return self

    def know(self, kinds: Sequence[Any]) -> None:
        """Takes note of the shapes and dtypes of all replicas' components."""
        self.kinds, self.ragged = kinds, len({(kind.shape, str(kind.dtype)) for kind in kinds}) > 1

    def to_be_compared(self) -> bool:
        """Whether these are arrays of which other processes might have some of other shapes."""
        parts, mesh = self._parts, self.mesh
        if parts is None or mesh is None or mesh.all_local or len(parts) != len(mesh.local_ids):
            return False
        known = self.kinds is not None or self._array is not None or self._padded is not None
        return not known and all(is_array(p) and not is_text(p) and not isinstance(p, jax.core.Tracer) for p in parts)

    @classmethod
    def of_padded(cls, array: Any, shapes: Sequence[tuple[int, ...]], mesh: Any) -> PerReplica:
        """The value with components of these shapes, all replicas', with which the rows of `array` begin."""
        self = cls.of_local(None, mesh)
        self._padded, self.ragged = (array, tuple(shapes)), not mesh.all_local
        return self

    @classmethod
    def from_host(cls, parts: Sequence[Any], kinds: Sequence[Any], mesh: ReplicaMesh) -> PerReplica | None:
        """The value with these components of the host, put on the devices stacked or padded; None where it cannot be.

        Args:
            parts: the components of this process.
            kinds: what has the shapes and dtypes of those of all processes, in order of replica id.
            mesh: where to put them.
        """
        if not _can_be_padded(parts, kinds, mesh):
            return None
        shapes = [kind.shape for kind in kinds]
        array = mesh.stack([filled(part, largest_of(shapes)) for part in parts])
        return cls.of_array(array, mesh) if len(set(shapes)) == 1 else cls.of_padded(array, shapes, mesh)

    def padded(self) -> tuple[Any, tuple[tuple[int, ...], ...]] | None:
        """The padded form of components that differ in shape, and the shapes; None where there is none.

        There is one of numeric components with equal dtypes and ranks, on a device each, where all shapes are known:
        where all are in this process, or in what came of a dataset or out of a program.
        """
        parts, mesh = self._parts, self.mesh
        if self._padded is not None or self._array is not None or parts is None:
            return self._padded
        kinds = parts if self.kinds is None else self.kinds
        if mesh is None or not _can_be_padded(parts, kinds, mesh):
            return None
        shapes = tuple(tuple(kind.shape) for kind in kinds)
        if any(isinstance(part, jax.core.Tracer) for part in parts):
            return jnp.stack([filled(jnp.asarray(part), largest_of(shapes)) for part in parts]), shapes
        with jax_internals.at_once():
            self._padded = mesh.pad(parts, largest_of(shapes)), shapes
        return self._padded

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of those components of this process that are arrays and not known to be alike."""
        if self._parts is None:
            if self._padded is None or self.mesh is None:
                return []
            return [self._padded[1][i] for i in self.mesh.local_ids]
        return [tuple(part.shape) for part in self._parts if is_array(part)]

    def _join(self, parts: Sequence[Any]) -> jax.Array:
        assert self.mesh is not None
        return self.mesh.stack(parts)

    def _join_traced(self, parts: Sequence[Any]) -> jax.Array:
        return jnp.stack([jnp.asarray(part) for part in parts])

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this process's replicas, in order."""
        if self._parts is None:
            assert self.mesh is not None
            if self._local is not None:
                if self.mesh.size == 1:
                    return (self._local,)
                everyone = jax.lax.all_gather(self._local, AXIS)
                return tuple(everyone[i] for i in range(self.mesh.size))
            if self._padded is not None:
                array, shapes = self._padded
                if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
                    return tuple(part_of(array[i], shape) for i, shape in enumerate(shapes))
                with jax_internals.at_once():
                    self._parts = self.mesh.cut(array, shapes)
                return self._parts
            assert self._array is not None
            self._parts = self._components(self._array)
            if any(isinstance(part, jax.core.Tracer) for part in self._parts):
                parts, self._parts = self._parts, None
                return parts
        return self._parts

    @staticmethod
    def bare(component: jax.Array, mesh: ReplicaMesh) -> jax.Array:
        """The only component of this process, out of a program's `as_copies`, which `of_bare` is to know again."""
        key = id(component)
        _bare[key] = weakref.ref(component, lambda _: _bare.pop(key, None)), mesh
        return component

    @classmethod
    def padded_bare(cls, array: Any, shapes: Sequence[tuple[int, ...]], mesh: Any) -> Any:
        """The only component of this process of the value that `of_padded` makes."""
        (component,) = cls.of_padded(array, shapes, mesh).values
        key = id(component)
        _uneven[key] = weakref.ref(component, lambda _: _uneven.pop(key, None))
        return component

    @staticmethod
    def is_uneven(component: Any) -> bool:
        """Whether this came from `padded_bare`."""
        return id(component) in _uneven

    @classmethod
    def of_bare(cls, component: Any, mesh: ReplicaMesh) -> PerReplica:
        """The value whose only component here this is."""
        value = cls([component], mesh)
        known = _bare.get(id(component))
        if known is None or known[1] is not mesh:
            return value
        array = value.array()
        assert array is not None
        return cls.of_array(array, mesh)

    @property
    def count(self) -> int:
        """How many components there are, on all workers together."""
        return len(self.values) if self.mesh is None else self.mesh.size

    def _components(self, array: Any) -> tuple[Any, ...]:
        assert self.mesh is not None
        if np.shape(array)[:1] != (self.mesh.size,):  # what jax.tree.map made of the value: the same for all
            return (array,) * len(self.mesh.local_ids)
        if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
            return tuple(array[i] for i in range(self.mesh.size))
        with jax_internals.at_once():
            return self.mesh.rows(array)


class Mirrored(Value):
    """A value that is the same on every replica, with a copy on each replica's device."""

    __slots__ = ()
    _is_mirrored = True

    def _join(self, parts: Sequence[Any]) -> jax.Array:
        assert self.mesh is not None
        return self.mesh.mirror(parts)

    def _join_traced(self, parts: Sequence[Any]) -> jax.Array:
        return jnp.asarray(parts[0])

    @property
    def values(self) -> tuple[Any, ...]:
        """The copies of this process's replicas."""
        if self._parts is None:
            assert self.mesh is not None
            value = self._array if self._local is None else self._local
            if isinstance(value, jax.core.Tracer):
                return (value,) * self.mesh.size
            if not isinstance(value, jax.Array):
                return (value,) * len(self.mesh.local_ids)
            with jax_internals.at_once():
                self._parts = self.mesh.copies(value)
        return self._parts

    def __jax_array__(self):
        return self._local if self._local is not None else self.values[0]


def _flatten(value: Value):
    if value._local is not None:
        return (value._local,), ("local", value.mesh)
    array = value.array()
    return ((array,), ("array", value.mesh)) if array is not None else (value.values, (value.ragged, value.mesh))


def _unflatten(cls):
    def unflatten(aux, children):
        form, mesh = aux
        if isinstance(form, bool):
            return cls(children, mesh, ragged=form)
        return (cls.of_array if form == "array" else cls.of_local)(children[0], mesh)

    return unflatten


for _cls in (PerReplica, Mirrored):
    jax.tree_util.register_pytree_node(_cls, _flatten, _unflatten(_cls))


def adopted(value: Any, mesh: ReplicaMesh) -> Any:
    """Returns a PerReplica value that the user made of components as one of this mesh's; another value as it is."""
    made = isinstance(value, PerReplica) and value.mesh is None
    return PerReplica(value.values, mesh) if made and value.count == len(mesh.local_ids) else value


def own_component(leaf: Any) -> Any:
    """Inside of compiled replicas: this replica's component of a distributed value; another value as it is."""
    if not isinstance(leaf, (PerReplica, Mirrored)):
        return leaf
    return leaf._local if leaf._local is not None else jnp.stack(leaf.values)[jax.lax.axis_index(AXIS)]
