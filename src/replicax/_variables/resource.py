"""Variables of one copy, an array on one device: ordinary ones, and single components of distributed ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from replicax._base.indexed_slices import IndexedSlices
from replicax._base.types import Tree
from replicax._collectives import arithmetic
from replicax._tracing import context, frames
from replicax._values import AXIS, Mirrored, PerReplica
from replicax._variables.combine import COMBINE
from replicax._variables.homes import OneDevice
from replicax._variables.storage import Leaves, Storage, Types
from replicax._variables.variable import Variable


class ArrayStorage(Storage):
    """The arrays of a variable that has one copy."""

    def __init__(self, name: str, types: Types, leaves: Leaves, lent: bool):
        super().__init__(name, OneDevice(types), leaves, lent)

    def stay_on(self, device: jax.Device, arrays: Leaves) -> None:
        """Keep these arrays in place of those so far, and all later ones, on this device."""
        self.home, self.arrays = OneDevice(self.types, device), arrays


class ResourceVariable(Variable):
    """A variable that has one copy: an ordinary one, or one component of a distributed one."""

    _parent: Variable | None = None
    _index = 0

    @classmethod
    def _component(cls, parent: Variable, index: int) -> ResourceVariable:
        self = cls.__new__(cls)
        for attribute in ("_synchronization", "_aggregation", "_trainable", "_constraint", "_treedef", "_types"):
            setattr(self, attribute, getattr(parent, attribute))
        self._parent, self._index = parent, index
        self._name = parent._name + (f"/replica_{index}" if index else "")
        return self

    def _new_storage(self, leaves: Leaves, lent: bool) -> Storage:
        return ArrayStorage(self.name, self._types, leaves, lent)

    def __deepcopy__(self, memo: dict[int, object]) -> Variable:
        if self._parent is None:
            return super().__deepcopy__(memo)
        clone = type(self)._component(self._parent, self._index)
        memo[id(self)] = clone
        return clone

    def _get(self) -> Leaves:
        if self._parent is None:
            return super()._get()
        return frames.frame().read_component(self._parent, self._index)

    def _put(self, leaves: Leaves) -> None:
        if self._parent is None:
            return super()._put(leaves)
        frames.frame().write_component(self._parent, self._index, leaves)

    def _read(self) -> Leaves:
        if self._parent is None:
            frames.frame().lend(self)
        return self._get()

    def _device(self) -> jax.Device | str:
        if self._parent is None or self._parent._mesh is None:
            return super()._device()
        return self._parent._mesh.local_devices[self._index]

    def _update(self, method: str, value: Tree, read_value: bool) -> Tree:
        if isinstance(value, Variable):
            value = value.value()
        if isinstance(value, (PerReplica, Mirrored)):
            raise TypeError(f"{self.name} takes one value, got a {type(value).__name__} value.")
        leaves = self._as_leaves(value)
        with frames.lock:
            level = self._level_of_sharing_replicas()
            leaves = self._in_turn(level, method, leaves) if level else self._combined(method, leaves)
            self._put(leaves)
        return self._of_leaves(leaves) if read_value else None

    def _level_of_sharing_replicas(self) -> frames.TraceFrame | None:
        """Returns the level of the compiled replicas that share this variable and assign to it, None elsewhere."""
        frame = frames.frame()
        if not isinstance(frame, frames.TraceFrame) or not frame.local or self._parent is not None:
            return None
        return None if context.in_cross_replica_context() else frame

    def _in_turn(self, level: frames.TraceFrame, method: str, leaves: Leaves) -> Leaves:
        """Returns what the assignments of the process's replicas come to, in compiled code, one after the other.

        Each would see what those before it have assigned, which replicas that compute side by side do not: where that
        makes a difference it is refused when all is traced (`_control_flow.check_shared`), but for branches and loops.
        """
        assert level.mesh is not None
        level.shared.append((self, method, leaves))
        old = self._get()
        zero = [jnp.zeros_like(leaf) for leaf in old]
        groups = level.mesh.groups
        if method == "assign":  # the last replica's value stays
            lasts = [group[-1] for group in groups] if groups else [lax.axis_size(AXIS) - 1]
            last = jnp.isin(lax.axis_index(AXIS), jnp.array(lasts))
            return [arithmetic.local_sum(jnp.where(last, leaf, z), groups) for leaf, z in zip(leaves, zero)]
        return [x + arithmetic.local_sum(COMBINE[method](z, leaf), groups) for x, z, leaf in zip(old, zero, leaves)]

    def _update_slices(self, method: str, slices: IndexedSlices) -> Tree:
        if level := self._level_of_sharing_replicas():
            assert level.mesh is not None
            own = [slices.indices, slices.values]
            level.shared.append((self, method, own))
            indices, values = (arithmetic.local_gather(x, 0, level.mesh.groups) for x in own)
            slices = IndexedSlices(values, indices)
        return self._scatter_here(method, slices)
