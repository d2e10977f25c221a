"""The state that an optimizer begins with, made where it stays.

The transformation's `init` is compiled, so that each device fills in its copies or parts at once: no device holds the
whole of a state that is cut, and no buffer is anybody else's, so that the first step may take all of them over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from replicax import _creation, _late, _levels, _nest, _shards
from replicax._distributed_variables import MirroredVariable
from replicax._values import ReplicaMesh
from replicax._variables import ResourceVariable


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
        cut: whether large arrays are cut, a part for each replica (see `_shards`).
    """
    flat = [leaf for leaf in _nest.leaves(variables) if leaf is not None]
    if type(_levels.frame()) is not _levels.Frame or _levels.is_tracing() or _creation.state.creators:
        return None
    for variable in flat:
        if variable._late is not False:
            _late.settle(variable)
    with _levels.lock:
        place = _place(flat)
        if place is None:
            return None
        device, mesh = place
        # Unlike `value()`, this does not lend the arrays: the program keeps none of them.
        values = _nest.map_structure(lambda v: v if v is None else v._of_leaves(v._read_global()), variables)
        with jax.default_device(device):
            try:
                program, state = jax.make_jaxpr(init, return_shape=True)(values)
            except Exception:  # it needs concrete values, or fails on these too, with the right message
                return None
            kinds, tree = jax.tree.flatten(state)
            kinds = [jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in kinds]
            arrays = _run(program, jax.tree.leaves(values), kinds, mesh, cut) if kinds else []
    return Made(arrays, kinds, tree)


def _place(variables: list[Any]) -> tuple[jax.Device, ReplicaMesh | None] | None:
    """The one device that all variables lie on, or the devices of the mesh that have copies of them all."""
    mesh = variables[0]._mesh
    if all(isinstance(v, MirroredVariable) and v._mesh is mesh and v._layouts is None for v in variables):
        return (mesh.local_devices[0], mesh) if mesh.all_local else None
    if not all(type(v) is ResourceVariable and v._parent is None for v in variables):
        return None
    leaves = [leaf for v in variables for leaf in v._read_global()]
    devices = {device for leaf in leaves for device in leaf.devices()}
    return (devices.pop(), None) if len(devices) == 1 and not any(leaf.committed for leaf in leaves) else None


def _run(program: Any, leaves: list[Any], kinds: list[Any], mesh: ReplicaMesh | None, cut: bool) -> list[jax.Array]:
    if mesh is None:
        return jax.jit(_firm(program, kinds))(leaves)
    rows = [cut and _shards.is_cut(kind, mesh.size) for kind in kinds]
    state = _firm(program, kinds)

    def arrays(leaves: list[Any]) -> list[Any]:
        return [_shards.as_rows(x, mesh.size) if is_cut else x for x, is_cut in zip(state(leaves), rows)]

    return jax.jit(arrays, out_shardings=[mesh.stacked if is_cut else mesh.mirrored for is_cut in rows])(leaves)


def _firm(program: Any, kinds: list[Any]) -> Callable[[list[Any]], list[Any]]:
    """The program, whose results are of firm types, also where they are Python numbers."""

    def firm(leaf: Any, kind: Any) -> Any:
        is_key = jax.dtypes.issubdtype(kind.dtype, jax.dtypes.extended)
        return leaf if is_key else jnp.asarray(leaf).astype(kind.dtype)

    def state(leaves: list[Any]) -> list[Any]:
        return [firm(leaf, kind) for leaf, kind in zip(jex.jaxpr_as_fun(program)(*leaves), kinds)]

    return state
