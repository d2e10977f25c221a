"""The initial state of an optimizer, computed on the devices that keep it.

The transformation's `init` is compiled, so that each device computes its copies or shards: no device holds the whole of
a sharded state, and nobody else refers to the buffers, so that the first step may donate all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax._base import nest, planning, thread_state
from replicax._base.types import Tree
from replicax._collectives import cross_process, in_flight, sharding
from replicax._tracing import frames
from replicax._tracing.protocols import storage_of, tree_of, types_of
from replicax._values import ReplicaMesh, mesh_of
from replicax._variables import deferred_restore
from replicax._variables.distributed import MirroredVariable
from replicax._variables.homes import Divided
from replicax._variables.layouts import alike, paths_and_types
from replicax._variables.resource import ResourceVariable
from replicax._variables.variable import Variable


class InitialState(NamedTuple):
    """A state: its arrays (of sharded ones the rows), the shapes and dtypes of the whole arrays, and the structure."""

    arrays: list[jax.Array]
    kinds: list[jax.ShapeDtypeStruct]
    tree: jax.tree_util.PyTreeDef


def initial_state(init: Callable[[Tree], Tree], variables: Tree, cut: bool, divided: Divided) -> InitialState | None:
    """Returns the result of `init` for the variables' values; None where it cannot be compiled for their devices.

    Args:
        init: of an Optax transformation.
        variables: a nest of variables.
        cut: True to shard large arrays over the replicas (see `_collectives.sharding`).
        divided: returns the layout of an array with that by which the variables are divided among the replicas.
    """
    flat = nest.values(variables)
    if type(frames.frame()) is not frames.GlobalFrame or frames.is_tracing() or thread_state.current.creators:
        return None
    for variable in flat:
        if variable._late is not False:
            deferred_restore.settle(variable)
    if planning.are_abstract():
        values = nest.map_values(lambda v: tree_of(v).unflatten(types_of(v)), variables)
        kinds, tree = jax.tree.flatten(jax.eval_shape(init, values))
        return InitialState(kinds, kinds, tree)
    with frames.lock:
        place = _place(flat)
        if place is None:
            return None
        device, mesh = place
        # Unlike `value()`, this does not lend the arrays: the program keeps none of them.
        values = nest.map_values(lambda v: tree_of(v).unflatten(storage_of(v).read()), variables)
        with jax.default_device(device):
            program = state = None
            with contextlib.suppress(Exception):  # it needs concrete values, or fails with them too and says why
                program, state = jax.make_jaxpr(init, return_shape=True)(values)
            if not _same_everywhere(program, mesh) or program is None:  # all processes compare, also without a program
                return None
            kinds, tree = jax.tree.flatten(state)
            kinds = [jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in kinds]
            split: Sequence[PartitionSpec | None] | None = None
            if mesh is not None and not cut:
                found = alike(variables, paths_and_types(tree, kinds))
                split = [divided(kind, layout) for layout, kind in zip(found, kinds)]
            arrays = _run(program, jax.tree.leaves(values), kinds, mesh, cut, split) if kinds else []
    return InitialState(arrays, kinds, tree)


def _place(variables: list[Variable]) -> tuple[jax.Device, ReplicaMesh | None] | None:
    """Returns the one device of all variables, or the mesh that has copies of all of them; None for neither."""
    mesh = mesh_of(variables[0])
    mirrored = all(isinstance(v, MirroredVariable) and mesh_of(v) is mesh for v in variables)
    if mesh is not None and mirrored:
        return mesh.local_devices[0], mesh
    if not all(type(v) is ResourceVariable and v._parent is None for v in variables):
        return None
    leaves = [leaf for v in variables for leaf in storage_of(v).read()]
    devices = {device for leaf in leaves for device in leaf.devices()}
    return (devices.pop(), None) if len(devices) == 1 and not any(leaf.committed for leaf in leaves) else None


def _same_everywhere(program: jex.ClosedJaxpr | None, mesh: ReplicaMesh | None) -> bool:
    """Returns True if every process has a program, and the same one, so that their states are equal."""
    if mesh is None or mesh.all_local:
        return program is not None
    text = ""  # all processes compare, also one without a program
    with contextlib.suppress(Exception):  # constants that have no bytes
        consts = [] if program is None else program.consts
        digests = [hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for x in consts]
        text = "" if program is None else "\n".join([str(program), *digests])
    return cross_process.same_on_all_workers(mesh, f"initial state\n{text}", alike=True) and text != ""


def _run(
    program: jex.ClosedJaxpr,
    leaves: list[jax.Array],
    kinds: list[jax.ShapeDtypeStruct],
    mesh: ReplicaMesh | None,
    cut: bool,
    split: Sequence[PartitionSpec | None] | None,
) -> list[jax.Array]:
    count = mesh.size if mesh is not None and cut else 0
    rows = [count > 0 and sharding.is_cut(kind, count) for kind in kinds]

    def state(leaves: list[jax.Array]) -> list[jax.Array]:
        results = zip(jex.jaxpr_as_fun(program)(*leaves), kinds)
        typed = [_of_dtype(leaf, kind.dtype) for leaf, kind in results]
        return [sharding.as_rows(x, count) if is_cut else x for x, is_cut in zip(typed, rows)]

    if mesh is None:
        return list(jax.jit(state)(leaves))
    shardings = [mesh.stacked if is_cut else mesh.mirrored for is_cut in rows]
    if split is not None:
        shardings = [NamedSharding(mesh.mesh, layout or PartitionSpec()) for layout in split]
    whole = jax.jit(state, out_shardings=shardings)
    with in_flight.dispatching(mesh, "initial state") as call:
        call.compile(whole, leaves)
        made = whole(leaves)
        call.output = made[0]
    return list(made)


def _of_dtype(leaf: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Returns an array that is not weakly typed, also of a Python number."""
    return leaf if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else jnp.asarray(leaf).astype(dtype)
