"""Finds the arrays in what users have: arrays, distributed values, variables, models, and structures of these."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from replicax._base import foreign_state, nest
from replicax._base.errors import InvalidArgumentError
from replicax._base.messages import received
from replicax._base.types import Leaf, Tree
from replicax._collectives import sharding
from replicax._parameter_server.places import Place
from replicax._parameter_server.variables import ServedStorage
from replicax._placement.arrays import Places, laid_out, of_array
from replicax._report.placement_data import Index, Part, PlacedArray
from replicax._tracing.protocols import storage_of
from replicax._values import Mirrored, PerReplica, global_array, mesh_of, padded_form
from replicax._values.forms import Counted, Form, Padded, Replicated, Stacked
from replicax._values.per_replica import components_of, whole_form
from replicax._variables.homes import OnMesh, PartsHome, StackedHome
from replicax._variables.inspection import leaves_of
from replicax._variables.variable import Variable


def arrays_in(
    value: Tree, places: Places, name: str = "", group: str = "", as_input: bool = False
) -> list[PlacedArray]:
    """Returns the arrays of a value, in order; a variable that occurs twice counts once.

    Args:
        value: an array, a distributed value, a variable, a model, an optimizer, or a pytree of these.
        places: names the devices.
        name: of the value.
        group: of the arrays.
        as_input: whether the value is shown as a program takes it, in which variables are no inputs.
    """
    found: list[PlacedArray] = []
    seen: set[int] = set()
    for path, leaf in _leaves(value, name):
        variable = foreign_state.variable_of(leaf)
        if id(variable) in seen and isinstance(variable, Variable):
            continue
        seen.add(id(variable))
        if isinstance(variable, Variable):
            if as_input:
                continue
            own = variable.name.removesuffix(":0")
            is_named = variable is leaf and own.rpartition("/")[2] != "Variable"
            found += of_variable(variable, own if is_named else path or own, places)
        elif isinstance(leaf, (PerReplica, Mirrored)):
            form = _taken(leaf) if as_input else components_of(leaf).form
            found += _of_value(leaf, form, path or type(leaf).__name__, places)
        elif isinstance(leaf, (jax.Array, np.ndarray)):
            found.append(of_array(path or "array", leaf, places))
    return [replace(array, group=group) for array in found]


def checked(found: list[PlacedArray], value: Tree) -> list[PlacedArray]:
    """Returns the arrays that were found in a value; raises `InvalidArgumentError` if there are none."""
    if not found:
        raise InvalidArgumentError(
            f"There is no array in {received(value)}. Pass an array, a PerReplica or Mirrored value, a variable, a "
            "model or an optimizer, or a structure of these."
        )
    return found


def _leaves(value: Tree, name: str) -> Iterator[tuple[str, Leaf]]:
    """Yields the leaves of a value with their paths, also those of objects that hold variables."""

    def is_leaf(node: Tree) -> bool:
        held = foreign_state.holds_variable(node) or _variables_of(node) is not None
        return held or nest.is_leaf(node)

    for keys, leaf in tree_flatten_with_path(value, is_leaf=is_leaf)[0]:
        path = "/".join(part for part in (name, keystr(keys, simple=True, separator="/")) if part)
        if (held := _variables_of(leaf)) is None:
            yield path, leaf
            continue
        for key, inner in held.items():
            yield from _leaves(inner, "/".join(part for part in (path, key) if part))


def _variables_of(node: Any) -> dict[str, Tree] | None:
    """Returns what an optimizer, or a model or optimizer of Keras, holds, by name; None for other objects."""
    if isinstance(node, (Variable, type)) or foreign_state.holds_variable(node):
        return None
    if hasattr(type(node), "_tracked"):
        return dict(node._tracked())
    if hasattr(type(node), "variables") and isinstance(variables := node.variables, (list, tuple)):
        return {getattr(each, "path", str(i)): each for i, each in enumerate(variables)}
    return None


def of_variable(variable: Variable, name: str, places: Places) -> list[PlacedArray]:
    """Returns the arrays of a variable, each with its path in the variable's pytree behind the name."""
    storage = storage_of(variable)
    paths = (keystr(keys, simple=True, separator="/") for keys, _ in leaves_of(variable))
    names = ["/".join(part for part in (name, path) if part) for path in paths]
    if isinstance(storage, ServedStorage):
        return [array for each, place in zip(names, storage.places) for array in _served(each, place)]
    home = storage.home
    if not isinstance(home, OnMesh):
        return [of_array(each, array, places) for each, array in zip(names, storage.stored())]
    of_mesh = Places(home.mesh, places.names)
    return [_on_mesh(home, i, each, of_mesh) for i, each in enumerate(names)]


def _on_mesh(home: OnMesh, number: int, name: str, places: Places) -> PlacedArray:
    kind = home.types[number]
    if not home.has_rows(number):
        return laid_out(name, kind.shape, kind.dtype, home.shardings()[number], places)
    if isinstance(home, StackedHome):
        return _by_replica(name, kind.shape, kind.dtype, {}, [kind.shape] * home.mesh.size, places)
    assert isinstance(home, PartsHome)
    length = sharding.length(kind, home.mesh.size)  # the last parts may be padded
    starts = [min(i * length, kind.size) for i in range(home.mesh.size + 1)]
    flat: dict[int, Index] = {i: (slice(starts[i], starts[i + 1]),) for i in range(home.mesh.size)}
    return _by_replica(name, kind.shape, kind.dtype, flat, [(length,)] * home.mesh.size, places, flat=True)


def _by_replica(
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    indices: dict[int, Index],
    held: list[tuple[int, ...]],
    places: Places,
    flat: bool = False,
) -> PlacedArray:
    """Returns an array of which every replica has a part on each of its devices.

    Args:
        name, shape, dtype: the array's.
        indices: which part each replica has; those that are not named have values of their own.
        held: the shape that each replica keeps in memory.
        places: the devices.
        flat: see `Part`.
    """
    parts, elsewhere = dict[str, Part](), 0
    for replica, kept in enumerate(held):
        count = math.prod(kept) * dtype.itemsize
        for device in places.of_replica(replica):
            if device.process_index == jax.process_index():
                parts[places.name(device)] = Part(indices.get(replica), count, flat)
            else:
                elsewhere += count
    return PlacedArray(name, str(dtype), tuple(shape), parts, elsewhere)


def _served(name: str, place: Place) -> list[PlacedArray]:
    """Returns an array on parameter servers; an array for each of its parts if a server has several of them."""
    kind, inner = place.kind, tuple(slice(0, size) for size in place.kind.shape[1:])
    row = math.prod(kind.shape[1:]) * kind.dtype.itemsize
    parts = [
        (f"server {server}", Part((slice(start, stop), *inner) if kind.shape else (), (stop - start) * row))
        for server, start, stop in place.parts
    ]
    if len(dict(parts)) == len(parts):
        return [PlacedArray(name, str(kind.dtype), kind.shape, dict(parts))]
    return [PlacedArray(f"{name}/part_{i}", str(kind.dtype), kind.shape, dict([part])) for i, part in enumerate(parts)]


def _taken(value: PerReplica | Mirrored) -> Form:
    """Returns the form in which a program takes a value: one array on all devices, if there is one."""
    if isinstance(value, PerReplica) and (padded := padded_form(value)) is not None:
        return padded
    form = components_of(value).form
    array = None if isinstance(form, (Counted, Padded)) else global_array(value)
    return form if array is None else whole_form(type(value))(array)


def _of_value(value: PerReplica | Mirrored, form: Form, name: str, places: Places) -> list[PlacedArray]:
    """Returns the array of a distributed value; of one with components of several dtypes, an array for each."""
    mesh = mesh_of(value)
    if mesh is not None:
        places = Places(mesh, places.names)
    if isinstance(form, Replicated) and isinstance(form.array, jax.Array):
        return [of_array(name, form.array, places)]
    if isinstance(form, (Stacked, Padded, Counted)) and isinstance(form.array, jax.Array) and mesh is not None:
        of_array(name, form.array, places)  # which refuses tracers
        inner = form.array.shape[1:]
        shapes: Sequence[tuple[int, ...]] | None = [inner] * mesh.size
        if not isinstance(form, Stacked):
            shapes = form.shapes if isinstance(form, Padded) else form.shapes()
        assert shapes is not None  # they are unknown in traced functions alone
        return [_in_rows(name, form.array.dtype, shapes, [inner] * mesh.size, places)]
    found = [of_array(f"{name}/{i}", part, places) for i, part in enumerate(value.values) if _is_array(part)]
    alike = len({(array.dtype, array.shape[1:]) for array in found}) == 1
    if len(found) < 2 or not alike or not all(len(array.parts) == 1 for array in found):
        return found
    return [_joined(name, found, mirrored=isinstance(value, Mirrored))]


def _in_rows(
    name: str, dtype: Any, shapes: Sequence[tuple[int, ...]], held: list[tuple[int, ...]], places: Places
) -> PlacedArray:
    """Returns components of these shapes, concatenated along axis 0; scalars are values of their own."""
    if not shapes[0]:
        return _by_replica(name, (), dtype, {}, held, places)
    indices, start = dict[int, Index](), 0
    for i, (rows, *rest) in enumerate(shapes):
        indices[i] = (slice(start, start + rows), *(slice(0, size) for size in rest))
        start += rows
    return _by_replica(name, (start, *shapes[0][1:]), dtype, indices, held, places)


def _joined(name: str, found: list[PlacedArray], mirrored: bool) -> PlacedArray:
    """Returns components, each of which lies whole in one place, as one array."""
    parts, start = dict[str, Part](), 0
    for array in found:
        ((place, part),) = array.parts.items()
        index = part.index
        if index and not mirrored:
            rows = array.shape[0]
            index, start = (slice(start, start + rows), *index[1:]), start + rows
        elif not mirrored:
            index = None
        if place in parts:  # several in one place, as in the host's memory
            before = parts[place]
            index = (slice(before.index[0].start, start), *index[1:]) if before.index and index else index
            part = replace(part, bytes=part.bytes + before.bytes)
        parts[place] = replace(part, index=index)
    shape = found[0].shape if mirrored or not found[0].shape else (start, *found[0].shape[1:])
    return PlacedArray(name, found[0].dtype, shape, parts)


def _is_array(value: object) -> bool:
    return isinstance(value, (jax.Array, np.ndarray))
