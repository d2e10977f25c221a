"""Values that have one component for each replica.

A value holds its components in one of the forms of `forms`, and makes the others from it when they are asked for. Users
see the components; the engine asks with the functions of this module.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import jax_internals, nest, pickling
from replicax._base.types import Leaf
from replicax._report.notebooks import Displayed
from replicax._values import errors
from replicax._values.arrays import filled, is_array, is_numeric, largest_of, part_of
from replicax._values.forms import Counted, Form, Kind, Padded, Parts, Replicated, RowCounts, Shape, Stacked, Traced
from replicax._values.mesh import AXIS, ReplicaMesh, local_replica
from replicax._values.operators import ArrayOperators


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
        """Returns the value as `PerReplica` or `Mirrored`; of a variable, its current value."""
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

    __slots__ = ("__weakref__", "_array", "_form", "_mark", "_mesh", "_padded", "_values")

    _whole: type[Stacked] | type[Replicated]  # the form that is one global array

    def __init__(self, values: Sequence[Leaf], mesh: ReplicaMesh | None = None):
        self._set(Parts(tuple(values)), mesh)

    def _as_distributed(self) -> Value:
        return self

    def _set(self, form: Form, mesh: ReplicaMesh | None) -> None:
        self._form, self._mesh = form, mesh
        self._mark: object = None  # see `mark_results`
        # What was made of the form so far.
        self._values: tuple[Leaf, ...] | None = form.components if isinstance(form, Parts) else None
        self._array: jax.Array | None = None
        self._padded: Padded | None = form if isinstance(form, Padded) else None

    def __copy__(self) -> Value:
        return self  # which nothing changes

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (pickling.stored(self.values),)  # without devices, which another process need not have

    def _made_array(self) -> jax.Array | None:
        """Returns the global array of components of one shape and dtype, None of others."""
        form = self._form
        if self._array is None and isinstance(form, Parts) and is_uniform(self):
            stacked = self._whole is Stacked
            if _any_traced(form.components):
                parts = [jnp.asarray(part) for part in form.components]
                return jnp.stack(parts) if stacked else parts[0]
            components = [np.asarray(part) if isinstance(part, np.generic) else part for part in form.components]
            with jax_internals.untraced():
                self._array = self._there().stack(components) if stacked else self._there().mirror(components)
        return self._array

    def _there(self) -> ReplicaMesh:
        assert self._mesh is not None
        return self._mesh


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

    _whole = Stacked

    def _text(self, show: Callable[[Leaf], str]) -> str:
        form = self._form
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
        if self._values is not None:
            return self._values
        form, mesh = self._form, self._there()
        if isinstance(form, Traced):
            if mesh.size == 1:
                return (form.component,)
            everyone = jax.lax.all_gather(form.component, AXIS)
            return tuple(jax.tree.map(operator.itemgetter(i), everyone) for i in range(mesh.size))
        if isinstance(form, Padded):
            if not _is_concrete(form.array):
                return tuple(part_of(form.array[i], shape) for i, shape in enumerate(form.shapes))
            with jax_internals.untraced():
                self._values = mesh.cut(form.array, form.shapes)
            return self._values
        if isinstance(form, Counted):
            if (shapes := form.shapes()) is None:
                raise ValueError(errors.ROWS_NOT_KNOWN)
            with jax_internals.untraced():
                self._values = mesh.cut(form.array, shapes)
            return self._values
        assert isinstance(form, Stacked)
        values = self._rows(form.array, mesh)
        if not _any_traced(values):
            self._values = values
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
    _whole = Replicated

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
        if self._values is None:
            form, mesh = self._form, self._there()
            assert isinstance(form, Replicated | Traced)
            value = form.array if isinstance(form, Replicated) else form.component
            if isinstance(value, jax.core.Tracer):
                return (value,) * mesh.size
            if not isinstance(value, jax.Array):
                return (value,) * len(mesh.local_ids)
            with jax_internals.untraced():
                self._values = mesh.copies(value)
        return self._values

    def _operand(self) -> Leaf:
        if isinstance(self._form, Traced):
            return self._form.component
        return self.values[0 if self._mesh is None else local_replica(self._mesh)]

    def __getattr__(self, name: str) -> Leaf:  # called for missing ones
        if not name.startswith("_") and hasattr(component := self._operand(), name):
            return getattr(component, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)


def _is_concrete(array: object) -> bool:
    return isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)


def _any_traced(parts: Sequence[Leaf]) -> bool:
    return any(isinstance(part, jax.core.Tracer) for part in parts)


# Making values. Users' classes are not instantiated with a form, so that their constructor takes components alone.

_V = TypeVar("_V", bound=Value)


def of_form(kind: type[_V], form: Form, mesh: ReplicaMesh | None) -> _V:
    """Returns a value of this class with its components in this form."""
    value = kind.__new__(kind)
    value._set(form, mesh)
    return value


def of_array(kind: type[_V], array: Leaf, mesh: ReplicaMesh | None) -> _V:
    """Returns a value of this class with this global array: replicated for `Mirrored`, else stacked."""
    return of_form(kind, kind._whole(array), mesh)


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
        note_kinds(value, kinds)
    return value


def from_host(parts: Sequence[Leaf], kinds: Sequence[Kind], mesh: ReplicaMesh) -> PerReplica | None:
    """Returns a value with these components of the host, stacked or padded on the devices; None if neither can be.

    Args:
        parts: the components of this process.
        kinds: shapes and dtypes of the components of all processes, in order of replica id.
        mesh: where to put them.
    """
    if not _can_be_padded(parts, kinds, mesh):
        return None
    shapes = [kind.shape for kind in kinds]
    array = mesh.stack([filled(part, largest_of(shapes)) for part in parts])
    return of_array(PerReplica, array, mesh) if len(set(shapes)) == 1 else of_padded(array, shapes, mesh)


# Asking for forms.


def mesh_of(value: Value) -> ReplicaMesh | None:
    """Returns the mesh of the strategy that a value belongs to, None for one that a user made of components."""
    return value._mesh


def traced_component(value: object) -> Leaf:
    """Returns the component of a value that one replica has while its function is traced; None for any other object."""
    form = value._form if isinstance(value, Value) else None
    return form.component if isinstance(form, Traced) else None


def is_whole(value: Value) -> bool:
    """Returns whether a value is one global array, so that all processes know its components to be alike."""
    return isinstance(value._form, Stacked | Replicated)


def global_array(value: Value) -> jax.Array | None:
    """Returns a value's global array, None where components have none: they differ in shape, or are no arrays."""
    form = value._form
    if isinstance(form, Stacked | Replicated):
        # A kind stands for an array in a program that is planned.
        return form.array if isinstance(form.array, (jax.Array, jax.ShapeDtypeStruct)) else None  # type: ignore[return-value]
    return value._made_array()


def padded_form(value: PerReplica) -> Padded | None:
    """Returns the padded form of components that differ in shape; None if they cannot be padded.

    They can if they are numeric, of equal dtypes and ranks, on one device each, and if all shapes are known: those of
    components in this process are, and those of values that a dataset or a program has made.
    """
    form, mesh = value._form, value._mesh
    if value._padded is not None or value._array is not None or not isinstance(form, Parts):
        return value._padded
    kinds: Sequence[Kind] = form.components if form.kinds is None else form.kinds
    if mesh is None or not _can_be_padded(form.components, kinds, mesh):
        return None
    shapes = tuple(tuple(kind.shape) for kind in kinds)
    if _any_traced(form.components):
        return Padded(jnp.stack([filled(jnp.asarray(x), largest_of(shapes)) for x in form.components]), shapes)
    with jax_internals.untraced():
        value._padded = Padded(mesh.pad(form.components, largest_of(shapes)), shapes)
    return value._padded


def counted_form(value: object) -> Counted | None:
    """Returns the form of a value whose components' numbers of rows are an input of programs; None for others."""
    form = value._form if isinstance(value, PerReplica) else None
    return form if isinstance(form, Counted) else None


def _can_be_padded(parts: Sequence[Leaf], kinds: Sequence[Kind], mesh: ReplicaMesh) -> bool:
    """Returns whether these components can be padded; `kinds` are the shapes and dtypes of all replicas'.

    All processes come to the same result, since they compare what all of them know.
    """
    return (
        not mesh.logical_axes
        and len(kinds) == mesh.size
        and _are_numeric(parts)
        and not any(jax.dtypes.issubdtype(part.dtype, jax.dtypes.extended) for part in parts)
        and all(kind.dtype == kinds[0].dtype and kind.ndim == kinds[0].ndim for kind in kinds)
    )


def is_uniform(value: Value) -> bool:
    """Returns whether the components here are arrays of one shape and dtype."""
    form, mesh = value._form, value._mesh
    if mesh is None or not isinstance(form, Parts) or form.differ or len(form.components) != len(mesh.local_ids):
        return False
    parts = form.components
    return _are_numeric(parts) and all(part.shape == parts[0].shape and part.dtype == parts[0].dtype for part in parts)


def _are_numeric(parts: Sequence[Leaf]) -> bool:
    """Returns whether components are arrays that JAX can hold."""
    return all(map(is_numeric, parts))


def others_differ(value: Value) -> bool:
    """Returns whether components in other processes are known to differ in shape from those here."""
    if isinstance(value._form, Padded):
        return not value._there().all_local
    if isinstance(value._form, Counted):
        return not value._there().all_local and len(set(value._form.counts.host or ())) > 1
    return isinstance(value._form, Parts) and value._form.differ


def note_kinds(value: PerReplica, kinds: Sequence[Kind]) -> None:
    """Takes note of the shapes and dtypes of all replicas' components."""
    assert isinstance(value._form, Parts)
    differ = len({(kind.shape, str(kind.dtype)) for kind in kinds}) > 1
    value._form = replace(value._form, kinds=kinds, differ=differ)


def needs_comparison(value: PerReplica) -> bool:
    """Returns whether the components are arrays of which other processes might have some of other shapes."""
    form, mesh = value._form, value._mesh
    if not isinstance(form, Parts) or mesh is None or mesh.all_local or len(form.components) != len(mesh.local_ids):
        return False
    known = form.kinds is not None or value._array is not None or value._padded is not None
    return not known and _are_numeric(form.components) and not _any_traced(form.components)


def local_shapes(value: PerReplica) -> list[Shape]:
    """Returns the shapes of this process's components that are arrays; none of a stacked value, which has one."""
    if value._values is not None and not isinstance(value._form, Stacked):
        return [tuple(part.shape) for part in value._values if is_array(part)]
    if isinstance(value._form, Padded):
        return [value._form.shapes[i] for i in value._there().local_ids]
    if isinstance(value._form, Counted) and (shapes := value._form.shapes()) is not None:
        return [shapes[i] for i in value._there().local_ids]
    return []


def component_count(value: PerReplica | Mirrored) -> int:
    """Returns the number of components, on all workers together."""
    return len(value.values) if value._mesh is None else value._mesh.size


def made_forms(value: Value) -> list[object]:
    """Returns the arrays that hold a value so far: its form's, and those that were made of it."""
    form = value._form
    whole = form.array if isinstance(form, Stacked | Replicated | Counted) else value._array
    return [whole, value._padded and value._padded.array, *(value._values or ())]


def own_component(leaf: Leaf) -> Leaf:
    """Returns this replica's component of a distributed value, inside of compiled replicas; another value as it is."""
    if not isinstance(leaf, Value):
        return leaf
    component = traced_component(leaf)
    return component if component is not None else jnp.stack(leaf.values)[jax.lax.axis_index(AXIS)]


def adopted(value: Leaf, mesh: ReplicaMesh) -> Leaf:
    """Returns a PerReplica value that a user made of components, with this mesh; another value as it is."""
    made = isinstance(value, PerReplica) and value._mesh is None
    return PerReplica(value.values, mesh) if made and len(value.values) == len(mesh.local_ids) else value
