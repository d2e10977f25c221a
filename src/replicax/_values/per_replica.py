"""Values that have one component for each replica.

A value holds its components in one of the forms of `forms`, and makes the others from it when they are asked for. Users
see the components; the engine asks with the functions of this module.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import jax_internals, nest, pickling
from replicax._base.types import Leaf, Tree
from replicax._report.notebooks import Displayed
from replicax._values import errors
from replicax._values.arrays import ArrayOperators, filled, largest_of, part_of
from replicax._values.components import Components, any_traced, can_be_padded
from replicax._values.forms import Counted, Form, Kind, Padded, Parts, Replicated, RowCounts, Shape, Stacked, Traced
from replicax._values.mesh import AXIS, ReplicaMesh, local_replica


class DistributedValues(nest.LeafBase, Displayed):
    """The base of values with a component for each replica: `PerReplica`, `Mirrored` and distributed variables.

    >>> import replicax as rx
    >>> [isinstance(value, rx.DistributedValues) for value in (rx.PerReplica([1, 2]), rx.Mirrored([3, 3]), 4)]
    [True, True, False]
    """

    __slots__ = ()

    _is_mirrored = False  # whether it is the same on every replica

    @property
    def values(self) -> tuple[Leaf, ...]:
        """The components of this process's replicas, in order.

        >>> import replicax as rx
        >>> rx.MirroredStrategy(["GPU:0", "GPU:1"]).run(lambda x: x + 1, (rx.PerReplica([1, 2]),)).values
        (2, 3)
        """
        raise NotImplementedError

    def _as_distributed(self) -> Value:
        """Return the value as `PerReplica` or `Mirrored`; of a variable, its current value."""
        raise NotImplementedError

    def _text(self, show: Callable[[Leaf], str]) -> str:
        lines = ",\n".join(f"  {index}: {show(value)}" for index, value in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{lines}\n}}"

    def __str__(self) -> str:
        return self._text(str)

    def __repr__(self) -> str:
        return self._text(repr)


class Value(DistributedValues):
    """The base of `PerReplica` and `Mirrored`: components in one form, and the mesh on which others are made."""

    __slots__ = ("__weakref__", "_components")

    def __init__(self, values: Sequence[Leaf], mesh: ReplicaMesh | None = None):
        parts = tuple(values)
        self._components = Components(Parts(parts), mesh, parts)

    def _as_distributed(self) -> Value:
        return self

    def __copy__(self) -> Value:
        return self  # which nothing changes

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (pickling.stored(self.values),)  # without devices, which another process need not have


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

    def _text(self, show: Callable[[Leaf], str]) -> str:
        form = self._components.form
        if isinstance(form, Counted) and form.shapes() is None:
            return f"PerReplica:{{padded rows, {show(form.array)}}}"
        return super()._text(show)

    @property
    def values(self) -> tuple[Leaf, ...]:
        """The components of this process's replicas, in order; `ValueError` where their numbers of rows are not known.

        >>> import replicax as rx
        >>> rx.PerReplica([1, 2]).values
        (1, 2)
        """
        components = self._components
        if components.values is not None:
            return components.values
        form, mesh = components.form, components.on_mesh()
        if isinstance(form, Traced):
            if mesh.size == 1:
                return (form.component,)
            everyone = jax.lax.all_gather(form.component, AXIS)
            return tuple(jax.tree.map(operator.itemgetter(i), everyone) for i in range(mesh.size))
        if isinstance(form, Padded):
            if not _is_concrete(form.array):
                return tuple(part_of(form.array[i], shape) for i, shape in enumerate(form.shapes))
            with jax_internals.untraced():
                components.values = mesh.cut(form.array, form.shapes)
            return components.values
        if isinstance(form, Counted):
            if (shapes := form.shapes()) is None:
                raise ValueError(errors.ROWS_NOT_KNOWN)
            with jax_internals.untraced():
                components.values = mesh.cut(form.array, shapes)
            return components.values
        assert isinstance(form, Stacked)
        values = self._rows(form.array, mesh)
        if not any_traced(values):
            components.values = values
        return values

    @staticmethod
    def _rows(array: Leaf, mesh: ReplicaMesh) -> tuple[Leaf, ...]:
        if np.shape(array)[:1] != (mesh.size,):  # what jax.tree.map made of the value: the same for all
            return (array,) * len(mesh.local_ids)
        if not _is_concrete(array):
            return tuple(array[i] for i in range(mesh.size))
        with jax_internals.untraced():
            return mesh.rows(array)


class Mirrored(ArrayOperators, Value):
    """A value that is the same on every replica, with a copy on each replica's device.

    It can be used as the array that it is: operators, indices and the array's attributes work on the replica's copy,
    outside of replicas on the first.

    >>> import replicax as rx
    >>> with rx.MirroredStrategy(["GPU:0", "GPU:1"]).scope():
    ...     rx.Variable(1.0).assign_add(1.0)
    Mirrored:{
      0: Array(2., dtype=float32),
      1: Array(2., dtype=float32)
    }
    >>> (rx.Mirrored([3, 3]) + 1) % 2 == 0
    True
    """

    __slots__ = ()

    _is_mirrored = True

    def __bool__(self) -> bool:
        """Returns True, as in TensorFlow, where a mirrored value has no truth value of its own.

        >>> import replicax as rx
        >>> bool(rx.Mirrored([0, 0]))
        True
        """
        return True

    @property
    def values(self) -> tuple[Leaf, ...]:
        """The copies of this process's replicas.

        >>> import replicax as rx
        >>> rx.Mirrored([3, 3]).values
        (3, 3)
        """
        components = self._components
        if components.values is None:
            form, mesh = components.form, components.on_mesh()
            assert isinstance(form, Replicated | Traced)
            value = form.array if isinstance(form, Replicated) else form.component
            if isinstance(value, jax.core.Tracer):
                return (value,) * mesh.size
            if not isinstance(value, jax.Array):
                return (value,) * len(mesh.local_ids)
            with jax_internals.untraced():
                components.values = mesh.copies(value)
        return components.values

    def _operand(self) -> Leaf:
        form, mesh = self._components.form, self._components.mesh
        if isinstance(form, Traced):
            return form.component
        return self.values[0 if mesh is None else local_replica(mesh)]

    def __getattr__(self, name: str) -> Leaf:  # called for missing ones
        if not name.startswith("_") and hasattr(component := self._operand(), name):
            return getattr(component, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)


def _is_concrete(array: object) -> bool:
    return isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)


# Making values. Users' classes are not instantiated with a form, so that their constructor takes components alone.

_V = TypeVar("_V", bound=Value)


def of_form(kind: type[_V], form: Form, mesh: ReplicaMesh | None) -> _V:
    """Returns a value of this class with its components in this form."""
    value = kind.__new__(kind)
    parts = form.components if isinstance(form, Parts) else None
    value._components = Components(form, mesh, parts, padded=form if isinstance(form, Padded) else None)
    return value


def of_array(kind: type[_V], array: Leaf, mesh: ReplicaMesh | None) -> _V:
    """Returns a value of this class with this global array: replicated for `Mirrored`, else stacked."""
    return of_form(kind, whole_form(kind)(array), mesh)


def whole_form(kind: type[Value]) -> type[Stacked] | type[Replicated]:
    """Return the form that is one global array, for values of this class."""
    return Stacked if issubclass(kind, PerReplica) else Replicated


def of_traced(kind: type[_V], component: Leaf, mesh: ReplicaMesh | None) -> _V:
    """Returns a value that holds the component of the one replica whose function is traced."""
    return of_form(kind, Traced(component), mesh)


def of_padded(array: jax.Array, shapes: Sequence[Shape], mesh: ReplicaMesh | None) -> PerReplica:
    """Returns a value whose components are the leading parts, of these shapes, of the rows of `array`."""
    return of_form(PerReplica, Padded(array, tuple(shapes)), mesh)


def of_counted(array: jax.Array, counts: RowCounts, mesh: ReplicaMesh | None) -> PerReplica:
    """Returns a value whose components are the rows of `array`, of which so many count."""
    return of_form(PerReplica, Counted(array, counts), mesh)


def of_kinds(values: Sequence[Leaf], kinds: Sequence[Kind], mesh: ReplicaMesh) -> PerReplica:
    """Returns a value with these components here; `kinds` are the shapes and dtypes of all replicas'."""
    value = PerReplica(values, mesh)
    if not mesh.all_local:  # else they are there to be looked at
        components_of(value).note_kinds(kinds)
    return value


def from_host(parts: Sequence[Leaf], kinds: Sequence[Kind], mesh: ReplicaMesh) -> PerReplica | None:
    """Returns a value with these components of the host, stacked or padded on the devices; None if neither can be.

    Args:
        parts: the components of this process.
        kinds: shapes and dtypes of the components of all processes, in order of replica id.
        mesh: where to put them.
    """
    if not can_be_padded(parts, kinds, mesh):
        return None
    shapes = [kind.shape for kind in kinds]
    array = mesh.stack([filled(part, largest_of(shapes)) for part in parts])
    return of_array(PerReplica, array, mesh) if len(set(shapes)) == 1 else of_padded(array, shapes, mesh)


# Asking for forms.


def components_of(value: Value) -> Components:
    """Return the components of a value, in their forms."""
    return value._components


def is_mirrored(value: object) -> bool:
    """Return whether a value or a variable is the same on every replica."""
    return isinstance(value, DistributedValues) and value._is_mirrored


def as_distributed(value: DistributedValues) -> Value:
    """Return a value as `PerReplica` or `Mirrored`; of a variable, its current value."""
    return value._as_distributed()


def mesh_of(value: object) -> ReplicaMesh | None:
    """Return the mesh of the strategy that a value or a variable belongs to; None for objects of no strategy."""
    mesh: ReplicaMesh | None
    mesh = components_of(value).mesh if isinstance(value, Value) else getattr(value, "_mesh", None)
    return mesh


def traced_component(value: object) -> Leaf:
    """Returns the component of a value that one replica has while its function is traced; None for any other object."""
    form = components_of(value).form if isinstance(value, Value) else None
    return form.component if isinstance(form, Traced) else None


def is_whole(value: Value) -> bool:
    """Returns whether a value is one global array, so that all processes know its components to be alike."""
    return isinstance(components_of(value).form, Stacked | Replicated)


def global_array(value: Value) -> jax.Array | None:
    """Returns a value's global array, None where components have none: they differ in shape, or are no arrays."""
    form = components_of(value).form
    if isinstance(form, Stacked | Replicated):
        # A kind stands for an array in a program that is planned.
        return form.array if isinstance(form.array, (jax.Array, jax.ShapeDtypeStruct)) else None  # type: ignore[return-value]
    return components_of(value).make_array(whole_form(type(value)) is Stacked)


def padded_form(value: PerReplica) -> Padded | None:
    """Return the padded form of components that differ in shape; None if they cannot be padded.

    They can if they are numeric, of equal dtypes and ranks, on one device each, and if all shapes are known: those of
    components in this process are, and those of values that a dataset or a program has made.
    """
    return components_of(value).make_padded()


def counted_form(value: object) -> Counted | None:
    """Returns the form of a value whose components' numbers of rows are an input of programs; None for others."""
    form = components_of(value).form if isinstance(value, PerReplica) else None
    return form if isinstance(form, Counted) else None


def component_count(value: PerReplica | Mirrored) -> int:
    """Returns the number of components, on all workers together."""
    mesh = mesh_of(value)
    return len(value.values) if mesh is None else mesh.size


def own_component(leaf: Leaf) -> Leaf:
    """Returns this replica's component of a distributed value, inside of compiled replicas; another value as it is."""
    if not isinstance(leaf, Value):
        return leaf
    component = traced_component(leaf)
    return component if component is not None else jnp.stack(leaf.values)[jax.lax.axis_index(AXIS)]


def adopted(value: Leaf, mesh: ReplicaMesh) -> Leaf:
    """Returns a PerReplica value that a user made of components, with this mesh; another value as it is."""
    made = isinstance(value, PerReplica) and mesh_of(value) is None
    return PerReplica(value.values, mesh) if made and len(value.values) == len(mesh.local_ids) else value


def marks_of(value: Tree) -> list[object]:
    """Return the marks of the per-replica values in a nest, see `part_rows.mark_results`."""
    leaves = (leaf for leaf in nest.leaves(value) if isinstance(leaf, PerReplica))
    return [mark for leaf in leaves if (mark := leaf._components.mark) is not None]
