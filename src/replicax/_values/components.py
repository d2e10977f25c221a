"""The components of a distributed value: in one form, and in the forms that were made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import jax_internals
from replicax._base.types import Leaf
from replicax._values.arrays import filled, is_array, is_numeric, largest_of
from replicax._values.forms import Counted, Form, Kind, Padded, Parts, Replicated, Shape, Stacked
from replicax._values.mesh import ReplicaMesh


@dataclass(slots=True)
class Components:
    """The components of a value, which asks for them in several forms.

    Args:
        form: the form that the value was made of.
        mesh: the mesh of the strategy that the value belongs to, None for a value that a user made of components.
        values: the components of this process: those of `Parts`, or once they were made.
        array: the global array, once it was made.
        padded: the padded form: a `Padded` form itself, or once it was made.
        mark: see `mark_results`.
    """

    form: Form
    mesh: ReplicaMesh | None
    values: tuple[Leaf, ...] | None = None
    array: jax.Array | None = None
    padded: Padded | None = None
    mark: object = None

    def on_mesh(self) -> ReplicaMesh:
        """Return the mesh of a value that no user made."""
        assert self.mesh is not None
        return self.mesh

    def _local_parts(self) -> Parts | None:
        """Return the form if it has a component for each replica of this process."""
        form, mesh = self.form, self.mesh
        if mesh is None or not isinstance(form, Parts) or len(form.components) != len(mesh.local_ids):
            return None
        return form

    def is_uniform(self) -> bool:
        """Return whether the components here are arrays of one shape and dtype."""
        form = self._local_parts()
        if form is None or form.differ or not _are_numeric(form.components):
            return False
        first = form.components[0]
        return all(part.shape == first.shape and part.dtype == first.dtype for part in form.components)

    def others_differ(self) -> bool:
        """Return whether components in other processes are known to differ in shape from those here."""
        if isinstance(self.form, Padded):
            return not self.on_mesh().all_local
        if isinstance(self.form, Counted):
            return not self.on_mesh().all_local and len(set(self.form.counts.host or ())) > 1
        return isinstance(self.form, Parts) and self.form.differ

    def needs_comparison(self) -> bool:
        """Return whether the components are arrays, and those of other processes may have other shapes."""
        form = self._local_parts()
        if form is None or self.on_mesh().all_local:
            return False
        known = form.kinds is not None or self.array is not None or self.padded is not None
        return not known and _are_numeric(form.components) and not any_traced(form.components)

    def note_kinds(self, kinds: Sequence[Kind]) -> None:
        """Note the shapes and dtypes of all replicas' components."""
        assert isinstance(self.form, Parts)
        differ = len({(kind.shape, str(kind.dtype)) for kind in kinds}) > 1
        self.form = replace(self.form, kinds=kinds, differ=differ)

    def local_shapes(self) -> list[Shape]:
        """Return the shapes of this process's components that are arrays; none for a stacked value, which has one."""
        form = self.form
        if self.values is not None and not isinstance(form, Stacked):
            return [tuple(part.shape) for part in self.values if is_array(part)]
        shapes = form.shapes if isinstance(form, Padded) else form.shapes() if isinstance(form, Counted) else None
        return [] if shapes is None else [shapes[i] for i in self.on_mesh().local_ids]

    def make_array(self, stacked: bool) -> jax.Array | None:
        """Return the global array, stacked or replicated, of components of one shape and dtype; None for others."""
        form = self.form
        if self.array is None and isinstance(form, Parts) and self.is_uniform():
            if any_traced(form.components):
                parts = [jnp.asarray(part) for part in form.components]
                return jnp.stack(parts) if stacked else parts[0]
            arrays = [np.asarray(part) if isinstance(part, np.generic) else part for part in form.components]
            with jax_internals.untraced():
                self.array = self.on_mesh().stack(arrays) if stacked else self.on_mesh().mirror(arrays)
        return self.array

    def make_padded(self) -> Padded | None:
        """Return the padded form, see `per_replica.padded_form`."""
        form, mesh = self.form, self.mesh
        if self.padded is not None or self.array is not None or not isinstance(form, Parts):
            return self.padded
        kinds: Sequence[Kind] = form.components if form.kinds is None else form.kinds
        if mesh is None or not can_be_padded(form.components, kinds, mesh):
            return None
        shapes = tuple(tuple(kind.shape) for kind in kinds)
        if any_traced(form.components):
            return Padded(jnp.stack([filled(jnp.asarray(x), largest_of(shapes)) for x in form.components]), shapes)
        with jax_internals.untraced():
            self.padded = Padded(mesh.pad(form.components, largest_of(shapes)), shapes)
        return self.padded

    def arrays(self) -> list[object]:
        """Return the arrays that hold the value so far."""
        form = self.form
        whole = form.array if isinstance(form, Stacked | Replicated | Counted) else self.array
        return [whole, self.padded and self.padded.array, *(self.values or ())]


def can_be_padded(parts: Sequence[Leaf], kinds: Sequence[Kind], mesh: ReplicaMesh) -> bool:
    """Return whether these components can be padded; `kinds` are the shapes and dtypes of all replicas' components.

    All processes come to the same result, since they compare what all of them know.
    """
    return (
        not mesh.logical_axes
        and len(kinds) == mesh.size
        and _are_numeric(parts)
        and not any(jax.dtypes.issubdtype(part.dtype, jax.dtypes.extended) for part in parts)
        and all(kind.dtype == kinds[0].dtype and kind.ndim == kinds[0].ndim for kind in kinds)
    )


def any_traced(parts: Sequence[Leaf]) -> bool:
    """Return whether a component is a tracer."""
    return any(isinstance(part, jax.core.Tracer) for part in parts)


def _are_numeric(parts: Sequence[Leaf]) -> bool:
    """Return whether components are arrays that JAX can hold."""
    return all(map(is_numeric, parts))
