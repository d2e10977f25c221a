"""The state that an optimizer begins with, made where it stays.

The transformation's `init` is compiled, so that each device fills in its copies or parts at once: no device holds the
whole of a state that is cut, and no buffer is anybody else's, so that the first step may take all of them over.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from replicax._base import nest
from replicax._collectives import cross_process, in_flight, sharding
from replicax._tracing import frames
from replicax._values import ReplicaMesh
from replicax._variables import creators, deferred_restore
from replicax._variables.distributed import MirroredVariable
from replicax._variables.resource import ResourceVariable


class Made(NamedTuple):
    """A state: its arrays, the rows of those that are cut; what the whole ones are; and their tree."""

    arrays: list[jax.Array]
    kinds: list[jax.ShapeDtypeStruct]
    tree: Any


def made(init: Callable[[Any], Any], variables: Any, cut: bool) -> Made | None:
    """What `init` makes of the variables' values; None where that cannot be compiled, or not for one place.

    Args:
        init: of an Optax transformation.
        variables: a nest of variables.
        cut: whether large arrays are cut, a part for each replica (see `_collectives.sharding`).
    """
    flat = nest.values(variables)
    if type(frames.frame()) is not frames.GlobalFrame or frames.is_tracing() or creators.state.creators:
        return None
    for variable in flat:
        if variable._late is not False:
            deferred_restore.settle(variable)
    with frames.lock:
        place = _place(flat)
        if place is None:
            return None
        device, mesh = place
        # Unlike `value()`, this does not lend the arrays: the program keeps none of them.
        values = nest.map_values(lambda v: v._of_leaves(v._storage.read()), variables)
        with jax.default_device(device):
            program = state = None
            with contextlib.suppress(Exception):  # it needs concrete values, or fails on these too and says why
                program, state = jax.make_jaxpr(init, return_shape=True)(values)
            if not _everyones(program, mesh):
                return None
            kinds, tree = jax.tree.flatten(state)
            kinds = [jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in kinds]
            arrays = _run(program, jax.tree.leaves(values), kinds, mesh, cut) if kinds else []
    return Made(arrays, kinds, tree)


def _place(variables: list[Any]) -> tuple[jax.Device, ReplicaMesh | None] | None:
    """The one device that all variables lie on, or the devices of the mesh that have copies of them all."""
    mesh = variables[0]._mesh
    if all(isinstance(v, MirroredVariable) and v._mesh is mesh and not v._storage.is_split for v in variables):
        return mesh.local_devices[0], mesh
    if not all(type(v) is ResourceVariable and v._parent is None for v in variables):
        return None
    leaves = [leaf for v in variables for leaf in v._storage.read()]
    devices = {device for leaf in leaves for device in leaf.devices()}
    return (devices.pop(), None) if len(devices) == 1 and not any(leaf.committed for leaf in leaves) else None


def _everyones(program: Any, mesh: ReplicaMesh | None) -> bool:
    """Whether there is a program, and every worker has the same one, so that their states begin alike."""
    if mesh is None or mesh.all_local:
        return program is not None
    text = ""  # all workers compare, also one that has none
    with contextlib.suppress(Exception):  # constants that have no bytes
        text = f"{program}\n" + "\n".join(hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for x in program.consts)
    return cross_process.is_everyones(mesh, f"initial state\n{text}", alike=True) and text != ""


def _run(program: Any, leaves: list[Any], kinds: list[Any], mesh: ReplicaMesh | None, cut: bool) -> list[jax.Array]:
    if mesh is None:
        return jax.jit(_firm(program, kinds))(leaves)
    rows = [cut and sharding.is_cut(kind, mesh.size) for kind in kinds]
    state = _firm(program, kinds)

    def arrays(leaves: list[Any]) -> list[Any]:
        return [sharding.as_rows(x, mesh.size) if is_cut else x for x, is_cut in zip(state(leaves), rows)]

    whole = jax.jit(arrays, out_shardings=[mesh.stacked if is_cut else mesh.mirrored for is_cut in rows])
    if mesh.all_local:
        return whole(leaves)
    with in_flight.calling(mesh, "initial state") as call:
        call.compile(whole, leaves)
        made = whole(leaves)
        call.output = made[0]
    return made


def _firm(program: Any, kinds: list[Any]) -> Callable[[list[Any]], list[Any]]:
    """The program, whose results are of firm types, also where they are Python numbers."""

    def firm(leaf: Any, kind: Any) -> Any:
        is_key = jax.dtypes.issubdtype(kind.dtype, jax.dtypes.extended)
        return leaf if is_key else jnp.asarray(leaf).astype(kind.dtype)

    def state(leaves: list[Any]) -> list[Any]:
        return [firm(leaf, kind) for leaf, kind in zip(jex.jaxpr_as_fun(program)(*leaves), kinds)]

    return state
