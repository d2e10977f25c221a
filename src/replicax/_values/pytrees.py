"""Distributed values as pytrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax

from replicax._base.types import Leaf
from replicax._values.forms import Parts, Replicated, Stacked, Traced
from replicax._values.mesh import ReplicaMesh
from replicax._values.per_replica import Mirrored, PerReplica, Value, components_of, of_form, whole_form

# The class of a form that is one array; or of `Parts`, whether those of other processes differ.
_FormOf: TypeAlias = type[Stacked] | type[Replicated] | type[Traced] | bool
_Aux: TypeAlias = tuple[_FormOf, ReplicaMesh | None]


def _flatten(value: Value) -> tuple[tuple[Leaf, ...], _Aux]:
    components = components_of(value)
    form, mesh = components.form, components.mesh
    if isinstance(form, Traced):
        return (form.component,), (Traced, mesh)
    if isinstance(form, Stacked | Replicated):  # an array, or what JAX has put in its place
        return (form.array,), (type(form), mesh)
    kind = whole_form(type(value))
    if (array := components.make_array(kind is Stacked)) is not None:
        return (array,), (kind, mesh)
    return value.values, (components.others_differ(), mesh)


def _unflatten(cls: type[Value]) -> Callable[[_Aux, Sequence[Leaf]], Value]:
    def unflatten(aux: _Aux, children: Sequence[Leaf]) -> Value:
        form, mesh = aux
        if isinstance(form, bool):
            return of_form(cls, Parts(tuple(children), differ=form), mesh)
        return of_form(cls, form(children[0]), mesh)

    return unflatten


for _cls in (PerReplica, Mirrored):
    jax.tree_util.register_pytree_node(_cls, _flatten, _unflatten(_cls))
