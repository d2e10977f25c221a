"""Variables of one copy, an array on one device: ordinary ones, and single components of distributed ones."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from replicax._base.indexed_slices import IndexedSlices
from replicax._base.types import Leaf, Tree
from replicax._collectives import arithmetic
from replicax._tracing import context, frames
from replicax._values import AXIS
from replicax._variables.homes import OneDevice
from replicax._variables.leaves import SCATTER
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
    """A variable that has one copy, or one replica's component of a distributed variable, its parent."""

    _parent: Variable | None = None
    _index = 0

    @classmethod
    def component(cls, parent: Variable, index: int) -> ResourceVariable:
        """Return a local replica's component of a distributed variable."""
        self = cls.__new__(cls)
        for name in ("_synchronization", "_aggregation", "_trainable", "_constraint"):
            setattr(self, name, getattr(parent, name))
        self._parent, self._index = parent, index
        self._name = parent.name.removesuffix(":0") + (f"/replica_{index}" if index else "")
        self._signature = dataclasses.replace(parent._signature, name=self.name)
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Variable:
        if self._parent is None:
            return super().__deepcopy__(memo)
        memo[id(self)] = clone = type(self).component(self._parent, self._index)
        return clone

    def _get(self) -> Leaves:
        frame = frames.frame()
        return frame.read(self) if self._parent is None else frame.read_component(self._parent, self._index)

    def _put(self, leaves: Leaves) -> None:
        frame = frames.frame()
        if self._parent is None:
            return frame.write(self, leaves)
        frame.write_component(self._parent, self._index, leaves)

    def _device(self) -> jax.Device | str:
        mesh = None if self._parent is None else self._parent._mesh
        return super()._device() if mesh is None else mesh.local_devices[self._index]

    def _new_storage(self, leaves: Leaves, lent: bool) -> Storage:
        return ArrayStorage(self.name, self._types, leaves, lent)

    def _read(self) -> Leaves:
        if self._parent is None:
            frames.frame().lend(self)
        return self._get()

    def _update(self, method: str, value: Tree, read_value: bool) -> Tree:
        argument = self._signature.convert(method, value)
        if level := self._sharing_level():
            argument = self._join_arguments(level, method, argument)
        new = self._write(method, argument)
        return self._signature.unflatten(new) if read_value else None

    def _sharing_level(self) -> frames.TraceFrame | None:
        """Return the level of the compiled replicas that share this variable and assign to it, None elsewhere."""
        frame = frames.frame()
        if not isinstance(frame, frames.TraceFrame) or not frame.local or self._parent is not None:
            return None
        return None if context.in_cross_replica_context() else frame

    def _join_arguments(self, level: frames.TraceFrame, method: str, argument: list[Leaf]) -> list[Leaf]:
        """Return the argument that does what the process's replicas do in turn, each with its argument.

        Each replica would read what the replicas before it have assigned, but in a program they compute side by side.
        Where that makes a difference, it is refused at the end of tracing (`_control_flow.check_shared`), except in
        branches and loops.
        """
        assert level.mesh is not None
        groups = level.mesh.groups
        if method in SCATTER:
            (rows,) = argument
            arrays = [rows.indices, rows.values]
            level.shared.append((self, method, arrays))
            indices, values = (arithmetic.local_gather(x, 0, groups) for x in arrays)
            return [IndexedSlices(values, indices)]
        level.shared.append((self, method, argument))
        if method == "assign":  # the last replica's value stays
            lasts = [group[-1] for group in groups] if groups else [lax.axis_size(AXIS) - 1]
            is_last = jnp.isin(lax.axis_index(AXIS), jnp.array(lasts))
            argument = [jnp.where(is_last, leaf, jnp.zeros_like(leaf)) for leaf in argument]
        return [arithmetic.local_sum(leaf, groups) for leaf in argument]
